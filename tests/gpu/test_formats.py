"""Native formats of dense linear layers: numerics of each GEMM, and steps that compile and are captured."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from titan_moe.config.formats import FORMAT_FACTS, Format, GemmFormats
from titan_moe.precision.linears import convert_linear

NATIVE: tuple[Format, ...] = ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise")
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < FORMAT_FACTS["fp8_rowwise"].capability, reason="needs matrix units for fp8"),
]
QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
T, I, O = 512, 768, 1024


def decibels(exact: Tensor, rounded: Tensor) -> float:
    exact, rounded = exact.detach().double(), rounded.detach().double()
    return float(10 * torch.log10(exact.square().sum() / (exact - rounded).square().sum()))


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", NATIVE)
def test_native_formats_are_near_fp64(name: Format, is_compiled: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    linear = nn.Linear(I, O, bias=False, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(4, T // 4, I, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    grad = torch.randn(4, T // 4, O, dtype=torch.bfloat16, device="cuda") * 1e-3
    converted = convert_linear(linear, GemmFormats(name, name, name), "native")
    y = (torch.compile(converted, fullgraph=True) if is_compiled else converted)(x)
    y.backward(grad)
    x_TI, weight_OI, grad_TO = x.detach().double().flatten(0, 1), linear.weight.detach().double(), grad.double()
    grad_TO = grad_TO.flatten(0, 1)
    floor_of_gradients = 22 if name == "fp8_tensorwise" else 26
    assert decibels(x_TI @ weight_OI.T, y.flatten(0, 1)) > 26
    assert decibels(grad_TO @ weight_OI, x.grad.flatten(0, 1)) > floor_of_gradients
    assert decibels(grad_TO.T @ x_TI, linear.weight.grad) > floor_of_gradients


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--precision.linears=fp8_rowwise", "--precision.wgrad=compute"),
        ("--precision.linears=fp8_tensorwise",),
        ("--precision.linears=fp8_blockwise",),
        ("--precision.experts=fp8_blockwise", "--perf.kernels=fused"),
    ],
    ids=str,
)
def test_captured_steps_learn_as_eager_ones(
    tmp_path: Path, train_on_ranks: Callable[..., list[int]], options: tuple[str, ...]
) -> None:
    losses = {}
    for name, word in {"eager": "--compile.regional=off", "captured": "--compile.cudagraph=step"}.items():
        folder = tmp_path / name
        run = (f"--run.folder={folder}", "--run.device=cuda", "--precision.compute=bf16", "--train.steps=40")
        # at the recipe's 3e-3, runs that differ in a last digit soon differ by more
        quiet = (
            "--optim.lr=1e-3",
            "--model.moe.ffn_hidden_size=512",
            "--precision.only_where_faster=false",
            "--metrics.every_steps=1",
            "--metrics.sample_tokens=0",
            "--validation.every_steps=0",
        )
        assert train_on_ranks(1, ["train", str(QUICKSTART), *run, *quiet, *options, word]) == [0]
        records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        losses[name] = torch.tensor([record["loss"] for record in records if "loss" in record])
    assert losses["eager"][-10:].mean() < 0.9 * losses["eager"][0]
    torch.testing.assert_close(losses["captured"][-10:].mean(), losses["eager"][-10:].mean(), rtol=1e-2, atol=0)
