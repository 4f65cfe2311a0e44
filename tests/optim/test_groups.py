"""Matrices decay; scales and biases do not, whatever their shape."""

import pytest
import torch
from torch import nn

from titan_moe.config.train import OptimConfig
from titan_moe.layers.experts import GroupedExperts
from titan_moe.optim.build import build_optimizer
from titan_moe.optim.groups import decay_groups


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


def test_decay_groups_are_not_empty() -> None:
    (group,) = decay_groups(nn.RMSNorm(3), 0.1)
    assert group["weight_decay"] == 0.0


def test_decay_groups_leave_out_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    assert sum(len(group["params"]) for group in decay_groups(model, 0.1)) == 2
