"""What is written to a terminal, and to a file instead."""

import io
import logging
import sys

import pytest

from titan_moe.run import start
from titan_moe.run.terminal import CLEAR_LINE, MessageFormat, complain


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def said(stream: io.StringIO, level: int, rank: int = 0) -> str:
    record = logging.LogRecord("titan_moe", level, __file__, 1, "%d experts", (8,), None)
    return MessageFormat(stream, rank).format(record)


def test_messages_in_a_file_are_plain() -> None:
    assert said(io.StringIO(), logging.WARNING) == "8 experts"
    assert said(io.StringIO(), logging.WARNING, rank=3) == "[rank 3] 8 experts"


def test_messages_on_a_terminal_clear_the_bar_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(Terminal(), logging.INFO) == f"{CLEAR_LINE}8 experts"
    assert said(Terminal(), logging.WARNING, rank=3) == f"{CLEAR_LINE}\x1b[33m[rank 3] 8 experts\x1b[0m"
    assert said(Terminal(), logging.ERROR) == f"{CLEAR_LINE}\x1b[31m8 experts\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert said(Terminal(), logging.ERROR) == f"{CLEAR_LINE}8 experts"
    monkeypatch.setenv("TERM", "dumb")
    assert said(Terminal(), logging.ERROR) == "8 experts"


@pytest.mark.parametrize(
    ("stream", "expected"),
    [(io.StringIO(), "titan-moe: no\n"), (Terminal(), f"{CLEAR_LINE}\x1b[31mtitan-moe:\x1b[0m no\n")],
)
def test_errors_name_the_command(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, expected: str) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    complain("no")
    assert stream.getvalue() == expected


def test_logging_goes_to_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    root, ours = logging.getLogger(), logging.getLogger("titan_moe")
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(ours, "level", ours.level)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    monkeypatch.setenv("RANK", "2")
    start.set_up_logging()
    root.warning("seen")
    assert stream.getvalue() == "[rank 2] seen\n" and ours.level == logging.WARNING
