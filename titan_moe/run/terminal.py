"""What is written to a terminal: colours, and lines that do not mix with a progress bar. Does not import torch.

Results go to standard output, as lines that scripts read: records, samples, tables. Messages, warnings, errors and the
bar go to standard error. Ranks of a host share both.
"""

import logging
import os
import sys
from typing import TextIO

CLEAR_LINE = "\r\x1b[K"
"""Goes to the start of a line and empties it: another rank may have its bar there, which it draws again below."""
COLOURS = {"bold": 1, "red": 31, "green": 32, "yellow": 33}


def is_terminal(stream: TextIO) -> bool:
    """Whether what is written can be moved and coloured: a terminal that is not `TERM=dumb`."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colours(stream: TextIO) -> bool:
    """Whether to use colours: on a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def painted(words: str, colour: str, stream: TextIO) -> str:
    """Words in a colour of `COLOURS`, if the stream has colours."""
    return f"\x1b[{COLOURS[colour]}m{words}\x1b[0m" if has_colours(stream) else words


def complain(message: str) -> None:
    """Write an error of the command to standard error."""
    stream = sys.stderr
    start = CLEAR_LINE if is_terminal(stream) else ""
    print(f"{start}{painted('titan-moe:', 'red', stream)} {message}", file=stream, flush=True)


class MessageFormat(logging.Formatter):
    """Messages as they are; those of other ranks than the first with their rank. On a terminal in colours by level."""

    def __init__(self, stream: TextIO, rank: int) -> None:
        super().__init__(f"[rank {rank}] %(message)s" if rank else "%(message)s")
        self.stream = stream

    def format(self, record: logging.LogRecord) -> str:
        words = super().format(record)
        if not is_terminal(self.stream):
            return words
        colour = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else ""
        return CLEAR_LINE + (painted(words, colour, self.stream) if colour else words)
