"""torch's AdamW and ours against the formula: decay groups, guard, clipping, state in place."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import nn

from titan_moe.config.optimizers import OPTIMIZERS
from titan_moe.config.train import OptimConfig
from titan_moe.optim.build import build_optimizer

KINDS = ["adamw", "fused_adamw"]


def build(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3)).to(dtype)


def expected_after(parameter, gradients, config):
    """AdamW (arXiv:1711.05101, algorithm 2) written out."""
    first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
    weight_decay = config.weight_decay if parameter.ndim >= 2 else 0.0
    for step, gradient in enumerate(gradients, start=1):
        first = config.beta1 * first + (1 - config.beta1) * gradient
        second = config.beta2 * second + (1 - config.beta2) * gradient**2
        update = first / (1 - config.beta1**step) / ((second / (1 - config.beta2**step)).sqrt() + config.eps)
        parameter = parameter * (1 - config.lr * weight_decay) - config.lr * update
    return parameter


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
@pytest.mark.parametrize("kind", KINDS)
def test_adamw_steps_follow_the_formula(kind, dtype, tolerance):
    config = OptimConfig(kind=kind, lr=0.0625, weight_decay=0.3)  # a rate that fp32 holds
    parts = [build(dtype), build(dtype)]
    optimizers = build_optimizer(parts, config)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    gradients = [[torch.randn_like(p) for _ in range(3)] for p in parameters]
    expected = [expected_after(p.detach(), g, config) for p, g in zip(parameters, gradients, strict=True)]
    for step in range(3):
        for parameter, own in zip(parameters, gradients, strict=True):
            parameter.grad = own[step]
        optimizers.step()
        optimizers.zero_grad()
        assert all(parameter.grad is None for parameter in parameters)
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=tolerance, atol=tolerance)


def test_bf16_weights_move_as_far_as_fp32_ones_where_the_rules_allow_them():
    """The share of torch's movement in fp32 that is left at a usual learning rate."""
    config, generator = OptimConfig(lr=1e-5, weight_decay=0.0), torch.Generator().manual_seed(0)
    start = (0.02 * torch.randn(64, 256, generator=generator)).bfloat16()
    gradients = [0.3 + torch.randn(64, 256, generator=generator) for _ in range(20)]

    def movement(kind, dtype):
        part = nn.Linear(256, 64, bias=False, dtype=dtype)
        with torch.no_grad():
            part.weight.copy_(start)
        optimizer = build_optimizer([part], replace(config, kind=kind))
        for gradient in gradients:
            part.weight.grad = gradient.to(dtype)
            optimizer.step()
        return (part.weight.detach() - start).float()

    expected = movement("adamw", torch.float32)
    shares = {kind: (movement(kind, torch.bfloat16) * expected).sum() / expected.square().sum() for kind in KINDS}
    assert shares["fused_adamw"] == pytest.approx(1.0, abs=0.1)
    assert {kind for kind, share in shares.items() if share > 0.9} == {
        kind for kind, facts in OPTIMIZERS.items() if facts.rounds_stochastically
    }, shares


def test_adamw_of_every_group_is_fused():
    (optimizer,) = build_optimizer([build()], OptimConfig())
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_adamw_state_exists_before_the_first_step(kind):
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = build_optimizer([model], OptimConfig(kind=kind)).state_dict()
    assert len(state) == 3 * len(list(model.parameters())), "nothing of the recipe is in it"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name, _ in model.named_parameters():
        assert state[f"state.{name}.step"] == 0
        assert not state[f"state.{name}.exp_avg"].any() and not state[f"state.{name}.exp_avg_sq"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_adamw_skips_a_parameter_without_gradient(kind):
    model = build()
    optimizers = build_optimizer([model], OptimConfig(kind=kind))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    bias = model[0].bias.detach().clone()
    optimizers.step()
    state = optimizers.state_dict()
    assert torch.equal(model[0].bias, bias)
    assert (state["state.0.weight.step"], state["state.0.bias.step"]) == (1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_adamw_leaves_out_frozen_parameters(kind):
    model = build()
    model[1].requires_grad_(False)
    (optimizer,) = build_optimizer([model], OptimConfig(kind=kind))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2


@pytest.mark.parametrize("source_kind", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_adamw_loads_moments_and_keeps_the_recipe(kind, source_kind):
    source_model, model = build(), build()
    source = build_optimizer([source_model], OptimConfig(kind=source_kind, lr=0.5))
    source_model[0].weight.grad = torch.ones_like(source_model[0].weight)
    source.step()
    optimizers = build_optimizer([model], OptimConfig(kind=kind, lr=0.25, weight_decay=0.7))
    optimizers.load_state_dict(source.state_dict())
    (optimizer,) = optimizers
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.7, 0.0]
    moments = [own.state[part[0].weight] for own, part in ((optimizer, model), (source.optimizers[0], source_model))]
    assert moments[0]["step"] == 1 and moments[0]["exp_avg"].all()
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in ("exp_avg", "exp_avg_sq"))


def run(kind, num_steps=3, found_inf=None, grad_factor=None, grad_scale=1.0, dtype=torch.float32, **options):
    """Parameters, then moments and step counts, after some steps on drawn gradients."""
    model = build(dtype)
    optimizers = build_optimizer([model], OptimConfig(kind=kind, lr=0.0625), **options)
    for _ in range(num_steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * grad_scale
        optimizers.step(found_inf=found_inf, grad_factor=grad_factor)
    return [parameter.detach() for parameter in model.parameters()], optimizers.state_dict()


def assert_same(found, expected):
    assert all(torch.equal(own, wanted) for own, wanted in zip(found[0], expected[0], strict=True))
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(own, expected[1][name]) for name, own in found[1].items())


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_adamw_guard_skips_everything_or_nothing(kind, capturable):
    model = build(torch.float32)
    optimizers = build_optimizer([model], OptimConfig(kind=kind, lr=0.5), capturable=capturable)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers.step(found_inf=torch.tensor(0.0), grad_factor=torch.tensor(1.0))
    before = [value.clone() for value in model.parameters()], {k: v.clone() for k, v in optimizers.state_dict().items()}
    assert all(value == 1 for name, value in before[1].items() if name.endswith(".step"))
    for bad in (torch.nan, torch.inf, 2.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, bad)
        optimizers.step(found_inf=torch.tensor(1.0), grad_factor=torch.tensor(torch.nan))
        assert_same((list(model.parameters()), optimizers.state_dict()), before)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers.step()  # the guard is not remembered
    assert all((own != old).all() for own, old in zip(model.parameters(), before[0], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_adamw_factor_scales_the_gradients(kind):
    factor = torch.tensor(0.125)
    assert_same(run(kind, grad_factor=factor), run(kind, grad_scale=0.125))


def test_fused_adamw_equals_torchs_within_rounding():
    ours, theirs = run("fused_adamw", 10), run("adamw", 10)
    for found, expected in zip((*ours[0], *ours[1].values()), (*theirs[0], *theirs[1].values()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_adamw_with_the_rate_on_the_device_is_equal():
    assert_same(run("adamw", capturable=True), run("adamw"))


@pytest.mark.parametrize("kind", KINDS)
def test_adamw_rates_are_tensors_if_capturable(kind):
    (optimizer,) = build_optimizer([build()], OptimConfig(kind=kind, lr=0.5), capturable=True)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert all(isinstance(rate, torch.Tensor) and rate.dtype == torch.float32 and rate == 0.5 for rate in rates)


@pytest.mark.parametrize("moments", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("master", [torch.bfloat16, torch.float32])
def test_adamw_moments_keep_dtype_and_memory_on_load(master, moments):
    model = build(master)
    optimizers = build_optimizer([model], OptimConfig(kind="fused_adamw"), moments=moments)
    state = optimizers.state_dict()
    places = {name: value.data_ptr() for name, value in state.items()}
    values = run("fused_adamw", dtype=torch.float32)[1]
    optimizers.load_state_dict(values)
    for name, value in optimizers.state_dict().items():
        assert value.data_ptr() == places[name]
        assert value.dtype == (torch.float32 if name.endswith(".step") else moments)
        assert torch.equal(value, values[name].to(value.dtype))


def test_fused_adamw_rounds_by_the_seed_of_the_run():
    options = {"dtype": torch.float32, "moments": torch.bfloat16}
    first = run("fused_adamw", seed=1, **options)
    assert_same(run("fused_adamw", seed=1, **options), first)
    other = run("fused_adamw", seed=2, **options)
    assert any((own != first[1][name]).any() for name, own in other[1].items())


def zeros(*names):
    return nn.ParameterDict({name: nn.Parameter(torch.zeros(1000)) for name in names})


def first_moments(*parts):
    """Of every parameter of every part, after a step on equal gradients, in bf16."""
    optimizers = build_optimizer(list(parts), OptimConfig(kind="fused_adamw"), moments=torch.bfloat16)
    for parameter in optimizers.parameters:
        parameter.grad = torch.linspace(1, 2, 1000)
    optimizers.step()
    own = zip(parts, optimizers, strict=True)
    return [optimizer.state[parameter]["exp_avg"] for part, optimizer in own for parameter in part.values()]


@pytest.mark.parametrize(
    "parts", [[("a", "b")], [("a",), ("b",)], [("a", "b"), ("c",)]], ids=["one_part", "two_parts", "uneven_parts"]
)
def test_fused_adamw_rounds_parameters_differently(parts):
    for one, other in combinations(first_moments(*(zeros(*names) for names in parts)), 2):
        assert 0.1 < (one != other).float().mean() < 0.9


def test_fused_adamw_rounds_a_parameter_of_two_parts_alike():
    _, tied, tied_too, _ = first_moments(zeros("a", "tied"), zeros("tied", "z"))
    assert torch.equal(tied, tied_too)
