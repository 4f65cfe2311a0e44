"""Matrices decay; scales and biases do not, whatever their shape."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from titan_moe.config import RecipeError
from titan_moe.config.parameter_groups import ParameterGroup
from titan_moe.config.train import OptimConfig
from titan_moe.layers.experts import GroupedExperts
from titan_moe.optim.build import build_optimizer
from titan_moe.optim.groups import check_groups, decay_groups
from titan_moe.optim.schedule import build_schedule


class Experts(GroupedExperts):
    def __init__(self) -> None:
        super().__init__(2, 4, 3)
        self.down_bias = nn.Parameter(torch.zeros(2, 4))


def test_decay_groups_by_kind() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.RMSNorm(4), Experts())
    decayed, spared = decay_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and spared["weight_decay"] == 0.0
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(p)] for p in decayed["params"]] == ["0.weight", "1.weight", "3.gate_up", "3.down"]
    assert [names[id(p)] for p in spared["params"]] == ["1.bias", "2.weight", "3.down_bias"]


@pytest.mark.parametrize("is_tied", [False, True])
def test_decay_groups_without_embeddings(is_tied: bool) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "norm": nn.RMSNorm(4), "head": nn.Linear(4, 8, bias=False)})
    if is_tied:
        model["head"].weight = model["embed"].weight
    decayed, spared = decay_groups(model, 0.1, embeddings_decay=False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [[names[id(p)] for p in group["params"]] for group in (decayed, spared)]
    expected = [["embed.weight"], ["norm.weight"]] if is_tied else [["head.weight"], ["embed.weight", "norm.weight"]]
    assert found == expected


@pytest.mark.parametrize("kind", ["adamw", "fused_adamw"])
def test_states_keep_their_names_whether_embeddings_decay_or_not(kind: str) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "norm": nn.RMSNorm(4), "head": nn.Linear(4, 8, bias=False)})
    one, other = (
        build_optimizer([model], OptimConfig(kind=kind, weight_decay=0.5, embeddings_decay=decays))
        for decays in (True, False)
    )
    for step, state in enumerate(one.optimizers[0].state.values()):
        state["exp_avg"].fill_(step + 1.0)
    other.load_state_dict(one.state_dict())
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(value, one.state_dict()[name]) for name, value in other.state_dict().items())
    decays = {id(p): group["weight_decay"] for group in other.optimizers[0].param_groups for p in group["params"]}
    assert [decays[id(parameter)] for parameter in model.parameters()] == [0.0, 0.0, 0.5]


GROUPS = (ParameterGroup("embed.*", lr_scale=0.5), ParameterGroup("*e*", weight_decay_scale=2.0, lr_scale=0.25))


def small() -> nn.ModuleDict:
    torch.manual_seed(0)
    modules = {"embed": nn.Embedding(8, 4), "dense": nn.Linear(4, 4), "norm": nn.RMSNorm(4), "out": nn.Linear(4, 3)}
    return nn.ModuleDict(modules)


def test_decay_groups_take_the_first_pattern_that_matches() -> None:
    model = small()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        names[id(p)]: (group["lr_scale"], group["weight_decay"])
        for group in decay_groups(model, 0.1, GROUPS)
        for p in group["params"]
    }
    assert found == {
        "embed.weight": (0.5, 0.1),
        "dense.weight": (0.25, 0.2),
        "dense.bias": (0.25, 0.0),
        "norm.weight": (0.25, 0.0),
        "out.weight": (0.25, 0.2),
        "out.bias": (1.0, 0.0),
    }


@pytest.mark.parametrize("kind", ["adamw", "fused_adamw", "muon"])
def test_a_group_steps_as_an_optimizer_of_its_rate_and_decay(kind: str) -> None:
    config = OptimConfig(kind=kind, lr=0.1, weight_decay=0.3, warmup_steps=3, beta1=0.5)

    def trained(name: str, config: OptimConfig) -> torch.Tensor:
        model = small()
        optimizers = build_optimizer([model], config, capturable=True)
        schedule = build_schedule(optimizers, config, 5)
        for step in range(5):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(9 * step + number)
                )
            optimizers.step()
            schedule.step()
            if step == 2:  # as a resume does
                schedule.load_state_dict(schedule.state_dict())
        return model.get_parameter(name).detach()

    grouped = replace(config, groups=GROUPS)
    for name, own in [
        ("embed.weight", replace(config, lr=0.05)),
        ("dense.weight", replace(config, lr=0.025, weight_decay=0.6)),
        ("norm.weight", replace(config, lr=0.025)),
        ("out.bias", config),
    ]:
        torch.testing.assert_close(trained(name, grouped), trained(name, own), atol=1e-7, rtol=1e-6)
    assert not torch.equal(trained("embed.weight", grouped), trained("embed.weight", config))


def test_a_group_of_no_parameter_is_refused() -> None:
    with pytest.raises(RecipeError, match=r'optim.groups: "embedding.\*" matches no parameter; near it: embed.weight'):
        check_groups(small(), (ParameterGroup("embedding.*"),))


def test_decay_groups_are_not_empty() -> None:
    (group,) = decay_groups(nn.RMSNorm(3), 0.1)
    assert group["weight_decay"] == 0.0


def test_decay_groups_leave_out_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    assert sum(len(group["params"]) for group in decay_groups(model, 0.1)) == 2
