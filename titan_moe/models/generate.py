"""Generate text with a model, token by token.

B rows · N tokens of a row so far · T tokens of a forward · V vocabulary
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.layers.dropping import dropping_nothing
from titan_moe.layers.kv_cache import KVCache, NewTokens

PROMPT_TOKENS = 4096
"""Of a forward over prompts, whose logits are in memory together."""
NextLogits = Callable[[Tensor, Tensor], Tensor]
"""Rows of tokens [B, N], of which row b has `ends_B[b]` so far, to the logits [B, V] of the tokens that follow."""


def same(tokens: Tensor) -> Tensor:
    """What one rank agrees on."""
    return tokens


def all_rows(next_logits: NextLogits, is_cached: bool) -> NextLogits:
    """The default of `spread`: a rank computes all rows."""
    return next_logits


class TextGenerator:
    """A model that continues texts: a whole one, or all stages of one."""

    has_cache: bool
    """Whether forwards over new tokens alone are possible."""
    new_tokens: "AllTokens"
    """What this rank takes of them."""

    @property
    def own_parts(self) -> Iterable[nn.Module]:
        """The modules of this rank."""
        raise NotImplementedError

    def next_logits(self, tokens_BN: Tensor, ends_B: Tensor) -> Tensor:
        """`NextLogits` by whole forwards."""
        raise NotImplementedError

    def cached_forwards(self, num_places: int) -> NextLogits:
        """`NextLogits` by forwards over new tokens, for rows of up to so many tokens."""
        raise NotImplementedError

    @torch.no_grad()
    def generate(
        self,
        tokens_BN: Tensor,
        num_tokens: int,
        *,
        lengths_B: Tensor | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        end_tokens: Collection[int] = (),
        pad_token: int | None = None,
        generator: torch.Generator | None = None,
        use_cache: bool = True,
        agree: Callable[[Tensor], Tensor] = same,
        spread: Callable[[NextLogits, bool], NextLogits] = all_rows,
    ) -> Tensor:
        """Continue each row by up to `num_tokens`: int64 [B, N] -> [B, N + generated].

        `lengths_B` are the lengths of prompts that differ, which begin their rows; what follows them is ignored, and a
        row goes on where its prompt ends. A row has ended after one of `end_tokens`, and it all ends when all rows
        have. Places after a row's end have `pad_token`, an id of the vocabulary, by default an end token, or 0.

        At `temperature` 0 the likeliest token is taken. Otherwise tokens are drawn, with a `generator` on the model's
        device, from the logits divided by it, and with `top_p` below 1 from the fewest likeliest ones whose
        probabilities reach it (arXiv:1904.09751).

        No expert drops tokens (`model.moe.capacity_factor`), so that a text depends on its own tokens alone.

        Keys and values of earlier tokens are kept. Without `use_cache` or `has_cache` there is a whole forward for
        every token. Collective: `agree` makes the tokens that ranks have chosen equal, so that they end together.
        `spread` may let ranks compute some of the rows each; it is told whether keys and values are kept.

        Raises: ValueError for lengths or options out of range.
        """
        batch, width = tokens_BN.shape
        _check(width, lengths_B, temperature, top_p)
        device, rows_B = tokens_BN.device, torch.arange(batch, device=tokens_BN.device)
        ends_B = torch.full_like(rows_B, width) if lengths_B is None else lengths_B.to(rows_B)
        longest = width if lengths_B is None else int(lengths_B.max())
        pad = next(iter(end_tokens), 0) if pad_token is None else pad_token
        text_BN = tokens_BN.new_full((batch, longest + num_tokens), pad)
        is_prompt_BN = torch.arange(longest, device=device) < ends_B[:, None]
        text_BN[:, :longest] = torch.where(is_prompt_BN, tokens_BN[:, :longest], pad)
        last_tokens = torch.tensor(sorted(end_tokens), dtype=tokens_BN.dtype, device=device)
        has_ended_B = torch.zeros(batch, dtype=torch.bool, device=device)
        is_cached = use_cache and self.has_cache
        next_logits = spread(self.cached_forwards(longest + num_tokens) if is_cached else self.next_logits, is_cached)
        for end in range(longest, longest + num_tokens):
            with dropping_nothing(self.own_parts):
                logits_BV = next_logits(text_BN[:, :end], ends_B)
            next_B = agree(_choose(logits_BV, temperature, top_p, generator))
            text_BN[rows_B, ends_B] = next_B = torch.where(has_ended_B, pad, next_B)
            ends_B = ends_B + 1
            has_ended_B |= torch.isin(next_B, last_tokens)
            if end_tokens and has_ended_B.all():
                return text_BN[:, : end + 1]
        return text_BN


class WholeForwards:
    """`NextLogits` by a forward over all tokens so far, for a model that takes multiples of a length."""

    def __init__(self, model: Callable[[Tensor], Tensor], length_multiple: int) -> None:
        self.model, self.length_multiple = model, length_multiple

    def __call__(self, tokens_BN: Tensor, ends_B: Tensor) -> Tensor:
        # no token attends to a later one, and none is dropped for another (`dropping_nothing`)
        padded_BN = F.pad(tokens_BN, (0, -tokens_BN.shape[1] % self.length_multiple))
        rows_B = torch.arange(len(ends_B), device=ends_B.device)
        return self.model(padded_BN)[rows_B, ends_B - 1]


class AllTokens:
    """What a rank takes of the new tokens of a forward, and the logits of some of them: all, where none has a part."""

    num_ranks = 1
    """So many ranks have equal parts of the tokens."""

    def own(self, tokens_1T: Tensor) -> Tensor:
        """[1, T] -> this rank's [1, T / ranks]."""
        return tokens_1T

    def at(self, logits_1TV: Tensor, places_B: Tensor) -> Tensor:
        """From logits of own tokens to those of the tokens at these places of all, on all ranks: -> [B, V]."""
        return logits_1TV[0, places_B]


ALL_TOKENS = AllTokens()


class CachedForwards:
    """`NextLogits` of one text a row, by forwards over new tokens alone: those of the prompts in pieces, then one each.

    The model takes `cache` as its fourth argument. Its compiled parts run uncompiled: nearly every call has other
    shapes.
    """

    def __init__(
        self, model: Callable[..., Tensor], length_multiple: int, num_places: int, part: AllTokens = ALL_TOKENS
    ) -> None:
        """`num_places` is the largest length of a row; `part` is what this rank computes."""
        self.model, self.length_multiple, self.num_places, self.part = model, length_multiple, num_places, part
        self.cache: KVCache | None = None

    def __call__(self, tokens_BN: Tensor, ends_B: Tensor) -> Tensor:
        batch, width = tokens_BN.shape
        with torch.compiler.set_stance("force_eager"):
            if self.cache is not None:
                newest_B1 = ends_B[:, None] - 1
                return self._forward(self.cache, tokens_BN.gather(1, newest_B1), newest_B1, width)
            self.cache = KVCache(batch, self.num_places)
            piece, logits_BV = max(PROMPT_TOKENS // batch, 1), None
            for start in range(0, width, piece):
                stop = min(start + piece, width)
                places_Bn = torch.arange(start, stop, device=ends_B.device).expand(batch, -1)
                last_B = (ends_B - 1 - start).clamp(0, stop - start - 1)
                here_BV = self._forward(self.cache, tokens_BN[:, start:stop], places_Bn, stop, last_B)
                is_here_B1 = ((ends_B > start) & (ends_B <= stop))[:, None]
                logits_BV = here_BV if logits_BV is None else torch.where(is_here_B1, here_BV, logits_BV)
            assert logits_BV is not None
            return logits_BV

    def _forward(
        self, cache: KVCache, tokens_Bn: Tensor, places_Bn: Tensor, num_keys: int, chosen_B: Tensor | int = 0
    ) -> Tensor:
        """The logits [B, V] of a chosen one of each row's new tokens."""
        cache.new = NewTokens(places_Bn, num_keys)
        tokens_T, (batch, width) = tokens_Bn.flatten(), tokens_Bn.shape
        padded_1T = F.pad(tokens_T, (0, -len(tokens_T) % self.length_multiple))[None]
        logits_1TV = self.model(self.part.own(padded_1T), None, None, cache)
        return self.part.at(logits_1TV, torch.arange(batch, device=tokens_T.device) * width + chosen_B)


def _check(width: int, lengths_B: Tensor | None, temperature: float, top_p: float) -> None:
    if lengths_B is not None and (int(lengths_B.min()) < 1 or int(lengths_B.max()) > width):
        raise ValueError(f"lengths_B = {lengths_B.tolist()} must be from 1 to {width}, the width of the tokens")
    if width == 0:
        raise ValueError("a prompt needs a token at least")
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature = {temperature} must be at least 0, and top_p = {top_p} above 0 and at most 1")


def _choose(logits_BV: Tensor, temperature: float, top_p: float, generator: Any) -> Tensor:
    """A token of each row [B]."""
    if temperature == 0.0:
        return logits_BV.argmax(-1)
    wide_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32)) / temperature
    if top_p < 1.0:
        wide_BV = keep_likeliest(wide_BV, top_p)
    return torch.multinomial(wide_BV.softmax(-1), 1, generator=generator)[:, 0]


def keep_likeliest(logits_BV: Tensor, top_p: float) -> Tensor:
    """Set all logits to -inf but those of the fewest likeliest tokens whose probabilities reach `top_p`."""
    sorted_BV, words_BV = logits_BV.sort(-1, descending=True)
    probs_BV = sorted_BV.softmax(-1)
    is_beyond_BV = probs_BV.cumsum(-1) - probs_BV >= top_p  # of the likelier ones alone
    return logits_BV.masked_fill(is_beyond_BV.scatter(-1, words_BV, is_beyond_BV), -torch.inf)
