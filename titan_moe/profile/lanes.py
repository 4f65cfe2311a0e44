"""The lanes of a pipeline: when each rank ran its actions in the last traced step, from the traces of all its ranks.

On a GPU an action runs from its first kernel to the end of its last one, and its kernels are those that the host has
launched inside its range. Collectives and FSDP's copies are left out: they may run before the action has its input. On
a CPU an action is its range, without the wait for its input.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from statistics import mean
from typing import NamedTuple, get_args

from titan_moe.plan.pipeline.action import Action, Kind, Pair, actions_in
from titan_moe.plan.pipeline.simulation import Run, Simulation, Times, simulate
from titan_moe.profile.attribution import PYTORCH_RANGES, HostEvent
from titan_moe.profile.region import ACTION_PREFIX, ACTIONS_OF_A_PAIR
from titan_moe.profile.span import Span
from titan_moe.profile.trace_parsing import Timeline

KINDS: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}


class Shares(NamedTuple):
    """What a rank does from the first action of a step to the end of the last one, as shares of that time."""

    busy: float
    for_activations: float
    """It waits for the activations of the action that comes next."""
    for_gradients: float
    other: float
    """Other gaps, and the time after its last action."""


def read_lanes(timelines: Sequence[Timeline], *, clocks_agree: bool) -> Simulation:
    """What the ranks of a pipeline ran in their last traced step, in milliseconds since the first action.

    Where clocks do not agree, as on several hosts, the steps of all ranks begin at the same time, with their first
    actions on the host.

    Args: `timelines` are those of the ranks, in their order.
    Raises: ValueError for a trace without pipeline actions.
    """
    lanes = []
    for rank, timeline in enumerate(timelines):
        began_us, runs = _last_step(timeline)
        if not runs:
            raise ValueError(f"the trace of pipeline rank {rank} has no pipeline actions")
        has_clock = clocks_agree and timeline.unix_offset_us is not None
        zero_us = -(timeline.unix_offset_us or 0.0) if has_clock else began_us
        lanes.append([Run(rank, action, start - zero_us, stop - zero_us) for action, start, stop in runs])
    first_us = min((run.start for lane in lanes for run in lane), default=0.0)
    in_ms = [
        [run._replace(start=(run.start - first_us) / 1e3, end=(run.end - first_us) / 1e3) for run in lane]
        for lane in lanes
    ]
    return Simulation(in_ms)


def shares_of(lanes: Simulation, rank: int) -> Shares:
    """The shares of a rank."""
    rank_of = {action.stage: run.rank for runs in lanes.runs for run in runs for action in actions_in(run.action)}
    ends = {action: run.end for runs in lanes.runs for run in runs for action in actions_in(run.action)}
    times = dict.fromkeys(Shares._fields, 0.0)
    now = 0.0
    for run in lanes.runs[rank]:
        times[_awaited(run.action, rank_of, ends)] += max(run.start - now, 0.0)
        times["busy"] += run.end - run.start
        now = run.end
    times["other"] += lanes.makespan - now
    return Shares(**{name: time / lanes.makespan for name, time in times.items()})


class MeanTimes(NamedTuple):
    """In milliseconds."""

    alone: dict[tuple[str, int], float]
    """Of actions that ran alone, by kind and stage."""
    pairs: dict[tuple[int, int], float]
    """Of pairs, by the stages of forward and backward."""


def mean_times(lanes: Simulation) -> MeanTimes:
    """The mean times of what ranks ran."""
    alone: dict[tuple[str, int], list[float]] = defaultdict(list)
    pairs: dict[tuple[int, int], list[float]] = defaultdict(list)
    for run in (run for runs in lanes.runs for run in runs):
        if isinstance(run.action, Pair):
            pairs[run.action.forward.stage, run.action.backward.stage].append(run.end - run.start)
        else:
            alone[run.action.kind, run.action.stage].append(run.end - run.start)
    return MeanTimes(
        {key: mean(times) for key, times in alone.items()}, {key: mean(times) for key, times in pairs.items()}
    )


def with_mean_times(lanes: Simulation) -> Simulation:
    """The same actions, as early as possible, if each takes the mean of its kind and stage, a pair that of its two
    stages, and messages take no time: the bubble of the schedule itself."""
    alone, pairs = mean_times(lanes)

    def of(kind: Kind) -> list[float]:
        return [alone.get((kind, stage), 0.0) for stage in range(len(lanes.max_in_flight))]

    weight, inputs, whole = of("backward_weight"), of("backward_input"), of("backward")
    inputs = [part or max(both - other, 0.0) for part, both, other in zip(inputs, whole, weight, strict=True)]
    return simulate(_actions(lanes.runs), Times(of("forward"), inputs, weight, pairs))


def _last_step(timeline: Timeline) -> tuple[float, list[tuple[Action | Pair, float, float]]]:
    """When the host began the last step that has actions, and their times. Steps that CUDA graphs record or replay have
    none; a launched one is beside them."""
    spans = [*timeline.spans, *timeline.named_by]
    for ranges in reversed(list(_steps(timeline.pipeline))):
        runs = list(_runs_of_gpu(ranges, spans) if timeline.is_gpu else _runs_of_cpu(ranges))
        if runs:
            return ranges[0].start_us, runs
    return 0.0, []


def _steps(pipeline: Sequence[HostEvent]) -> Iterator[list[HostEvent]]:
    """The ranges of each step; an action that comes again begins one."""
    seen: set[str] = set()
    step: list[HostEvent] = []
    for event in pipeline:
        if event.name in seen:
            yield step
            seen, step = set(), []
        if event.name.startswith(ACTION_PREFIX):
            seen.add(event.name)
        step.append(event)
    if seen:
        yield step


def _runs_of_cpu(ranges: Sequence[HostEvent]) -> Iterator[tuple[Action | Pair, float, float]]:
    for index, event in enumerate(ranges):
        if action := _computation(event):
            start_us = event.start_us
            for later in ranges[index + 1 :]:
                if later.start_us >= event.stop_us:
                    break
                start_us = max(start_us, later.stop_us)  # a wait inside the action
            yield action, start_us, event.stop_us


def _runs_of_gpu(ranges: Sequence[HostEvent], spans: Sequence[Span]) -> Iterator[tuple[Action | Pair, float, float]]:
    copies = set(PYTORCH_RANGES.values())
    computing = (span for span in spans if not span.is_communication and span.part not in copies)
    by_launch = [(span.launched_us, span) for span in computing if span.launched_us is not None]
    by_launch.sort(key=itemgetter(0))
    launches, kernels = [launched_us for launched_us, _ in by_launch], [kernel for _, kernel in by_launch]
    now_us = 0.0
    for event in ranges:
        of_range = kernels[bisect_left(launches, event.start_us) : bisect_right(launches, event.stop_us)]
        if of_range and (action := _computation(event)):
            start_us = max(now_us, min(kernel.start_us for kernel in of_range))
            now_us = max(start_us, *(kernel.stop_us for kernel in of_range))
            yield action, start_us, now_us


def _computation(event: HostEvent) -> Action | Pair | None:
    """The action or the pair of a range; None for a message or a wait."""
    if not event.name.startswith(ACTION_PREFIX):
        return None
    actions = []
    for name in event.name.removeprefix(ACTION_PREFIX).split(ACTIONS_OF_A_PAIR):
        kind, stage, microbatch = name.split()
        actions.append(Action(KINDS[kind], int(stage), int(microbatch)))
    if len(actions) > 1:
        return Pair(*actions)
    return None if actions[0].is_message else actions[0]


def _actions(lanes: Sequence[Sequence[Run]]) -> list[list[Action | Pair]]:
    return [[run.action for run in runs] for runs in lanes]


def _awaited(action: Action | Pair, rank_of: dict[int, int], ends: dict[Action, float]) -> str:
    """The share that a gap before an action counts for; before a pair, that of the input which was made last."""
    if isinstance(action, Action):
        return _awaited_input(action, rank_of)
    return _awaited_input(max(action, key=lambda one: max(ends.get(made, 0.0) for made in _inputs(one))), rank_of)


def _inputs(action: Action) -> list[Action]:
    """What makes the input of an action, if it is in the lists."""
    _, stage, microbatch = action
    if action.kind == "forward":
        return [Action("forward", stage - 1, microbatch)]
    return [Action(kind, stage + 1, microbatch) for kind in ("backward", "backward_input")]


def _awaited_input(action: Action, rank_of: dict[int, int]) -> str:
    own = rank_of[action.stage]
    if action.kind == "forward":
        return "for_activations" if rank_of.get(action.stage - 1, own) != own else "other"
    if action.kind == "backward_weight":
        return "other"
    return "for_gradients" if rank_of.get(action.stage + 1, own) != own else "other"
