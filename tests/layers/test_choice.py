"""A kept choice of experts: written once, and taken by every later forward of the same tokens."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.layers.choice import KeptChoice, nothing_chosen
from titan_moe.layers.forced_routing import ForcedBalance
from titan_moe.layers.router import TopKRouter

MOE = MoEConfig(num_experts=12, top_k=3, ffn_hidden_size=8, aux_loss_coef=0.3, z_loss_coef=0.05)
ROUTERS = {
    "softmax": MOE,
    "sigmoid": replace(MOE, score_fn="sigmoid", normalize_topk=False),
    "groups": replace(MOE, score_fn="sigmoid", num_groups=4, top_k_groups=2),
    "forced": MOE,
}
WIDTH, SEQUENCES, TOKENS = 16, 2, 40


def build(name: str = "softmax") -> TopKRouter:
    torch.manual_seed(0)
    router = TopKRouter(ModelConfig(hidden_size=WIDTH, moe=ROUTERS[name])).double()
    torch.nn.init.normal_(router.weight, std=0.3)
    if name == "forced":
        router.force = ForcedBalance(MOE, torch.device("cpu"))
    return router


def tokens() -> Tensor:
    return torch.randn(SEQUENCES, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def empty() -> tuple[Tensor, Tensor]:
    return nothing_chosen(SEQUENCES, TOKENS, MOE.num_experts, MOE.top_k, torch.device("cpu"))


def run(router: TopKRouter, kept: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, scores, the weight's gradient and the counts of one forward and backward."""
    route = router.route
    if kept is not None:
        router.route = KeptChoice(route, *kept)
    router.weight.grad = None
    router.balance.tokens_per_expert_E.zero_()
    scores_TK, ids_TK = router(tokens())
    scores_TK.square().sum().backward()
    router.route = route
    return ids_TK, scores_TK.detach(), router.weight.grad, router.balance.tokens_per_expert_E.clone()


@pytest.mark.parametrize("name", ROUTERS)
def test_a_kept_choice_gives_the_first_forward_again_whatever_would_be_chosen(name: str) -> None:
    router, kept = build(name), empty()
    expected, first = run(router, None), run(router, kept)
    # selection alone changes: scores are without the bias, and forced ids without anything
    router.expert_bias_E.normal_(std=0.1)
    if name == "forced":
        router.force = lambda logits_BNE: torch.rand_like(logits_BNE).topk(3).indices
    anew, again = run(router, None), run(router, kept)
    assert not torch.equal(anew[0], expected[0])
    for got in (first, again):
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_a_given_choice_is_replayed_with_the_scores_of_the_logits() -> None:
    router, (kept_TK, aux_counts_BE) = build(), empty()
    chosen_TK = torch.rand(SEQUENCES * TOKENS, MOE.num_experts).topk(MOE.top_k).indices
    kept_TK.copy_(chosen_TK)
    ids_TK, scores_TK, _, counts_E = run(router, (kept_TK, aux_counts_BE))
    assert torch.equal(ids_TK, chosen_TK)
    assert torch.equal(counts_E, ids_TK.flatten().bincount(minlength=MOE.num_experts))
    scores_TE = (tokens() @ router.weight.T).softmax(-1).flatten(0, 1)
    expected_TK = scores_TE.gather(1, ids_TK)
    torch.testing.assert_close(scores_TK, expected_TK / expected_TK.sum(-1, keepdim=True))
    counted_BNK = scores_TE.topk(MOE.top_k).indices.view(SEQUENCES, -1)
    assert torch.equal(aux_counts_BE[0], counted_BNK[0].bincount(minlength=MOE.num_experts)), "by score: none was given"

    around, router.route = empty(), KeptChoice(router.route, kept_TK, aux_counts_BE)
    for _ in range(2):
        assert torch.equal(run(router, around)[0], ids_TK), "a choice around another one takes that one's"
    assert torch.equal(around[0].long(), ids_TK)


def test_a_choice_is_that_of_one_call_and_its_tokens() -> None:
    router, (ids_TK, aux_counts_BE) = build(), empty()
    router.route = KeptChoice(router.route, ids_TK[:79], aux_counts_BE, way_out="take another")
    message = "called once, with up to 79 tokens of 2 sequences; this one gets 40 tokens of each of 2; take another"
    with pytest.raises(ValueError, match=re.escape(message)):
        router(tokens())
    _, fewer_TK = router(tokens()[:1])
    assert torch.equal(ids_TK[:40].long(), fewer_TK) and (ids_TK[40:] == -1).all()
    with pytest.raises(ValueError, match="this one is called twice"):
        router(tokens())
