"""Operations at full size: inputs of real layers, their work, and the implementations to compare."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from adapter_benchmarks import ADAPTER_BENCHMARKS
from benchmark_case import Benchmark, Case, Ops
from optimizer_benchmarks import OPTIMIZER_BENCHMARKS
from random_routing import draw_experts, draw_plan
from rope_benchmarks import ROPE_BENCHMARKS
from torch import Tensor

from titan_moe.config.formats import GemmFormats
from titan_moe.config.swiglu import SwiGLU
from titan_moe.kernels.choose import ROUTE_TOKENS, choose_expert_mlp
from titan_moe.kernels.experts.composite_mlp import CompositeMLP, ExpertMLP
from titan_moe.kernels.experts.fp8.format import FP8_BLOCKWISE, FP8_ROWWISE
from titan_moe.kernels.experts.fused_mlp import FusedMLP, with_scores_first
from titan_moe.kernels.experts.grouped_mm import grouped_mm
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.weights import BIASES, MATRICES, ExpertWeights
from titan_moe.kernels.loss.cross_entropy import linear_cross_entropy, loss_and_dlogits
from titan_moe.kernels.loss.fused_cross_entropy import CHUNK_TOKENS, add_gradients, logits_by_chunk
from titan_moe.kernels.permute.rows import place_scores
from titan_moe.kernels.registry import Sample, load_all
from titan_moe.kernels.router.routing import RouteTokens, RoutingRule
from titan_moe.precision.linears import convert_linear

KERNELS = load_all()


def half(device: torch.device, *sizes: int) -> Tensor:
    return torch.randn(sizes, device=device, dtype=torch.bfloat16)


def as_one_graph(op: Callable[..., Any]) -> Callable[..., Any]:
    """Compile an operation alone, without graph breaks."""
    return torch.compile(op, fullgraph=True)


def eager_and_compiled(ours: Callable[..., Any], name: str, other: Callable[..., Any]) -> Ops:
    """Our implementation and another one, which is compiled too."""
    return {"titan_moe": ours, name: other, f"{name}, compiled": as_one_graph(other)}


def of_registry(kernel: str) -> Ops:
    """An operation of the registry and its reference, which is PyTorch's implementation."""
    return eager_and_compiled(KERNELS[kernel].op, "torch", KERNELS[kernel].reference)


def expert_shape(rows: int, width: int, hidden: int, experts: int, choices: int) -> dict[str, int]:
    return dict(rows=rows, choices=choices, slots=rows * choices, experts=experts, width=width, hidden=hidden)


EXPERT_SHAPES = {
    "qwen3": expert_shape(32_768, 2048, 768, 128, 8),
    "qwen3_ep8": expert_shape(16_384, 2048, 768, 16, 8),
    "deepseek_v2_lite": expert_shape(32_768, 2048, 1408, 64, 6),
    "mixtral": expert_shape(16_384, 4096, 14_336, 8, 2),
    "deepseek_v3_ep8": expert_shape(8_192, 7168, 2048, 32, 8),
}
"""Expert layers worth timing. `ep8` is the share of one of eight ranks."""


def experts(shape: dict[str, int]) -> Case:
    """Rows in and out, weights once."""
    weights = shape["width"] * shape["hidden"]
    flops = 6.0 * shape["slots"] * weights
    moved = 2.0 * (2 * shape["rows"] * shape["width"] + 3 * shape["experts"] * weights)

    def draw(device: torch.device) -> Sample:
        num_rows, num_experts, width, hidden = (shape[name] for name in ("rows", "experts", "width", "hidden"))
        plan = draw_plan(num_rows, num_experts, shape["choices"], device)
        gate_up = half(device, num_experts, 2, hidden, width) / width**0.5
        down = half(device, num_experts, width, hidden) / hidden**0.5
        scores_SK = torch.rand(plan[1].shape, device=device)
        return Sample("", (half(device, num_rows, width), scores_SK, gate_up, down, *plan), 4)

    return Case(draw, flops, 3 * flops, moved, 3 * moved)


def experts_with_biases(shape: dict[str, int]) -> Case:
    """The same inputs, with biases behind the weights."""
    case = experts(shape)

    def draw(device: torch.device) -> Sample:
        *leaves, rows_R, slots_SK, offsets_e = case.draw(device).args
        biases = (half(device, shape["experts"], *sizes) for sizes in ((2, shape["hidden"]), (shape["width"],)))
        return Sample("", (*leaves, *biases, rows_R, slots_SK, offsets_e), 6)

    return case._replace(draw=draw)


def with_biases(mlp: ExpertMLP) -> Callable[..., Tensor]:
    """The MLP of loose tensors."""

    def op(x_SD: Tensor, scores_SK: Tensor, *tensors: Tensor) -> Tensor:
        *weights, rows_R, slots_SK, offsets_e = tensors
        slots = ExpertSlots(rows_R, slots_SK, place_scores(scores_SK, slots_SK, rows_R.numel()), offsets_e)
        return mlp(x_SD, slots, ExpertWeights.of(weights, MATRICES + BIASES))

    return op


def without_biases(op: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that does not get them."""
    return lambda *args: op(*args[:4], *args[6:])


def experts_in_fp8(shape: dict[str, int]) -> Case:
    """The same inputs, and codes of the weights behind them: with scales of rows, and of blocks."""
    case = experts(shape)

    def draw(device: torch.device) -> Sample:
        sample = case.draw(device)
        gate_up, down = sample.args[2:4]
        codes = [format.quantize(gate_up, down, False) for format in (FP8_ROWWISE, FP8_BLOCKWISE)]
        return Sample(sample.name, (*sample.args, codes), sample.num_differentiable)

    return case._replace(draw=draw)


def with_given_codes(mlp: ExpertMLP, which: int) -> Callable[..., Tensor]:
    """Experts in fp8 whose weights are quantised already, as for all microbatches of a step but the first. `which` of
    the codes they take."""

    def op(*args: Any) -> Tensor:
        *loose, codes = args

        def expert_mlp(x_SD: Tensor, slots: ExpertSlots, weights: ExpertWeights) -> Tensor:
            return mlp(x_SD, slots, weights._replace(codes=tuple(codes[which])))

        return with_scores_first(expert_mlp)(*loose)

    return op


def without_codes(op: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that does not get the codes."""
    return lambda *args: op(*args[:-1])


LINEAR_WIDTHS = (
    *((2048, 5120), (4096, 2048)),  # Qwen3: qkv, out
    *((2048, 3072), (512, 4096), (2048, 2048), (2048, 5632), (2816, 2048)),  # V2-Lite: q, kv_up, out, shared experts
    *((4096, 6144), (4096, 4096)),  # Mixtral: qkv, out
    *((7168, 1536), (1536, 24_576), (512, 32_768), (16_384, 7168)),  # DeepSeek-V3: q_down, q_up, kv_up, out
    *((7168, 4096), (2048, 7168), (7168, 36_864), (18_432, 7168)),  # its shared expert and dense layers
    (7168, 2048),  # in the package's table
)
"""Input and output of dense layers. V2-Lite's dense MLP and latents down have no widths of whole blocks of 128."""


def linear(num_tokens: int, inputs: int, outputs: int) -> Case:
    """Input, weight and output once."""
    flops = 2.0 * num_tokens * inputs * outputs
    moved = 2.0 * (num_tokens * (inputs + outputs) + inputs * outputs)

    def draw(device: torch.device) -> Sample:
        x_TI, weight_OI = half(device, num_tokens, inputs), half(device, outputs, inputs) / inputs**0.5
        return Sample(f"{inputs}_to_{outputs}", (x_TI, weight_OI), 2)

    return Case(draw, flops, 3 * flops, moved, 3 * moved)


def torchao_tensorwise(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """torchao's layer with one scale a tensor."""
    return _tensorwise_layer(x_TI.shape[1], len(weight_OI))(weight_OI, x_TI)


@cache
def _tensorwise_layer(inputs: int, outputs: int) -> Callable[[Tensor, Tensor], Tensor]:
    plain = torch.nn.Linear(inputs, outputs, bias=False, device="meta")
    layer = convert_linear(plain, GemmFormats(*("fp8_tensorwise",) * 3), "native")
    return torch.compile(lambda weight, x: torch.func.functional_call(layer, {"weight": weight}, (x,)))


def permute(num_rows: int, num_experts: int) -> Case:
    """Eight experts a row."""
    slots = 8 * num_rows

    def draw(device: torch.device) -> Sample:
        ids_SK = draw_experts(num_rows, num_experts, 8, device)
        return Sample("", (torch.rand(ids_SK.shape, device=device), ids_SK, num_experts, slots), 1)

    return Case(draw, 0, 0, 24.0 * slots, 36.0 * slots)


def gather_rows(num_rows: int, width: int, num_experts: int, top_k: int) -> Case:
    """Rows once and slots once."""

    def draw(device: torch.device) -> Sample:
        rows_R, slots_SK, _ = draw_plan(num_rows, num_experts, top_k, device)
        return Sample("", (half(device, num_rows, width), rows_R, slots_SK), 1)

    moved = 2.0 * num_rows * width * (1 + top_k)
    return Case(draw, 0, 0, moved, 2 * moved)


def router_logits(num_rows: int, width: int, num_experts: int) -> Case:
    def draw(device: torch.device) -> Sample:
        return Sample("", (half(device, num_rows, width), half(device, num_experts, width) / width**0.5), 2)

    flops, moved = 2.0 * num_rows * width * num_experts, num_rows * (2.0 * width + 4 * num_experts)
    return Case(draw, flops, 3 * flops, moved, 3 * moved)


def routing(num_experts: int, rule: RoutingRule) -> Case:
    """Eight sequences after their logits. Forward writes ids and weights, backward reads the logits again."""
    shape = (8, 4096, num_experts)

    def draw(device: torch.device) -> Sample:
        return Sample("", (torch.randn(shape, device=device), torch.zeros(num_experts, device=device), rule), 1)

    forward, backward = (8.0 * 4096 * (size * num_experts + 12 * rule.top_k) for size in (4, 8))
    return Case(draw, 0, 0, forward, forward + backward)


def flat_routing(route: RouteTokens) -> Callable[[Tensor, Tensor, RoutingRule], Tensor]:
    """A router that returns all differentiable outputs in one flat tensor."""

    def op(logits_BNE: Tensor, expert_bias_E: Tensor, rule: RoutingRule) -> Tensor:
        routing = route(logits_BNE, expert_bias_E, rule, None)
        return torch.cat([out.flatten() for out in (routing.topk_scores_BNK, routing.share_sums_BE, routing.z_sum)])

    return op


def head(num_tokens: int, width: int, vocabulary: int) -> Case:
    """Forward also computes the gradients. Each implementation takes chunks of its own size."""
    flops, moved = 6.0 * num_tokens * width * vocabulary, 4.0 * width * (num_tokens + vocabulary)

    def draw(device: torch.device) -> Sample:
        x_TD, weight_VD = half(device, num_tokens, width), half(device, vocabulary, width) / width**0.5
        return Sample("", (x_TD, weight_VD, torch.randint(vocabulary, (num_tokens,), device=device)), 2)

    return Case(draw, flops, flops, moved, moved)


def softmax_over_parts(num_tokens: int, num_words: int, num_parts: int) -> Case:
    """A chunk of logits, whose parts one GPU computes; the operation copies the logits first, which a head does not."""

    def draw(device: torch.device) -> Sample:
        logits_CW = torch.randn(num_tokens, num_words, device=device, dtype=torch.bfloat16)
        return Sample("", (logits_CW, torch.randint(num_words, (num_tokens,), device=device), num_parts), 0)

    moved = 6.0 * num_tokens * num_words
    return Case(draw, 0.0, 0.0, moved, moved)


@torch.no_grad()
def three_gemms(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    """The GEMMs of head and loss alone: a lower bound on their time. The result means nothing."""
    logits_TV = x_TD @ weight_VD.T
    torch.mm(logits_TV, weight_VD, out=torch.empty_like(x_TD))
    torch.mm(logits_TV.T, x_TD, out=torch.empty_like(weight_VD))
    return x_TD.new_empty((), dtype=torch.float32)


@torch.no_grad()
def three_gemms_in_chunks(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    """The GEMMs in the op's own chunks, with the additions to the fp32 weight gradient. The result means nothing."""
    dx_TD, sum_VD = torch.empty_like(x_TD), torch.empty_like(weight_VD, dtype=torch.float32)
    for tokens, logits_CV in logits_by_chunk(x_TD, weight_VD, CHUNK_TOKENS):
        add_gradients(logits_CV, x_TD, weight_VD, tokens, dx_TD, sum_VD)
    return x_TD.new_empty((), dtype=torch.float32)


def accumulate(num_elements: int, bytes_moved: float, is_first: bool) -> Case:
    moved = bytes_moved * num_elements

    def draw(device: torch.device) -> Sample:
        return Sample("", (torch.empty(num_elements, device=device), half(device, num_elements), is_first), 0)

    return Case(draw, 0, 0, moved, moved)


FUSED, GPT_OSS = KERNELS["fused_expert_mlp"].op, SwiGLU(limit=7.0, alpha=1.702, up_offset=1.0)
LOSS, HEAD = KERNELS["linear_cross_entropy"], {"qwen3": head(16_384, 2048, 151_936)}
TORCH_HEADS: Ops = {
    "with compiled softmax": partial(linear_cross_entropy, softmax=as_one_graph(loss_and_dlogits)),
    "all logits": LOSS.reference,
}
ROUTERS = {name: flat_routing(route) for name, route in ROUTE_TOKENS.items()}
MIXTRAL_EP8 = 2 * 14_336 * 4096
"""Elements of gate and up in a layer of a rank with ep = 8."""


BENCHMARKS = {
    "fused_expert_mlp": Benchmark(
        {name: experts(shape) for name, shape in EXPERT_SHAPES.items()},
        eager_and_compiled(FUSED, "grouped_mm", with_scores_first(CompositeMLP(grouped_mm))),
    ),
    "biased_expert_mlp": Benchmark(
        {"gpt_oss_20b_ep8": experts_with_biases(expert_shape(16_384, 2880, 2880, 4, 4))},
        {
            **eager_and_compiled(
                with_biases(choose_expert_mlp("fused", "activation", True, GPT_OSS)),
                "grouped_mm",
                with_biases(CompositeMLP(grouped_mm, activation=GPT_OSS)),
            ),
            "without biases": without_biases(FUSED),
        },
    ),
    "fp8_expert_mlp": Benchmark(
        {name: experts_in_fp8(shape) for name, shape in EXPERT_SHAPES.items()},
        {
            "titan_moe": without_codes(with_scores_first(FusedMLP(FP8_ROWWISE))),
            "with given codes": with_given_codes(FusedMLP(FP8_ROWWISE), 0),
            "blockwise": without_codes(with_scores_first(FusedMLP(FP8_BLOCKWISE))),
            "blockwise, with given codes": with_given_codes(FusedMLP(FP8_BLOCKWISE), 1),
            "in bf16": without_codes(FUSED),
        },
    ),
    **ADAPTER_BENCHMARKS,
    "fp8_linear": Benchmark(
        {f"{inputs}_to_{outputs}": linear(16_384, inputs, outputs) for inputs, outputs in LINEAR_WIDTHS},
        {
            "titan_moe": KERNELS["fp8_linear"].op,
            "blockwise": KERNELS["fp8_block_linear"].op,
            "torchao tensorwise, compiled": torchao_tensorwise,
            "in bf16": KERNELS["fp8_linear"].reference,
        },
    ),
    "counting_sort": Benchmark(
        {f"{8 * rows}_of_{size}": permute(rows, size) for rows in (16_384, 32_768) for size in (16, 128)},
        of_registry("counting_sort"),
    ),
    "gather_rows": Benchmark(
        {"qwen3": gather_rows(16_384, 2048, 128, 8)},
        {"titan_moe": KERNELS["gather_rows"].op, "torch indexing": lambda x_SD, rows_R, slots_SK: x_SD[rows_R]},
    ),
    "router_logits": Benchmark(
        {"qwen3": router_logits(32_768, 2048, 128)},
        {"titan_moe": KERNELS["router_logits"].op, "in fp32": KERNELS["router_logits"].reference},
    ),
    "route_tokens": Benchmark(
        {
            "qwen3": routing(128, RoutingRule("softmax", 8)),
            "deepseek_v3": routing(256, RoutingRule("sigmoid", 8, 8, 4, route_scale=2.5)),
        },
        {
            "titan_moe": ROUTERS["triton"],
            "torch": ROUTERS["torch"],
            "torch, compiled": as_one_graph(ROUTERS["torch"]),
        },
    ),
    **ROPE_BENCHMARKS,
    "linear_cross_entropy": Benchmark(HEAD, {"titan_moe": LOSS.op, **TORCH_HEADS}),
    "fused_cross_entropy": Benchmark(
        HEAD,
        {
            "titan_moe": KERNELS["fused_cross_entropy"].op,
            **TORCH_HEADS,
            "three GEMMs alone": three_gemms,
            "three GEMMs in chunks": three_gemms_in_chunks,
        },
    ),
    "softmax_over_parts": Benchmark(
        {"qwen3_tp2": softmax_over_parts(2048, 151_936, 2), "qwen3_tp8": softmax_over_parts(2048, 151_936, 8)},
        {"titan_moe": KERNELS["softmax_over_parts"].op, "torch": KERNELS["softmax_over_parts"].reference},
    ),
    "accumulate": Benchmark(
        {
            "mixtral_ep8": accumulate(MIXTRAL_EP8, 10.0, False),
            "mixtral_ep8_first": accumulate(MIXTRAL_EP8, 6.0, True),
        },
        {"titan_moe": KERNELS["accumulate"].op, "torch": KERNELS["accumulate"].reference},
    ),
    **OPTIMIZER_BENCHMARKS,
}
