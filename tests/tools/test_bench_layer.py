"""The layer benchmark at a tiny size on the CPU."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported from its folder."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    return importlib.import_module("bench_layer")


@pytest.fixture
def integer_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan counts tokens with histc, which is missing for integers on CPUs."""
    histc = torch.histc

    def float_histc(x: Tensor, **options: int) -> Tensor:
        return histc(x.float(), **options).to(x.dtype)

    monkeypatch.setattr(torch, "histc", float_histc)


@pytest.mark.few()
def test_layer_candidates_agree(tool: ModuleType, integer_histogram: None, capsys: pytest.CaptureFixture[str]) -> None:
    bench = tool.Bench(CPU, torch.float32, tool.wall_clock_ms, 100)
    bench.run(tool.SMOKE, ["grouped_mm", "composite", "torchtitan"], 3.0)
    stdout = capsys.readouterr().out
    assert "failed" not in stdout and "smoke skewed: max/mean load 3.0" in stdout
    assert len(bench.results) == 6
    for result in bench.results:
        assert result.error < 1e-5 and min(result.tflops) > 0 and result.saved_ratio > 1
    lines = list(tool.table(bench.results, tool.SMOKE))
    assert [line.split()[:2] for line in lines[1:3]] == [["smoke", "even"], ["smoke", "skewed"]]
    assert "1/1" in lines[1] and "%" in lines[2]


@pytest.mark.few()
def test_layer_candidate_in_fp8_is_near(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bench = tool.Bench(CPU, torch.float32, tool.wall_clock_ms, 100)
    bench.run(tool.SMOKE, ["grouped_mm", "fused_fp8"], 2.0)
    assert "failed" not in capsys.readouterr().out
    errors = [result.error for result in bench.results if result.candidate == "fused_fp8"]
    assert len(errors) == 2 and all(1e-3 < error < 0.1 for error in errors)


def test_layer_benchmark_reports_failures_and_skipped_candidates(
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
    assert "smoke grouped_mm: skipped, no time left" in capsys.readouterr().out and len(bench.results) == 2


@pytest.mark.parametrize(("num_experts", "choices", "reached"), [(128, 8, 3.0), (16, 8, 1.9), (8, 2, 3.0)])
def test_layer_bias_reaches_the_wanted_load(tool: ModuleType, num_experts: int, choices: int, reached: float) -> None:
    scores_TE = torch.randn(4096, num_experts).softmax(-1)
    bias_E = tool.bias_for_load(scores_TE, choices, 3.0)
    assert torch.equal(bias_E, tool.bias_for_load(scores_TE, choices, 3.0))
    assert tool.loads_of(scores_TE, bias_E, choices).max().item() == pytest.approx(reached, rel=0.01)


def test_layer_flops_are_those_of_the_experts(tool: ModuleType) -> None:
    lite = tool.SHAPES["deepseek_v2_lite"]
    assert lite.forward_flops == 6 * 32_768 * 2048 * (6 * 1408 + 2816)
    assert tool.SHAPES["qwen3_ep8"].saved_elements * 2 == 2 * 16_384 * 2048 + 4 * 131_072 * 768


def test_layer_saved_bytes_are_distinct_storages_without_weights(tool: ModuleType) -> None:
    layer = nn.Sequential(nn.Linear(8, 4), nn.Sigmoid(), nn.Linear(4, 4))
    x = torch.randn(16, 8)
    y, saved_bytes = tool.measure_saved_bytes(layer, x)
    assert saved_bytes == 4 * 16 * (8 + 4), "the input and the sigmoid, each once"
    assert torch.equal(y, layer(x))


def test_layer_shapes_equal_those_of_the_kernel_benchmark(tool: ModuleType) -> None:
    sizes_of = importlib.import_module("kernel_benchmarks").EXPERT_SHAPES
    for name, shape in tool.SHAPES.items():
        sizes = sizes_of[name]
        assert [shape.tokens, shape.width, shape.hidden, shape.experts, shape.choices] == [
            sizes[key] for key in ("rows", "width", "hidden", "experts", "choices")
        ]
