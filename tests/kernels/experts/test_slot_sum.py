"""The sum of a row's slots against a loop: odd widths, one choice, rows without a slot, memory that nobody wrote."""

import pytest
import torch
from support import arenas

from titan_moe.kernels.experts import slot_sum as slot_sum_file
from titan_moe.kernels.experts.slot_sum import slot_rows, slot_sum

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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 20, 1500])
def test_slot_rows_are_those_of_the_slots_that_there_are(width: int, device: str) -> None:
    torch.manual_seed(0)
    x_SD, rows_R = torch.randn(6, width, device=device), torch.randint(6, (10,), device=device).int()
    for end in (0, 1, 7, 10):
        offsets_e = torch.tensor([0, end // 2, end, end], dtype=torch.int32, device=device)
        torch.use_deterministic_algorithms(True)  # memory that nobody has written is NaN
        try:
            actual_RD = slot_rows(x_SD, rows_R, offsets_e)
        finally:
            torch.use_deterministic_algorithms(False)
        assert torch.equal(actual_RD[:end], x_SD[rows_R[:end].long()])
        several = slot_rows(arenas.surround(x_SD, arenas.ROW), rows_R, offsets_e, arenas.base(device))
        assert torch.equal(several[:end], actual_RD[:end])
        assert actual_RD[end:].isnan().all(), "what is past the last expert costs nothing"
    assert slot_rows(x_SD, rows_R[:0], offsets_e).shape == (0, width)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [20, 1500])
def test_programs_take_rows_in_turn_up_to_the_last_one(
    width: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    slots_SK = torch.randperm(39, device=device).view(13, 3).int()
    y_RD, rows_R = torch.randn(39, width, device=device), torch.randint(39, (39,), device=device).int()
    offsets_e = torch.tensor([3, 30], dtype=torch.int32, device=device)
    sums, rows = slot_sum(y_RD, slots_SK), slot_rows(y_RD, rows_R, offsets_e)
    for count in (0, 5, 13, 99):
        counts = torch.tensor([7, count], dtype=torch.int32, device=device)
        torch.use_deterministic_algorithms(True)  # memory that nobody has written is NaN
        try:
            monkeypatch.setattr(slot_sum_file, "MAX_PROGRAMS", 5)
            actual_SD, actual_RD = slot_sum(y_RD, slots_SK, counts[-1:]), slot_rows(y_RD, rows_R, offsets_e)
        finally:
            torch.use_deterministic_algorithms(False)
        assert torch.equal(actual_SD[:count], sums[:count]) and actual_SD[count:].isnan().all()
        assert torch.equal(actual_RD[:30], rows[:30]) and actual_RD[30:].isnan().all()
        assert torch.equal(slot_sum(y_RD, slots_SK), sums)
