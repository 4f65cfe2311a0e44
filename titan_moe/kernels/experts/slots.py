"""The slots that an expert MLP computes.

S rows · R expert slots, sorted by expert · K choices a row · e experts that the rank computes
"""

from typing import NamedTuple

from torch import Tensor


class ExpertSlots(NamedTuple):
    """Slots, each one row for one expert; those past `offsets_e[-1]` are never read."""

    rows_R: Tensor
    """int32, slot -> row; slots are sorted by expert."""
    slots_SK: Tensor
    """int32, row -> its slots, -1 for none."""
    scores_R: Tensor
    """fp32, routing score of each slot."""
    offsets_e: Tensor
    """int32 on the device, running end of each expert's slots."""
