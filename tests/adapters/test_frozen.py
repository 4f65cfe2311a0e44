"""Runs of which some parameters train."""

import logging

import pytest
import torch
from support.runs import one_process, tiny
from torch import nn

from titan_moe.adapters.frozen import freeze
from titan_moe.config import RecipeError

__all__ = ["one_process", "tiny"]
PATTERNS = '--optim.trainable=["*.router.*","layers.1.*norm.weight"]'
TRAINED = {"layers.1.feed_forward.router.weight", "layers.1.attention_norm.weight", "layers.1.ffn_norm.weight"}


def test_frozen_parameters_stay_and_have_no_moments(tiny) -> None:
    """In compute's dtype, also where the weights of an earlier run are in fp32; and a run resumes exactly."""
    begun = tiny("--train.steps=1", "--precision.compute=bf16")
    assert begun.train() == 0
    origin = begun.folder / "checkpoints" / "step-1"
    words = PATTERNS, "--precision.compute=bf16", f"--checkpoint.load_from={origin}"
    whole, halves = tiny("--train.steps=4", "--checkpoint.every_steps=2", *words), tiny("--train.steps=4", *words)
    assert whole.train() == 0
    part = whole.copy(halves.folder, last_step=2)
    assert part.again() == 0
    before, after, resumed = begun.checkpoint(1), whole.checkpoint(4), part.checkpoint(4)
    moments = {name.split("state.")[1].rpartition(".")[0] for name in after if "exp_avg" in name}
    assert moments == TRAINED
    for name, value in after.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, resumed[name]), name
            if name in before and "state." not in name and name.endswith(("weight", "gate_up", "down")):
                weight = name.rpartition("/")[2]
                assert value.dtype == (torch.float32 if weight in TRAINED else torch.bfloat16), name
                assert torch.equal(value, before[name].to(value.dtype)) == (weight not in TRAINED), name


def test_a_resume_may_not_change_what_trains(tiny, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="titan_moe")
    run = tiny("--train.steps=1", PATTERNS)
    assert run.train() == 0
    assert run.again("--train.steps=2", '--optim.trainable=["head.weight"]') == 2


def test_names_of_a_class_of_ones_own_are_known_when_it_is_built() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(RecipeError, match=r'optim.trainable: "1.wieght" matches no parameter; near it: 1.weight'):
        freeze(model, ("1.wieght",), torch.bfloat16)
    freeze(model, ("1.*",), torch.bfloat16)
    assert [(p.requires_grad, p.dtype) for p in model.parameters()] == [(False, torch.bfloat16)] * 2 + [
        (True, torch.float32)
    ] * 2
