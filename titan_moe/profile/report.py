"""The page of a trace: one HTML file that needs nothing else.

It is written for reading from the top: where the step goes, how far each part is from its floor, then the evidence.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from titan_moe.plan.hardware import Hardware
from titan_moe.plan.roofline import Work
from titan_moe.profile.attribution import OTHER
from titan_moe.profile.breakdown import PartTime, Split, Top, split, top
from titan_moe.profile.chart import PALETTE, area_curve, stacked_bar
from titan_moe.profile.compile_trace import CompileReport
from titan_moe.profile.trace_parsing import Timeline

TITLES = {
    "embedding": "embedding",
    "attention": "attention and norms",
    "router": "router",
    "latent": "latent projections",
    "dispatch": "dispatch",
    "experts": "experts",
    "combine": "combine",
    "shared": "shared experts",
    "dense": "dense feed-forward",
    "block": "rest of the blocks",
    "head": "head and loss",
    "sharding": "sharding (FSDP)",
    "clip": "gradient norm and clipping",
    "optimizer": "optimizer",
    OTHER: "other: sums over ranks, RoPE tables",
}
"""The parts in the order of a step; what a region of one's own is called is its title."""
COLOURS = dict(zip(TITLES, PALETTE, strict=True))
OWN_COLOUR = "#c2b8a3"
MIB = 2**20
LONGEST_NAME = 120
STYLE = """
body{font:14px/1.45 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.5em;margin-bottom:.2em} h2{font-size:1.1em;margin:2em 0 .5em} p{max-width:75ch} .note{color:#666}
.bar{display:flex;height:34px;border-radius:4px;overflow:hidden} .bar span{display:block;height:100%}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2em 1.2em}
i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
table{border-collapse:collapse;width:100%} th,td{padding:.25em .6em;text-align:right;border-bottom:1px solid #e4e4e4}
td{white-space:nowrap}
th:first-child,td:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere} th{font-weight:600;color:#555}
.facts{display:flex;flex-wrap:wrap;gap:.6em 2em;padding:0;list-style:none} .facts b{display:block;font-size:1.35em}
svg{width:100%;font:11px system-ui} svg path{fill:#4e79a7;fill-opacity:.55} svg line{stroke:#ddd} svg text{fill:#555}
"""


@dataclass(frozen=True)
class Subject:
    """What was traced: the words of the page and the numbers that its times are compared with."""

    title: str
    """Model, ranks, device."""
    work: dict[str, Work]
    """What a rank must do in a step, by part."""
    model_flops: float
    """Model FLOPs of a step on a rank, as MFU counts them."""
    num_tokens: int
    """Tokens of a step on a rank."""
    hardware: Hardware | None
    """The device's peaks, if they are known."""


def render(timeline: Timeline, subject: Subject, compiled: CompileReport) -> str:
    """Write the page."""
    result = split(timeline)
    sections = [
        f"<h1>{escape(subject.title)}</h1>",
        f'<p class="note">{timeline.num_steps} optimizer steps, averaged, on rank 0. The profiler slows the host down: '
        "trust the shares, and take the speed of a run from its metrics.</p>",
        _facts(result, subject, timeline),
        _where(result),
        _parts(result, subject),
        _top(top(timeline), timeline.is_gpu),
        _compiled(compiled, timeline),
        _memory(timeline),
    ]
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(subject.title)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def _facts(result: Split, subject: Subject, timeline: Timeline) -> str:
    seconds = result.step_ms / 1e3
    host_bound = "Python between operations" if not timeline.is_gpu else "host-bound"
    facts = [
        ("a step", f"{result.step_ms:,.2f} ms"),
        ("tokens a second on this rank", f"{subject.num_tokens / seconds:,.0f}"),
        ("of the model's FLOPs", _scaled(subject.model_flops / seconds, "FLOP/s")),
        ("communication exposed", _of_step(result.exposed_ms, result)),
        ("communication hidden", _of_step(result.hidden_ms, result)),
        ("idle gaps", _of_step(result.idle_ms, result)),
        (host_bound, _of_step(result.host_bound_ms, result)),
        ("of the work is in named parts", f"{100 * result.named_share:.1f} %"),
    ]
    if subject.hardware:
        mfu = subject.model_flops / seconds / subject.hardware.bf16_flops
        facts.insert(3, ("MFU", f"{100 * mfu:.1f} %"))
    return '<ul class="facts">' + "".join(f"<li><b>{value}</b>{name}</li>" for name, value in facts) + "</ul>"


def _where(result: Split) -> str:
    shares = [
        (_title(part), time.forward_ms + time.backward_ms, COLOURS.get(part, OWN_COLOUR))
        for part, time in _in_order(result)
    ]
    shares += [("communication, exposed", result.exposed_ms, "#333"), ("idle", result.idle_ms, "#ddd")]
    note = "Every instant of a step is counted once: to the part that computes, else to messages, else to a gap."
    return f'<h2>Where a step goes</h2>{stacked_bar(shares)}<p class="note">{note}</p>'


def _parts(result: Split, subject: Subject) -> str:
    header: tuple[str, ...] = (
        "part",
        "forward ms",
        "backward ms",
        "messages ms (exposed)",
        "share",
        "work",
        "achieved",
    )
    if subject.hardware:
        header += ("floor ms", "x floor")
    rows = []
    for part, time in _in_order(result):
        messages = f"{time.messages_ms:.3f} ({time.exposed_ms:.3f})" if time.messages_ms else ""
        share = f"{100 * time.total_ms / result.step_ms:.1f} %"
        work = subject.work.get(part, Work())
        rows.append(
            (
                _title(part),
                f"{time.forward_ms:.3f}",
                f"{time.backward_ms:.3f}",
                messages,
                share,
                *_beside_floor(work, time, subject.hardware),
            )
        )
    note = (
        "Work is what a step needs at least: FLOPs forward and backward without recomputation, bytes of AdamW, bytes "
        "that arrive from other ranks. The floor is the time for it at the device's peak. Backward holds what is "
        "recomputed there. A compiled piece is one part, norms and residuals included; a block that is compiled whole, "
        "as dense blocks are, is in the rest of the blocks."
    )
    return f'<h2>Parts</h2>{_table(header, rows)}<p class="note">{note}</p>'


def _beside_floor(work: Work, time: PartTime, hardware: Hardware | None) -> tuple[str, ...]:
    """Work, speed and, on a device whose peaks are known, the floor and the distance from it."""
    computing_ms = time.forward_ms + time.backward_ms
    if work.flops:
        amount, unit, taken_ms = work.flops, "FLOP", computing_ms
    elif work.wire_bytes:
        amount, unit, taken_ms = work.wire_bytes, "B", time.messages_ms
    else:
        amount, unit, taken_ms = work.memory_bytes, "B", computing_ms
    if not amount or not taken_ms:
        return ("",) * (4 if hardware else 2)
    done, speed = _scaled(amount, unit), _scaled(amount / (taken_ms / 1e3), f"{unit}/s")
    if hardware is None:
        return done, speed
    floor_ms = work.floor_ms(hardware)
    return done, speed, f"{floor_ms:.3g}", f"{taken_ms / floor_ms:.3g}"


def _top(entries: Sequence[Top], is_gpu: bool) -> str:
    noun = "kernels" if is_gpu else "operations"
    rows = [
        (
            entry.name if len(entry.name) <= LONGEST_NAME else f"{entry.name[:LONGEST_NAME]}…",
            _title(entry.part),
            f"{entry.count:,.0f}",
            f"{entry.total_ms:.3f}",
            f"{1e3 * entry.total_ms / entry.count:.1f}",
        )
        for entry in entries
    ]
    header = (noun[:-1], "mostly in", "times a step", "ms a step", "µs each")
    return f"<h2>Top {noun}</h2>{_table(header, rows)}"


def _compiled(report: CompileReport, timeline: Timeline) -> str:
    if not report.pieces:
        return "<h2>Compile</h2><p>Nothing was compiled (<code>compile.regional</code>).</p>"
    late = ""
    if timeline.unix_offset_us is not None:
        offset_us = timeline.unix_offset_us
        num_late = report.num_between(timeline.start_us + offset_us, timeline.stop_us + offset_us)
        late = f", {num_late} compilations during the traced steps"
    num_breaks = sum(report.graph_breaks.values())
    facts = (
        f"{len(report.pieces)} pieces in {report.total_s:.1f} s; {num_breaks} graph breaks, "
        f"{report.num_recompiles} recompiles{late}."
    )
    header = ("piece", "graphs", "forward s", "backward s")
    rows = [
        (piece.name, f"{piece.num_graphs}", f"{piece.forward_s:.2f}", f"{piece.backward_s:.2f}")
        for piece in report.pieces
    ]
    reasons = [f"graph break, {count} times: {reason}" for reason, count in report.graph_breaks.items()]
    reasons += [f"{piece.name} again: {reason}" for piece in report.pieces for reason in piece.reasons]
    listed = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return f"<h2>Compile</h2><p>{facts}</p>{_table(header, rows)}<ul>{listed}</ul>"


def _memory(timeline: Timeline) -> str:
    if not timeline.memory:
        return ""
    points = [((time_us - timeline.start_us) / 1e3, size / MIB) for time_us, size in timeline.memory]
    peak = max(size for _, size in points)
    note = "tensors on the GPU" if timeline.is_gpu else "tensors made since the trace began"
    curve = area_curve(points, unit_x="ms", unit_y="MiB")
    return f"<h2>Memory</h2><p>Peak {peak:,.4g} MiB: {note}.</p>{curve}"


def _in_order(result: Split) -> list[tuple[str, PartTime]]:
    order = {part: place for place, part in enumerate(TITLES)}
    return sorted(result.parts.items(), key=lambda item: order.get(item[0], order[OTHER] - 0.5))


def _title(part: str) -> str:
    return TITLES.get(part, part)


def _of_step(time_ms: float, result: Split) -> str:
    return f"{time_ms:.3g} ms · {100 * time_ms / result.step_ms:.1f} %"


def _scaled(amount: float, unit: str) -> str:
    """Write an amount with its prefix: `1.5 TFLOP`."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if amount >= size:
            return f"{amount / size:.4g} {prefix}{unit}"
    return f"{amount:.4g} {unit}"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
