"""What `titan-moe check` says of the data of a recipe: its files, and how long the run is. Files are only listed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from titan_moe.config.data_files import STANDARD_LIBRARY, Found, find, find_files
from titan_moe.config.model import ModelConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.run_length import known_steps, step_tokens
from titan_moe.config.schema import counted
from titan_moe.plan.cost.count import count_parameters

UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
BYTES, PLAIN = "bytes", "plain"
"""A tokenizer and a chat template that are no files."""
BYTES_OF_AN_ID = {"uint16": 2, "uint32": 4}


def describe_data(recipe: Recipe) -> Iterator[str]:
    """Lines about the length of the run, the data and the data of validation."""
    train, steps = recipe.train, known_steps(recipe.train)
    if steps is None:
        yield f"{train.epochs:g} epochs, whose steps and tokens a run counts at its start"
    else:
        num_tokens = steps * step_tokens(train)
        count = count_parameters(recipe.model) if recipe.model.class_ == ModelConfig.class_ else None
        a_parameter = f", {num_tokens / count.total:.3g} a parameter" if count else ""
        active = f" ({num_tokens / count.active:.3g} an active one)" if count else ""
        yield f"{counted(steps, 'step')}: {num_tokens:,} tokens{a_parameter}{active}"
    if recipe.data.source == "synthetic":
        yield "synthetic: random ids without end"
        return
    if recipe.data.source != "mixture":
        yield _source(recipe)
    yield from _mixture(recipe)
    yield from _absent(recipe)
    validation = recipe.validation
    for name, path in {"": validation.path, **validation.sets}.items():
        if path:
            key = f"validation.sets.{name}" if name else "validation.path"
            files = _files(recipe, validation.source, path, key, validation.split)
            yield f"validation{f' {name}' if name else ''}: {files}"


def _mixture(recipe: Recipe) -> Iterator[str]:
    """A line for each source of a mixture."""
    total = sum(source.weight for source in recipe.data.mixture)
    for source, (name, data) in zip(recipe.data.mixture, recipe.data.by_source().items(), strict=False):
        share = f"share {source.weight / total:.4g}" if total else "no share"
        if recipe.data.mixture_temperature > 0:
            share = f"a share of its tokens to the power of {1 / recipe.data.mixture_temperature:.3g}"
        if name and source.weight == 0:
            yield f"{name}: weight 0, not read"
        elif name:
            yield f"{name}: {share}; {_source(replace(recipe, data=data))}"


def _absent(recipe: Recipe) -> Iterator[str]:
    """Lines about the tokenizer and the chat template, where they are not here."""
    tokenizer, template = recipe.data.tokenizer, recipe.data.chat.template
    if tokenizer not in ("", BYTES) and not Path(tokenizer).expanduser().is_dir():
        yield f"tokenizer: data.tokenizer = {tokenizer!r} is no folder here"
    if recipe.data.format == "chat" and template not in ("", PLAIN) and not Path(template).is_file():
        yield f"template: data.chat.template = {template!r} is no file here"


def _source(recipe: Recipe) -> str:
    d = recipe.data
    held_out = f"; {d.holdout_fraction:g} of the documents held out" if d.holdout_fraction else ""
    streamed = ", streamed" if d.streams else ""
    files = _files(recipe, d.source, d.files or d.path, "data.files" if d.files else "data.path", d.split)
    return f"{files}{streamed}{held_out}"


def _files(recipe: Recipe, source: str, path: str, key: str, split: str) -> str:
    """What the path of a key names, with the number of tokens where it can be told from the size of the files."""
    if path == STANDARD_LIBRARY or (source == "datasets" and key != "data.files"):
        return f"{source}: {path}"
    try:
        found = find(path, key, split) if source == "auto" else Found(source, find_files(path, key, "*"))
        num_bytes = sum(map(_size, found.files))
    except (OSError, ValueError) as error:
        words = str(error).replace("data.split", "validation.split") if key.startswith("validation") else str(error)
        return f"{source}: {path} cannot be read here: {words}"
    if not found.files:
        return f"{found.kind}: {path}, a hub name: no file or folder of this name is here"
    if recipe.data.format == "chat" and found.kind in ("text", "tokens"):
        return f"{found.kind}: {path} has no conversations for data.format = 'chat', which are rows"
    tokens = ""
    if found.kind == "tokens":
        tokens = f", some {num_bytes // BYTES_OF_AN_ID[recipe.data.token_dtype]:,} tokens"
    elif found.kind == "text" and recipe.data.tokenizer == "bytes" and not any(map(_is_compressed, found.files)):
        tokens = f", some {num_bytes + len(found.files):,} tokens"
    return f"{found.kind}: {counted(len(found.files), 'file')} of {path}, {in_words(num_bytes)}{tokens}"


def _size(file: Path) -> int:
    return file.stat().st_size


def _is_compressed(file: Path) -> bool:
    return file.suffix.lower() in (".gz", ".zst")


def in_words(num_bytes: int) -> str:
    """A number of bytes, as 1.23 MB."""
    return next((f"{num_bytes / size:.3g} {unit}" for unit, size in UNITS if num_bytes >= size), f"{num_bytes} bytes")
