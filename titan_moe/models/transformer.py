"""The decoder-only transformer: embedding, blocks, norm, head.

B batch · N sequence · D model width · V vocabulary
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from titan_moe.config.attention import AttentionConfig
from titan_moe.config.context import WHOLE_SEQUENCES, SequenceShard
from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.config.model import ModelConfig
from titan_moe.config.rules.layers import check_model
from titan_moe.layers.attention import Context
from titan_moe.layers.block import Block, keeps_context
from titan_moe.layers.head import LanguageModelHead
from titan_moe.layers.kv_cache import KVCache
from titan_moe.layers.mask import MASKS, Mask, MaskSpec, dense_mask
from titan_moe.layers.mtp import MTPBlock, attach, shifted
from titan_moe.layers.norm import NORMS
from titan_moe.layers.rope import no_rotation, query_factors, rope_tables
from titan_moe.models.generate import ALL_TOKENS, AllTokens, CachedForwards, NextLogits, TextGenerator, WholeForwards
from titan_moe.models.part import PassThrough, tied_weight


def _unchanged(x: Tensor) -> Tensor:
    return x


class Transformer(nn.Module, TextGenerator):
    """A language model whose blocks may be of any class with `Block`'s signature.

    A part of a model (part.py) is of the same class and lacks embedding, blocks or head.
    """

    block_class: type[nn.Module] = Block
    length_multiple = 1
    """Lengths of sequences are multiples of it, where ranks split them."""
    num_context_ranks = 1
    """A forward gets one of so many equal parts of each sequence, and document ids of whole sequences."""
    num_sequence_ranks = 1
    """Between layers hidden states are one of so many equal parts of each sequence."""
    tensor_rank = 0
    """Which part of the tokens of a forward that is, of those of a tensor-parallel group."""
    new_tokens: AllTokens = ALL_TOKENS
    """What this rank takes of the new tokens of a cache."""
    whole_sequences: Callable[[Tensor], Tensor] = staticmethod(_unchanged)
    """From the tokens or labels of a forward, [B, N], to those of whole sequences."""
    own_tokens: Callable[[Tensor], Tensor] = staticmethod(_unchanged)
    """The inverse."""
    is_counting = False
    """Whether forwards are for the counts of routers alone: all blocks run, those of multi-token prediction too, and no
    head; hidden states are returned."""
    describes_pairs = False
    """Whether contexts say which pairs of queries and keys a mask has, beside the mask."""
    query_shard: SequenceShard = WHOLE_SEQUENCES
    """The tokens whose queries attend on this rank; those of a forward, or of whole sequences."""

    def __init__(
        self, config: ModelConfig, *, kernels: Kernels = DEFAULT_KERNELS, loss_chunk_tokens: int = 4096
    ) -> None:
        super().__init__()
        check_model(config, kernels)
        self.config = config
        self.make_mask: Callable[[MaskSpec], Mask] = MASKS[kernels.attention]
        self.masks_all_layers = config.attention.sinks and kernels.attention == "flex"
        self.embed = _embedding(config)
        dense, _ = config.layers_by_kind
        by_token: Any = dict.fromkeys(config.moe.hash_layers, {"routes_by_token": True})
        blocks = [
            self.block_class(config, is_dense=i in dense, kernels=kernels, **by_token.get(i, {}))
            for i in range(config.num_layers)
        ]
        blocks += [MTPBlock(config, is_dense=i in dense, kernels=kernels) for i in config.mtp_layers]
        self.layers = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
        self.norm = NORMS[config.norm](config.hidden_size, config.norm_eps)
        sizes = config.hidden_size, config.vocab_size, loss_chunk_tokens
        options: Any = {"logits_scaling": config.logits_scaling, "bias": config.head_bias}
        self.head = LanguageModelHead(*sizes, kernels.head, **options)
        if config.embeddings_are_tied:
            self.head.weight = self.embed.weight

    def forward(
        self,
        tokens_BN: Tensor,
        labels_BN: Tensor | None = None,
        document_ids_BN: Tensor | None = None,
        cache: KVCache | None = None,
        read_BN: Tensor | None = None,
    ) -> Tensor:
        """Tokens int64 [B, N] -> logits [B, N, V], or with labels [B, N] their summed loss (fp32 or wider).

        Without the embedding the input is hidden states [B, N, D]; without the head they are the output. With a cache
        tokens are new ones of all rows, [1, T]. The loss has the gradients of multi-token prediction too, if the model
        has that; `read_BN` are the tokens then, and where layers route by them, if the input is hidden states.
        """
        contexts = self.contexts(tokens_BN, document_ids_BN) if cache is None else self._of_cache(tokens_BN, cache)
        contexts = self.with_tokens(contexts, tokens_BN if read_BN is None else read_BN)
        x_BND = tokens_BN if tokens_BN.is_floating_point() else self.embed(tokens_BN)
        for name, block in self.layers.items():
            if not isinstance(block, MTPBlock):
                x_BND = block(x_BND, contexts[name])
        normed_BND = self.norm(x_BND)
        ahead: Iterable[tuple[int, Tensor, Tensor]] = ()
        if labels_BN is not None and self.mtp_blocks and (torch.is_grad_enabled() or self.is_counting):
            tokens_BN = tokens_BN if read_BN is None else read_BN
            ahead = self._ahead(normed_BND, tokens_BN, labels_BN, document_ids_BN, contexts)
        if self.is_counting:
            for _ in ahead:
                pass
            return normed_BND
        return self._with_mtp(self.head(normed_BND, labels_BN), ahead)

    @property
    def mtp_blocks(self) -> dict[str, MTPBlock]:
        """The blocks of multi-token prediction by name; none in parts of a model without its last layers."""
        return {name: block for name, block in self.layers.items() if isinstance(block, MTPBlock)}

    def predict_ahead(
        self, h_BND: Tensor, tokens_ahead_BN: Tensor, contexts: Mapping[str, Context], depth: int
    ) -> Tensor:
        """What the head reads of a depth of multi-token prediction, the first of which is 1, [B, N, D].

        From that of the depth before (of 0: what `norm` returns) and the tokens so many places ahead. A draft of
        speculative decoding is the head's word for the last token.
        """
        name, block = list(self.mtp_blocks.items())[self.config.mtp.layer_of(depth)]
        ahead_BND: Tensor = block(h_BND, contexts[name], self.embed(tokens_ahead_BN))
        return ahead_BND

    def _ahead(
        self,
        h_BND: Tensor,
        tokens_BN: Tensor,
        labels_BN: Tensor,
        document_ids_BN: Tensor | None,
        contexts: Mapping[str, Context],
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Depths of multi-token prediction, what the head reads of each, and its labels."""
        whole = self.whole_sequences(tokens_BN), self.whole_sequences(labels_BN), document_ids_BN
        for depth in range(1, self.config.mtp.num_depths + 1):
            tokens_ahead_BN, labels_ahead_BN = map(self.own_tokens, shifted(*whole, depth))
            h_BND = self.predict_ahead(h_BND, tokens_ahead_BN, contexts, depth)
            yield depth, h_BND, labels_ahead_BN

    def _with_mtp(self, result: Tensor, ahead: Iterable[tuple[int, Tensor, Tensor]]) -> Tensor:
        """The main loss, with the gradients of these depths; or logits, without any."""
        mtp, blocks = self.config.mtp, list(self.mtp_blocks.values())
        for depth, h_BND, labels_ahead_BN in ahead:
            sums_2 = blocks[mtp.layer_of(depth)].losses.sums_K2[depth - 1 if mtp.repeats_layer else 0]
            loss_ahead = self.head(h_BND, labels_ahead_BN)
            result = attach(result, loss_ahead, labels_ahead_BN, sums_2, mtp.loss_weight / mtp.num_depths)
        return result

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Tied embeddings stay one parameter where parameters are replaced, as by `to_empty`."""
        is_tied = tied_weight(self) is not None
        super()._apply(fn, recurse)
        if is_tied:
            self.head.weight = self.embed.weight
        return self

    def contexts(self, x: Tensor, document_ids_BN: Tensor | None) -> dict[str, Context]:
        """By layer, from tokens [B, N] or hidden states [B, N, D]; layers that attend alike share tables and masks."""
        num_ranks = self.num_sequence_ranks if x.is_floating_point() else self.num_context_ranks
        num_tokens, device = x.shape[1] * num_ranks, x.device
        positions_Q: Tensor | None = None
        if self.query_shard.num_ranks > 1:
            chunks = self.query_shard.slices(num_tokens)
            positions_Q = torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])

        def spec_of(window: int, chunk: int) -> MaskSpec:
            return MaskSpec(num_tokens, window, document_ids_BN, device, positions_Q, chunk=chunk)

        def mask(*span: int) -> Mask:
            spec = spec_of(*span)
            return self.make_mask(spec) if self.masks_all_layers or not spec.is_causal_only else None

        contexts = self._by_layer(num_tokens, device, positions_Q, mask)
        if not self.describes_pairs:
            return contexts
        spans = {name: self._span(int(name), num_tokens) for name in contexts}
        pairs = {span: spec_of(*span).pairs for span in set(spans.values())}
        return {name: context._replace(pairs=pairs[spans[name]]) for name, context in contexts.items()}

    def _span(self, layer: int, num_tokens: int) -> tuple[int, int]:
        """The window and the chunk of a layer."""
        return self.config.attention.window(layer, num_tokens), self.config.attention.chunk(layer, num_tokens)

    def with_tokens(self, contexts: dict[str, Context], tokens_BN: Tensor) -> dict[str, Context]:
        """Contexts, of which those of layers that route by token have the ids of this rank's routers. Routers have
        a part of the tokens of a forward where ranks of tp split sequences."""
        layers = [name for name in map(str, self.config.moe.hash_layers) if name in self.layers]
        if not layers:
            return contexts
        own_BN = tokens_BN.chunk(self.num_sequence_ranks // self.num_context_ranks, dim=1)[self.tensor_rank]
        return contexts | {name: contexts[name]._replace(tokens_BN=own_BN) for name in layers}

    def _of_cache(self, x: Tensor, cache: KVCache) -> dict[str, Context]:
        """By layer, for the new tokens of a cache, which are `x` or have these hidden states."""
        device, (positions_Bn, num_keys) = x.device, cache.new
        num_tensor_ranks = self.num_sequence_ranks // self.num_context_ranks
        num_ranks = self.new_tokens.num_ranks * (num_tensor_ranks if x.is_floating_point() else 1)
        places_T = cache.new.padded_positions(x.shape[1] * num_ranks)
        contexts = self._by_layer(
            num_keys,
            device,
            places_T,
            lambda window, chunk: dense_mask(MaskSpec(num_keys, window, None, device, None, positions_Bn, chunk)),
        )
        return {name: context._replace(cache=cache.layer(name)) for name, context in contexts.items()}

    def _by_layer(
        self, num_tokens: int, device: torch.device, places_N: Tensor | None, make_mask: Callable[[int, int], Mask]
    ) -> dict[str, Context]:
        """By layer, of which those with equal windows and chunks share a mask. Queries and keys of a forward
        have these places in sequences of `num_tokens`, or all."""
        attention = self.config.attention
        layers = [int(layer) for layer in self.layers]

        def tables(of: AttentionConfig) -> tuple[Tensor, Tensor]:
            cos, sin = rope_tables(of, num_tokens, device)
            return (cos, sin) if places_N is None else (cos[places_N], sin[places_N])

        rotated = windowed = unrotated = partial(Context, *tables(attention))
        if attention.window_rope_theta:
            windowed = partial(Context, *tables(attention.of_windows))
        if not all(attention.has_rope(layer) for layer in layers):
            factors_N = query_factors(attention, num_tokens, device)
            factors_N = factors_N if factors_N is None or places_N is None else factors_N[places_N]
            cos, sin = no_rotation(rotated.args)
            unrotated = partial(Context, cos, sin, has_rope=False, query_factors_N=factors_N)
        spans = {i: self._span(i, num_tokens) for i in layers}
        masks = {span: make_mask(*span) for span in set(spans.values())}
        contexts = {}
        for i, span in spans.items():
            of_layer = (windowed if attention.has_window(i) else rotated) if attention.has_rope(i) else unrotated
            contexts[str(i)] = of_layer(mask=masks[span])
        return contexts

    @property
    def has_cache(self) -> bool:  # type: ignore[override]
        """Whether forwards over new tokens alone are possible: not in a class of other forwards, or with another
        embedding or attention, which may know nothing of tokens that came before."""
        own, keeps = type(self), isinstance(self.embed, nn.Embedding | PassThrough)
        keeps &= own.forward is Transformer.forward and own.contexts is Transformer.contexts
        return keeps and all(keeps_context(block) for block in self.layers.values())

    @property
    def own_parts(self) -> Iterable[nn.Module]:
        """The model alone."""
        return (self,)

    def next_logits(self, tokens_BN: Tensor, ends_B: Tensor) -> Tensor:
        """Logits [B, V] of the tokens that continue each row, of which row b has `ends_B[b]` tokens."""
        return WholeForwards(self, self.length_multiple)(tokens_BN, ends_B)

    def cached_forwards(self, num_places: int) -> NextLogits:
        """The same for rows of up to so many tokens, by forwards over new tokens alone."""
        return CachedForwards(self, self.length_multiple, num_places, self.new_tokens)


class ScaledEmbedding(nn.Embedding):
    """An embedding whose output is multiplied."""

    def __init__(self, vocab_size: int, hidden_size: int, multiplier: float) -> None:
        super().__init__(vocab_size, hidden_size)
        self.multiplier = multiplier

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [...] -> [..., D]."""
        return super().forward(tokens) * self.multiplier


def _embedding(config: ModelConfig) -> nn.Embedding:
    if config.embedding_multiplier == 1.0:
        return nn.Embedding(config.vocab_size, config.hidden_size)
    return ScaledEmbedding(config.vocab_size, config.hidden_size, config.embedding_multiplier)
