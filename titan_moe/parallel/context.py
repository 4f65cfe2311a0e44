"""Context parallelism: the ranks of `cp` have parts of the same sequences; attention covers whole sequences.

P ranks of cp · B batch · n tokens of a rank · N tokens of a sequence (P·n) · X width of a projection on this rank

"Own tokens" are those of this rank's part of the sequences, "own heads" the heads that this rank computes.

Every layer but attention is a function of single tokens and runs on own tokens unchanged. Every rank has all
parameters. Their gradients are sums over tokens, or over heads, which FSDP2 sums over `dp_shard` and `cp`.

`ulysses` (arXiv:2309.14509): after the fused projection, an all-to-all exchanges all heads of own tokens for own heads
of all tokens. The inverse all-to-all follows attention, before the output projection. Norms, rotation and softmax in
between run on whole sequences, with the kernels and masks of one rank. For a token of `gqa` (2·heads + 2·key/value
heads)·head width elements are exchanged, of which 1 / P stay on the rank. A key/value head that several ranks share is
sent to each of them.

`mla` gathers its latents, which all heads share, and rebuilds keys and values of own heads, instead of exchanging keys
and values. That takes (P - 1)·(kv_lora_rank + rotated width) elements for each token. With P = 8 these are 4,032
instead of 29,120 in DeepSeek-V3, and 4,032 either way in DeepSeek-V2-Lite; with fewer ranks they are fewer.

`allgather` (arXiv:2407.21783): queries stay; keys and values of all tokens are gathered, (P - 1)·2·key/value heads·head
width elements for each token, or latents.

`ring` (arXiv:2310.01889): queries stay; keys and values are passed around the ranks (ring_attention.py).
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_moe.adapters.low_rank import LowRank
from titan_moe.config.context import SequenceShard, sequence_shard
from titan_moe.config.parallel import ParallelConfig
from titan_moe.dispatch.collectives import all_gather, all_to_all
from titan_moe.layers.attention import GroupedQueryAttention
from titan_moe.layers.mask import MaskSpec
from titan_moe.layers.mla import MultiHeadLatentAttention
from titan_moe.models.generate import ALL_TOKENS, AllTokens
from titan_moe.models.transformer import Transformer
from titan_moe.parallel.mesh import Meshes
from titan_moe.parallel.ring_attention import RingAttention
from titan_moe.parallel.sequence import gather_output
from titan_moe.parameters import SCALES


def apply(model: nn.Module, config: ParallelConfig, meshes: Meshes, ring_backend: str = "cpu") -> None:
    """Make attention cover whole sequences, in place, after tensor parallelism. Parameters do not change.

    `ring_backend` names the kernels of ring attention.
    """
    if config.cp == 1:
        return
    group = meshes.dense["cp"].get_group()
    shard = sequence_shard(config, group.rank())
    for module in model.modules():
        match module:
            case GroupedQueryAttention() | MultiHeadLatentAttention() if config.cp_kind == "allgather":
                module.gather_keys = GatherKeys(group)
            case GroupedQueryAttention() if config.cp_kind == "ring":
                module.attend = RingAttention(group, ring_backend)
            case GroupedQueryAttention():
                _exchange_heads(module, config.tp, group)
            case MultiHeadLatentAttention():
                module.q_up.register_forward_hook(TokensToHeads((len(module.q_up.weight),), group))
                module.kv_down.register_forward_hook(partial(gather_output, group))
                for owner, name in _of_rows(module.kv_up):
                    _read_own_rows(owner, name, group)
                module.out.register_forward_pre_hook(HeadsToTokens(group))
            case Transformer():
                module.num_context_ranks = config.cp
                module.whole_sequences = gather = GatherTokens(config, group)
                module.own_tokens = gather.own
                if config.cp_kind != "ulysses":
                    module.query_shard = shard
                if config.cp_kind == "ring":
                    module.make_mask = no_mask
                module.new_tokens = new_tokens_of(config, group)
                next_logits = NextLogitsOfParts(module, config.length_multiple, shard, group)
                module.next_logits = next_logits  # type: ignore[method-assign]


def no_mask(spec: MaskSpec) -> None:
    """`Transformer.make_mask` of ring attention, which needs no mask because it computes visible pairs only."""


def _exchange_heads(attention: GroupedQueryAttention, tp: int, group: dist.ProcessGroup) -> None:
    """Exchange after the projection, and its norm over all heads, and before the output; what is between them then
    sees fewer heads."""
    num_ranks, rope = group.size(), attention.qk_norm_rope
    num_heads = attention.fused_rows["qkv.weight"][0] // attention.head_dim // tp
    num_kv_heads = num_heads // (rope.heads_per_group - 2)
    widths = tuple(number * attention.head_dim for number in (num_heads, num_kv_heads, num_kv_heads))
    last = attention.qkv if rope.all_heads is None else rope.all_heads  # that sees all heads
    last.register_forward_hook(TokensToHeads(widths, group, attention.head_dim))
    first = attention.out if attention.apply_gate is None else attention.apply_gate  # behind attention
    first.register_forward_pre_hook(HeadsToTokens(group))
    attention.own_heads = OwnHeads(group)
    rope.heads_per_group = num_heads // num_ranks // max(num_kv_heads // num_ranks, 1) + 2


class OwnHeads:
    """`own_heads` of an attention layer whose rank has a part of its heads."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.num_ranks = group.rank(), group.size()

    def __call__(self, of_heads: Tensor) -> Tensor:
        """[H] -> [H / P]."""
        return of_heads.chunk(self.num_ranks)[self.rank]


class TokensToHeads:
    """A forward hook: from all heads of own tokens to own heads of all tokens, in the order of the sequence."""

    def __init__(self, widths: tuple[int, ...], group: dist.ProcessGroup, head_dim: int = 1) -> None:
        """`widths` are those of the matrices of a fused projection. Ranks share heads of `head_dim` where a matrix has
        fewer than there are ranks."""
        self.widths, self.group, self.head_dim = widths, group, head_dim

    def __call__(self, module: nn.Module, args: Any, out_BnX: Tensor) -> Tensor:
        """[B, n, X] -> [B, N, X of own heads]."""
        num_ranks, batch = self.group.size(), len(out_BnX)
        parts = [self._by_rank(matrix) for matrix in out_BnX.split(self.widths, dim=-1)]
        sent = torch.cat(parts, dim=-1).flatten(0, 1)
        received = all_to_all(sent, [batch] * num_ranks, [batch] * num_ranks, self.group)
        return received.unflatten(0, (num_ranks, batch)).transpose(0, 1).flatten(1, 2)

    def _by_rank(self, x_BnX: Tensor) -> Tensor:
        """The part of each rank: -> [P, B, n, X of a rank]."""
        num_ranks = self.group.size()
        num_parts = min(num_ranks, x_BnX.shape[-1] // self.head_dim)
        x_PBnX = x_BnX.unflatten(-1, (num_parts, -1)).movedim(-2, 0)
        return x_PBnX if num_parts == num_ranks else x_PBnX.repeat_interleave(num_ranks // num_parts, dim=0)


class HeadsToTokens:
    """A forward pre-hook, the inverse: from own heads of all tokens to all heads of own tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The first argument: [B, N, X of own heads] -> [B, n, X]."""
        (x_BNX, *others), num_ranks = args, self.group.size()
        batch = len(x_BNX)
        sent = x_BNX.unflatten(1, (num_ranks, -1)).transpose(0, 1).flatten(0, 1)
        received = all_to_all(sent, [batch] * num_ranks, [batch] * num_ranks, self.group)
        return received.unflatten(0, (num_ranks, batch)).movedim(0, 2).flatten(2), *others


class GatherKeys:
    """`gather_keys` of an attention layer: gathers two tensors of own tokens in one message.

    Own tokens are a chunk from the start and one from the end of each sequence (`SequenceShard`).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """[B, n, ...] each -> [B, N, ...] each, in the order of the sequence."""
        shapes = first.shape[2:], second.shape[2:]
        widths = [shape.numel() for shape in shapes]
        x_BnX = torch.cat([first.flatten(2), second.flatten(2)], dim=-1)
        heads, tails = all_gather(x_BnX, self.group).unflatten(0, (-1, len(x_BnX))).chunk(2, dim=2)
        whole_BNX = torch.cat([heads, tails.flip(0)]).transpose(0, 1).flatten(1, 2)
        whole_first, whole_second = whole_BNX.split(widths, dim=-1)
        return whole_first.unflatten(2, shapes[0]), whole_second.unflatten(2, shapes[1])


class GatherTokens:
    """`Transformer.whole_sequences`: from own tokens, or labels, to those of whole sequences."""

    def __init__(self, config: ParallelConfig, group: dist.ProcessGroup) -> None:
        self.shards, self.group = [sequence_shard(config, rank) for rank in range(group.size())], group

    def __call__(self, own_Bn: Tensor) -> Tensor:
        """[B, n] -> [B, N], in the order of the sequence."""
        by_rank = all_gather(own_Bn, self.group).chunk(self.group.size())
        num_tokens = own_Bn.shape[1] * self.group.size()
        chunks: dict[int, Tensor] = {}
        for shard, rows_Bn in zip(self.shards, by_rank, strict=True):
            slices = shard.slices(num_tokens)
            chunks |= {chunk.start: part for chunk, part in zip(slices, rows_Bn.chunk(len(slices), 1), strict=True)}
        return torch.cat([chunks[start] for start in sorted(chunks)], dim=1)

    def own(self, whole_BN: Tensor) -> Tensor:
        """The inverse."""
        chunks = self.shards[self.group.rank()].slices(whole_BN.shape[1])
        return torch.cat([whole_BN[:, chunk] for chunk in chunks], dim=1)


class NextLogitsOfParts:
    """`Transformer.next_logits` for context parallelism: each rank runs its own tokens of the text."""

    def __init__(
        self, model: Callable[[Tensor], Tensor], length_multiple: int, shard: SequenceShard, group: dist.ProcessGroup
    ) -> None:
        self.model, self.length_multiple, self.shard, self.group = model, length_multiple, shard, group

    def __call__(self, tokens_BN: Tensor, ends_B: Tensor) -> Tensor:
        """Tokens [B, N] of any length, the same on all ranks, `ends_B[b]` of row b -> logits [B, V]."""
        padded_BN = F.pad(tokens_BN, (0, -tokens_BN.shape[1] % self.length_multiple))
        chunks, device = self.shard.slices(padded_BN.shape[1]), tokens_BN.device
        logits_BnV = self.model(torch.cat([padded_BN[:, chunk] for chunk in chunks], dim=1))
        own_n = torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])
        is_last_Bn = own_n == ends_B[:, None] - 1
        here_BV = logits_BnV[torch.arange(len(ends_B), device=device), is_last_Bn.int().argmax(1)]
        last_BV = torch.where(is_last_Bn.any(1, keepdim=True), here_BV, 0.0)
        dist.all_reduce(last_BV, group=self.group)
        return last_BV


def new_tokens_of(config: ParallelConfig, group: dist.ProcessGroup) -> AllTokens:
    """What a rank takes of the new tokens of a cache. With `ulysses` it has the keys of own heads, and a part of the
    tokens. Otherwise it has the keys of all, and does not exchange any."""
    return PartOfTokens(group) if config.cp > 1 and config.cp_kind == "ulysses" else ALL_TOKENS


class PartOfTokens(AllTokens):
    """Each rank has a part, in the order of the ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.num_ranks = group, group.size()

    def own(self, tokens_1T: Tensor) -> Tensor:
        return tokens_1T.chunk(self.num_ranks, dim=1)[self.group.rank()]

    def at(self, logits_1TV: Tensor, places_B: Tensor) -> Tensor:
        num_own = logits_1TV.shape[1]
        own_B = places_B - self.group.rank() * num_own
        is_here_B1 = ((own_B >= 0) & (own_B < num_own))[:, None]
        logits_BV = torch.where(is_here_B1, logits_1TV[0, own_B.clamp(0, num_own - 1)], 0.0)
        dist.all_reduce(logits_BV, group=self.group)
        return logits_BV


def _of_rows(projection: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The parameters of a projection that have its rows, or a number for each or for a block of them."""
    yield projection, "weight"
    if isinstance(adapter := getattr(projection, "adapter", None), LowRank):
        yield adapter, "B"
    if f"weight{SCALES}" in projection._parameters:
        yield projection, f"weight{SCALES}"


def _read_own_rows(module: nn.Module, name: str, group: dist.ProcessGroup) -> None:
    """Let a parameter, as the module reads it, be the rows of own heads. It stays whole for FSDP and checkpoints."""
    module_class: Any = type(module)
    module.__class__ = _reading_own_rows(module_class, name, group.rank(), group.size())


@cache
def _reading_own_rows(module_class: type[nn.Module], name: str, rank: int, num_ranks: int) -> type[nn.Module]:
    """One class for all layers, or each would be compiled apart."""
    of_tensor_parallelism = getattr(module_class, name, None)

    def own_rows(module: nn.Module) -> Any:
        whole: Any = module._parameters[name]
        if of_tensor_parallelism is not None:
            whole = of_tensor_parallelism.fget(module)
        return whole if isinstance(whole, DTensor) else whole.chunk(num_ranks)[rank]  # a DTensor: FSDP reads its shard

    return type(module_class.__name__, (module_class,), {name: property(own_rows)})
