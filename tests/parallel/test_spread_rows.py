"""Ranks compute rows of their own, and all get the logits of all rows."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.parallel.spread_rows import SpreadRows

NUM_ROWS = 5


def spread_over(num_parts: int) -> tuple[list[list[int]], Tensor]:
    """The rows of each forward of this rank, and the logits of all."""
    seen: list[list[int]] = []

    def next_logits(tokens_BN: Tensor, ends_B: Tensor) -> Tensor:
        seen.append(tokens_BN[:, 0].tolist())
        return torch.stack([tokens_BN[:, 0] + 0.5, ends_B * 1.0], dim=1)

    part = dist.get_rank() // (dist.get_world_size() // num_parts)
    spread = SpreadRows(next_logits, part, num_parts, dist.group.WORLD)
    rows = torch.arange(NUM_ROWS)
    logits = [spread(rows[:, None].expand(-1, width), rows + width) for width in (3, 4)]
    return seen, torch.stack(logits)


def test_ranks_have_rows_of_their_own_and_the_logits_of_all(ranks) -> None:
    for num_parts in (4, 2):
        results = ranks(4, spread_over, num_parts)
        rows = torch.arange(NUM_ROWS)
        expected = torch.stack([torch.stack([rows + 0.5, rows + width], dim=1) for width in (3.0, 4.0)])
        assert all(torch.equal(logits, expected) for _, logits in results)
        seen = [rows for rows, _ in results]
        assert {len(own) for rows in seen for own in rows} == {-(-NUM_ROWS // num_parts)}, "forwards of one shape"
        computed = Counter(row for rows in seen for row in set(rows[0]))
        assert computed.keys() == set(range(NUM_ROWS)) and computed[0] == 4 // num_parts
