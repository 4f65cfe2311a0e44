"""Layers whose rows lie in an arena give the bits of layers whose rows autograd keeps: kept, lifted, recomputed,
after an overflow, compiled, with clones, with delayed weight gradients.

Ranks and kernels are those of symm_mem/test_fused.py.
"""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import load
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from titan_moe.dispatch.base import TokenDispatcher
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.symm_mem.fused import SymmMemFusedDispatcher
from titan_moe.kernels.delayed_weight_grads import WeightGradQueue
from titan_moe.kernels.experts.arena import Arena
from titan_moe.kernels.experts.format import ExpertFormat
from titan_moe.kernels.experts.fused_mlp import FusedMLP, Keep, biased_expert_mlp, fused_expert_mlp
from titan_moe.kernels.experts.plain import PLAIN
from titan_moe.layers.experts import GroupedExperts
from titan_moe.plan.cost.loads import LayerLoads

equal_local, symm_mem, fused = (
    load(f"dispatch/{name}") for name in ("test_equal_local", "symm_mem/test_dispatcher", "symm_mem/test_fused")
)
ROUTINGS = ("skewed", "all_to_one_rank")
"""Of the layers of a microbatch."""
WAYS = {
    # name: factor (0 without an arena), whether the bound is lifted, recomputed, compiled, or delayed
    "kept": (2.5, False, "none"),
    "lifted": (2.5, True, "none"),
    "too small": (1.0, False, "none"),
    "checkpointed": (1.0, False, "checkpoint"),
    "compiled": (2.5, False, "compile"),
    "compiled, lifted": (2.5, True, "compile"),
    "delayed": (2.5, False, "delay"),
    "delayed, lifted": (2.5, True, "delay"),
    "delayed, without an arena": (0.0, False, "delay"),
    "rows": (2.5, False, Keep.ROWS),
    "rows, lifted": (2.5, True, Keep.ROWS),
    "rows, without an arena": (0.0, False, Keep.ROWS),
    "nothing": (2.5, False, Keep.NOTHING),
    "nothing, without an arena": (0.0, False, Keep.NOTHING),
}
T, K, D, F = equal_local.NUM_TOKENS, equal_local.TOP_K, equal_local.WIDTH, equal_local.HIDDEN


def capacity_with_arena(
    factor: float,
    num_ranks: int,
    device: torch.device,
    *,
    is_checkpointed: bool = False,
    num_replicas: int = 0,
    format: ExpertFormat = PLAIN,
    num_slabs: int = 1,
    num_hidden_layers: int | None = None,
    layer_factor: float = 0.0,
) -> ExpertCapacity:
    """The arena's memory is NaN: what is not written must not be read. With several slabs, one less is delayed."""
    capacity = ExpertCapacity(factor, device, layer_factor)
    slabs = {"num_slabs": num_slabs, "num_delayed_slabs": num_slabs - 1}
    arena = Arena(D, F, fused.dtype_of(device), device, is_checkpointed=is_checkpointed, format=format, **slabs)
    worst = num_ranks * T
    num_local = equal_local.NUM_EXPERTS // num_ranks + num_replicas
    loads = LayerLoads(len(ROUTINGS), 0.75 * worst, T * K, worst, worst * min(K, num_local), num_hidden_layers)
    capacity.use_arena(arena, loads)
    for buffer in arena.buffers:
        buffer.view(torch.uint8).fill_(0xFF)  # NaN in every format
    return capacity


def draw_layers(device: torch.device) -> list[list[Tensor]]:
    """This rank's inputs of each layer."""
    return [fused.my_inputs(routing, device) for routing in ROUTINGS]


def run_layers(
    dispatcher: TokenDispatcher,
    module: GroupedExperts,
    drawn: list[list[Tensor]],
    wrap: Callable[..., Any] | None = None,
    queue: WeightGradQueue | None = None,
    between: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """Output and gradients of a microbatch of layers with routings of their own. `between` is called before weight
    gradients that `queue` delays are computed."""
    module.zero_grad()
    x_TD, grad_TD = drawn[0][0].requires_grad_(), drawn[0][3]
    scores = [scores_TK.requires_grad_() for _, _, scores_TK, _ in drawn]

    def layer(x_TD: Tensor, ids_TK: Tensor, scores_TK: Tensor) -> Tensor:
        inputs = dispatcher.dispatch(x_TD, ids_TK, scores_TK)
        return x_TD + dispatcher.combine(module(inputs), inputs)

    dispatcher.capacity.start_forward()
    y_TD = x_TD
    with queue.delaying() if queue else nullcontext() as pending:
        for (_, ids_TK, _, _), scores_TK in zip(drawn, scores, strict=True):
            y_TD = (wrap(layer) if wrap else layer)(y_TD, ids_TK, scores_TK)
    y_TD.backward(grad_TD)
    between()
    if pending is not None:
        pending.compute()
    of_weights = (parameter.grad for parameter in module.parameters())
    tensors = (y_TD, x_TD.grad, *(scores_TK.grad for scores_TK in scores), *of_weights)
    return [tensor.detach().cpu() for tensor in tensors]


def recomputed(layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return partial(checkpoint, layer, use_reentrant=False)


def compiled(layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    backend = "inductor" if torch.cuda.is_available() else "aot_eager"
    return torch.compile(layer, fullgraph=True, backend=backend, dynamic=False)


WRAPS: dict[str, Any] = {"checkpoint": recomputed, "compile": compiled}


def run_delayed(dispatcher: TokenDispatcher, module: GroupedExperts, device: torch.device) -> list[Tensor]:
    """The same with delayed weight gradients. Between them and the rest of the backward, another microbatch runs in
    other slabs."""
    queue, capacity = WeightGradQueue(), dispatcher.capacity
    arena, other = capacity.arena, deepcopy(module)
    mlp = module.mlp
    module.mlp = other.mlp = replace(mlp, queue=queue)

    def run(
        number: int, module: GroupedExperts, drawn: list[list[Tensor]], between: Callable[[], None]
    ) -> list[Tensor]:
        slabs = [] if arena is None else [capacity.writing_to(2 * number), capacity.delaying_to(number)]
        with ExitStack() as stack:
            for slab in slabs:
                stack.enter_context(slab)
            return run_layers(dispatcher, module, drawn, None, queue, between)

    def between() -> None:
        are_late = arena is None or arena.keeps
        assert (module.gate_up.grad is None) == (module.down.grad is None) == are_late
        run(0, other, draw_layers(device)[::-1], lambda: None)
        assert other.gate_up.grad is not None

    try:
        return run(1, module, draw_layers(device), between)
    finally:
        module.mlp = mlp


def run_ways(
    folder: str | None,
    ways: tuple[str, ...],
    overlaps: bool,
    num_replicas: int = 0,
    mlp: FusedMLP = fused_expert_mlp,
) -> tuple[list[Tensor], dict[str, tuple[list[Tensor], bool, float]]]:
    """The results of a microbatch that autograd keeps; and by way, those in an arena, whether the step is void, and the
    factor that it needed."""
    memory, device = symm_mem.share(folder)
    module, num_ranks = fused.my_experts(device, mlp), memory.peer_ptrs_P.numel()
    for parameter in module.parameters():
        parameter.data /= 4
    kind = partial(SymmMemFusedDispatcher, overlaps=overlaps)
    dispatcher = fused.dispatcher_of(kind, memory, module, num_replicas)
    inner = dispatcher.inner if num_replicas else dispatcher
    kept_by_autograd = run_layers(dispatcher, module, draw_layers(device))
    answers = {}
    for way in ways:
        factor, is_lifted, wrap = WAYS[way]
        capacity = capacity_with_arena(
            factor,
            num_ranks,
            device,
            is_checkpointed=wrap == "checkpoint",
            num_replicas=num_replicas,
            format=mlp.format,
            num_slabs=3 if wrap == "delay" else 1,
            num_hidden_layers=0 if isinstance(wrap, Keep) else None,
        )
        dispatcher.capacity = inner.capacity = capacity if factor else ExpertCapacity(device=device)
        with capacity.unbounded() if is_lifted else nullcontext():
            symm_mem.poison(memory)
            if wrap == "delay":
                results = run_delayed(dispatcher, module, device)
            else:
                if isinstance(wrap, Keep):
                    module.mlp = replace(mlp, keeps=wrap)
                results = run_layers(dispatcher, module, draw_layers(device), WRAPS.get(wrap))
                module.mlp = mlp
        answers[way] = results, bool(capacity.invalidates_step), float(capacity.needed_factor())
    return kept_by_autograd, answers


def check_ways(ranks: list[Any], again: float = 0.0) -> None:
    """`again` is the tolerance of what is computed again, by kernels that may be others without communication."""
    for kept_by_autograd, answers in ranks:
        for way, (results, is_void, _) in answers.items():
            if again and isinstance(WAYS[way][2], Keep):
                fused.assert_near(results, kept_by_autograd, again, range(len(results)))
            elif way == "too small":  # forward is right, and everything is finite
                assert torch.equal(results[0], kept_by_autograd[0])
                assert all(bool(tensor.isfinite().all()) for tensor in results)
            else:
                assert all(map(torch.equal, results, kept_by_autograd)) and not is_void, way
        of_one = [way for way in answers if WAYS[way][2] not in ("checkpoint", "delay", *Keep)]
        needs = {answers[way][2] for way in of_one}
        assert len(needs) <= 1, "the need is exact in any case"
    if "too small" in ranks[0][1]:
        small = [answers["too small"] for _, answers in ranks]
        assert any(is_void for _, is_void, _ in small) == any(need > 1 for *_, need in small)


@pytest.mark.few("ways0-True", "ways2-True")
@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("ways", "overlaps"),
    [
        (("kept", "too small", "delayed"), True),
        (("kept", "lifted", "delayed", "delayed, lifted", "delayed, without an arena"), False),
        (("rows", "rows, lifted", "rows, without an arena", "nothing", "nothing, without an arena"), True),
    ],
)
def test_files_of_an_arena_give_the_same_bits(
    ranks: Any, tmp_path: Path, ways: tuple[str, ...], overlaps: bool
) -> None:
    check_ways(ranks(2, run_ways, str(tmp_path), ways, overlaps))


@pytest.mark.interpreted
def test_files_of_an_arena_give_the_same_bits_recomputed_and_compiled(ranks: Any, tmp_path: Path) -> None:
    check_ways(ranks(2, run_ways, str(tmp_path), ("checkpointed", "compiled, lifted"), True))


@pytest.mark.interpreted
def test_files_of_an_arena_with_clones_give_the_same_bits(ranks: Any, tmp_path: Path) -> None:
    check_ways(ranks(2, run_ways, str(tmp_path), ("kept", "lifted"), True, symm_mem.MOST_SPARE))


@pytest.mark.few("ways0")
@pytest.mark.interpreted
@pytest.mark.parametrize(
    "ways", [("delayed",), ("kept", "rows", "lifted", "delayed, lifted", "nothing", "checkpointed", "compiled")]
)
def test_files_of_an_arena_with_biases_give_the_same_bits(ranks: Any, tmp_path: Path, ways: tuple[str, ...]) -> None:
    check_ways(ranks(2, run_ways, str(tmp_path), ways, True, 0, biased_expert_mlp))


@fused.with_gpus
@pytest.mark.parametrize("overlaps", [True, False])
def test_gpus_of_an_arena_with_biases_give_the_same_bits(ranks_of_a_size: Any, num_ranks: int, overlaps: bool) -> None:
    check_ways(ranks_of_a_size(num_ranks, run_ways, None, tuple(WAYS), overlaps, 0, biased_expert_mlp))


@fused.with_gpus
@pytest.mark.parametrize(("overlaps", "num_replicas"), [(True, 0), (False, 0), (True, 1)])
def test_gpus_of_an_arena_give_the_same_bits(
    ranks_of_a_size: Any, num_ranks: int, overlaps: bool, num_replicas: int
) -> None:
    ways = tuple(way for way in WAYS if not num_replicas or WAYS[way][2] != "delay")
    check_ways(ranks_of_a_size(num_ranks, run_ways, None, ways, overlaps, num_replicas))
