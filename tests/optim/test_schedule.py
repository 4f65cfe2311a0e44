"""The learning rate of every step against a closed formula."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from titan_moe.config.train import OptimConfig
from titan_moe.optim.build import build_optimizer
from titan_moe.optim.schedule import build_schedule

LEFT = {"linear": lambda x: 1 - x, "sqrt": lambda x: 1 - x**0.5, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2}


def build(config, steps, **options):
    optimizers = build_optimizer([nn.Linear(2, 2), nn.LayerNorm(2)], config, **options)
    return optimizers, build_schedule(optimizers, config, steps)


def run(optimizers, schedules, num_steps):
    """Take steps and return the rate of each, which every group of every optimizer must share."""
    rates = []
    for _ in range(num_steps):
        (rate,) = {group["lr"] for optimizer in optimizers for group in optimizer.param_groups}
        assert rate == schedules.lr
        rates.append(rate)
        optimizers.step()
        schedules.step()
    return rates


@pytest.mark.parametrize("decay", sorted(LEFT))
@pytest.mark.parametrize(
    ("warmup", "fall", "steps"), [(4, 5, 12), (0, 0, 3), (3, 0, 5), (0, 6, 6), (4, 6, 10), (1, 1, 3)]
)
def test_schedule_of_every_step(decay, warmup, fall, steps):
    config = OptimConfig(lr=0.4, warmup_steps=warmup, decay_steps=fall, decay=decay, min_lr_ratio=0.25)
    rising = [0.4 * s / warmup for s in range(1, warmup + 1)]
    falling = [0.4 * (0.25 + 0.75 * LEFT[decay](s / fall)) for s in range(1, fall + 1)]
    expected = rising + [0.4] * (steps - warmup - fall) + falling
    assert run(*build(config, steps), steps) == pytest.approx(expected, rel=1e-12)


def test_schedule_is_constant_after_the_last_step():
    optimizers, schedules = build(OptimConfig(lr=1.0, decay_steps=2, min_lr_ratio=0.1), 3)
    assert run(optimizers, schedules, 5)[2:] == pytest.approx([0.1, 0.1, 0.1])


def test_schedule_resumes_and_follows_a_longer_recipe():
    config = OptimConfig(lr=1.0, warmup_steps=2, decay_steps=4, decay="linear", min_lr_ratio=0.0)
    optimizers, schedules = build(config, 8)
    straight = run(optimizers, schedules, 8)
    optimizers, schedules = build(config, 8)
    run(optimizers, schedules, 5)
    state = schedules.state_dict()
    assert state == {"last_step": 5}

    again, resumed = build(config, 8)
    resumed.load_state_dict(state)
    assert run(again, resumed, 3) == straight[5:]

    longer, resumed = build(config, 12)
    resumed.load_state_dict(state)
    assert run(longer, resumed, 7) == pytest.approx([1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_schedule_of_a_short_run_has_warmup_before_decay():
    config = OptimConfig(lr=1.0, warmup_steps=4, decay_steps=100, decay="linear", min_lr_ratio=0.5)
    assert run(*build(config, 6), 6) == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.75, 0.5])
    assert run(*build(config, 4), 4) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert run(*build(config, 2), 3) == pytest.approx([0.25, 0.5, 0.5])


def test_schedule_of_several_decays():
    config = OptimConfig(lr=1.0, warmup_steps=2, decay_steps=2, decay="linear", min_lr_ratio=0.2)
    config = replace(config, decay_ends=(5, 9, 40), restart_warmup_steps=2)
    first, second = [0.5, 1.0, 1.0, 0.6, 0.2], [0.6, 1.0, 0.6, 0.2]
    assert run(*build(config, 12), 12) == pytest.approx([*first, *second, 0.6, 1.0, 0.2]), "a warm-up comes first"
    assert run(*build(replace(config, restart_warmup_steps=0), 9), 9)[5:] == pytest.approx([1.0, 1.0, 0.6, 0.2])
    alone = replace(config, decay_ends=())
    assert run(*build(config, 5), 5) == run(*build(alone, 5), 5), "each period is as a run of its own"
    optimizers, schedules = build(config, 12)
    schedules.load_state_dict({"last_step": 6})
    assert run(optimizers, schedules, 6) == run(*build(config, 12), 12)[6:]


def test_schedule_default_is_constant():
    assert set(run(*build(OptimConfig(lr=3e-4), 4), 4)) == {3e-4}


@pytest.mark.parametrize("kind", ["adamw", "fused_adamw"])
def test_schedule_fills_rates_on_the_device_in_place(kind):
    config = OptimConfig(lr=0.3, warmup_steps=3, decay_steps=4)
    optimizers, schedules = build(replace(config, kind=kind), 9, capturable=True)
    expected = run(*build(config, 9), 9)
    tensors = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    for rate in expected:
        assert schedules.lr == rate, "said without the device"
        assert [tensor.item() for tensor in tensors] == [torch.tensor(rate).item()] * len(tensors)
        optimizers.step()
        schedules.step()
    schedules.load_state_dict({"last_step": 4})
    assert schedules.lr == expected[4]
    own = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    assert all(first is second for first, second in zip(own, tensors, strict=True))
    assert [tensor.item() for tensor in tensors] == [torch.tensor(expected[4]).item()] * len(tensors)
    schedules.step()
    assert tensors[0].item() == torch.tensor(expected[5]).item()
