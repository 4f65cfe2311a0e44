"""AdamW against its formula, its decay groups, and a state that is there before the first step."""

import pytest
import torch
from torch import nn

from titan_moe.config.train import OptimConfig
from titan_moe.optim.adamw import build_optimizer


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
def test_steps_follow_the_formula(dtype, tolerance):
    config = OptimConfig(lr=0.05, weight_decay=0.3)
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


def test_every_group_is_fused():
    (optimizer,) = build_optimizer([build()], OptimConfig())
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]


def test_the_state_is_there_before_the_first_step_and_reading_it_takes_none():
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = build_optimizer([model], OptimConfig()).state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name, _ in model.named_parameters():
        assert state[f"state.{name}.step"] == 0
        assert not state[f"state.{name}.exp_avg"].any() and not state[f"state.{name}.exp_avg_sq"].any()


def test_a_parameter_without_gradient_waits():
    model = build()
    optimizers = build_optimizer([model], OptimConfig())
    model[0].weight.grad = torch.ones_like(model[0].weight)
    bias = model[0].bias.detach().clone()
    optimizers.step()
    state = optimizers.state_dict()
    assert torch.equal(model[0].bias, bias)
    assert (state["state.0.weight.step"], state["state.0.bias.step"]) == (1, 0)


def test_frozen_parameters_are_left_out():
    model = build()
    model[1].requires_grad_(False)
    (optimizer,) = build_optimizer([model], OptimConfig())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2


def test_loading_brings_moments_and_keeps_the_recipe():
    source_model, model = build(), build()
    source = build_optimizer([source_model], OptimConfig(lr=0.5))
    source_model[0].weight.grad = torch.ones_like(source_model[0].weight)
    source.step()
    optimizers = build_optimizer([model], OptimConfig(lr=0.25, weight_decay=0.7))
    optimizers.load_state_dict(source.state_dict())
    (optimizer,) = optimizers
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.7, 0.0]
    moments = [own.state[part[0].weight] for own, part in ((optimizer, model), (source.optimizers[0], source_model))]
    assert moments[0]["step"] == 1 and moments[0]["exp_avg"].all()
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in ("exp_avg", "exp_avg_sq"))
