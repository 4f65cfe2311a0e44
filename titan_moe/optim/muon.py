"""Muon (kellerjordan.github.io/posts/muon, arXiv:2502.16982) for matrices, AdamW for everything else."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titan_moe.config import optimizers
from titan_moe.config.muon import MuonConfig
from titan_moe.kernels.optim.muon import Decay, Momentum, accumulate_momentum, step_weight
from titan_moe.kernels.optim.newton_schulz import orthogonalise_parts
from titan_moe.optim.fused_adamw import FusedAdamW
from titan_moe.optim.owners import Split, on_owners, split_of
from titan_moe.optim.state import put_lr_on_device
from titan_moe.parameters import ParameterKind, local, named_kinds, remainder_of, shard_offsets

MATRICES = (ParameterKind.MATRIX, ParameterKind.EXPERT_MATRIX)
"""The kinds of parameters that Muon updates. Embeddings, heads and routers are tables of vectors that belong to a token
or an expert each, and keep AdamW, as adapters do."""


def muon_matrices(part: nn.Module) -> dict[nn.Parameter, str]:
    """The trainable parameters that Muon updates, with their names. A matrix of one row or column is a vector."""
    return {
        parameter: name
        for name, parameter, kind in named_kinds(part)
        if parameter.requires_grad and kind in MATRICES and parameter.ndim >= 2 and min(parameter.shape[-2:]) > 1
    }


class Matrices(NamedTuple):
    """The matrices of a parameter, as Muon sees them."""

    split: Split
    rows: tuple[int, ...]  # of each, of a fused weight; else empty
    ratio: float | Tensor
    """Of the learning rate, by the shape of a matrix; a column of the local rows if fused matrices differ in it."""

    def stack(self, tensor: Tensor) -> Tensor:
        """The local shards of all matrices, of the parameter or of a tensor of its shape: a view."""
        return tensor.view(math.prod(tensor.shape[:-2]), *self.split.own_shape)


class Piece(NamedTuple):
    """Some matrices of a parameter, local shards: stacks."""

    param_nrc: Tensor
    grad_nrc: Tensor
    buffer_nrc: Tensor
    remainder_nrc: Tensor | None  # of split masters
    matrices: Matrices


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz, for matrices; our AdamW for embeddings, heads, norms, routers, biases.

    One momentum takes the place of two moments. The matrices of a fused weight are updated each on its own: queries,
    keys and values, gate and up, every expert. Whole experts on a rank are updated there as one stack, without a
    message. Matrices that ranks share go to owners and back, in stacks of one shape (owners.py). Replicas of a matrix
    compute the same update. A step reads nothing on the host, and its sizes follow from shapes alone.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        matrices: Mapping[nn.Parameter, tuple[int, ...]],
        *,
        names: Mapping[Tensor, str],
        config: MuonConfig,
        lr: float,
        moments: torch.dtype | None = None,
        seed: int = 0,
        **adamw: Any,
    ) -> None:
        """`groups` have all parameters; `matrices` those that Muon updates, with the rows of fused ones."""
        self.config = config
        apart = [[p for p in group["params"] if p in matrices] for group in groups]
        others = [[p for p in group["params"] if p not in matrices] for group in groups]
        of_muon = [group | {"params": own} for group, own in zip(groups, apart, strict=True) if own]
        of_adamw = [group | {"params": own} for group, own in zip(groups, others, strict=True) if own]
        self.adamw = FusedAdamW(of_adamw, names=names, lr=lr, moments=moments, seed=seed, **adamw) if of_adamw else None
        shared = [] if self.adamw is None else self.adamw.param_groups
        super().__init__([*of_muon, *shared], {"lr": lr, "weight_decay": 0.0})
        self.of_muon = self.param_groups[: len(of_muon)]
        if self.adamw is not None:
            self.state.update(self.adamw.state)  # the same dicts
        for group in self.of_muon:
            for parameter in group["params"]:
                buffer = torch.zeros_like(parameter, requires_grad=False, dtype=moments or parameter.dtype)
                self.state[parameter] = {"momentum_buffer": buffer}
        put_lr_on_device(self)
        device = self.param_groups[0]["params"][0].device
        self.no, self.one = (torch.tensor(value, dtype=torch.float32, device=device) for value in (0.0, 1.0))
        self.matrices = {parameter: self._describe(parameter, rows) for parameter, rows in matrices.items()}

    def _describe(self, parameter: nn.Parameter, rows: tuple[int, ...]) -> Matrices:
        split = split_of(parameter)
        (num_rows, num_columns), ratio_of = split.shape, RATIOS[self.config.adjust_lr]
        scale = self.config.lr_scale
        ratios = [scale * ratio_of(size, num_columns) for size in rows or (num_rows,)]
        if len(set(ratios)) == 1:
            return Matrices(split, rows, ratios[0])
        own = [size // split.tp_of_rows for size in rows]
        column = torch.cat([torch.full((size,), ratio) for size, ratio in zip(own, ratios, strict=True)])
        first = (shard_offsets(parameter) or (0,) * parameter.ndim)[-2]
        column = column.repeat(split.tp_of_rows)[first : first + split.own_shape[0], None]
        return Matrices(split, rows, column.to(parameter.device))

    @torch.no_grad()
    def step(self, *, found_inf: Tensor | None = None, grad_factor: Tensor | None = None) -> None:
        """As `Optimizers.step`."""
        if self.adamw is not None:
            self.adamw.step(found_inf=found_inf, grad_factor=grad_factor)
        found_inf = self.no if found_inf is None else found_inf
        grad_factor = self.one if grad_factor is None else grad_factor
        rule = Momentum(found_inf, grad_factor, self.config.momentum, self.config.nesterov)
        for group in self.of_muon:
            for bucket in self._buckets([p for p in group["params"] if p.grad is not None]):
                self._step_bucket(bucket, group, rule)

    def _step_bucket(self, bucket: Sequence[Piece], group: dict[str, Any], rule: Momentum) -> None:
        """Update matrices of one shape."""
        split, rows, _ = bucket[0].matrices
        stacks = [accumulate_momentum(piece.grad_nrc, piece.buffer_nrc, rule)[0] for piece in bucket]
        done = on_owners(
            stacks[0] if len(stacks) == 1 else torch.cat(stacks),
            split,
            lambda whole: orthogonalise_parts(whole, rows, split.tp_of_rows, self.config.ns_steps),
        )
        decay = Decay(group["lr"], rule.found_inf, group["weight_decay"] * self.config.lr_scale)
        for piece, update in zip(bucket, done.split([len(stack) for stack in stacks]), strict=True):
            step_weight(piece.param_nrc, update, piece.matrices.ratio, decay, piece.remainder_nrc)

    def _buckets(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[Piece]]:
        """What is updated together. Matrices that go to owners: of one shape, on one mesh, in an order that all ranks
        share. Others: stacks of one parameter, each of which is large enough for a GPU."""
        alike: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            split, rows, _ = self.matrices[parameter]
            alike.setdefault((split, rows, parameter.dtype) if split.axes else parameter, []).append(parameter)
        for same in alike.values():
            split = self.matrices[same[0]].split
            room = optimizers.MUON_BUCKET_ELEMENTS // math.prod(split.largest_shape)
            most = max(room // split.num_owners, 1) * split.num_owners
            bucket, number = list[Piece](), 0
            for piece in (piece for parameter in same for piece in self._pieces(parameter, most)):
                if number + len(piece.param_nrc) > most:
                    yield bucket
                    bucket, number = [], 0
                bucket.append(piece)
                number += len(piece.param_nrc)
            if bucket:
                yield bucket

    def _pieces(self, parameter: nn.Parameter, most: int) -> Iterator[Piece]:
        """The matrices of a parameter, at most so many at a time."""
        matrices = self.matrices[parameter]
        assert parameter.grad is not None
        own = [local(parameter), local(parameter.grad).contiguous(), local(self.state[parameter]["momentum_buffer"])]
        if (remainder := remainder_of(parameter)) is not None:
            own.append(local(remainder))
        for stacks in zip(*(matrices.stack(tensor).split(most) for tensor in own), strict=True):
            param, grad, buffer, *rest = stacks
            yield Piece(param, grad, buffer, rest[0] if rest else None, matrices)


RATIOS = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""`optim.muon.adjust_lr` -> the ratio of the learning rate, by the shape of a matrix."""
