"""A span of work in a trace."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A time interval in which a stream or a thread ran one kernel or operation."""

    name: str
    part: str
    is_backward: bool
    is_communication: bool
    start_us: float
    stop_us: float
    is_continuation: bool = False
    """Whether an operation continues here after a nested operation."""
    launched_us: float | None = None
    """When the host had launched it; None on a CPU, or if the trace does not contain the launch."""
    shape: tuple[int, ...] = ()
    """The grid and the block of a kernel; empty for a copy and on a CPU."""

    @property
    def duration_us(self) -> float:
        """Its duration."""
        return self.stop_us - self.start_us
