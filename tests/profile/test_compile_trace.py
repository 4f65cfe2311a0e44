"""The report of compilations, by function."""

import time

import torch

from titan_moe.profile.compile_trace import compile_report, start_records


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def broken(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()


def test_compile_report_counts_graphs_recompiles_and_breaks() -> None:
    torch._dynamo.reset()
    start_records()
    assert compile_report().functions == []
    before_us = time.time() * 1e6
    compiled = torch.compile(doubled, backend="aot_eager", dynamic=False)
    compiled(torch.ones(3, requires_grad=True)).sum().backward()
    after_one_us = time.time() * 1e6
    one = compile_report()
    (function,) = one.functions
    assert function.name.startswith("doubled (") and (function.num_graphs, one.num_recompiles) == (1, 0)
    assert function.forward_s > 0 and one.graph_breaks == {}
    compiled(torch.ones(4))
    torch.compile(broken, backend="aot_eager")(torch.ones(3))
    report = compile_report()
    functions = {function.name.partition(" ")[0]: function for function in report.functions}
    assert functions["doubled"].num_graphs == 2 and report.num_recompiles == 1
    assert functions["doubled"].reasons, "the reason of the recompile"
    assert sum(report.graph_breaks.values()) == 1
    assert report.total_s >= one.total_s
    later_us = time.time() * 1e6
    num_first = one.num_between(before_us, after_one_us)
    assert num_first == len(one.started_unix_us) == report.num_between(before_us, after_one_us)
    assert report.num_between(after_one_us, later_us) == len(report.started_unix_us) - num_first >= 2
