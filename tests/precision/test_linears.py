"""Dense linear layers with formats: numerics of the three GEMMs, names, and what is kept for backward."""

import sys
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from titan_moe.config import RecipeError
from titan_moe.config.formats import Format, GemmFormats
from titan_moe.config.rules.precision import IN_TRITON
from titan_moe.kernels.experts.swiglu import swiglu
from titan_moe.kernels.linear.fp8 import fp8_linear
from titan_moe.kernels.linear.fp8_blocks import fp8_block_linear
from titan_moe.layers.mlp import MLP, SwiGLUDown
from titan_moe.precision.linears import NATIVE, FormattedLinear, convert_linear

T, I, O = 128, 192, 256


def three(name: Format) -> GemmFormats:
    return GemmFormats(name, name, name)


def decibels(exact: Tensor, rounded: Tensor) -> float:
    """Signal over noise."""
    exact, rounded = exact.detach().double(), rounded.detach().double()
    return float(10 * torch.log10(exact.square().sum() / (exact - rounded).square().sum()))


def gemms(linear: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, and gradients of input and weight."""
    x = x.detach().clone().requires_grad_()
    linear.zero_grad()
    y = linear(x)
    y.backward(grad.to(y.dtype))
    return [y.detach(), x.grad, linear.weight.grad.clone()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("formats", "floors"),
    [
        (three("fp8_rowwise"), (26, 26, 26)),
        (three("fp8_tensorwise"), (26, 22, 22)),  # gradients in e5m2
        (GemmFormats("fp8_rowwise", "fp8_rowwise", "compute"), (26, 26, 50)),
        (GemmFormats("fp8_rowwise", "compute", "fp8_rowwise"), (26, 50, 26)),
        (GemmFormats("fp8_tensorwise", "compute", "compute"), (26, 50, 50)),
    ],
    ids=str,
)
def test_emulated_fp8_is_near_fp64(formats: GemmFormats, floors: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(I, O, dtype=dtype)
    x, grad = torch.randn(2, T // 2, I, dtype=dtype), torch.randn(2, T // 2, O, dtype=dtype) * 1e-3
    reference = nn.Linear(I, O).double()
    reference.load_state_dict({name: value.double() for name, value in linear.state_dict().items()})
    exact = gemms(reference, x.double(), grad)
    rounded = gemms(convert_linear(linear, formats, "emulated"), x, grad)
    for e, r, floor in zip(exact, rounded, floors, strict=True):
        assert r.dtype == dtype
        assert floor <= decibels(e, r) < (35 if floor < 30 else 200), "neither too far nor not rounded"


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="older CPU builds have no scaled product of rows")
@pytest.mark.parametrize(
    "formats", [GemmFormats("fp8_rowwise", "fp8_rowwise", "compute"), three("fp8_tensorwise")], ids=str
)
def test_native_is_near_emulated(formats: GemmFormats) -> None:
    torch.manual_seed(0)
    linear, x, grad = nn.Linear(I, O, dtype=torch.bfloat16), torch.randn(T, I).bfloat16(), torch.randn(T, O).bfloat16()
    emulated, native = (gemms(convert_linear(linear, formats, name), x, grad) for name in ("emulated", "native"))
    assert all(decibels(e, n) > 45 for e, n in zip(emulated, native, strict=True)), "they differ in the last bf16 digit"


def test_rows_of_different_sizes_suit_rowwise_scales() -> None:
    """One scale a tensor loses small rows below the smallest code; one a row does not."""
    torch.manual_seed(0)
    linear = nn.Linear(I, O, bias=False)
    x = torch.randn(T, I) * torch.logspace(-6, 0, T)[:, None]
    exact = (x.double() @ linear.weight.double().T)[:16]
    errors = {
        name: decibels(exact, convert_linear(linear, three(name), "emulated")(x)[:16])
        for name in ("fp8_rowwise", "fp8_tensorwise")
    }
    assert errors["fp8_rowwise"] > 26 and errors["fp8_tensorwise"] < 10


def test_converted_layers_keep_their_parameters_and_the_meta_device() -> None:
    with torch.device("meta"):
        linear, down = nn.Linear(I, O), SwiGLUDown(I, O)
    for original in (linear, down):
        names = dict(original.named_parameters())
        converted = convert_linear(original, three("fp8_rowwise"), "emulated")
        assert dict(converted.named_parameters()).keys() == names.keys()
        assert all(parameter is names[name] for name, parameter in converted.named_parameters())
        assert isinstance(converted, nn.Linear) and converted.weight.is_meta


def test_all_layers_share_one_config() -> None:
    """Graphs are guarded by it: another object would be another graph."""
    first, second = (convert_linear(nn.Linear(I, O), three("fp8_rowwise"), "emulated") for _ in range(2))
    assert first.config is second.config
    plain_dw = GemmFormats("fp8_rowwise", "fp8_rowwise", "compute")
    assert first.config is not convert_linear(nn.Linear(I, O), plain_dw, "emulated").config


def converted_mlp(formats: GemmFormats) -> tuple[MLP, MLP]:
    mlp, rounded = MLP(64, 128), MLP(64, 128)
    rounded.load_state_dict(mlp.state_dict())
    for name in ("gate_up", "down"):
        rounded.set_submodule(name, convert_linear(rounded.get_submodule(name), formats, "emulated"))
    return mlp, rounded


def test_swiglu_down_activates_and_multiplies() -> None:
    torch.manual_seed(0)
    mlp, rounded = converted_mlp(three("fp8_rowwise"))
    x = torch.randn(T, 64)
    assert 22 < decibels(mlp(x), rounded(x)) < 35
    hidden = rounded.gate_up(x)
    assert 26 < decibels(swiglu(hidden) @ mlp.down.weight.T, rounded.down(hidden)) < 35


@pytest.mark.slow
def test_compiled_mlp_keeps_no_more_than_input_and_pre_activation() -> None:
    torch._dynamo.reset()
    _, rounded = converted_mlp(three("fp8_rowwise"))
    weights = {parameter.untyped_storage().data_ptr() for parameter in rounded.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    compiled = torch.compile(rounded, backend="aot_eager_decomp_partition", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = compiled(torch.randn(T, 64, requires_grad=True))
    y.sum().backward()
    assert sum(kept.values()) <= T * 4 * (64 + 2 * 128)


@pytest.mark.parametrize(("name", "floor"), [("fp8_blockwise", 26), ("mxfp8", 26), ("nvfp4", 14)])
def test_other_formats_are_emulated_by_kernels(name: Format, floor: float) -> None:
    torch.manual_seed(0)
    linear, down, x = nn.Linear(I, O), SwiGLUDown(I, O), torch.randn(T, I)
    converted = convert_linear(linear, three(name), "emulated")
    assert isinstance(converted, FormattedLinear) and floor < decibels(linear(x), converted(x)) < floor + 10
    hidden = torch.randn(T, 2 * I)
    exact = gemms(down, hidden, torch.ones(T, O))
    rounded = gemms(convert_linear(down, three(name), "emulated"), hidden, torch.ones(T, O))
    assert all(floor - 2 < decibels(e, r) < 60 for e, r in zip(exact, rounded, strict=True))


@pytest.mark.interpreted
@pytest.mark.parametrize("original", [nn.Linear, SwiGLUDown])
def test_native_blockwise_layers_are_those_of_the_emulation(original: type[nn.Linear]) -> None:
    """With a bias, behind an activation, for several sequences whose tokens fill no tile."""
    torch.manual_seed(0)
    layer = original(256, 384)
    x = torch.randn(2, 70, 512 if original is SwiGLUDown else 256)
    grad = torch.randn(2, 70, 384) * 1e-3
    emulated, native = (
        gemms(convert_linear(layer, three("fp8_blockwise"), name), x, grad) for name in ("emulated", "native")
    )
    for e, n, floor in zip(emulated, native, (100, 100, 60), strict=True):
        assert decibels(e, n) > floor, "gradients of weights are rounded twice"


def test_native_blockwise_layers_with_a_gemm_in_compute_are_refused() -> None:
    formats = GemmFormats("fp8_blockwise", "fp8_blockwise", "compute")
    with pytest.raises(RecipeError, match='"fp8_blockwise \\(wgrad compute\\)" has no native kernels'):
        convert_linear(nn.Linear(I, O), formats, "native")


@pytest.mark.parametrize(("name", "product"), [("fp8_rowwise", fp8_linear), ("fp8_blockwise", fp8_block_linear)])
def test_native_layers_of_ours_need_no_torchao(name: Format, product: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    converted = convert_linear(SwiGLUDown(I, O), three(name), "native")
    assert isinstance(converted, FormattedLinear) and converted.activates and converted.product is product
    assert deepcopy(converted).product is product


def test_rules_know_which_native_layers_are_triton() -> None:
    assert set(IN_TRITON) == set(NATIVE)


def test_native_kernels_that_do_not_exist_are_refused() -> None:
    with pytest.raises(RecipeError, match='"mxfp8" has no native kernels; take precision.backend = "emulated"'):
        convert_linear(nn.Linear(I, O), three("mxfp8"), "native")


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_tensorwise"])
def test_missing_torchao_is_named_with_a_way_out(monkeypatch: pytest.MonkeyPatch, name: Format) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(RecipeError, match=r'needs torchao, .*; install it with pip install "torchao>=0.17,<0.19"'):
        convert_linear(nn.Linear(I, O), three(name), "emulated")
