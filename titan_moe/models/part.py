"""Parts of a model, the stages of a pipeline."""

from collections import defaultdict
from collections.abc import Collection
from copy import deepcopy

from torch import Tensor, nn


class PassThrough(nn.Module):
    """Replaces a module of another part: returns its first input."""

    def forward(self, x: Tensor, *_: Tensor | None) -> Tensor:
        return x


def part_of(model: nn.Module, kept: Collection[str]) -> nn.Module:
    """Copy a model, which should be on the meta device, and delete all modules but `kept`.

    Names are those of the model's children and of its blocks: "embed", "layers.0", "norm", "head". Kept modules keep
    their names, so initial weights and checkpoints do not depend on the split. A part without the embedding takes
    hidden states [B, N, D]; one without the head returns them.

    Raises: ValueError for an unknown name, and for a weight in two parts.

    Example:
        >>> import torch
        >>> from titan_moe.config.model import ModelConfig
        >>> from titan_moe.models.transformer import Transformer
        >>> with torch.device("meta"):
        ...     model = Transformer(ModelConfig(num_layers=4))
        >>> last = part_of(model, ["layers.3", "norm", "head"])
        >>> [name for name, _ in last.layers.named_children()], type(last.embed).__name__
        (['3'], 'PassThrough')
    """
    for name in kept:
        if name not in _modules(model):
            raise ValueError(f"{name!r} is no module of the model; it has {', '.join(_modules(model))}")
    _refuse_shared_weights(model, kept)
    part = deepcopy(model)
    for name in _modules(model):
        if name in kept:
            continue
        owner, _, child = name.rpartition(".")
        if owner:
            del part.get_submodule(owner)[child]
        else:
            setattr(part, child, PassThrough())
    return part


def _modules(model: nn.Module) -> list[str]:
    """The names that a model can be split into."""
    names = []
    for name, child in model.named_children():
        names += [f"{name}.{key}" for key in child] if isinstance(child, nn.ModuleDict) else [name]
    return names


def _refuse_shared_weights(model: nn.Module, kept: Collection[str]) -> None:
    uses = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses[parameter].add(name)
    for names in uses.values():
        here = {name for name in names if any(name.startswith(f"{module}.") for module in kept)}
        if here and here != names:
            raise ValueError(
                f"{' and '.join(sorted(names))} are one weight and cannot be in two parts; keep them in one, "
                "or set model.embeddings_are_tied = false"
            )
