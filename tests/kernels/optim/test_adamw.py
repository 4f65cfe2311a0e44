"""AdamW against torch.optim.AdamW over several steps; found_inf, grad_factor, stochastic rounding."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from titan_moe.kernels.optim.adamw import Rule, Shard, adamw, adamw_reference, launch_adamw
from titan_moe.kernels.optim.stochastic_rounding import QUARTER

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.3


def scalar(value: float, device: str = "cpu") -> Tensor:
    return torch.tensor(value, device=device)


def take_step(tensors: list[Tensor], step: float, lr: float, found_inf: float = 0, factor: float = 1, **options: Any):
    """One step on parameter, gradient and moments, in place, with `op` (default: the custom op)."""
    op, seed = options.pop("op", adamw_one_shard), options.pop("seed", 5)
    betas, eps, decay = options.pop("betas", BETAS), options.pop("eps", EPS), options.pop("decay", DECAY)
    rate, step, found, grad_factor = (scalar(x, str(tensors[0].device)) for x in (lr, step, found_inf, factor))
    op(Shard(step, seed, *tensors), Rule(rate, found, grad_factor, *betas, eps, decay, **options))


def adamw_one_shard(shard: Shard, rule: Rule) -> None:
    """The custom op on one shard."""
    adamw([shard], rule)


def draw_state(shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: str = "cpu") -> list[Tensor]:
    """A parameter, its gradient and its moments, as in the middle of a run."""
    torch.manual_seed(0)
    tensors = [torch.randn(shape, device=device).to(dtype) for dtype in dtypes]
    tensors[3].square_()
    return tensors


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 2e-6)], ids=str)
def test_adamw_equals_torch_over_steps(dtype: torch.dtype, tolerance: float) -> None:
    """The learning rate is fp32 on the device, and torch gets the same one; the rest of the fp64 path is exact."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(7, 5, dtype=dtype))
    ours = [parameter.detach().clone(), None, torch.zeros(7, 5, dtype=dtype), torch.zeros(7, 5, dtype=dtype)]
    optimizer = torch.optim.AdamW([parameter], betas=BETAS, eps=EPS, weight_decay=DECAY)
    for step in range(1, 8):
        rate = torch.tensor(0.05 / step).item()
        optimizer.param_groups[0]["lr"] = rate
        parameter.grad = torch.randn(7, 5, dtype=dtype)
        ours[1] = parameter.grad.clone()
        optimizer.step()
        take_step(ours, step, rate)
    state = optimizer.state[parameter]
    exact = 1e-13 if dtype == torch.float64 else tolerance
    for own, expected in zip((ours[0], *ours[2:]), (parameter, state["exp_avg"], state["exp_avg_sq"]), strict=True):
        torch.testing.assert_close(own, expected.detach(), rtol=exact, atol=exact)


MIXES = [
    dtypes
    for dtypes in itertools.product((torch.float32, torch.bfloat16), repeat=4)
    if dtypes[2] == dtypes[3] or dtypes[0] == dtypes[1] == torch.float32
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtypes", MIXES, ids=lambda mix: "-".join(str(d).removeprefix("torch.") for d in mix))
def test_triton_adamw_equals_reference(dtypes: tuple[torch.dtype, ...], device: str) -> None:
    """bf16 bits agree where the fp32 results do; a difference of 1 ulp in fp32 may change a few roundings."""
    tensors = draw_state((2 * QUARTER + 3, 3), dtypes, device)
    expected = copy.deepcopy(tensors)
    for step in (1, 2):
        take_step(tensors, step, 1e-2, factor=0.5, op=launch_adamw)
        take_step(expected, step, 1e-2, factor=0.5, op=adamw_reference)
    for own, reference, dtype in zip(tensors, expected, dtypes, strict=True):
        tolerance = 1e-6 if dtype == torch.float32 and torch.bfloat16 not in dtypes else 2e-2
        torch.testing.assert_close(own.float(), reference.float(), rtol=tolerance, atol=1e-6)
        if dtype == torch.bfloat16:
            assert (own != reference).float().mean() < 1e-2


@pytest.mark.parametrize("device", DEVICES)
def test_triton_adamw_with_found_inf_odd_shapes_and_strides(device: str) -> None:
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)
    for shape in ((), (1,), (0, 4), (33, 5)):
        tensors = draw_state(shape, dtypes, device)
        before = copy.deepcopy(tensors)
        tensors[1].fill_(torch.nan)
        take_step(tensors, 1, 1e-2, found_inf=1, op=launch_adamw)
        assert all(torch.equal(tensors[index], before[index]) for index in (0, 2, 3))
        tensors[1].copy_(before[1])
        take_step(tensors, 1, 1e-2, op=launch_adamw)
        take_step(before, 1, 1e-2, op=adamw_reference)
        torch.testing.assert_close(tensors, before, rtol=2e-2, atol=1e-6)
    dense = draw_state((33, 5), dtypes, device)
    strided = [tensor.T.contiguous().T for tensor in dense]
    strided[1] = torch.stack([dense[1], dense[1]], dim=-1)[..., 0]
    take_step(strided, 1, 1e-2, op=launch_adamw)
    take_step(dense, 1, 1e-2, op=launch_adamw)
    assert not strided[0].is_contiguous()
    torch.testing.assert_close(strided[0], dense[0])
    torch.testing.assert_close([tensor.T.contiguous().T for tensor in strided[2:]], dense[2:], rtol=2e-2, atol=1e-6)


def test_triton_adamw_refuses_fp64() -> None:
    with pytest.raises(ValueError, match="fp32 and was given fp64"):
        take_step(draw_state((3,), (torch.float64,) * 4), 1, 0.1, op=launch_adamw)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_found_inf_leaves_state_bitwise_unchanged(dtype: torch.dtype) -> None:
    tensors = draw_state((9, 4), (dtype,) * 4)
    before = copy.deepcopy(tensors)
    for bad in (torch.nan, torch.inf, 1.0):
        tensors[1].fill_(bad)
        take_step(tensors, 3, 0.1, found_inf=1, factor=torch.nan)
    assert all(torch.equal(tensors[index], before[index]) for index in (0, 2, 3))
    take_step(tensors, 3, 0.1)
    assert all((tensors[index] != before[index]).any() for index in (0, 2, 3))


def test_grad_factor_scales_the_update_not_the_gradient() -> None:
    ours, scaled = (draw_state((9, 4), (torch.float32,) * 4) for _ in range(2))
    gradient = ours[1].clone()
    scaled[1] *= 0.125
    take_step(ours, 2, 0.1, factor=0.125)
    take_step(scaled, 2, 0.1)
    assert torch.equal(ours[1], gradient)
    assert all(torch.equal(ours[index], scaled[index]) for index in (0, 2, 3))


def test_weight_decay_is_exact_at_a_low_learning_rate() -> None:
    """fp32 holds 1 - 3e-5 to three digits only; 200 steps with that factor miss by twice the tolerance here."""
    tensors = [torch.full((4,), 1.0), torch.zeros(4), torch.zeros(4), torch.zeros(4)]
    rate = torch.tensor(3e-7).item()
    for step in range(1, 201):
        take_step(tensors, step, rate, decay=0.1 * 2**10, betas=(0.9, 0.95))
    expected = (1 - rate * 0.1 * 2**10) ** 200
    torch.testing.assert_close(tensors[0], torch.full((4,), expected), rtol=2e-6, atol=0)


def test_bf16_moments_equal_fp32_moments_on_average() -> None:
    """With beta2 = 0.999 a second moment that is rounded to nearest never falls; with stochastic rounding it does."""
    numel, num_steps = 4096, 300
    results = {}
    for name, dtype, is_stochastic in (
        ("fp32", torch.float32, True),
        ("random", torch.bfloat16, True),
        ("nearest", torch.bfloat16, False),
    ):
        tensors = [torch.zeros(numel), torch.full((numel,), 0.1), *(torch.ones(numel, dtype=dtype) for _ in range(2))]
        for step in range(1000, 1000 + num_steps):
            take_step(tensors, step, 1e-3, decay=0.0, is_stochastic=is_stochastic)
        results[name] = [tensors[index].double().mean().item() for index in (0, 2, 3)]
    assert results["fp32"][2] == pytest.approx(0.01 + 0.99 * 0.999**num_steps, rel=1e-4)
    assert results["random"] == pytest.approx(results["fp32"], rel=3e-3)
    assert results["nearest"][2] == 1.0


def test_bf16_parameter_moves_by_less_than_one_ulp_on_average() -> None:
    """A step of a tenth of a bf16 ulp: rounding to nearest drops it; with stochastic rounding the mean moves."""
    for is_stochastic, expected in ((True, 1.0 - 20 * 4e-4), (False, 1.0)):
        tensors = [torch.ones(4096, dtype=torch.bfloat16), *(torch.ones(4096, dtype=torch.bfloat16) for _ in range(3))]
        for step in range(1000, 1020):
            take_step(tensors, step, 4e-4, decay=0.0, betas=(0.0, 0.0), is_stochastic=is_stochastic)
        assert tensors[0].double().mean().item() == pytest.approx(expected, abs=3e-4)


def test_stochastic_rounding_depends_on_step_and_seed_alone() -> None:
    def run(step: float = 4, seed: int = 5) -> Tensor:
        tensors = draw_state((4096,), (torch.bfloat16,) * 4)
        take_step(tensors, step, 1e-2, seed=seed)
        return torch.stack([tensors[index] for index in (0, 2, 3)])

    assert torch.equal(run(), run())
    assert ((run() != run(seed=6)).float().mean(1) > 0.1).all()
    assert ((run(step=1e6) != run(step=1e6 + 1)).float().mean(1) > 0.1).all()


def test_each_shard_has_its_own_step_and_seed() -> None:
    """One call with two shards equals two calls."""
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)
    shards = [draw_state((100,), dtypes), draw_state((3, 5), dtypes)]
    expected = copy.deepcopy(shards)
    rule = Rule(scalar(0.1), scalar(0.0), scalar(1.0), *BETAS, EPS, DECAY)
    adamw([Shard(scalar(1.0), 5, *shards[0]), Shard(scalar(9.0), 6, *shards[1])], rule)
    take_step(expected[0], 1.0, 0.1, seed=5)
    take_step(expected[1], 9.0, 0.1, seed=6)
    assert all(torch.equal(own, reference) for own, reference in zip(sum(shards, []), sum(expected, []), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adamw_updates_a_parameter_that_requires_grad(dtype: torch.dtype) -> None:
    before, *tensors = draw_state((6, 3), (dtype,) * 4)
    parameter = torch.nn.Parameter(before.clone())
    with torch.no_grad():
        take_step([parameter, *tensors], 1, 0.1)
    assert (parameter != before).any() and parameter.requires_grad
