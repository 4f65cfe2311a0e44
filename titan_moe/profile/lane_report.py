"""The section of the report about a pipeline: its lanes, and what its ranks do and wait for."""

from statistics import mean

from titan_moe.plan.pipeline.simulation import Simulation
from titan_moe.profile.lane_chart import draw_lanes
from titan_moe.profile.lanes import shares_of, with_mean_times
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
        stages = ", ".join(str(stage) for stage in sorted({run.action.stage for run in runs}))
        rows.append((str(rank), stages, *map(_percent, shares), _percent(1 - shares.busy)))
    return table(header, rows)


def _stages(lanes: Simulation) -> str:
    kinds = ("forward", "backward", "backward_input", "backward_weight")
    header = ("stage", *(f"{kind.replace('_', ' ')} ms" for kind in kinds), "most microbatches in flight")
    rows = []
    for stage, in_flight in enumerate(lanes.max_in_flight):
        runs = [run for of_rank in lanes.runs for run in of_rank if run.action.stage == stage]
        times = [[run.end - run.start for run in runs if run.action.kind == kind] for kind in kinds]
        rows.append((str(stage), *(f"{mean(of_kind):.3f}" if of_kind else "" for of_kind in times), str(in_flight)))
    return table(header, rows)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
