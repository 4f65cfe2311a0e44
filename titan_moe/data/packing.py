"""The batches that are packed from samples.

Shapes: M microbatches · B sequences · N tokens of a sequence.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_moe.config.context import SequenceShard
from titan_moe.data.sample import Sample
from titan_moe.kernels.loss.cross_entropy import IGNORE_LABEL


class Batch(NamedTuple):
    """One rank's data of one optimizer step. The loader creates it on the CPU."""

    tokens_MBN: Tensor  # int64
    labels_MBN: Tensor  # int64, the next token, or IGNORE_LABEL
    document_ids_MBN: Tensor | None  # int32, only with data.document_attention; of whole sequences in any case
    topk_ids_MBNLK: Tensor | None = None
    """int, the experts that tokens take in each layer, -1 where the router chooses; with them `StepResult` has all. L
    are all layers, and what stands for dense ones has no effect. They are not checked: K different experts, or -1."""

    @property
    def num_sequences(self) -> int:
        """The sequences of this rank, of which ranks of cp have parts."""
        return self.tokens_MBN.shape[0] * self.tokens_MBN.shape[1]

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device. Copies to a GPU are asynchronous, from pinned memory."""
        return Batch(*(None if x is None else _to(x, device) for x in self))

    def shard(self, shard: SequenceShard) -> "Batch":
        """Keep a context-parallel rank's tokens and labels."""
        if shard.num_ranks == 1:
            return self
        chunks = shard.slices(self.tokens_MBN.shape[-1])
        tokens, labels = (torch.cat([x[..., chunk] for chunk in chunks], -1) for x in self[:2])
        ids = self.topk_ids_MBNLK
        own_ids = None if ids is None else torch.cat([ids[:, :, chunk] for chunk in chunks], 2)
        return Batch(tokens, labels, self.document_ids_MBN, own_ids)

    def microbatches(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Iterate over microbatches: tokens, labels and document ids, each [B, N]."""
        documents = [None] * len(self.tokens_MBN) if self.document_ids_MBN is None else self.document_ids_MBN
        return zip(self.tokens_MBN, self.labels_MBN, documents, strict=True)


def pack(samples: Sequence[Sample], micro_batch_sequences: int, has_document_attention: bool) -> Batch:
    """Stack samples into microbatches. Labels are the tokens shifted by one.

    The end-of-document token belongs to its document, so a model learns where documents end. With document attention,
    the last token of a document has IGNORE_LABEL: the first token of the next document cannot be predicted from it.
    Without document attention a sequence is one causal context and every position has a label. A bad sample has none,
    and a token that is not learned is none.
    """

    def microbatches(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, micro_batch_sequences)).contiguous()

    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
    is_bad = torch.tensor([[sample.is_bad] for sample in samples])
    inputs, labels = tokens[:, :-1], tokens[:, 1:].masked_fill(is_bad, IGNORE_LABEL)
    for sequence, sample in zip(labels, samples, strict=True):
        if sample.is_learned is not None:
            sequence[torch.from_numpy(~sample.is_learned[1:])] = IGNORE_LABEL
    if not has_document_attention:
        return Batch(microbatches(inputs), microbatches(labels), None)
    document_ids = torch.from_numpy(np.stack([sample.document_ids for sample in samples]))
    labels = labels.masked_fill(document_ids[:, 1:] != document_ids[:, :-1], IGNORE_LABEL)
    return Batch(microbatches(inputs), microbatches(labels), microbatches(document_ids[:, :-1]))


def _to(x: Tensor, device: torch.device) -> Tensor:
    is_host_to_device = device.type == "cuda" and x.device.type == "cpu"
    return x.pin_memory().to(device, non_blocking=True) if is_host_to_device else x.to(device)
