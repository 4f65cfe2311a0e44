"""Loads of experts and ranks, and the common transfer of scalars."""

import pytest
import torch

from titan_moe.metrics.experts import (
    expert_loads,
    idle_experts,
    load_map,
    mean_rank_load,
    overload_factors,
    rank_loads,
    read_scalars,
    read_values,
    share_entropy,
)


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


def test_idle_experts_have_no_token():
    counts = {"even": torch.ones(4), "skewed": torch.tensor([6, 0, 0, 1])}
    assert {layer: number.item() for layer, number in idle_experts(counts).items()} == {"even": 0, "skewed": 2}


def test_overload_factors_of_two_layers():
    counts = {"a": torch.tensor([6, 0, 1, 1]), "b": torch.tensor([0, 2, 8, 6])}
    overload = overload_factors(counts, 2)
    assert [factor.item() for factor in overload] == pytest.approx([(6 / 4 + 14 / 8) / 2, 14 / 8, 16 / 12, 1])
    assert [factor.item() for factor in overload_factors(counts, 1)] == [1, 1, 1, 0]


def test_mean_rank_load_of_layers_with_different_numbers_of_experts():
    counts = {"a": torch.tensor([6, 0, 1, 1]), "b": torch.tensor([1, 1]), "c": torch.tensor([0, 2, 8, 6])}
    for layers in (["a", "c"], ["a", "b", "c"], ["b"]):
        some = {layer: counts[layer] for layer in layers}
        loads = rank_loads(some, 2).values()
        mean = mean_rank_load(some, 2)
        assert mean.item() == pytest.approx(sum(loads).item() / len(layers)) and mean.dtype == torch.float64
    assert mean_rank_load({"none": torch.zeros(4, dtype=torch.int64)}, 2) == 0.0


def test_load_map_is_relative_to_each_layer():
    loads_LE = load_map({"a": torch.tensor([1, 3]), "b": torch.tensor([20, 20]), "none": torch.tensor([0, 0])})
    assert loads_LE.tolist() == [[0.5, 1.5], [1.0, 1.0], [0.0, 0.0]]


def test_read_values_keeps_shapes():
    scalar, counts_E = read_values([2, torch.arange(6).view(2, 3)])
    assert scalar.item() == 2.0 and counts_E.tolist() == [[0, 1, 2], [3, 4, 5]] and counts_E.dtype == torch.float64
    assert read_values([]) == []


def test_expert_loads_beyond_the_integers_of_fp32():
    big = 2**24
    assert expert_loads({"layer": torch.tensor([big + 1, big - 1])})["layer"].item() == pytest.approx(
        1 + 1 / big, rel=1e-12
    )


def test_read_scalars_keeps_order_and_transfers_once(monkeypatch):
    transfers = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: transfers.append(self) or cpu(self))
    assert read_scalars([torch.tensor(1.5), 2, torch.tensor([3], dtype=torch.int64), 4.5]) == [1.5, 2.0, 3.0, 4.5]
    assert len(transfers) == 1
    assert read_scalars([1.0]) == [1.0] and len(transfers) == 1


def test_entropy_of_shares_is_one_if_they_are_even() -> None:
    even, one = torch.ones(6), torch.eye(4)[0]
    assert share_entropy({"a": even}).item() == pytest.approx(1.0) and share_entropy({"a": one}) == 0.0
    assert share_entropy({"a": 3 * even, "b": one}).item() == pytest.approx(0.5) and share_entropy({}) == 0.0
    assert share_entropy({"a": torch.zeros(4)}) == 0.0
