"""The parameters of all experts that a rank computes, as one value, and what is done to it before it is used.

e own experts · c clones of other ranks' experts · F hidden width · D width of a row

Clones follow a rank's own experts, in separate tensors. A grouped GEMM takes one tensor, so both are joined for each
call and freed: a copy of 4·(e+c)·F·D bytes in bf16 for `down`. If they were joined earlier, backward would keep the
copy in every layer, own weights twice. Own weights that are a copy anyway have room for clones behind them, and are one
tensor [e + c, ...] with them (dispatch/clones/weights.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
"""A named tuple's, as operations take them."""
MATRICES = ("gate_up", "down")
"""The parameters of experts without biases."""
BIASES = ("gate_up_bias", "down_bias")
"""Those that experts may have beside them."""


class ExpertParameter(NamedTuple):
    """One parameter of all experts."""

    own: Tensor
    """[e, ...]."""
    clones: Tensor | None = None
    """[c, ...], if the rank has any."""

    def join(self) -> Tensor:
        """One tensor [e + c, ...] in the memory order of the own experts."""
        if self.clones is None:
            return self.own
        pieces = [self.own, self.clones]
        return torch.cat(pieces) if self.own.stride(-1) == 1 else torch.cat([piece.mT for piece in pieces]).mT

    def map(self, function: Callable[[Tensor], Tensor]) -> "ExpertParameter":
        """Apply `function` to both tensors."""
        return ExpertParameter(function(self.own), None if self.clones is None else function(self.clones))


class ExpertWeights(NamedTuple):
    """The parameters of all experts, None for those that they lack.

    A named tuple, because `torch.compile`, FSDP2 and checkpointing find tensors inside tuples."""

    gate_up: ExpertParameter
    """[e, 2, F, D]."""
    down: ExpertParameter
    """[e, D, F]."""
    gate_up_bias: ExpertParameter | None = None
    """[e, 2, F]."""
    down_bias: ExpertParameter | None = None
    """[e, D]."""
    codes: tuple[Tensor, ...] = ()
    """The weights in the format of the MLP, as its operations take them, where they are made once for several uses, or
    stored. The contents of the parameters are then not read."""
    factors: tuple[Tensor, ...] = ()
    """Low-rank factors beside the matrices, for an MLP that applies them to rows."""
    scales: tuple[Tensor, ...] = ()
    """Of own matrices that are frozen and stored as codes (kernels/formats/stored.py)."""

    def names(self) -> tuple[str, ...]:
        """The parameters that are not None."""
        parameters = zip(self._fields[:-3], self[:-3], strict=True)
        return tuple([name for name, parameter in parameters if parameter is not None])

    def tensors(self) -> list[Tensor]:
        """As operations take them: own tensors in the order of `names`, then clones; without codes."""
        parameters = self._parameters()
        clones = [parameter.clones for parameter in parameters if parameter.clones is not None]
        return [*(parameter.own for parameter in parameters), *clones]

    @staticmethod
    def of(tensors: Tensors, names: tuple[str, ...] = MATRICES) -> "ExpertWeights":
        """The inverse of `tensors`."""
        own, clones = tensors[: len(names)], tensors[len(names) :]
        pieces = zip(own, clones, strict=True) if clones else [(tensor,) for tensor in own]
        return ExpertWeights(**{name: ExpertParameter(*both) for name, both in zip(names, pieces, strict=True)})

    def with_tensors(self, tensors: Tensors) -> "ExpertWeights":
        """The same with other `tensors`, which may include clones."""
        made = ExpertWeights.of(tensors, self.names())
        return made._replace(codes=self.codes, factors=self.factors, scales=self.scales)

    def join(self) -> "ExpertWeights":
        """Join each parameter."""
        return ExpertWeights.of([parameter.join() for parameter in self._parameters()], self.names())

    def _parameters(self) -> list[ExpertParameter]:
        return [parameter for parameter in self[:-3] if parameter is not None]

    def split(self, joined: Tensors) -> list[Tensor]:
        """Gradients of joined parameters -> those of `tensors`."""
        if self.gate_up.clones is None:
            return list(joined)
        num_own = self.gate_up.own.shape[0]
        return [*(grad[:num_own] for grad in joined), *(grad[num_own:] for grad in joined)]


class ExpertUse(NamedTuple):
    """One use of experts."""

    weights: ExpertWeights
    rows: Tensor | None = None
    """The dispatcher's rows, if they have arrived. They pass through a transform that communicates after them."""
    exchange: Any = None
    """The dispatcher's, with the rows."""


WeightTransform = Callable[[ExpertUse], ExpertUse]
"""A step on the way from parameters to what an MLP reads; differentiable."""


@dataclass(frozen=True)
class EachWeight:
    """The transform that maps each parameter by itself."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, use: ExpertUse) -> ExpertUse:
        weights = use.weights
        return use._replace(weights=weights.with_tensors([self.function(tensor) for tensor in weights.tensors()]))
