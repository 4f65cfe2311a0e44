"""The report of a trace: one HTML file without external resources.

In this order: the breakdown of a step, the lanes of a pipeline, each part beside its roofline, the longest kernels,
compilations, memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from titan_moe.plan.choice.hardware import Hardware
from titan_moe.plan.cost.roofline import RegionWork
from titan_moe.profile.attribution import OTHER
from titan_moe.profile.breakdown import Breakdown, KernelTime, PartTime, break_down, top_kernels
from titan_moe.profile.chart import PALETTE, area_curve, stacked_bar
from titan_moe.profile.compile_trace import CompileReport
from titan_moe.profile.page import page
from titan_moe.profile.quantisation import QUANTISATION
from titan_moe.profile.region import MESSAGES
from titan_moe.profile.replay import UNNAMED
from titan_moe.profile.table import table
from titan_moe.profile.trace_parsing import Timeline

TITLES = {
    "embedding": "embedding",
    "attention": "attention and norms",
    "router": "router",
    "latent": "latent projections",
    "dispatch": "dispatch",
    "experts": "experts",
    QUANTISATION: "quantisation",
    "combine": "combine",
    "shared": "shared experts",
    "dense": "dense feed-forward",
    "mtp": "joins of multi-token prediction",
    "block": "rest of the blocks",
    "head": "head and loss",
    MESSAGES: "messages between stages",
    "sharding": "sharding (FSDP), sums over tp",
    "clip": "gradient norm and clipping",
    "optimizer": "optimizer",
    OTHER: "other: sums over ranks, RoPE tables",
    UNNAMED: "not named: kernels of the CUDA graph alone",
}
"""Part -> title, in the order of a step. The title of a user's region is its name."""
COLOURS = dict(zip(TITLES, PALETTE, strict=True))
USER_COLOUR = "#c2b8a3"
GIB = 2**30
MAX_NAME_LENGTH = 120


@dataclass(frozen=True)
class TracedSteps:
    """The steps of a trace, and the speed of such steps without the profiler."""

    first_step: int
    kind: str
    """How they were taken: `launched` or `replayed`."""
    step_ms: float | None = None
    """Mean time of a step without the profiler, if it is known."""
    num_timed: int = 0
    """Number of steps of which it is the mean."""


@dataclass(frozen=True)
class TracedRun:
    """The run of a trace: its description, and its work and hardware for comparison with the measured times."""

    title: str
    """Model, ranks, device."""
    work: dict[str, RegionWork]
    """Part -> the work of a rank in a step."""
    model_flops: float
    """Model FLOPs of a rank in a step, as counted by MFU."""
    num_tokens: int
    """Tokens of a rank in a step."""
    hardware: Hardware | None
    """The device's peaks, if known."""
    steps: TracedSteps


def render(timeline: Timeline, run: TracedRun, compiled: CompileReport, pipeline: str = "") -> str:
    """Return the report as HTML, with the section of a pipeline."""
    result = break_down(timeline, run.steps.step_ms)
    sections = [
        f"<h1>{escape(run.title)}</h1>",
        f'<p class="note">{_describe_steps(timeline, run.steps)}</p>',
        _summary(result, run, timeline),
        _step_bar(result),
        pipeline,
        _parts(result, run),
        _top_kernels(top_kernels(timeline, step_ms=run.steps.step_ms), timeline.is_gpu),
        _compiled(compiled, timeline),
        _memory(timeline),
    ]
    return page(run.title, sections)


def _describe_steps(timeline: Timeline, steps: TracedSteps) -> str:
    """Which steps the report is about, and where its times come from."""
    last_step, traced_ms = steps.first_step + timeline.num_steps - 1, timeline.duration_us / timeline.num_steps / 1e3
    which = f"Steps {steps.first_step} to {last_step} on rank 0, averaged, {steps.kind}"
    if steps.kind == "replayed":
        which += " from a CUDA graph; its kernels have the parts of those of one launched step"
    if steps.step_ms is None:
        return f"{which}. The profiler slows the host down: use the shares."
    return (
        f"{which}. Without the profiler a step takes {steps.step_ms:,.2f} ms, the mean of {steps.num_timed} steps "
        f"before them; under it, it took {traced_ms:,.2f} ms. Times are shares of the step without the profiler."
    )


def _summary(result: Breakdown, run: TracedRun, timeline: Timeline) -> str:
    seconds = result.step_ms / 1e3  # without the profiler, if known
    facts = [
        ("step", f"{result.step_ms:,.2f} ms"),
        ("tokens/s on this rank", f"{run.num_tokens / seconds:,.0f}"),
        ("model FLOPs", _scaled(run.model_flops / seconds, "FLOP/s")),
        ("exposed communication", _of_step(result.exposed_ms, result)),
        ("hidden communication", _of_step(result.hidden_ms, result)),
        ("idle", _of_step(result.idle_ms, result)),
        ("host-bound" if timeline.is_gpu else "Python between operations", _of_step(result.host_bound_ms, result)),
        ("of the work is in named parts", f"{100 * result.named_share:.1f} %"),
    ]
    if run.hardware:
        mfu = run.model_flops / seconds / run.hardware.bf16_flops
        facts.insert(3, ("MFU", f"{100 * mfu:.1f} %"))
    return '<ul class="facts">' + "".join(f"<li><b>{value}</b>{name}</li>" for name, value in facts) + "</ul>"


def _step_bar(result: Breakdown) -> str:
    shares = []
    for part, time in _in_order(result):
        shares.append((TITLES.get(part, part), time.forward_ms + time.backward_ms, COLOURS.get(part, USER_COLOUR)))
    shares += [("communication, exposed", result.exposed_ms, "#333"), ("idle", result.idle_ms, "#ddd")]
    note = "Every instant of a step counts once: as compute of a part, else as communication, else as idle."
    return f'<h2>Breakdown of a step</h2>{stacked_bar(shares)}<p class="note">{note}</p>'


def _parts(result: Breakdown, run: TracedRun) -> str:
    header = ["part", "forward ms", "backward ms", "communication ms (exposed)", "share", "work", "achieved"]
    header += ["roofline ms", "x roofline"] if run.hardware else []
    rows = []
    for part, time in _in_order(result):
        communication = f"{time.communication_ms:.3f} ({time.exposed_ms:.3f})" if time.communication_ms else ""
        share = f"{100 * time.total_ms / result.step_ms:.1f} %"
        row = [TITLES.get(part, part), f"{time.forward_ms:.3f}", f"{time.backward_ms:.3f}", communication, share]
        rows.append([*row, *_compare_with_roofline(run.work.get(part, RegionWork()), time, run.hardware)])
    note = (
        "Work is the minimum of a step: FLOPs of forward and backward without recomputation, bytes of AdamW, bytes "
        "received from other ranks. The roofline is the time for it at the device's peak. Backward includes "
        "recomputation. A compiled graph is one part, with its norms and residuals. A compiled dense block counts as "
        "rest of the blocks."
    )
    if QUANTISATION in result.parts:
        note += (
            " Quantisation is apart from the part that needs it: the passes around the GEMMs of experts in fp8, SwiGLU "
            "among them, and casts of linear layers, but for those that the compiler fused with other work."
        )
    return f'<h2>Parts</h2>{table(header, rows)}<p class="note">{note}</p>'


def _compare_with_roofline(work: RegionWork, time: PartTime, hardware: Hardware | None) -> tuple[str, ...]:
    """Work, achieved speed and, for a device with known peaks, the roofline and the ratio to it."""
    compute_ms = time.forward_ms + time.backward_ms
    if work.flops:
        amount, unit, measured_ms = work.flops, "FLOP", compute_ms
    elif work.wire_bytes:
        amount, unit, measured_ms = work.wire_bytes, "B", time.communication_ms
    else:
        amount, unit, measured_ms = work.memory_bytes, "B", compute_ms
    if not amount or not measured_ms:
        return ("",) * (4 if hardware else 2)
    done, speed = _scaled(amount, unit), _scaled(amount / (measured_ms / 1e3), f"{unit}/s")
    if hardware is None:
        return done, speed
    roofline_ms = work.floor_ms(hardware)
    return done, speed, f"{roofline_ms:.3g}", f"{measured_ms / roofline_ms:.3g}"


def _top_kernels(kernels: Sequence[KernelTime], is_gpu: bool) -> str:
    noun = "kernels" if is_gpu else "operations"
    rows = [
        (
            kernel.name if len(kernel.name) <= MAX_NAME_LENGTH else f"{kernel.name[:MAX_NAME_LENGTH]}…",
            TITLES.get(kernel.part, kernel.part),
            f"{kernel.count:,.0f}",
            f"{kernel.total_ms:.3f}",
            f"{1e3 * kernel.total_ms / kernel.count:.1f}",
        )
        for kernel in kernels
    ]
    header = (noun[:-1], "mostly in", "calls per step", "ms per step", "µs per call")
    return f"<h2>Top {noun}</h2>{table(header, rows)}"


def _compiled(report: CompileReport, timeline: Timeline) -> str:
    if not report.functions:
        return "<h2>Compile</h2><p>Nothing was compiled (<code>compile.regional</code>).</p>"
    late = ""
    if (offset_us := timeline.unix_offset_us) is not None:
        num_late = report.num_between(timeline.start_us + offset_us, timeline.stop_us + offset_us)
        late = f", {num_late} compilations during the traced steps"
    num_breaks = sum(report.graph_breaks.values())
    summary = (
        f"{len(report.functions)} functions in {report.total_s:.1f} s; {num_breaks} graph breaks, "
        f"{report.num_recompiles} recompiles{late}."
    )
    header = ("function", "graphs", "forward s", "backward s")
    rows = [(f.name, f"{f.num_graphs}", f"{f.forward_s:.2f}", f"{f.backward_s:.2f}") for f in report.functions]
    reasons = [f"graph break, {count} times: {reason}" for reason, count in report.graph_breaks.items()]
    reasons += [f"{function.name} recompiled: {reason}" for function in report.functions for reason in function.reasons]
    items = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return f"<h2>Compile</h2><p>{summary}</p>{table(header, rows)}<ul>{items}</ul>"


def _memory(timeline: Timeline) -> str:
    if not timeline.memory:
        return ""
    points = [((time_us - timeline.start_us) / 1e3, size / GIB) for time_us, size in timeline.memory]
    peak_gib = max(size_gib for _, size_gib in points)
    note = "tensors on the GPU" if timeline.is_gpu else "tensors allocated since the start of the trace"
    curve = area_curve(points, unit_x="ms", unit_y="GiB")
    return f"<h2>Memory</h2><p>Peak {peak_gib:,.4g} GiB: {note}.</p>{curve}"


def _in_order(result: Breakdown) -> list[tuple[str, PartTime]]:
    order = {part: index for index, part in enumerate(TITLES)}
    return sorted(result.parts.items(), key=lambda item: order.get(item[0], order[OTHER] - 0.5))


def _of_step(time_ms: float, result: Breakdown) -> str:
    return f"{time_ms:.3g} ms · {100 * time_ms / result.step_ms:.1f} %"


def _scaled(amount: float, unit: str) -> str:
    """Format an amount with a metric prefix: `1.5 TFLOP`."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if amount >= size:
            return f"{amount / size:.4g} {prefix}{unit}"
    return f"{amount:.4g} {unit}"
