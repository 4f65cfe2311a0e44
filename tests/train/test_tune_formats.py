"""`titan-moe tune` of formats: what is measured, and that the gate and `check` use it. Real times need a GPU."""

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from titan_moe import cli
from titan_moe.config import Recipe, load_recipe
from titan_moe.config.formats import GemmFormats
from titan_moe.plan.format_choice import choose_formats
from titan_moe.plan.formats_to_measure import formats_to_measure
from titan_moe.plan.kernel_shapes import FORMAT_OPERATIONS, linear_shape
from titan_moe.plan.kernel_table import cached_tables, read_table
from titan_moe.precision.linears import convert_linear
from titan_moe.train import resolve_formats, tune, tune_formats

CPU, META = torch.device("cpu"), torch.device("meta")
QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart.toml")
WORDS = ["--run.device=auto", "--precision.compute=bf16", "--train.seq_len_tokens=16"]
GPU, HOPPER = "Fast GPU", (9, 0)
ROWWISE = GemmFormats("fp8_rowwise", "fp8_rowwise", "fp8_rowwise")
BLOCKWISE = GemmFormats("fp8_blockwise", "fp8_blockwise", "fp8_blockwise")
BOTH = ["experts_in_formats", "linear_in_formats"]
SHAPE = {"tokens": 32, "input": 48, "output": 64}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return load_recipe(QUICKSTART, [*WORDS, "--precision.format=fp8_rowwise"])


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = HOPPER) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(tune, "measure", lambda *_: iter(()))


def ticks() -> Any:
    """A stopwatch that calls the function and returns 1, 2, 3, ..."""
    numbers: Iterator[int] = count(1)

    def time(call: Any) -> float:
        call()
        return float(next(numbers))

    return time


def test_formats_to_measure_are_those_that_the_modules_could_have() -> None:
    qwen3 = load_recipe(QUICKSTART.replace("quickstart", "qwen3_30b_a3b"))
    experts, *linears = formats_to_measure(qwen3, 8, HOPPER)
    assert (experts.operation, experts.formats) == ("experts_in_formats", [ROWWISE, BLOCKWISE])
    assert experts.shape == FORMAT_OPERATIONS["experts_in_formats"].shape(qwen3)
    assert [entry.shape for entry in linears] == [
        linear_shape(qwen3, widths) for widths in ((2048, 5120), (4096, 2048))
    ]
    assert [str(each) for each in linears[0].formats] == ["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"]


@pytest.mark.parametrize(
    ("capability", "words", "operations"),
    [
        ((8, 0), [], []),
        (HOPPER, ["--precision.compute=fp32"], []),
        (HOPPER, ["--model.moe.score_on=input"], ["linear_in_formats"]),
        (HOPPER, ["--precision.format=nvfp4", "--precision.backend=emulated"], BOTH),
    ],
)
def test_formats_are_measured_where_there_are_kernels(
    capability: tuple[int, int], words: list[str], operations: list[str]
) -> None:
    found = formats_to_measure(load_recipe(QUICKSTART, [*WORDS, *words]), 1, capability)
    assert list(dict.fromkeys(entry.operation for entry in found)) == operations


def test_formats_of_single_gemms_are_measured_if_the_recipe_has_them() -> None:
    recipe = load_recipe(QUICKSTART, [*WORDS, "--precision.linears=fp8_rowwise", "--precision.wgrad=compute"])
    experts, linear, *_ = formats_to_measure(recipe, 1, HOPPER)
    assert [str(each) for each in experts.formats] == [
        f"{name}{suffix}" for name in ("fp8_rowwise", "fp8_blockwise") for suffix in ("", " (wgrad compute)")
    ]
    assert [str(each) for each in linear.formats] == [
        *("fp8_tensorwise", "fp8_tensorwise (wgrad compute)", "fp8_rowwise", "fp8_rowwise (wgrad compute)"),
        *(["fp8_blockwise"] if linear.shape["output"] % 128 == 0 else []),
    ]


def test_tune_writes_formats_and_gate_and_check_use_them(
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def slow_linears(tunable: Any, *_: Any) -> dict[str, float]:
        return {"compute": 2.0, "fp8_rowwise": 1.0 if tunable.operation == "experts_in_formats" else 3.0}

    with monkeypatch.context() as patch:
        pretend_gpu(patch)
        patch.setattr(tune_formats, "time_backends", slow_linears)
        choices = choose_formats(recipe, GPU, HOPPER)  # the H200's table is of the same architecture
        assert all(choice.formats == ROWWISE for choice in choices if choice.module.part == "experts")
        with caplog.at_level(logging.INFO, "titan_moe"):
            tune.run(recipe, 1)
        patch.setattr(resolve_formats, "run_on_rank_zero", lambda choose: choose())
        resolved = resolve_formats.resolve_formats(recipe, torch.device("cuda")).precision
    entries = read_table(cached_tables() / "fast_gpu.toml").measured
    measured = formats_to_measure(recipe, 1, HOPPER)
    assert sorted((entry.operation, str(entry.shape)) for entry in entries) == sorted(
        (entry.operation, str(entry.shape)) for entry in measured
    )
    (experts,) = (entry for entry in entries if entry.operation == "experts_in_formats")
    assert experts.ms == {"compute": 2.0, "fp8_rowwise": 1.0} and experts.shape == measured[0].shape
    assert set(resolved.modules_in_compute) == {"layers.*.attention.qkv", "layers.*.attention.out"}
    kept = "(fp8_rowwise is not faster: 3 ms, compute 2 ms on Fast GPU)"
    used = "feed_forward.experts (measured 1 ms, compute 2 ms on Fast GPU)"
    assert kept in caplog.text and used in caplog.text
    assert cli.main(["check", QUICKSTART, *WORDS, "--precision.format=fp8_rowwise"]) == 0
    stdout = capsys.readouterr().out
    assert "and later; formats only where faster\n" in stdout and "speed not measured" not in stdout
    shown = [line for line in stdout.splitlines() if "on Fast GPU: " in line]
    assert any(used in line for line in shown) and any("bf16: " in line and kept in line for line in shown)


def test_tune_measures_no_formats_without_matrix_units(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend_gpu(monkeypatch, (8, 0))
    with caplog.at_level(logging.INFO, "titan_moe"):
        tune.run(recipe, 1)
    assert not cached_tables().exists()


def test_format_that_fails_is_left_out(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The real experts, on meta tensors."""
    other_gemms = replace(recipe, precision=replace(recipe.precision, wgrad="compute"))
    experts, *_ = tune_formats.measure_formats(other_gemms, 1, META, HOPPER, ticks())
    names = [f"{name}{suffix}" for name in ("fp8_rowwise", "fp8_blockwise") for suffix in ("", " (wgrad compute)")]
    assert experts.ms == dict(zip(["compute", *names], (2.0, 4.0, 6.0, 8.0, 10.0), strict=True)), (
        "the first time of each is forward alone"
    )

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(tune_formats, "NATIVE", {ROWWISE: broken})
    found = tune_formats.measure_formats(recipe, 1, META, HOPPER, ticks())
    assert "experts_in_formats" not in [entry.operation for entry in found]
    assert "experts_in_formats fp8_rowwise fails, so it is left out: RuntimeError: no such kernel" in caplog.text


def test_linears_of_torchao_are_not_measured_without_it(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    experts, *linears = tune_formats.measure_formats(recipe, 1, META, HOPPER, ticks())
    assert experts.operation == "experts_in_formats" and linears
    assert {name for entry in linears for name in entry.ms} == {"compute", "fp8_rowwise", "fp8_blockwise"}
    assert caplog.text.count("linear_in_formats: torchao's layers are not measured: ") == 1


@pytest.mark.parametrize("formats", [ROWWISE, GemmFormats("fp8_tensorwise", "fp8_tensorwise")], ids=str)
def test_linear_is_measured_as_it_is_converted(formats: GemmFormats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated, compiled: output and both gradients are those of the converted layer."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    tunable = tune_formats.linear_in_formats([formats], SHAPE, "emulated")
    assert list(tunable.candidates) == ["compute", str(formats)]
    sample = tunable.draw(SHAPE, CPU)
    assert [tuple(x.shape) for x in sample.args] == [(32, 48), (64, 48)] and sample.num_differentiable == 2
    linear = nn.Linear(48, 64, bias=False, dtype=torch.bfloat16)
    linear.load_state_dict({"weight": sample.args[1]})
    converted = convert_linear(linear, formats, "emulated")
    x_TI, weight_OI = (x.detach().requires_grad_() for x in sample.args)
    timed = tunable.compiled(tunable.candidates[str(formats)], SHAPE)
    found = torch.autograd.grad(timed(x_TI, weight_OI).square().sum(), [x_TI, weight_OI])
    expected = torch.autograd.grad(converted(x_TI).square().sum(), [x_TI, converted.weight])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_tune_formats_of_a_small_model(recipe: Recipe) -> None:
    if (capability := torch.cuda.get_device_capability()) < HOPPER:
        pytest.skip("needs matrix units for fp8")
    wanted = formats_to_measure(recipe, 1, capability)
    found = list(tune_formats.measure_formats(recipe, 1, torch.device("cuda"), capability))
    assert [(entry.operation, entry.shape) for entry in found] == [(entry.operation, entry.shape) for entry in wanted]
    for entry, (_, _, formats) in zip(found, wanted, strict=True):
        assert entry.ms.keys() == {"compute", *map(str, formats)} and min(entry.ms.values()) > 0
