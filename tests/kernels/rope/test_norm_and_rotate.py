"""norm_and_rotate beyond the registry's tests: strided gradients, determinism, refused arguments."""

from typing import Any

import pytest
import torch
from support.kernel_samples import SAMPLES
from torch import Tensor

from titan_moe.kernels.rope.norm_and_rotate import norm_and_rotate, norm_and_rotate_reference


def sample(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    torch.manual_seed(0)
    (found,) = (s for s in SAMPLES["norm_and_rotate"].draw(torch.device(device), dtype) if s.name == name)
    return tuple(x.requires_grad_() if i < found.num_differentiable else x for i, x in enumerate(found.args))


def gradient_with_heads_first(out_BNHD: Tensor) -> Tensor:
    """A random gradient with heads before positions in memory, as some attention kernels return it."""
    return torch.randn_like(out_BNHD.transpose(1, 2).contiguous()).transpose(1, 2)


@pytest.mark.interpreted
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_norm_and_rotate_backward_takes_gradients_of_any_strides(is_interleaved: bool) -> None:
    args = (*sample("odd_number_of_pairs")[:-1], is_interleaved)
    actual, expected = norm_and_rotate(*args), norm_and_rotate_reference(*args)
    torch.testing.assert_close(actual, expected)
    assert all(out.is_contiguous() for out in actual)
    dq, dk, dv = (gradient_with_heads_first(out) for out in actual)
    for grads in ((dq, dk, dv), (dq, torch.ones(()).expand_as(dk), dv.transpose(1, 3).contiguous().transpose(1, 3))):
        torch.testing.assert_close(
            *(torch.autograd.grad(outs, args[:3], grads, retain_graph=True) for outs in (actual, expected))
        )


@pytest.mark.gpu
def test_norm_weight_gradients_are_deterministic() -> None:
    args = sample("many_tiles", "cuda", torch.bfloat16)
    grads = tuple(gradient_with_heads_first(out) for out in norm_and_rotate(*args))
    first = torch.autograd.grad(norm_and_rotate(*args), args[:3], grads)
    for _ in range(3):
        again = torch.autograd.grad(norm_and_rotate(*args), args[:3], grads)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_norm_and_rotate_refuses_one_norm_weight_and_fp64() -> None:
    qkv_BNX, q_weight_D, k_weight_D, *rest = sample("odd_number_of_pairs")
    with pytest.raises(ValueError, match="give both weights or neither"):
        norm_and_rotate(qkv_BNX, q_weight_D, None, *rest)
    with pytest.raises(ValueError, match='got torch.float64; take perf.override.rotary = "torch"'):
        norm_and_rotate(qkv_BNX.double(), q_weight_D, k_weight_D, *rest)
