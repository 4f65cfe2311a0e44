"""Write a recipe from a config.json: what it says, and in comments what was assumed. No torch is needed."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_moe.checkpoint.hf_folder import HuggingFaceError, names_on_disk, read_config
from titan_moe.checkpoint.hf_names.dense import DENSE, dense_family
from titan_moe.checkpoint.hf_names.families import family_for, family_of
from titan_moe.checkpoint.hf_names.family import Family, Settings, flat
from titan_moe.checkpoint.hf_names.names import NotOnDisk, prefixes_of_mtp
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.schema import in_toml

UNREAD = {"architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map", "use_cache"}
"""Keys of config.json that say nothing of what a model computes."""


def read_model(folder: Path) -> tuple[Family, ModelConfig, Settings]:
    """The family and `[model]` of a Hugging Face checkpoint, and how its config.json was read.

    Raises: HuggingFaceError for what is not built here.
    """
    config = read_config(folder)
    try:
        family = family_of(config)
        model, settings = family.read(config)
        return family, without_absent(family, model, names_on_disk(folder)), settings
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise HuggingFaceError(folder, [str(error)]) from error


def without_absent(family: Family, model: ModelConfig, names: Collection[str]) -> ModelConfig:
    """A model without multi-token prediction whose tensors are not on disk: transformers keeps the number in
    config.json, and saves none of them. `names` are those on disk, if they are known."""
    lacks = names and not any(name.startswith(prefixes_of_mtp(model)) for name in names)
    return without_parts(family, model, family.built) if lacks else model


def without_parts(family: Family, model: ModelConfig, parts: Collection[str]) -> ModelConfig:
    """A model without parts that it may lack."""
    return replace(model, mtp=replace(model.mtp, num_depths=0)) if "mtp" in family.built.intersection(parts) else model


def recipe_text(folder: Path) -> str:
    """A recipe that trains the weights of a Hugging Face checkpoint on, as TOML.

    Raises: HuggingFaceError for what is not built here.
    """
    family, model, settings = read_model(folder)
    has_bias = not isinstance(family.names(model)["feed_forward.router.expert_bias_E"], NotOnDisk)
    skipped = parts_not_built(family, settings.values)
    load = [f"load_without = {in_toml(tuple(skipped))}"] if skipped else []
    return _text(folder, family, model, settings, has_bias, [*load, "export_hf_at_end = true"])


def upcycled_text(folder: Path, copies: int, granularity: int) -> str:
    """A recipe that begins a MoE model with the weights of a dense one, as TOML. A token has two copies of each piece.

    Raises: HuggingFaceError for a family that is none of the dense ones, or an MLP that cannot be cut so.
    """
    config = read_config(folder)
    family = dense_family(config)
    if family is None:
        problem = f"--upcycle needs a dense model, of {', '.join(DENSE)}; config.json has model_type = "
        raise HuggingFaceError(folder, [f"{problem}{config.get('model_type')!r}"])
    try:
        model, settings = family.read(config)
    except ValueError as error:
        raise HuggingFaceError(folder, [str(error)]) from error
    width, rest = divmod(model.ffn_hidden_size, granularity)
    if rest:
        raise HuggingFaceError(folder, [f"--granularity {granularity} does not divide {model.ffn_hidden_size} units"])
    moe = MoEConfig(copies * granularity, min(copies, 2) * granularity, width)
    model = replace(model, moe=moe, ffn_hidden_size=0)
    try:
        family_for(model)
        export = "export_hf_at_end = true"
    except ValueError:
        export = "# no family of Hugging Face has words for this model, so it is not exported"
    upcycle = ["", "[checkpoint.upcycle]", f"granularity = {granularity}"]
    return _text(folder, family, model, settings, False, [export, *upcycle])


def _text(
    folder: Path, family: Family, model: ModelConfig, settings: Settings, has_bias: bool, of_checkpoint: list[str]
) -> str:
    """`has_bias` is whether a family has a place for the bias that balances; `of_checkpoint` follows `load_from`."""
    values, defaults = flat(model), flat(ModelConfig())
    lines = [f"# From config.json of {folder.name}, of the family {family.model_type}."]
    if settings.assumed:
        assumed = {key: value for key, value in sorted(settings.assumed.items()) if value is not None}
        lines += ["# It lacks these keys, so the family's values were taken:"]
        lines += [f"#   {key} = {in_words(value)}" for key, value in assumed.items()]
    if unread := sorted(settings.values.keys() - settings.used - UNREAD):
        lines += ["# These keys were not read:", *_wrapped(unread)]
    lines += [f"# {part} is not built here and left out" for part in parts_not_built(family, settings.values)]
    lines += ["", "[model]", f"name = {in_toml(_name(folder))}", *_section(values, defaults, "")]
    for section in ("attention", "moe", "mtp"):
        if (of_section := _section(values, defaults, f"{section}.")) or section != "mtp":
            lines += ["", f"[model.{section}]", *of_section]
    balance = "bias_update_speed, aux_loss_coef" if has_bias else "aux_loss_coef"
    lines += [f"# nothing balances the experts' load; to do so set {balance}"]
    lines += ["", "[checkpoint]", f"load_from = {in_toml(f'hf:{folder}')}"]
    lines += of_checkpoint
    if any(folder.glob("tokenizer*")):
        lines += ["", "[data]", f"tokenizer = {in_toml(str(folder))}"]
    return "\n".join(lines) + "\n"


def parts_not_built(family: Family, config: Mapping[str, Any]) -> list[str]:
    """Parts that the model has and ours does not."""
    return [
        part
        for part, without in family.without.items()
        if part not in family.built and any(config.get(key, absent) != absent for key, absent in without.items())
    ]


def _section(values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> list[str]:
    """The fields of a section that are not at their defaults."""
    names = [key for key in values if key.startswith(prefix) and "." not in key.removeprefix(prefix)]
    return [f"{key.removeprefix(prefix)} = {in_toml(values[key])}" for key in names if values[key] != defaults[key]]


def _name(folder: Path) -> str:
    return folder.absolute().name.lower().replace("-", "_")


def in_words(value: Any) -> str:
    """A value of config.json."""
    return in_toml(value) if isinstance(value, (bool, int, float, str)) else repr(value)


def _wrapped(names: list[str]) -> list[str]:
    lines = ["#  "]
    for name in names:
        if len(lines[-1]) + len(name) > 100:
            lines.append("#  ")
        lines[-1] += f" {name}"
    return lines
