"""What a parameter is, asked of the module that owns it.

Initial weights, weight decay and sharding treat a bias of experts, [e, D], otherwise than a matrix of the same shape. A
parameter cannot carry its kind itself, because parallelism replaces it by a DTensor. So a module's class declares
kinds by attribute name, and this file is the one place that asks.
"""

from collections.abc import Iterator, Mapping
from enum import Enum, auto

from torch import nn


class ParameterKind(Enum):
    """What a parameter does in its module."""

    MATRIX = auto()
    EXPERT_MATRIX = auto()
    """A matrix for each expert, the first dimension."""
    ROUTER = auto()
    EMBEDDING = auto()
    HEAD = auto()
    SCALE = auto()
    """The factors of a norm."""
    BIAS = auto()

    @property
    def is_matrix(self) -> bool:
        """Whether it maps one vector space to another, or is a table of vectors."""
        return self not in (ParameterKind.SCALE, ParameterKind.BIAS)


TORCH_KINDS: dict[type[nn.Module], Mapping[str, ParameterKind]] = {
    nn.Linear: {"weight": ParameterKind.MATRIX, "bias": ParameterKind.BIAS},
    nn.Embedding: {"weight": ParameterKind.EMBEDDING},
    nn.RMSNorm: {"weight": ParameterKind.SCALE},
    nn.LayerNorm: {"weight": ParameterKind.SCALE, "bias": ParameterKind.BIAS},
}
"""What torch's modules would declare."""


def kind_of(owner: nn.Module, attribute: str) -> ParameterKind:
    """Look up what the nearest class of the owner declares, in `parameter_kinds`, about one of its parameters.

    A parameter that no class knows is a bias if its name ends so, else a matrix from two dimensions on, else a scale.
    """
    for owner_class in type(owner).__mro__:
        kinds = vars(owner_class).get("parameter_kinds") or TORCH_KINDS.get(owner_class, {})
        if attribute in kinds:
            return kinds[attribute]
    if attribute.endswith("bias"):
        return ParameterKind.BIAS
    return ParameterKind.MATRIX if owner.get_parameter(attribute).ndim >= 2 else ParameterKind.SCALE


def named_kinds(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterKind]]:
    """Go through the parameters of a model in its order, each once, with name and kind; the first owner's counts."""
    for name, parameter in model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        yield name, parameter, kind_of(model.get_submodule(owner), attribute)


def residual_ends(model: nn.Module) -> set[str]:
    """Name the parameters that end a residual branch: their modules declare them, by relative names, in
    `residual_ends`. Of absent modules there may be names too."""
    return {
        f"{name}.{end}" if name else end
        for name, module in model.named_modules()
        for end in getattr(module, "residual_ends", ())
    }
