"""The validation loss on held-out sequences."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.data.packing import IGNORE_LABEL, Batch
from titan_moe.parallel import fsdp
from titan_moe.parallel.mesh import Meshes
from titan_moe.parallel.pipeline.model import Model

EVERY_SECONDS = 10.0

logger = logging.getLogger(__name__)


@contextmanager
def evaluating(parts: list[nn.Module]) -> Iterator[None]:
    """Set the parts of a model to evaluation mode. On exit, back to training mode with all parameters resharded."""
    for part in parts:
        part.eval()
    try:
        yield
    finally:
        for part in parts:
            part.train()
            fsdp.reshard_all(part)


@torch.no_grad()
def validation_loss(
    model: Model, parts: list[nn.Module], batches: Iterable[Batch], device: torch.device, meshes: Meshes
) -> Tensor:
    """Mean cross entropy over the label tokens of all ranks. Every rank must have the same number of batches."""
    total = summed_loss(model, parts, batches, device, meshes)
    return total[0] / total[1].clamp(min=1)


def reported(batches: Iterable[Batch], source: str, num_sequences: int) -> Iterator[Batch]:
    """Pass a rank's batches of `num_sequences` on, and log now and then how many have been read."""
    start = said_at = time.monotonic()
    num_read = 0
    for batch in batches:
        yield batch
        num_read = min(num_read + batch.num_sequences, num_sequences)
        if (now := time.monotonic()) - said_at > EVERY_SECONDS and num_read < num_sequences:
            said_at = now
            minutes = (now - start) * (num_sequences - num_read) / num_read / 60
            share = f"{100 * num_read // num_sequences}% of {num_sequences:,} sequences a rank"
            logger.info("evaluating %s: %s, %.1f min left", source, share, minutes)


def mean_of(losses: Mapping[str, Tensor]) -> Tensor:
    """The validation loss of a run: that of the empty name, or the mean over all sets, each counted alike."""
    return losses[""] if "" in losses else torch.stack(list(losses.values())).mean()


@torch.no_grad()
def summed_loss(
    model: Model, parts: list[nn.Module], batches: Iterable[Batch], device: torch.device, meshes: Meshes
) -> Tensor:
    """The summed cross entropy of the label tokens of all ranks, and their number, fp64 [2]."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    with evaluating(parts):
        for batch in batches:
            for tokens_BN, labels_BN, document_ids_BN in batch.to(device).microbatches():
                total[0] += model(tokens_BN, labels_BN, document_ids_BN)
                total[1] += (labels_BN != IGNORE_LABEL).sum()
    dist.all_reduce(total, group=meshes.loss_group)
    total[1] /= meshes.sizes.pp  # the last stage has losses, every stage labels
    return total
