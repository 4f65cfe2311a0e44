"""Train and check recipes from Python, as `titan-moe train` and `titan-moe check` do."""

from collections.abc import Collection, Sequence
from pathlib import Path

from titan_moe.config import Recipe, RecipeError, check_rules, load_recipe, refusals
from titan_moe.config.model import ModelConfig
from titan_moe.config.parallel import assumes_nodes, planning, ranks_of_a_node, smallest_world
from titan_moe.config.parse import blame
from titan_moe.config.perf import PerfConfig
from titan_moe.plan.check_report import describe


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


def recipe_of_hf(folder: str | Path) -> str:
    """A recipe, as TOML, that trains the weights of a Hugging Face checkpoint on. Does not import torch.

    Raises: HuggingFaceError for a model that is not built here.
    """
    from titan_moe.checkpoint.hf_recipe import recipe_text

    return recipe_text(Path(folder).expanduser())


def import_hf(folder: str | Path, checkpoint: str | Path, skip: Collection[str] = ()) -> dict[str, list[str]]:
    """Write the weights of a Hugging Face checkpoint as one that `checkpoint.load_from` takes, tensor by tensor.

    Returns: the names of what was left out, by part of `skip`.
    Raises: HuggingFaceError that names all that does not fit. Then nothing is left behind.
    """
    from titan_moe.checkpoint import hf_convert, hf_recipe

    source = Path(folder).expanduser()
    recipe = Recipe(model=hf_recipe.read_model(source)[1])
    return hf_convert.import_hf(recipe, _shapes(recipe.model), source, Path(checkpoint).expanduser(), skip)


def export_hf(checkpoint: str | Path, folder: str | Path, dtype: str = "") -> None:
    """Write the weights of a checkpoint as a Hugging Face checkpoint, tensor by tensor.

    `dtype` is "bf16", "fp16" or "fp32"; empty keeps that of the weights.

    Raises: HuggingFaceError if no family of Hugging Face computes what the model does, or the checkpoint is damaged.
    Then nothing is left behind.
    """
    import torch

    from titan_moe.checkpoint import hf_convert

    dtypes = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    source = Path(checkpoint).expanduser()
    model = hf_convert.model_of(source)
    hf_convert.export_hf(model, _shapes(model), source, Path(folder).expanduser(), dtypes[dtype])


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of all tensors of a model, which is built without memory."""
    from titan_moe.training.build import build_on_meta

    built = build_on_meta(Recipe(model=model, perf=PerfConfig(kernels="reference")))  # which has no rules for widths
    return {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}


def load_accepted(recipe: Recipe | str | Path, overrides: Sequence[str], num_ranks: int | None) -> Recipe:
    """A recipe that breaks no rule; by default on the smallest number of ranks that its layout allows.

    Raises: RecipeError with all rules that it breaks, and the places in its file that set what breaks them.
    """
    loaded = _load(recipe, overrides)
    problems = refusals(loaded, num_ranks)
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
