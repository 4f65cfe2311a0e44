"""What a model of one's own must be so that stages compute what the whole model does."""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

from titan_moe.config.model import ModelConfig
from titan_moe.models.part import module_names, part_of
from titan_moe.models.transformer import Transformer
from titan_moe.plan.resolved import Resolved

PROBE_TOKENS = 16
"""Of the sequence that shows what a model's own forward computes in stages."""


def check_interface(model: nn.Module, resolved: Resolved) -> None:
    """Refuse a model that stages would compute otherwise than one rank does.

    Raises: ValueError if its blocks have no names, if it has modules or parameters that are in no stage, or if its
    forward does more than call its modules one after the other.
    """
    if not isinstance(layers := model.get_submodule("layers"), nn.ModuleDict):
        kind = type(layers).__name__
        raise ValueError(f"its layers are a {kind}; keep them in an nn.ModuleDict, each with its number as key")
    own = [name for name, _ in model.named_parameters(recurse=False)]
    if others := set(module_names(model)).union(own).difference(*resolved.stages):
        known = "of a model's own modules stages have embed, layers, norm and head"
        raise ValueError(f"no stage has its {', '.join(sorted(others))}; {known}: move them into one of these")
    if type(model).forward is not Transformer.forward:
        _check_forward(_with_stand_ins(model, resolved.recipe.model), resolved)


@torch.no_grad()
def _check_forward(model: nn.Module, resolved: Resolved) -> None:
    """Refuse a forward that computes otherwise in stages. One that needs more of its modules than stand-ins have cannot
    be judged.

    Raises: ValueError.
    """
    recipe = resolved.recipe
    tokens_BN = torch.arange(min(recipe.train.seq_len_tokens, PROBE_TOKENS)).unsqueeze(0)
    rest = tokens_BN % recipe.model.vocab_size, torch.zeros_like(tokens_BN) if recipe.data.document_attention else None
    try:
        expected = model(tokens_BN, *rest)
    except Exception:
        return
    value = tokens_BN
    for kept in resolved.stages:
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


def _with_stand_ins(model: nn.Module, config: ModelConfig) -> nn.Module:
    """A copy of a model whose modules are cheap and have no weights, each with another function."""
    row_D = torch.linspace(-1.0, 2.0, config.hidden_size, dtype=torch.float64)

    def head(x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = x.mean(-1, keepdim=True).expand(*x.shape[:-1], config.vocab_size)
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
