"""One loss: a tiny model trains the same on every layout.

The reference is one process with the loop GEMM in fp64. Every layout must give its gradients after step 1, its losses
and gradient norms to 1e-9, and its expert counts exactly: one over 20 steps (warm-up and decay), the others over a few.
test_layouts.py has every pair of axes and random samples, test_bugs_of_others.py layouts with a history;
here is what they do not draw.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import clones
from torch import Tensor
from torch._C._distributed_c10d import _get_work_registry_size
from torch._dynamo.utils import counters

from titan_moe.config import Recipe
from titan_moe.config.balance import AuxLosses
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, MemoryConfig, PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.train import DataConfig, OptimConfig, TrainConfig
from titan_moe.data.packing import Batch
from titan_moe.kernels.choose import ROUTE_TOKENS
from titan_moe.kernels.router.routing import Routing, route_tokens_reference
from titan_moe.layers.router import TopKRouter
from titan_moe.parallel.mesh import Meshes
from titan_moe.parallel.pipeline.messages import Messages
from titan_moe.parameters import full_tensor, fused_rows
from titan_moe.training.build import assemble

VOCABULARY, SEQUENCES, TOKENS, STEPS = 32, 8, 8, 20
NUM_MASKED = 5
"""Labels that are missing, of the first sequence of a step."""
SOME, FEW = 8, 2
"""Steps of what differs from a layout that runs them all: beyond the warm-up, and of most."""
NOISE = 0.05
ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, qk_norm=True)
MOE = MoEConfig(
    num_experts=8,
    top_k=2,
    ffn_hidden_size=8,
    shared_ffn_hidden_size=8,
    score_fn="sigmoid",
    aux_loss_coef=1e-2,
    z_loss_coef=1e-3,
    bias_update_speed=1e-2,
)
MODEL = ModelConfig(
    vocab_size=VOCABULARY,
    num_layers=3,
    num_dense_layers=1,
    hidden_size=16,
    ffn_hidden_size=16,
    attention=ATTENTION,
    moe=MOE,
    init_std=0.2,
)
FP64 = PrecisionConfig("fp64", "fp64", "fp64")
COMPILED = CompileConfig("on")
ALONE = ParallelConfig()


def recipe(
    parallel: ParallelConfig,
    *,
    kernels: str = "reference",
    precision: PrecisionConfig = FP64,
    micro_batch_sequences: int = 1,
    **changes: Any,
) -> Recipe:
    base = Recipe(
        model=MODEL,
        parallel=parallel,
        perf=PerfConfig(kernels=kernels, loss_chunk_tokens=5),
        precision=precision,
        compile=CompileConfig("off"),
        train=TrainConfig(
            steps=STEPS,
            seq_len_tokens=TOKENS,
            global_batch_sequences=SEQUENCES,
            micro_batch_sequences=micro_batch_sequences,
        ),
        optim=OptimConfig(lr=1e-2, max_grad_norm=0.5, warmup_steps=5, decay_steps=5),
    )
    return replace(base, **changes)


class Trace(SimpleNamespace):
    """The observations of a run: losses, aux_losses, grad_norms, mtp_losses and counts by step, grads by name; and the
    graphs that were compiled by then."""


def batch_of(
    step: int,
    micro_batch_sequences: int,
    meshes: Meshes | None = None,
    *,
    has_documents: bool = False,
    parallel: ParallelConfig = ALONE,
    num_sequences: int = SEQUENCES,
) -> Batch:
    """This rank's slice of a step's sequences; a few labels are missing, so ranks differ in label tokens."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (num_sequences, TOKENS + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :NUM_MASKED] = -100
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if meshes is not None:
        rank, num_ranks = meshes.data_rank, meshes.sizes.dp
    ids = (torch.arange(TOKENS) > torch.randint(1, TOKENS, (num_sequences, 1), generator=generator)).int()
    mine = slice(rank * num_sequences // num_ranks, (rank + 1) * num_sequences // num_ranks)
    own = slice(None) if meshes is None else own_tokens(meshes, parallel)
    shape = (-1, micro_batch_sequences, TOKENS)
    document_ids = ids[mine].reshape(shape) if has_documents else None
    return Batch(tokens[mine, :-1].reshape(shape)[..., own], labels[mine].reshape(shape)[..., own], document_ids)


def own_tokens(meshes: Meshes, parallel: ParallelConfig) -> Any:
    """The tokens of a context-parallel rank: a chunk, or one from each end."""
    num_ranks, rank = parallel.cp, meshes.dense.get_local_rank("cp")
    chunks = list(range(TOKENS))
    if parallel.cp_kind == "ulysses":
        return chunks[rank * TOKENS // num_ranks : (rank + 1) * TOKENS // num_ranks]
    size = TOKENS // num_ranks // 2
    own = (rank, 2 * num_ranks - 1 - rank) if num_ranks > 1 else range(2)
    return [token for token in chunks if token // size in own]


def starve(router: TopKRouter, num_starved: int) -> None:
    """Route no token to the last experts (all of some ranks) and every token to the first."""
    bias_E = router.expert_bias_E
    bias_E[0] += 1
    bias_E[len(bias_E) - num_starved :] = float("-inf")


@contextmanager
def spoiling_messages() -> Iterator[None]:
    """Fill the buffers of messages between stages with NaN when they are free for others."""
    free = Messages.free

    def spoil(self: Messages, buffer: Tensor) -> None:
        free(self, buffer.fill_(torch.nan))

    with mock.patch.object(Messages, "free", spoil):
        yield


def train(run: Recipe, num_starved: int = -1, num_steps: int = STEPS) -> dict[str, Any]:
    """Run the first steps on this rank; the fields of a Trace. Routers have noise, which no layout may change."""
    if not run.model.mtp.num_depths:
        run = replace(run, model=replace(run.model, moe=replace(run.model.moe, input_jitter=NOISE)))
    with clones.always_used():
        meshes, _, parts, _, _, step_runner = assemble(run, torch.device("cpu"))
    step = step_runner.step
    if num_starved >= 0:
        for router in step.balancer.routers.values():
            starve(router, num_starved)
    trace = Trace(losses=[], aux_losses=[], grad_norms=[], mtp_losses=[], counts=[], grads={}, num_graphs=[])
    for index in range(min(num_steps, run.train.steps)):
        has_documents = run.data.document_attention
        batch = batch_of(
            index,
            run.train.micro_batch_sequences,
            meshes,
            has_documents=has_documents,
            parallel=run.parallel,
            num_sequences=run.train.global_batch_sequences,
        )
        is_observed = index == 0 and step_runner.bound is None
        if index == 0 and not is_observed:  # the first step has no bound, and so other graphs
            trace.grads = first_gradients(step, parts, batch)
        with spoiling_messages(), observing_gradients(step, parts, trace.grads) if is_observed else nullcontext():
            result = step_runner(batch)
        trace.losses.append(result.loss.item())
        trace.aux_losses.append(result.aux_loss.item())
        trace.grad_norms.append(result.grad_norm.item())
        trace.mtp_losses.append({k: loss.item() for k, loss in result.metrics.items() if k.startswith("mtp_loss")})
        trace.counts.append({name: counts.tolist() for name, counts in result.tokens_per_expert.items()})
        trace.num_graphs.append(counters["stats"]["unique_graphs"])
    return vars(trace)


def train_compiled(
    run: Recipe, num_starved: int = -1, num_steps: int = STEPS, backend: str = "aot_eager"
) -> dict[str, Any]:
    """`train` with quick compilation; quicker with the backend "eager", which runs the graphs that Dynamo makes."""
    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        return train(run, num_starved, num_steps)


@contextmanager
def observing_gradients(step: Any, parts: list[torch.nn.Module], grads: dict[str, Tensor]) -> Iterator[None]:
    """Fill `grads` with the gradients of a step, before clipping."""
    finish_gradients = step.finish_gradients

    def observed() -> None:
        finish_gradients()
        grads.update(gradients(parts))

    with mock.patch.object(step, "finish_gradients", observed):
        yield
    assert grads, "the step has run"


def first_gradients(step: Any, parts: list[torch.nn.Module], batch: Batch) -> dict[str, Tensor]:
    """`gradients` of a batch; leaves the model unchanged."""
    num_labels, num_tokens = step.count(batch)
    step.balancer.start(1.0 / num_tokens)
    step.routing.start(batch.tokens_MBN, None)
    step.forward_backward(batch, 1.0 / num_labels)
    step.finish_gradients()
    grads = gradients(parts)
    for part in parts:
        part.zero_grad()
    return grads


def gradients(parts: list[torch.nn.Module]) -> dict[str, Tensor]:
    """All full gradients of this rank's stages. Collective."""
    grads = {}
    for part in parts:
        rows, own = fused_rows(part), {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
        assert len(own) == sum(parameter.requires_grad for parameter in part.parameters())
        grads |= {name: full_tensor(grad, rows.get(name, ())).clone() for name, grad in own.items()}
    return grads


def run(ranks: Any, num_ranks: int, *args: Any) -> list[Trace]:
    """The observations of every rank, with the gradients of all stages of its pipeline."""
    traces = [Trace(**fields) for fields in ranks(num_ranks, train, *args)]
    ranks_of_a_stage = num_ranks // args[0].parallel.pp
    for first in range(ranks_of_a_stage):
        pipeline, grads = traces[first::ranks_of_a_stage], dict[str, Tensor]()
        for trace in pipeline:
            assert all(torch.equal(grads[name], trace.grads[name]) for name in grads.keys() & trace.grads), "tied"
            grads |= trace.grads
        for trace in pipeline:
            trace.grads = grads
    return traces


def assert_same(actual: Trace, expected: Trace, tolerance: float) -> None:
    """Compare as many steps as there are; a reference may have run for longer."""
    num_steps = len(actual.losses)
    assert 0 < num_steps <= len(expected.losses)
    torch.testing.assert_close(actual.losses, expected.losses[:num_steps], rtol=tolerance, atol=tolerance)
    # the auxiliary loss is summed in fp32
    torch.testing.assert_close(actual.aux_losses, expected.aux_losses[:num_steps], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(actual.grad_norms, expected.grad_norms[:num_steps], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual.mtp_losses, expected.mtp_losses[:num_steps], rtol=tolerance, atol=tolerance)
    assert actual.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        torch.testing.assert_close(
            actual.grads[name], grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    if tolerance < 1e-6:
        assert actual.counts == expected.counts[:num_steps]


@pytest.fixture(scope="module")
def alone(ranks) -> dict[int, Trace]:
    """One process, plain and skewed."""
    one = recipe(ParallelConfig(), micro_batch_sequences=SEQUENCES // 2)
    return {
        num_starved: run(ranks, 1, one, num_starved, steps)[0]
        for num_starved, steps in ((-1, STEPS), (3, FEW), (4, FEW))
    }


def test_one_loss_falls_in_one_process(alone: dict[int, Trace]) -> None:
    trace = alone[-1]
    assert len(set(trace.losses)) == STEPS and all(norm > 0 for norm in trace.grad_norms)
    assert all(grad.abs().max() > 0 for grad in trace.grads.values())
    total = SEQUENCES * TOKENS * MOE.top_k
    assert all(sum(counts) == total for by_router in trace.counts for counts in by_router.values())


def train_on_all_labels(run: Recipe) -> dict[str, Any]:
    with mock.patch.dict(globals(), NUM_MASKED=0):
        return train(run, num_steps=1)


def test_one_loss_balances_as_much_as_without_masked_labels(ranks, alone: dict[int, Trace]) -> None:
    (unmasked,) = ranks(1, train_on_all_labels, recipe(ParallelConfig(), micro_batch_sequences=2))
    assert unmasked["aux_losses"] == pytest.approx(alone[-1].aux_losses[:1], rel=1e-6)
    assert unmasked["losses"] != pytest.approx(alone[-1].losses[:1], rel=1e-6)


@pytest.mark.parametrize(
    ("parallel", "num_steps"),
    [
        pytest.param(ParallelConfig(), FEW, id="dp2-local"),
        pytest.param(ParallelConfig(ep=2, dispatcher="alltoall"), STEPS, id="dp2-ep2-alltoall"),
    ],
)
def test_one_loss_on_layouts(ranks, alone: dict[int, Trace], parallel: ParallelConfig, num_steps: int) -> None:
    candidate = recipe(parallel, micro_batch_sequences=2)
    for trace in run(ranks, 2, candidate, -1, num_steps):
        assert len(trace.losses) == num_steps
        assert_same(trace, alone[-1], 1e-9)


KINDS = replace(
    MODEL,
    attention=replace(ATTENTION, num_heads=4, num_kv_heads=4),
    moe=replace(
        MOE,
        aux_loss_coef=0.0,
        aux_losses=AuxLosses(sequence=1e-2, global_batch=0.1),
        bias_update_speed=0.0,
        bias_update="quantile",
        bias_ema=0.5,
    ),
)
"""Balanced over each sequence, over the batch of a step, and by quantiles."""


@pytest.fixture(scope="module")
def alone_over_batches(ranks) -> Trace:
    """One process, with one microbatch."""
    return run(ranks, 1, recipe(ALONE, micro_batch_sequences=SEQUENCES, model=KINDS), -1, FEW)[0]


@pytest.mark.few("microbatches", "pp2-dp2", "cp2-tp2")
@pytest.mark.parametrize(
    ("num_ranks", "parallel", "micro_batch_sequences"),
    [
        pytest.param(1, ALONE, 2, id="microbatches"),
        pytest.param(4, ParallelConfig(ep=2, dispatcher="alltoall"), 2, id="dp4"),
        pytest.param(4, ParallelConfig(pp=2), 2, id="pp2-dp2"),
        pytest.param(4, ParallelConfig(cp=2, tp=2, ep=2, dispatcher="alltoall"), SEQUENCES, id="cp2-tp2"),
        pytest.param(2, ParallelConfig(ep=2, dispatcher="alltoall", accumulate_unsharded=True), 2, id="unsharded"),
    ],
)
def test_one_loss_balanced_over_the_batch(
    ranks, alone_over_batches: Trace, num_ranks: int, parallel: ParallelConfig, micro_batch_sequences: int
) -> None:
    for trace in run(
        ranks, num_ranks, recipe(parallel, micro_batch_sequences=micro_batch_sequences, model=KINDS), -1, FEW
    ):
        assert_same(trace, alone_over_batches, 1e-9)


DROPS = replace(KINDS, moe=replace(MOE, capacity_factor=0.75, drop_over="sequence"))
PADDED = replace(DROPS, moe=replace(DROPS.moe, drop_over="microbatch", pad_to_capacity=True))
"""The same where a rank has one sequence."""


@pytest.fixture(scope="module")
def alone_dropping(ranks) -> Trace:
    """One process that drops by score."""
    trace = run(ranks, 1, recipe(ALONE, micro_batch_sequences=SEQUENCES // 2, model=DROPS), -1, FEW)[0]
    dropless = run(ranks, 1, recipe(ALONE, micro_batch_sequences=SEQUENCES // 2, model=KINDS), -1, 1)[0]
    assert trace.losses[0] != pytest.approx(dropless.losses[0], rel=1e-6)
    return trace


@pytest.mark.few("dp4-ep4-recompute_block", "dp2-ep2-padded")
@pytest.mark.parametrize(
    ("num_ranks", "parallel", "model", "changes"),
    [
        pytest.param(
            4,
            ParallelConfig(ep=4, dispatcher="alltoall"),
            DROPS,
            {"memory": MemoryConfig("block"), "micro_batch_sequences": 2},
            id="dp4-ep4-recompute_block",
        ),
        pytest.param(
            2,
            ParallelConfig(ep=2, dispatcher="allgather", expert_rank_capacity_factor=0.0),
            PADDED,
            {},
            id="dp2-ep2-padded",
        ),
        pytest.param(2, ParallelConfig(pp=2), DROPS, {"micro_batch_sequences": 2}, id="pp2"),
    ],
)
def test_one_loss_that_drops_by_score(
    ranks, alone_dropping: Trace, num_ranks: int, parallel: ParallelConfig, model: ModelConfig, changes: Any
) -> None:
    for trace in run(ranks, num_ranks, recipe(parallel, model=model, **changes), -1, FEW):
        assert_same(trace, alone_dropping, 1e-9)


GQA = AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=8, qk_norm=True, qkv_bias=True, sinks=True)
MLA = AttentionConfig(
    kind="mla", num_heads=4, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, kv_lora_rank=8, q_lora_rank=8
)
SPLIT_MODELS = {
    "gqa": replace(MODEL, attention=replace(GQA, out_bias=True)),
    "gqa-shared": replace(
        MODEL,
        attention=replace(GQA, num_kv_heads=2, out_bias=True),
        norm_placement="after_moe",
        moe=replace(MOE, score_fn="softmax"),
    ),
    "gqa-norm-shared": replace(
        MODEL,
        attention=replace(
            GQA,
            num_kv_heads=2,
            qk_norm_over="all_heads",
            clip_qkv=1.5,
            partial_rotary_factor=0.5,
            attention_chunk_size=3,
            output_gate="element",
        ),
    ),
    "gqa-window": replace(
        MODEL,
        attention=replace(
            GQA,
            sliding_window=3,
            window_layers=(0, 1),
            nope_every=2,
            attn_scale=0.5,
            floor_scale=3,
            output_gate="head",
            window_rope_theta=50.0,
            llama3_factor=4.0,
            llama3_original_tokens=8,
        ),
        num_dense_layers=0,
        dense_layers=(1,),
        moe=replace(MOE, router_bias=True, swiglu_limit=0.5, swiglu_alpha=1.702, swiglu_up_offset=1.0),
    ),
    "gqa-tied": replace(
        MODEL,
        attention=replace(GQA, qkv_bias=False, sinks=False, softmax_scale=0.2),
        embeddings_are_tied=True,
        embedding_multiplier=1.5,
        residual_multiplier=0.8,
        logits_scaling=0.7,
    ),
    "mla": replace(
        MODEL,
        attention=replace(MLA, softmax_scale=0.4),
        norm_placement="both",
        residual_multiplier=1.2,
        logits_scaling=1.1,
    ),
    "mla-latent-gate": replace(
        MODEL,
        norm="layer",
        head_bias=True,
        attention=replace(MLA, q_lora_rank=0),
        moe=replace(MOE, latent_size=8, shared_expert_gate=True),
    ),
}
"""Models whose heads divide by 4; with "shared", two of 4 ranks need the same keys and values. Balancing losses, expert
bias, shared experts and a dense layer are in all, the second of "gqa-window" and else the first."""
OUTPUTS = MemoryConfig(("norms", "dense_mlp", "shared_experts"))
OF_GQA, OF_MLA = (
    MemoryConfig(("norms", name, "attention", "dense_mlp", "shared_experts", "experts"))
    for name in ("qkv_rope", "mla_up")
)
"""All that is computed again of a layer by parts; test_layouts.py draws some of it."""
OFFLOADED = MemoryConfig(("none",), ("block", "attention", "ffn_norm"))
TP2 = ParallelConfig(tp=2)
TP2_EP2 = ParallelConfig(tp=2, ep=2, dispatcher="alltoall")
TWO_NODES = ParallelConfig(tp=2, ep=4, dispatcher="hierarchical", ep_ranks_per_node=2)


def split_recipe(parallel: ParallelConfig, name: str, **changes: Any) -> Recipe:
    """Documents of uneven length, but for ring attention, several sequences a microbatch, and two microbatches a step
    unless there is dp."""
    data = DataConfig(document_attention=parallel.cp_kind != "ring")
    base = recipe(parallel, model=SPLIT_MODELS[name], data=data, **changes)
    return replace(base, train=replace(base.train, micro_batch_sequences=4))


@pytest.fixture(scope="module")
def split_alone(ranks) -> Callable[[str], Trace]:
    """One process, by the name of a model."""
    return cache(lambda name: run(ranks, 1, split_recipe(ParallelConfig(), name), -1, FEW)[0])


OVERLAPPED = replace(TP2, tp_comm_overlap=True)


@pytest.mark.few(
    "tp2-dp2-ep4-2x2-mla-offloaded",
    "tp2-ep2-interleaved-recompute_attention",
    "overlapped-tp2-mla-recompute_block",
    "overlapped-tp2-mla-recompute_parts",
    "overlapped-tp4-recompute_parts",
    "overlapped-cp2-tp2-gqa-tied",
    "tp4-norm-shared",
    "overlapped-tp2-pp2-gqa",
    "overlapped-tp2-ep2-interleaved",
)
@pytest.mark.parametrize(
    ("num_ranks", "parallel", "name", "changes"),
    [
        pytest.param(4, TWO_NODES, "mla", {"memory": OFFLOADED}, id="tp2-dp2-ep4-2x2-mla-offloaded"),
        pytest.param(
            4,
            replace(TP2_EP2, accumulate_unsharded=True),
            "mla",
            {"memory": OF_MLA},
            id="tp2-dp2-unsharded-recompute_parts",
        ),
        pytest.param(
            2,
            replace(TP2_EP2, accumulate_unsharded=True, overlap="microbatch"),
            "gqa",
            {"memory": MemoryConfig(("attention", "experts:-1"))},
            id="tp2-ep2-interleaved-recompute_attention",
        ),
        # on CPUs the layers have the collectives and GEMMs that overlap on GPUs, one after the other
        pytest.param(2, OVERLAPPED, "mla", {"memory": MemoryConfig("block")}, id="overlapped-tp2-mla-recompute_block"),
        pytest.param(2, OVERLAPPED, "mla-latent-gate", {"memory": OF_MLA}, id="overlapped-tp2-mla-recompute_parts"),
        pytest.param(
            4, replace(OVERLAPPED, tp=4), "gqa-shared", {"memory": OF_GQA}, id="overlapped-tp4-recompute_parts"
        ),
        pytest.param(4, replace(OVERLAPPED, cp=2), "gqa-tied", {}, id="overlapped-cp2-tp2-gqa-tied"),
        pytest.param(4, replace(TP2, cp=2), "gqa-norm-shared", {"memory": OF_GQA}, id="cp2-tp2-norm-shared"),
        pytest.param(4, ParallelConfig(tp=4), "gqa-norm-shared", {}, id="tp4-norm-shared"),
        pytest.param(4, replace(OVERLAPPED, pp=2), "gqa", {}, id="overlapped-tp2-pp2-gqa"),
        pytest.param(
            2,
            replace(TP2_EP2, tp_comm_overlap=True, accumulate_unsharded=True, overlap="microbatch"),
            "gqa",
            {},
            id="overlapped-tp2-ep2-interleaved",
        ),
    ],
)
def test_one_loss_with_tensor_parallelism(
    ranks, split_alone: Callable[[str], Trace], num_ranks: int, parallel: ParallelConfig, name: str, changes: Any
) -> None:
    for trace in run(ranks, num_ranks, split_recipe(parallel, name, **changes), -1, FEW):
        assert_same(trace, split_alone(name), 1e-9)


CP2 = ParallelConfig(cp=2)
CP2_EP2 = replace(CP2, ep=2, dispatcher="alltoall")
CP2_TP2 = replace(CP2, tp=2)


def with_gathered_keys(parallel: ParallelConfig) -> ParallelConfig:
    return replace(parallel, cp_kind="allgather")


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "name", "changes"),
    [
        pytest.param(2, with_gathered_keys(CP2), "gqa-window", {}, id="cp2-allgather-gqa-window"),
        pytest.param(2, CP2_EP2, "gqa", {"memory": OF_GQA}, id="cp2-ep2-recompute_parts"),
        pytest.param(
            2,
            replace(CP2_EP2, accumulate_unsharded=True, overlap="microbatch"),
            "mla",
            {},
            id="cp2-ep2-interleaved",
        ),
        pytest.param(4, with_gathered_keys(CP2_TP2), "mla", {"memory": OF_MLA}, id="cp2-tp2-allgather-recompute_parts"),
        pytest.param(4, replace(CP2_EP2, accumulate_unsharded=True), "mla", {}, id="cp2-dp2-ep2-edp2-unsharded"),
    ],
)
def test_one_loss_with_context_parallelism(
    ranks, split_alone: Callable[[str], Trace], num_ranks: int, parallel: ParallelConfig, name: str, changes: Any
) -> None:
    for trace in run(ranks, num_ranks, split_recipe(parallel, name, **changes), -1, FEW):
        assert_same(trace, split_alone(name), 1e-9)


RING = replace(CP2, cp_kind="ring")
RING_EP2 = replace(CP2_EP2, cp_kind="ring")


@pytest.fixture(scope="module")
def causal_alone(ranks) -> Callable[[str], Trace]:
    """One process without documents, by the name of a model."""
    return cache(lambda name: run(ranks, 1, split_recipe(ParallelConfig(cp_kind="ring"), name), -1, FEW)[0])


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "name", "changes"),
    [
        pytest.param(2, RING, "gqa-tied", {}, id="cp2-gqa-tied"),
        pytest.param(2, RING_EP2, "gqa", {"memory": MemoryConfig("block")}, id="cp2-ep2-recompute_block"),
        pytest.param(
            2,
            replace(RING_EP2, accumulate_unsharded=True, overlap="microbatch"),
            "gqa",
            {},
            id="cp2-ep2-interleaved",
        ),
        pytest.param(4, replace(RING_EP2, cp=4, ep=4), "gqa", {"memory": OF_GQA}, id="cp4-ep4-recompute_parts"),
        pytest.param(4, replace(RING, tp=2), "gqa-shared", {}, id="cp2-tp2-gqa-shared"),
        pytest.param(4, replace(RING_EP2, ep=4), "gqa", {}, id="cp2-dp2-ep4-gqa"),
        pytest.param(4, replace(RING, pp=2), "gqa", {"memory": OFFLOADED}, id="cp2-pp2-gqa-offloaded"),
    ],
)
def test_one_loss_with_ring_attention(
    ranks, causal_alone: Callable[[str], Trace], num_ranks: int, parallel: ParallelConfig, name: str, changes: Any
) -> None:
    for trace in run(ranks, num_ranks, split_recipe(parallel, name, **changes), -1, FEW):
        assert_same(trace, causal_alone(name), 1e-9)


@pytest.mark.few()
@pytest.mark.parametrize(
    ("parallel", "name", "what"),
    [
        pytest.param(TP2, "mla", "experts", id="tp2"),
        pytest.param(OVERLAPPED, "gqa-shared", "block", id="overlapped-tp2"),
        pytest.param(CP2, "mla", "none", id="cp2"),
        pytest.param(with_gathered_keys(CP2), "gqa-window", "experts", id="cp2-allgather"),
        pytest.param(RING, "gqa", "experts", id="cp2-ring"),
    ],
)
def test_one_loss_in_graphs(
    ranks, split_alone: Callable[[str], Trace], causal_alone: Callable[[str], Trace], parallel, name: str, what: str
) -> None:
    parallel = replace(parallel, ep=2, dispatcher="allgather")
    alone = causal_alone if parallel.cp_kind == "ring" else split_alone
    candidate = split_recipe(parallel, name, compile=COMPILED, memory=MemoryConfig(what))
    for fields in ranks(2, train_compiled, candidate, -1, FEW):
        trace = Trace(**fields)
        assert_same(trace, alone(name), 1e-9)
        assert len(set(trace.num_graphs)) == 1, "all were made by the first step"


@pytest.mark.few("alltoall")
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_one_loss_with_skewed_routing(ranks, alone: dict[int, Trace], dispatcher: str) -> None:
    """A rank without tokens, and one of whose two experts one has none. test_layouts.py has a node without tokens."""
    num_starved = 3
    parallel = ParallelConfig(ep=4, dispatcher=dispatcher)
    for trace in run(ranks, 4, recipe(parallel), num_starved, FEW):
        assert_same(trace, alone[num_starved], 1e-9)
        assert all(counts[-num_starved:] == [0] * num_starved for by in trace.counts for counts in by.values())


def train_tempted(run: Recipe, *args: Any) -> dict[str, Any]:
    """`train` where every second call of a router, that of a repeated forward, would choose other experts."""
    calls = Counter[int]()

    def route(logits_BNE: Tensor, bias_E: Tensor, *others: Any) -> Routing:
        calls[bias_E.data_ptr()] += 1
        is_repeated = calls[bias_E.data_ptr()] % 2 == 0
        return route_tokens_reference(logits_BNE, bias_E + torch.randn_like(bias_E) * is_repeated, *others)

    with mock.patch.dict(ROUTE_TOKENS, torch=route):
        return train(run, *args)


@pytest.mark.parametrize(
    ("what", "trainer"),
    [(("norms:-2", "qkv_rope:1", "experts:-1"), train), (("norms:1", "dense_mlp:1", "block:-2"), train_tempted)],
    ids=["parts", "parts_and_block"],
)
def test_one_loss_with_recompute(ranks, alone: dict[int, Trace], what: Any, trainer: Callable[..., Any]) -> None:
    candidate = recipe(ParallelConfig(ep=2, dispatcher="alltoall"), memory=MemoryConfig(what), micro_batch_sequences=2)
    assert_same(Trace(**ranks(2, trainer, candidate, -1, FEW)[0]), alone[-1], 1e-9)


EP2 = ParallelConfig(ep=2, dispatcher="allgather")


@pytest.mark.few("dp2-ep2-recompute_parts-starved")
@pytest.mark.parametrize(
    ("parallel", "memory", "num_starved"),
    [
        pytest.param(replace(EP2, ep=1), MemoryConfig(), -1, id="dp2-edp2"),
        pytest.param(replace(EP2, reshard_after_forward=False), OF_GQA, 4, id="dp2-ep2-recompute_parts-starved"),
    ],
)
def test_one_loss_with_compiled_pieces(
    ranks, alone: dict[int, Trace], parallel: ParallelConfig, memory: MemoryConfig, num_starved: int
) -> None:
    """A rank without tokens compiles nothing again. Recomputed blocks are beside tensor parallelism."""
    candidate = recipe(parallel, compile=COMPILED, memory=memory, micro_batch_sequences=2)
    for fields in ranks(2, train_compiled, candidate, num_starved, FEW):
        trace = Trace(**fields)
        assert_same(trace, alone[num_starved], 1e-9)
        assert len(set(trace.num_graphs)) == 1, "all were made by the first step"


def train_interleaved_too(plain: Recipe, num_starved: int) -> tuple[Any, Any, int]:
    """The traces of sequential and of interleaved microbatches, and the number of collectives without a wait."""
    interleaved = replace(plain, parallel=replace(plain.parallel, overlap="microbatch"))
    traces = [train(candidate, num_starved, FEW) for candidate in (plain, interleaved)]
    return *traces, _get_work_registry_size()


GATHERED_EP2 = ParallelConfig(ep=2, accumulate_unsharded=True)
GATHERED_HSDP = replace(GATHERED_EP2, dp_replicate=2)


@pytest.mark.few("dp2-ep2-alltoall", "dp4-ep4-2x2")
@pytest.mark.parametrize(
    ("num_ranks", "parallel", "dispatcher", "what", "num_starved"),
    [
        pytest.param(2, GATHERED_EP2, "alltoall", "none", -1, id="dp2-ep2-alltoall"),
        pytest.param(4, GATHERED_HSDP, "allgather", "experts", -1, id="hsdp2x2-ep2-recompute_experts"),
        pytest.param(4, GATHERED_HSDP, "alltoall", "experts", 4, id="ranks_without_tokens"),
        pytest.param(
            4,
            replace(GATHERED_EP2, ep=4, ep_ranks_per_node=2),
            "hierarchical",
            "experts",
            4,
            id="dp4-ep4-2x2",
        ),
    ],
)
def test_one_loss_with_interleaved_microbatches_bit_for_bit(
    ranks, num_ranks: int, parallel: ParallelConfig, dispatcher: str, what: str, num_starved: int
) -> None:
    plain = recipe(replace(parallel, dispatcher=dispatcher), memory=MemoryConfig(what))
    for one_by_one, interleaved, num_open in ranks(num_ranks, train_interleaved_too, plain, num_starved):
        assert_same(Trace(**interleaved), Trace(**one_by_one), 0.0)
        assert num_open == 0


@pytest.mark.few("alltoall")
@pytest.mark.parametrize("dispatcher", ["alltoall", "hierarchical"])
def test_one_loss_with_interleaved_compiled_pieces(ranks, alone: dict[int, Trace], dispatcher: str) -> None:
    of_node = int(dispatcher == "hierarchical")
    parallel = replace(GATHERED_EP2, dispatcher=dispatcher, overlap="microbatch", ep_ranks_per_node=of_node)
    candidate = recipe(parallel, compile=COMPILED, micro_batch_sequences=2)
    for fields in ranks(2, train_compiled, candidate, -1, FEW, "eager"):  # the dispatcher is outside the graphs
        trace = Trace(**fields)
        assert_same(trace, alone[-1], 1e-9)
        assert 4 < trace.num_graphs[0] and len(set(trace.num_graphs)) == 1, "all were made by the first step"


def test_one_loss_with_any_microbatches(ranks, alone: dict[int, Trace]) -> None:
    candidate = recipe(ParallelConfig())
    whole_batch = replace(candidate, train=replace(candidate.train, micro_batch_sequences=SEQUENCES))
    assert_same(run(ranks, 1, whole_batch, -1, FEW)[0], alone[-1], 1e-9)


@pytest.mark.few("2")
@pytest.mark.parametrize("dp_replicate", [1, 2])
def test_one_loss_with_unsharded_accumulation(ranks, alone: dict[int, Trace], dp_replicate: int) -> None:
    parallel = ParallelConfig(dp_replicate=dp_replicate, ep=2, dispatcher="alltoall", accumulate_unsharded=True)
    memory = MemoryConfig() if dp_replicate == 1 else OF_GQA
    for trace in run(ranks, 4, recipe(parallel, memory=memory), -1, FEW):
        assert_same(trace, alone[-1], 1e-9)


def test_one_loss_in_fp32_with_grouped_mm(ranks, alone: dict[int, Trace]) -> None:
    fp32 = PrecisionConfig("fp32", "fp32", "fp32")
    one = run(ranks, 1, recipe(ParallelConfig(), kernels="grouped_mm", precision=fp32), -1, FEW)[0]
    candidate = recipe(ParallelConfig(ep=4, dispatcher="alltoall"), kernels="grouped_mm", precision=fp32)
    for trace in run(ranks, 4, candidate, -1, FEW):
        assert_same(trace, one, 1e-4)
