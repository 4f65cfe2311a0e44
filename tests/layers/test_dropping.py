"""Token dropping: the assignments that exceed an expert's capacity are dropped, as Megatron Core does."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.kernels.router.routing import RoutingRule, route_tokens_reference
from titan_moe.layers.choice import KeptChoice, RecordedChoice, nothing_chosen
from titan_moe.layers.dropping import DroppingRoute, chosen, dropped
from titan_moe.layers.moe import MoE

EXPERTS, TOP_K, SEQUENCES, TOKENS, WIDTH = 5, 3, 2, 11, 6
MOE = MoEConfig(EXPERTS, TOP_K, 7, capacity_factor=0.8)
RULE = RoutingRule("softmax", TOP_K)
BIAS_E = torch.zeros(EXPERTS, dtype=torch.float64)


def logits(seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(SEQUENCES, TOKENS, EXPERTS, dtype=torch.float64) + torch.linspace(0, 1, EXPERTS)


def by_expert(ids_TK: Tensor, values_TK: Tensor) -> Tensor:
    """[T, K] of chosen experts -> [T, E], zero for others and for dropped ones."""
    return torch.zeros(len(ids_TK), EXPERTS + 1, dtype=torch.float64).scatter(
        1, ids_TK.clamp(min=-1) + 1, values_TK.double()
    )[:, 1:]


@pytest.mark.parametrize("factor", [0.3, 0.8, 2.0])
def test_drops_by_score_are_those_of_megatron_core(factor: float) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    plain = route_tokens_reference(logits(), BIAS_E, RULE)
    ids_TK, scores_TK = plain.topk_ids_BNK.flatten(0, 1), plain.topk_scores_BNK.flatten(0, 1)
    map_TE = by_expert(ids_TK, torch.ones_like(ids_TK)).bool()
    expected_TE, kept_TE = moe_utils.apply_router_token_dropping(by_expert(ids_TK, scores_TK), map_TE, TOP_K, factor)
    assert kept_TE.sum() < map_TE.sum() or factor == 2.0

    routing = DroppingRoute(route_tokens_reference, replace(MOE, capacity_factor=factor))(logits(), BIAS_E, RULE)
    actual_TE = by_expert(routing.topk_ids_BNK.flatten(0, 1), routing.topk_scores_BNK.flatten(0, 1))
    torch.testing.assert_close(actual_TE, expected_TE, rtol=0, atol=0)
    assert torch.equal(routing.counts_BE, plain.counts_BE), "of the choice"
    assert torch.equal(chosen(routing.topk_ids_BNK), plain.topk_ids_BNK)


def test_drops_by_position_are_those_of_the_last_tokens() -> None:
    route = DroppingRoute(route_tokens_reference, replace(MOE, drop_policy="position"))
    routing, places = route(logits(), BIAS_E, RULE), [0] * EXPERTS
    capacity = math.ceil(SEQUENCES * TOKENS * TOP_K / EXPERTS * 0.8)
    for ids_K in routing.topk_ids_BNK.flatten(0, 1).tolist():
        for i in ids_K:
            expert = i if i >= 0 else dropped(i)
            assert (i >= 0) == (places[expert] < capacity)
            places[expert] += 1
    assert max(places) > capacity


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_drops_of_each_sequence_are_those_of_one_alone(policy: str) -> None:
    config = replace(MOE, drop_policy=policy, drop_over="sequence")
    together = DroppingRoute(route_tokens_reference, config)(logits(), BIAS_E, RULE)
    apart = DroppingRoute(route_tokens_reference, replace(config, drop_over="microbatch"))
    for number, logits_NE in enumerate(logits()):
        alone = apart(logits_NE[None], BIAS_E, RULE)
        assert torch.equal(alone.topk_ids_BNK[0], together.topk_ids_BNK[number])
    capacity = math.ceil(TOKENS * TOP_K / EXPERTS * 0.8)
    for ids_NK in together.topk_ids_BNK:
        assert (torch.bincount(ids_NK[ids_NK >= 0]) <= capacity).all() and (ids_NK < 0).any()


def test_a_repeated_forward_drops_the_same() -> None:
    route = DroppingRoute(route_tokens_reference, MOE)
    ids_TK, counts_BE = nothing_chosen(SEQUENCES, TOKENS, EXPERTS, TOP_K, torch.device("cpu"))
    first, others = (
        KeptChoice(route, ids_TK, counts_BE)(values, BIAS_E, RULE) for values in (logits(), logits(seed=1))
    )
    assert (first.topk_ids_BNK < 0).any() and torch.equal(first.topk_ids_BNK, others.topk_ids_BNK)
    assert torch.equal(first.topk_ids_BNK < 0, others.topk_scores_BNK == 0)
    assert torch.equal(dropped(dropped(first.topk_ids_BNK)), first.topk_ids_BNK)


def test_records_have_no_dropped_experts() -> None:
    with pytest.raises(ValueError, match=r"capacity_factor = 0.8 drops assignments.* set it to 0"):
        RecordedChoice(DroppingRoute(route_tokens_reference, MOE), torch.full((SEQUENCES, TOKENS, TOP_K), -1))


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("experts", ["reference", "grouped_mm"])
def test_layer_adds_up_what_is_left(pads: bool, experts: str) -> None:
    """Against a loop over tokens, with gradients."""
    torch.manual_seed(0)
    dtype = torch.float64 if experts == "reference" else torch.float32
    width = WIDTH if experts == "reference" else 16
    moe = replace(MOE, ffn_hidden_size=16, pad_to_capacity=pads, aux_loss_coef=0.0)
    layer = MoE(ModelConfig(hidden_size=width, init_std=0.5, moe=moe), kernels=Kernels(experts=experts)).to(dtype)
    x_BND = torch.randn(SEQUENCES, TOKENS, width, dtype=dtype)
    y_BND = layer(x_BND)
    y_BND.square().sum().backward()
    actual = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    num_dropped = int(layer.router.balance.num_dropped)
    layer.zero_grad()

    scores_TK, ids_TK = layer.router(x_BND)
    assert num_dropped == (ids_TK < 0).sum() > 0
    rows, x_TD = [], x_BND.flatten(0, 1)
    for x_D, scores_K, ids_K in zip(x_TD, scores_TK, ids_TK, strict=True):
        y_D = torch.zeros_like(x_D)
        for score, i in zip(scores_K, ids_K, strict=True):
            if i >= 0:
                gate_F, up_F = layer.experts.gate_up[i] @ x_D
                y_D = y_D + score * (layer.experts.down[i] @ (torch.nn.functional.silu(gate_F) * up_F))
        rows.append(y_D)
    expected_TD = torch.stack(rows)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(y_BND.flatten(0, 1), expected_TD, **tolerance)
    expected_TD.square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(actual[name], parameter.grad, **tolerance)
