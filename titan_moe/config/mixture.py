"""The sources of a mixture: `[[data.mixture]]`."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from titan_moe.config.data_files import KINDS

NOT_READ = "not read"
"""The fingerprint of a source of weight 0."""
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class MixtureSource:
    """A source of a mixture. Fields that are left empty are those of `[data]`."""

    path: str = ""
    """What `data.path` may be."""
    weight: float = 1.0
    """Its share of the sequences is this number over the sum of all. With 0 it is not opened, neither for validation,
    and its place is kept."""
    name: str = ""
    """In logs, in the metric `epoch/NAME`, and for a resume, which finds the place in a source by its name. Empty: the
    last part of the path that is no pattern, without its ending: `code` for `data/code.jsonl` and `data/code/*.txt`."""
    source: Literal["auto", "text", "datasets", "tokens"] = "auto"
    """How the path is read: as `data.source` says."""
    format: Literal["", "text", "chat"] = ""
    """What a row is: `data.format`."""
    files: str = ""
    """`data.files`."""
    subset: str = ""
    """`data.subset`."""
    split: str = ""
    """`data.split`."""
    text_column: str = ""
    """`data.text_column`."""
    is_streamed: bool = False
    """`data.is_streamed`. Then validation needs data of its own."""

    @property
    def label(self) -> str:
        """The name, or that of the path."""
        parts = [part for part in (self.files or self.path).split("/") if part and not _GLOB.search(part)]
        return self.name or (_without_ending(parts[-1]) if parts else "")

    @property
    def options(self) -> dict[str, Any]:
        """The fields of `[data]` that differ in it."""
        given = {name: getattr(self, name) for name in ("format", "split", "text_column")}
        own: dict[str, Any] = {"path": self.path, "source": self.source, "files": self.files, "subset": self.subset}
        own |= {"is_streamed": self.is_streamed}
        return own | {name: value for name, value in given.items() if value}


def of_source(name: str, problem: str) -> str:
    """A problem of `[data]` as one of a source of a mixture."""
    words = re.sub(r"data\.(path|source|format|files|subset|split|text_column|is_streamed)\b", r"\1", problem)
    return f"the source '{name}' of data.mixture: {words}"


def _without_ending(name: str) -> str:
    stem = re.sub(r"\.(gz|zst)$", "", name)
    ending = next((ending for ending in KINDS if stem.endswith(ending)), "")
    return stem.removesuffix(ending) or name
