"""Say how far the tokenising of a corpus is."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

EVERY_SECONDS = 10.0

logger = logging.getLogger(__name__)


def reported(documents: Iterable[np.ndarray], share: Callable[[], float] | None) -> Iterator[np.ndarray]:
    """Pass tokenised documents on, and log now and then how many there are. `share` tells how much of the data is read,
    from 0 to 1; None if that is unknown."""
    start = said_at = time.monotonic()
    num_documents = num_tokens = 0
    for document in documents:
        num_documents, num_tokens = num_documents + 1, num_tokens + len(document)
        if (now := time.monotonic()) - said_at > EVERY_SECONDS:
            said_at = now
            logger.info("%s", in_words(num_documents, num_tokens, now - start, share() if share else 0.0))
        yield document
    seconds = time.monotonic() - start
    logger.info("tokenised %s documents: %s tokens in %.3g s", f"{num_documents:,}", f"{num_tokens:,}", seconds)


def in_words(num_documents: int, num_tokens: int, seconds: float, share: float) -> str:
    """How far it is, and how long the rest takes where that can be told."""
    counts = f"{num_documents:,} documents, {num_tokens:,} tokens, {num_tokens / max(seconds, 1e-3):,.0f} tokens/s"
    if share <= 0:
        return f"tokenising: {counts}"
    minutes = seconds * (1 - min(share, 1.0)) / share / 60
    return f"tokenising: {share:.0%} of the data, {counts}, {minutes:.1f} min left"
