"""The router against loops over tokens, groups and experts in Python."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.kernels.router.routing import RoutingRule, choose_experts, route_tokens_reference
from titan_moe.layers.router import TopKRouter

MOE = MoEConfig(num_experts=12, top_k=3, ffn_hidden_size=8)
WIDTH = 16


def built(moe: MoEConfig, dtype: torch.dtype = torch.float64) -> TopKRouter:
    torch.manual_seed(0)
    router = TopKRouter(ModelConfig(hidden_size=WIDTH, moe=moe)).to(dtype)
    torch.nn.init.normal_(router.weight, std=0.5)
    return router


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 7, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1))


def best(values: list[float], number: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -values[i])[:number]


def by_hand(logits: list[float], moe: MoEConfig, bias: list[float]) -> dict[int, float]:
    """Chosen experts of one token and their weights."""
    if moe.score_fn == "softmax":
        total = sum(math.exp(logit) for logit in logits)
        scores = [math.exp(logit) / total for logit in logits]
    elif moe.score_fn == "sqrtsoftplus":
        scores = [math.sqrt(math.log1p(math.exp(logit))) for logit in logits]
    else:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    ranked = [score + b for score, b in zip(scores, bias, strict=True)]
    size = len(scores) // moe.num_groups
    groups = [sorted(ranked[g * size : (g + 1) * size], reverse=True) for g in range(moe.num_groups)]
    num_ranked = {"max": 1, "top2_sum": 2}.get(moe.group_score, moe.top_k // moe.top_k_groups)
    worth = [sum(group[:num_ranked]) for group in groups]
    is_open = set(best(worth, moe.top_k_groups))
    chosen = best([value if e // size in is_open else -math.inf for e, value in enumerate(ranked)], moe.top_k)
    total = sum(scores[e] for e in chosen) if moe.normalize_topk else 1.0
    return {e: moe.route_scale * scores[e] / total for e in chosen}


@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalize_topk": False},
        {"route_scale": 2.5},
        {"normalize_topk": False, "route_scale": 16.0},
        {"num_groups": 4, "top_k_groups": 2, "group_score": "max"},
        {"num_groups": 4, "top_k_groups": 2, "group_score": "top2_sum"},
        {"num_groups": 3, "top_k_groups": 1, "group_score": "top_share_sum"},
    ],
    ids=str,
)
def test_router_selection_and_weights(score_fn: str, changes: dict[str, object]) -> None:
    moe = replace(MOE, score_fn=score_fn, **changes)
    router, x_BND = built(moe), tokens()
    router.expert_bias_E.normal_(std=0.1)
    scores_TK, ids_TK = router(x_BND)
    logits_TE = (x_BND @ router.weight.T).flatten(0, 1).tolist()
    for t, logits in enumerate(logits_TE):
        expected = by_hand(logits, moe, router.expert_bias_E.tolist())
        assert dict(zip(ids_TK[t].tolist(), scores_TK[t].tolist(), strict=True)) == pytest.approx(expected, rel=1e-9), t


def test_router_groups_restrict_the_selection() -> None:
    scores_BNE = torch.rand(1, 200, 12, generator=torch.Generator().manual_seed(0))

    def share_equal(a: RoutingRule, b: RoutingRule) -> float:
        chosen = [choose_experts(scores_BNE, rule).sort(-1).values for rule in (a, b)]
        return (chosen[0] == chosen[1]).all(-1).float().mean().item()

    free = RoutingRule("softmax", top_k=3)
    by_max, by_two = (free._replace(num_groups=4, top_k_groups=2, group_score=score) for score in ("max", "top2_sum"))
    assert share_equal(by_max, free) < 0.9
    assert share_equal(by_max, by_two) < 0.9
    assert share_equal(by_max._replace(top_k_groups=4), free) == 1.0, "all groups open is no limit"


def test_router_bias_affects_the_selection_and_never_the_weight() -> None:
    router = built(replace(MOE, score_fn="sigmoid", normalize_topk=False))
    router.expert_bias_E[5] = 10.0
    router.expert_bias_E[2] = -10.0
    x_BND = tokens()
    scores_TK, ids_TK = router(x_BND)
    assert (ids_TK == 5).any(-1).all() and not (ids_TK == 2).any()
    probabilities_TE = torch.sigmoid(x_BND @ router.weight.T).flatten(0, 1)
    torch.testing.assert_close(scores_TK, probabilities_TE.gather(1, ids_TK))
    assert "expert_bias_E" not in dict(router.named_parameters()) and "expert_bias_E" in router.state_dict()


@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
def test_router_normalised_weights_sum_to_the_scale(score_fn: str) -> None:
    scores_TK, _ = built(replace(MOE, score_fn=score_fn, route_scale=2.5))(tokens())
    torch.testing.assert_close(scores_TK.sum(-1), torch.full((14,), 2.5, dtype=torch.float64))


def test_router_logits_and_scores_are_fp32_under_bf16() -> None:
    router, x_BND = built(MOE, torch.bfloat16), tokens(torch.bfloat16)
    scores_TK, ids_TK = router(x_BND)
    assert scores_TK.dtype == torch.float32
    probabilities_TE = (x_BND.double() @ router.weight.double().T).softmax(-1).flatten(0, 1)
    chosen_TK = probabilities_TE.gather(1, ids_TK)
    torch.testing.assert_close(scores_TK.double(), chosen_TK / chosen_TK.sum(-1, keepdim=True), atol=1e-6, rtol=1e-5)


def test_router_in_fp64_is_that_of_fp64_from_end_to_end() -> None:
    router, x_BND = built(replace(MOE, router_dtype="fp64"), torch.bfloat16), tokens(torch.bfloat16).requires_grad_()
    wide, wide_BND = built(MOE), x_BND.detach().double().requires_grad_()
    wide.load_state_dict(router.state_dict())
    scores_TK, ids_TK = router(x_BND)
    expected_TK, expected_ids_TK = wide(wide_BND)
    assert scores_TK.dtype == torch.float32 and torch.equal(ids_TK, expected_ids_TK)
    assert torch.equal(scores_TK, expected_TK.float()), "they are rounded once"
    scores_TK.square().sum().backward()
    (expected_TK * 2 * expected_TK.detach().float()).sum().backward()
    torch.testing.assert_close(x_BND.grad, wide_BND.grad.bfloat16())
    torch.testing.assert_close(router.weight.grad, wide.weight.grad.bfloat16())


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"normalize_topk": False}, {"use_pre_softmax": True}),
        ({"normalize_topk": False, "top_k": 1}, {"use_pre_softmax": True}),
        (
            {"normalize_topk": False, "num_groups": 4, "top_k_groups": 2, "group_score": "top_share_sum", "top_k": 2},
            {"use_pre_softmax": True, "num_groups": 4, "group_topk": 2},
        ),
    ],
    ids=["softmax_after_top_k", "before", "top_1", "groups_of_devices"],
)
def test_router_is_that_of_megatron_core(changes: dict[str, object], options: dict[str, object]) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    moe = replace(MOE, **changes)
    router, x_BND = built(moe), tokens()
    scores_TK, ids_TK = router(x_BND)
    actual_TE = torch.zeros(14, moe.num_experts, dtype=torch.float64).scatter(1, ids_TK, scores_TK)
    logits_TE = (x_BND @ router.weight.T).flatten(0, 1)
    expected_TE, chosen_TE = moe_utils.topk_routing_with_score_function(
        logits_TE, moe.top_k, score_function=moe.score_fn, **options
    )
    assert torch.equal(chosen_TE, actual_TE > 0)
    torch.testing.assert_close(actual_TE, expected_TE, atol=1e-6, rtol=1e-5)  # theirs is in fp32
    direction_TE = torch.randn_like(expected_TE)
    (actual,) = torch.autograd.grad((actual_TE * direction_TE).sum(), router.weight)
    (expected,) = torch.autograd.grad((expected_TE * direction_TE).sum(), router.weight)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    assert expected.norm() > 0.01, "the router learns by its scores, also of one expert"


def test_router_scores_of_low_logits_have_finite_gradients() -> None:
    logits_BNE = torch.tensor([[[-200.0, -90.0, -3.0, 0.0, 40.0]]], requires_grad=True)
    rule = RoutingRule("sqrtsoftplus", 5, counts_by_score=True)
    routing = route_tokens_reference(logits_BNE, torch.zeros(5), rule)
    (grad,) = torch.autograd.grad((routing.topk_scores_BNK.square().sum(), routing.share_sums_BE[0, 0]), logits_BNE)
    assert grad.isfinite().all()


def test_router_gradient_is_that_of_the_formula() -> None:
    router, x_BND = built(replace(MOE, route_scale=2.0)), tokens().requires_grad_()
    scores_TK, ids_TK = router(x_BND)
    probabilities_TE = (x_BND @ router.weight.T).softmax(-1).flatten(0, 1)
    mask_TE = torch.zeros_like(probabilities_TE).scatter_(1, ids_TK, 1.0)
    dense_TE = 2.0 * probabilities_TE * mask_TE / (probabilities_TE * mask_TE).sum(-1, keepdim=True)
    direction_TE = torch.randn_like(dense_TE)
    inputs = (x_BND, router.weight)
    actual = torch.autograd.grad((scores_TK * direction_TE.gather(1, ids_TK)).sum(), inputs)
    expected = torch.autograd.grad((dense_TE * direction_TE).sum(), inputs)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("shape", [(7, WIDTH), (2, 7, WIDTH // 2), (2, 2, 7, WIDTH), (WIDTH,)])
def test_router_names_the_shape_that_it_takes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"takes hidden states \[B, N, {WIDTH}\].* got {re.escape(str(list(shape)))}"):
        built(MOE)(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize("kept", [None, torch.full((3, 40, 2), -1, dtype=torch.int32)], ids=["first", "kept"])
def test_sparsemixer_is_that_of_transformers_in_evaluation(kept: torch.Tensor | None) -> None:
    theirs = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    torch.manual_seed(0)
    logits_BNE = torch.randn(3, 40, 5, dtype=torch.float64, requires_grad=True)
    rule = RoutingRule("sparsemixer", 2, normalize_topk=False, sparsemixer_jitter=0.3)
    routing = route_tokens_reference(logits_BNE, torch.zeros(5), rule, None, kept)
    scores_TK, ids_TK = theirs.sparsemixer(logits_BNE.flatten(0, 1), jitter_eps=0.3, training=False)
    assert torch.equal(routing.topk_ids_BNK.flatten(0, 1), ids_TK)
    torch.testing.assert_close(routing.topk_scores_BNK.flatten(0, 1), scores_TK)
    assert ((scores_TK > 0.3) & (scores_TK < 1)).any() and (scores_TK == 1).any(), "some are alone"
    weights_TK = torch.randn_like(scores_TK)
    (expected,) = torch.autograd.grad((scores_TK * weights_TK).sum(), logits_BNE)
    (actual,) = torch.autograd.grad((routing.topk_scores_BNK.flatten(0, 1) * weights_TK).sum(), logits_BNE)
    torch.testing.assert_close(actual, expected)
