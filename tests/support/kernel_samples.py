"""Test inputs of every registered operation: odd sizes, none at all, strided, and the edges of its arguments.

Letters as in the operation's file.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.config.swiglu import SwiGLU
from titan_moe.kernels.attention.max_logits import Pairs
from titan_moe.kernels.clones.plan import plan_clones_reference
from titan_moe.kernels.loss.cross_entropy import IGNORE_LABEL
from titan_moe.kernels.optim.accumulate import BLOCK
from titan_moe.kernels.optim.adamw import Rule, Shard
from titan_moe.kernels.optim.adamw_8bit import Shard8
from titan_moe.kernels.optim.moments_8bit import NEAREST, quantize_reference
from titan_moe.kernels.optim.muon import Decay, Momentum
from titan_moe.kernels.optim.stochastic_rounding import QUARTER
from titan_moe.kernels.permute.rows import plan_slots
from titan_moe.kernels.registry import Output, Sample
from titan_moe.kernels.router.routing import Routing, RoutingRule

FP32, BF16 = (torch.float32,), (torch.bfloat16,)
Select = Callable[[Tensor, tuple[Any, ...]], Tensor]
"""A tensor and the arguments of its operation -> the part of the tensor that the operation defines."""


def as_tuple(output: Output) -> tuple[Tensor, ...]:
    """An operation's outputs as a tuple."""
    return output if isinstance(output, tuple) else (output,)


class Samples(NamedTuple):
    """How an operation's test inputs are drawn, and what of its results must agree with the reference."""

    draw: Callable[[torch.device, torch.dtype], list[Sample]]
    dtypes: tuple[torch.dtype, ...] = FP32 + BF16
    valid: Select | None = None
    """Defined part of the output: slots past the last one are never written. None selects all; an operation with
    several outputs must define all of them."""
    valid_grad: Select | None = None
    """The same of the first input's gradient."""
    outputs: Callable[[Any], tuple[Tensor, ...]] = as_tuple
    """What of the outputs is compared, in a form in which equal results are equal."""
    tolerance: float | None = None
    """The largest error beside the size of the result, of an operation that rounds by itself; None: by the dtype."""


def strided(*tensors: Tensor) -> list[Tensor]:
    """The same values, with a gap behind each in memory."""
    return [torch.stack([x, x], dim=-1)[..., 0] for x in tensors]


def sample_plans(device: torch.device) -> list[tuple[str, Tensor, Tensor, Tensor, int]]:
    """Name, rows_R, slots_SK, offsets_e and e: random, skewed, an empty expert, missing assignments, no rows."""
    num_experts, top_k = 5, 3
    plans = []
    for name, num_rows in (("random", 17), ("skewed", 17), ("empty_expert", 17), ("padded", 17), ("no_rows", 0)):
        scores_SE = torch.rand(num_rows, num_experts, device=device)
        if name == "skewed":
            scores_SE[:, 1] += 1
        if name == "empty_expert":
            scores_SE[:, 2] -= 1
        ids_SK = scores_SE.topk(top_k).indices
        if name == "padded":
            ids_SK = torch.where(torch.rand_like(scores_SE[:, :top_k]) < 0.4, -1, ids_SK)
        plans.append((name, *plan_slots(ids_SK, num_experts, ids_SK.numel())[:3], num_experts))
    return plans


def assigned_slots(x_R: Tensor, args: tuple[Any, ...]) -> Tensor:
    return x_R[: int((args[2] >= 0).sum())]


def slots_of_experts(x_R: Tensor, args: tuple[Any, ...]) -> Tensor:
    return x_R[: int(args[3][-1])]


def rows(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    return [
        Sample(name, (torch.randn(slots.shape[0], 16, device=device, dtype=dtype), rows, slots), 1)
        for name, rows, slots, _, _ in sample_plans(device)
    ]


def slots(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    return [
        Sample(name, (torch.randn(rows.numel(), 16, device=device, dtype=dtype), rows, slots), 1)
        for name, rows, slots, _, _ in sample_plans(device)
    ]


def scores(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    return [
        Sample(name, (torch.rand(slots.shape, device=device, dtype=dtype), slots, rows.numel()), 1)
        for name, rows, slots, _, _ in sample_plans(device)
    ]


def assignments(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    def drawn(name: str, num_rows: int, num_experts: int, num_slots: int, absent: float = 0.0) -> Sample:
        ids_SK = torch.rand(num_rows, num_experts, device=device).topk(3).indices
        ids_SK = torch.where(torch.rand(num_rows, 3, device=device) < absent, -1, ids_SK)
        return Sample(name, (torch.rand(num_rows, 3, device=device), ids_SK, num_experts, num_slots), 1)

    plain = drawn("random", 17, 5, 51)
    scores_SK, ids_SK, *sizes = plain.args
    return [
        plain,
        drawn("two blocks", 180, 20, 540),
        drawn("more slots than assignments", 17, 5, 60, 0.4),
        drawn("fewer slots than assignments", 17, 5, 20, 0.2),
        drawn("no rows", 0, 5, 0),
        Sample("strided", (*strided(scores_SK, ids_SK), *sizes), 1),
    ]


def loads_of_ranks(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    def drawn(name: str, num_ranks: int, num_experts: int, num_replicas: int, hottest: int, cost: int = 0) -> Sample:
        counts_PE = torch.randint(0, 9, (num_ranks, num_experts), device=device, dtype=torch.int32)
        counts_PE[:, :2] += hottest
        return Sample(name, (counts_PE, num_replicas, num_ranks - 1, cost), 0)

    return [
        drawn("two ranks", 2, 6, 1, 50),
        drawn("three", 3, 6, 2, 9),
        drawn("even", 4, 8, 1, 0),
        drawn("one", 1, 4, 1, 9),
        drawn("a clone that does not pay", 2, 6, 1, 9, 40),
    ]


def reassignments(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    samples = []
    for name, num_tokens, num_replicas in (("random", 65, 1), ("two blocks", 700, 2), ("no tokens", 0, 1)):
        ids_TK = torch.rand(num_tokens, 6, device=device).topk(2).indices
        ids_TK[::3, 0] = -1
        ids_TK[1::2, 1] = 4
        _, slots_TK, offsets_E, _ = plan_slots(ids_TK, 6, ids_TK.numel())
        others_PE = torch.tensor([[1, 1, 1, 1, 40, 2], [2, 2, 2, 2, 30, 1]], device=device, dtype=torch.int32)
        counts_PE = torch.cat([others_PE, offsets_E.diff(prepend=offsets_E.new_zeros(1))[None]])
        plan = plan_clones_reference(counts_PE, num_replicas, 2)
        samples.append(Sample(name, (ids_TK, slots_TK, offsets_E, *plan), 0))
    ids_TK, slots_TK, *rest = samples[0].args
    return [*samples, Sample("strided", (*strided(ids_TK, slots_TK), *rest), 0)]


def expert_mlp(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    samples = []
    for name, rows_R, slots_SK, offsets_e, num_experts in sample_plans(device):
        x_SD = torch.randn(slots_SK.shape[0], 64, device=device, dtype=dtype)
        scores_SK = torch.rand(slots_SK.shape, device=device)
        gate_up = torch.randn(num_experts, 2, 40, 64, device=device, dtype=dtype) / 8
        down = torch.randn(num_experts, 64, 40, device=device, dtype=dtype) / 6
        samples.append(Sample(name, (x_SD, scores_SK, gate_up, down, rows_R, slots_SK, offsets_e), 4))
    first = samples[0].args
    return [*samples, Sample("strided", (*strided(*first[:4]), *first[4:]), 4)]


def grouped_mm(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    samples = []
    for name, rows, _, offsets_e, num_experts in sample_plans(device):
        x_RI = torch.randn(rows.numel(), 16, device=device, dtype=dtype)
        x_RI[int(offsets_e[-1]) :] = float("nan")
        weight_eOI = torch.randn(num_experts, 24, 16, device=device, dtype=dtype)
        samples.append(Sample(name, (x_RI, weight_eOI, None, offsets_e), 2))
    return samples


def without_formats(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """Emulated GEMMs that round nothing; rounding has no reference with gradients."""
    samples = grouped_mm(device, dtype)
    return [replace(sample, args=(*sample.args, "compute", "compute", "compute")) for sample in samples]


def matrices_without_formats(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    samples = []
    for num_tokens in (0, 13):
        x_TI, weight_OI = (torch.randn(rows, 16, device=device, dtype=dtype) for rows in (num_tokens, 24))
        samples.append(Sample(str(num_tokens), (x_TI, weight_OI, "compute", "compute", "compute"), 2))
    return samples


def matrices_in_sixteens(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """Sizes that matrix units for fp8 take."""

    def sample(name: str, *shape: int) -> Sample:
        x, weight_OI = torch.randn(shape, device=device, dtype=dtype), torch.randn(144, shape[-1], device=device)
        return Sample(name, (x, weight_OI.to(dtype)), 2)

    x, weight_OI = sample("strided", 32, 80).args[:2]
    return [
        sample("sequences", 3, 16, 80),
        sample("rows", 176, 336),
        sample("one_tile", 16, 16),
        sample("none", 0, 80),
        Sample("strided", tuple(strided(x, weight_OI)), 2),
    ]


def matrices_in_blocks(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """Widths of whole blocks of 128, and any number of tokens."""

    def sample(name: str, outputs: int, *shape: int) -> Sample:
        x, weight_OI = torch.randn(shape, device=device, dtype=dtype), torch.randn(outputs, shape[-1], device=device)
        return Sample(name, (x, weight_OI.to(dtype)), 2)

    x, weight_OI = sample("strided", 128, 130, 256).args[:2]
    return [
        sample("sequences", 384, 3, 47, 256),
        sample("one_tile", 128, 128, 128),
        sample("one_token", 256, 1, 128),
        sample("none", 256, 0, 128),
        Sample("strided", tuple(strided(x, weight_OI)), 2),
    ]


def rounded(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """Each way to find scales: of blocks, of lines, of matrices, of both; along rows and along columns."""

    def draw(*shape: int) -> Tensor:
        powers = torch.randint(-9, 9, shape, device=device)
        return (torch.randn(shape, device=device) * torch.exp2(powers)).to(dtype)

    samples = []
    for dim, format in product((-1, -2), ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4")):
        role = "gradient" if dim == -1 else "weight"
        samples.append(Sample(f"{format} along {dim}", (draw(33, 150), format, role, dim), 0))
    amax_nMN = torch.full((3, 1, 1), 9000.0, device=device)
    several = draw(3, 40, 20)
    return [
        *samples,
        Sample("transformed", (several, "nvfp4", "gradient", -2, amax_nMN, False, True), 0),
        Sample("merged", (several, "fp8_tensorwise", "activation", -2, amax_nMN, True), 0),
        Sample("strided", (*strided(draw(40, 20)), "nvfp4", "activation", -2), 0),
        Sample("none", (draw(0, 20), "nvfp4", "gradient", -1), 0),
    ]


def biases(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    samples = []
    for name, rows_R, _, offsets_e, num_experts in sample_plans(device):
        y_RO = torch.randn(rows_R.numel(), 24, device=device, dtype=dtype)
        y_RO[int(offsets_e[-1]) :] = float("nan")
        bias_eO = torch.randn(num_experts, 24, device=device, dtype=dtype)
        samples.append(Sample(name, (y_RO, bias_eO, torch.rand(rows_R.numel(), device=device), offsets_e), 3))
    return samples


def swiglu(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    tensors = torch.randn(33, 32, device=device, dtype=dtype), torch.rand(33, device=device)
    return [Sample("random", tensors, 2), Sample("clamped", (*tensors, SwiGLU(0.7, 1.702, 1.0)), 2)]


def swiglu_down(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    def sample(name: str, *sizes: int) -> Sample:
        hidden = torch.randn(*sizes, 80, device=device, dtype=dtype)
        return Sample(name, (hidden, torch.randn(24, 40, device=device, dtype=dtype) / 6), 2)

    return [sample("sequences", 3, 11), sample("rows", 33), sample("none", 0)]


def logits(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    draw = partial(torch.randn, device=device, dtype=dtype)
    return [
        Sample("sequences", (draw(2, 19, 16), draw(8, 16)), 2),
        Sample("no_rows", (draw(0, 16), draw(8, 16)), 2),
        Sample("bias", (draw(2, 19, 16), draw(8, 16), draw(8)), 3),
        Sample("strided", (*strided(draw(7, 16)), draw(8, 16)), 2),
    ]


def routing(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    def sample(name: str, shape: tuple[int, int, int], rule: RoutingRule, given: str = "") -> Sample:
        logits_BNE = torch.randn(shape, device=device)
        bias_E = torch.randn(shape[2], device=device) / 10 if rule.score_fn == "sigmoid" else logits_BNE.new_zeros(())
        ids_BNK = torch.rand_like(logits_BNE).topk(rule.top_k).indices
        kept_ids_BNK = ids_BNK.int().where(torch.rand_like(logits_BNE[..., :1]) < 0.5, -1)  # of some tokens
        ids = {"": (), "forced": (ids_BNK,), "kept": (None, kept_ids_BNK)}[given]
        return Sample(name, (logits_BNE, bias_E.expand(shape[2]), rule, *ids), 1)

    softmax, sigmoid = RoutingRule("softmax", 2), RoutingRule("sigmoid", 3, route_scale=2.5)
    in_groups = sigmoid._replace(num_groups=4, top_k_groups=2)
    samples = [
        sample("softmax", (2, 19, 5), softmax),
        sample("qwen3", (1, 21, 128), softmax._replace(top_k=8)),
        sample("sigmoid_not_normalised", (2, 7, 12), sigmoid._replace(normalize_topk=False)),
        sample("groups_by_two", (2, 19, 12), in_groups),
        sample("groups_by_max", (2, 19, 12), in_groups._replace(group_score="max")),
        sample("deepseek_v3", (1, 6, 256), in_groups._replace(top_k=8, num_groups=8, top_k_groups=4)),
        sample("by_score", (2, 19, 12), sigmoid._replace(counts_by_score=True)),
        sample("groups_by_score", (2, 19, 20), in_groups._replace(counts_by_score=True)),
        sample("every_expert", (2, 3, 4), softmax._replace(top_k=4)),
        sample("forced", (2, 19, 5), softmax, "forced"),
        sample("kept", (2, 19, 5), softmax._replace(counts_by_score=True), "kept"),
        sample("kept_groups", (2, 19, 20), in_groups, "kept"),
        sample("one_token", (1, 1, 5), softmax),
        sample("no_token", (2, 0, 5), softmax),
    ]
    logits_BNE, *rest = samples[0].args
    return [*samples, Sample("strided", (logits_BNE.transpose(0, 1).contiguous().transpose(0, 1), *rest), 1)]


def heads_of_latents(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """Both projections and the shared part of keys; the tables are scaled by 1.2."""

    def sample(name: str, *shape: int, keys: int = 0, is_interleaved: bool = True) -> Sample:
        batch, length, num_heads, nope_dim, rope_dim, v_dim = shape
        keys = keys or length
        sizes = (length, num_heads * (nope_dim + rope_dim)), (keys, num_heads * (nope_dim + v_dim)), (keys, 1, rope_dim)
        leaves = [torch.randn(batch, *size, device=device, dtype=dtype) for size in sizes]
        angles_NP = torch.rand(length, rope_dim // 2, device=device) * 6
        return Sample(name, (*leaves, 1.2 * angles_NP.cos(), 1.2 * angles_NP.sin(), nope_dim, v_dim, is_interleaved), 3)

    first = sample("odd", 2, 5, 3, 6, 10, 7)
    return [
        first,
        sample("halves", 2, 5, 9, 12, 6, 20, is_interleaved=False),
        sample("more_keys", 1, 3, 4, 16, 8, 16, keys=11),
        sample("many_tiles", 2, 17, 18, 128, 64, 128),
        sample("no_sequence", 0, 5, 2, 8, 8, 8),
        Sample("strided", (*strided(*first.args[:3]), *first.args[3:]), 3),
    ]


def pairs_of_heads(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """Queries and keys, their scale and which pairs are visible."""

    def sample(name: str, shape: tuple[int, ...], keys: int = 0, **limits: Any) -> Sample:
        batch, length, num_heads, shared, width = shape
        sizes = (length, num_heads, width), (keys or length, num_heads // shared, width)
        q, k = (torch.randn(batch, *size, device=device, dtype=dtype) for size in sizes)
        return Sample(name, (q, k, 0.3, Pairs(**limits)), 0)

    documents_BN = torch.tensor([[0] * 20 + [1] * 33, [0] * 40 + [1] * 13], device=device)
    places_Q = torch.tensor([*range(5, 15), *range(43, 53)], device=device)
    first = sample("odd", (2, 53, 9, 3, 6))
    return [
        first,
        sample("widths_of_mla", (1, 37, 2, 1, 192)),
        sample("window", (1, 53, 3, 1, 24), window=7),
        sample("chunks", (1, 53, 3, 1, 40), chunk=9),
        sample("own_queries_of_documents", (2, 20, 4, 2, 16), 53, positions_Q=places_Q, document_ids_BN=documents_BN),
        sample("all_pairs", (1, 10, 2, 2, 16), 40, is_causal=False),
        sample("no_sequence", (0, 5, 2, 1, 8)),
        Sample("strided", (*strided(*first.args[:2]), *first.args[2:]), 0),
    ]


def heads(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """Queries, keys and values; the tables are scaled by 1.2, as YaRN scales them."""

    def sample(name: str, *shape: int, norms: bool = True, is_interleaved: bool = False, rotated: int = 0) -> Sample:
        batch, length, num_heads, num_kv_heads, head_dim = shape
        qkv_BNX = torch.randn(batch, length, (num_heads + 2 * num_kv_heads) * head_dim, device=device, dtype=dtype)
        weights = [1 + torch.randn(head_dim, device=device, dtype=dtype) / 8 if norms else None for _ in range(2)]
        num_pairs = (rotated or head_dim) // 2
        frequencies_R = 100.0 ** (-torch.arange(num_pairs, device=device) / num_pairs)
        angles_NR = torch.arange(length, device=device)[:, None] * frequencies_R
        tables = (1.2 * angles_NR.cos(), 1.2 * angles_NR.sin())
        args = (qkv_BNX, *weights, *tables, num_kv_heads, head_dim, 1e-6, is_interleaved)
        return Sample(name, args, 3 if norms else 1)

    qkv_BNX, q_weight_D, k_weight_D, *rest = sample("", 2, 5, 4, 2, 10).args
    among_others = torch.cat([qkv_BNX, qkv_BNX], dim=-1)[..., : qkv_BNX.shape[-1]]
    weights = torch.stack([q_weight_D, k_weight_D], dim=1).unbind(1)
    return [
        sample("odd_number_of_pairs", 2, 5, 4, 2, 10),
        Sample("strided", (among_others, *weights, *rest), 3),
        sample("neighbours", 2, 7, 3, 3, 96, is_interleaved=True),
        sample("one_head_for_all", 1, 11, 3, 1, 96),
        sample("a_share_of_a_head", 2, 7, 3, 1, 26, rotated=10),
        sample("neighbours_in_a_share", 2, 5, 3, 1, 12, is_interleaved=True, rotated=4),
        sample("half_of_a_head_without_norm", 2, 9, 4, 2, 128, norms=False, rotated=64),
        sample("many_tiles", 2, 33, 4, 2, 128),
        sample("one_token", 1, 1, 4, 2, 64),
        sample("no_sequence", 0, 5, 4, 2, 8, norms=False),
        sample("no_norm", 2, 5, 4, 2, 12, norms=False, is_interleaved=True),
    ]


def sample_labels(num_words: int, num_tokens: int, device: torch.device) -> list[tuple[str, Tensor, int]]:
    """Name, labels and chunk_tokens: some or all labels ignored, a short last chunk, one chunk for all."""
    labels_T = torch.randint(num_words, (num_tokens,), device=device)
    some_T = labels_T.masked_fill(torch.rand(num_tokens, device=device) < 0.3, IGNORE_LABEL)
    return [
        ("all", labels_T, 16),
        ("some_ignored", some_T, 16),
        ("all_ignored", torch.full_like(labels_T, IGNORE_LABEL), 16),
        ("one_chunk", some_T, 64),
    ]


def labels(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    x_TD = torch.randn(37, 16, device=device, dtype=dtype)
    weight_VD = torch.randn(50, 16, device=device, dtype=dtype)
    return [Sample(name, (x_TD, weight_VD, labels, chunk), 2) for name, labels, chunk in sample_labels(50, 37, device)]


def labels_of_fused_loss(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    def draw(num_words: int, num_tokens: int, steepness: float = 1.0) -> tuple[Tensor, Tensor]:
        x_TD = torch.randn(num_tokens, 16, device=device, dtype=dtype) * steepness
        return x_TD, torch.randn(num_words, 16, device=device, dtype=dtype)

    def labels(num_words: int, num_tokens: int) -> Tensor:
        return torch.randint(num_words, (num_tokens,), device=device)

    return [
        *(Sample(name, (*draw(50, 37), *rest), 2) for name, *rest in sample_labels(50, 37, device)),
        Sample("all_at_once", (*draw(50, 37), labels(50, 37), 0), 2),
        Sample("no_tokens", (*draw(50, 0), labels(50, 0), 16), 2),
        Sample("many_words", (*draw(2 * 16_384 + 5, 3), labels(2 * 16_384 + 5, 3), 2), 2),
        Sample("steep", (*draw(50, 37, steepness=12.0), labels(50, 37), 16), 2),
        Sample("strided", (*strided(*draw(50, 37), labels(50, 37)), 16), 2),
    ]


def logits_in_parts(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """Parts of equal and of other sizes, a part of two blocks, labels in every part and none."""

    def sample(name: str, num_words: int, num_tokens: int, num_parts: int, *, steepness: float = 3.0) -> Sample:
        logits_CW = torch.randn(num_tokens, num_words, device=device, dtype=dtype) * steepness
        labels_C = torch.randint(num_words, (num_tokens,), device=device)
        labels_C[1::3] = IGNORE_LABEL
        return Sample(name, (logits_CW, labels_C, num_parts), 0)

    last = sample("loss_alone", 40, 5, 4)
    return [
        sample("two", 50, 37, 2),
        sample("four", 64, 9, 4),
        sample("three_of_other_sizes", 50, 9, 3),
        sample("one", 40, 5, 1),
        sample("steep", 48, 9, 4, steepness=60.0),
        sample("no_tokens", 40, 0, 2),
        sample("many_words", 2 * 16_384 + 70, 3, 2),
        Sample(last.name, (*last.args, False), 0),
    ]


def totals(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    def sample(name: str, *shape: int, is_first: bool = False) -> Sample:
        total = torch.full(shape, torch.nan, device=device) if is_first else torch.randn(shape, device=device)
        return Sample(name, (total, torch.randn(shape, device=device, dtype=dtype), is_first), 0)

    shapes = {"odd": (3, 5, 7), "empty": (0, 4), "scalar": (), "blocks": (2, BLOCK), "one_more": (BLOCK + 1,)}
    samples = [sample(name, *shape) for name, shape in shapes.items()]
    samples += [sample(f"{name}_first", *shape, is_first=True) for name, shape in shapes.items()]
    for is_first in (False, True):
        total, addend, _ = sample("strided", 33, 5, is_first=is_first).args
        samples.append(Sample(f"strided_{is_first}", (total, addend.reshape(5, 33).T, is_first), 0))
    return samples


def shards(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """With moments of the parameter's dtype, and of bf16."""
    return [sample for moments in dict.fromkeys((dtype, *BF16)) for sample in shards_of(device, dtype, moments)]


def shards_of(device: torch.device, dtype: torch.dtype, moments: torch.dtype) -> list[Sample]:
    """A parameter, its gradient and moments in the middle of a run, and the scalars of a step."""

    def draw(*shape: int) -> tuple[Shard, Rule]:
        tensors = [torch.randn(shape, device=device, dtype=kind) for kind in (dtype, dtype, moments, moments)]
        tensors[3].abs_()
        lr, step, found_inf, grad_factor = (torch.tensor(value, device=device) for value in (0.01, 7.0, 0.0, 0.5))
        return Shard(step, 2**40 + 1, *tensors), Rule(lr, found_inf, grad_factor, 0.9, 0.999, 1e-8, 0.1)

    samples = {"odd": draw(3, 5, 7), "one": draw(1), "empty": draw(0, 4), "blocks": draw(4 * QUARTER + 3)}
    shard, rule = samples["skipped"] = draw(33)
    shard.grad.fill_(torch.nan)
    rule.found_inf.fill_(1.0)
    if dtype == torch.bfloat16:
        shard, rule = draw(35)
        remainder = torch.arange(-17, 18, device=device, dtype=torch.int16)
        samples["split"] = shard._replace(remainder=remainder, grad=shard.grad.float()), rule
    shard, rule = draw(33, 5)
    samples["strided"] = Shard(shard.step, shard.seed, *(tensor.T for tensor in shard[2:6])), rule
    return [Sample(f"{name}, moments {moments}", args, 0) for name, args in samples.items()]


def momenta(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """Stacks of gradients and momenta of both dtypes, with and without Nesterov's step, and a skipped one."""
    samples = []
    for name, shape in {"odd": (3, 5, 7), "empty": (0, 4, 4), "blocks": (2, 64, 33)}.items():
        for buffer in dict.fromkeys((dtype, *BF16)):
            grad, own = torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=buffer)
            no, half = (torch.tensor(value, device=device) for value in (0.0, 0.5))
            for nesterov in (False, True):
                rule = Momentum(no, half, 0.95, nesterov)
                samples.append(Sample(f"{name}, momentum {buffer}, {nesterov}", (grad, own.clone(), rule), 0))
    grad, own = torch.full((1, 3, 5), torch.nan, device=device, dtype=dtype), torch.randn(1, 3, 5, device=device)
    one = torch.ones((), device=device)
    samples.append(Sample("skipped", (grad, own.to(dtype), Momentum(one, one, 0.95, True)), 0))
    samples.append(Sample("strided", (torch.randn(1, 5, 3, device=device, dtype=dtype).mT, own.to(dtype), rule), 0))
    return samples


def steps_of_weights(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """Weights and bf16 updates, also of tall matrices, whose stacks are transposed, and a skipped one."""
    no, one, lr = (torch.tensor(value, device=device) for value in (0.0, 1.0, 0.01))
    samples = []
    for name, shape in {"odd": (3, 5, 7), "empty": (0, 4, 4), "blocks": (2, 64, 33)}.items():
        param = torch.randn(shape, device=device, dtype=dtype)
        update = torch.randn(shape, device=device, dtype=torch.bfloat16)
        samples.append(Sample(name, (param, update, 0.7, Decay(lr, no, 0.1)), 0))
        samples.append(Sample(f"{name} skipped", (param.clone(), update, 0.7, Decay(lr, one, 0.1)), 0))
    tall = torch.randn(2, 7, 5, device=device, dtype=torch.bfloat16).mT
    param, column = torch.randn(2, 5, 7, device=device, dtype=dtype), torch.arange(1.0, 6.0, device=device)[:, None]
    samples.append(Sample("tall", (param.clone(), tall, 0.7, Decay(lr, no, 0.1)), 0))
    samples.append(Sample("column", (param, tall, column, Decay(lr, no, 0.1)), 0))
    if dtype == torch.bfloat16:
        remainder = torch.arange(-35, 35, device=device, dtype=torch.int16).view(2, 5, 7)
        samples.append(Sample("split", (param.clone(), tall, 0.7, Decay(lr, no, 0.1), remainder), 0))
    return samples


def shards_8bit(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """In the middle of a run."""

    def draw(*shape: int) -> Sample:
        first, second = torch.randn(shape, device=device), torch.randn(shape, device=device).square()
        moments = [
            quantize_reference(x, NEAREST, is_signed=is_signed) for x, is_signed in ((first, True), (second, False))
        ]
        lr, step, found_inf, grad_factor = (torch.tensor(value, device=device) for value in (0.01, 7.0, 0.0, 0.5))
        param, grad = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        rule = Rule(lr, found_inf, grad_factor, 0.9, 0.95, 1e-8, 0.1)
        return Sample(f"{shape}", (Shard8(step, 2**40 + 1, param, grad, *moments), rule), 0)

    samples = [draw(*shape) for shape in ((17, 256), (2, 2048), (0, 256))]
    shard, rule = draw(3, 256).args
    shard.grad.fill_(torch.nan)
    rule.found_inf.fill_(1.0)
    return [*samples, Sample("skipped", (shard, rule), 0)]


def flat_routing(routing: Routing) -> tuple[Tensor, ...]:
    """All outputs of a router in one tensor, a token's weights in expert order."""
    scores_BNK, ids_BNK, *others = routing
    shape = (*ids_BNK.shape[:2], routing.counts_BE.shape[1])
    weights_BNE = scores_BNK.new_zeros(shape).scatter(-1, ids_BNK, scores_BNK)
    return (torch.cat([out.flatten().to(scores_BNK.dtype) for out in (weights_BNE, *others)]),)


SAMPLES = {
    "gather_rows": Samples(rows, valid=assigned_slots),
    "sum_slots": Samples(slots, valid_grad=assigned_slots),
    "place_scores": Samples(scores, FP32),
    "counting_sort": Samples(assignments, FP32, outputs=lambda permutation: (permutation.scores_R,)),
    "plan_clones": Samples(loads_of_ranks, FP32),
    "reassign": Samples(reassignments, FP32),
    "fused_expert_mlp": Samples(expert_mlp),
    "grouped_mm": Samples(grouped_mm, valid=slots_of_experts, valid_grad=slots_of_experts),
    "grouped_mm_loop": Samples(
        grouped_mm, (*FP32, torch.float64, *BF16), valid=slots_of_experts, valid_grad=slots_of_experts
    ),
    "emulated_grouped_mm": Samples(
        without_formats, (*FP32, torch.float64, *BF16), valid=slots_of_experts, valid_grad=slots_of_experts
    ),
    "emulated_linear": Samples(matrices_without_formats, (*FP32, torch.float64, *BF16)),
    "round_to_format": Samples(rounded),
    "fp8_linear": Samples(matrices_in_sixteens, tolerance=2**-3),  # each factor by 2^-4; dB: its own tests
    "fp8_block_linear": Samples(matrices_in_blocks, tolerance=2**-3),  # likewise
    "add_bias": Samples(biases, valid=slots_of_experts, valid_grad=slots_of_experts),
    "weighted_swiglu": Samples(swiglu),
    "swiglu_down": Samples(swiglu_down),
    "router_logits": Samples(logits),
    "route_tokens": Samples(routing, FP32, outputs=flat_routing),
    "latent_heads": Samples(heads_of_latents),
    "max_logits": Samples(pairs_of_heads, outputs=lambda logits_H: (logits_H.nan_to_num(neginf=0.0),)),
    "norm_and_rotate": Samples(heads),
    "linear_cross_entropy": Samples(labels),
    "fused_cross_entropy": Samples(labels_of_fused_loss),
    "softmax_over_parts": Samples(logits_in_parts),
    "accumulate": Samples(totals),
    "adamw": Samples(shards),
    "muon_momentum": Samples(momenta),
    "muon_step": Samples(steps_of_weights),
    "adamw_8bit": Samples(shards_8bit),
}
