"""Parts of a model, the stages of a pipeline."""

from collections import defaultdict
from collections.abc import Collection
from copy import deepcopy

from torch import Tensor, nn

from titan_moe.layers.hash_router import routes_by_token
from titan_moe.layers.mtp import MTPBlock
from titan_moe.parameters import ParameterKind

TIED = "embed", "head"
"""The modules of tied embeddings."""


class PassThrough(nn.Module):
    """Replaces a module of another part: returns its first input."""

    def forward(self, x: Tensor, *_: Tensor | None) -> Tensor:
        return x


class PassThroughWithEmbedding(PassThrough):
    """The same, and holds the weight that it shares with a module of this part, so that the weight keeps its name."""

    parameter_kinds = {"weight": ParameterKind.EMBEDDING}

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def part_of(model: nn.Module, kept: Collection[str]) -> nn.Module:
    """Copy a model, which should be on the meta device, and delete all modules but `kept`.

    Names are those of the model's children and of its blocks: "embed", "layers.0", "norm", "head". Kept modules keep
    their names, so initial weights and checkpoints do not depend on the split. A part without the embedding takes
    hidden states [B, N, D]; one without the head returns them. The weight of tied embeddings is in the part of the
    embedding and in that of the head, with both names; the sum of its two gradients is for the caller. So it is with
    the embedding of multi-token prediction, which its part has too.

    Raises: ValueError for an unknown name, and for any other weight in two parts.

    Example:
        >>> import torch
        >>> from titan_moe.config.model import ModelConfig
        >>> from titan_moe.models.transformer import Transformer
        >>> with torch.device("meta"):
        ...     model = Transformer(ModelConfig(num_layers=4, ffn_hidden_size=256))
        >>> last = part_of(model, ["layers.3", "norm", "head"])
        >>> [name for name, _ in last.layers.named_children()], type(last.embed).__name__
        (['3'], 'PassThrough')
    """
    for name in kept:
        if name not in module_names(model):
            raise ValueError(f"{name!r} is no module of the model; it has {', '.join(module_names(model))}")
    kept = with_embedding_of_mtp(model, kept)
    _refuse_shared_weights(model, kept)
    part = deepcopy(model)
    shared = tied_weight(part) if set(TIED) & set(kept) else None
    for name in module_names(model):
        if name in kept:
            continue
        owner, _, child = name.rpartition(".")
        if owner:
            del part.get_submodule(owner)[child]
        elif shared is not None and name in TIED:
            setattr(part, child, PassThroughWithEmbedding(shared))
        else:
            setattr(part, child, PassThrough())
    return part


def with_embedding_of_mtp(model: nn.Module, kept: Collection[str]) -> Collection[str]:
    """The modules of a part, with the embedding if blocks of multi-token prediction are among them."""
    blocks = (model.get_submodule(name) for name in kept if name.startswith("layers."))
    return {*kept, "embed"} if any(isinstance(block, MTPBlock) for block in blocks) else kept


def reads_tokens(part: nn.Module) -> bool:
    """Whether a part reads the ids of tokens, also without the embedding: its blocks of multi-token prediction embed
    them again, or layers route by them."""
    return routes_by_token(part) or any(isinstance(module, MTPBlock) for module in part.modules())


def tied_weight(model: nn.Module) -> nn.Parameter | None:
    """The weight of tied embeddings, the embedding's and the head's; None where they are two."""
    modules = (getattr(model, name, None) for name in TIED)
    embedding, head = (
        module._parameters.get("weight") if isinstance(module, nn.Module) else None for module in modules
    )
    return embedding if embedding is head else None


def module_names(model: nn.Module) -> list[str]:
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
        if names == {f"{name}.weight" for name in TIED}:
            continue
        here = {name for name in names if any(name.startswith(f"{module}.") for module in kept)}
        if here and here != names:
            raise ValueError(
                f"{' and '.join(sorted(names))} are one weight and cannot be in two parts; keep them in one"
            )
