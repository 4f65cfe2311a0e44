"""Spikes: found by a window of the last steps, which a resumed run goes on with."""

import math
from collections import deque
from statistics import fmean, pstdev

import pytest
import torch

from titan_moe.training import spikes
from titan_moe.training.spikes import WINDOW_STEPS, Spikes


def take(found: Spikes, loss: float, norm: float = 1.0, *, is_taken: bool = True) -> bool:
    loss_0, norm_0 = torch.tensor(loss, dtype=torch.float64), torch.tensor(norm, dtype=torch.float64)
    return bool(found.follow({"loss": loss_0, "grad_norm": norm_0, "has_overflowed": torch.tensor(not is_taken)}))


def steady(num_steps: int, num_sigmas: float = 6.0) -> Spikes:
    """After so many steps with a loss of 2 and a norm of 1, give or take a tenth."""
    found = Spikes(num_sigmas, torch.device("cpu"))
    for step in range(num_steps):
        assert not take(found, 2.0 + 0.1 * (-1) ** step, 1.0 + 0.1 * (-1) ** step)
    return found


def test_spikes_equal_brute_force() -> None:
    generator = torch.Generator().manual_seed(0)
    series = torch.randn(400, 2, generator=generator).exp().tolist()
    found, window, expected, actual = Spikes(2.0, torch.device("cpu")), deque(maxlen=WINDOW_STEPS), [], []
    for loss, norm in series:
        columns = zip(zip(*window, strict=True), (loss, norm), strict=True) if len(window) >= WINDOW_STEPS // 2 else ()
        expected.append(any(now > fmean(column) + 2.0 * pstdev(column) for column, now in columns))
        actual.append(take(found, loss, norm))
        window.append((loss, norm))
    assert actual == expected and 5 < sum(expected) < 100


@pytest.mark.parametrize(("loss", "norm", "expected"), [(2.5, 1.0, False), (2.7, 1.0, True), (2.0, 1.7, True)])
def test_loss_and_norm_may_spike(loss: float, norm: float, expected: bool) -> None:
    assert take(steady(WINDOW_STEPS), loss, norm) is expected
    assert take(steady(WINDOW_STEPS // 2), loss, norm) is expected
    assert not take(steady(WINDOW_STEPS // 2 - 1), loss, norm), "too few steps"


def test_a_level_that_lasts_is_accepted() -> None:
    found = steady(WINDOW_STEPS)
    assert 1 < sum(take(found, 20.0) for _ in range(20)) < 8


@pytest.mark.parametrize(("loss", "is_taken"), [(math.nan, True), (math.inf, True), (1e9, False)])
def test_what_is_not_finite_or_taken_again_leaves_the_window(loss: float, is_taken: bool) -> None:
    found = steady(WINDOW_STEPS)
    before = found.state_dict()
    take(found, loss, is_taken=is_taken)
    assert found.state_dict() == before


@pytest.mark.slow
def test_a_resumed_run_finds_the_spikes_of_the_whole_one(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spikes, "WINDOW_STEPS", 16)
    slow = ("--optim.lr=1e-4", "--optim.decay_steps=0")  # the losses stay around one level
    rule = (*slow, "--train.spike_sigmas=1")
    whole, parted, plain = tiny(*rule), tiny(*rule), tiny(*slow)
    assert whole.train("--train.steps=26") == plain.train("--train.steps=26") == 0
    num_spikes = whole.column("spikes")
    assert num_spikes[6] == 0 and num_spikes[-1] > num_spikes[19] > 0, "the rule works before and after the stop"
    assert whole.column("loss")[25] != plain.column("loss")[25] and plain.column("spikes") == []
    for steps in (20, 26):
        assert parted.train(f"--train.steps={steps}") == 0
    assert parted.column("loss") == whole.column("loss")
    assert parted.column("spikes")[20:] == [num - num_spikes[19] for num in num_spikes[20:]]
