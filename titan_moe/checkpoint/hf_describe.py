"""Say what a model is in a config.json, and before a run what its export would refuse. No torch is needed."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from titan_moe.checkpoint.find import HUGGING_FACE
from titan_moe.checkpoint.folders import SOURCE_FOLDER
from titan_moe.checkpoint.hf_folder import CONFIG_FILE, HuggingFaceError, read_config
from titan_moe.checkpoint.hf_names.dense import dense_family
from titan_moe.checkpoint.hf_names.families import family_for, family_of
from titan_moe.checkpoint.hf_names.family import Family, Values, different_fields
from titan_moe.checkpoint.hf_names.names import Fused, NotOnDisk
from titan_moe.config import Recipe
from titan_moe.config.model import ModelConfig


def described(model: ModelConfig, source: Path | None) -> tuple[Family, Values]:
    """The family and the config.json of a model: that of the source, as far as the model is still what it says.

    Raises: ValueError if no family has words for the model.
    """
    if source is None or not (source / CONFIG_FILE).exists():
        family = family_for(model)
        return family, with_parts_left_out(family.write(model), family, family.not_built.keys() - family.built)
    config = read_config(source)
    if dense := dense_family(config):  # of which the model was upcycled
        family, settings = family_for(model), dense.read(config)[1]
        return family, {key: value for key, value in config.items() if key not in settings.used} | family.write(model)
    family = family_of(config)
    was, settings = family.read(config)
    if not different_fields(model, was):
        return family, config
    return family, {key: value for key, value in config.items() if key not in settings.used} | family.write(model)


def with_parts_left_out(config: Mapping[str, Any], family: Family, parts: Iterable[str]) -> Values:
    """A config.json that says that a model lacks parts."""
    return {**config, **{key: value for part in parts for key, value in family.without.get(part, {}).items()}}


def moved_bias(model: ModelConfig, family: Family) -> str:
    """What is wrong if training moves a bias that the family lacks; else an empty string."""
    row, speed = family.names(model).get("feed_forward.router.expert_bias_E"), model.moe.bias_update_speed
    if not (model.moe.moves_bias and model.num_moe_layers and isinstance(row, NotOnDisk)):
        return ""
    field, is_off = (f"bias_update_speed = {speed:g}", "0") if speed else ('bias_update = "quantile"', '"sign"')
    way_out = f"set it to {is_off}, and balance the experts' load by model.moe.aux_loss_coef"
    return f"model.moe.{field} moves biases that {family.model_type} has no place for; {way_out}"


def export_problems(recipe: Recipe) -> Iterator[str]:
    """Why `checkpoint.export_hf_at_end` or `export_adapter_at_end` cannot be done, as far as recipe and config.json say
    it."""
    wanted = recipe.checkpoint
    if not (wanted.export_hf_at_end or wanted.export_adapter_at_end) or recipe.model.class_ != ModelConfig.class_:
        return
    load_from = recipe.checkpoint.load_from
    is_of_hf = load_from.startswith(HUGGING_FACE)
    origin = Path(load_from.removeprefix(HUGGING_FACE)).expanduser()
    places = (Path(recipe.run.folder).expanduser() / SOURCE_FOLDER, origin, origin.parent.parent / SOURCE_FOLDER)
    source = next((folder for folder in places[: 3 if load_from else 1] if (folder / CONFIG_FILE).is_file()), None)
    if is_of_hf and source is None:
        return  # the load says it
    problem = of_adapter = ""
    try:
        family = described(recipe.model, source)[0]
        problem, of_adapter = moved_bias(recipe.model, family), nameless_experts(recipe.model, family)
    except HuggingFaceError:
        return  # config.json cannot be read: the load says it
    except ValueError as error:
        problem = of_adapter = str(error)
    if problem and wanted.export_hf_at_end:
        yield cannot_export(problem)
    if of_adapter and wanted.export_adapter_at_end:
        yield cannot_export(of_adapter, "export_adapter_at_end")


def nameless_experts(model: ModelConfig, family: Family) -> str:
    """Why adapters of experts cannot be PEFT's files; empty if they can, or there are none."""
    if not (model.adapter.has("experts") and model.num_moe_layers):
        return ""
    for name in ("gate_up", "down"):
        row = family.names(model)[f"feed_forward.experts.{name}"]
        if isinstance(row, Fused):
            return without_form(row.name)
    return ""


def without_form(name: str) -> str:
    """Say that the experts of this name in transformers have no adapter that PEFT reads."""
    way_out = "leave experts out of model.adapter.targets, or export merged weights"
    return f"adapters of its experts ({name}) have no form that PEFT reads; {way_out}"


def cannot_export(problem: str, key: str = "export_hf_at_end") -> str:
    """In words."""
    return f"checkpoint.{key} = true cannot be done: {problem}; else set checkpoint.{key} = false"
