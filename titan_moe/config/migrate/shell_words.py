"""Read the words of a shell script that starts a job: quotes, line ends with a backslash, variables, arrays.

Nothing is executed. What is not in the file (`$1`, `$(hostname)`) stays in a word and marks it. Conditions and loops
are refused: which of their words hold is not known.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from titan_moe.config.migrate.arithmetic import NotArithmetic, evaluate

MAX_CHARACTERS = 1_000_000
"""Of a script when its variables are written out: more is a mistake."""
ASSIGNMENT = re.compile(r"(?:(?:export|local|readonly)[ \t]+)?([A-Za-z_]\w*)(\+?)=")
KEYWORDS = {"if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "case", "esac", "function"}
NAME = re.compile(r"\w+")


class Character(NamedTuple):
    """A letter of a word, and where the file has it."""

    text: str
    line: int
    is_unknown: bool = False


Text = list[Character]


class Word(NamedTuple):
    """A word, its line, and the part of it that the file does not say."""

    text: str
    line: int
    unknown: str = ""


class ScriptError(Exception):
    """What cannot be read, with its line."""


def commands_of(script: str) -> tuple[list[list[Word]], list[Word]]:
    """The words of each command of a script, and those of all that it assigns.

    Raises: ScriptError.
    """
    return _Reader(script).read()


class _Reader:
    def __init__(self, script: str) -> None:
        self.script = script
        self.at, self.line, self.written_out = 0, 1, 0
        self.variables: dict[str, list[Text]] = {}
        self.assigned: list[str] = []

    def read(self) -> tuple[list[list[Word]], list[Word]]:
        commands: list[list[Word]] = []
        while self.at < len(self.script):
            if (match := ASSIGNMENT.match(self.script, self.at)) is not None:
                self._assign(match)
            elif self.script[self.at] in " \t\r\n;&|()":
                self._skip()
            elif words := [_word(text) for text in self._words("\n;&|()<>")]:
                if words[0].text in KEYWORDS:
                    way_out = "write the words that hold into a file without it"
                    raise ScriptError(f"line {words[0].line}: {words[0].text} is not evaluated; {way_out}")
                commands.append(words)
            elif self.at < len(self.script):
                self._skip()
        values = [text for name in self.assigned for text in self.variables[name]]
        return commands, [_word(part) for text in values for part in _split(text)]

    def _skip(self) -> None:
        self.line += self.script[self.at] == "\n"
        self.at += 1

    def _assign(self, match: re.Match[str]) -> None:
        name, adds = match[1], bool(match[2])
        self.at = match.end()
        if self.script.startswith("(", self.at):
            started = self.line
            self._skip()
            value = self._words(")", lines_end=False)
            if self.at >= len(self.script):
                raise ScriptError(f'line {started}: "(" of {name} is not closed')
            self._skip()
            self.variables[name] = (self.variables.get(name, []) if adds else []) + value
        else:
            value = self._words(" \t\r\n;&|()", is_one=True)
            text = value[0] if value else []
            before = self.variables.get(name, [[]])[0] if adds and self.variables.get(name) else []
            self.variables[name] = [before + text]
        if name not in self.assigned:
            self.assigned.append(name)

    def _words(self, ends: str, *, lines_end: bool = True, is_one: bool = False) -> list[Text]:
        """Read words up to one of `ends`. `is_one` reads the value of a variable, which nothing splits."""
        words: list[Text] = []
        current: Text | None = None
        while self.at < len(self.script):
            letter = self.script[self.at]
            if letter == "\\":
                current = self._escaped(current)
            elif letter == "(" and self.script.startswith("([", self.at):  # Megatron's ([0]*3+[1]*58), without quotes
                end = self._closing("(", ")", self.at)
                current = (current or []) + [Character(one, self.line) for one in self.script[self.at : end]]
                self._advance(end)
            elif current and self._is_inside(letter, current):
                current.append(Character(letter, self.line))
                self.at += 1
            elif letter in ends and not (letter == "\n" and not lines_end):
                if letter in "<>" and current and all(one.text.isdecimal() for one in current):
                    current = None  # the 2 of 2>&1
                break
            elif letter in " \t\r\n":
                words += [current] if current is not None else []
                current = None
                self._skip()
            elif letter == "#" and current is None:
                while self.at < len(self.script) and self.script[self.at] != "\n":
                    self.at += 1
            elif letter in "'\"":
                quoted = self._quoted(letter)
                if len(quoted) > 1 and not is_one:
                    words += [(current or []) + quoted[0], *quoted[1:-1]]
                    current = quoted[-1]
                else:
                    current = (current or []) + [one for text in quoted for one in text]
            elif letter in "$`":
                for number, value in enumerate(self._substituted()):
                    parts = [value] if is_one else _split(value)
                    if (number or (value and value[0].text.isspace())) and current is not None and not is_one:
                        words.append(current)
                        current = None
                    for part in parts[:-1]:
                        words.append((current or []) + part)
                        current = None
                    current = (current or []) + parts[-1] if parts else current
            else:
                current = [*(current or [])] if current is None else current
                current.append(Character(letter, self.line))
                self.at += 1
        return words + ([current] if current is not None else [])

    def _is_inside(self, letter: str, current: Text) -> bool:
        """Whether a mark of the shell belongs to the word before it, as in Megatron's layout `Et*3|(tt|)*29tL`."""
        opened = sum((one.text == "(") - (one.text == ")") for one in current)
        goes_on = self.script[self.at + 1 : self.at + 2].strip() != ""
        return (letter == ")" and opened > 0) or (letter in "|(" and goes_on and current[-1].text != letter)

    def _escaped(self, current: Text | None) -> Text | None:
        following = self.script[self.at + 1 : self.at + 3]
        if following.startswith(("\n", "\r\n")):
            self.at += 1 + following.index("\n") + 1
            self.line += 1
            return current
        self.at += 2
        return (current or []) + [Character(following[:1], self.line)] if following else current

    def _quoted(self, mark: str) -> list[Text]:
        """The text between quotes; several words for an array in double quotes."""
        started = self.line
        self.at += 1
        texts: list[Text] = [[]]
        while self.at < len(self.script) and self.script[self.at] != mark:
            letter = self.script[self.at]
            if mark == '"' and letter == "\\":
                texts[-1] = self._escaped(texts[-1]) or []
            elif mark == '"' and letter in "$`":
                values = self._substituted() or [[]]
                texts[-1] = texts[-1] + values[0]
                texts += values[1:]
            else:
                texts[-1].append(Character(letter, self.line))
                self._skip()
        if self.at >= len(self.script):
            raise ScriptError(f"line {started}: the quote {mark} is not closed")
        self.at += 1
        return texts

    def _substituted(self) -> list[Text]:
        """What stands for a variable or a command; several texts for an array."""
        start, line = self.at, self.line
        if self.script[self.at] == "`":
            return [self._unknown(start, self._closing("`", "`", self.at + 1), line)]
        if self.script.startswith("$((", self.at):
            end = self._closing("(", ")", self.at + 1)
            return [self._arithmetic(start, end, line)]
        if self.script.startswith("$(", self.at):
            return [self._unknown(start, self._closing("(", ")", self.at + 1), line)]
        if self.script.startswith("${", self.at):
            end = self._closing("{", "}", self.at + 1)
            inner = self.script[self.at + 2 : end - 1]
            match = re.fullmatch(r"(\w+)(?:\[[@*]\])?(?::?-(.*))?", inner, re.DOTALL)
            if match is None:
                return [self._unknown(start, end, line)]
            self._advance(end)
            if match[1] in self.variables:
                return self._value(match[1])
            return [self._of_default(match[2], line)] if match[2] is not None else [self._unknown(start, end, line)]
        match = NAME.match(self.script, self.at + 1)
        end = match.end() if match and not match[0][0].isdigit() else self.at + 2
        self._advance(end)
        name = self.script[start + 1 : end]
        return self._value(name) if name in self.variables else [self._unknown(start, end, line)]

    def _value(self, name: str) -> list[Text]:
        value = self.variables[name]
        self.written_out += sum(map(len, value))
        if self.written_out > MAX_CHARACTERS:
            raise ScriptError(f"line {self.line}: ${name} makes more than {MAX_CHARACTERS:,} letters")
        return value

    def _of_default(self, text: str, line: int) -> Text:
        if "$" in text or "`" in text:
            return [Character(letter, line, is_unknown=True) for letter in text]
        return [Character(letter, line) for letter in text.strip("\"'")]

    def _arithmetic(self, start: int, end: int, line: int) -> Text:
        def value(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            return "".join(one.text for text in self._value(name) for one in text) if name in self.variables else name

        text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?|(\b\B)", value, self.script[start + 3 : end - 2])
        try:
            result = evaluate(text.replace("/", "//"))
        except NotArithmetic:
            return self._unknown(start, end, line)
        self._advance(end)
        return [Character(letter, line) for letter in str(result)]

    def _unknown(self, start: int, end: int, line: int) -> Text:
        self._advance(end)
        return [Character(letter, line, is_unknown=True) for letter in self.script[start:end]]

    def _advance(self, end: int) -> None:
        self.line += self.script.count("\n", self.at, end)
        self.at = max(self.at, end)

    def _closing(self, opening: str, closing: str, at: int) -> int:
        """Behind the bracket that closes the one at `at`."""
        depth, line = 0 if opening != closing else 1, self.line
        while at < len(self.script):
            depth += (self.script[at] == opening) - (self.script[at] == closing) if opening != closing else 0
            if opening == closing and self.script[at] == closing:
                depth = 0
            at += 1
            if depth == 0:
                return at
        raise ScriptError(f'line {line}: "{opening}" is not closed')


def _split(text: Text) -> list[Text]:
    parts: list[Text] = [[]]
    for one in text:
        if one.text.isspace():
            parts.append([])
        else:
            parts[-1].append(one)
    return [part for part in parts if part]


def _word(text: Text) -> Word:
    return Word("".join(one.text for one in text), text[0].line if text else 0, _unknown_of(text))


def _unknown_of(text: Iterable[Character]) -> str:
    return "".join(one.text for one in text if one.is_unknown)
