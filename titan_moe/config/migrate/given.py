"""What a job of another framework says: names, values, and where they are written."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from titan_moe.config.renamed import NAMES_ELSEWHERE, WITHOUT_FIELD
from titan_moe.config.schema import cut, shown


@dataclass(frozen=True)
class Entry:
    """A value, and its place in the file."""

    name: str
    """With underscores; with the section of torchtitan or Bridge where this is what the tables have."""
    value: Any
    written: str
    """The name as the file has it: `--num-layers`, `training.steps`."""
    line: int = 0
    """0 for what the other framework takes where the file says nothing."""
    unknown: str = ""
    """The part of the value that is not in the file, such as `$1`."""

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"line {self.line}: {cut(self.written)}" if self.line else f"{self.written} by default"

    @property
    def in_words(self) -> str:
        """Name, value and line, for comments."""
        where = f"line {self.line}" if self.line else "its default"
        return f"{cut(self.written)} = {shown(self.value)} ({where})"


class Unreadable(Exception):
    """A value that is not what its name takes."""

    def __init__(self, entry: Entry, expected: str) -> None:
        super().__init__(f"{entry.place} = {shown(entry.value)} must be {expected}")


class NoCounterpart(Exception):
    """A value that no field of ours can have, and why or what to take. Fields that others of a row give still hold."""

    def __init__(self, reason: str, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.values = values or {}


class Noted(NamedTuple):
    """A value of ours that is not quite the other one."""

    value: Any
    note: str


class Given(Mapping[str, Entry]):
    """The entries of a file by name, and those of another framework's defaults."""

    def __init__(self, dialect: str, entries: Mapping[str, Entry], num_ranks: int | None = None) -> None:
        self.dialect, self.num_ranks = dialect, num_ranks
        self._entries = dict(entries)
        self._by_key = {key: entry for name, entry in entries.items() if (key := key_of(name))}

    def __getitem__(self, name: str) -> Entry:
        found = self._entries.get(name) or self._by_key[name]
        if found.value is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None

    def raw(self, name: str, default: Any = None) -> Any:
        """A value, by their name or by our key."""
        return self[name].value if name in self else default

    def whole(self, name: str, default: int = 0, least: int = 0) -> int:
        """A whole number.

        Raises: Unreadable if it is none, or below `least`.
        """
        value = self.raw(name, default)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value < 2**63:
            raise Unreadable(self[name], f"a whole number, at least {least}")
        return value

    def number(self, name: str, default: float = 0.0) -> float:
        """A number.

        Raises: Unreadable if it is none.
        """
        value = self.raw(name, default)
        if type(value) not in (int, float) or not abs(value) < 2.0**63:
            raise Unreadable(self[name], "a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Whether something is on.

        Raises: Unreadable if it is neither true nor false.
        """
        value = self.raw(name, default)
        if type(value) is not bool:
            raise Unreadable(self[name], "true or false")
        return value

    def words(self, name: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        """One or several words."""
        value = self.raw(name, list(default))
        listed = value if isinstance(value, list) else [value]
        return tuple(word for entry in listed for word in str(entry).replace(",", " ").split())

    def word(self, name: str, default: str = "") -> str:
        """A word in small letters, without the module in front: `torch.bfloat16` is `bfloat16`."""
        value = self.raw(name, default)
        if not isinstance(value, str):
            raise Unreadable(self[name], "a word")
        return value.lower().rpartition(".")[2] if value.startswith("torch.") else value.lower()


class Row(NamedTuple):
    """How names of other frameworks become fields of ours, where one value is not simply another."""

    owns: str
    """The names that it answers for. It holds where one of them is given."""
    to: Callable[[Given], Mapping[str, Any]]
    """Values by our key."""


OWN_NAMES = {
    name: key
    for key, names in {
        "train.steps": "training.steps",
        "model.num_layers": "num_layers",
        "model.hidden_size": "hidden_size",
        "model.vocab_size": "vocab_size",
        "model.moe.num_experts": "num_experts",
        "model.moe.top_k": "top_k",
        "model.attention.clip_qkv": "clip_qkv",
        "model.attention.rope_theta": "rope_theta",
        "model.attention.head_dim": "head_dim",
        "model.attention.num_kv_heads": "num_kv_heads",
        "model.attention.q_lora_rank": "q_lora_rank",
        "model.attention.kv_lora_rank": "kv_lora_rank",
        "model.attention.qk_nope_head_dim": "qk_nope_head_dim",
        "model.attention.qk_rope_head_dim": "qk_rope_head_dim",
        "model.attention.v_head_dim": "v_head_dim",
        "parallel.tp_comm_overlap": "tp_comm_overlap",
        "optim.lr": "lr optimizer.lr",
        "optim.beta1": "beta1",
        "optim.beta2": "beta2",
        "optim.eps": "eps optimizer.eps",
        "optim.weight_decay": "weight_decay",
        "optim.warmup_steps": "warmup_steps",
        "run.seed": "seed",
        "metrics.wandb_project": "wandb_project",
    }.items()
    for name in names.split()
}
"""Names of others that are those of our fields."""


def answer_of(name: str) -> str:
    """Our key for another framework's name, with its words if values differ; empty if there is none."""
    bare = name.rpartition(".")[2]
    for spelt in (name, bare):
        if found := OWN_NAMES.get(spelt) or NAMES_ELSEWHERE.get(spelt, ""):
            return found
        if spelt in WITHOUT_FIELD:
            return ""
    return ""


def key_of(name: str) -> str:
    """Our key for a name whose values mean the same; empty if there is none."""
    answer = answer_of(name)
    return "" if " " in answer else answer
