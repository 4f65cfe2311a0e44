"""Rows become conversations of tokens, and what was left out is counted."""

import json
import logging
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from titan_moe.config.chat import ChatConfig
from titan_moe.data.bad_rows import BadRows
from titan_moe.data.chat.answers import find_answers
from titan_moe.data.chat.records import RecordError, read_conversation
from titan_moe.data.chat.template import ChatTemplate

DTYPE = np.dtype("<u4")
"""Of codes."""

logger = logging.getLogger(__name__)


@dataclass
class Counts:
    """What became of the conversations that were read."""

    max_tokens: int
    conversations: int = 0
    """Those that are left."""
    tokens: int = 0
    learned: int = 0
    cut: int = 0
    dropped: int = 0
    without_answer: int = 0
    """Left out because all of their answers were cut away."""

    def describe(self) -> str:
        """One line for the log."""
        share = 100 * self.learned / max(self.tokens, 1)
        return (
            f"{self.conversations:,} conversations of {self.tokens:,} tokens, {share:.1f} % of them learned; longer "
            f"than train.seq_len_tokens + 1 = {self.max_tokens:,} tokens: {self.dropped:,} dropped, {self.cut:,} cut, "
            f"{self.without_answer:,} left out because no answer remained"
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def num_too_long(self) -> int:
        return self.dropped + self.cut + self.without_answer


class ConversationEncoder:
    """Make codes of rows: a token's id times 2, plus 1 if it is learned. Bad rows and long ones are counted.

    Raises: ValueError if the answers are to be those of the template, and it has none.
    """

    def __init__(self, template: ChatTemplate, chat: ChatConfig, max_tokens: int, bad_rows: BadRows) -> None:
        if chat.answers == "template" and chat.train_on != "all" and not template.has_answers:
            raise ValueError(
                'data.chat.answers = "template", but the chat template has no {% generation %} block, which marks '
                'answers; set data.chat.answers = "prefixes", or data.chat.template to a copy of it with such blocks, '
                'or data.chat.train_on = "all"'
            )
        self.counts = Counts(max_tokens)
        self._template, self._chat, self._bad_rows = template, chat, bad_rows

    def encode(self, row: Any, number: int, place: str) -> np.ndarray | None:
        """The codes of a row, or None for one that is left out.

        Raises: BadRowError for a bad row, if they are not skipped.
        """
        counts = self.counts
        try:
            ids, is_learned = find_answers(self._template, read_conversation(row), self._chat)
        except RecordError as error:
            self._bad_rows.found(number, f"{place}, {error}")
            return None
        if len(ids) > counts.max_tokens:
            is_left = self._chat.too_long == "cut" and is_learned[1 : counts.max_tokens].any()
            counts.cut += bool(is_left)
            counts.without_answer += self._chat.too_long == "cut" and not is_left
            counts.dropped += self._chat.too_long == "drop"
            if str(counts.num_too_long).strip("0") == "1":  # the first, the tenth, the hundredth ...
                logger.warning("%s, has %s tokens; so far %s", place, f"{len(ids):,}", counts.describe())
            if not is_left:
                return None
            ids, is_learned = ids[: counts.max_tokens], is_learned[: counts.max_tokens]
        counts.conversations, counts.tokens = counts.conversations + 1, counts.tokens + len(ids)
        counts.learned += int(is_learned[1:].sum())
        return ((ids << 1) | is_learned).astype(DTYPE)
