"""A region is there when somebody looks, and never in the way."""

from contextlib import nullcontext

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile

from titan_moe.profile.region import PREFIX, marked, region


def names_of(run: profile) -> set[str]:
    return {event.name for event in run.events() if event.name.startswith(PREFIX)}


def test_a_region_is_a_range_of_the_trace() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as run, region("router"):
        marked(torch.ones, "experts")(3)
    assert names_of(run) == {PREFIX + "router", PREFIX + "experts"}


def test_without_a_profiler_it_is_nothing() -> None:
    assert isinstance(region("router"), nullcontext)


def test_a_full_graph_stays_one_and_the_same() -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x.sin() * 2)

    def with_regions(x: torch.Tensor) -> torch.Tensor:
        with region("router"):
            x = x.sin() * 2
        return marked(torch.cos, "experts")(x)

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
    assert names_of(run) == set(), "a compiled piece has no ranges of its own"


def test_a_profiler_that_comes_later_compiles_nothing_again() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(marked(torch.sin, "router"), fullgraph=True, backend=counter)
    compiled(torch.ones(3))
    with profile(activities=[ProfilerActivity.CPU]):
        compiled(torch.ones(3))
    assert counter.frame_count == 1
