"""Balancing losses equal their published formulas, and counts accumulate exactly once per microbatch."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from titan_moe.config.balance import AuxLosses
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.layers.router import TopKRouter
from titan_moe.parallel.balance import scale_balancing_losses

MOE = MoEConfig(num_experts=8, top_k=3, ffn_hidden_size=8, aux_loss_coef=0.3, z_loss_coef=0.05)
WIDTH, SEQUENCES, TOKENS = 16, 3, 7
WEIGHTS = {"mean": 1 / (SEQUENCES * TOKENS), "sum": 1.0}
"""Reduction of the main loss over tokens -> weight of a token in a balancing loss."""
LOSSES = {"aux": replace(MOE, z_loss_coef=0.0), "z": replace(MOE, aux_loss_coef=0.0), "both": MOE}


def build(moe: MoEConfig = MOE, dtype: torch.dtype = torch.float64, reduction: str = "sum") -> TopKRouter:
    torch.manual_seed(0)
    router = TopKRouter(ModelConfig(hidden_size=WIDTH, moe=moe)).to(dtype)
    scale_balancing_losses(router, reduction=reduction)
    torch.nn.init.normal_(router.weight, std=0.5)
    return router


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(SEQUENCES, TOKENS, WIDTH, dtype=dtype, requires_grad=True)


def published_losses(logits_BNE: Tensor, ids_BNK: Tensor, moe: MoEConfig) -> Tensor:
    """The sum over tokens of arXiv:2412.19437 eq. 17-20 (per sequence) and arXiv:2202.08906 eq. 5 (per token)."""
    total = logits_BNE.new_zeros(())
    for logits_NE, ids_NK in zip(logits_BNE, ids_BNK, strict=True):
        scores_NE = logits_NE.softmax(-1) if moe.score_fn == "softmax" else logits_NE.sigmoid()
        for i in range(moe.num_experts):
            f_i = moe.num_experts / (moe.top_k * TOKENS) * sum(int(i in ids.tolist()) for ids in ids_NK)
            p_i = sum(scores[i] / scores.sum() for scores in scores_NE) / TOKENS
            total = total + moe.aux_loss_coef * f_i * p_i * TOKENS  # weighted by the sequence's number of tokens
        for logits_E in logits_NE:
            total = total + moe.z_loss_coef * logits_E.exp().sum().log() ** 2
    return total


@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("reduction", WEIGHTS)
def test_balance_losses_and_gradients_equal_the_published_formulas(reduction: str, which: str, score_fn: str) -> None:
    moe = replace(LOSSES[which], score_fn=score_fn)
    router, x_BND, scale = build(moe), tokens(), 0.25
    scale_balancing_losses(router, scale, reduction)
    scores_TK, ids_TK = router(x_BND)
    direction_TK = torch.randn_like(scores_TK)
    inputs = (x_BND, router.weight)
    actual = torch.autograd.grad((scores_TK * direction_TK).sum(), inputs)

    unbalanced = build(replace(moe, aux_loss_coef=0.0, z_loss_coef=0.0))
    plain = torch.autograd.grad((unbalanced(x_BND)[0] * direction_TK).sum(), (x_BND, unbalanced.weight))
    loss = published_losses(x_BND @ router.weight.T, ids_TK.view(SEQUENCES, TOKENS, -1), moe)
    loss = WEIGHTS[reduction] * loss
    added = torch.autograd.grad(scale * loss, inputs)
    for got, main, balance in zip(actual, plain, added, strict=True):
        assert balance.norm() > 1e-4
        torch.testing.assert_close(got, main + balance, atol=1e-10, rtol=0)
    torch.testing.assert_close(router.balance.aux_loss, scale * loss.detach(), atol=1e-10, rtol=0)


def batch_loss(logits_BNE: Tensor, kind: str, moe: MoEConfig) -> Tensor:
    """A mean over tokens: the loss of all tokens together, one after the other (arXiv:2501.11873)."""
    scores_TE = (logits_BNE.softmax(-1) if moe.score_fn == "softmax" else logits_BNE.sigmoid()).flatten(0, 1)
    loss, num_tokens = logits_BNE.new_zeros(()), len(scores_TE)
    for i in range(moe.num_experts):
        count = sum(int(i in scores_E.topk(moe.top_k).indices) for scores_E in scores_TE)
        share = sum(scores_E[i] / scores_E.sum() for scores_E in scores_TE) / num_tokens
        loss = loss + moe.num_experts / (moe.top_k * num_tokens) * count * share
    return getattr(moe.aux_losses, kind) * loss


@pytest.mark.parametrize("reduction", WEIGHTS)
@pytest.mark.parametrize(
    ("score_fn", "aux_losses"),
    [
        ("softmax", AuxLosses(microbatch=0.2)),
        ("sigmoid", AuxLosses(global_batch=0.2)),
        ("sigmoid", AuxLosses(sequence=0.3, microbatch=0.2, global_batch=0.1)),
    ],
    ids=["microbatch", "global_batch", "all"],
)
def test_balance_losses_of_several_kinds(reduction: str, score_fn: str, aux_losses: AuxLosses) -> None:
    moe = replace(MOE, score_fn=score_fn, aux_loss_coef=0.0, z_loss_coef=0.0, aux_losses=aux_losses)
    router, x_BND = build(moe, reduction=reduction), tokens()
    scores_TK, ids_TK = router(x_BND)
    (actual,) = torch.autograd.grad(scores_TK, router.weight, torch.zeros_like(scores_TK))
    logits_BNE, ids_BNK = x_BND @ router.weight.T, ids_TK.view(SEQUENCES, TOKENS, -1)
    per_sequence = published_losses(logits_BNE, ids_BNK, replace(moe, aux_loss_coef=aux_losses.sequence))
    both = sum(batch_loss(logits_BNE, kind, moe) for kind in ("microbatch", "global_batch"))
    loss = WEIGHTS[reduction] * (per_sequence + SEQUENCES * TOKENS * both)
    torch.testing.assert_close(router.balance.aux_loss, loss.detach(), atol=1e-10, rtol=0)
    torch.testing.assert_close(actual, torch.autograd.grad(loss, router.weight)[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
@pytest.mark.parametrize("reduction", WEIGHTS)
def test_balance_of_padded_sequences_is_that_of_their_tokens(reduction: str, score_fn: str) -> None:
    """Each sequence without its padding, by itself: losses, gradients and counts."""
    moe = replace(MOE, score_fn=score_fn, aux_losses=AuxLosses(global_batch=0.1, microbatch=0.2))
    router, x_BND, lengths = build(moe, reduction=reduction), tokens(), (TOKENS, 4, 0)
    valid_BN = torch.arange(TOKENS) < torch.tensor(lengths)[:, None]
    scores_TK, ids_TK = router(x_BND, valid_BN)
    assert torch.equal(ids_TK < 0, ~valid_BN.flatten()[:, None].expand_as(ids_TK)) and not scores_TK[ids_TK < 0].any()
    (actual,) = torch.autograd.grad(scores_TK.square().sum(), router.weight)

    alone = build(replace(moe, aux_losses=AuxLosses()))
    total, logits, num_tokens = alone.weight.new_zeros(()), [], sum(lengths)
    weight = 1 / num_tokens if reduction == "mean" else 1.0
    scale_balancing_losses(alone, weight, "sum")
    for x_ND, length in zip(x_BND, lengths, strict=True):
        if length:
            own_scores_TK, _ = alone(x_ND[None, :length])
            total = total + own_scores_TK.square().sum()
            logits.append(x_ND[:length] @ alone.weight.T)
    both = moe.aux_losses.microbatch + moe.aux_losses.global_batch
    one = replace(moe, aux_losses=AuxLosses(microbatch=both))
    of_batch = num_tokens * batch_loss(torch.cat(logits)[None], "microbatch", one)
    expected = torch.autograd.grad(total + weight * of_batch, alone.weight)[0]
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-9)
    aux_loss = alone.balance.aux_loss + weight * of_batch.detach()
    torch.testing.assert_close(
        router.balance.aux_loss, aux_loss.to(router.balance.aux_loss.dtype), atol=1e-6, rtol=1e-6
    )
    assert torch.equal(router.balance.tokens_per_expert_E, alone.balance.tokens_per_expert_E)


def test_balance_loss_of_microbatches_that_are_counted_ahead_is_that_of_their_batch() -> None:
    moe = replace(MOE, aux_loss_coef=0.0, z_loss_coef=0.0, aux_losses=AuxLosses(global_batch=0.2))
    whole, parts, x_BND = build(moe), build(moe), tokens()
    whole(x_BND)[0].sum().backward()
    parts.balance.counts_ahead = True
    for _ in range(2):
        parts.balance.batch_counts_E.zero_()
        with torch.no_grad():
            parts.balance.is_counting = True
            for x_ND in x_BND:
                parts(x_ND[None])
            parts.balance.is_counting = False
            parts(x_BND)  # of validation
    assert parts.balance.batch_counts_E.sum() == SEQUENCES * TOKENS * moe.top_k
    for x_ND in x_BND:
        parts(x_ND[None])[0].sum().backward()
    torch.testing.assert_close(parts.weight.grad, whole.weight.grad, atol=1e-10, rtol=0)
    torch.testing.assert_close(parts.balance.aux_loss, whole.balance.aux_loss, atol=1e-10, rtol=0)
    summed: list[Tensor] = []
    whole.balance.sum_over_batch = lambda counts_E: summed.append(counts_E) or counts_E
    with torch.no_grad():
        whole(x_BND)
    assert not summed, "no collective where nobody reads the loss"
    whole(x_BND)
    assert len(summed) == 1
    by_itself = build(moe)
    for x_ND in x_BND:
        by_itself(x_ND[None])[0].sum().backward()
    assert not torch.allclose(by_itself.weight.grad, whole.weight.grad)


SELECTIONS = {
    "bias": {"bias_update_speed": 1e-3},
    "kept bias": {},
    "groups": {"num_groups": 4, "top_k_groups": 2},
    "bias and groups": {"bias_update_speed": 1e-3, "num_groups": 4, "top_k_groups": 2},
    "kept bias and groups": {"num_groups": 4, "top_k_groups": 2},
}
"""What selects other experts than the scores do."""


def build_biased(moe: MoEConfig, selection: str) -> TopKRouter:
    router = build(moe)
    if "bias" in selection:
        router.expert_bias_E.copy_(torch.linspace(-0.4, 0.4, moe.num_experts))
    return router


def megatron_losses(logits_BNE: Tensor, moe: MoEConfig) -> tuple[Tensor, Tensor]:
    """Megatron Core's auxiliary loss of each sequence times its tokens, summed, and the counts of the top-k of scores.

    As in `compute_routing_scores_for_aux_loss` and `switch_load_balancing_loss_func`.
    """
    if moe.score_fn == "softmax":
        probs_BNE = logits_BNE.softmax(-1)
    else:
        probs_BNE = logits_BNE.sigmoid() / (logits_BNE.sigmoid().sum(-1, keepdim=True) + 1e-20)
    is_topk_BNE = torch.zeros_like(probs_BNE).scatter(-1, probs_BNE.topk(moe.top_k).indices, 1.0)
    factor = moe.num_experts * moe.aux_loss_coef / (moe.top_k * TOKENS * TOKENS)
    return TOKENS * factor * (probs_BNE.sum(1) * is_topk_BNE.sum(1)).sum(), is_topk_BNE.sum((0, 1)).long()


@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_balance_loss_counts_the_topk_of_scores_and_the_load_the_selected_experts(
    selection: str, score_fn: str
) -> None:
    moe = replace(LOSSES["aux"], score_fn=score_fn, **SELECTIONS[selection])
    router, x_BND, scale = build_biased(moe, selection), tokens(), 0.25
    scale_balancing_losses(router, scale, "sum")
    scores_TK, ids_TK = router(x_BND)
    direction_TK = torch.randn_like(scores_TK)
    actual = torch.autograd.grad((scores_TK * direction_TK).sum(), (x_BND, router.weight))

    unbalanced = build_biased(replace(moe, aux_loss_coef=0.0), selection)
    plain = torch.autograd.grad((unbalanced(x_BND)[0] * direction_TK).sum(), (x_BND, unbalanced.weight))
    loss, by_score_E = megatron_losses(x_BND @ router.weight.T, moe)
    added = torch.autograd.grad(scale * loss, (x_BND, router.weight))
    for got, main, balance in zip(actual, plain, added, strict=True):
        assert balance.norm() > 1e-3
        torch.testing.assert_close(got, main + balance, atol=1e-10, rtol=0)
    torch.testing.assert_close(router.balance.aux_loss, scale * loss.detach(), atol=1e-10, rtol=0)

    selected_E = torch.bincount(ids_TK.flatten(), minlength=moe.num_experts)
    assert not torch.equal(selected_E, by_score_E)
    assert torch.equal(router.balance.tokens_per_expert_E, selected_E)


@pytest.mark.parametrize("speed", [0.0, 1e-3])
def test_balance_gradient_beside_a_bias_is_that_of_megatron_core(speed: float) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    moe = replace(LOSSES["aux"], score_fn="sigmoid", bias_update_speed=speed)
    router, x_BND = build_biased(moe, "bias"), tokens()
    scores_TK, ids_TK = router(x_BND)
    (actual,) = torch.autograd.grad((0.0 * scores_TK).sum(), router.weight)

    logits_TE = (x_BND @ router.weight.T).flatten(0, 1)
    _, chosen_TE = moe_utils.topk_routing_with_score_function(
        logits_TE, moe.top_k, score_function="sigmoid", expert_bias=router.expert_bias_E
    )
    assert torch.equal(chosen_TE.nonzero()[:, 1].view(-1, moe.top_k), ids_TK.sort(-1).values), "of the biased scores"
    counted_TE, probs_TE = moe_utils.compute_routing_scores_for_aux_loss(logits_TE, moe.top_k, "sigmoid")
    loss = sum(
        TOKENS * moe_utils.switch_load_balancing_loss_func(probs_NE, counted_NE.sum(0), TOKENS, moe.top_k, 8, 0.3)
        for probs_NE, counted_NE in zip(probs_TE.chunk(SEQUENCES), counted_TE.chunk(SEQUENCES), strict=True)
    )
    (expected,) = torch.autograd.grad(loss, router.weight)
    assert torch.cosine_similarity(actual.flatten(), expected.flatten(), dim=0) > 1 - 1e-12
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kind", ["microbatch", "global_batch"])
def test_balance_gradients_of_other_kinds_are_those_of_megatron_core(kind: str) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    losses = {"aux_loss_coef": 0.0, "z_loss_coef": 0.0, "aux_losses": AuxLosses(**{kind: 0.3})}
    router, x_BND = build(replace(MOE, score_fn="sigmoid", **losses), reduction="mean"), tokens()
    scores_TK, _ = router(x_BND)
    (actual,) = torch.autograd.grad((0.0 * scores_TK).sum(), router.weight)
    logits_TE = (x_BND @ router.weight.T).flatten(0, 1)
    counted_TE, probs_TE = moe_utils.compute_routing_scores_for_aux_loss(logits_TE, MOE.top_k, "sigmoid")
    sizes = (len(logits_TE), MOE.top_k, MOE.num_experts)
    loss = moe_utils.switch_load_balancing_loss_func(probs_TE, counted_TE.sum(0), *sizes, 0.3)
    torch.testing.assert_close(router.balance.aux_loss, loss.detach(), atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(actual, torch.autograd.grad(loss, router.weight)[0], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("aux_loss_coef", [0.0, 0.3])
def test_balance_counts_by_score_only_for_a_loss(aux_loss_coef: float) -> None:
    assert build(replace(MOE, aux_loss_coef=aux_loss_coef)).rule.counts_by_score == (aux_loss_coef > 0)


@pytest.mark.parametrize("reduction", WEIGHTS)
def test_balance_loss_of_perfect_balance_is_the_coefficient(reduction: str) -> None:
    # all experts are selected: f is 1, and P sums to 1
    router = build(replace(MOE, z_loss_coef=0.0, top_k=8), reduction=reduction)
    router(tokens())[0].sum().backward()
    assert router.balance.aux_loss.item() == pytest.approx(0.3 * SEQUENCES * TOKENS * WEIGHTS[reduction])


def test_balance_microbatches_add_up_to_the_batch() -> None:
    whole, parts, x_BND = build(), build(), tokens()
    direction_BNK = torch.randn(SEQUENCES, TOKENS, MOE.top_k, dtype=torch.float64)
    (whole(x_BND)[0] * direction_BNK.flatten(0, 1)).sum().backward()
    for x_ND, direction_NK in zip(x_BND, direction_BNK, strict=True):
        (parts(x_ND[None])[0] * direction_NK).sum().backward()
    torch.testing.assert_close(parts.weight.grad, whole.weight.grad, atol=1e-10, rtol=0)
    torch.testing.assert_close(parts.balance.aux_loss, whole.balance.aux_loss, atol=1e-10, rtol=0)
    assert torch.equal(parts.balance.tokens_per_expert_E, whole.balance.tokens_per_expert_E)


def expected_counts(router: TopKRouter) -> Tensor:
    with torch.no_grad():
        return torch.bincount(router(tokens(torch.float32))[1].flatten(), minlength=MOE.num_experts)


def recomputed(router: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    return lambda x_BND: checkpoint(router, x_BND, use_reentrant=False)


def compiled(router: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    torch._dynamo.reset()
    return torch.compile(router, backend="aot_eager", fullgraph=True)


MODES = {
    "eager": lambda router: router,
    "recomputed": recomputed,
    "compiled": compiled,
    "recomputed outside compiled": lambda router: recomputed(compiled(router)),
    "recomputed inside compiled": lambda router: compiled(recomputed(router)),
}


@pytest.mark.parametrize(
    "mode", [*list(MODES)[:2], *(pytest.param(m, marks=pytest.mark.slow) for m in list(MODES)[2:])]
)
def test_balance_counts_accumulate_once_per_backward(mode: str) -> None:
    plain, router = (build(dtype=torch.float32, reduction="mean") for _ in range(2))
    counts_E, run = expected_counts(plain), MODES[mode](router)
    plain(tokens(torch.float32))[0].square().sum().backward()
    for passes in (1, 2, 3):
        scores_TK, _ = run(tokens(torch.float32))
        assert torch.equal(router.balance.tokens_per_expert_E, (passes - 1) * counts_E), "forward does not count"
        scores_TK.square().sum().backward()
        assert torch.equal(router.balance.tokens_per_expert_E, passes * counts_E)
    torch.testing.assert_close(router.balance.aux_loss, 3 * plain.balance.aux_loss)
    torch.testing.assert_close(router.weight.grad, 3 * plain.weight.grad)


@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_balance_counts_with_several_microbatches_in_flight(mode: str) -> None:
    router = build(dtype=torch.float32)
    counts_E, run = expected_counts(router), MODES[mode](router)
    in_flight = [run(tokens(torch.float32))[0].sum() for _ in range(3)]
    for loss in in_flight:
        loss.backward()
    assert torch.equal(router.balance.tokens_per_expert_E, 3 * counts_E)


@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_balance_counts_nothing_in_validation(mode: str) -> None:
    router = build(dtype=torch.float32)
    run = MODES[mode](router)
    with torch.no_grad():
        run(tokens(torch.float32))
    with torch.inference_mode():
        run(tokens(torch.float32))
    assert not router.balance.tokens_per_expert_E.any() and router.balance.aux_loss == 0


def test_balance_buffers_are_not_persistent_and_can_be_reset() -> None:
    router = build()
    router(tokens())[0].sum().backward()
    assert not any("balance" in name for name in router.state_dict())
    router.balance.scale.fill_(3.0)
    router.balance.reset_buffers()
    assert not router.balance.tokens_per_expert_E.any()
    assert (router.balance.aux_loss.item(), router.balance.scale.item()) == (0.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_balance_sums_and_scale_keep_fp32_in_a_narrow_model(dtype: torch.dtype) -> None:
    wide, narrow = build(dtype=torch.float32), build(dtype=torch.float32).to(dtype)
    narrow.load_state_dict(wide.state_dict())
    for router in (wide, narrow):
        scale_balancing_losses(router, 1e-7, reduction="sum")  # one over many tokens; 1.2e-7 in fp16
    x_BND = tokens(torch.float32).detach()
    for _ in range(300):  # in bf16 a sum ends where a term is below its last digit
        for router, x in ((wide, x_BND), (narrow, x_BND.to(dtype))):
            router(x)[0].sum().backward()
    torch.testing.assert_close(narrow.balance.aux_loss, wide.balance.aux_loss, rtol=0.02, atol=0)


@pytest.mark.parametrize("shape", [(0, TOKENS, WIDTH), (SEQUENCES, 0, WIDTH), (0, 0, WIDTH)])
def test_balance_of_no_tokens_is_zero(shape: tuple[int, ...]) -> None:
    router, x_BND = build(), torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    router(x_BND)[0].sum().backward()
    assert router.balance.aux_loss == 0 and not router.balance.tokens_per_expert_E.any()
    assert router.weight.grad is not None and not router.weight.grad.any()
