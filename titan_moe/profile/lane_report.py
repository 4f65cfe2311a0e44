"""The section of the report about a pipeline: its lanes, and what its ranks do and wait for."""

from collections.abc import Mapping

from titan_moe.plan.pipeline.action import actions_in
from titan_moe.plan.pipeline.simulation import Simulation
from titan_moe.profile.lane_chart import draw_lanes
from titan_moe.profile.lanes import mean_times, shares_of, with_mean_times
from titan_moe.profile.table import table


def lane_picture(measured: Simulation, planned: Simulation) -> str:
    """The lanes of a step above those of its plan, as an SVG."""
    return draw_lanes(
        {
            f"measured: ranks wait {_percent(measured.bubble_share)} of the step": measured,
            f"planned, times by FLOPs: {_percent(planned.bubble_share)}": planned,
        }
    )


def describe_lanes(measured: Simulation, planned: Simulation) -> str:
    """The section, in HTML."""
    schedule = with_mean_times(measured)
    note = (
        f"The last traced step, from the first action to the end of the last one: {measured.makespan:.4g} ms. Ranks "
        f"wait {_percent(measured.bubble_share)} of it (the bubble). It is {_percent(schedule.bubble_share)} if every "
        f"action takes the mean of its kind and stage and messages take no time, and {_percent(planned.bubble_share)} "
        "by the plan, whose times are FLOPs. A number is that of a microbatch; a rank's later stages are darker."
    )
    return (
        f"<h2>Pipeline</h2>{lane_picture(measured, planned)}"
        f'<p class="note">{note}</p>{_ranks(measured)}{_stages(measured)}'
    )


def _ranks(lanes: Simulation) -> str:
    header = ("rank", "stages", "busy", "waits for activations", "waits for gradients", "waits else", "bubble")
    rows = []
    for rank, runs in enumerate(lanes.runs):
        shares = shares_of(lanes, rank)
        held = {action.stage for run in runs for action in actions_in(run.action)}
        stages = ", ".join(str(stage) for stage in sorted(held))
        rows.append((str(rank), stages, *map(_percent, shares), _percent(1 - shares.busy)))
    return table(header, rows)


def _stages(lanes: Simulation) -> str:
    kinds = ("forward", "backward", "backward_input", "backward_weight")
    header = ("stage", *(f"{kind.replace('_', ' ')} ms" for kind in kinds), "most microbatches in flight")
    alone, pairs = mean_times(lanes)
    rows = []
    for stage, in_flight in enumerate(lanes.max_in_flight):
        times = [alone.get((kind, stage)) for kind in kinds]
        rows.append((str(stage), *("" if time is None else f"{time:.3f}" for time in times), str(in_flight)))
    return table(header, rows) + (_pairs(pairs) if pairs else "")


def _pairs(pairs: Mapping[tuple[int, int], float]) -> str:
    """The times of pairs, to be compared with those of their actions alone."""
    header = ("forward of stage", "beside backward of stage", "both ms")
    return table(header, [(*map(str, stages), f"{time:.3f}") for stages, time in sorted(pairs.items())])


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
