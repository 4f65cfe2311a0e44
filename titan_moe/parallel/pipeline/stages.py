"""Split a model into the stages of a pipeline, and keep a tied weight that is on two stages equal."""

import torch
import torch.distributed as dist
from torch import nn

from titan_moe.config import RecipeError
from titan_moe.models.part import part_of
from titan_moe.parallel.mesh import Meshes
from titan_moe.parallel.pipeline.interface import check_interface
from titan_moe.parameters import local
from titan_moe.plan.resolved import Resolved


def split(model: nn.Module, resolved: Resolved, meshes: Meshes) -> list[nn.Module]:
    """This rank's stages of a model on the meta device, in the order of the stages; the model itself without `pp`.

    Raises: RecipeError if a model of the user's own cannot be split.
    """
    if resolved.sizes.pp == 1:
        return [model]
    recipe, stages = resolved.recipe, resolved.stages
    numbers = resolved.stages_of_rank(meshes.dense.get_local_rank("pp"))
    try:
        check_interface(model, resolved)
        return [part_of(model, stages[number]) for number in numbers]
    except (ValueError, AttributeError) as error:
        problem = (
            f'model.class = "{recipe.model.class_}" cannot be split into parallel.pp = {recipe.parallel.pp} stages'
        )
        raise RecipeError([f"{problem}: {error}"]) from error


def parts_by_stage(parts: list[nn.Module], resolved: Resolved, meshes: Meshes) -> dict[int, nn.Module]:
    """This rank's parts by the numbers of their stages, in the order of the model."""
    return dict(zip(resolved.stages_of_rank(meshes.dense.get_local_rank("pp")), parts, strict=True))


class TiedEmbedding:
    """The weight of the embedding where the first stage has it, and the last one too: for the head, whose weight it is,
    or for multi-token prediction.

    Both ranks add the same gradients in the same order, so the two weights stay equal, bit for bit.
    """

    def __init__(self, first: nn.Parameter | None, last: nn.Parameter | None, group: dist.ProcessGroup | None) -> None:
        """The weights of this rank, of which it may have one or both; `group` has the ranks of both, if they differ."""
        self.weights = [weight for weight in (first, last) if weight is not None]
        self.group = group

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add the gradients of both stages, after the last backward of a step. Collective where ranks differ."""
        grads = [local(weight.grad) for weight in self.weights if weight.grad is not None]
        if self.group is not None:
            dist.all_reduce(grads[0], group=self.group)
        elif len(grads) == 2:
            total = grads[0] + grads[1]
            for grad in grads:
                grad.copy_(total)


def find_tied_embedding(
    parts: list[nn.Module], resolved: Resolved, meshes: Meshes, *, is_tied: bool
) -> TiedEmbedding | None:
    """The embedding of a pipeline that two stages have, once its parts have their final parameters; None if this rank
    has none of it, or only one stage of the whole model has it (not `is_tied`). Collective."""
    if resolved.sizes.pp == 1 or not is_tied:
        return None
    by_stage, ranks = parts_by_stage(parts, resolved, meshes), resolved.ranks
    first, last = (_embedding(by_stage[stage]) if stage in by_stage else None for stage in (0, len(ranks) - 1))
    if any(weight is not None and not weight.requires_grad for weight in (first, last)):
        first = last = None  # frozen: there is no gradient to add
    ends = ranks[0], ranks[-1]
    group = None
    if ends[0] != ends[1]:  # every rank takes part in the making of every group
        by_end = meshes.dense.mesh.flatten(1)[sorted(ends)]
        for ranks in by_end.T.tolist():
            made = dist.new_group(ranks)
            group = made if dist.get_rank() in ranks else group
    return TiedEmbedding(first, last, group) if first is not None or last is not None else None


def _embedding(part: nn.Module) -> nn.Parameter | None:
    return part.get_submodule("embed")._parameters.get("weight")
