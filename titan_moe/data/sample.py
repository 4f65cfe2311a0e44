"""Samples of N + 1 tokens. What reads them needs no torch, so that a process that does only this starts quickly."""

from typing import NamedTuple

import numpy as np


class Sample(NamedTuple):
    """One sequence and the token after it. All tokens but the last are inputs, all but the first are labels."""

    tokens: np.ndarray  # int64 [N + 1]
    document_ids: np.ndarray  # int32 [N + 1], the document of each token, starting at 0
    is_bad: bool = False
    """Whether nothing is learned from it: its labels are IGNORE_LABEL."""
    is_learned: np.ndarray | None = None  # bool [N + 1]
    """The tokens that are labels; None for all."""
