"""Loads of experts and ranks, and the common transfer of scalars."""

import pytest
import torch

from titan_moe.metrics.experts import expert_loads, rank_loads, read_scalars


def test_expert_loads():
    loads = expert_loads(
        {
            "even": torch.tensor([3, 3, 3, 3]),
            "skewed": torch.tensor([6.0, 2.0, 0.0, 0.0]),
            "one": torch.tensor([0, 0, 0, 9]),
            "none": torch.zeros(4),
        }
    )
    assert {layer: load.item() for layer, load in loads.items()} == {
        "even": 1.0,
        "skewed": 3.0,
        "one": 4.0,
        "none": 0.0,
    }


def test_rank_loads_sum_over_their_experts():
    counts = {"skewed": torch.tensor([6, 0, 1, 1, 4, 0, 0, 0])}
    assert {n: rank_loads(counts, n)["skewed"].item() for n in (1, 2, 4)} == {1: 1.0, 2: 8 / 6, 4: 2.0}
    assert rank_loads(counts, 8)["skewed"] == expert_loads(counts)["skewed"] == 4.0


def test_expert_loads_beyond_the_integers_of_fp32():
    big = 2**24
    assert expert_loads({"layer": torch.tensor([big + 1, big - 1])})["layer"].item() == pytest.approx(
        1 + 1 / big, rel=1e-12
    )


def test_read_scalars_keeps_order_and_transfers_once(monkeypatch):
    transfers = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: transfers.append(self) or tolist(self))
    assert read_scalars([torch.tensor(1.5), 2, torch.tensor([3], dtype=torch.int64), 4.5]) == [1.5, 2.0, 3.0, 4.5]
    assert len(transfers) == 1
    assert read_scalars([1.0]) == [1.0] and len(transfers) == 1
