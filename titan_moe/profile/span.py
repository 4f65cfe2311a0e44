"""A stretch of work in a trace."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in which a stream or a thread did one thing."""

    name: str
    part: str
    is_backward: bool
    is_communication: bool
    start_us: float
    stop_us: float
    continues: bool = False
    """Whether it is a later stretch of an operation that other operations have interrupted."""
    launched_us: float | None = None
    """When the host had handed it to the device; None where host and device are one, or the trace does not say."""

    @property
    def duration_us(self) -> float:
        """How long it took."""
        return self.stop_us - self.start_us
