"""What torch.compile did in a run: graphs, breaks, recompiles, and the seconds that each piece took.

PyTorch keeps one record a compilation; a record of backward carries the number of its forward, not its name.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch._dynamo.utils import (
    clear_compilation_metrics,
    counters,
    get_compilation_metrics,
    set_compilation_metrics_limit,
)

NUM_RECORDS_KEPT = 4096


@dataclass
class CompiledPiece:
    """A function that was compiled, once or more often."""

    name: str
    forward_s: float = 0.0
    backward_s: float = 0.0
    num_graphs: int = 0
    """Compilations of its forward; all after the first are recompiles."""
    reasons: list[str] = field(default_factory=list)
    """Why it was compiled again, and what failed."""


@dataclass(frozen=True)
class CompileReport:
    """All compilations of a run, up to now."""

    pieces: list[CompiledPiece]
    """Slowest first."""
    graph_breaks: dict[str, int]
    """Reason -> how often."""
    started_unix_us: list[float]
    """When each compilation began, by the clock."""

    @property
    def num_recompiles(self) -> int:
        """Compilations of what had been compiled before."""
        return sum(max(piece.num_graphs - 1, 0) for piece in self.pieces)

    @property
    def total_s(self) -> float:
        """Seconds of compiling."""
        return sum(piece.forward_s + piece.backward_s for piece in self.pieces)

    def num_between(self, start_unix_us: float, stop_unix_us: float) -> int:
        """Compilations that began in an interval."""
        return sum(start_unix_us <= began <= stop_unix_us for began in self.started_unix_us)


def start_records() -> None:
    """Begin anew, and let PyTorch keep the records of a whole run, not of its last few compilations."""
    set_compilation_metrics_limit(NUM_RECORDS_KEPT)
    clear_compilation_metrics()
    counters.clear()


def compile_report() -> CompileReport:
    """Read what this process has compiled since the records began."""
    return report_of(get_compilation_metrics(), dict(counters["graph_break"]))


def report_of(records: Iterable[Any], graph_breaks: dict[str, int]) -> CompileReport:
    """Sum records up by the piece they belong to."""
    pieces: dict[str, CompiledPiece] = {}
    began = []
    for record in records:
        frame = str(record.compile_id).partition("/")[0]
        piece = pieces.setdefault(frame, CompiledPiece(name=f"frame {frame}"))
        seconds = (record.duration_us or 0) / 1e6
        if record.start_time_us:
            began.append(float(record.start_time_us))
        if record.is_forward is False:
            piece.backward_s += seconds
            continue
        piece.forward_s += seconds
        piece.num_graphs += 1
        if record.co_name:
            piece.name = f"{record.co_name} ({_short(record.co_filename)}:{record.co_firstlineno})"
        piece.reasons += [reason for reason in (record.recompile_reason, record.fail_reason) if reason]
    by_time = sorted(pieces.values(), key=lambda piece: -(piece.forward_s + piece.backward_s))
    return CompileReport(by_time, graph_breaks, began)


def _short(path: str | None) -> str:
    return "/".join((path or "?").split("/")[-2:])
