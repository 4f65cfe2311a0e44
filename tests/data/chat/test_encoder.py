"""Rows as codes: labels in the lowest bit, long rows cut or dropped, and all of them counted."""

from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import TEMPLATES, make_tokenizer, without_marks

from titan_moe.config.chat import ChatConfig
from titan_moe.data.bad_rows import BadRowError, BadRows
from titan_moe.data.chat.encoder import ConversationEncoder
from titan_moe.data.chat.template import ChatTemplate

CHAT = {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "that"}]}


def make(folder: Path, max_tokens: int, bad_rows: Any = "refuse", **chat: Any) -> ConversationEncoder:
    template = ChatTemplate(make_tokenizer(folder, TEMPLATES["chatml"]), "", begins_with_bos=True)
    return ConversationEncoder(template, ChatConfig(**chat), max_tokens, BadRows(bad_rows))


def test_codes_are_ids_and_labels(tmp_path: Path) -> None:
    encoder = make(tmp_path, 100)
    template = ChatTemplate(str(tmp_path), "", begins_with_bos=True)
    codes = encoder.encode(CHAT, 1, "row 1")
    assert codes is not None and codes.dtype == "<u4"
    ids, _ = template.encode("<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\nthat<|im_end|>\n")
    answer, _ = template.encode("that<|im_end|>")
    assert (codes >> 1).tolist() == ids
    assert (codes[(codes & 1) == 1] >> 1).tolist() == answer
    counts = encoder.counts
    assert (counts.conversations, counts.tokens, counts.learned) == (1, len(ids), len(answer))


def test_long_rows_are_dropped_or_cut_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = make(tmp_path, 100).encode(CHAT, 1, "row 1")
    assert whole is not None
    for max_tokens, chat, left, counted in (
        (len(whole), {}, len(whole), (0, 0, 0)),
        (len(whole) - 1, {}, None, (1, 0, 0)),
        (len(whole) - 2, {"too_long": "cut"}, len(whole) - 2, (0, 1, 0)),
        (5, {"too_long": "cut"}, None, (0, 0, 1)),
        (5, {"too_long": "cut", "train_on": "all"}, 5, (0, 1, 0)),
    ):
        encoder = make(tmp_path, max_tokens, **chat)
        codes = encoder.encode(CHAT, 1, "a.jsonl, line 1")
        assert (None if codes is None else len(codes)) == left
        assert (encoder.counts.dropped, encoder.counts.cut, encoder.counts.without_answer) == counted
    for _ in range(9):
        encoder.encode(CHAT, 1, "a.jsonl, line 1")
    assert caplog.text.count(f"a.jsonl, line 1, has {len(whole)} tokens; so far") == 5  # four firsts and a tenth


def test_bad_rows_are_refused_or_skipped(tmp_path: Path) -> None:
    with pytest.raises(BadRowError, match=r"^a.jsonl, line 3, has the keys 'text', but not messages.*\"skip\"$"):
        make(tmp_path, 100).encode({"text": "a"}, 3, "a.jsonl, line 3")
    assert make(tmp_path, 100, "skip").encode({"text": "a"}, 3, "a.jsonl, line 3") is None


def test_a_template_without_marks_is_refused_for_answers(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, without_marks(TEMPLATES["chatml"]))
    template = ChatTemplate(folder, "", begins_with_bos=True)
    with pytest.raises(ValueError, match=r"no {% generation %} block"):
        ConversationEncoder(template, ChatConfig(), 100, BadRows())
    for chat in (ChatConfig(answers="prefixes"), ChatConfig(train_on="all")):
        assert ConversationEncoder(template, chat, 100, BadRows()).encode(CHAT, 1, "row 1") is not None
