"""Random routing at full size, as evenly as chance spreads it: inputs of benchmarks."""

import torch
from torch import Tensor

from titan_moe.kernels.permute.rows import plan_slots


def draw_experts(num_rows: int, num_experts: int, top_k: int, device: torch.device) -> Tensor:
    """The experts of each row [S, K]."""
    return torch.rand(num_rows, num_experts, device=device).topk(top_k).indices


def draw_plan(num_rows: int, num_experts: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """rows_R, slots_SK and offsets_e of such routing."""
    ids_SK = draw_experts(num_rows, num_experts, top_k, device)
    return plan_slots(ids_SK, num_experts, ids_SK.numel())[:3]
