"""What an expert MLP multiplies by, as one value: the parameters of all experts that a rank computes.

e own experts · c clones of other ranks' experts · F hidden width · D width of a row

Clones lie behind a rank's own experts, in tensors of their own. A grouped GEMM takes one tensor, so the pieces are
joined for each call and freed: a copy of the weights, 4·(e+c)·F·D bytes in bf16 for `down`. Joined earlier, they would
be kept for backward in every layer, own weights twice.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
"""A named tuple's, as operations take them."""
MATRICES = ("gate_up", "down")
"""The parameters of experts without biases."""


class ExpertParameter(NamedTuple):
    """One parameter of all experts."""

    own: Tensor
    """[e, ...]."""
    clones: Tensor | None = None
    """[c, ...], if the rank has any."""

    def join(self) -> Tensor:
        """In one piece, [e + c, ...], in the memory order of the own experts."""
        if self.clones is None:
            return self.own
        pieces = [self.own, self.clones]
        return torch.cat(pieces) if self.own.stride(-1) == 1 else torch.cat([piece.mT for piece in pieces]).mT

    def map(self, function: Callable[[Tensor], Tensor]) -> "ExpertParameter":
        """The same for views of both pieces."""
        return ExpertParameter(function(self.own), None if self.clones is None else function(self.clones))


class ExpertWeights(NamedTuple):
    """The parameters of all experts; a named tuple, which `torch.compile`, FSDP2 and checkpointing see through.

    A field that experts may lack is None. Further ones (scales, adapters) are fields with a default.
    """

    gate_up: ExpertParameter
    """[e, 2, F, D]."""
    down: ExpertParameter
    """[e, D, F]."""
    gate_up_bias: ExpertParameter | None = None
    """[e, 2, F]."""
    down_bias: ExpertParameter | None = None
    """[e, D]."""

    def names(self) -> tuple[str, ...]:
        """The parameters that there are."""
        return tuple([name for name, parameter in zip(self._fields, self, strict=True) if parameter is not None])

    def tensors(self) -> list[Tensor]:
        """What an operation takes: the own pieces in the order of `names`, then the clones."""
        parameters = [parameter for parameter in self if parameter is not None]
        clones = [parameter.clones for parameter in parameters if parameter.clones is not None]
        return [*(parameter.own for parameter in parameters), *clones]

    @staticmethod
    def of(tensors: Tensors, names: tuple[str, ...] = MATRICES) -> "ExpertWeights":
        """The inverse of `tensors`: own pieces of these parameters, or own pieces and clones."""
        own, clones = tensors[: len(names)], tensors[len(names) :]
        pieces = zip(own, clones, strict=True) if clones else [(tensor,) for tensor in own]
        return ExpertWeights(**{name: ExpertParameter(*both) for name, both in zip(names, pieces, strict=True)})

    def join(self) -> "ExpertWeights":
        """Each parameter in one piece."""
        return ExpertWeights.of([parameter.join() for parameter in self if parameter is not None], self.names())

    def split(self, joined: Tensors) -> list[Tensor]:
        """Gradients of parameters in one piece -> those of `tensors`."""
        if self.gate_up.clones is None:
            return list(joined)
        num_own = self.gate_up.own.shape[0]
        return [*(grad[:num_own] for grad in joined), *(grad[num_own:] for grad in joined)]
