"""What the registry does not ask of the norm kernels: gradients of any layout, other shapes, what they refuse."""

import pytest
import torch

from titan_moe.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, norm_backward, rms_norm


@pytest.mark.interpreted
def test_rms_norm_takes_gradients_of_any_layout() -> None:
    torch.manual_seed(0)
    x_BND, residual_BND = torch.randn(2, 3, 5, 24, requires_grad=True)
    inputs = (x_BND, residual_BND, torch.randn(24, requires_grad=True))
    grads = (torch.randn(24, 5, 3).permute(2, 1, 0), torch.ones(1, 1, 1).expand(3, 5, 24))
    actual, expected = (op(*inputs, 1e-6) for op in (add_rms_norm, add_rms_norm_reference))
    torch.testing.assert_close(actual, expected)
    actual, expected = (torch.autograd.grad(outs, inputs, grads) for outs in (actual, expected))
    torch.testing.assert_close(actual, expected)


@pytest.mark.interpreted
def test_rms_norm_when_only_one_output_is_used() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(7, 16, requires_grad=True), torch.randn(7, 16), torch.randn(16, requires_grad=True)]
    for used in (0, 1):
        x_TD, _, weight_D = inputs
        actual, expected = (
            torch.autograd.grad(op(*inputs, 1e-6)[used].sum(), (x_TD, weight_D), allow_unused=True)
            for op in (add_rms_norm, add_rms_norm_reference)
        )
        torch.testing.assert_close(actual, expected)


@pytest.mark.interpreted
def test_rms_norm_operations_are_sound() -> None:
    x_TD, residual_TD, weight_D = (torch.randn(*shape, requires_grad=True) for shape in ((4, 16), (4, 16), (16,)))
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    ops = torch.ops.titan_moe
    torch.library.opcheck(ops.rms_norm.default, (x_TD, weight_D, 1e-6), test_utils=tests)
    torch.library.opcheck(ops.add_rms_norm.default, (x_TD, residual_TD, weight_D, 1e-6), test_utils=tests)
    grads = (residual_TD.detach(), x_TD.detach(), x_TD.detach(), weight_D.detach(), torch.rand(4))
    torch.library.opcheck(ops.rms_norm_backward.default, grads, test_utils=tests)


@pytest.mark.gpu
def test_the_weights_gradient_is_the_same_every_time() -> None:
    torch.manual_seed(0)
    dnormed_TD, dh_TD, h_TD = torch.randn(3, 16_384, 2048, device="cuda", dtype=torch.bfloat16)
    weight_D, rstd_T = torch.ones_like(h_TD[0]), torch.rand(16_384, device="cuda")
    first = norm_backward(dnormed_TD, dh_TD, h_TD, weight_D, rstd_T)
    for _ in range(3):
        again = norm_backward(dnormed_TD, dh_TD, h_TD, weight_D, rstd_T)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_too_wide_and_too_precise_is_refused() -> None:
    with pytest.raises(ValueError, match='not torch.float64 and 8; take perf.override.norm = "torch"'):
        rms_norm(torch.zeros(2, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64), 1e-6)
    with pytest.raises(ValueError, match="at most 16384 wide, not torch.float32 and 16385"):
        add_rms_norm(torch.zeros(1, 16385), torch.zeros(1, 16385), torch.ones(16385), 1e-6)


def test_addends_of_two_dtypes_are_refused() -> None:
    x_TD = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="one dtype, not torch.bfloat16 and torch.float32"):
        add_rms_norm(x_TD.bfloat16(), x_TD, torch.ones(8), 1e-6)
