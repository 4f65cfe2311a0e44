"""The symmetric memory of an expert-parallel group, opened once a run for all layers."""

import torch
import torch.distributed as dist
from torch import nn

from titan_moe.config import RecipeError
from titan_moe.config.dispatchers import dispatchers_that
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.hierarchical import NodeGroups
from titan_moe.dispatch.missing_rank import MissingRank
from titan_moe.dispatch.symm_mem.memory import SymmMemory, open_symm_memory
from titan_moe.kernels.symm_mem.arrays import symm_bytes
from titan_moe.kernels.symm_mem.barrier import SPIN_LIMIT_SECONDS
from titan_moe.kernels.symm_mem.clones import clone_bytes
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.moe import MoE
from titan_moe.parallel.fsdp import DTYPES
from titan_moe.parallel.mesh import Meshes
from titan_moe.plan.resolved import Resolved


def share_memory(
    model: nn.Module,
    resolved: Resolved,
    meshes: Meshes,
    device: torch.device,
    capacity: ExpertCapacity,
    nodes: NodeGroups | None = None,
) -> SymmMemory | None:
    """Open the buffer of the model's exchanges if the recipe's dispatcher shares memory; a collective call.

    The ranks of the ep group share it, or, with a hierarchical dispatcher, the ranks of this node.

    All layers use one buffer, one after the other. It holds the worst case of the run's largest batch, also if the
    recipe bounds rows, because a step that overflows is repeated without the bound. At another time it holds the cloned
    experts of a layer. If a rank misses an exchange, the step is skipped through `capacity`, and the error names the
    rank.

    Raises: RecipeError if these GPUs cannot reach each other's memory.
    """
    recipe, num_replicas = resolved.recipe, resolved.num_clones
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not recipe.parallel.facts.shares_memory or not layers:
        return None
    group, num_nodes = (meshes.ep.get_group(), 1) if nodes is None else (nodes.within, nodes.across.size())
    rows, num_ranks = DTYPES[recipe.precision.compute], group.size()
    num_bytes = symm_bytes(
        num_ranks,
        num_nodes * resolved.max_batch_tokens,
        width=max(moe.experts.down.shape[1] for moe in layers),
        top_k=max(moe.router.rule.top_k for moe in layers),
        row_dtype=rows,
        score_dtype=torch.promote_types(rows, torch.float32),
    )
    if num_replicas and nodes is None:
        for experts in [moe.experts for moe in layers]:
            num_local, elements = len(experts.down) // num_ranks, _elements_of_an_expert(experts, recipe.parallel.etp)
            num_bytes = max(num_bytes, clone_bytes(num_ranks, num_local, num_replicas, elements, rows))
    try:
        memory = open_symm_memory(num_bytes, group, device)
    except (RuntimeError, ValueError) as error:
        others = dispatchers_that(lambda facts: facts.moves_rows and not facts.shares_memory)
        setting = f'parallel.dispatcher = "{recipe.parallel.dispatcher}"'
        raise RecipeError([f"{setting} cannot share memory here: {error}; take {others}"]) from error
    # half: then the ranks that are not late end within the limit of a step, with the name of the one that is
    limit_seconds = 60 * recipe.run.step_timeout_minutes / 2 or SPIN_LIMIT_SECONDS
    missing = MissingRank(memory.local, dist.get_process_group_ranks(group), limit_seconds)
    capacity.failed, capacity.check = missing.failed, missing.check
    return memory


def _elements_of_an_expert(experts: GroupedExperts, etp: int) -> int:
    """Elements of a rank's part of an expert whose hidden width will be split over etp ranks."""
    parts = {name: etp if "F" in dims else 1 for name, dims in experts.parameter_dims.items()}
    return sum(weight[0].numel() // parts[name] for name, weight in experts.named_parameters(recurse=False))
