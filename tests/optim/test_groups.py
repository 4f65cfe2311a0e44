"""Matrices decay, vectors do not."""

import torch
from torch import nn

from titan_moe.optim.groups import decay_groups


def test_dimensions_decide():
    shapes = {"embedding": (8, 4), "gate_up": (2, 2, 3, 4), "down": (2, 4, 3), "norm": (4,), "bias": (8,), "scale": ()}
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    decayed, spared = decay_groups(parameters.values(), 0.1)
    assert decayed["weight_decay"] == 0.1 and spared["weight_decay"] == 0.0
    assert [id(p) for p in decayed["params"]] == [id(parameters[n]) for n in ("embedding", "gate_up", "down")]
    assert [id(p) for p in spared["params"]] == [id(parameters[n]) for n in ("norm", "bias", "scale")]


def test_no_empty_group():
    (group,) = decay_groups([nn.Parameter(torch.zeros(3))], 0.1)
    assert group["weight_decay"] == 0.0
