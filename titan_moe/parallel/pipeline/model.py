"""The whole model of a pipeline without gradients: for validation and text."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.config.context import sequence_shard
from titan_moe.layers.kv_cache import KVCache
from titan_moe.models.generate import CachedForwards, NextLogits, TextGenerator, WholeForwards
from titan_moe.models.part import reads_tokens
from titan_moe.parallel.context import NextLogitsOfParts, new_tokens_of
from titan_moe.parallel.fsdp import DTYPES
from titan_moe.parallel.mesh import Meshes
from titan_moe.parallel.pipeline.messages import activations_like, check_activation
from titan_moe.parallel.pipeline.stages import parts_by_stage
from titan_moe.plan.resolved import Resolved


class Model(Protocol):
    """A whole model, on one rank or over the stages of a pipeline."""

    def __call__(self, tokens_BN: Tensor, labels_BN: Tensor | None = None, ids_BN: Tensor | None = None, /) -> Tensor:
        """Tokens int64 [B, N] -> logits, or with labels their summed loss."""

    def generate(self, tokens_BN: Tensor, num_tokens: int, **options: Any) -> Tensor:
        """As `TextGenerator.generate`; a class of one's own may have fewer options."""


class PipelinedModel(TextGenerator):
    """All stages, one after the other; every rank of the pipeline calls it with the same tokens.

    A rank goes on as soon as its stages are done, so the microbatches of a loop are in several stages at a time.
    """

    def __init__(self, parts: list[nn.Module], resolved: Resolved, meshes: Meshes) -> None:
        recipe = resolved.recipe
        p = self.config = recipe.parallel
        self.group, self.rank = meshes.pipeline_group, meshes.dense.get_local_rank("pp")
        self.stages = parts_by_stage(parts, resolved, meshes)
        self.ranks = resolved.ranks
        self.stages_that_read = frozenset(stage for stage, part in self.stages.items() if reads_tokens(part))
        self.hidden_size, self.vocab_size = recipe.model.hidden_size, recipe.model.vocab_size
        self.dtype = DTYPES[recipe.precision.compute]
        shard, context = sequence_shard(p, meshes.context_rank), meshes.dense["cp"].get_group()
        self.next_own_logits: NextLogits = WholeForwards(self, p.length_multiple)
        if p.cp > 1:
            self.next_own_logits = NextLogitsOfParts(self, p.length_multiple, shard, context)
        self.new_tokens = new_tokens_of(p, context)
        self.has_cache = all(getattr(part, "has_cache", False) for part in self.stages.values())

    @property
    def has_head(self) -> bool:
        """Whether this rank has the last stage, and so logits and losses."""
        return self.ranks[-1] == self.rank

    @torch.no_grad()
    def __call__(
        self,
        tokens_BN: Tensor,
        labels_BN: Tensor | None = None,
        document_ids_BN: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """As `Transformer.forward`, on the rank of the last stage. On the others zeros of the same shape."""
        x, like = tokens_BN, activations_like(tokens_BN, self.config.tp, self.hidden_size, self.dtype)
        caches = [] if cache is None else [cache]  # a model of one's own has no such argument
        for stage, rank in enumerate(self.ranks):
            if rank != self.rank:
                continue
            if stage and self.ranks[stage - 1] != rank:
                x = torch.empty_like(like)
                dist.recv(x, group=self.group, group_src=self.ranks[stage - 1])
            read = {"read_BN": tokens_BN} if stage in self.stages_that_read else {}
            x = self.stages[stage](x, labels_BN, document_ids_BN, *caches, **read)
            if stage + 1 < len(self.ranks) and self.ranks[stage + 1] != rank:
                check_activation(x, like)
                dist.send(x.contiguous(), group=self.group, group_dst=self.ranks[stage + 1])
        if self.has_head:
            return x
        if labels_BN is not None:
            return torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=tokens_BN.device)
        return torch.zeros((), dtype=self.dtype, device=tokens_BN.device).expand(*tokens_BN.shape, self.vocab_size)

    @property
    def own_parts(self) -> Iterable[nn.Module]:
        """The stages of this rank."""
        return self.stages.values()

    @torch.no_grad()
    def next_logits(self, tokens_BN: Tensor, ends_B: Tensor) -> Tensor:
        """Logits [B, V] of the tokens that continue each row, from the last stage."""
        return self._from_last_stage(self.next_own_logits, tokens_BN, ends_B)

    def cached_forwards(self, num_places: int) -> NextLogits:
        """The same for rows of up to so many tokens, by forwards over new tokens alone."""
        forwards = CachedForwards(self, self.config.length_multiple, num_places, self.new_tokens)
        return partial(self._from_last_stage, forwards)

    def _from_last_stage(self, next_logits: NextLogits, tokens_BN: Tensor, ends_B: Tensor) -> Tensor:
        logits_BV = next_logits(tokens_BN, ends_B).contiguous()
        dist.broadcast(logits_BV, group=self.group, group_src=self.ranks[-1])
        return logits_BV


def whole_model(parts: list[nn.Module], resolved: Resolved, meshes: Meshes) -> Any:
    """The model of these stages: the only part, or all stages together."""
    if resolved.sizes.pp > 1:
        return PipelinedModel(parts, resolved, meshes)
    (model,) = parts
    return model
