"""Runs with formats: the tiny recipe trains, compiles, and saves what a run without them loads."""

import json
import logging
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch

from titan_moe.config import RecipeError, load_recipe
from titan_moe.training import resolve_auto

EMULATED = ("--precision.backend=emulated",)
ROWWISE = ("--precision.linears=fp8_rowwise", *EMULATED)
TENSORWISE = ("--precision.linears=fp8_tensorwise", *EMULATED)
SHARED = ("--model.moe.shared_ffn_hidden_size=32", "--model.attention.qk_norm=true")
MLA = (
    "--model.attention.kind=mla --model.attention.q_lora_rank=32 --model.attention.kv_lora_rank=16 "
    "--model.attention.qk_nope_head_dim=16 --model.attention.qk_rope_head_dim=16 --model.attention.v_head_dim=16"
).split()


def last_losses(run) -> float:
    return sum(run.column("loss")[-10:]) / 10


@pytest.mark.few("qwen-like")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "tolerances"),
    [
        (SHARED, {ROWWISE: 0.01, ("--precision.format=nvfp4", *EMULATED): 0.03}),
        (MLA, {TENSORWISE: 0.01, ("--precision.format=mxfp8", *EMULATED): 0.01}),
    ],
    ids=["qwen-like", "mla"],
)
def test_training_in_formats_follows_training_without(
    tiny: Callable, shape: tuple[str, ...], tolerances: dict[tuple[str, ...], float]
) -> None:
    shared = (*shape, "--train.steps=12", "--precision.compute=bf16")
    plain = tiny(*shared)
    assert plain.train() == 0
    for words, tolerance in tolerances.items():
        run = tiny(*shared, *words)
        assert run.train() == 0
        assert run.column("loss") != plain.column("loss")
        assert last_losses(run) == pytest.approx(last_losses(plain), rel=tolerance)


@pytest.mark.slow
def test_checkpoints_load_into_any_precision(tiny: Callable, caplog: pytest.LogCaptureFixture) -> None:
    runs = {}
    for name, words in {"plain": (), "fp8": TENSORWISE}.items():
        runs[name] = tiny("--train.steps=4", "--checkpoint.every_steps=2", *words)
        assert runs[name].train() == 0
    kinds = {
        name: {key: (type(value), value.dtype) for key, value in run.checkpoint(4).items() if torch.is_tensor(value)}
        for name, run in runs.items()
    }
    assert kinds["plain"] == kinds["fp8"] and kinds["fp8"]
    for name, words, said in (
        ("plain", TENSORWISE, 'precision.linears = "fp8_tensorwise" (was "format")'),
        ("fp8", ("--precision.linears=compute",), 'precision.linears = "compute" (was "fp8_tensorwise")'),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, "titan_moe"):
            assert runs[name].again("--train.steps=6", *words) == 0
        assert "continuing after step 4" in caplog.text and said in caplog.text
        manifest = json.loads((runs[name].folder / "checkpoints" / "step-6" / "manifest.json").read_text())
        assert manifest["recipe"]["precision.modules_in_compute"] == []


@pytest.mark.few()
@pytest.mark.slow
def test_compiled_formats_train_as_eager_ones(tiny: Callable) -> None:
    words = (*SHARED, "--train.steps=2", *ROWWISE, "--precision.compute=bf16")
    eager = tiny(*words)
    assert eager.train() == 0
    torch._dynamo.reset()
    run = tiny(*words, "--memory.recompute=block", "--compile.regional=on")
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        assert run.train() == 0
    assert run.column("loss") == eager.column("loss")


def test_formats_are_logged_and_recorded(tiny: Callable, caplog: pytest.LogCaptureFixture) -> None:
    run = tiny("--train.steps=1", *ROWWISE, "--precision.modules_in_compute=*.qkv")
    with caplog.at_level(logging.INFO, "titan_moe"):
        assert run.train() == 0
    said = "formats on CPU: emulated: the numerics of formats without their speed; no format is dropped for speed; "
    assert said + "fp8_rowwise: layers.0-1.attention.out" in caplog.text
    saved = load_recipe(run.folder / "recipe.toml").precision
    assert (saved.backend, saved.linears, saved.modules_in_compute) == ("emulated", "fp8_rowwise", ("*.qkv",))
    assert run.again("--train.steps=2", "--precision.linears=compute", "--precision.modules_in_compute=") == 0


def test_formats_of_a_gpu_are_resolved_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(resolve_auto.torch.cuda, "get_device_name", lambda *_: "NVIDIA X1")
    monkeypatch.setattr(resolve_auto.torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(resolve_auto, "run_on_rank_zero", lambda choose: choose())

    recipe = load_recipe(__file__.replace("test_formats.py", "tiny.toml"), ["--precision.linears=fp8_rowwise"])
    with caplog.at_level(logging.INFO, "titan_moe"):
        p = resolve_auto.resolve_formats(recipe, torch.device("cuda")).precision
    assert (p.backend, p.only_where_faster) == ("native", False)
    slower = ("attention.qkv", "attention.out", "feed_forward.gate_up", "feed_forward.down")
    assert p.modules_in_compute == tuple(f"layers.*.{path}" for path in slower)
    assert "formats on NVIDIA X1: native: " in caplog.text and "fp8_rowwise is slower below" in caplog.text
    with pytest.raises(RecipeError, match='take precision.backend = "emulated"'):
        resolve_auto.resolve_formats(recipe, torch.device("cpu"))
    plain = load_recipe(__file__.replace("test_formats.py", "tiny.toml"))
    assert resolve_auto.resolve_formats(plain, torch.device("cpu")) is plain
