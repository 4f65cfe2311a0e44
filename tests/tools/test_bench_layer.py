"""The layer benchmark at a tiny size, so that a session on a GPU meets no slip of the pen."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

CPU = torch.device("cpu")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported from where it stands."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    return importlib.import_module("bench_layer")


@pytest.fixture
def integer_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan counts tokens with an operation that CPUs have for floats only."""
    histc = torch.histc

    def counted(x: Tensor, **options: int) -> Tensor:
        return histc(x.float(), **options).to(x.dtype)

    monkeypatch.setattr(torch, "histc", counted)


def test_every_layer_computes_the_same(
    tool: ModuleType, integer_histogram: None, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = tool.Bench(CPU, torch.float32, tool.wall_clock_ms, 100)
    bench.run(tool.SMOKE, ["grouped_mm", "composite", "torchtitan"], 3.0)
    said = capsys.readouterr().out
    assert "failed" not in said and "smoke skewed: max/mean load 3.0" in said
    assert len(bench.results) == 6
    for result in bench.results:
        assert result.off < 1e-5 and min(result.tflops) > 0 and result.saved_ratio > 1
    lines = list(tool.table(bench.results, tool.SMOKE))
    assert [line.split()[:2] for line in lines[1:3]] == [["smoke", "even"], ["smoke", "skewed"]]
    assert "1/1" in lines[1] and "%" in lines[2]


def test_a_failure_is_a_line_and_time_runs_out(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise torch.OutOfMemoryError("no room\nat all")

    monkeypatch.setitem(tool.CANDIDATES, "broken", broken)
    bench = tool.Bench(CPU, torch.float32, tool.wall_clock_ms, 100)
    bench.run(tool.SMOKE, ["broken", "grouped_mm"], 2.0)
    assert "smoke broken: failed: OutOfMemoryError: no room\n" in capsys.readouterr().out
    assert {result.candidate for result in bench.results} == {"grouped_mm"}
    bench.deadline = 0.0
    bench.run(tool.SMOKE, ["grouped_mm"], 2.0)
    assert "smoke grouped_mm: left out, the time is up" in capsys.readouterr().out and len(bench.results) == 2


@pytest.mark.parametrize(("num_experts", "choices", "reached"), [(128, 8, 3.0), (16, 8, 1.9), (8, 2, 3.0)])
def test_a_bias_reaches_the_load(tool: ModuleType, num_experts: int, choices: int, reached: float) -> None:
    scores_TE = torch.randn(4096, num_experts).softmax(-1)
    bias_E = tool.bias_for(scores_TE, choices, 3.0)
    assert torch.equal(bias_E, tool.bias_for(scores_TE, choices, 3.0))
    assert tool.loads_of(scores_TE, bias_E, choices).max().item() == pytest.approx(reached, rel=0.01)


def test_work_is_that_of_the_experts(tool: ModuleType) -> None:
    lite = tool.SHAPES["deepseek_v2_lite"]
    assert lite.forward_flops == 6 * 32_768 * 2048 * (6 * 1408 + 2816)
    assert tool.SHAPES["qwen3_ep8"].saved_elements * 2 == 2 * 16_384 * 2048 + 4 * 131_072 * 768


def test_saved_bytes_are_distinct_storages_without_weights(tool: ModuleType) -> None:
    layer = nn.Sequential(nn.Linear(8, 4), nn.Sigmoid(), nn.Linear(4, 4))
    x = torch.randn(16, 8)
    y, kept = tool.run_and_weigh(layer, x)
    assert kept == 4 * 16 * (8 + 4), "the input and the sigmoid, each once"
    assert torch.equal(y, layer(x))


def test_shapes_are_those_of_the_kernel_benchmark(tool: ModuleType) -> None:
    sizes_of = importlib.import_module("kernel_benchmarks").EXPERT_SHAPES
    for name, shape in tool.SHAPES.items():
        sizes = sizes_of[name]
        assert [shape.tokens, shape.width, shape.hidden, shape.experts, shape.choices] == [
            sizes[key] for key in ("rows", "width", "hidden", "experts", "choices")
        ]
