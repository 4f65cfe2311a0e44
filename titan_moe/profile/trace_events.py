"""Read the events of a Chrome trace one by one, so that memory does not grow with the file."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK_CHARACTERS = 2**22
EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
BASE_TIME = re.compile(r'"baseTimeNanoseconds"\s*:\s*(\d+)')
BETWEEN = re.compile(r"[\s,]*")
"""What separates events."""


class TraceFile:
    """The events of a file, in its order.

    Raises: ValueError, when the events are read, if the file is no trace or is not whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.base_us: float | None = None
        """Unix time of the trace's time 0, known once all events are read; None if the file does not have it."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        decode = json.JSONDecoder().raw_decode
        with self.path.open(encoding="utf-8", errors="replace") as file:
            text = ""
            while not (begin := EVENTS.search(text)):
                chunk = file.read(CHUNK_CHARACTERS)
                if not chunk:
                    raise ValueError("this is no Chrome trace: it has no traceEvents")
                text += chunk
            self._find_base(text[: begin.start()])
            at = begin.end()
            while True:
                at = BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches the empty string
                if text.startswith("]", at):
                    break
                try:
                    event, at = decode(text, at)
                except json.JSONDecodeError as error:
                    chunk = file.read(CHUNK_CHARACTERS)
                    if not chunk:
                        raise ValueError("the trace ends within its events: it was not written to its end") from error
                    text, at = text[at:] + chunk, 0
                    continue
                yield event
            self._find_base(text[at:] + file.read())

    def _find_base(self, text: str) -> None:
        if found := BASE_TIME.search(text):
            self.base_us = int(found[1]) / 1e3
