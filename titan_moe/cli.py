"""The command line: `titan-moe train`, `trace`, `check`, `plan`, `recipe`, `import`, `export`, `generate`, `evaluate`,
`average`, `compare`, `convert`, `calibrate`.

Refuses invalid recipes before it imports torch.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from titan_moe.arguments import command_line
from titan_moe.config import Recipe, RecipeError
from titan_moe.config.explain import explain, list_fields, recipe_with_explanations
from titan_moe.config.nearest import nearest_key
from titan_moe.config.parallel import planning, smallest_world
from titan_moe.config.parse import split_overrides
from titan_moe.config.train import RunConfig
from titan_moe.data.chat.prompts import read_prompts
from titan_moe.entry import (
    average,
    check,
    check_sampling,
    compare,
    evaluate,
    export_adapter,
    export_hf,
    generate,
    import_hf,
    lacks_tokenizer,
    load_accepted,
    plan,
    recipe_of_hf,
    recipe_of_job,
    recipe_of_use,
    recipes_of_evaluation,
    written,
)
from titan_moe.plan.check_data import check_data
from titan_moe.plan.cost.rates_file import rates_from
from titan_moe.run.end_process import end_soon
from titan_moe.run.failure import EXIT_BAD_RECIPE, EXIT_FAILED, first_rank_has_refused, plain_words, record_failure
from titan_moe.run.parent_death import die_with_parent
from titan_moe.run.start import imports_frozen, set_up_logging, set_variables_of_torch
from titan_moe.run.terminal import complain

EXIT_INTERRUPTED = 130
OTHER_RANKS_DELAY_S = 3.0
"""Delay of error messages on all ranks but the first of a node. Torchrun ends them earlier if the first one fails."""
CALIBRATION_S = 600.0
"""After which a rank of a calibration is killed when another one has ended."""
STRAGGLERS_S = 600.0
"""After which a process of a conversion is killed when another one has ended: they end together."""
MINUTES_OF_A_CONVERSION = 24 * 60.0
"""That a process may wait for another one."""
OPTIONS_ELSEWHERE = {
    "nproc-per-node": "--nproc N starts N ranks on this host",
    "gpu": "--gpu belongs to titan-moe check and plan",
    "explain": "--explain belongs to titan-moe check",
}
"""Options of other commands, and torchrun's -> what to do."""
REMOVED_COMMANDS = {
    "tune": 'nothing is tuned any more: perf.kernels = "auto" and precision.only_where_faster choose by compute '
    "capability and widths; titan-moe check RECIPE.toml shows what they choose",
}
"""Removed command -> what to do instead."""


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
    parser = command_line()
    if others and others[0] in REMOVED_COMMANDS:
        parser.error(REMOVED_COMMANDS[others[0]])
    args, unknown = parser.parse_known_args(others)
    if args.verb == "generate" and args.prompt is None and unknown and not unknown[0].startswith("--"):
        args.prompt = unknown.pop(0)  # argparse ends the words without a name at the first option
    if unknown:  # suggest the full key for one without its section: --train.steps for --steps
        names, hint = [word.removeprefix("--").partition("=")[0] for word in unknown if word.startswith("--")], ""
        if names:
            dashed = names[0].replace("_", "-")
            own = f"did you mean --{dashed}?" if "_" in names[0] and names[0] in vars(args) else ""
            hint = f"; {own or OPTIONS_ELSEWHERE.get(dashed) or nearest_key(names[0])}"
        parser.error(f"unknown argument {' '.join(unknown)}; recipe fields are --section.key=value{hint}")
    if args.verb == "recipe" and args.upcycle and not args.folder:
        parser.error("recipe --upcycle needs the HF_FOLDER of a dense model")
    if args.verb == "recipe" and args.granularity and not args.upcycle:
        parser.error("recipe --granularity needs --upcycle COPIES")
    if args.verb == "check" and args.recipe is None and args.explain is None:
        parser.error("check needs a RECIPE.toml, or --explain KEY")
    if args.verb == "plan" and args.nproc is None:
        parser.error("plan needs --nproc, the number of GPUs; with --fit the most that may be taken")
    if args.verb in ("check", "plan") and args.nproc_per_node:
        if args.nproc is None or args.nproc % args.nproc_per_node:
            parser.error(
                f"--nproc-per-node {args.nproc_per_node} needs --nproc, the ranks of all nodes, a multiple of it"
            )
        os.environ["LOCAL_WORLD_SIZE"] = str(args.nproc_per_node)  # as torchrun does
    sys.path.append(os.getcwd())  # for model.class and table: `python -m titan_moe` finds modules there too
    try:
        if args.verb == "recipe":
            of_folder = args.folder, args.upcycle, args.granularity
            with _closed_pipe_ignored():
                print(recipe_of_hf(*of_folder) if args.folder else recipe_with_explanations())
            return 0
        if args.verb == "convert":
            with _closed_pipe_ignored():
                print(recipe_of_job(args.job, args.nproc), end="")
            return 0
        if args.verb == "average":
            _convert_here(args)
            return 0
        if args.verb == "compare":
            with _closed_pipe_ignored():
                print(compare(args.runs, args.after, args.html))
            return 0
        if args.verb in ("import", "export"):
            return _convert(args)
        if args.verb in ("generate", "evaluate"):
            return _use(args, overrides, argv)
        if args.verb == "calibrate":
            return _calibrate(args)
        if args.verb == "check":
            with _closed_pipe_ignored(), rates_from(args.rates) as device:
                args.gpu = args.gpu or device
                return _check(args, overrides)
            return 0
        if args.verb == "plan":
            with _closed_pipe_ignored(), rates_from(args.rates) as device:
                args.gpu = args.gpu or device
                print(plan(args.recipe, overrides, args.nproc, **_options_of_plan(args)))
            return 0
        _tell_of_several_paths(overrides)
        return _run(args.verb, args.recipe, overrides, args.nproc)
    except RecipeError as error:
        record_failure(error)  # for the launcher, if this is one of its ranks
        _print_problems(error.problems)
        return EXIT_BAD_RECIPE
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED


def _calibrate(args: argparse.Namespace) -> int:
    """Measure this host's GPU, or as many as there are ranks, with their links."""
    began = time.monotonic()
    if args.out and not (folder := Path(args.out).absolute().parent).is_dir():
        raise RecipeError([f"calibrate --out {args.out}: {folder} is no folder"])
    if args.out and Path(args.out).is_dir():
        raise RecipeError([f"calibrate --out {args.out} is a folder; name a file in it"])
    world_size = _world_size(args.nproc)
    if world_size > 1 and "WORLD_SIZE" not in os.environ:
        from titan_moe.run.launch import launch

        words = [f"--out={args.out}"] if args.out else []
        words.append(f"--seconds={max(args.seconds - (time.monotonic() - began), 1):.0f}")
        return launch(world_size, ["calibrate", *words], CALIBRATION_S)
    set_variables_of_torch("cuda")
    with imports_frozen():
        from titan_moe.profile.calibration import calibrate, require_gpu
        from titan_moe.run.process import process_group
    require_gpu()

    def save(table: str) -> None:
        if args.out:  # whole, or as it was: the run may be killed
            part = Path(f"{args.out}.part")
            part.write_text(table, encoding="utf-8")
            part.replace(args.out)

    with process_group(RunConfig(device="cuda")) as device:
        table = calibrate(device, args.seconds, began=began, save=save)
        if os.environ.get("RANK", "0") == "0":
            save(table)
            wrote = f"wrote {args.out}: titan-moe plan RECIPE.toml --nproc N --rates {args.out}\n"
            print(wrote if args.out else table, end="", flush=True)
    return 0


def _options_of_plan(args: argparse.Namespace) -> dict[str, Any]:
    options = {"gpu": args.gpu, "tokens_per_step": args.tokens_per_step, "top": args.top}
    return options | {"as_json": args.json, "write": args.write, "fewest": args.fit, "what_if": args.what_if}


def _tell_of_several_paths(overrides: list[str]) -> None:
    """Say which of several is read: evaluate takes all."""
    paths = list(dict.fromkeys(word for word in overrides if word.startswith("--data.path=")))
    if len(paths) > 1 and os.environ.get("RANK", "0") == "0":
        print(f'of {" and ".join(paths)} the last is read; data.source = "mixture" mixes several', file=sys.stderr)


def _check(args: argparse.Namespace, overrides: list[str]) -> int:
    if args.explain is not None:
        print(explain(args.explain) if args.explain else list_fields())
    if args.recipe is None:
        return 0
    if args.json:
        return _check_as_json(args, overrides)
    print(check(args.recipe, overrides, num_ranks=args.nproc, gpu=args.gpu))
    if args.nproc is None:
        print("\nThis is the smallest number of ranks that the layout allows; --nproc N checks another.")
    return 0


def _check_as_json(args: argparse.Namespace, overrides: list[str]) -> int:
    """One object, also of a recipe that breaks rules: these alone, then."""
    try:
        with planning():
            recipe = load_accepted(args.recipe, overrides, args.nproc)
        data, code = check_data(recipe, args.nproc or smallest_world(recipe.parallel), args.gpu), 0
    except RecipeError as error:
        data, code = {"breaches": list(error.problems)}, EXIT_BAD_RECIPE
    print(json.dumps(data, indent=1))
    return code


def _convert(args: argparse.Namespace) -> int:
    """Import or export a checkpoint, in this process or in several."""
    world_size = _world_size(args.nproc)
    if world_size > 1 and "WORLD_SIZE" not in os.environ:
        from titan_moe.run.launch import launch

        folders = [args.folder, args.checkpoint] if args.verb == "import" else [args.checkpoint, args.folder]
        options = [f"--skip={part}" for part in getattr(args, "skip", ())]
        options += [f"--dtype={args.dtype}"] if getattr(args, "dtype", "") else []
        options += ["--ema"] if getattr(args, "ema", False) else []
        if getattr(args, "adapter", False):
            raise RecipeError(["--adapter writes one small file; omit --nproc"])
        return launch(world_size, [args.verb, *folders, *options], STRAGGLERS_S)
    if world_size == 1:
        _convert_here(args)
        return 0
    from titan_moe.run.process import process_group

    with process_group(RunConfig(device="cpu", step_timeout_minutes=MINUTES_OF_A_CONVERSION)):
        _convert_here(args)
    return 0


def _convert_here(args: argparse.Namespace) -> None:
    """Import, export or average, or the part of this process in that."""
    skipped: dict[str, list[str]] = {}
    if args.verb == "average":
        average(args.checkpoints, args.out, ema=args.ema)
    elif args.verb == "export" and args.adapter:
        export_adapter(args.checkpoint, args.folder, is_fused=args.fused_experts, ema=args.ema)
    elif args.verb == "export":
        export_hf(args.checkpoint, args.folder, args.dtype, ema=args.ema)
    else:
        skipped = import_hf(args.folder, args.checkpoint, args.skip)
    if os.environ.get("RANK", "0") != "0":
        return
    print(written(args.checkpoint if args.verb == "import" else args.out if args.verb == "average" else args.folder))
    if args.verb == "export" and not args.adapter and (words := lacks_tokenizer(args.checkpoint, args.folder)):
        print(words, file=sys.stderr)
    for part, names in skipped.items():
        print(f"left out, because {part} is not built here: {len(names)} tensors from {names[0]} on", file=sys.stderr)


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

    def run() -> None:
        with imports_frozen():
            if verb == "trace":
                from titan_moe.training.trace import run
            else:
                from titan_moe.training.trainer import run
        run(recipe)

    return _launch_or_call(recipe, world_size, [verb, path, *overrides], run)


def _use(args: argparse.Namespace, overrides: list[str], argv: Sequence[str]) -> int:
    """Generate or evaluate, in this process or on ranks started by torchrun."""
    world_size = _world_size(args.nproc)
    if args.verb == "generate":
        prompts = read_prompts(args.prompt, args.prompts, is_chat=args.chat)
        recipe = recipe_of_use(args.source, overrides, world_size, ema=args.ema)
        options: dict[str, Any] = {
            key: getattr(args, key) for key in ("max_tokens", "temperature", "top_p", "seed", "batch_size")
        }
        check_sampling(**options)
        call = partial(generate, recipe, prompts, as_json=bool(args.prompts), ema=args.ema, **options)
    else:
        sources, is_held_out = recipes_of_evaluation(args.source, overrides, world_size, ema=args.ema)
        recipe = sources[0][1]
        takes_all = not any(word.startswith("--validation.num_sequences") for word in overrides)
        takes_all = takes_all and not is_held_out
        call = partial(evaluate, sources, held_out=is_held_out, all_sequences=takes_all, ema=args.ema)

    def run() -> None:
        with imports_frozen():
            import titan_moe.training.use  # noqa: F401
        for line in call():
            print(line, flush=True)

    return _launch_or_call(recipe, world_size, _without_nproc(argv), run)


def _without_nproc(argv: Sequence[str]) -> list[str]:
    """Of a rank, which WORLD_SIZE tells; torchrun would take --nproc for one of its own options."""
    words = iter(argv)
    return [word for word in words if not (word == "--nproc" and next(words)) and not word.startswith("--nproc=")]


def _world_size(nproc: int | None) -> int:
    """The number of ranks, of which this process may be one."""
    world_size = int(os.environ.get("WORLD_SIZE", nproc or 1))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    if nproc not in (None, world_size):
        problem = f"--nproc {nproc}, but WORLD_SIZE = {world_size} is set, as for a rank of a launcher"
        raise RecipeError([f"{problem}; omit --nproc, or unset WORLD_SIZE and RANK"])
    return world_size


def _launch_or_call(recipe: Recipe, world_size: int, argv: list[str], run: Callable[[], None]) -> int:
    """Start the ranks with these arguments, each of which comes here again with WORLD_SIZE; or be one of them."""
    if world_size > 1 and "WORLD_SIZE" not in os.environ:
        with imports_frozen():
            from titan_moe.run.launch import launch
        return launch(world_size, argv, 60 * recipe.run.step_timeout_minutes)
    set_variables_of_torch(recipe.run.device)
    set_up_logging()
    try:
        run()
    except (RecipeError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # not every error of torch.distributed.checkpoint is an Exception
        record_failure(error, recipe.run.folder)
        if words := plain_words(error, recipe.run.folder):
            complain(words)
            return EXIT_FAILED
        raise
    return 0


def _print_problems(problems: list[str]) -> None:
    """Print the problems once per node, also if only ranks other than its first one found them."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(OTHER_RANKS_DELAY_S)
        if first_rank_has_refused():  # it ends slowly
            return
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    complain("\n".join([count, *(f"  {problem}" for problem in problems)]))
