"""Create the arena of a rank: the buffer of the rows and hidden states of all layers that backward needs."""

import torch
from torch import nn

from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.kernels.experts.arena import Arena
from titan_moe.kernels.experts.fused_mlp import FusedMLP
from titan_moe.layers.moe import MoE
from titan_moe.memory.recompute import RECOMPUTED
from titan_moe.parallel.fsdp import DTYPES
from titan_moe.plan.resolved import Resolved


def give_arena(
    model: nn.Module,
    parts: list[nn.Module],
    resolved: Resolved,
    device: torch.device,
    capacity: ExpertCapacity,
    *,
    pipeline_rank: int = 0,
) -> None:
    """Give `capacity` an arena, if ranks share memory, experts are fused and rows are bounded. Every forward of a part
    starts at the beginning of a slab.

    All ranks of a pipeline decide alike, from the whole model; a rank without MoE layers has an empty arena. `parts`
    are the stages of this rank. The arena has as many slabs as microbatches are in flight in them, and as many delayed
    ones as wait for weight gradients.

    If experts or blocks are recomputed, the backward of a layer directly follows its recomputed forward, and the arena
    holds one layer. So there is no arena if a recomputed block has several MoE layers, or a MoE layer is outside of
    blocks.
    """
    recipe, layers = resolved.recipe, [module for module in model.modules() if isinstance(module, MoE)]
    mlps = [moe.experts.mlp for moe in layers]
    formats = {mlp.format.gemms.fprop: mlp.format for mlp in mlps if isinstance(mlp, FusedMLP)}
    are_fused = len(formats) == 1 and all(isinstance(mlp, FusedMLP) for mlp in mlps)
    shapes = {tuple(moe.experts.down.shape[1:]) for moe in layers}  # whole: experts are split over etp later
    if not are_fused or not resolved.fused_experts_have_arena or len(shapes) != 1:
        return
    is_checkpointed = recipe.memory.recompute != "none"
    if recipe.memory.recompute == "block":
        counts = [count_moe_layers(block) for block in RECOMPUTED["block"](model)]
        if max(counts) > 1 or sum(counts) < len(layers):
            return
    ((width, hidden),) = shapes
    stages = zip(resolved.stages_of_rank(pipeline_rank), parts, strict=True)
    of_stages = {stage: count_moe_layers(part) for stage, part in stages}
    slabs = resolved.slabs(pipeline_rank, of_stages)
    arena = Arena(
        width,
        hidden // recipe.parallel.etp,
        DTYPES[recipe.precision.compute],
        device,
        is_checkpointed=is_checkpointed,
        format=formats.popitem()[1],
        num_slabs=1 if is_checkpointed else slabs.number,
        num_delayed_slabs=0 if is_checkpointed else slabs.num_delayed,
    )
    capacity.use_arena(arena, resolved.loads._replace(num_layers=slabs.num_layers))
    for part in parts:
        if count_moe_layers(part):  # a forward of another part would overwrite a slab
            part.register_forward_pre_hook(lambda *_: capacity.start_forward())


def count_moe_layers(part: nn.Module) -> int:
    """Count the layers whose rows the arena keeps."""
    return sum(isinstance(module, MoE) for module in part.modules())
