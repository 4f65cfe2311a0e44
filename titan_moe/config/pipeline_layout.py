"""The language of `parallel.pp_layout`, which is that of Megatron's --pipeline-model-parallel-layout.

"Et*3|(tt|)*2tL" is "Ettt|tt|tt|tL": four stages. E is the embedding, t a decoder layer, m a layer of multi-token
prediction, L the last norm, the head and the loss; | separates two stages. *n repeats the letter or the (group) before
it. Commas and spaces are ignored. All m are right before L, on its stage, which has the embedding too then: "|mL" gives
them a stage of their own.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

LETTERS = "EtmL|"
IGNORED = ", "
MAX_LETTERS = 100_000
"""Of a layout when repeats are written out: more is a mistake."""


class Letter(NamedTuple):
    """A letter, and where the text has it."""

    text: str
    position: int  # from 1


@lru_cache(maxsize=64)
def parse_layout(layout: str, num_layers: int, num_stages: int, num_mtp_layers: int = 0) -> tuple[tuple[str, ...], ...]:
    """Return the names of the modules of each stage, as models/part.py takes them; an empty stage has none.

    Raises: ValueError that says what is wrong, where, and what was expected.
    """
    letters = [Letter(text, position) for position, text in enumerate(layout, 1) if text not in IGNORED]
    written_out, end = _sequence(letters, 0)
    if end < len(letters):
        raise ValueError(f'")" at position {letters[end].position} has no "(" before it; drop it, or add "("')
    _check_ends(written_out)
    _check_mtp(written_out, num_mtp_layers)
    num_t = sum(letter.text == "t" for letter in written_out)
    if num_t != num_layers:
        raise ValueError(f"it has {num_t} layers (t), but model.num_layers = {num_layers}")
    num_found = 1 + sum(letter.text == "|" for letter in written_out)
    if num_found != num_stages:
        raise ValueError(f"it has {num_found} stages, separated by |, but parallel.pp * vpp = {num_stages}")
    return _modules(written_out)


def _sequence(letters: Sequence[Letter], start: int) -> tuple[list[Letter], int]:
    """Write out what is before the next closing bracket, and say where that is."""
    written_out: list[Letter] = []
    at = start
    while at < len(letters) and letters[at].text != ")":
        letter = letters[at]
        if letter.text == "(":
            group, end = _sequence(letters, at + 1)
            if end == len(letters):
                raise ValueError(f'"(" at position {letter.position} is not closed; expected ")"')
            at = end
        elif letter.text in LETTERS:
            group = [letter]
        else:
            expected = "a letter or ( before it" if letter.text == "*" else "E, t, m, L, |, (, ) or *"
            raise ValueError(f'"{letter.text}" at position {letter.position} is unknown there; expected {expected}')
        count, at = _repeats(letters, at + 1)
        if len(written_out) + count * len(group) > MAX_LETTERS:
            raise ValueError(f"the repeat of position {letter.position} makes more than {MAX_LETTERS:,} letters")
        written_out += count * group
    return written_out, at


def _repeats(letters: Sequence[Letter], at: int) -> tuple[int, int]:
    """How often to repeat what is before, 1 without a star, and where the text goes on."""
    if at == len(letters) or letters[at].text != "*":
        return 1, at
    end = at + 1
    while end < len(letters) and letters[end].text in "0123456789":
        end += 1
    digits = "".join(letter.text for letter in letters[at + 1 : end])
    if not 0 < len(digits) <= len(str(MAX_LETTERS)) or int(digits) == 0:
        raise ValueError(f'"*" at position {letters[at].position} needs a number behind it, 1 or more')
    return int(digits), end


def _check_ends(letters: Sequence[Letter]) -> None:
    """E is first, L is last, and each is there once. So no stage is before the embedding or after the loss."""
    for text, meaning in (("E", "the embedding"), ("L", "the loss")):
        places = [letter.position for letter in letters if letter.text == text]
        if len(places) != 1:
            found = f"it is at positions {', '.join(map(str, places[:3]))}" if places else "there is none"
            raise ValueError(f"{text} ({meaning}) is needed once, and {found}")
    for at, text, which in ((0, "E", "first"), (-1, "L", "last")):
        if letters[at].text != text:
            raise ValueError(f'"{letters[at].text}" at position {letters[at].position} is {which}; expected {text}')


def _check_mtp(letters: Sequence[Letter], number: int) -> None:
    """As many as the model has, right before L: the loss of a depth needs the head, and the next depth its state."""
    found = [letter for letter in letters if letter.text == "m"]
    if len(found) != number:
        raise ValueError(
            f"it has {len(found)} blocks of multi-token prediction (m), but the model has {number}, by "
            f'model.mtp.num_depths and repeats_layer; write "{"m" * number}L" at its end'
        )
    before_loss = letters[len(letters) - 1 - number : -1]
    for letter in found:
        if letter not in before_loss:
            raise ValueError(
                f'"m" at position {letter.position} must be right before L, on its stage: each depth needs the head; '
                f'write "|{"m" * number}L" for a stage of its own'
            )


def _modules(letters: Sequence[Letter]) -> tuple[tuple[str, ...], ...]:
    stages: list[list[str]] = [[]]
    num_layers = 0
    for letter in letters:
        if letter.text == "|":
            stages.append([])
        elif letter.text == "E":
            stages[-1].append("embed")
        elif letter.text == "L":  # m are numbered behind t, and the last norm is before them
            stages[-1] += ["norm", "head"]
        else:
            stages[-1].append(f"layers.{num_layers}")
            num_layers += 1
    return tuple(tuple(stage) for stage in stages)
