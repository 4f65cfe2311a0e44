"""The memory that the ranks of an expert-parallel group share, opened once for all layers and all of a run."""

import torch
from torch import nn

from titan_moe.config import Recipe, RecipeError
from titan_moe.config.dispatchers import dispatchers_that
from titan_moe.config.recipe import max_batch_tokens
from titan_moe.dispatch.symm_mem import SymmMemory, open_symm_memory
from titan_moe.kernels.symm_mem.arrays import symm_bytes
from titan_moe.kernels.symm_mem.clones import clone_bytes
from titan_moe.layers.moe import MoE
from titan_moe.parallel.fsdp import DTYPES
from titan_moe.parallel.mesh import Meshes


def share_memory(model: nn.Module, recipe: Recipe, meshes: Meshes, device: torch.device) -> SymmMemory | None:
    """Open what the model's exchanges need if the recipe's dispatcher shares memory; every rank must call it.

    One piece serves all layers, because their exchanges follow each other. It holds the worst case of the largest
    batch that the run sends through the model, also where the recipe bounds rows: a step that does not fit is taken
    again without the bound; and it holds a layer's cloned experts, in their turn.

    Raises: RecipeError if these GPUs cannot reach each other's memory.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not recipe.parallel.facts.shares_memory or not layers:
        return None
    rows, group = DTYPES[recipe.precision.compute], meshes.ep.get_group()
    num_ranks = group.size()
    num_bytes = symm_bytes(
        num_ranks,
        max_batch_tokens(recipe),
        width=max(moe.experts.down.shape[1] for moe in layers),
        top_k=max(moe.router.rule.top_k for moe in layers),
        row_dtype=rows,
        score_dtype=torch.promote_types(rows, torch.float32),
    )
    num_clones = recipe.parallel.expert_clones
    if num_clones:
        for weights in [list(moe.experts.parameters()) for moe in layers]:
            num_local, elements = len(weights[0]) // num_ranks, sum(weight[0].numel() for weight in weights)
            num_bytes = max(num_bytes, clone_bytes(num_ranks, num_local, num_clones, elements, rows))
    try:
        return open_symm_memory(num_bytes, group, device)
    except (RuntimeError, ValueError) as error:
        others = dispatchers_that(lambda facts: facts.moves_rows and not facts.shares_memory)
        problem = (
            f'parallel.dispatcher = "{recipe.parallel.dispatcher}" cannot share memory here: {error}; take {others}'
        )
        raise RecipeError([problem]) from error
