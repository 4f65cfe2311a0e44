"""Compilations of a run: graphs, graph breaks, recompiles, and the compile time of each function.

PyTorch keeps one record per compilation. A backward record has the compile id of its forward, not the function's name.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch._dynamo import utils as dynamo


@dataclass
class CompiledFunction:
    """A function and all its compilations."""

    name: str
    forward_s: float = 0.0
    backward_s: float = 0.0
    num_graphs: int = 0
    """Compilations of its forward. All after the first are recompiles."""
    reasons: list[str] = field(default_factory=list)
    """Reasons of recompiles and failures."""


@dataclass(frozen=True)
class CompileReport:
    """All compilations of a run so far."""

    functions: list[CompiledFunction]
    """Longest compile time first."""
    graph_breaks: dict[str, int]
    """Reason -> count."""
    started_unix_us: list[float]
    """Start time of each compilation."""

    @property
    def num_recompiles(self) -> int:
        """Compilations of functions that had been compiled before."""
        return sum(max(function.num_graphs - 1, 0) for function in self.functions)

    @property
    def total_s(self) -> float:
        """Total compile time in seconds."""
        return sum(function.forward_s + function.backward_s for function in self.functions)

    def num_between(self, start_unix_us: float, stop_unix_us: float) -> int:
        """Number of compilations that started in an interval."""
        return sum(start_unix_us <= started <= stop_unix_us for started in self.started_unix_us)


def start_records() -> None:
    """Clear all records, and raise PyTorch's limit so that it keeps those of a whole run."""
    dynamo.set_compilation_metrics_limit(4096)
    dynamo.clear_compilation_metrics()
    dynamo.counters.clear()


def compile_report() -> CompileReport:
    """Report the compilations of this process since `start_records`."""
    return summarise(dynamo.get_compilation_metrics(), dict(dynamo.counters["graph_break"]))


def summarise(records: Iterable[Any], graph_breaks: dict[str, int]) -> CompileReport:
    """Sum up compilation records by function."""
    functions: dict[str, CompiledFunction] = {}
    started = []
    for record in records:
        frame = str(record.compile_id).partition("/")[0]
        function = functions.setdefault(frame, CompiledFunction(name=f"frame {frame}"))
        seconds = (record.duration_us or 0) / 1e6
        if record.start_time_us:
            started.append(float(record.start_time_us))
        if record.is_forward is False:
            function.backward_s += seconds
            continue
        function.forward_s += seconds
        function.num_graphs += 1
        if record.co_name:
            file = "/".join((record.co_filename or "?").split("/")[-2:])
            function.name = f"{record.co_name} ({file}:{record.co_firstlineno})"
        function.reasons += [reason for reason in (record.recompile_reason, record.fail_reason) if reason]
    by_time = sorted(functions.values(), key=lambda function: -(function.forward_s + function.backward_s))
    return CompileReport(by_time, graph_breaks, started)
