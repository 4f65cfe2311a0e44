"""Samples of N + 1 tokens, and the batches that a rank makes of them.

Shapes: M microbatches · B sequences · N tokens of a sequence.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_moe.kernels.loss.cross_entropy import IGNORE_LABEL


class Sample(NamedTuple):
    """One sequence and the token after it: all tokens but the last are inputs, all but the first are labels."""

    tokens: np.ndarray  # int64 [N + 1]
    document_ids: np.ndarray  # int32 [N + 1], which document each token belongs to, counted from 0


class Batch(NamedTuple):
    """What one rank needs for one optimizer step; a loader makes it on the CPU."""

    tokens_MBN: Tensor  # int64
    labels_MBN: Tensor  # int64, the next token; IGNORE_LABEL where there is none to predict
    document_ids_MBN: Tensor | None  # int32, only with data.document_attention

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device; to a GPU from pinned memory, without waiting."""
        return Batch(*(None if x is None else _to(x, device) for x in self))

    def split(self) -> "list[Batch]":
        """A batch of one microbatch after the other."""
        pieces = ([None] * len(self.tokens_MBN) if x is None else x.split(1) for x in self)
        return [Batch(*one) for one in zip(*pieces, strict=True)]

    def microbatches(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Tokens, labels and document ids [B, N] of one microbatch after the other."""
        documents = [None] * len(self.tokens_MBN) if self.document_ids_MBN is None else self.document_ids_MBN
        return zip(self.tokens_MBN, self.labels_MBN, documents, strict=True)


def pack(samples: Sequence[Sample], micro_batch_sequences: int, has_document_attention: bool) -> Batch:
    """Stack samples into microbatches and shift them by one token to make labels.

    The token that ends a document belongs to it, so a model learns where documents end. With document attention a
    token cannot see the next document, so guessing that document's first token from the one before would be noise: the
    label there is IGNORE_LABEL. Without it a sequence is one causal context and every position has a label.
    """
    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
    inputs_MBN = _microbatches(tokens[:, :-1], micro_batch_sequences)
    if not has_document_attention:
        return Batch(inputs_MBN, _microbatches(tokens[:, 1:], micro_batch_sequences), None)
    document_ids = torch.from_numpy(np.stack([sample.document_ids for sample in samples]))
    is_border = document_ids[:, 1:] != document_ids[:, :-1]
    labels = tokens[:, 1:].masked_fill(is_border, IGNORE_LABEL)
    return Batch(
        inputs_MBN,
        _microbatches(labels, micro_batch_sequences),
        _microbatches(document_ids[:, :-1], micro_batch_sequences),
    )


def _microbatches(x: Tensor, micro_batch_sequences: int) -> Tensor:
    return x.unflatten(0, (-1, micro_batch_sequences)).contiguous()


def _to(x: Tensor, device: torch.device) -> Tensor:
    crosses = device.type == "cuda" and x.device.type == "cpu"
    return x.pin_memory().to(device, non_blocking=True) if crosses else x.to(device)
