"""Facts about pipeline schedules, a row each, by the name in `parallel.pp_schedule`.

Rules and plan depend on facts, not on names. A new schedule is a row here and an order in plan/pipeline/orders.py.
"""

from dataclasses import dataclass

UNBOUNDED = 1_000


@dataclass(frozen=True)
class ScheduleFacts:
    """Facts about a schedule that rules and plan read."""

    min_vpp: int = 1
    max_vpp: int = 1
    is_v: bool = False
    """Whether stages are placed from the first rank to the last and back (V), instead of from the first rank to the
    last each time (loop)."""
    splits_backward: bool = False
    """Whether weight gradients of some microbatches are computed later than those of activations."""
    rounds: bool = False
    """Whether a stage runs pp microbatches at a time, so that pp must divide their number."""
    microbatches_per_rank: int = 0
    """The smallest number of microbatches of a step, divided by pp; 0: any number."""
    has_pairs: bool = False
    """Whether it has an order that merges forwards and backwards in the middle of a step."""

    def rank_of(self, stage: int, pp: int) -> int:
        """The pipeline rank of a stage."""
        return min(stage, 2 * pp - 1 - stage) if self.is_v else stage % pp

    def fits_vpp(self, vpp: int) -> bool:
        """Whether a rank may have so many stages."""
        return self.min_vpp <= vpp <= self.max_vpp

    def fewest_microbatches(self, pp: int) -> int:
        """The fewest microbatches of a step that it can run."""
        return max(self.microbatches_per_rank * pp, 1)


SCHEDULES = {
    "1f1b": ScheduleFacts(has_pairs=True),
    "interleaved_1f1b": ScheduleFacts(2, UNBOUNDED, rounds=True, has_pairs=True),
    "zbv": ScheduleFacts(2, 2, is_v=True, splits_backward=True),
    "dualpipev": ScheduleFacts(2, 2, is_v=True, splits_backward=True, microbatches_per_rank=2, has_pairs=True),
}
"""By name."""
