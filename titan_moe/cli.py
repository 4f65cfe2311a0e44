"""The door: `titan-moe train`, `trace`, `tune`, `check`. A broken recipe is refused here, before torch is imported."""

import argparse
import gc
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_moe.config import Recipe, RecipeError, check_rules, load_recipe
from titan_moe.config.explain import explain
from titan_moe.config.parallel import smallest_world
from titan_moe.config.parse import nearest_key, split_overrides
from titan_moe.plan.check_report import describe

EXIT_BAD_RECIPE = 2
EXIT_INTERRUPTED = 130
SECONDS_FOR_THE_SPEAKER = 3.0
"""Time that a node's first rank has to speak, whereupon torchrun stops the others, before they speak for themselves."""
EPILOG = """\
any field of the recipe can be overridden:  --train.steps=50  --model.moe.top_k 4  --metrics.tensorboard=false
what a field means:                         titan-moe check --explain model.moe.top_k
several nodes, on each of them:             torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d
                                              --rdzv-endpoint HOST:29500 -m titan_moe train RECIPE.toml
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 2 for a recipe that cannot run, as for a wrong command line."""
    words = sys.argv[1:] if words is None else list(words)
    overrides, others = split_overrides(words)
    parser = _parser()
    args, unknown = parser.parse_known_args(others)
    if unknown:
        rest = " ".join(unknown)
        parser.error(f"what is {rest}? a field of the recipe is written --section.key=value{_hint(unknown)}")
    if args.verb == "check" and args.recipe is None and args.explain is None:
        parser.error("check needs a RECIPE.toml, or --explain KEY")
    try:
        if args.verb == "check":
            with _reader_may_leave():
                _check(args.recipe, overrides, args.nproc, args.explain)
            return 0
        if args.verb == "tune":
            _tune(args.recipe, overrides, args.nproc, args.out)
            return 0
        return _run(args.verb, args.recipe, overrides, args.nproc)
    except RecipeError as error:
        _tell(error.problems)
        return EXIT_BAD_RECIPE
    except KeyboardInterrupt:
        print("titan-moe: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _check(path: str | None, overrides: list[str], nproc: int | None, key: str | None) -> None:
    if key is not None:
        print(explain(key))
    if path is None:
        return
    recipe = _load(path, overrides, nproc)
    print(describe(recipe, nproc or smallest_world(recipe.parallel)))
    if nproc is None:
        print("\nThis is the smallest number of ranks that the layout allows; --nproc N checks another.")


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Let `titan-moe check ... | head` end in silence."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends


def _run(verb: str, path: str, overrides: list[str], nproc: int | None) -> int:
    """Train or trace, here or on ranks that torchrun starts."""
    world_size = int(os.environ.get("WORLD_SIZE", nproc or 1))
    if nproc not in (None, world_size):
        problem = f"--nproc {nproc}, but WORLD_SIZE = {world_size} is set, as for a rank that a launcher has started"
        raise RecipeError([f"{problem}; leave --nproc out, or unset WORLD_SIZE and RANK"])
    recipe = _load(path, overrides, world_size)
    if world_size > 1 and "WORLD_SIZE" not in os.environ:  # the ranks come back here, with it
        with _imports_stay():
            from titan_moe.train.launch import launch
        return launch(world_size, [verb, path, *overrides])
    # before torch is imported: threads that spin while they wait make runs on shared cores 20 times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _show_log()
    sys.path.append(os.getcwd())  # for model.class: `python -m titan_moe` finds modules there too
    with _imports_stay():
        if verb == "trace":
            from titan_moe.train.trace import run
        else:
            from titan_moe.train.trainer import run
    run(recipe)
    return 0


def _tune(path: str, overrides: list[str], nproc: int | None, out: Path | None) -> None:
    recipe = _load(path, overrides, nproc)
    _show_log()
    with _imports_stay():
        from titan_moe.train.tune import run
    run(recipe, nproc or smallest_world(recipe.parallel), out)


@contextmanager
def _imports_stay() -> Iterator[None]:
    """Keep the garbage collector from what is imported here: 670,000 objects, none of them garbage, which it would
    look through time and again, and once more as Python ends. That was half of what a start and an end take."""
    if "torch" in sys.modules or not gc.isenabled():  # somebody else's process, whose garbage must not be kept too
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _hint(unknown: list[str]) -> str:
    """Complete a key that was written without its section: `--steps` is meant to be `--train.steps`."""
    names = [word.removeprefix("--").partition("=")[0] for word in unknown if word.startswith("--")]
    return f"; {nearest_key(names[0])}" if names else ""


def _load(path: str, overrides: list[str], world_size: int | None) -> Recipe:
    recipe = load_recipe(path, overrides)
    problems = check_rules(recipe, world_size)
    if problems:
        raise RecipeError([f"{path}: {problem}" for problem in problems])
    return recipe


def _show_log() -> None:
    """Let the main rank say what it does; of the others, and of other packages, warnings are shown."""
    logging.basicConfig(format="%(message)s")
    is_main = os.environ.get("RANK", "0") == "0"
    logging.getLogger("titan_moe").setLevel(logging.INFO if is_main else logging.WARNING)


def _tell(problems: list[str]) -> None:
    """Print the problems once a node, however many ranks found them, but also if its first rank found none."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(SECONDS_FOR_THE_SPEAKER)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    print("\n".join([f"titan-moe: {count}", *(f"  {problem}" for problem in problems)]), file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="titan-moe",
        description="Train Mixture-of-Experts models from one recipe.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    train = _add_verb(verbs, "train", "RECIPE.toml [--nproc N]", "train a recipe, on N processes if --nproc says so")
    train.add_argument("recipe", metavar="RECIPE.toml", help="the recipe, or RUN/recipe.toml to go on with a run")
    train.add_argument("--nproc", type=_ranks, metavar="N", help="ranks to start through torchrun; 1 if not given")
    trace = _add_verb(
        verbs, "trace", "RECIPE.toml [--nproc N]", "profile a few steps of a recipe and write a report of one page"
    )
    trace.add_argument("recipe", metavar="RECIPE.toml", help="the recipe; the report goes into RUN/trace")
    trace.add_argument("--nproc", type=_ranks, metavar="N", help="ranks to start through torchrun; 1 if not given")
    tune = _add_verb(
        verbs,
        "tune",
        "RECIPE.toml [--nproc N] [--out FILE]",
        'measure the kernels that perf.kernels = "auto" chooses from, on this GPU at the shapes of a recipe',
    )
    tune.add_argument("recipe", metavar="RECIPE.toml", help="the recipe")
    tune.add_argument("--nproc", type=_ranks, metavar="N", help="ranks that a run will have; the fewest if not given")
    tune.add_argument("--out", type=Path, metavar="FILE", help="table to write; this user's own if not given")
    check = _add_verb(
        verbs,
        "check",
        "[RECIPE.toml] [--nproc N] [--explain KEY]",
        "check a recipe and show its shape and cost, without importing torch",
    )
    check.add_argument("recipe", nargs="?", metavar="RECIPE.toml", help="the recipe")
    check.add_argument(
        "--nproc", type=_ranks, metavar="N", help="ranks to check it for; the fewest possible if not given"
    )
    check.add_argument("--explain", metavar="KEY", help="say what a field or a section of recipes means")
    return parser


def _add_verb(verbs: Any, name: str, usage: str, purpose: str) -> argparse.ArgumentParser:
    return verbs.add_parser(
        name,
        help=purpose,
        usage=f"titan-moe {name} {usage} [--section.key=value ...]",
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks, 1 or more")
    return int(text)
