"""The capacity factor follows the need of steps."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.kernels.experts.arena import Arena
from titan_moe.plan.cost.loads import LayerLoads
from titan_moe.training.capacity_control import (
    CALIBRATION_STEPS,
    MANY_OVERFLOWS,
    QUIET_STEPS,
    RESERVED_SHARE,
    WINDOW_STEPS,
    CapacityControl,
    largest_factor,
    round_up,
)
from titan_moe.training.peak_memory import PeakMemory

GPU = torch.device("cuda")
MIB = 2**20


def follow(control: CapacityControl, need: float, has_overflowed: bool) -> float:
    return control.follow({"needed_factor": need, "has_overflowed": has_overflowed}).capacity_factor


def run(control: CapacityControl, needs: list[float]) -> tuple[list[float], int]:
    """The factors after each step, and the number of overflows, where a bound below the need overflows."""
    factors, num_overflows = [], 0
    for need in needs:
        overflows = 0 < control.factor < need
        num_overflows += overflows
        factors.append(follow(control, need, overflows))
    return factors, num_overflows


@pytest.mark.parametrize(("factor", "rounded"), [(0.2, 1.0), (1.0, 1.0), (1.01, 1.125), (1.25, 1.25), (1.26, 1.375)])
def test_factors_are_multiples_of_an_eighth(factor: float, rounded: float) -> None:
    assert round_up(factor) == rounded


def test_control_calibrates_without_a_bound_and_then_leaves_a_margin() -> None:
    factors, _ = run(CapacityControl(), [1.0, 1.3, 1.2, 1.1, 1.1])
    assert factors[: CALIBRATION_STEPS - 1] == [0.0] * (CALIBRATION_STEPS - 1)
    assert factors[CALIBRATION_STEPS - 1 :] == [1.5, 1.5]  # 1.3 * 1.1 = 1.43


def test_control_grows_from_the_exact_need_and_by_more_each_time() -> None:
    control = CapacityControl()
    factors, num_overflows = run(control, [1.0] * CALIBRATION_STEPS + [1.5, 1.5, 2.0])
    assert factors[CALIBRATION_STEPS - 1 :] == [
        1.125,
        round_up(1.5 * 1.21),
        round_up(1.5 * 1.21),
        round_up(2.0 * 1.331),
    ]
    assert num_overflows == 2


def test_control_grows_ahead_of_a_load_that_drifts() -> None:
    needs = [1.0] * CALIBRATION_STEPS + [1.0 + 0.01 * step for step in range(60)]
    factors, num_overflows = run(CapacityControl(), needs)
    assert num_overflows == 0 and factors[-1] == 1.75
    assert len(set(factors)) == 1 + 6, "0, then a recording an eighth"


def test_control_grows_after_an_overflow_alone_where_a_factor_is_compiled() -> None:
    needs = [1.0] * CALIBRATION_STEPS + [1.12, 1.12, 1.2]
    factors, num_overflows = run(CapacityControl(grows_ahead=False), needs)
    assert num_overflows == 1 and factors[CALIBRATION_STEPS:] == [1.125, 1.125, round_up(1.2 * 1.21)]


def test_control_asks_once_for_memory_that_is_not_there() -> None:
    asked: list[float] = []
    control = CapacityControl(lambda: asked.append(1.3) or 1.3)
    factors, num_overflows = run(control, [1.2] * CALIBRATION_STEPS + [1.22] * 50)
    assert factors[-1] == 1.25 and num_overflows == 0 and len(asked) == 2


def test_control_grows_ahead_again_once_the_factor_has_changed() -> None:
    largest = 1.3
    control = CapacityControl(lambda: largest)
    factors, _ = run(control, [1.2] * CALIBRATION_STEPS + [1.22])
    assert factors[-1] == 1.25, "memory holds no more"
    largest = 4.0
    factors, num_overflows = run(control, [1.6, 1.95])
    assert factors == [round_up(1.6 * 1.21), round_up(1.95 * 1.21)] and num_overflows == 1


def test_control_lifts_the_bound_while_the_load_changes_too_fast() -> None:
    control = CapacityControl()
    needs = [1.0] * CALIBRATION_STEPS + [1.5**n for n in range(1, MANY_OVERFLOWS + 1)]
    factors, num_overflows = run(control, needs)
    assert num_overflows == MANY_OVERFLOWS and factors[-1] == 0.0
    later, num_overflows = run(control, [1.2] * (WINDOW_STEPS + 1))
    assert num_overflows == 0 and later[WINDOW_STEPS - 2] == 0.0
    assert later[WINDOW_STEPS - 1] == later[-1] == round_up(1.2 * 1.1), "it comes back"


def test_control_takes_what_memory_holds_or_no_bound() -> None:
    control = CapacityControl(lambda: 1.3)
    factors, _ = run(control, [1.2] * (CALIBRATION_STEPS + 1))
    assert factors[-1] == 1.25, "less than the margin, but enough"
    factors, num_overflows = run(control, [1.6] * (WINDOW_STEPS - 1))
    assert num_overflows == 1 and set(factors) == {0.0}
    factors, _ = run(control, [1.0] * (3 * WINDOW_STEPS))
    assert factors[-1] == 1.125, "it comes back once the need fits"


def test_control_shrinks_only_after_a_long_quiet_time() -> None:
    control = CapacityControl()
    run(control, [2.0] * CALIBRATION_STEPS)
    factors, _ = run(control, [1.2] * (2 * QUIET_STEPS))
    assert factors[QUIET_STEPS // 2] == round_up(2.2) and factors[-1] == round_up(1.2 * 1.1)
    factors, _ = run(control, [1.15] * (2 * QUIET_STEPS))
    assert factors[-1] == round_up(1.2 * 1.1), "a step of an eighth is not worth a new recording"


def test_control_goes_on_with_the_factor_of_an_earlier_run() -> None:
    control = CapacityControl()
    control.load_state_dict({"factor": 1.75})
    assert run(control, [1.2, 1.3])[0] == [1.75, 1.75], "after one step without a bound"


def test_control_does_not_go_on_with_what_memory_no_longer_holds() -> None:
    control = CapacityControl(lambda: 1.5)
    control.load_state_dict({"factor": 1.75})
    assert run(control, [1.2])[0] == [0.0]


def test_control_survives_needs_that_are_not_finite() -> None:
    control = CapacityControl(lambda: 4.0)
    factors, _ = run(control, [math.inf] * (CALIBRATION_STEPS + 1))
    assert set(factors) == {0.0}
    control = CapacityControl(lambda: 4.0)
    factors, _ = run(control, [1.0] * CALIBRATION_STEPS)
    assert follow(control, math.inf, False) == factors[-1] == 1.125


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> PeakMemory:
    """Of 10 layers with 8 to 64 rows of 1 MiB, an eighth of a factor is 10 MiB. The arena seems to be on a GPU of 1000
    MiB, of which others have 100, and this process has reserved 650."""
    arena = Arena(MIB // 4, 1, torch.float32, "cpu")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (250 * MIB, 1000 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 650 * MIB)
    monkeypatch.setattr(dist, "all_reduce", lambda factor, op: None)
    capacity = ExpertCapacity()
    capacity.use_arena(arena, LayerLoads(10, rows=8, slots=8, worst_rows=64, worst_slots=64))
    memory = PeakMemory(capacity)
    memory.device = GPU
    return memory


def leave(room_mib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let so much be left to the arena: of what others leave, less the reserve and the peak beside the arena."""
    beside_mib = 1000 * (1 - RESERVED_SHARE) - 100 - room_mib
    monkeypatch.setattr(PeakMemory, "bytes_beside_arena", beside_mib * MIB)


@pytest.mark.parametrize(
    ("room_mib", "factor"), [(641, math.inf), (639, 7.875), (355, 4.375), (71, 0.875), (65, 0.75), (63, 0.0), (-9, 0.0)]
)
def test_largest_factor_is_what_memory_leaves_to_the_arena(
    memory: PeakMemory, monkeypatch: pytest.MonkeyPatch, room_mib: float, factor: float
) -> None:
    """Infinite where the worst case fits, 0 where not even that of one layer does."""
    leave(room_mib, monkeypatch)
    assert largest_factor(memory) == factor
    memory.device = torch.device("cpu")
    assert largest_factor(memory) == math.inf


def test_largest_factor_is_that_of_the_rank_with_least_memory(
    memory: PeakMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reduce(factor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        assert op == dist.ReduceOp.MIN
        factor.clamp_(max=2.0)

    monkeypatch.setattr(dist, "all_reduce", reduce)
    leave(355, monkeypatch)
    assert largest_factor(memory) == 2.0
    memory.capacity.arena = None
    assert largest_factor(memory) == math.inf


def test_largest_factor_is_that_of_every_slab(monkeypatch: pytest.MonkeyPatch, memory: PeakMemory) -> None:
    leave(355, monkeypatch)
    monkeypatch.setattr(Arena, "num_slabs", 2)
    assert largest_factor(memory) == 2.125, "half of the room"


@pytest.mark.parametrize(("num_mib", "factor"), [(0, 4.375), (60, 3.625)])
def test_largest_factor_leaves_room_for_the_first_recording(
    memory: PeakMemory, monkeypatch: pytest.MonkeyPatch, num_mib: int, factor: float
) -> None:
    leave(355, monkeypatch)
    memory.bytes_of_first_recording = num_mib * MIB
    assert largest_factor(memory) == factor


def test_growth_is_limited_by_memory(memory: PeakMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    control = CapacityControl(partial(largest_factor, memory))
    leave(355, monkeypatch)
    factors, _ = run(control, [1.0] * CALIBRATION_STEPS + [4.2, 4.2, 4.5, 1.0])
    assert factors[CALIBRATION_STEPS - 1 :] == [1.125, 4.375, 4.375, 0.0, 0.0], "with its margin 4.2 would be 5.125"


def test_sizes_stay_exact_where_nothing_fits(memory: PeakMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    control = CapacityControl(partial(largest_factor, memory))
    leave(63, monkeypatch)
    factors, num_overflows = run(control, [1.0] * (CALIBRATION_STEPS + WINDOW_STEPS))
    assert set(factors) == {0.0} and num_overflows == 0
    leave(95, monkeypatch)
    factors, _ = run(control, [1.0] * (2 * WINDOW_STEPS))
    assert factors[-1] == 1.125, "it comes back once memory is free"
