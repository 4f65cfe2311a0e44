"""Simulated times of schedules, against the formulas of their papers and manual arithmetic."""

from typing import Any

import pytest

from titan_moe.plan.pipeline.action import Action, Pair
from titan_moe.plan.pipeline.schedules import actions_of
from titan_moe.plan.pipeline.simulation import Times, max_held, simulate


@pytest.mark.parametrize(("pp", "num_microbatches"), [(1, 3), (2, 2), (4, 8), (8, 50)])
def test_simulation_of_1f1b_has_the_bubble_of_the_paper(pp: int, num_microbatches: int) -> None:
    """(pp - 1) / (m + pp - 1), arXiv:2104.04473 section 2.2.1."""
    done = simulate(actions_of("1f1b", pp, 1, num_microbatches), Times([1.0] * pp, [0.5] * pp, [2.0] * pp))
    assert done.makespan == pytest.approx(3.5 * (num_microbatches + pp - 1))
    assert done.bubble_share == pytest.approx((pp - 1) / (num_microbatches + pp - 1))
    assert done.max_in_flight == [min(pp - stage, num_microbatches) for stage in range(pp)]


@pytest.mark.parametrize("vpp", [2, 3, 4])
def test_simulation_of_interleaved_stages_divides_the_bubble(vpp: int) -> None:
    """(pp - 1) / v forwards and backwards of a whole rank, section 2.2.2."""
    pp, num_microbatches = 4, 12
    done = simulate(actions_of("interleaved_1f1b", pp, vpp, num_microbatches), Times.unit(pp * vpp))
    assert done.makespan == 3 * vpp * num_microbatches + 3 * (pp - 1)


def test_simulation_of_zbv_keeps_the_activations_of_1f1b() -> None:
    actions = actions_of("zbv", 4, 2, 20)
    done = simulate(actions, Times.unit(8))
    assert done.makespan == 6 * 20 + 3
    for rank, stages in enumerate([(0, 7), (1, 6), (2, 5), (3, 4)]):
        assert max_held(actions[rank], dict.fromkeys(stages, 0.5)) == 4.0, "4 microbatches of both stages"


def test_simulation_by_hand() -> None:
    """Two stages, the second twice as slow; one microbatch after the other."""
    done = simulate(actions_of("1f1b", 2, 1, 2), Times([1, 2], [1, 2], [1, 2]))
    runs = [
        [(run.action.kind[0], run.action.microbatch, run.start, run.end) for run in runs if not run.action.is_message]
        for runs in done.runs
    ]
    assert runs[0] == [("f", 0, 0, 1), ("f", 1, 1, 2), ("b", 0, 7, 9), ("b", 1, 13, 15)]
    assert runs[1] == [("f", 0, 1, 3), ("b", 0, 3, 7), ("f", 1, 7, 9), ("b", 1, 9, 13)]
    assert done.makespan == 15 and done.bubble_share == pytest.approx(1 - 18 / 30)
    assert done.max_in_flight == [2, 1]


@pytest.mark.parametrize(("kind", "need"), [("forward", "activation"), ("backward", "gradient")])
def test_simulation_sends_where_the_list_does(kind: Any, need: str) -> None:
    """What runs as one sends after both, and the receiver waits so long."""
    start, other = (0, 1) if kind == "forward" else (1, 0)
    send, receive = Action(f"send_{need}", start, 0), Action(f"receive_{need}", other, 0)  # type: ignore[arg-type]
    result, first = Action(kind, start, 0), [Action("forward", stage, 0) for stage in range(2) if kind != "forward"]
    beside = Action("forward", 0, 1)
    begins = []
    for sender in ([result, send, beside], [result, beside, send]):
        receiver = [receive, Action(kind, other, 0)]
        done = simulate([first, sender, receiver, [Action("forward", 1, 1)]], Times.unit(2))
        begins.append(done.runs[2][-1].start - done.runs[1][0].end)
    assert begins == [0.0, 1.0]


def test_simulation_of_a_pair_begins_when_both_can_and_ends_with_both() -> None:
    """Stage 0 on rank 0 and stage 1 on rank 1; rank 1's last forward is beside its first backward."""
    f, b = ([Action(kind, stage, 0) for stage in range(2)] for kind in ("forward", "backward"))  # type: ignore[arg-type]
    ahead = [Action("forward", stage, 1) for stage in range(2)]
    lists = [[f[0], ahead[0], b[0]], [f[1], Pair(ahead[1], b[1])]]
    times = Times([2, 1], [1, 1], [1, 1])
    first, second = simulate(lists, times).runs
    assert [(run.start, run.end) for run in second] == [(2, 3), (4, 7)]
    assert [run.start for run in first] == [0, 2, 7], "the gradient of a pair comes after both"
    overlapped = simulate(lists, times._replace(pairs={(1, 1): 1.5}))
    assert overlapped.runs[1][-1].end == 5.5 and overlapped.max_in_flight == [2, 2]


@pytest.mark.parametrize(
    ("case", "more_in_flight"),
    [
        (("dualpipev", 2, 2, 9), [0.0, 0.0]),
        (("dualpipev", 4, 2, 16), [0.0, 0.0, 0.0, 0.0]),
        (("1f1b", 4, 1, 16), [4.0, 3.0, 2.0, 1.0]),  # as many again
        (("interleaved_1f1b", 4, 2, 16), [0.5, 0.5, 0.5, 0.5]),  # one of a stage
        (("interleaved_1f1b", 4, 4, 16), [0.25, 0.25, 0.25, 0.25]),
    ],
    ids=str,
)
def test_simulation_of_pairs_takes_as_long_as_of_their_halves(case: Any, more_in_flight: list[float]) -> None:
    """And the gain of pairs that hide communication is no bubble."""
    _, pp, vpp, _ = case
    sizes = dict.fromkeys(range(pp * vpp), 1 / vpp)
    lists, times = [actions_of(*case), actions_of(*case, has_pairs=True)], Times.unit(pp * vpp)
    plain, paired = (simulate(of_ranks, times) for of_ranks in lists)
    assert paired.makespan == plain.makespan and paired.bubble_share == pytest.approx(plain.bubble_share)
    held = [[max_held(of_rank, sizes) for of_rank in of_ranks] for of_ranks in lists]
    assert [after - before for before, after in zip(*held, strict=True)] == more_in_flight
    together = {(forward, backward): 2.4 for forward in range(pp * vpp) for backward in range(pp * vpp)}
    overlapped = simulate(lists[1], times._replace(pairs=together))
    fewest_pairs = min(sum(isinstance(entry, Pair) for entry in of_rank) for of_rank in lists[1])
    assert overlapped.makespan <= plain.makespan - 0.6 * fewest_pairs + 1e-9


def test_simulation_refuses_lists_that_wait_for_each_other() -> None:
    lists = actions_of("1f1b", 2, 1, 2)
    lists[1] = lists[1][::-1]
    with pytest.raises(ValueError, match="pipeline ranks wait for each other; by rank: {0: Action"):
        simulate(lists, Times.unit(2))


def test_simulation_of_nothing() -> None:
    done = simulate([[], []], Times.unit(2))
    assert (done.makespan, done.bubble_share, done.max_in_flight) == (0.0, 0.0, [])
