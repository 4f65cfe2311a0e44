"""The sum of a row's slots against a loop: odd widths, one choice, rows without a slot, memory that nobody wrote."""

import pytest
import torch

from titan_moe.kernels.slot_sum import slot_sum

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("width", [1, 20, 1024, 1500])
def test_slot_sum_adds_what_a_row_was_given(width: int, num_choices: int, device: str) -> None:
    torch.manual_seed(0)
    num_rows = 6
    slots_SK = torch.randperm(num_rows * num_choices, device=device).view(num_rows, num_choices).int()
    slots_SK[slots_SK >= slots_SK.numel() - 2] = -1
    slots_SK[2] = -1
    y_RD = torch.randn(num_rows * num_choices, width, device=device)
    y_RD[~torch.isin(torch.arange(len(y_RD), device=device), slots_SK)] = float("nan")
    actual_SD = slot_sum(y_RD, slots_SK)
    for row, slots in enumerate(slots_SK.tolist()):
        mine = [y_RD[slot] for slot in slots if slot >= 0]
        expected_D = torch.stack(mine).sum(0) if mine else torch.zeros(width, device=device)
        torch.testing.assert_close(actual_SD[row], expected_D)
    assert not actual_SD[2].any()


@pytest.mark.parametrize("device", DEVICES)
def test_slot_sum_of_no_rows_and_of_no_slots(device: str) -> None:
    none_SK = torch.full((3, 2), -1, dtype=torch.int32, device=device)
    assert slot_sum(torch.empty(4, 8, device=device), none_SK[:0]).shape == (0, 8)
    assert slot_sum(torch.empty(0, 8, device=device), none_SK).tolist() == [[0.0] * 8] * 3
