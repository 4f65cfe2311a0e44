"""Keys and values of earlier tokens, so that a forward computes those of new tokens alone.

B rows, each a text · n new tokens of a row · T tokens of a forward (B·n, and padding) · S places of a row so far ·
H heads · D head width

The new tokens of all rows are one sequence of a forward, [1, T]: their rotations have a place each, and ranks of tensor
parallelism, and of cp with `ulysses`, have equal parts of them. Keys and values are kept by head as attention reads
them. Of MLA the latents are kept, and the rotated part of keys, which all heads share.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class NewTokens(NamedTuple):
    """The tokens of a forward."""

    positions_Bn: Tensor
    """Their places in their rows, int64."""
    num_keys: int
    """Places of a row up to the last of them, S."""

    def padded_positions(self, num_tokens: int) -> Tensor:
        """The places of all tokens of a forward [T], 0 for padding."""
        return F.pad(self.positions_Bn.flatten(), (0, num_tokens - self.positions_Bn.numel()))


class KVCache:
    """The keys and values of all layers of a model, or of a part of one. A layer's memory is taken at its first use.

    Places after a row's own tokens may have keys of padding. No token attends to a later place, and a row's next tokens
    replace them.
    """

    def __init__(self, num_rows: int, num_places: int) -> None:
        self.num_rows, self.num_places = num_rows, num_places
        self.layers: dict[str, LayerCache] = {}
        self.new = NewTokens(torch.zeros(num_rows, 0, dtype=torch.int64), 0)

    def layer(self, name: str) -> "LayerCache":
        """That of a layer."""
        return self.layers.setdefault(name, LayerCache(self))


class LayerCache:
    """The keys and values of a layer, or what it makes them of."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.kept: list[Tensor] = []
        self.of_weights: tuple[Tensor, ...] = ()
        """What a layer makes of its weights alone, once for all forwards; empty until then."""

    def rows_of(self, x_1T: Tensor) -> Tensor:
        """[1, T, ...] -> [B, n, ...], without padding."""
        positions_Bn, _ = self.cache.new
        return x_1T[0, : positions_Bn.numel()].unflatten(0, positions_Bn.shape)

    def extend(self, first_1T: Tensor, second_1T: Tensor) -> tuple[Tensor, Tensor]:
        """Keep two tensors of new tokens, such as keys and values: [1, T, ...] -> [B, S, ...] each."""
        (positions_Bn, num_keys), new = self.cache.new, [self.rows_of(x) for x in (first_1T, second_1T)]
        if not self.kept:
            shape = self.cache.num_rows, self.cache.num_places
            self.kept = [x.new_zeros(*shape, *x.shape[2:]) for x in new]  # a masked NaN would still be one
        rows_B1 = torch.arange(self.cache.num_rows, device=positions_Bn.device)[:, None]
        for kept, x in zip(self.kept, new, strict=True):
            kept[rows_B1, positions_Bn] = x
        first, second = (kept[:, :num_keys] for kept in self.kept)
        return first, second

    def as_one_sequence(self, out_BnHD: Tensor, num_tokens: int) -> Tensor:
        """[B, n, H, D] -> [1, T, H, D], with zeros for padding."""
        out_THD = out_BnHD.flatten(0, 1)
        return F.pad(out_THD, (0, 0, 0, 0, 0, num_tokens - len(out_THD)))[None]
