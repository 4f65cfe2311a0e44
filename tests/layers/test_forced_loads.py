"""Forced loads have the distribution that their names promise."""

import pytest
import torch
from torch import Tensor

from titan_moe.config.forced_loads import BURST_STEPS, DRAWN_LOADS, DRIFT_STEPS, HEAT
from titan_moe.layers.forced_loads import _weights, draw_ids, generator_of

T, E, K, P = 512, 32, 4, 4


def draw(load: str, layer: int = 0, step: int = 0, rank: int = 0, num_ranks: int = P, top_k: int = K) -> Tensor:
    return draw_ids(
        load,
        num_tokens=T,
        num_experts=E,
        top_k=top_k,
        num_ranks=num_ranks,
        layer=layer,
        step=step,
        generator=generator_of(rank, layer, step),
    )


def shares(ids_TK: Tensor) -> Tensor:
    """Of each rank in the assignments."""
    counts_E = torch.bincount(ids_TK[ids_TK >= 0], minlength=E).double()
    return counts_E.view(P, -1).sum(1) / counts_E.sum()


@pytest.mark.parametrize("load", DRAWN_LOADS)
@pytest.mark.parametrize("num_ranks", [1, 2, P, E])
def test_ids_are_distinct_and_repeatable(load: str, num_ranks: int) -> None:
    ids_TK = draw(load, layer=1, step=BURST_STEPS - 1, num_ranks=num_ranks)
    assert ids_TK.shape == (T, K) and ids_TK.dtype == torch.int64
    assert -1 <= ids_TK.min() and ids_TK.max() < E
    chosen = [[expert for expert in ids if expert >= 0] for ids in ids_TK.tolist()]
    assert all(len(set(ids)) == len(ids) for ids in chosen) and any(chosen)
    assert torch.equal(ids_TK, draw(load, layer=1, step=BURST_STEPS - 1, num_ranks=num_ranks))
    if any(len(ids) > 1 for ids in chosen) or num_ranks < E:
        assert not torch.equal(ids_TK, draw(load, 1, BURST_STEPS - 1, rank=1, num_ranks=num_ranks))


def test_uniform_loads_are_about_even() -> None:
    for load in ("uniform", "spread_hot_experts", "bursts"):
        assert shares(draw(load)).max() < 1.2 / P, load


def test_the_hot_expert_or_rank_has_most() -> None:
    for load in ("hot_expert", "spread_hot_experts"):
        counts_E = torch.bincount(draw(load).flatten(), minlength=E)
        num_hot = 1 if load == "hot_expert" else P
        assert counts_E.topk(num_hot).values.min() > 2.5 * counts_E.sort().values[: E - num_hot].max(), load
    hot = shares(draw("hot_rank"))
    assert hot[0] > 0.75 and hot[0] < HEAT / (HEAT + P - 1)


def test_the_hot_rank_alternates_over_layers() -> None:
    each = torch.stack([shares(draw("alternating", layer)) for layer in range(P)])
    assert each.argmax(1).tolist() == list(range(P)) and each.mean(0).max() < 1.1 / P


def test_the_hot_rank_drifts_over_steps() -> None:
    assert abs(shares(draw("drifting"))[:2] - 0.42).max() < 0.05, "two neighbours at first"
    for step in range(1, 2 * P * DRIFT_STEPS, 5):
        hottest = int(shares(draw("drifting", step=step)).argmax())
        assert hottest == round(0.5 + step / DRIFT_STEPS) % P
    largest = torch.stack([shares(draw("drifting", step=step)).max() for step in range(DRIFT_STEPS)])
    assert abs(int(largest.argmax()) - DRIFT_STEPS // 2) <= 2 and largest.max() > 0.75


def test_bursts_go_to_another_rank_each_time() -> None:
    for number in range(P + 1):
        burst = shares(draw("bursts", step=(number + 1) * BURST_STEPS - 1))
        assert burst[number % P] == 1
        assert shares(draw("bursts", step=(number + 1) * BURST_STEPS)).max() < 1.2 / P


def test_cold_ranks_get_nothing() -> None:
    cold = shares(draw("cold_ranks"))
    assert cold[P // 2 :].sum() == 0 and cold[: P // 2].min() > 0.4


def test_one_rank_gets_everything_that_its_experts_can_take() -> None:
    assert shares(draw("one_rank"))[0] == 1 and (draw("one_rank") >= 0).all()
    ids_TK = draw("one_rank", top_k=E // P + 2)
    assert torch.equal(ids_TK[:, : E // P].sort().values, torch.arange(E // P).expand(T, -1))
    assert (ids_TK[:, E // P :] == -1).all()


def test_one_rank_gets_everything_of_the_first_layer_alone() -> None:
    first, *others = (shares(draw("one_rank_in_one_layer", layer)) for layer in range(3))
    assert first[0] == 1 and all(other.max() < 1.2 / P for other in others)


@pytest.mark.parametrize("top_k", [K, E // P + 2])
def test_all_tokens_of_a_collapsed_router_have_the_same_experts(top_k: int) -> None:
    for layer in range(2):
        ids_TK = draw("collapsed", layer, top_k=top_k)
        assert torch.equal(ids_TK.sort().values, torch.arange(top_k).expand(T, -1))


@pytest.mark.parametrize("load", DRAWN_LOADS)
@pytest.mark.parametrize("num_ranks", [1, 2, P])
def test_the_facts_of_a_load_are_true(load: str, num_ranks: int) -> None:
    facts, steps = DRAWN_LOADS[load], range(256)
    weights = [_weights(load, E, K, num_ranks, 0, step) for step in steps]
    fewest = min(int((weights_E > 0).sum()) for weights_E in weights)
    assert fewest == (K if load == "collapsed" else facts.num_experts_in_use(E, num_ranks))
    changes = any(not torch.equal(weights_E, weights[0]) for weights_E in weights)
    assert num_ranks == 1 or changes == (facts.follows_step != "")
    for step in steps:
        again_E = _weights(load, E, K, num_ranks, 0, step + facts.period_steps(num_ranks))
        torch.testing.assert_close(again_E, weights[step])
    ids = [draw(load, step=step, num_ranks=num_ranks, top_k=min(fewest, K)) for step in range(2 * BURST_STEPS)]
    assert all((ids_TK >= 0).all() for ids_TK in ids) == facts.reaches_all_tokens


def test_ragged_sources_have_different_numbers_of_tokens() -> None:
    numbers = [int((draw("ragged_sources", rank=rank) >= 0).any(1).sum()) for rank in range(P)]
    assert len(set(numbers)) == P and all(0 < number <= T for number in numbers)
    ids_TK = draw("ragged_sources")
    assert (ids_TK[: numbers[0]] >= 0).all() and (ids_TK[numbers[0] :] == -1).all()


def test_an_unknown_load_is_refused() -> None:
    with pytest.raises(ValueError, match="the loads are uniform, hot_expert"):
        draw("lukewarm")
