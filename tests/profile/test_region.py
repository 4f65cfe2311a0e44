"""Regions: ranges under a profiler, no cost without one, no effect on compiled graphs."""

from contextlib import nullcontext

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile

from titan_moe.plan.pipeline.action import Action, Pair
from titan_moe.profile.region import ACTION_PREFIX, PREFIX, action_region, in_region, region


def names_of(run: profile) -> set[str]:
    return {event.name for event in run.events() if event.name.startswith(PREFIX)}


def test_region_is_a_range_of_the_trace() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as run, region("router"):
        in_region(torch.ones, "experts")(3)
    assert names_of(run) == {PREFIX + "router", PREFIX + "experts"}


def test_region_without_a_profiler_is_a_null_context() -> None:
    assert isinstance(region("router"), nullcontext)
    assert isinstance(action_region(Action("forward", 0, 0)), nullcontext)


def test_region_of_an_action_is_no_part_of_the_model() -> None:
    pair = Pair(Action("forward", 1, 9), Action("backward", 2, 7))
    with profile(activities=[ProfilerActivity.CPU]) as run:
        with action_region(Action("backward_input", 3, 12)), region("router"):
            torch.ones(3)
        with action_region(pair):
            torch.ones(3)
    assert names_of(run) == {PREFIX + "router"}
    actions = [event.name for event in run.events() if event.name.startswith(ACTION_PREFIX)]
    assert actions == ["pipeline: backward_input 3 12", "pipeline: forward 1 9 + backward 2 7"]


def test_region_does_not_change_a_full_graph() -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x.sin() * 2)

    def with_regions(x: torch.Tensor) -> torch.Tensor:
        with region("router"):
            x = x.sin() * 2
        return in_region(torch.cos, "experts")(x)

    x = torch.randn(4, requires_grad=True)
    graphs = []
    with profile(activities=[ProfilerActivity.CPU]) as run:
        for function in (plain, with_regions):
            torch._dynamo.reset()
            counter = CompileCounterWithBackend("aot_eager")
            torch.testing.assert_close(torch.compile(function, fullgraph=True, backend=counter)(x), plain(x))
            (graph,) = counter.graphs
            graphs.append([str(node.target) for node in graph.graph.nodes])
    assert graphs[1] == graphs[0]
    assert names_of(run) == set(), "a compiled graph has no ranges inside"


def test_region_does_not_recompile_under_a_later_profiler() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(in_region(torch.sin, "router"), fullgraph=True, backend=counter)
    compiled(torch.ones(3))
    with profile(activities=[ProfilerActivity.CPU]):
        compiled(torch.ones(3))
    assert counter.frame_count == 1
