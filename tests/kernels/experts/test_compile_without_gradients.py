"""The fused expert MLP and clones' weights compile as one graph where no gradient is wanted, as in validation."""

import pytest
import torch

from titan_moe.kernels.experts.fused_mlp import fused_expert_mlp
from titan_moe.kernels.experts.slots import ExpertSlots
from titan_moe.kernels.experts.weights import ExpertWeights
from titan_moe.kernels.permute.rows import plan_slots

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("num_clones", [0, 2])
def test_fused_mlp_compiles_without_gradients(num_clones: int) -> None:
    """Dynamo of torch 2.11 passes no context to a Function that has as many parameters as its call has arguments."""
    torch._dynamo.reset()
    rows_R, slots_SK, offsets_e, _ = plan_slots(torch.rand(6, 5 + num_clones).topk(3).indices, 5 + num_clones, 18)
    sizes = [(5, 2, 40, 64), (5, 64, 40), *[(num_clones, 2, 40, 64), (num_clones, 64, 40)][:num_clones]]
    slots = ExpertSlots(*(x.to("meta") for x in (rows_R, slots_SK, torch.rand(18), offsets_e)))
    weights = ExpertWeights.of([torch.empty(size, device="meta") for size in sizes])
    compiled = torch.compile(fused_expert_mlp, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert compiled(torch.empty(6, 64, device="meta"), slots, weights).shape == (6, 64)
