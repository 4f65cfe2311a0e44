"""Muon's passes in Triton against their references, and Newton-Schulz against singular values."""

import pytest
import torch
from torch import Tensor

from titan_moe.kernels.optim.muon import (
    BLOCK,
    Decay,
    Momentum,
    launch_momentum,
    launch_step,
    momentum_reference,
    step_reference,
)
from titan_moe.kernels.optim.newton_schulz import (
    orthogonalise,
    orthogonalise_by_halves,
    orthogonalise_parts,
    orthogonalise_reference,
)
from titan_moe.kernels.optim.split_master import merge_reference, split_reference
from titan_moe.kernels.optim.symmetric import BLOCK_R, launch_symmetric_product, symmetric_product_reference

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(0, 4, 4), (1, 1, 3), (3, 5, 7), (1, 2, BLOCK // 2), (1, 3, BLOCK - 1)]


def scalars(device: str, *values: float) -> list[Tensor]:
    return [torch.tensor(value, device=device) for value in values]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_triton_adds_gradients_to_momenta(device: str, nesterov: bool) -> None:
    torch.manual_seed(0)
    for shape in SHAPES:
        for skips in (0.0, 1.0):
            grad, buffer = torch.randn(2, *shape, device=device)
            rule = Momentum(*scalars(device, skips, 0.5), 0.95, nesterov)
            update, own = torch.full_like(grad, torch.nan, dtype=torch.bfloat16), buffer.clone()
            expected, new = momentum_reference(grad, buffer.clone(), rule)
            launch_momentum(grad, own, update, rule)
            torch.testing.assert_close(own, new, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(update, expected, rtol=2**-7, atol=1e-6)
            assert torch.equal(own, buffer) or not skips


@pytest.mark.parametrize("device", DEVICES)
def test_triton_steps_weights(device: str) -> None:
    torch.manual_seed(0)
    for shape in SHAPES:
        for skips in (0.0, 1.0):
            param, update = torch.randn(2, *shape, device=device)
            rule, own = Decay(*scalars(device, 0.01, skips), 0.1), param.clone()
            launch_step(own, update.bfloat16(), 0.7, rule)
            expected = step_reference(param.clone(), update.bfloat16(), 0.7, rule)
            torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(own, param) or not skips


@pytest.mark.parametrize("device", DEVICES)
def test_triton_steps_split_masters(device: str) -> None:
    torch.manual_seed(0)
    master, update = torch.randn(2, 3, 5, BLOCK // 10, device=device)
    rule = Decay(*scalars(device, 0.01, 0.0), 0.1)
    param, remainder = split_reference(master)
    launch_step(param, update.bfloat16(), 0.7, rule, remainder)
    expected = step_reference(master.clone(), update.bfloat16(), 0.7, rule)
    torch.testing.assert_close(merge_reference(param, remainder), expected, rtol=1e-6, atol=1e-6)


def test_newton_schulz_brings_singular_values_near_one() -> None:
    """Of wide and of tall matrices, each on its own, and of each matrix of a fused weight that ranks have split."""
    torch.manual_seed(0)
    for shape in ((3, 8, 20), (3, 20, 8)):
        x = torch.randn(shape, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
        y = orthogonalise(x, 5)
        values = torch.linalg.svdvals(y)
        assert values.min() > 0.6 and values.max() < 1.3
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        inner = u.mT @ y @ v.mT  # the same directions
        torch.testing.assert_close(inner, torch.diag_embed(inner.diagonal(dim1=1, dim2=2)), rtol=0, atol=1e-9)
    parts = torch.randn(2, 12, 5, dtype=torch.float64).split((8, 4), 1)
    by_rank = torch.cat([part.chunk(2, 1)[rank] for rank in range(2) for part in parts], 1)
    wanted = [orthogonalise(part, 5).chunk(2, 1) for part in parts]
    expected = torch.cat([part[rank] for rank in range(2) for part in wanted], 1)
    torch.testing.assert_close(orthogonalise_parts(by_rank, (8, 4), 2, 5), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(orthogonalise(torch.zeros(1, 2, 3), 5), torch.zeros(1, 2, 3))


@pytest.mark.parametrize("device", DEVICES)
def test_triton_computes_half_of_a_symmetric_product(device: str) -> None:
    """Of one tile, of several with an incomplete last one, and of matrices that lie transposed."""
    torch.manual_seed(0)
    for number, num_rows, num_columns in ((2, 5, 9), (1, 2 * BLOCK_R + 17, 70), (0, 4, 4)):
        for x in (
            torch.randn(number, num_rows, num_columns, device=device),
            torch.randn(number, num_columns, num_rows, device=device).mT,
        ):
            scales = torch.rand(number, device=device)
            gram = launch_symmetric_product(x, scales)
            tolerance = {"rtol": 1e-5, "atol": 1e-4} if device == "cpu" else {"rtol": 1e-2, "atol": 1e-1}  # tf32
            torch.testing.assert_close(gram, symmetric_product_reference(x, scales), **tolerance)
            assert torch.equal(gram, gram.mT)
            gram = gram / max(num_columns, 1)
            ours, whole = (
                product(gram, scales, gram, (2.0, -4.8, 3.4))
                for product in (launch_symmetric_product, symmetric_product_reference)
            )
            torch.testing.assert_close(ours, whole, **tolerance)


def test_one_factor_of_all_terms_is_the_same_polynomial() -> None:
    torch.manual_seed(0)
    for shape in ((3, 8, 20), (3, 20, 8), (1, 6, 6)):
        x = 1e-3 * torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(orthogonalise_by_halves(x, 5), orthogonalise_reference(x, 5), rtol=0, atol=1e-12)
    assert torch.equal(orthogonalise_by_halves(torch.zeros(1, 2, 3), 5), torch.zeros(1, 2, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 512, 1000), (3, 1000, 384), (2, 300, 300)])
def test_halves_on_a_gpu_are_as_near_to_orthogonal_as_the_reference(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda").bfloat16()
    exact = orthogonalise_reference(x.double(), 5)
    ours, whole = (run(x, 5).double() for run in (orthogonalise_by_halves, orthogonalise_reference))
    assert (ours - exact).norm() < 1.2 * (whole - exact).norm() + 1e-3 * exact.norm()
    fused = torch.cat([x, 2 * x], 1)
    both = orthogonalise_parts(fused, (shape[1], shape[1]), 1, 5)
    torch.testing.assert_close(both[:, : shape[1]].double(), ours, rtol=0, atol=1e-2)
    torch.testing.assert_close(both[:, shape[1] :].double(), ours, rtol=0, atol=2e-2)
