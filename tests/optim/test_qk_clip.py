"""The scale of rows: exponents, masters in two parts, skipped steps; distributed/test_qk_clip.py has layouts."""

from typing import Any

import pytest
import torch

from titan_moe.config.qk_clip import QKClipConfig
from titan_moe.kernels.optim.split_master import merge_reference, split_reference
from titan_moe.optim.qk_clip import QKClip, RowPowers
from titan_moe.parameters import give_remainder

INF = torch.inf
HEADS_R, POWERS_R = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0.25, 1.0, 0.25, 0.25, 0.0])
GROUP: Any = None  # nothing is summed over ranks here


def clip_of(parameter: torch.Tensor, *logits: float) -> QKClip:
    weights = [RowPowers([parameter], (), HEADS_R, POWERS_R)]
    return QKClip(QKClipConfig(threshold=100.0), [torch.tensor(logits)], 3, weights, GROUP)


@pytest.mark.parametrize("shape", [(5, 3), (5,)], ids=["weight", "bias"])
def test_rows_have_powers_of_the_factors_of_their_heads(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    before = weight.clone()
    clip_of(weight, 400.0, 100.0, 1600.0)()
    factors_R = torch.tensor([0.25**0.25, 0.25, 1.0, 0.5, 1.0]).view(-1, *[1] * (len(shape) - 1))
    torch.testing.assert_close(weight, before * factors_R)
    assert torch.equal(weight[[2, 4]], before[[2, 4]])


def test_query_heads_of_one_key_head_have_the_factor_of_the_largest_logit() -> None:
    weight = torch.ones(5, 1)
    clip_of(weight, 50.0, 200.0, 3.0, -INF, 7.0, 100.0)()
    torch.testing.assert_close(weight[:, 0], torch.tensor([0.5**0.25, 0.5, 1.0, 1.0, 1.0]))


def test_masters_in_two_parts_are_scaled_as_whole_ones() -> None:
    master = torch.randn(5, 64)
    weight, remainder = split_reference(master)
    give_remainder(weight, remainder)
    before = weight.clone(), remainder.clone()
    clip_of(weight, 130.0, 1.0, 170.0)()
    expected = master.clone()
    clip_of(expected, 130.0, 1.0, 170.0)()
    assert torch.equal(merge_reference(weight, remainder), expected)
    assert torch.equal(weight[2], before[0][2]) and torch.equal(remainder[2], before[1][2])


@pytest.mark.parametrize(("logits", "found_inf"), [((400.0, 1.0, 800.0), 1.0), ((INF, -INF, torch.nan), 0.0)])
def test_a_skipped_step_and_logits_that_are_not_finite_change_no_bit(logits: Any, found_inf: float) -> None:
    weight = torch.randn(5, 3)
    before = weight.clone()
    clip_of(weight, *logits)(torch.tensor(found_inf))
    assert torch.equal(weight, before)
