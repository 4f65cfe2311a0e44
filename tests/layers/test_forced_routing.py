"""Forced routing has its specified loads for any scores."""

import pytest
import torch
from torch import nn

from titan_moe.config.forced_loads import BURST_STEPS
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.skew import WINDOW_TOKENS, skewed_counts
from titan_moe.layers.forced_routing import ForcedBalance, ForcedDraws, ForcedSkew, force_load
from titan_moe.layers.router import TopKRouter


@pytest.mark.parametrize(("num_experts", "top_k", "num_tokens"), [(8, 3, 16), (128, 8, 64), (6, 4, 9), (4, 4, 5)])
def test_forced_balance_is_even_and_distinct(num_experts: int, top_k: int, num_tokens: int) -> None:
    moe = MoEConfig(num_experts=num_experts, top_k=top_k)
    scores_BNE = torch.rand(2, num_tokens, num_experts)
    scores_BNE[..., 0] = 1e6  # whatever the scores say
    ids_TK = ForcedBalance(moe, torch.device("cpu"))(scores_BNE).flatten(0, 1)
    loads = torch.bincount(ids_TK.flatten(), minlength=num_experts)
    assert torch.equal(loads, torch.full_like(loads, 2 * num_tokens * top_k // num_experts))
    assert all(len(set(ids)) == top_k for ids in ids_TK.tolist())


def test_forced_balance_is_shuffled_and_repeatable() -> None:
    moe, scores_BNE, cpu = MoEConfig(num_experts=64, top_k=4), torch.zeros(1, 16, 64), torch.device("cpu")
    first = ForcedBalance(moe, cpu)(scores_BNE)
    assert torch.equal(first, ForcedBalance(moe, cpu)(scores_BNE))
    assert not torch.equal(first, ForcedBalance(moe, cpu, seed=1)(scores_BNE))
    ranks_TK = first[0] // 8
    assert sum(len(set(ranks)) > 2 for ranks in ranks_TK.tolist()) > 8, "a token's experts are spread over 8 ranks"


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (64, 6), (8, 2)])
def test_forced_balance_sends_every_rank_as_many_rows(num_experts: int, top_k: int) -> None:
    """A token that has two choices of a rank sends it one row: few orders of experts would favour some ranks."""
    force = ForcedBalance(MoEConfig(num_experts=num_experts, top_k=top_k), torch.device("cpu"))
    ranks_TK = force(torch.zeros(1, 8192, num_experts))[0] // (num_experts // 8)
    num_rows_P = torch.zeros(8192, 8).scatter_(1, ranks_TK, 1.0).sum(0)
    assert num_rows_P.max() < 1.03 * num_rows_P.mean()


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_ranks"), [(128, 8, 8), (64, 6, 8), (8, 2, 4), (128, 8, 1), (12, 3, 2)]
)
def test_forced_skew_has_the_loads_in_every_window_and_distinct_experts(
    num_experts: int, top_k: int, num_ranks: int
) -> None:
    force = ForcedSkew(MoEConfig(num_experts=num_experts, top_k=top_k), num_ranks, torch.device("cpu"))
    num_tokens = 10 * WINDOW_TOKENS  # the second sequence comes round to the table's beginning
    ids_TK = force(torch.rand(2, num_tokens, num_experts)).flatten(0, 1)
    expected_E = torch.tensor(skewed_counts(num_experts, top_k, num_ranks))
    for window_TK in ids_TK.split(WINDOW_TOKENS):
        assert torch.equal(torch.bincount(window_TK.flatten(), minlength=num_experts), expected_E)
    chosen_TE = torch.zeros(len(ids_TK), num_experts, dtype=torch.int64).scatter_(1, ids_TK, 1)
    assert chosen_TE.sum(1).eq(top_k).all(), "a token's experts are distinct"


def test_forced_skew_combines_experts_as_random_routing_does() -> None:
    moe = MoEConfig(num_experts=128, top_k=8)
    ids_TK = ForcedSkew(moe, 8, torch.device("cpu"))(torch.zeros(1, 16 * WINDOW_TOKENS, 128))[0]
    ranks_TP = torch.zeros(len(ids_TK), 8).scatter_(1, ids_TK // 16, 1.0)
    loads_E = torch.tensor(skewed_counts(128, 8, 8)).float()
    drawn_TK = torch.multinomial(loads_E.expand(len(ids_TK), -1), 8, generator=torch.Generator().manual_seed(0))
    drawn_TP = torch.zeros_like(ranks_TP).scatter_(1, drawn_TK // 16, 1.0)
    torch.testing.assert_close(ranks_TP.sum(1).mean(), drawn_TP.sum(1).mean(), rtol=0.02, atol=0)
    assert len(ids_TK[:1024].sort(-1).values.unique(dim=0)) > 64, "rows of one window are many"
    first, again = (ForcedSkew(moe, 8, torch.device("cpu")).table_TK for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, ForcedSkew(moe, 8, torch.device("cpu"), seed=1).table_TK)


MOE = MoEConfig(num_experts=16, top_k=2)


def loads_of_ranks(force: ForcedDraws, num_tokens: int = 3000) -> list[float]:
    """Shares of 4 ranks in the assignments."""
    ids_BNK = force(torch.rand(2, num_tokens, MOE.num_experts))
    assert ids_BNK.shape == (2, num_tokens, MOE.top_k) and ids_BNK.dtype == torch.int64
    counts_P = torch.bincount(ids_BNK.flatten() // 4, minlength=4).double()
    return (counts_P / counts_P.sum()).tolist()


def test_forced_draws_follow_the_step_on_the_device() -> None:
    step = torch.zeros((), dtype=torch.int64)
    force = ForcedDraws("bursts", 0, MOE, 4, torch.device("cpu"), step)
    for number in range(5 * BURST_STEPS):
        step.fill_(number)
        shares = loads_of_ranks(force)
        is_burst = number % BURST_STEPS == BURST_STEPS - 1
        assert shares[number // BURST_STEPS % 4] == 1 if is_burst else max(shares) < 0.3


def test_forced_loads_of_layers_are_those_of_their_numbers() -> None:
    model = nn.Module()
    config = ModelConfig(hidden_size=8, moe=MOE)
    model.layers = nn.ModuleDict({str(i): nn.ModuleDict({"router": TopKRouter(config)}) for i in (1, 3, 4)})
    cpu, step = torch.device("cpu"), torch.zeros((), dtype=torch.int64)
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    force_load(model, "one_rank_in_one_layer", MOE, 4, cpu, step, moe_layers=(1, 3, 4))
    assert [max(loads_of_ranks(router.force)) > 0.9 for router in routers] == [True, False, False]
    force_load(model, "bursts", MOE, 4, cpu, step)
    assert len({router.force for router in routers}) == 1, "many steps are drawn once"


def test_forced_draws_of_layers_compile_once() -> None:
    """A number that differs by layer would be another graph for each."""
    config, cpu, graphs = ModelConfig(hidden_size=8, moe=MOE), torch.device("cpu"), []

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    for layer in range(3):
        router = TopKRouter(config)
        nn.init.normal_(router.weight)
        router.reset_buffers()
        router.force = ForcedDraws("uniform", layer, MOE, 4, cpu, torch.zeros((), dtype=torch.int64))
        router.compile(backend=count, fullgraph=True)
        router(torch.randn(1, 32, 8))
    assert len(graphs) == 1
