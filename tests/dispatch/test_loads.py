"""Every load of config/forced_loads.py: dispatchers give the results of exact sizes, and need, overflows and the
capacity factor are those that the expert ids predict.

Ranks and kernels are those of symm_mem/test_fused.py.
"""

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import load as load_tests
from support.gpus import take_gpu
from torch import Tensor

from titan_moe.config.forced_loads import BURST_STEPS, DRAWN_LOADS
from titan_moe.dispatch import AllGatherDispatcher, AllToAllDispatcher
from titan_moe.dispatch import capacity as capacity_module
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.symm_mem.fused import SymmMemFusedDispatcher
from titan_moe.dispatch.symm_mem.memory import SymmMemory, open_symm_memory
from titan_moe.kernels.choose import PERMUTE, choose_expert_mlp
from titan_moe.kernels.experts.arena import Arena
from titan_moe.kernels.symm_mem.arrays import symm_bytes
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.forced_loads import draw_ids, generator_of
from titan_moe.plan.cost.loads import LayerLoads, visit_probability
from titan_moe.training.capacity_control import CapacityControl
from titan_moe.training.step_runner import StepRunner

equal_local, symm_mem, fused, arena_tests = (
    load_tests(f"dispatch/{name}")
    for name in ("test_equal_local", "symm_mem/test_dispatcher", "symm_mem/test_fused", "symm_mem/test_mlp")
)
STEP = BURST_STEPS - 1
"""A step with a burst."""
HOT = {"hot_rank", "cold_ranks", "bursts", "one_rank", "collapsed"}
"""Loads of which one rank gets most, in all layers together."""
USUAL = 1.25
"""A factor that holds even loads."""


class Case(NamedTuple):
    """Sizes of a microbatch on a rank."""

    num_layers: int
    num_tokens: int
    width: int
    hidden: int
    num_experts: int
    top_k: int

    def loads(self, num_ranks: int) -> LayerLoads:
        num_local, worst = self.num_experts // num_ranks, num_ranks * self.num_tokens
        rows = worst * visit_probability(self.num_experts, num_local, self.top_k)
        slots = self.num_tokens * self.top_k
        return LayerLoads(self.num_layers, rows, slots, worst, worst * min(self.top_k, num_local))


SMALL = Case(
    2, equal_local.NUM_TOKENS, equal_local.WIDTH, equal_local.HIDDEN, equal_local.NUM_EXPERTS, equal_local.TOP_K
)
LARGE = Case(4, 512, 256, 128, 32, 4)


def ids_of(case: Case, load: str, num_ranks: int, layer: int, step: int, generator: torch.Generator) -> Tensor:
    return draw_ids(
        load,
        num_tokens=case.num_tokens,
        num_experts=case.num_experts,
        top_k=case.top_k,
        num_ranks=num_ranks,
        layer=layer,
        step=step,
        generator=generator,
    )


def draw_inputs(case: Case, load: str, num_ranks: int, rank: int, layer: int, step: int) -> list[Tensor]:
    """Rows, ids, scores and a gradient of a rank, in fp64."""
    generator = generator_of(rank, layer, step)
    ids_TK = ids_of(case, load, num_ranks, layer, step, generator)
    shape = case.num_tokens, case.width
    x_TD, grad_TD = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return [x_TD, ids_TK, torch.rand(ids_TK.shape, generator=generator, dtype=torch.float64), grad_TD]


@cache
def loads_of_ranks(case: Case, load: str, num_ranks: int, layer: int, step: int) -> list[tuple[int, int]]:
    """Rows and slots of each rank in a layer, counted one by one."""
    per_rank = case.num_experts // num_ranks
    sizes = [[0, 0] for _ in range(num_ranks)]
    for rank in range(num_ranks):
        for ids in ids_of(case, load, num_ranks, layer, step, generator_of(rank, layer, step)).tolist():
            destinations = [expert // per_rank for expert in ids if expert >= 0]
            for peer in destinations:
                sizes[peer][1] += 1
            for peer in set(destinations):
                sizes[peer][0] += 1
    return [(rows, slots) for rows, slots in sizes]


def sums_of_ranks(case: Case, load: str, num_ranks: int, step: int) -> list[tuple[int, int]]:
    """Rows and slots of each rank in all layers."""
    layers = [loads_of_ranks(case, load, num_ranks, layer, step) for layer in range(case.num_layers)]
    return [tuple(map(sum, zip(*of_layers, strict=True))) for of_layers in zip(*layers, strict=True)]


def needed_factor(case: Case, load: str, num_ranks: int, step: int) -> float:
    """The factor whose arena holds rows and slots of all layers, on every rank."""
    balanced = case.loads(num_ranks).of_all_layers()
    largest = map(max, zip(*sums_of_ranks(case, load, num_ranks, step), strict=True))
    return max(number / one for number, one in zip(largest, balanced, strict=True))


def overflows(case: Case, num_ranks: int, sums: tuple[int, int], factor: float) -> bool:
    return any(n > room for n, room in zip(sums, case.loads(num_ranks).room(factor), strict=True))


# Collectives


KINDS = {
    # name: dispatcher, whether slots are bounded, whether the bound is lifted
    "allgather": (AllGatherDispatcher, True, False),
    "allgather, lifted": (AllGatherDispatcher, True, True),
    "alltoall": (AllToAllDispatcher, False, False),
}


def run_collectives(factors: dict[str, float]) -> dict[tuple[str, str], tuple[list[Tensor], bool, float]]:
    """By kind and load: results, whether slots overflowed, and the factor that the layer needed."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    per_rank = SMALL.num_experts // num_ranks
    answers = {}
    for kind, (dispatcher_class, is_bounded, is_lifted) in KINDS.items():
        for load in DRAWN_LOADS:
            dispatcher = dispatcher_class(SMALL.num_experts, dist.group.WORLD)
            dispatcher.capacity = capacity = ExpertCapacity(factors[load] if is_bounded else 0.0)
            module = equal_local.experts(rank * per_rank, (rank + 1) * per_rank)
            inputs = draw_inputs(SMALL, load, num_ranks, rank, 1, STEP)
            with (
                mock.patch.object(capacity_module, "SLOTS_ALIGNMENT", 1),
                capacity.unbounded() if is_lifted else nullcontext(),
            ):
                results = equal_local.serve(dispatcher, module, inputs)
            answers[kind, load] = results, bool(capacity.overflowed), float(capacity.needed_factor())
    return answers


@pytest.mark.few("4-True", "4-False")
@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_collectives_equal_the_dense_oracle_under_every_load(ranks: Any, num_ranks: int, fits: bool) -> None:
    slots = {load: [n for _, n in loads_of_ranks(SMALL, load, num_ranks, 1, STEP)] for load in DRAWN_LOADS}
    balanced = SMALL.num_tokens * SMALL.top_k
    factors = {load: max(numbers) / balanced if fits else 1.0 for load, numbers in slots.items()}
    answers = ranks(num_ranks, run_collectives, factors)
    too_small = set()
    for load in DRAWN_LOADS:
        drawn = [tuple(draw_inputs(SMALL, load, num_ranks, rank, 1, STEP)) for rank in range(num_ranks)]
        oracle = equal_local.join([equal_local.dense_oracle(inputs) for inputs in drawn], experts_add_up=True)
        for kind, (_, is_bounded, is_lifted) in KINDS.items():
            results, overflowed, needs = zip(*(answer[kind, load] for answer in answers), strict=True)
            expected = [is_bounded and not is_lifted and not fits and n > balanced for n in slots[load]]
            assert list(overflowed) == expected, (kind, load)
            if is_bounded:  # exact where nothing overflows
                assert needs == pytest.approx(
                    [1.0 if big else n / balanced for n, big in zip(slots[load], expected, strict=True)]
                )
            if any(expected):
                too_small.add(load)
                assert all(bool(tensor.isfinite().all()) for tensors in results for tensor in tensors)
            else:
                equal_local.assert_close(equal_local.join(list(results), experts_add_up=False), oracle)
    assert ({"hot_rank", "bursts", "one_rank", "alternating"} <= too_small) != fits


# Arena


class Way(NamedTuple):
    """What an arena gave, beside a microbatch that autograd keeps."""

    is_equal: bool
    """Values and gradients, bit for bit."""
    has_equal_output: bool
    is_finite: bool
    has_overflowed: bool
    need: tuple[int, int]


def share(folder: str | None, case: Case) -> tuple[SymmMemory, torch.device]:
    """This rank's symmetric memory: files in a folder, or on GPUs."""
    num_ranks = dist.get_world_size()
    num_bytes = symm_bytes(num_ranks, case.num_tokens, case.width, case.top_k, torch.float32, torch.float32)
    if folder is not None:
        return symm_mem.mapped_files.map_files(folder, num_bytes, dist.group.WORLD), torch.device("cpu")
    device = take_gpu()
    return open_symm_memory(num_bytes, dist.group.WORLD, device), device


def experts_of(case: Case, device: torch.device) -> GroupedExperts:
    num_local = case.num_experts // dist.get_world_size()
    module = GroupedExperts(num_local, case.width, case.hidden, choose_expert_mlp("fused", "activation"))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for parameter in module.parameters():
        drawn = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
        parameter.data = drawn.to(device, fused.dtype_of(device))
    return module


def layers_of(case: Case, load: str, step: int, device: torch.device) -> list[list[Tensor]]:
    """This rank's inputs of each layer."""
    rank, num_ranks, dtype = dist.get_rank(), dist.get_world_size(), fused.dtype_of(device)
    drawn = [draw_inputs(case, load, num_ranks, rank, layer, step) for layer in range(case.num_layers)]
    return [
        [x_TD.to(device, dtype), ids_TK.to(device), scores_TK.to(device).float(), grad_TD.to(device, dtype)]
        for x_TD, ids_TK, scores_TK, grad_TD in drawn
    ]


def capacity_with_arena(case: Case, factor: float, device: torch.device) -> ExpertCapacity:
    capacity = ExpertCapacity(factor, device)
    arena = Arena(case.width, case.hidden, fused.dtype_of(device), device)
    capacity.use_arena(arena, case.loads(dist.get_world_size()))
    poison_arena(arena)
    return capacity


def poison_arena(arena: Arena) -> None:
    """What is not written must not be read."""
    arena.rows_AW.fill_(float("nan"))
    arena.hidden_BH.fill_(float("nan"))


def run_arenas(
    folder: str | None, case: Case, factors: dict[str, float], overlaps: bool
) -> dict[str, dict[str, tuple[Any, ...]]]:
    """By load, fields of a `Way`: with the usual room, with a factor that fits, and lifted."""
    memory, device = share(folder, case)
    module = experts_of(case, device)
    dispatcher = SymmMemFusedDispatcher(case.num_experts, memory, PERMUTE["triton"], overlaps=overlaps)
    answers: dict[str, dict[str, tuple[Any, ...]]] = {}
    for load, fitting in factors.items():
        dispatcher.capacity = ExpertCapacity()
        kept = arena_tests.run_layers(dispatcher, module, layers_of(case, load, STEP, device))
        answers[load] = {}
        for way, factor in {"usual": USUAL, "fits": fitting, "lifted": USUAL}.items():
            if way == "fits" and factor <= USUAL:  # the usual one does
                continue
            dispatcher.capacity = capacity = capacity_with_arena(case, factor, device)
            symm_mem.poison(memory)
            with capacity.unbounded() if way == "lifted" else nullcontext():
                results = arena_tests.run_layers(dispatcher, module, layers_of(case, load, STEP, device))
            answers[load][way] = (
                all(map(torch.equal, results, kept)),
                torch.equal(results[0], kept[0]),
                all(bool(tensor.isfinite().all()) for tensor in results),
                bool(capacity.invalidates_step),
                tuple(capacity.arena.need.tolist()),
            )
    return answers


def check_arenas(answers: list[dict[str, dict[str, tuple[Any, ...]]]], case: Case, loads: tuple[str, ...]) -> None:
    num_ranks, too_small = len(answers), set()
    for load in loads:
        sums = sums_of_ranks(case, load, num_ranks, STEP)
        predicted = [overflows(case, num_ranks, sizes, USUAL) for sizes in sums]
        for rank, answer in enumerate(answers):
            for way, fields in answer[load].items():
                result = Way(*fields)
                where = f"{load}, {way}, rank {rank}: {result}"
                assert result.need == sums[rank], where
                assert result.has_overflowed == (way == "usual" and predicted[rank]), where
                assert result.has_equal_output and result.is_finite, where
                assert result.is_equal or (way == "usual" and any(predicted)), where
        if any(predicted):
            too_small.add(load)
    even = {"uniform", *(["alternating"] if case.num_layers % num_ranks == 0 else [])}
    assert too_small & (HOT | even) == HOT & set(loads)


def factors_of(case: Case, loads: tuple[str, ...], num_ranks: int) -> dict[str, float]:
    return {load: needed_factor(case, load, num_ranks, STEP) for load in loads}


@pytest.mark.few("loads1-False")
@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("loads", "overlaps"), [(("hot_rank", "cold_ranks"), True), (("alternating", "one_rank"), False)]
)
def test_files_of_an_arena_give_the_bits_of_exact_sizes_under_uneven_loads(
    ranks: Any, tmp_path: Path, loads: tuple[str, ...], overlaps: bool
) -> None:
    check_arenas(ranks(2, run_arenas, str(tmp_path), SMALL, factors_of(SMALL, loads, 2), overlaps), SMALL, loads)


@fused.with_gpus
@pytest.mark.parametrize("overlaps", [True, False])
def test_gpus_of_an_arena_give_the_bits_of_exact_sizes_under_every_load(
    ranks_of_a_size: Any, num_ranks: int, overlaps: bool
) -> None:
    loads = tuple(DRAWN_LOADS)
    answers = ranks_of_a_size(num_ranks, run_arenas, None, LARGE, factors_of(LARGE, loads, num_ranks), overlaps)
    check_arenas(answers, LARGE, loads)


# Capacity factor


class Step:
    """Stands for `TrainStep`: a microbatch of layers without a model, and the loads of all ranks."""

    def __init__(self, dispatcher: SymmMemFusedDispatcher, module: GroupedExperts, case: Case, load: str) -> None:
        self.dispatcher, self.module, self.case, self.load = dispatcher, module, case, load
        self.capacity = dispatcher.capacity
        self.results: list[Tensor] = []

    def __call__(self, batch: Any) -> Any:
        device = batch.tokens_MBN.device
        symm_mem.poison(self.dispatcher.memory)
        poison_arena(self.capacity.arena)
        self.capacity.reset()
        drawn = layers_of(self.case, self.load, batch.index, device)
        self.results = arena_tests.run_layers(self.dispatcher, self.module, drawn)
        loads = torch.stack([self.capacity.invalidates_step.float(), self.capacity.needed_factor()]).cpu()
        dist.all_reduce(loads, dist.ReduceOp.MAX)
        metrics = {"has_overflowed": loads[0], "needed_factor": loads[1], "grad_norm": torch.ones_like(loads[1])}
        return SimpleNamespace(metrics=metrics)


class Followed(NamedTuple):
    """A step whose bound follows the load."""

    is_equal: bool
    """Values and gradients to those that autograd keeps, bit for bit."""
    need: float
    num_reruns: int
    """So far."""
    factor: float
    """Of the next step."""
    room: tuple[int, int]


def follow(folder: str | None, case: Case, load: str, steps: range, first_factor: float = 0.0) -> list[tuple[Any, ...]]:
    """Take these steps, each also without an arena: fields of a `Followed`."""
    memory, device = share(folder, case)
    module = experts_of(case, device)
    arena_dispatcher, exact = (
        SymmMemFusedDispatcher(case.num_experts, memory, PERMUTE["triton"], capacity)
        for capacity in (capacity_with_arena(case, 0.0, device), None)
    )
    step = Step(arena_dispatcher, module, case, load)
    control = CapacityControl()
    control.load_state_dict({"factor": first_factor})
    runner = StepRunner(step, SimpleNamespace(step=lambda: None), controllers=[control])
    followed = []
    for index in steps:
        runner(SimpleNamespace(tokens_MBN=torch.empty(0, device=device), index=index))
        kept = arena_tests.run_layers(exact, module, layers_of(case, load, index, device))
        arena = step.capacity.arena
        room = len(arena.rows_AW), len(arena.hidden_BH)
        is_equal = all(map(torch.equal, step.results, kept))
        followed.append((is_equal, runner.needed_factor, runner.num_reruns, runner.capacity_factor, room))
    return followed


def check_followed(
    answers: list[list[tuple[Any, ...]]], case: Case, load: str, steps: range, first_factor: float = 0.0
) -> int:
    """Check every step against a control that is told what the ids need. Returns the number of reruns."""
    num_ranks, num_reruns = len(answers), 0
    control = CapacityControl()
    if first_factor:
        control.load_state_dict({"factor": first_factor})
    for number, index in enumerate(steps):
        need = needed_factor(case, load, num_ranks, index)
        sums = sums_of_ranks(case, load, num_ranks, index)
        has_overflowed = control.factor > 0 and any(overflows(case, num_ranks, s, control.factor) for s in sums)
        num_reruns += has_overflowed
        factor = control.follow({"needed_factor": need, "has_overflowed": has_overflowed}).capacity_factor
        for followed in (Followed(*answer[number]) for answer in answers):
            assert followed.is_equal and followed.need == pytest.approx(need, rel=1e-6), (load, index)
            assert (followed.num_reruns, followed.factor) == (num_reruns, factor), (load, index)
            assert followed.room == case.loads(num_ranks).room(factor), (load, index)
    return num_reruns


@pytest.mark.few()
@pytest.mark.interpreted
def test_files_of_an_arena_follow_a_burst(ranks: Any, tmp_path: Path) -> None:
    case_of_steps = SMALL, "bursts", range(STEP - 1, STEP + 2), USUAL
    assert check_followed(ranks(2, follow, str(tmp_path), *case_of_steps), *case_of_steps) == 1


@fused.with_gpus
@pytest.mark.parametrize("load", ["uniform", "drifting", "bursts", "alternating"])
def test_gpus_of_an_arena_follow_the_load(ranks_of_a_size: Any, num_ranks: int, load: str) -> None:
    steps = range(3 * BURST_STEPS)
    num_reruns = check_followed(ranks_of_a_size(num_ranks, follow, None, LARGE, load, steps), LARGE, load, steps)
    assert (num_reruns > 0) == (load in ("drifting", "bursts"))
