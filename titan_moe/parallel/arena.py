"""The arena of a model's experts: what backward needs of the rows of all layers."""

import torch
from torch import nn

from titan_moe.config import Recipe
from titan_moe.config.arena import has_arena
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.kernels.experts.arena import Arena
from titan_moe.kernels.experts.fp8.mlp import FP8_MLPS
from titan_moe.kernels.experts.fused_mlp import fused_expert_mlp
from titan_moe.layers.moe import MoE
from titan_moe.memory.recompute import RECOMPUTED
from titan_moe.parallel.fsdp import DTYPES
from titan_moe.plan.loads import layer_loads


def give_arena(model: nn.Module, recipe: Recipe, device: torch.device, capacity: ExpertCapacity) -> None:
    """Give `capacity` an arena, if ranks share memory, experts are fused and rows are bounded. Every forward of the
    model starts at its beginning.

    Where experts or blocks are recomputed, backward follows the forward of its layer, and there is room for one layer.
    So a recomputed block with several MoE layers, or a layer outside of blocks, has no arena.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    mlps = {moe.experts.mlp for moe in layers}
    is_fp8 = mlps <= set(FP8_MLPS)
    are_fused = is_fp8 or mlps == {fused_expert_mlp}
    shapes = {tuple(moe.experts.down.shape[1:]) for moe in layers}  # whole: experts are split over etp later
    if not are_fused or not has_arena(recipe, "fused") or len(shapes) != 1:
        return
    is_checkpointed = recipe.memory.recompute != "none"
    if recipe.memory.recompute == "block":
        blocks = RECOMPUTED["block"](model)
        counts = [sum(isinstance(module, MoE) for module in block.modules()) for block in blocks]
        if max(counts) > 1 or sum(counts) < len(layers):
            return
    ((width, hidden),) = shapes
    dtype = DTYPES[recipe.precision.compute]
    arena = Arena(width, hidden // recipe.parallel.etp, dtype, device, is_checkpointed=is_checkpointed, is_fp8=is_fp8)
    capacity.use_arena(arena, layer_loads(recipe)._replace(num_layers=len(layers)))
    model.register_forward_pre_hook(lambda *_: capacity.start_forward())
