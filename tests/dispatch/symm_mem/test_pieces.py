"""Layers of an arena with a bound on each: where they fit, the bits of layers without one; where one does not, a flag;
while the bound is lifted, the same results in pieces.

Ranks and kernels are those of symm_mem/test_fused.py, layers and loads those of symm_mem/test_mlp.py: the second layer
sends all rows to one rank.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from support import load
from torch import Tensor

from titan_moe.dispatch import capacity as capacity_module
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.symm_mem.fused import PeerPieces, SymmMemFusedDispatcher
from titan_moe.kernels.experts.formats import FORMATS
from titan_moe.kernels.experts.fused_mlp import FusedMLP, Keep, biased_expert_mlp, fused_expert_mlp
from titan_moe.plan.cost import loads

symm_mem, fused, layers = (load(f"dispatch/symm_mem/{name}") for name in ("test_dispatcher", "test_fused", "test_mlp"))


class Way(NamedTuple):
    """How layers are taken."""

    layer_factor: float = 1.0
    is_lifted: bool = True
    wrap: Any = "none"
    tokens_at_a_time: int | None = None  # in place of those that have room
    routings: tuple[str, ...] = layers.ROUTINGS


WAYS = {
    "fits": Way(1.9, is_lifted=False, routings=("random", "dropped_choices")),
    "too small": Way(is_lifted=False),
    "pieces": Way(),
    "uneven pieces": Way(tokens_at_a_time=5),
    "checkpointed": Way(wrap="checkpoint"),
    "delayed": Way(wrap="delay"),
    "rows": Way(wrap=Keep.ROWS),
    "nothing": Way(wrap=Keep.NOTHING),
}
Answer = tuple[list[Tensor], bool, float, list[tuple[int, int]]]


def run_ways(
    folder: str | None, ways: tuple[str, ...], overlaps: bool, num_replicas: int = 0, mlp: FusedMLP = fused_expert_mlp
) -> tuple[dict[tuple[str, ...], list[Tensor]], dict[tuple[str, ...], list[Tensor]], dict[str, Answer]]:
    """The results of microbatches that autograd keeps, and this rank's choices in their layers, by routings; and by
    way, those with a bound on each layer, whether the step is void, the factor that all layers needed, and the numbers
    of pieces of layers and of the slots of one."""
    memory, device = symm_mem.share(folder)
    module, num_ranks = fused.my_experts(device, mlp), memory.peer_ptrs_P.numel()
    for parameter in module.parameters():
        parameter.data /= 4
    dispatcher = fused.dispatcher_of(partial(SymmMemFusedDispatcher, overlaps=overlaps), memory, module, num_replicas)
    inner, answers = dispatcher.inner if num_replicas else dispatcher, {}
    kept, ids = {}, {}
    for name in ways:
        way = WAYS[name]
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(layers, "ROUTINGS", way.routings))
            if way.routings not in kept:
                dispatcher.capacity = inner.capacity = ExpertCapacity(device=device)
                drawn = layers.draw_layers(device)
                ids[way.routings] = [ids_TK.cpu() for _, ids_TK, _, _ in drawn]
                kept[way.routings] = layers.run_layers(dispatcher, module, drawn)
            for of in (capacity_module, loads):
                stack.enter_context(mock.patch.object(of, "SLOTS_ALIGNMENT", 1))
            capacity = layers.capacity_with_arena(
                2.5,
                num_ranks,
                device,
                is_checkpointed=way.wrap == "checkpoint",
                num_replicas=num_replicas,
                format=mlp.format,
                num_slabs=3 if way.wrap == "delay" else 1,
                num_hidden_layers=0 if isinstance(way.wrap, Keep) else None,
                layer_factor=way.layer_factor,
            )
            dispatcher.capacity = inner.capacity = capacity
            if way.is_lifted:
                stack.enter_context(capacity.unbounded())
            if way.tokens_at_a_time:
                few = mock.Mock(return_value=way.tokens_at_a_time)
                stack.enter_context(mock.patch.object(ExpertCapacity, "tokens_at_a_time", few))
            run = PeerPieces.run_mlp
            taken = stack.enter_context(mock.patch.object(PeerPieces, "run_mlp", autospec=True, side_effect=run))
            symm_mem.poison(memory)
            if way.wrap == "delay":
                results = layers.run_delayed(dispatcher, module, device)
            else:
                module.mlp = replace(mlp, keeps=way.wrap) if isinstance(way.wrap, Keep) else mlp
                wrap = layers.WRAPS.get(way.wrap)
                results = layers.run_layers(dispatcher, module, layers.draw_layers(device), wrap)
                module.mlp = mlp
        pieces = [call.args[0] for call in taken.call_args_list]
        numbers = [(len(of.sent), max(sizes.num_slots for sizes in of.of)) for of in pieces]
        assert capacity.bounds_each_layer, "the worst case has no room"
        answers[name] = results, bool(capacity.invalidates_step), float(capacity.needed_factor()), numbers
    return kept, ids, answers


def needed_factor(ids_of_ranks: list[list[Tensor]], rank: int) -> float:
    """The rows and slots of all layers of a rank over those of balanced ones, counted one by one."""
    num_ranks, num_layers = len(ids_of_ranks), len(ids_of_ranks[0])
    first = rank * (num_local := layers.equal_local.NUM_EXPERTS // num_ranks)
    tokens = [token for of_rank in ids_of_ranks for ids_TK in of_rank for token in ids_TK.tolist()]
    choices = [sum(first <= expert < first + num_local for expert in token) for token in tokens]
    rows, slots = 0.75 * num_ranks * layers.T * num_layers, layers.T * layers.K * num_layers
    return max(sum(number > 0 for number in choices) / rows, sum(choices) / slots)


def check_ways(answers: list[Any], *, has_same_bits: bool, tolerance: float = 1e-6, has_clones: bool = False) -> None:
    """Triton's GEMMs give a row the same bits among any others; PyTorch's need not. Weight gradients are sums over
    pieces."""
    num_of_weights, balanced = 2, layers.T * layers.K
    voids: dict[str, list[bool]] = {}
    for rank, (of_routings, _, of_ways) in enumerate(answers):
        for name, (results, is_void, need, taken) in of_ways.items():
            voids.setdefault(name, []).append(is_void)
            if WAYS[name].wrap == "none" and name != "too small" and not has_clones:
                ids = [of_rank[WAYS[name].routings] for _, of_rank, _ in answers]
                assert need == pytest.approx(needed_factor(ids, rank)), f"{name}: the need is exact in pieces too"
            kept = of_routings[WAYS[name].routings]
            num = len(results) - (num_of_weights if len(kept) <= 6 else 2 * num_of_weights)
            if name == "too small":
                assert all(bool(tensor.isfinite().all()) for tensor in results) and not taken
                continue
            if not WAYS[name].is_lifted:
                assert all(map(torch.equal, results, kept)) and not taken, name
                continue
            if has_same_bits:
                assert all(map(torch.equal, results[:num], kept[:num])), name
            fused.assert_near(results, kept, tolerance, range(len(kept)))
            assert taken and min(number for number, _ in taken) >= 2, name
            assert WAYS[name].tokens_at_a_time or max(slots for _, slots in taken) <= balanced
    for name, are_void in voids.items():
        assert any(are_void) == (name == "too small"), name


@pytest.mark.few()
@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("ways", "overlaps"),
    [
        (("too small", "pieces"), True),
        (("uneven pieces", "delayed", "rows", "nothing"), False),
        (("fits", "uneven pieces", "checkpointed", "delayed", "rows", "nothing"), True),
    ],
)
def test_files_of_a_bounded_layer_give_the_same_bits(
    ranks: Any, tmp_path: Path, ways: tuple[str, ...], overlaps: bool
) -> None:
    check_ways(ranks(2, run_ways, str(tmp_path), ways, overlaps), has_same_bits=overlaps)


@pytest.mark.few()
@pytest.mark.interpreted
def test_files_of_a_bounded_layer_with_clones_give_the_same_bits(ranks: Any, tmp_path: Path) -> None:
    answers = ranks(2, run_ways, str(tmp_path), ("pieces",), False, symm_mem.MOST_SPARE)
    check_ways(answers, has_same_bits=False, has_clones=True)


@pytest.mark.few()
@pytest.mark.interpreted
def test_files_of_a_bounded_layer_in_fp8_give_the_same_bits(ranks: Any, tmp_path: Path) -> None:
    ways, mlp = ("fits", "pieces", "checkpointed", "rows"), FusedMLP(FORMATS["fp8_rowwise"])
    answers = ranks(2, run_ways, str(tmp_path), ways, True, 0, mlp)
    check_ways(answers, has_same_bits=True, tolerance=1e-2)


def test_a_layer_in_pieces_refuses_a_compiler() -> None:
    pieces: Any = PeerPieces(*[None] * len(PeerPieces._fields))  # type: ignore[arg-type]
    with mock.patch.object(torch.compiler, "is_compiling", lambda: True), pytest.raises(RuntimeError, match="order"):
        pieces.run_mlp(fused_expert_mlp, None, None)


@fused.with_gpus
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("mlp", [fused_expert_mlp, biased_expert_mlp], ids=["plain", "biased"])
def test_gpus_of_a_bounded_layer_give_the_same_results(
    ranks_of_a_size: Any, num_ranks: int, overlaps: bool, mlp: FusedMLP
) -> None:
    answers = ranks_of_a_size(num_ranks, run_ways, None, tuple(WAYS), overlaps, 0, mlp)
    check_ways(answers, has_same_bits=False, tolerance=2e-2)
