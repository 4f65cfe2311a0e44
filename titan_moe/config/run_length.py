"""How long a run is: `train.steps`, or tokens or epochs, which become steps."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from titan_moe.config.recipe import Recipe
from titan_moe.config.schema import cut
from titan_moe.config.train import TrainConfig

KEYS = ("train.steps", "train.tokens", "train.epochs")
"""Only one of them is given. The nearest source of a recipe that gives one decides: the command line, the file, its
base."""

Settings = TypeVar("Settings", bound=Mapping[str, Any])


def is_given(key: str, value: Any) -> bool:
    """Whether a value says how long a run is. 0 does not; the default of the steps holds where nothing else is said."""
    return key in KEYS and str(value).strip() not in ("0", "0.0")


def without_length(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a nearer source overrides with another length."""
    return {key: value for key, value in settings.items() if key not in KEYS}


def hidden_length(settings: Mapping[str, Any]) -> str:
    """Say that one source gives the default of the steps and another length too, which `given` cannot see. Empty where
    it does not, or has all of KEYS, as the recipe that a run writes."""
    values = {key: settings[key] for key in KEYS if key in settings}
    said = [key for key, value in values.items() if is_given(key, value)]
    if len(said) < 2 or len(values) == len(KEYS) or str(values.get(KEYS[0])) != str(TrainConfig.steps):
        return ""
    both = " and ".join(f"{key} = {cut(str(values[key]))}" for key in said)
    return f"{both} both say how long the run is; leave one of them out"


def given(train: TrainConfig) -> list[str]:
    """Those of KEYS that are given."""
    values = {"steps": train.steps != TrainConfig.steps, "tokens": train.tokens > 0, "epochs": train.epochs > 0}
    return [f"train.{name}" for name, is_set in values.items() if is_set]


def step_tokens(train: TrainConfig) -> int:
    """Tokens of an optimizer step on all ranks, after those of `train.batch_schedule`."""
    return train.global_batch_sequences * train.seq_len_tokens


def known_steps(train: TrainConfig, samples_per_epoch: int = 0) -> int | None:
    """The steps of a run, rounded to whole ones; None for epochs of data whose size is unknown."""
    if train.epochs > 0:
        return max(train.batch_sizes.steps(train.epochs * samples_per_epoch), 1) if samples_per_epoch else None
    if train.tokens > 0:
        return max(train.batch_sizes.steps(train.tokens, train.seq_len_tokens), 1)
    return train.steps


def with_steps(recipe: Recipe, samples_per_epoch: int = 0) -> Recipe:
    """The recipe with its length in steps, as a run and its checkpoints have it.

    Raises: ValueError for epochs of data whose size is unknown.
    """
    steps = known_steps(recipe.train, samples_per_epoch)
    if steps is None:
        raise ValueError(
            f"train.epochs = {recipe.train.epochs:g} needs data of a known size, and data.source = "
            f'"{recipe.data.source}" has none; give train.steps or train.tokens'
        )
    return replace(recipe, train=replace(recipe.train, steps=steps, tokens=0, epochs=0.0))
