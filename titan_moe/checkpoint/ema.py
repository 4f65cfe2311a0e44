"""The averages of weights that a run keeps (`optim.ema_decay`), read in place of the weights."""

from collections import defaultdict
from collections.abc import Container
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from titan_moe.checkpoint.find import saved_fields
from titan_moe.checkpoint.storage import PlainReader
from titan_moe.checkpoint.weights import MOMENTS, saved_shapes
from titan_moe.config.optimizers import EMA

TIED = ("embed.weight", "head.weight")
"""The names of tied embeddings, of which the average has one."""


def lacks_averages(folder: Path) -> str:
    """Say that a checkpoint has no averages of its weights; empty if it has, or cannot be read."""
    names, unread = saved_shapes(folder)
    if unread or any(name.startswith(MOMENTS) and name.endswith(f".{EMA}") for name in names):
        return ""
    return f"{folder} has no averages of its weights; a run keeps them with optim.ema_decay = 0.999"


def reader_of_weights(folder: Path, *, is_ema: bool = False) -> PlainReader:
    """What reads the weights of a checkpoint, or with `is_ema` their averages, under the names of the weights."""
    return AveragesReader(folder) if is_ema else PlainReader(folder)


class AveragesReader(PlainReader):
    """Reads averages under the names of their weights. What has none, as what does not train, is as it is.

    All that reads weights is the same for both: names, shapes and slices are those of the weights, and averages are in
    fp32 or wider.
    """

    @cached_property
    def metadata(self) -> Metadata:
        """What the checkpoint holds, with averages for weights."""
        found = super().metadata
        names = found.state_dict_metadata
        tied = TIED if saved_fields(Path(self.path)).get("model.embeddings_are_tied") else ()
        sources = {name: _average_of(name, tied, names) for name in names}
        slices: defaultdict[str, list[MetadataIndex]] = defaultdict(list)
        for index in found.storage_data or ():
            slices[index.fqn].append(index)
        moved = {
            replace(index, fqn=name): found.storage_data[index]
            for name, source in sources.items()
            for index in slices[source]
        }
        entries = {name: names[source] for name, source in sources.items()}
        return replace(found, state_dict_metadata=entries, storage_data=moved)


def _average_of(name: str, tied: tuple[str, ...], names: Container[str]) -> str:
    """The name of the average of a weight; of a tied one it may have the other's. Its own where there is none."""
    averages = [f"{MOMENTS}{each}.{EMA}" for each in (name, *(tied if name in tied else ()))]
    return next((each for each in averages if each in names), name)
