"""Schedules are those of torch.distributed.pipelining or better, and every rank's list can run."""

import doctest
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from torch.distributed.pipelining import schedules as theirs

from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.pipeline_schedules import SCHEDULES
from titan_moe.plan.pipeline.action import Action, Pair, actions_in, flat
from titan_moe.plan.pipeline.orders import ORDERS, ORDERS_WITH_PAIRS, order_of
from titan_moe.plan.pipeline.schedules import actions_of, actions_of_recipe, lay_out
from titan_moe.plan.pipeline.stages import rank_of_stage

README = Path(__file__).parents[3] / "titan_moe" / "plan" / "pipeline" / "README.md"
TORCH = {
    "1f1b": theirs.Schedule1F1B,
    "interleaved_1f1b": theirs.ScheduleInterleaved1F1B,
    "zbv": theirs.ScheduleZBVZeroBubble,
    "dualpipev": theirs.ScheduleDualPipeV,
}
KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}
DURATION = {"backward": 2}
SAME_ORDER = ("1f1b", "interleaved_1f1b")

Case = tuple[str, int, int, int]  # schedule, pp, vpp, microbatches
Unit = tuple[Action, ...]


def cases() -> list[Case]:
    found = []
    for schedule, facts in SCHEDULES.items():
        for pp in (1, 2, 3, 4, 8):
            for vpp in range(facts.min_vpp, min(facts.max_vpp, 3) + 1):
                step = pp if facts.rounds else 1
                numbers = {pp, 2 * pp, 2 * pp + step, 7 * pp - step}
                fewest = facts.fewest_microbatches(pp)
                found += [(schedule, pp, vpp, number) for number in sorted(numbers) if number >= fewest]
    return found


CASES = cases()
PAIRED_CASES = [case for case in CASES if SCHEDULES[case[0]].has_pairs]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def lists_of(case: Case) -> list[list[list[Any]]]:
    """The lists of all ranks, both ways: without and with pairs."""
    return [actions_of(*case), *([actions_of(*case, has_pairs=True)] if case in PAIRED_CASES else [])]


def compute(actions: list[Action]) -> list[Action]:
    return [action for action in actions if action.kind.startswith(("forward", "backward"))]


def units_of(entries: list[Action | Pair]) -> list[Unit]:
    return [unit for unit in map(actions_in, entries) if unit[0].kind.startswith(("forward", "backward"))]


def torch_units(schedule: str, pp: int, vpp: int, num_microbatches: int) -> list[list[Unit]]:
    """Torch's lists, made without processes and stages."""
    it: Any = object.__new__(TORCH[schedule])
    it.pp_group_size, it.n_local_stages, it._n_microbatches = pp, vpp, num_microbatches
    it._num_stages = it.num_stages = pp * vpp
    it.number_of_rounds = max(1, num_microbatches // pp)
    it.microbatches_per_round = num_microbatches // it.number_of_rounds
    if schedule == "1f1b":
        by_rank = list(it._get_pipeline_order().values())
    else:
        by_rank = [it._calculate_single_rank_operations(rank) for rank in range(pp)]
    units = [[_unit(action) for action in actions if action] for actions in by_rank]
    units = [[unit for unit in of_rank if unit] for of_rank in units]
    if schedule == "1f1b":  # torch numbers the forwards of the last rank from 1
        units[-1] = [tuple(a._replace(microbatch=a.microbatch - (a.kind == "forward")) for a in u) for u in units[-1]]
    return units


def _unit(action: Any) -> Unit:
    parts = [part for part in action.sub_actions or (action,) if part.computation_type.name in KINDS]
    return tuple(
        Action(KINDS[part.computation_type.name], part.stage_index, part.microbatch_index)  # type: ignore[arg-type]
        for part in parts
    )


def makespan(units: list[list[Unit]], last_stage: int) -> int:
    """The time when the last unit ends, in time steps, if a unit begins when all that it needs has ended."""
    ended: dict[tuple[str, int, int], int] = {}
    free, done = [0] * len(units), [0] * len(units)
    for now in range(100_000):
        for rank, of_rank in enumerate(units):
            if done[rank] == len(of_rank) or free[rank] > now:
                continue
            unit = of_rank[done[rank]]
            own = {_key(action) for action in unit}
            if all(ended.get(need, now + 1) <= now for action in unit for need in _needs(action, last_stage) - own):
                free[rank] = now + sum(DURATION.get(action.kind, 1) for action in unit)
                ended |= dict.fromkeys(own, free[rank])
                done[rank] += 1
        if all(done[rank] == len(of_rank) for rank, of_rank in enumerate(units)):
            return max(free)
    raise AssertionError("deadlock")


def _key(action: Action) -> tuple[str, int, int]:
    way = {"forward": "F", "backward_weight": "W"}.get(action.kind, "I")
    return way, action.stage, action.microbatch


def _needs(action: Action, last_stage: int) -> set[tuple[str, int, int]]:
    way, stage, microbatch = _key(action)
    before = {"F": ("F", stage - 1), "I": ("I", stage + 1), "W": ("I", stage)}[way]
    first = {"I": {("F", stage, microbatch)}}.get(way, set())
    return first | ({(*before, microbatch)} if 0 <= before[1] <= last_stage else set())


def most_in_flight(actions: list[Action]) -> int:
    held, most = 0, 0
    for action in actions:
        held += {"forward": 1, "backward": -1, "backward_weight": -1}.get(action.kind, 0)
        most = max(most, held)
    return most


def test_schedules_are_no_slower_than_torch_and_keep_no_more(case: Case) -> None:
    schedule, pp, vpp, num_microbatches = case
    ours = actions_of(schedule, pp, vpp, num_microbatches)
    reference = torch_units(schedule, pp, vpp, num_microbatches)
    last_stage = pp * vpp - 1
    for lists in lists_of(case)[schedule == "dualpipev" :]:  # which torch merges too
        assert makespan([units_of(of_rank) for of_rank in lists], last_stage) <= makespan(reference, last_stage)
    flat = [[action for unit in of_rank for action in unit] for of_rank in reference]
    assert max(map(most_in_flight, ours)) <= max(map(most_in_flight, flat))
    if schedule in SAME_ORDER:
        assert [compute(of_rank) for of_rank in ours] == flat


def test_schedules_run_every_microbatch_through_every_stage_once(case: Case) -> None:
    schedule, pp, vpp, num_microbatches = case
    for rank, actions in (
        (rank, list(flat(of_rank))) for lists in lists_of(case) for rank, of_rank in enumerate(lists)
    ):
        stages = [stage for stage in range(pp * vpp) if rank_of_stage(stage, pp, schedule) == rank]
        pairs = [(stage, number) for stage in stages for number in range(num_microbatches)]
        assert sorted((a.stage, a.microbatch) for a in actions if a.kind == "forward") == pairs
        whole = [(a.stage, a.microbatch) for a in actions if a.kind == "backward"]
        for half in ("backward_input", "backward_weight"):
            assert sorted(whole + [(a.stage, a.microbatch) for a in actions if a.kind == half]) == pairs
        assert len(set(actions)) == len(actions)
        assert SCHEDULES[schedule].splits_backward or len(whole) == len(pairs)


def test_lists_run_with_messages_that_wait_for_each_other(case: Case) -> None:
    """A send without a buffer ends with its receive; each needs what it needs before it in its own list. Neither half
    of a pair needs the other."""
    schedule, pp, vpp, num_microbatches = case
    rank_of = [rank_of_stage(stage, pp, schedule) for stage in range(pp * vpp)]
    borders = sum(rank_of[stage] != rank_of[stage + 1] for stage in range(pp * vpp - 1))
    for lists in lists_of(case):
        assert count_messages(lists, rank_of) == 2 * borders * num_microbatches


def count_messages(lists: list[list[Any]], rank_of: list[int]) -> int:
    pp = len(lists)
    done: set[Action] = set()
    at = [0] * pp
    num_messages = 0
    while any(at[rank] < len(lists[rank]) for rank in range(pp)):
        before = list(at)
        for rank in range(pp):
            if at[rank] == len(lists[rank]):
                continue
            entry = lists[rank][at[rank]]
            kind, stage, microbatch = action = actions_in(entry)[0]
            if kind.startswith("send"):
                way = 1 if kind == "send_activation" else -1
                receive = Action(kind.replace("send", "receive"), stage + way, microbatch)  # type: ignore[arg-type]
                peer = rank_of[stage + way]
                result = {Action("forward", stage, microbatch)} if way == 1 else gradients(stage, microbatch)
                assert peer != rank and result & done, f"{action} before it is computed"
                if at[peer] < len(lists[peer]) and lists[peer][at[peer]] == receive:
                    done |= {action, receive}
                    at[rank], at[peer] = at[rank] + 1, at[peer] + 1
                    num_messages += 1
            elif not kind.startswith("receive"):
                assert all(inputs_are_here(half, rank_of, done) for half in actions_in(entry)), (
                    f"{entry} before its inputs"
                )
                done |= set(actions_in(entry))
                at[rank] += 1
        assert at != before, f"deadlock: {[lists[rank][at[rank] : at[rank] + 1] for rank in range(pp)]}"
    return num_messages


def gradients(stage: int, microbatch: int) -> set[Action]:
    return {Action("backward", stage, microbatch), Action("backward_input", stage, microbatch)}


def inputs_are_here(action: Action, rank_of: list[int], done: set[Action]) -> bool:
    kind, stage, microbatch = action
    if kind == "backward_weight":
        return Action("backward_input", stage, microbatch) in done
    if kind == "forward":
        if stage == 0:
            return True
        is_here = rank_of[stage - 1] == rank_of[stage]
        return Action("forward" if is_here else "receive_activation", stage - (is_here), microbatch) in done
    if Action("forward", stage, microbatch) not in done:
        return False
    if stage == len(rank_of) - 1:
        return True
    if rank_of[stage + 1] == rank_of[stage]:
        return bool(gradients(stage + 1, microbatch) & done)
    return Action("receive_gradient", stage, microbatch) in done


def test_schedules_send_in_the_same_order_on_both_ranks_of_a_pair(case: Case) -> None:
    schedule, pp, vpp, _ = case
    rank_of = [rank_of_stage(stage, pp, schedule) for stage in range(pp * vpp)]
    for lists in lists_of(case):
        orders: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
        for rank, actions in enumerate(lists):
            for kind, stage, microbatch in flat(actions):
                if not kind.startswith(("send", "receive")):
                    continue
                is_send, is_activation = kind.startswith("send"), kind.endswith("activation")
                peer = rank_of[stage + (1 if is_send == is_activation else -1)]
                sender = stage if is_send else stage + (-1 if is_activation else 1)
                orders.setdefault((rank, peer), []).append((kind.partition("_")[2], sender, microbatch))
        for (rank, peer), messages in orders.items():
            assert orders[peer, rank] == messages


def test_1f1b_has_the_fields_warm_up() -> None:
    for rank, actions in enumerate(actions_of("1f1b", 4, 1, 6)):
        kinds = "".join(action.kind[0] for action in compute(actions))
        assert kinds == "f" * (3 - rank) + "fb" * (3 + rank) + "b" * (3 - rank)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_zbv_waits_only_before_the_first_and_after_the_last(pp: int) -> None:
    """The ideal of the paper: pp - 1 units on each rank, whatever the number of microbatches."""
    for num_microbatches in (2 * pp, 5 * pp):
        actions = actions_of("zbv", pp, 2, num_microbatches)
        units = [[(action,) for action in compute(of_rank)] for of_rank in actions]
        assert makespan(units, 2 * pp - 1) == 6 * num_microbatches + pp - 1


def test_dualpipev_has_a_forward_beside_a_backward() -> None:
    pp, num_microbatches = 4, 20
    for rank, entries in enumerate(actions_of("dualpipev", pp, 2, num_microbatches, has_pairs=True)):
        pairs = [entry for entry in entries if isinstance(entry, Pair)]
        steady, after = 2 * (num_microbatches - 2 * pp + rank + 1), pp - rank - 1
        assert len(pairs) >= steady + after - 1, "all of the middle; the last rank splits the first pair"
        for forward, backward in pairs:
            assert (forward.kind, backward.kind) == ("forward", "backward")
            assert forward.stage != backward.stage and forward.microbatch != backward.microbatch


LOOPS = [case for case in PAIRED_CASES if not SCHEDULES[case[0]].is_v]


@pytest.mark.parametrize("case", LOOPS, ids=str)
def test_every_forward_after_the_warm_up_of_a_loop_is_in_a_pair(case: Case) -> None:
    """Of other microbatches, and at the time of the schedule without pairs, of which backwards have the order."""
    _, pp, vpp, num_microbatches = case
    plain, paired = actions_of(*case), actions_of(*case, has_pairs=True)
    for rank, entries in enumerate(paired):
        units = units_of(entries)
        warm_up = min((vpp - 1) * pp + 2 * (pp - rank - 1) + 1, vpp * num_microbatches)
        num_pairs = vpp * num_microbatches - warm_up
        assert [len(unit) for unit in units] == [1] * warm_up + [2] * num_pairs + [1] * warm_up
        for pair in (entry for entry in entries if isinstance(entry, Pair)):
            assert (pair.forward.kind, pair.backward.kind) == ("forward", "backward")
            assert pair.forward[1:] != pair.backward[1:]
        for way in ("forward", "backward"):
            order = [action for action in flat(entries) if action.kind == way]
            assert order == [action for action in plain[rank] if action.kind == way]
    units_of_lists = ([units_of(list(of_rank)) for of_rank in lists] for lists in (plain, paired))
    times = [makespan(units, pp * vpp - 1) for units in units_of_lists]
    assert times[0] == times[1]


@pytest.mark.parametrize("case", LOOPS, ids=str)
def test_a_loop_cannot_have_pairs_with_one_forward_less_ahead(case: Case) -> None:
    """Of any rank: the ranks would wait for each other, or longer."""
    schedule, pp, vpp, num_microbatches = case
    rank_of = [rank_of_stage(stage, pp, schedule) for stage in range(pp * vpp)]
    whole = [order_of(schedule, rank, pp, vpp, num_microbatches, has_pairs=True) for rank in range(pp)]
    time = makespan(whole, pp * vpp - 1)
    for rank, order in enumerate(whole):
        singles, pairs = [[unit for unit in order if len(unit) == size] for size in (1, 2)]
        if len(pairs) < 2 * pp:  # too few: ranks wait anyway
            continue
        warm_up = len(singles) // 2
        forwards = [(action,) for unit in order for action in unit if action.kind == "forward"]
        backwards = [(action,) for unit in order for action in unit if action.kind == "backward"]
        few = warm_up - 1
        merged = [f + b for f, b in zip(forwards[few:], backwards, strict=False)]
        orders = [*whole[:rank], [*forwards[:few], *merged, *backwards[len(merged) :]], *whole[rank + 1 :]]
        try:
            lay_out(orders, rank_of)
        except ValueError:
            continue
        assert makespan(orders, pp * vpp - 1) > time


def test_schedules_with_pairs_have_them(case: Case) -> None:
    if case not in PAIRED_CASES:
        with pytest.raises(KeyError):
            actions_of(*case, has_pairs=True)
    elif case[3] >= 2 * case[1]:
        assert all(any(isinstance(entry, Pair) for entry in of_rank) for of_rank in actions_of(*case, has_pairs=True))


@pytest.mark.parametrize(("schedule", "vpp"), [("1f1b", 1), ("interleaved_1f1b", 2), ("dualpipev", 2)])
def test_pairs_are_those_of_recipes_that_interleave_microbatches(schedule: Any, vpp: int) -> None:
    parallel = ParallelConfig(pp=2, vpp=vpp, pp_schedule=schedule)
    assert actions_of_recipe(parallel, 6) == actions_of(schedule, 2, vpp, 6)
    assert actions_of_recipe(replace(parallel, overlap="microbatch"), 6) == actions_of(
        schedule, 2, vpp, 6, has_pairs=True
    )


def test_every_schedule_of_recipes_has_facts_and_an_order() -> None:
    names = get_args(get_type_hints(ParallelConfig)["pp_schedule"])
    assert list(names) == list(SCHEDULES) == list(ORDERS) == list(TORCH)
    assert list(ORDERS_WITH_PAIRS) == [name for name, facts in SCHEDULES.items() if facts.has_pairs]


def test_the_example_of_the_readme_runs() -> None:
    results = doctest.testfile(str(README), module_relative=False)
    assert results.attempted == 2 and results.failed == 0


@pytest.mark.parametrize(
    "case",
    [
        ("1f1b", 2, 2, 4),
        ("interleaved_1f1b", 4, 1, 8),
        ("interleaved_1f1b", 4, 2, 6),
        ("zbv", 2, 3, 4),
        ("dualpipev", 4, 2, 7),
    ],
)
def test_schedules_refuse_what_they_do_not_fit(case: Case) -> None:
    with pytest.raises(ValueError, match=f"{case[0]} does not fit pp = {case[1]}"):
        actions_of(*case)
