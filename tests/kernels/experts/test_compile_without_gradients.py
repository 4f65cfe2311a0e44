"""The fused expert MLP and clones' weights are one graph: without gradients, as in validation, and with hidden states
that are computed again."""

import pytest
import torch
from support import load
from torch import Tensor

from titan_moe.kernels.experts.format import ExpertFormat
from titan_moe.kernels.experts.fp8.format import FP8_ROWWISE
from titan_moe.kernels.experts.fused_mlp import FusedMLP, fused_expert_mlp
from titan_moe.kernels.experts.plain import PLAIN
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.weights import ExpertWeights
from titan_moe.kernels.permute.rows import plan_slots

pytestmark = pytest.mark.slow
without_hidden = load("kernels/experts/test_weights_with_clones").without_hidden


def on_meta(num_clones: int) -> tuple[Tensor, ExpertSlots, list[Tensor]]:
    """Rows, slots and weights without memory."""
    rows_R, slots_SK, offsets_e, _ = plan_slots(torch.rand(6, 5 + num_clones).topk(3).indices, 5 + num_clones, 18)
    sizes = [(5, 2, 48, 64), (5, 64, 48), *[(num_clones, 2, 48, 64), (num_clones, 64, 48)][:num_clones]]
    slots = ExpertSlots(*(x.to("meta") for x in (rows_R, slots_SK, torch.rand(18), offsets_e)))
    return torch.empty(6, 64, device="meta"), slots, [torch.empty(size, device="meta") for size in sizes]


@pytest.mark.parametrize("num_clones", [0, 2])
def test_fused_mlp_compiles_without_gradients(num_clones: int) -> None:
    """Dynamo of torch 2.11 passes no context to a Function that has as many parameters as its call has arguments."""
    torch._dynamo.reset()
    x_SD, slots, weights = on_meta(num_clones)
    compiled = torch.compile(fused_expert_mlp, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert compiled(x_SD, slots, ExpertWeights.of(weights)).shape == (6, 64)


@pytest.mark.parametrize("num_clones", [0, 2])
@pytest.mark.parametrize("format", [PLAIN, FP8_ROWWISE], ids=["plain", "fp8"])
def test_hidden_states_are_computed_again_in_a_graph(format: ExpertFormat, num_clones: int) -> None:
    torch._dynamo.reset()
    x_SD, slots, weights = on_meta(num_clones)
    leaves = [leaf.requires_grad_() for leaf in (x_SD, slots.scores_R, *weights)]
    compiled = torch.compile(without_hidden(FusedMLP(format)), fullgraph=True, backend="aot_eager")
    compiled(x_SD, slots, ExpertWeights.of(weights)).sum().backward()
    assert all(leaf.grad.shape == leaf.shape for leaf in leaves)
