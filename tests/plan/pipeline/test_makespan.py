"""The makespan of a schedule is that of its simulation."""

import pytest

from titan_moe.config.parallel import ParallelConfig
from titan_moe.plan.pipeline.makespan import makespan_of
from titan_moe.plan.pipeline.schedules import actions_of_recipe
from titan_moe.plan.pipeline.simulation import Times, simulate


@pytest.mark.parametrize(
    ("schedule", "vpp", "overlap"),
    [
        ("1f1b", 1, "none"),
        ("interleaved_1f1b", 2, "none"),
        ("zbv", 2, "none"),
        ("dualpipev", 2, "none"),
        ("dualpipev", 2, "microbatch"),
    ],
)
def test_as_simulated(schedule: str, vpp: int, overlap: str) -> None:
    parallel = ParallelConfig(pp=3, vpp=vpp, pp_schedule=schedule, overlap=overlap)  # type: ignore[arg-type]
    number = 3 * vpp
    times = Times(*([1.0 + 0.3 * (stage * row % 5) for stage in range(number)] for row in (1, 2, 3)))
    whole = simulate(actions_of_recipe(parallel, 9), times).makespan
    assert makespan_of(parallel, 9, times) == pytest.approx(whole)
