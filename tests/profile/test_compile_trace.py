"""Compilations are counted by piece."""

import time

import torch

from titan_moe.profile.compile_trace import compile_report, start_records


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def broken(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()


def test_graphs_recompiles_and_breaks() -> None:
    torch._dynamo.reset()
    start_records()
    assert compile_report().pieces == []
    before_us = time.time() * 1e6
    compiled = torch.compile(doubled, backend="aot_eager", dynamic=False)
    compiled(torch.ones(3, requires_grad=True)).sum().backward()
    after_one_us = time.time() * 1e6
    one = compile_report()
    (piece,) = one.pieces
    assert piece.name.startswith("doubled (") and (piece.num_graphs, one.num_recompiles) == (1, 0)
    assert piece.forward_s > 0 and one.graph_breaks == {}
    compiled(torch.ones(4))
    torch.compile(broken, backend="aot_eager")(torch.ones(3))
    report = compile_report()
    pieces = {piece.name.partition(" ")[0]: piece for piece in report.pieces}
    assert pieces["doubled"].num_graphs == 2 and report.num_recompiles == 1
    assert pieces["doubled"].reasons, "it says why"
    assert sum(report.graph_breaks.values()) == 1
    assert report.total_s >= one.total_s
    later_us = time.time() * 1e6
    num_of_first = one.num_between(before_us, after_one_us)
    assert num_of_first == len(one.started_unix_us) == report.num_between(before_us, after_one_us)
    assert report.num_between(after_one_us, later_us) == len(report.started_unix_us) - num_of_first >= 2
