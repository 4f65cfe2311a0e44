"""Fused output head and cross entropy: memory, speed, FLOPs, autograd. The registry tests check its values."""

import importlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from triton.testing import do_bench

from titan_moe.kernels.loss import fused_cross_entropy as fused
from titan_moe.kernels.loss.cross_entropy import IGNORE_LABEL, linear_cross_entropy_reference
from titan_moe.kernels.loss.fused_cross_entropy import CHUNK_TOKENS, fused_cross_entropy
from titan_moe.kernels.loss.scaled_cast import scaled_cast

T, D, V = 16_384, 2048, 151_936
GIB = 2**30
BAR_BYTES = 1.5 * GIB


@pytest.fixture(
    params=[pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> str:
    torch.manual_seed(0)
    return request.param


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live tensors, the fused op's temporaries included.

    For meta tensors: they have sizes and lifetimes, but take no memory, and nothing is computed.
    """

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: set[int] = set()
        for tensor in inputs:
            self.watch(tensor)
        self.inputs = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inner = {
            torch.ops.titan_moe.fused_cross_entropy.default: fused.loss_and_gradients,
            torch.ops.titan_moe.fused_cross_entropy_loss.default: fused.loss_alone,
            torch.ops.titan_moe.scaled_cast.default: scaled_cast,
        }.get(func)
        if inner is not None:
            with self:
                return inner(*args)
        if func is torch.ops.aten.addmm.dtype_out:  # torch 2.11 has no meta kernel of it
            return kwargs["out"]
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            self.watch(tensor)
        return out

    def watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self.seen:
            self.seen.add(id(storage))
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.forget, id(storage), storage.nbytes())

    def forget(self, key: int, num_bytes: int) -> None:
        self.seen.remove(key)
        self.live -= num_bytes


def meta_inputs() -> tuple[Tensor, Tensor, Tensor]:
    x_TD = torch.empty(T, D, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight_VD = torch.empty(V, D, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return x_TD, weight_VD, torch.empty(T, dtype=torch.int64, device="meta")


def peak_bytes_beyond_gradients(chunk_tokens: int) -> int:
    x_TD, weight_VD, labels_T = meta_inputs()
    with LiveBytes(x_TD, weight_VD, labels_T) as mode:
        fused_cross_entropy(x_TD, weight_VD, labels_T, chunk_tokens).backward()
    assert x_TD.grad is not None and weight_VD.grad is not None
    assert mode.live == mode.inputs + x_TD.grad.nbytes + weight_VD.grad.nbytes, "another tensor stays alive"
    return mode.peak - mode.live


@pytest.mark.usefixtures("hopper")
def test_peak_memory_of_meta_tensors_is_below_bar() -> None:
    """The peak at full size is the fp32 dW plus one chunk's logits or the unscaled dX."""
    peak = peak_bytes_beyond_gradients(CHUNK_TOKENS)
    sum_bytes, dx_bytes, losses_bytes = 4 * V * D, 2 * T * D, 4 * T
    assert peak < BAR_BYTES
    assert peak <= sum_bytes + dx_bytes + losses_bytes
    # a chunk twice as large exceeds the bar: the logits are counted
    assert BAR_BYTES < peak_bytes_beyond_gradients(2 * CHUNK_TOKENS) < BAR_BYTES + GIB / 2


@pytest.mark.usefixtures("hopper")
def test_memory_without_gradients_is_one_chunk_of_logits() -> None:
    inputs = meta_inputs()
    with LiveBytes(*inputs) as mode, torch.no_grad():
        fused_cross_entropy(*inputs, CHUNK_TOKENS)
    assert mode.peak - mode.inputs <= 2 * CHUNK_TOKENS * V + 2 * 4 * T


def test_flops_are_counted() -> None:
    with FlopCounterMode(display=False) as counter:
        fused_cross_entropy(*meta_inputs()).backward()
    assert counter.get_total_flops() == 6 * T * D * V
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        fused_cross_entropy(*meta_inputs())
    assert counter.get_total_flops() == 2 * T * D * V


def test_fp64_is_refused() -> None:
    with pytest.raises(TypeError, match="perf.override.head"):
        fused_cross_entropy(torch.zeros(2, 4).double(), torch.zeros(3, 4).double(), torch.zeros(2).long())


def small(device: str, num_words: int = 40, num_tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    x_TD = torch.randn(num_tokens, 8, device=device)
    labels_T = torch.randint(num_words, (num_tokens,), device=device)
    labels_T[::4] = IGNORE_LABEL
    return x_TD, torch.randn(num_words, 8, device=device), labels_T


def test_loss_without_gradients_equals_reference(device: str) -> None:
    x_TD, weight_VD, labels_T = small(device)
    expected = linear_cross_entropy_reference(x_TD, weight_VD, labels_T)
    torch.testing.assert_close(fused_cross_entropy(x_TD, weight_VD, labels_T, 4), expected)
    with torch.no_grad():
        torch.testing.assert_close(fused_cross_entropy(x_TD.requires_grad_(), weight_VD, labels_T, 4), expected)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_gradient_of_frozen_input_is_none(frozen: str, device: str) -> None:
    x_TD, weight_VD, labels_T = small(device)
    trained, other = (weight_VD, x_TD) if frozen == "x" else (x_TD, weight_VD)
    trained.requires_grad_()
    (grad,) = torch.autograd.grad(fused_cross_entropy(x_TD, weight_VD, labels_T, 4), trained)
    (expected,) = torch.autograd.grad(linear_cross_entropy_reference(x_TD, weight_VD, labels_T), trained)
    torch.testing.assert_close(grad, expected)
    assert other.grad is None


def test_tied_embedding_gradient_equals_reference(device: str) -> None:
    _, weight_VD, labels_T = small(device)
    tokens_T = torch.randint(40, (9,), device=device)
    grads = []
    for loss in (fused_cross_entropy, linear_cross_entropy_reference):
        tied_VD = weight_VD.clone().requires_grad_()
        (loss(F.embedding(tokens_T, tied_VD), tied_VD, labels_T, 4) / 7).backward()
        grads.append(tied_VD.grad)
    torch.testing.assert_close(*grads)


def test_backward_runs_twice(device: str) -> None:
    x_TD, weight_VD, labels_T = small(device)
    loss = fused_cross_entropy(x_TD.requires_grad_(), weight_VD.requires_grad_(), labels_T, 4)
    first = torch.autograd.grad(loss, (x_TD, weight_VD), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(3 * loss, (x_TD, weight_VD)), tuple(3 * grad for grad in first))


@pytest.mark.interpreted
@pytest.mark.parametrize("label", [40, -1])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_label_outside_vocabulary_is_refused(label: int, has_gradients: bool) -> None:
    """On a GPU the assertion would end all later tests, too."""
    x_TD, weight_VD, labels_T = small("cpu")
    labels_T[1] = label
    with pytest.raises(RuntimeError, match="a label is outside of the vocabulary"):
        fused_cross_entropy(x_TD.requires_grad_(has_gradients), weight_VD, labels_T, 4)


@pytest.fixture
def full_size() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    torch.cuda.empty_cache()
    x_TD = torch.randn(T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_VD = (torch.randn(V, D, device="cuda", dtype=torch.bfloat16) / D**0.5).requires_grad_()
    yield x_TD, weight_VD, torch.randint(V, (T,), device="cuda")
    torch.cuda.empty_cache()


def run(op: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(op(*inputs), inputs[:2])


@pytest.mark.gpu
def test_memory_at_full_size(full_size: tuple[Tensor, Tensor, Tensor]) -> None:
    run(fused_cross_entropy, full_size)  # allocates the GEMMs' workspaces, which stay allocated
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = run(fused_cross_entropy, full_size)
    beyond = torch.cuda.max_memory_allocated() - before - sum(grad.nbytes for grad in grads)
    assert beyond < BAR_BYTES, f"{beyond / GIB:.2f} GiB beyond inputs and gradients"


@pytest.mark.gpu
def test_speed_at_full_size(full_size: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "tools")
    three_gemms = importlib.import_module("kernel_benchmarks").three_gemms

    def milliseconds(call: Callable[[], object]) -> float:
        call()
        return do_bench(call, warmup=500, rep=2000, return_mode="median")

    gemms_ms = milliseconds(lambda: three_gemms(*full_size))
    fused_ms = milliseconds(lambda: run(fused_cross_entropy, full_size))
    assert gemms_ms / fused_ms > 0.8, f"{fused_ms:.1f} ms, its three GEMMs alone {gemms_ms:.1f} ms"
