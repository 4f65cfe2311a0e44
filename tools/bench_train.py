"""Time whole optimizer steps of recipes on this host's GPUs, each beside its variants and torchtitan's own Trainer.

    python tools/bench_train.py recipes/qwen3_30b_a3b.toml recipes/deepseek_v2_lite.toml --nproc 8 --peer \\
        --vary "--compile.cudagraph=step --parallel.dispatcher=allgather" --append tools/results/steps.md

Every recipe runs as given, then once for each `--vary` (or line of `--variants`) with those overrides too, then, with
`--peer`, as torchtitan's model with the same number of tokens; all that with natural and with forced balanced routing,
unless `--routings` or an override names one. The table has them in this order. Invalid recipes are
reported before anything starts. All candidates of this package run in the same processes (tools/time_steps.py), each
peer in its own. A candidate that fails or takes too long is reported in its row; the next ones run in new processes.
The figure is the median of the steps after the warmup.

Pipelines are candidates like others; a step needs microbatches, 8 or 16 for instance (here on 4 GPUs, whose pp 2
leaves 2 readers of sequences):

    python tools/bench_train.py recipes/qwen3_30b_a3b.toml --nproc 4 --variants tools/pipelines.txt \\
        --model.num_layers=24 --parallel.ep=2 --train.global_batch_sequences=32 --train.micro_batch_sequences=2 \\
        --compile.cudagraph=off

The column "of pp 1 less bubble" is the speed over that of the first row of the group without a pipeline, less the
computed bubble: 1 says that nothing but the bubble is lost.

With `--profile FOLDER` each candidate of this package takes one more step under the profiler, and a text file in the
folder lists its longest kernels. Files are numbered like the rows, from 0. The profiler slows later candidates down, so
do not publish figures measured with this option.
"""

import argparse
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from operator import attrgetter
from pathlib import Path
from typing import Any

from rank_processes import Result, run_jobs, run_ranks
from result_table import Row, append, bubble_share, facts_of, flops_per_token, peer_facts, section, table

from titan_moe.config import Recipe, RecipeError, load_recipe, refusals
from titan_moe.config.model import ModelConfig
from titan_moe.config.parse import split_overrides
from titan_moe.config.recipe import num_microbatches
from titan_moe.plan.cost.count import count_parameters

WORKER = Path(__file__).with_name("time_steps.py")
PEER = Path(__file__).with_name("peer_torchtitan.py")
PEER_SCHEDULES = {
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""`parallel.pp_schedule` -> its name in torch, which torchtitan takes."""
PEER_CP_OPTIONS = ("--recompute=none", "--attention=cudnn")
"""With CP, torchtitan's blocks fail if they are compiled and recomputed selectively; without recompute they run."""
OF_DEEPSEEK = ("num_layers", "num_dense_layers", "moe.num_experts", "moe.num_groups", "moe.top_k_groups")
PEER_SIZES = {
    "qwen3_30b_a3b": ("num_layers", "moe.num_experts"),
    "deepseek_v2_lite": OF_DEEPSEEK,
    "deepseek_v3": OF_DEEPSEEK,
}
"""Recipe whose shape torchtitan has -> the fields of `[model]` that may differ from it. peer_torchtitan.py has options
of their last words."""
ROUTINGS = {"natural": (), "forced": ("--train.forced_load=balanced",)}
"""Routing -> its overrides."""
TAKES_ARGUMENTS = ("--vary", "--peer-args")
"""Options whose values are command-line arguments themselves, which start with dashes."""


@dataclass(frozen=True)
class Candidate:
    """A recipe with overrides, of this package or as torchtitan's peer."""

    recipe: Path
    overrides: tuple[str, ...]
    name: str
    group: str
    """Recipe and routing: rows of one group are compared."""
    is_peer: bool = False


def main(argv: Sequence[str]) -> list[Row]:
    args, overrides = parse(argv)
    all_candidates = [*candidates(args, overrides)]
    row_of: dict[int, Row] = {}
    for number, row in run(all_candidates, args):
        row_of[number] = row
        print("\n".join([*table([row])][2:]), flush=True)
    rows = [row_of[number] for number in range(len(all_candidates))]
    print("\n".join(["", *table(rows)]))
    if args.out:
        args.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if args.append:
        timing = f"median of {args.steps} steps after {args.warmup}"
        command = shlex.join(["python", "tools/bench_train.py", *argv])
        append(args.append, section(rows, command, date.today().isoformat(), args.nproc, timing))
    return rows


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line: options, and the overrides of all candidates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--nproc", type=int, default=1, help="GPUs")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the timed ones")
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=[*ROUTINGS], help="of all candidates")
    parser.add_argument("--vary", action="append", default=[], metavar="ARGS", help="overrides of one more candidate")
    parser.add_argument("--variants", type=Path, help="file with such overrides, one candidate a line; # for comments")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds per candidate, and per launch")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="folder for kernel times (GPU)")
    parser.add_argument("--peer", action="store_true", help="run torchtitan's Trainer too")
    parser.add_argument("--peer-args", default="", help="further arguments of peer_torchtitan.py, in one string")
    parser.add_argument("--append", type=Path, help="Markdown file to append the table to")
    parser.add_argument("--out", type=Path, help="JSON file for all results")
    overrides, others = split_overrides(_join_values(argv))
    return parser.parse_args(others), overrides


def candidates(args: argparse.Namespace, overrides: Sequence[str]) -> Iterator[Candidate]:
    """The candidates of each recipe and routing: as given, the variants, the peer."""
    variants = [*args.vary, *(_lines(args.variants) if args.variants else [])]
    is_named = any(
        word.startswith("--train.forced_load") for text in (*overrides, *variants) for word in shlex.split(text)
    )
    for recipe in args.recipes:
        for routing in ("",) if is_named else args.routings:
            given, name = (*overrides, *ROUTINGS.get(routing, ())), " ".join([recipe.stem, routing]).strip()
            yield Candidate(recipe, given, name, name)
            for text in variants:
                yield Candidate(recipe, (*given, *shlex.split(text)), f"{name}, {text.replace('--', '')}", name)
            if args.peer:
                yield Candidate(recipe, given, f"{name}, torchtitan", name, is_peer=True)


def run(candidates: Sequence[Candidate], args: argparse.Namespace) -> Iterator[tuple[int, Row]]:
    """Run all candidates. Yields (number, row): first invalid ones, then those of this package, then peers."""
    recipes: dict[int, Recipe] = {}
    for number, candidate in enumerate(candidates):
        try:
            recipes[number] = _checked(candidate, args)
        except RecipeError as error:
            yield number, Row(candidate.name, candidate.group, {"error": "; ".join(error.problems)})
    own = {number: recipe for number, recipe in recipes.items() if not candidates[number].is_peer}
    for number, result in _time_own(own, candidates, args):
        facts, bubble = facts_of(recipes[number], args.nproc), bubble_share(recipes[number], args.nproc)
        yield number, replace(_row(candidates[number], recipes[number], result, facts), bubble_share=bubble)
    for number, recipe in recipes.items():
        if candidates[number].is_peer:
            yield number, _row(candidates[number], recipe, *_time_peer(candidates[number], recipe, args))


def _row(candidate: Candidate, recipe: Recipe, result: Result, facts: dict[str, str]) -> Row:
    return Row(candidate.name, candidate.group, result, facts, flops_per_token(recipe))


def _checked(candidate: Candidate, args: argparse.Namespace) -> Recipe:
    """Load the candidate's recipe.

    Raises: RecipeError for a recipe that cannot run.
    """
    recipe = load_recipe(candidate.recipe, candidate.overrides)
    problems = []
    if not candidate.is_peer:
        problems = refusals(recipe, args.nproc)
        if args.profile and recipe.run.device == "cpu":
            problems.append('--profile needs a GPU, but run.device = "cpu"; omit it')
    elif candidate.recipe.stem not in PEER_SIZES:
        problems = [f"torchtitan has no {candidate.recipe.stem}"]
    elif not _has_shape_of(candidate, recipe.model):
        fields = ", ".join(PEER_SIZES[candidate.recipe.stem])
        problems = [f"of torchtitan's {candidate.recipe.stem} only {fields} may be other numbers"]
    elif recipe.train.forces_load and recipe.train.forced_load != "balanced":
        problems = [f'torchtitan has no train.forced_load = "{recipe.train.forced_load}"']
    elif recipe.parallel.vpp > 2:
        problems = ["torchtitan has two stages a rank, unless it gets the number of layers of a stage"]
    if problems:
        raise RecipeError(problems)
    return recipe


def _time_own(
    recipes: dict[int, Recipe], candidates: Sequence[Candidate], args: argparse.Namespace
) -> Iterator[tuple[int, Result]]:
    """Time the candidates of this package, with one launch for all with equal process-wide settings. The messages of
    Muon leave buffers of NCCL behind, so its candidates have a launch of their own."""
    command = [str(WORKER), f"--steps={args.steps}", f"--warmup={args.warmup}"]
    if args.profile:
        command.append(f"--profile={args.profile}")
    launches: dict[tuple[Any, ...], dict[str, int]] = defaultdict(dict)
    for number, recipe in recipes.items():
        candidate = candidates[number]
        job = {"number": number, "recipe": str(candidate.recipe), "overrides": candidate.overrides}
        settings = recipe.run.device, recipe.run.is_deterministic, recipe.optim.kind == "muon"
        launches[settings][json.dumps(job)] = number
    for jobs in launches.values():
        for job, result in run_jobs(command, [*jobs], args.nproc, args.timeout):
            yield jobs[job], result


def _time_peer(candidate: Candidate, recipe: Recipe, args: argparse.Namespace) -> tuple[Result, dict[str, str]]:
    """Time torchtitan with the same model, depth, tokens and expert parallelism."""
    train, p = recipe.train, recipe.parallel
    options = [
        f"--model={candidate.recipe.stem}",
        f"--steps={args.steps}",
        f"--warmup={args.warmup}",
        *_peer_sizes(candidate, recipe.model),
        f"--seq={train.seq_len_tokens}",
        f"--batch={train.global_batch_sequences * p.tp * p.cp * p.pp // args.nproc}",
        f"--ep={p.ep}",
        *_peer_pipeline(recipe, args.nproc),
        *(f"--{axis}={size}" for axis, size in (("tp", p.tp), ("cp", p.cp)) if size > 1),
        *(PEER_CP_OPTIONS if p.cp > 1 else ()),
        "--forced-balance" if train.forces_load else "--natural",
    ]
    result = run_ranks([str(PEER), *options, *shlex.split(args.peer_args)], args.nproc, args.timeout)
    if "versions" in result:
        result["torch"] = result["versions"]["torch"]
    recompute = result.get("settings", {}).get("recompute", "unknown")
    return result, peer_facts(recipe, args.nproc, recompute)


def _peer_sizes(candidate: Candidate, model: ModelConfig) -> Iterator[str]:
    """The number of layers, and what else overrides have changed."""
    given = load_recipe(candidate.recipe).model
    for field in PEER_SIZES[candidate.recipe.stem]:
        size = attrgetter(field)(model)
        if field == "num_layers" or size != attrgetter(field)(given):
            yield f"--{field.rpartition('.')[2].replace('_', '-')}={size}"


def _has_shape_of(candidate: Candidate, model: ModelConfig) -> bool:
    """Whether a model has the parameters of torchtitan's shape, of which a token uses as many, but for `PEER_SIZES`."""
    given, sizes = load_recipe(candidate.recipe).model, PEER_SIZES[candidate.recipe.stem]
    of_layers = {name: getattr(given, name) for name in sizes if "." not in name}
    same = replace(model, **of_layers, moe=replace(model.moe, num_experts=given.moe.num_experts))
    return count_parameters(same) == count_parameters(given)


def _peer_pipeline(recipe: Recipe, num_ranks: int) -> list[str]:
    p = recipe.parallel
    if p.pp == 1:
        return []
    number = num_microbatches(recipe, num_ranks)
    return [f"--pp={p.pp}", f"--pp-schedule={PEER_SCHEDULES[p.pp_schedule]}", f"--microbatches={number}"]


def _join_values(argv: Sequence[str]) -> list[str]:
    """Write `--vary ARGS` as `--vary=ARGS`. Otherwise argparse would parse the value as an option."""
    remaining, joined = list(argv), []
    while remaining:
        argument = remaining.pop(0)
        joined.append(f"{argument}={remaining.pop(0)}" if argument in TAKES_ARGUMENTS and remaining else argument)
    return joined


def _lines(file: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


if __name__ == "__main__":
    main(sys.argv[1:])
