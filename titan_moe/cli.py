"""The command line: `titan-moe train`, `trace`, `check`, `recipe`, `import`, `export`.

Refuses invalid recipes before it imports torch.
"""

import argparse
import atexit
import gc
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from titan_moe.checkpoint.hf_folder import HuggingFaceError
from titan_moe.config import RecipeError
from titan_moe.config.explain import explain, list_fields, recipe_with_explanations
from titan_moe.config.nearest import nearest_key
from titan_moe.config.parallel import ASSUMED_RANKS_OF_A_NODE
from titan_moe.config.parse import split_overrides
from titan_moe.config.train import RunConfig
from titan_moe.entry import check, export_hf, import_hf, load_accepted, recipe_of_hf
from titan_moe.plan.choice.hardware import KNOWN_DEVICES, find_hardware
from titan_moe.run.end_process import end_soon
from titan_moe.run.failure import EXIT_BAD_RECIPE, EXIT_FAILED, first_rank_has_refused, plain_words, record_failure
from titan_moe.run.parent_death import die_with_parent

EXIT_INTERRUPTED = 130
OTHER_RANKS_DELAY_S = 3.0
"""Delay of error messages on all ranks but the first of a node. Torchrun ends them earlier if the first one fails."""
STRAGGLERS_S = 600.0
"""After which a process of a conversion is killed when another one has ended: they end together."""
MINUTES_OF_A_CONVERSION = 24 * 60.0
"""That a process may wait for another one."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of PyTorch's allocator of GPU memory. It reads the second one if both are set."""
OPTIONS_ELSEWHERE = {
    "nproc-per-node": "--nproc N starts N ranks on this host",
    "gpu": "--gpu belongs to titan-moe check",
    "explain": "--explain belongs to titan-moe check",
}
"""Options of other commands, and torchrun's -> what to do."""
REMOVED_COMMANDS = {
    "tune": 'nothing is tuned any more: perf.kernels = "auto" and precision.only_where_faster choose by compute '
    "capability and widths; titan-moe check RECIPE.toml shows what they choose",
}
"""Removed command -> what to do instead."""
EPILOG = """\
any field of the recipe can be overridden:  --train.steps=50  --model.moe.top_k 4  --metrics.tensorboard=false
what a field means:                         titan-moe check --explain model.moe.top_k
several nodes, on each of them:             torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d
                                              --rdzv-endpoint HOST:29500 -m titan_moe train RECIPE.toml
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 2 for an invalid recipe, as for an invalid command line.

    Without `argv` this process is the command, and ends after it, whatever threads a model of one's own has started.
    """
    if argv is not None:
        return _command(argv)
    exit_code: object = EXIT_FAILED  # of an error with a traceback
    try:
        exit_code = _command(sys.argv[1:])
        return exit_code
    except SystemExit as ended:
        exit_code = ended.code or 0
        raise
    finally:
        end_soon(exit_code if isinstance(exit_code, int) else EXIT_FAILED)


def _command(argv: Sequence[str]) -> int:
    overrides, others = split_overrides(argv)
    parser = _parser()
    if others and others[0] in REMOVED_COMMANDS:
        parser.error(REMOVED_COMMANDS[others[0]])
    args, unknown = parser.parse_known_args(others)
    if unknown:  # suggest the full key for one without its section: --train.steps for --steps
        names, hint = [word.removeprefix("--").partition("=")[0] for word in unknown if word.startswith("--")], ""
        if names:
            hint = f"; {OPTIONS_ELSEWHERE.get(names[0].replace('_', '-')) or nearest_key(names[0])}"
        parser.error(f"unknown argument {' '.join(unknown)}; recipe fields are --section.key=value{hint}")
    if args.verb == "check" and args.recipe is None and args.explain is None:
        parser.error("check needs a RECIPE.toml, or --explain KEY")
    if args.verb == "check" and args.nproc_per_node:
        if args.nproc is None or args.nproc % args.nproc_per_node:
            parser.error(
                f"--nproc-per-node {args.nproc_per_node} needs --nproc, the ranks of all nodes, a multiple of it"
            )
        os.environ["LOCAL_WORLD_SIZE"] = str(args.nproc_per_node)  # as torchrun does
    sys.path.append(os.getcwd())  # for model.class and table: `python -m titan_moe` finds modules there too
    try:
        if args.verb == "recipe":
            with _closed_pipe_ignored():
                print(recipe_of_hf(args.folder) if args.folder else recipe_with_explanations())
            return 0
        if args.verb in ("import", "export"):
            return _convert(args)
        if args.verb == "check":
            with _closed_pipe_ignored():
                _check(args.recipe, overrides, args.nproc, args.gpu, args.explain)
            return 0
        return _run(args.verb, args.recipe, overrides, args.nproc)
    except (RecipeError, HuggingFaceError) as error:
        record_failure(error)  # for the launcher, if this is one of its ranks
        _print_problems(error.problems)
        return EXIT_BAD_RECIPE
    except KeyboardInterrupt:
        print("titan-moe: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _check(path: str | None, overrides: list[str], nproc: int | None, gpu: str | None, key: str | None) -> None:
    if key is not None:
        print(explain(key) if key else list_fields())
    if path is None:
        return
    print(check(path, overrides, num_ranks=nproc, gpu=gpu))
    if nproc is None:
        print("\nThis is the smallest number of ranks that the layout allows; --nproc N checks another.")


def _convert(args: argparse.Namespace) -> int:
    """Import or export a checkpoint, in this process or in several."""
    world_size = _world_size(args.nproc)
    if world_size > 1 and "WORLD_SIZE" not in os.environ:
        from titan_moe.run.launch import launch

        folders = [args.folder, args.checkpoint] if args.verb == "import" else [args.checkpoint, args.folder]
        options = [f"--skip={part}" for part in getattr(args, "skip", ())]
        options += [f"--dtype={args.dtype}"] if getattr(args, "dtype", "") else []
        return launch(world_size, [args.verb, *folders, *options], STRAGGLERS_S)
    if world_size == 1:
        _convert_here(args)
        return 0
    from titan_moe.run.process import process_group

    with process_group(RunConfig(device="cpu", step_timeout_minutes=MINUTES_OF_A_CONVERSION)):
        _convert_here(args)
    return 0


def _convert_here(args: argparse.Namespace) -> None:
    """The part of this process."""
    skipped: dict[str, list[str]] = {}
    try:
        if args.verb == "export":
            export_hf(args.checkpoint, args.folder, args.dtype)
        else:
            skipped = import_hf(args.folder, args.checkpoint, args.skip)
    except HuggingFaceError as error:
        raise RecipeError(error.problems) from error
    except OSError as error:
        raise RecipeError([f"{error.filename}: {error.strerror}"]) from error
    for part, names in skipped.items() if os.environ.get("RANK", "0") == "0" else ():
        print(f"left out, because {part} is not built here: {len(names)} tensors from {names[0]} on")


def _world_size(nproc: int | None) -> int:
    """The number of ranks that a launcher has started, or that are to be started."""
    world_size = int(os.environ.get("WORLD_SIZE", nproc or 1))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    if nproc not in (None, world_size):
        problem = f"--nproc {nproc}, but WORLD_SIZE = {world_size} is set, as for a rank of a launcher"
        raise RecipeError([f"{problem}; omit --nproc, or unset WORLD_SIZE and RANK"])
    return world_size


@contextmanager
def _closed_pipe_ignored() -> Iterator[None]:
    """End `titan-moe check ... | head` without an error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at exit


def _run(verb: str, path: str, overrides: list[str], nproc: int | None) -> int:
    """Train or trace, in this process or on ranks started by torchrun."""
    world_size = _world_size(nproc)
    recipe = load_accepted(path, overrides, world_size)
    if world_size > 1 and "WORLD_SIZE" not in os.environ:  # every rank runs this function again, with WORLD_SIZE
        with _imports_frozen():
            from titan_moe.run.launch import launch
        return launch(world_size, [verb, path, *overrides], 60 * recipe.run.step_timeout_minutes)
    _set_variables_of_torch(recipe.run.device)
    _set_up_logging()
    with _imports_frozen():
        if verb == "trace":
            from titan_moe.training.trace import run
        else:
            from titan_moe.training.trainer import run
    try:
        run(recipe)
    except (RecipeError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # not every error of torch.distributed.checkpoint is an Exception
        record_failure(error, recipe.run.folder)
        if words := plain_words(error, recipe.run.folder):
            print(f"titan-moe: {words}", file=sys.stderr)
            return EXIT_FAILED
        raise
    return 0


def _set_variables_of_torch(device: str) -> None:
    """Set what torch and OpenMP read once, before torch is imported, where the user has not."""
    # threads that spin while waiting slow down other processes on the same cores
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # kernels are tested with fused multiplications and additions; triton 3.9 warns that 3.10 will have them no more
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if device != "cpu" and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        # freed blocks that lie beside each other become one: less free memory between tensors
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


@contextmanager
def _imports_frozen() -> Iterator[None]:
    """Exclude the objects of the enclosed imports from garbage collection, which makes start and exit faster. None of
    them is garbage, but the collector would scan all of them, repeatedly and again at exit."""
    if "torch" in sys.modules or not gc.isenabled():  # called from another program: its garbage must not be frozen
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        from titan_moe.versions import REPORTS_LEAKS_AT_EXIT

        if REPORTS_LEAKS_AT_EXIT.is_here:
            atexit.register(gc.unfreeze)  # exit takes most of a second longer


def _set_up_logging() -> None:
    """Show messages of rank 0, and warnings of other ranks and packages."""
    logging.basicConfig(format="%(message)s")
    is_main = os.environ.get("RANK", "0") == "0"
    logging.getLogger("titan_moe").setLevel(logging.INFO if is_main else logging.WARNING)


def _print_problems(problems: list[str]) -> None:
    """Print the problems once per node, also if only ranks other than its first one found them."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(OTHER_RANKS_DELAY_S)
        if first_rank_has_refused():  # it ends slowly
            return
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    print("\n".join([f"titan-moe: {count}", *(f"  {problem}" for problem in problems)]), file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="titan-moe",
        description="Train Mixture-of-Experts models from one recipe.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    launched = "number of ranks to start on this host, through torchrun; default 1"
    planned = "number of ranks of the run; default: the smallest number that the layout allows"
    purpose = "train a recipe, on N processes with --nproc"
    _add_verb(verbs, "train", purpose, "the recipe, or RUN/recipe.toml to resume a run", launched)
    purpose = "profile a few steps of a recipe and write an HTML report"
    _add_verb(verbs, "trace", purpose, "the recipe; the report is written into RUN/trace", launched)
    purpose = "check a recipe and show its shape and cost, without importing torch"
    options = "[--nproc-per-node N] [--gpu NAME] [--explain [KEY]] "
    checked = _add_verb(verbs, "check", purpose, "the recipe", planned, options, nargs="?")
    of_node = f"number of ranks on a node; default: all, at most {ASSUMED_RANKS_OF_A_NODE}"
    checked.add_argument("--nproc-per-node", type=_ranks, metavar="N", help=of_node)
    gpus = "of this machine; without one, those with measured kernels"
    compared = (
        f"GPU whose memory the peak of a step is compared with, such as H100 or A100-80GB; default: the GPUs {gpus}"
    )
    checked.add_argument("--gpu", type=_gpu, metavar="NAME", help=f"{compared}. No other figure depends on it")
    explained = "explain a field or a section of recipes; without KEY list all fields"
    checked.add_argument("--explain", metavar="KEY", nargs="?", const="", help=explained)
    purpose = "print all fields of recipes at their defaults, with explanations, as one TOML"
    of_hf = "a Hugging Face checkpoint; prints the recipe that trains it on, with what was assumed"
    printed = verbs.add_parser("recipe", help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
    printed.add_argument("folder", nargs="?", metavar="HF_FOLDER", help=of_hf)
    _add_conversions(verbs)
    return parser


def _add_conversions(verbs: Any) -> None:
    """Add the commands that import and export checkpoints of Hugging Face."""
    folders = {"checkpoint": ("CHECKPOINT", "a checkpoint of a run, RUN/checkpoints/step-N, or an imported one")}
    folders["folder"] = "HF_FOLDER", "a Hugging Face checkpoint: config.json and safetensors files"
    purposes = {
        "import": ("make a checkpoint, for checkpoint.load_from, from one of Hugging Face", ("folder", "checkpoint")),
        "export": ("make a Hugging Face checkpoint from one of a run", ("checkpoint", "folder")),
    }
    for name, (purpose, order) in purposes.items():
        verb = verbs.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        for argument in order:
            verb.add_argument(argument, metavar=folders[argument][0], help=folders[argument][1])
        nproc = "number of processes on this host that divide the files; default 1. The result does not depend on it"
        verb.add_argument("--nproc", type=_ranks, metavar="N", help=nproc)
        if name == "import":
            skipped = "leave out a part that is not built here, such as mtp; may be repeated"
            verb.add_argument("--skip", action="append", default=[], metavar="PART", help=skipped)
        else:
            dtype = "the dtype of the weights; default: as they are saved"
            verb.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="", help=dtype)


class _ShowVersion(argparse.Action):
    """Print the version of the installed package."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version  # slow to import

        print(f"titan-moe {version('titan_moe')}")
        parser.exit()


def _add_verb(
    verbs: Any, name: str, purpose: str, recipe: str, nproc: str, usage: str = "", nargs: Any = None
) -> argparse.ArgumentParser:
    """Add a command with the explanations of its recipe and `--nproc`, and the usage of its other options."""
    path = "[RECIPE.toml]" if nargs else "RECIPE.toml"
    verb = verbs.add_parser(
        name,
        help=purpose,
        usage=f"titan-moe {name} {path} [--nproc N] {usage}[--section.key=value ...]",
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("recipe", nargs=nargs, metavar="RECIPE.toml", help=recipe)
    verb.add_argument("--nproc", type=_ranks, metavar="N", help=nproc)
    return verb


def _gpu(text: str) -> str:
    if find_hardware(text) is None:
        known = ", ".join("-".join(gpu.words).upper() for gpu in KNOWN_DEVICES)
        raise argparse.ArgumentTypeError(f"{text} is not a known GPU; known are {known}")
    return text


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks; it must be at least 1")
    return int(text)
