"""Create the arena of a rank: the buffer of the rows and hidden states of all layers that backward needs."""

from collections.abc import Collection

import torch
from torch import nn

from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.kernels.experts.arena import Arena
from titan_moe.kernels.experts.fused_mlp import FusedMLP
from titan_moe.layers.moe import MoE
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

    Layers whose experts are recomputed need no slab. If blocks are, the backward of a layer directly follows its
    recomputed forward, and the arena holds one layer. So there is no arena if a recomputed block has several MoE
    layers, or a MoE layer is outside of blocks.
    """
    recipe, layers = resolved.recipe, [module for module in model.modules() if isinstance(module, MoE)]
    mlps = [moe.experts.mlp for moe in layers]
    formats = {mlp.format.gemms.fprop: mlp.format for mlp in mlps if isinstance(mlp, FusedMLP)}
    are_fused = len(formats) == 1 and all(isinstance(mlp, FusedMLP) for mlp in mlps)
    shapes = {tuple(moe.experts.down.shape[1:]) for moe in layers}  # whole: experts are split over etp later
    if not are_fused or not resolved.fused_experts_have_arena or len(shapes) != 1:
        return
    again = resolved.recompute
    is_checkpointed = "block" in again.layers or not count_moe_layers(model, again.of("experts"))
    if "block" in resolved.recompute.layers:
        counts = [count_moe_layers(block) for block in model.get_submodule("layers").children()]
        if max(counts) > 1 or sum(counts) < len(layers):
            return
    ((width, features),) = shapes
    stages = resolved.stages_of_rank(pipeline_rank)
    with_rows = dict(zip(stages, (count_moe_layers(part, again.of("experts")) for part in parts), strict=True))
    with_hidden = (count_moe_layers(part, again.of("experts", "moe_act")) for part in parts)
    slabs = resolved.slabs(pipeline_rank, with_rows, dict(zip(stages, with_hidden, strict=True)))
    arena = Arena(
        width,
        features // recipe.parallel.etp,
        DTYPES[recipe.precision.compute],
        device,
        is_checkpointed=is_checkpointed,
        format=formats.popitem()[1],
        num_slabs=1 if is_checkpointed else slabs.number,
        num_delayed_slabs=0 if is_checkpointed else slabs.num_delayed,
    )
    loads = resolved.loads._replace(num_layers=slabs.num_layers, num_hidden_layers=slabs.num_hidden_layers)
    capacity.use_arena(arena, loads)
    for part in parts:
        if count_moe_layers(part, again.of("experts")):  # a forward of another part would overwrite a slab
            part.register_forward_pre_hook(lambda *_: capacity.start_forward())


def count_moe_layers(part: nn.Module, without: Collection[int] = ()) -> int:
    """Count the MoE layers of a part, outside of these blocks."""
    number = sum(isinstance(module, MoE) for module in part.modules())
    if not without:
        return number
    blocks = part.get_submodule("layers").named_children()
    return number - sum(count_moe_layers(block) for layer, block in blocks if int(layer) in without)
