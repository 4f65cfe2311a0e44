"""What the commands do, from Python: train, check, import, export, average, compare."""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_moe.checkpoint.find import HUGGING_FACE, Found, end_tokens, find_checkpoint, recipe_to_use, saved_fields
from titan_moe.checkpoint.hf_describe import export_problems
from titan_moe.config import Recipe, RecipeError, check_rules, load_recipe, refusals
from titan_moe.config.model import ModelConfig
from titan_moe.config.parallel import assumes_nodes, planning, ranks_of_a_node, smallest_world
from titan_moe.config.parse import blame
from titan_moe.config.schema import counted
from titan_moe.data.chat.records import Conversation
from titan_moe.plan.answer import answer, changed
from titan_moe.plan.check_report import describe
from titan_moe.plan.data_report import in_words


def train(recipe: Recipe | str | Path, overrides: Sequence[str] = ()) -> None:
    """Train a recipe in this process to its last step, resuming if its run folder has a checkpoint.

    In a process that torchrun has started this is one of the ranks. `overrides` are those of the command line, such as
    `--train.steps=50`, for the recipe of a file.

    Raises: RecipeError if the recipe cannot run. SystemExit after Ctrl-C, once the run is saved, and if it diverged.
    """
    from titan_moe.training.trainer import run

    run(_load(recipe, overrides))


def check(
    recipe: Recipe | str | Path, overrides: Sequence[str] = (), *, num_ranks: int | None = None, gpu: str | None = None
) -> str:
    """Return the report of `titan-moe check`: shape, layout, memory and cost of a recipe. Does not import torch.

    By default `num_ranks` is the smallest number that the layout allows, and the peak of a step is compared with the
    memory of GPUs whose kernels were measured.

    Raises: RecipeError with all rules that the recipe breaks.
    """
    with planning():
        loaded = load_accepted(recipe, overrides, num_ranks)
        return describe(loaded, num_ranks or smallest_world(loaded.parallel), gpu)


def plan(
    recipe: Recipe | str | Path,
    overrides: Sequence[str] = (),
    num_ranks: int = 1,
    *,
    gpu: str | None = None,
    tokens_per_step: int | None = None,
    top: int = 10,
    as_json: bool = False,
    write: str | None = None,
    fewest: bool = False,
    what_if: str | None = None,
) -> str:
    """Return the report of `titan-moe plan`: the fastest layouts of a recipe on so many GPUs, by prediction, or with
    `fewest` on the fewest that hold it. With `what_if`, the "best" layout or that of the "recipe" with one thing
    changed each. Does not import torch.

    Fields of `[parallel]` among the overrides are fixed. `write` names a new recipe for the best layout.

    Raises: RecipeError for a recipe that cannot be read, and where nothing fits that was to be written.
    """
    given = [word.removeprefix("--").partition("=")[0] for word in overrides]
    file = recipe if isinstance(recipe, (str, Path)) else None
    with planning():
        if what_if == "recipe":
            return changed(_load(recipe, overrides), num_ranks, gpu, as_json=as_json)
        found = answer(_load(recipe, overrides), given, num_ranks, gpu, tokens_per_step, top, fewest=fewest)
        if write is not None:
            found.write(write, file)
        if what_if:
            return found.changed(as_json=as_json)
        return found.json if as_json else found.text


def recipe_of_hf(folder: str | Path, copies: int | None = None, granularity: int | None = None) -> str:
    """A recipe, as TOML, that trains the weights of a Hugging Face checkpoint on. Does not import torch. With `copies`,
    the checkpoint is of a dense model, and experts are copies of its MLPs, or of `granularity` pieces of each.

    Raises: HuggingFaceError for a model that is not built here.
    """
    from titan_moe.checkpoint.hf_recipe import recipe_text, upcycled_text

    path = Path(folder).expanduser()
    return recipe_text(path) if copies is None else upcycled_text(path, copies, granularity or 1)


def recipe_of_job(job: str | Path, num_ranks: int | None = None) -> str:
    """A recipe, as TOML, of a job of torchtitan, Megatron-Core or Megatron-Bridge, with a comment for what has no
    counterpart. Does not import torch.

    Raises: RecipeError with the lines of what contradicts itself or cannot be read.
    """
    from titan_moe.config.migrate.convert import recipe_of_job as convert

    return convert(Path(job).expanduser(), num_ranks)


def import_hf(folder: str | Path, checkpoint: str | Path, skip: Collection[str] = ()) -> dict[str, list[str]]:
    """Write the weights of a Hugging Face checkpoint as one that `checkpoint.load_from` takes, tensor by tensor.

    Returns: the names of what was left out, by part of `skip`.
    Raises: HuggingFaceError that names all that does not fit. Then nothing is left behind.
    """
    from titan_moe.checkpoint import hf_convert, hf_export, hf_recipe

    source, out = Path(folder).expanduser(), Path(checkpoint).expanduser()
    family, model, _ = hf_recipe.read_model(source)
    recipe = Recipe(model=hf_recipe.without_parts(family, model, skip))
    with hf_export.converting(out):
        return hf_convert.import_hf(recipe, _shapes(recipe.model), source, out, skip)


def export_hf(checkpoint: str | Path, folder: str | Path, dtype: str = "", *, ema: bool = False) -> None:
    """Write the weights of a checkpoint, or of the newest one of a run, as a Hugging Face checkpoint, tensor by tensor,
    with adapters added.

    `dtype` is "bf16", "fp16" or "fp32"; empty keeps that of the weights. With `ema` the weights are the averages that
    the run keeps (`optim.ema_decay`).

    Raises: HuggingFaceError if no family of Hugging Face computes what the model does, or the checkpoint is damaged.
    Then nothing is left behind.
    """
    import torch

    from titan_moe.checkpoint import hf_convert, hf_export
    from titan_moe.training.adapter_files import shapes_and_factors

    dtypes = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    source, out = find_checkpoint(checkpoint).folder, Path(folder).expanduser()
    model = hf_convert.model_of(source)
    shapes, factors = shapes_and_factors(model)
    with hf_export.converting(out):
        hf_convert.export_hf(model, shapes, source, out, dtypes[dtype], factors, is_ema=ema)


def export_adapter(checkpoint: str | Path, folder: str | Path, *, is_fused: bool = False, ema: bool = False) -> None:
    """Write the adapter of a checkpoint, or of the newest one of a run, as PEFT's files: with a matrix for each expert
    or, with `is_fused`, one for all of a layer, as PEFT's `target_parameters` has them. With `ema` it is its average.

    Raises: HuggingFaceError if the checkpoint is damaged or has no adapter, or PEFT has no such form for the family.
    Then nothing is left behind.
    """
    from titan_moe.training import adapter_files

    source, out = find_checkpoint(checkpoint).folder, Path(folder).expanduser()
    adapter_files.export_adapter(source, out, is_fused=is_fused, is_ema=ema)


def average(checkpoints: Sequence[str | Path], out: str | Path, *, ema: bool = False) -> None:
    """Write a checkpoint whose weights are the means of those of others, in fp32, tensor by tensor. With `ema` the
    weights are the averages that a run keeps (`optim.ema_decay`), of one checkpoint too.

    A path is that of a checkpoint, or of a run, whose newest one is meant.

    Raises: RecipeError or HuggingFaceError that names what is damaged or differs. Then nothing is left behind.
    """
    from titan_moe.checkpoint import average as averaging
    from titan_moe.checkpoint import hf_convert, hf_export

    if len(checkpoints) < (1 if ema else 2):
        raise RecipeError(["average needs two checkpoints at least, one with --ema, and a new folder for their mean"])
    folders, mean = [find_checkpoint(path).folder for path in checkpoints], Path(out).expanduser()
    with hf_export.converting(mean):
        averaging.average(folders, _shapes(hf_convert.model_of(folders[0])), mean, is_of_ema=ema)


def written(folder: str | Path) -> str:
    """Say what a command has written."""
    files = [file for file in Path(folder).expanduser().rglob("*") if file.is_file()]
    size = in_words(sum(file.stat().st_size for file in files))
    return f"wrote {folder}: {counted(len(files), 'file')}, {size}"


def lacks_tokenizer(checkpoint: str | Path, folder: str | Path) -> str:
    """Say that what is exported has no tokenizer, and why; empty if it has one."""
    if any(Path(folder).expanduser().glob("tokenizer*")):
        return ""
    name = saved_fields(find_checkpoint(checkpoint).folder).get("data.tokenizer")
    if name == "bytes":
        return "it has no tokenizer: the run has read bytes (data.tokenizer = 'bytes'), and an id is a byte"
    return "it has no tokenizer; copy the files of yours into it"


def compare(runs: Sequence[str | Path], after: int | None = None, html: str | Path | None = None) -> str:
    """Compare runs: a table in Markdown, and a page with curves if `html` names its file. Does not import torch.

    Raises: RecipeError that names folders without a run, and runs without a step after `after`.
    """
    from titan_moe.metrics import comparison, curve_page, run_records

    found = run_records.read_runs([Path(run).expanduser() for run in runs])
    rows = comparison.compare(found, after)
    if html is not None:
        try:
            Path(html).expanduser().write_text(curve_page.render(found, rows), encoding="utf-8")
        except OSError as error:
            raise RecipeError([f"--html {html} cannot be written: {error.strerror}"]) from error
    return comparison.in_markdown(rows)


def recipe_of_use(source: str | Path, overrides: Sequence[str], num_ranks: int, *, ema: bool = False) -> Recipe:
    """An accepted recipe whose model is that of a checkpoint, for `titan-moe generate`; with `ema` it must be one of
    ours, which may have averages. Does not import torch.

    Raises: RecipeError or HuggingFaceError with all problems.
    """
    return _for_use(recipe_to_use(_find_to_use(source, ema=ema), overrides), num_ranks)


def _find_to_use(source: str | Path, *, ema: bool) -> Found:
    found = find_checkpoint(source, takes_hf=True)
    if ema and found.is_hf:
        raise RecipeError([f"{source} is a Hugging Face checkpoint, which has no averages of weights; omit --ema"])
    return found


def recipes_of_evaluation(
    source: str | Path, overrides: Sequence[str], num_ranks: int, *, ema: bool = False
) -> tuple[list[tuple[str, Recipe]], bool]:
    """For `titan-moe evaluate`: a name and an accepted recipe for each source of data, and whether it is what the run
    has held out. Each `--data.path` among `overrides` is a source, and `ema` is as for `recipe_of_use`. Does not import
    torch.

    Raises: RecipeError or HuggingFaceError with all problems.
    """
    found = _find_to_use(source, ema=ema)
    paths, others = _split_paths(overrides)
    is_other = bool(paths) or any(word.partition("=")[0] == "--data.source" for word in others)
    if not is_other:
        held_out = recipe_to_use(found, others)
        is_changed = any(word.partition("=")[0] == "--data.holdout_fraction" for word in others)
        if is_changed and not found.is_hf and not held_out.validation.has_own_data:
            reason = "what a run has not held out it has trained on"
            raise RecipeError([f"--data.holdout_fraction is the run's: {reason}; name other data with --data.path"])
        if held_out.data.source == "synthetic" and (found.is_hf or found.folder == found.side_files):
            raise RecipeError([f"{source} names no data; add --data.path='texts/*.txt', or others"])
        name = held_out.validation.path or f"{held_out.data.path or held_out.data.source}, held out"
        return [(name, _for_use(held_out, num_ranks))], True
    if not any(word.partition("=")[0] == "--data.source" for word in others):
        others = [*others, "--data.source=auto"]
    recipes = [
        (path or "data", recipe_to_use(found, [*others, *([f"--data.path={path}"] if path else [])], other_data=True))
        for path in paths or [""]
    ]
    return [(name, _for_use(recipe, num_ranks)) for name, recipe in recipes], False


def check_sampling(max_tokens: int, temperature: float, top_p: float, batch_size: int, **_: Any) -> None:
    """Refuse options out of range, before anything is loaded.

    Raises: RecipeError with all problems.
    """
    found = {
        f"--max-tokens = {max_tokens} must be at least 1": max_tokens < 1,
        f"--temperature = {temperature} must be at least 0": not temperature >= 0,
        f"--top-p = {top_p} must be above 0 and at most 1": not 0 < top_p <= 1,
        f"--batch-size = {batch_size} must be at least 1": batch_size < 1,
    }
    if problems := [problem for problem, is_broken in found.items() if is_broken]:
        raise RecipeError(problems)


def generate(
    recipe: Recipe,
    prompts: Sequence[str] | Sequence[Conversation],
    *,
    as_json: bool,
    ema: bool = False,
    **sampling: Any,
) -> list[str]:
    """Continue prompts with the model of `recipe_of_use`, or with `ema` with the averages of its weights. Collective.

    Returns: on the first rank, texts with what follows them, answers to conversations, or lines of JSON.
    """
    from titan_moe.training import use

    found = find_checkpoint(recipe.checkpoint.load_from.removeprefix(HUGGING_FACE), takes_hf=True)
    texts = use.generate(recipe, prompts, use.Sampling(end_tokens=end_tokens(found), **sampling), is_ema=ema)
    if not use.is_first_rank():
        return []
    if as_json:
        return [json.dumps(text._asdict(), ensure_ascii=False) for text in texts]
    before = [text.prompt if isinstance(prompt, str) else "" for prompt, text in zip(prompts, texts, strict=True)]
    return [prompt + text.completion for prompt, text in zip(before, texts, strict=True)]


def evaluate(
    sources: Sequence[tuple[str, Recipe]], *, held_out: bool, all_sequences: bool, ema: bool = False
) -> list[str]:
    """Evaluate the model of `recipes_of_evaluation`, or with `ema` the averages of its weights. Collective.

    Returns: on the first rank, the lines of a table.
    """
    from titan_moe.training import use

    results = use.evaluate(sources, held_out=held_out, all_sequences=all_sequences, is_ema=ema)
    return use.table_of(results, held_out=held_out) if use.is_first_rank() else []


def _split_paths(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the values of `--data.path` from the other overrides."""
    paths: list[str] = []
    others: list[str] = []
    words = iter(overrides)
    for word in words:
        key, equals, value = word.partition("=")
        if key != "--data.path":
            others.append(word)
        else:
            paths.append(value if equals else next(words, ""))
    return paths, others


def _for_use(recipe: Recipe, num_ranks: int) -> Recipe:
    """With microbatches for every data-parallel rank, enough for any schedule of a pipeline; breaks no rule."""
    p, train = recipe.parallel, recipe.train
    dp = max(num_ranks // max(p.tp * p.cp * p.pp, 1), 1)
    number = 4 * p.pp if p.pp > 1 else 1
    batch = max(train.micro_batch_sequences, 1) * dp * number
    return load_accepted(
        replace(recipe, train=replace(train, global_batch_sequences=batch, batch_schedule=())), (), num_ranks
    )


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of all tensors of a model, which is built without memory."""
    from titan_moe.training.adapter_files import shapes_and_factors

    return shapes_and_factors(model)[0]


def load_accepted(recipe: Recipe | str | Path, overrides: Sequence[str], num_ranks: int | None) -> Recipe:
    """A recipe that breaks no rule; by default on the smallest number of ranks that its layout allows.

    Raises: RecipeError with all rules that it breaks, and the places in its file that set what breaks them.
    """
    loaded = _load(recipe, overrides)
    problems = [*refusals(loaded, num_ranks), *export_problems(loaded)]
    number = num_ranks or smallest_world(loaded.parallel)
    if problems and assumes_nodes(number):
        with planning(False):
            elsewhere = tuple(check_rules(loaded, number))
        note = f"nodes of {ranks_of_a_node(number)} are assumed: --nproc {number} --nproc-per-node says another number"
        problems = [problem if problem.startswith(elsewhere) else f"{problem}; {note}" for problem in problems]
    if problems:
        raise RecipeError(problems if isinstance(recipe, Recipe) else blame(problems, recipe, overrides))
    return loaded


def _load(recipe: Recipe | str | Path, overrides: Sequence[str]) -> Recipe:
    if not isinstance(recipe, Recipe):
        return load_recipe(recipe, overrides)
    if overrides:
        raise TypeError(f"overrides are for the recipe of a file, and got a Recipe with {', '.join(overrides)}")
    return recipe
