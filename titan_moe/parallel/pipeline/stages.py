"""Split a model into the stages of a pipeline, and keep a tied weight that is on two stages equal."""

from collections.abc import Callable, Collection
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.config import Recipe, RecipeError
from titan_moe.config.parallel import ParallelConfig
from titan_moe.models.part import module_names, part_of, tied_weight
from titan_moe.models.transformer import Transformer
from titan_moe.parallel.mesh import Meshes
from titan_moe.parameters import local
from titan_moe.plan.pipeline.stages import rank_of_stage, stages_of, stages_of_rank

PROBE_TOKENS = 16
"""Of the sequence that shows what a model's own forward computes in stages."""


def split(model: nn.Module, recipe: Recipe, meshes: Meshes) -> list[nn.Module]:
    """This rank's stages of a model on the meta device, in the order of the stages; the model itself without `pp`.

    Raises: RecipeError if a model of the user's own cannot be split.
    """
    if recipe.parallel.pp == 1:
        return [model]
    stages = stages_of(recipe)
    numbers = stages_of_rank(meshes.dense.get_local_rank("pp"), recipe.parallel)
    try:
        _check_interface(model, recipe, stages)
        return [part_of(model, stages[number]) for number in numbers]
    except (ValueError, AttributeError) as error:
        problem = (
            f'model.class = "{recipe.model.class_}" cannot be split into parallel.pp = {recipe.parallel.pp} stages'
        )
        raise RecipeError([f"{problem}: {error}"]) from error


def _check_interface(model: nn.Module, recipe: Recipe, stages: Collection[Collection[str]]) -> None:
    """Refuse a model that stages would compute otherwise than one rank does.

    Raises: ValueError if its blocks have no names, if it has modules or parameters that are in no stage, or if its
    forward does more than call its modules one after the other.
    """
    if not isinstance(layers := model.get_submodule("layers"), nn.ModuleDict):
        kind = type(layers).__name__
        raise ValueError(f"its layers are a {kind}; keep them in an nn.ModuleDict, each with its number as key")
    own = [name for name, _ in model.named_parameters(recurse=False)]
    if others := set(module_names(model)).union(own).difference(*stages):
        known = "of a model's own modules stages have embed, layers, norm and head"
        raise ValueError(f"no stage has its {', '.join(sorted(others))}; {known}: move them into one of these")
    if type(model).forward is not Transformer.forward:
        _check_forward(_with_stand_ins(model, recipe), recipe, stages)


@torch.no_grad()
def _check_forward(model: nn.Module, recipe: Recipe, stages: Collection[Collection[str]]) -> None:
    """Refuse a forward that computes otherwise in stages. One that needs more of its modules than stand-ins have cannot
    be judged.

    Raises: ValueError.
    """
    tokens_BN = torch.arange(min(recipe.train.seq_len_tokens, PROBE_TOKENS)).unsqueeze(0)
    rest = tokens_BN % recipe.model.vocab_size, torch.zeros_like(tokens_BN) if recipe.data.document_attention else None
    try:
        expected = model(tokens_BN, *rest)
    except Exception:
        return
    value = tokens_BN
    for kept in stages:
        try:
            value = part_of(model, kept)(value, *rest)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise ValueError(f"its forward fails in the stage of {', '.join(kept) or 'no module'}: {reason}") from error
    if value.dtype != expected.dtype or not torch.equal(value, expected):
        raise ValueError(
            "its forward does more than call embed, layers, norm and head one after the other, or counts its layers, "
            "and stages would compute something else; move that into one of these"
        )


def _with_stand_ins(model: nn.Module, recipe: Recipe) -> nn.Module:
    """A copy of a model whose modules are cheap and have no weights, each with another function."""
    width, vocab_size = recipe.model.hidden_size, recipe.model.vocab_size
    row_D = torch.linspace(-1.0, 2.0, width, dtype=torch.float64)

    def head(x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = x.mean(-1, keepdim=True).expand(*x.shape[:-1], vocab_size)
        return logits if labels is None else (x * row_D).sum(-1).mul(labels + 1).sum()

    copy = deepcopy(model)
    copy.embed = _StandIn(lambda tokens: (tokens % 7 + 1).unsqueeze(-1) * row_D)
    names = [name for name, _ in model.get_submodule("layers").named_children()]
    blocks = {name: _StandIn(lambda x, *_, n=number: n - x.roll(n + 1, -1)) for number, name in enumerate(names)}
    copy.layers = nn.ModuleDict(blocks)
    copy.norm, copy.head = _StandIn(lambda x: x), _StandIn(head)
    return copy


class _StandIn(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor | None) -> Tensor:
        return self.function(*args)


def parts_by_stage(parts: list[nn.Module], p: ParallelConfig, meshes: Meshes) -> dict[int, nn.Module]:
    """This rank's parts by the numbers of their stages, in the order of the model."""
    return dict(zip(stages_of_rank(meshes.dense.get_local_rank("pp"), p), parts, strict=True))


class TiedEmbedding:
    """The weight of tied embeddings, which the first stage has for the embedding and the last one for the head.

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
    parts: list[nn.Module], p: ParallelConfig, meshes: Meshes, *, is_tied: bool
) -> TiedEmbedding | None:
    """The tied embedding of a pipeline, once its parts have their final parameters; None if this rank has none of it,
    or the whole model's embeddings are not tied (`is_tied`). Collective."""
    if p.pp == 1 or not is_tied:
        return None
    last_stage = p.pp * p.vpp - 1
    ends = [rank_of_stage(stage, p.pp, p.pp_schedule) for stage in (0, last_stage)]
    by_stage = parts_by_stage(parts, p, meshes)
    first, last = (tied_weight(by_stage[stage]) if stage in by_stage else None for stage in (0, last_stage))
    group = None
    if ends[0] != ends[1]:  # every rank takes part in the making of every group
        by_end = meshes.dense.mesh.flatten(1)[sorted(ends)]
        for ranks in by_end.T.tolist():
            made = dist.new_group(ranks)
            group = made if dist.get_rank() in ranks else group
    return TiedEmbedding(first, last, group) if first is not None or last is not None else None
