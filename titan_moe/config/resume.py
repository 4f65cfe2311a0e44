"""Which fields of a recipe may change when a run goes on from its checkpoint: one table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from titan_moe.config.recipe import Recipe
from titan_moe.config.renamed import values_before
from titan_moe.config.schema import Table, all_keys, given_in, in_toml, keys_of


class Change(Enum):
    """What a resume does with a field that differs from the checkpoint's, as `--explain` says it."""

    FREE = "A resume may change it."
    """It changes no number that the run trains on, beyond rounding of sums over ranks. Nothing is said."""
    LOGGED = "A resume may change it; the log names both values."
    """It is a choice that may change within a run. The log names the old and the new value."""
    SAME_CONTENT = "A resume may change it if the tokens stay the same: the data's fingerprint is compared."
    """It names the data or the way to read it. The log names the old and the new value."""
    REFUSED = "A resume may not change it."
    """The weights, the optimizer's state or the position in the data would mean something else."""


FREE, LOGGED, SAME_CONTENT, REFUSED = Change.FREE, Change.LOGGED, Change.SAME_CONTENT, Change.REFUSED

CHANGES: dict[str, Change] = {
    "run": LOGGED,
    "run.folder": FREE,
    "run.ranks_per_gpu": FREE,
    "run.seed": REFUSED,  # the order of the data
    "model": REFUSED,
    "model.class": LOGGED,  # a class may move; its weights must fit
    "model.name": FREE,
    "model.init_std": FREE,
    "model.embedding_init_std": FREE,
    "model.moe.aux_loss_coef": LOGGED,
    "model.moe.aux_losses": LOGGED,
    "model.moe.z_loss_coef": LOGGED,
    "model.mtp.loss_weight": LOGGED,
    "model.moe.bias_update_speed": LOGGED,
    "model.moe.bias_update": LOGGED,
    "model.moe.bias_ema": LOGGED,
    "model.moe.capacity_factor": LOGGED,
    "model.moe.drop_policy": LOGGED,
    "model.moe.drop_over": LOGGED,
    "model.moe.pad_to_capacity": FREE,
    "model.moe.hash_table": LOGGED,  # those of a checkpoint stay: a file with others is refused
    "model.moe.router_dtype": LOGGED,
    "model.moe.input_jitter": LOGGED,
    "parallel": FREE,
    "perf": LOGGED,
    "perf.loss_chunk_tokens": FREE,
    "precision": LOGGED,
    "precision.master": REFUSED,  # the dtype of the weights that are saved; `SAME` has the exception
    "precision.only_where_faster": FREE,  # the modules that it keeps are written into the recipe of the run
    "compile": LOGGED,
    "memory": FREE,
    "train": LOGGED,
    "train.seq_len_tokens": REFUSED,
    "train.micro_batch_sequences": FREE,
    "optim": LOGGED,
    "optim.kind": REFUSED,  # the states of another kind; `SAME` has the exception
    "optim.ema_decay": REFUSED,  # checkpoints have averages, or none
    "optim.trainable": REFUSED,  # frozen parameters have no moments, and are saved in compute's dtype
    "data": LOGGED,
    "data.source": SAME_CONTENT,
    "data.format": REFUSED,
    "data.chat": SAME_CONTENT,
    "data.path": SAME_CONTENT,
    "data.mixture": SAME_CONTENT,  # of each source; weights are no content
    "data.files": SAME_CONTENT,
    "data.subset": SAME_CONTENT,
    "data.split": SAME_CONTENT,
    "data.text_column": SAME_CONTENT,
    "data.token_dtype": SAME_CONTENT,
    "data.tokenizer": SAME_CONTENT,
    "data.split_special_tokens": SAME_CONTENT,
    "data.is_streamed": REFUSED,
    "data.stream_lanes": REFUSED,
    "data.shuffle_buffer_sequences": REFUSED,
    "data.stream_has_worker": FREE,
    "data.is_shuffled": REFUSED,
    "data.holdout_fraction": REFUSED,
    "data.cache_folder": FREE,
    "validation": LOGGED,
    "validation.every_steps": FREE,
    "checkpoint": FREE,
    "checkpoint.saves_frozen": REFUSED,
    "metrics": FREE,
    "profile": FREE,
}
"""Section or field -> what a resume does with a change in it. The longest entry that a field lies in decides."""

SAME = {"precision.master": ("fp32", "fp32_split"), "optim.kind": ("adamw", "fused_adamw")}
"""Values of a field between which a resume may change although the field may not change otherwise; it is logged."""

DEFAULT = LOGGED
"""For sections without an entry."""


@dataclass(frozen=True)
class RecipeChanges:
    """The fields in which a recipe differs from that of a checkpoint, as one text each: `optim.lr = 0.1 (was 0.2)`."""

    logged: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """With the dotted key first."""


def change_of(dotted: str) -> Change:
    """Look up what a resume does with a change of a field."""
    entry = dotted
    while entry:
        if entry in CHANGES:
            return CHANGES[entry]
        entry = entry.rpartition(".")[0]
    return DEFAULT


def flatten(recipe: Recipe) -> dict[str, Any]:
    """All fields of a recipe by dotted key, as a checkpoint stores them."""
    return dict(_fields(recipe, ""))


def compare(saved: Mapping[str, Any], recipe: Recipe) -> RecipeChanges:
    """Compare a recipe with the fields of a checkpoint's.

    A field that the checkpoint lacks is newer than it, and had its default or the value of `values_before`. Fields that
    no longer exist are ignored.
    """
    changes, saved = RecipeChanges(), {**saved, **values_before(saved)}
    lists = {LOGGED: changes.logged, SAME_CONTENT: changes.logged, REFUSED: changes.refused}
    keys = all_keys(Recipe)
    for dotted, value in flatten(recipe).items():
        before = saved.get(dotted, keys[dotted].default)
        if keys[dotted].is_list:
            before = tuple(before)  # JSON has lists
        before = Table(before) if keys[dotted].is_table else before
        before = tuple(map(Table, before)) if keys[dotted].has_tables else before
        change = LOGGED if {before, value}.issubset(SAME.get(dotted, ())) else change_of(dotted)
        if before != value and (found := lists.get(change)) is not None:
            found.append(f"{dotted} = {in_toml(value)} (was {in_toml(before)})")
    return changes


def _fields(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key in keys_of(type(section), prefix):
        value = getattr(section, key.attribute)
        if key.is_section:
            yield from _fields(value, f"{key.dotted}.")
        else:
            yield key.dotted, tuple(map(given_in, value)) if key.has_tables else value
