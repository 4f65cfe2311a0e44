"""Quantile balancing: biases are the quantiles of all margins, and balance the load."""

import pytest
import torch
from torch import Tensor

from titan_moe.kernels.router.quantiles import NUM_BINS, balanced_biases, count_margins

TOKENS, TOP_K = 700, 3


def scores(score_fn: str, num_experts: int = 10) -> Tensor:
    torch.manual_seed(0)
    logits_BNE = 2 * torch.randn(1, TOKENS, num_experts, dtype=torch.float64) + torch.linspace(-2, 2, num_experts)
    return logits_BNE.sigmoid() if score_fn == "sigmoid" else logits_BNE.softmax(-1)


@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
def test_biases_are_the_quantiles_of_margins(score_fn: str) -> None:
    """Against a sort: beta of Megatron Core's quantile balancing, the value after the expert's share of a column."""
    scores_BNE, bias_E = scores(score_fn), torch.linspace(-0.1, 0.1, 10, dtype=torch.float64)
    threshold_BN1 = (scores_BNE + bias_E).sort(-1, descending=True).values[..., TOP_K : TOP_K + 1]
    margins_TE = (scores_BNE - threshold_BN1)[0].sort(0, descending=True).values
    betas_E = margins_TE[TOKENS * TOP_K // 10]
    actual_E = balanced_biases(count_margins(scores_BNE, bias_E, TOP_K), TOP_K)
    bin_width_E = 2 / NUM_BINS * (2 * betas_E.abs().sqrt() + 2 / NUM_BINS)
    assert ((actual_E + betas_E).abs() <= bin_width_E).all()


def test_margins_of_parts_add_up() -> None:
    scores_BNE, bias_E = scores("sigmoid"), torch.zeros(10, dtype=torch.float64)
    parts = sum(count_margins(part, bias_E, TOP_K) for part in scores_BNE.split(64, dim=1))
    assert torch.equal(parts, count_margins(scores_BNE, bias_E, TOP_K)) and (parts.sum(1) == TOKENS).all()


@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
def test_a_few_steps_balance_the_load(score_fn: str) -> None:
    scores_BNE, bias_E = scores(score_fn), torch.zeros(10, dtype=torch.float64)
    loads = []
    for _ in range(8):
        counts_E = torch.bincount((scores_BNE + bias_E).topk(TOP_K).indices.flatten(), minlength=10)
        loads.append((counts_E.max() / counts_E.double().mean()).item())
        bias_E = balanced_biases(count_margins(scores_BNE, bias_E, TOP_K), TOP_K)
        bias_E -= bias_E.mean()
    assert loads[0] > 1.6 and loads[-1] < 1.1, loads
