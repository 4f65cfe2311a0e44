"""Time whole optimizer steps of recipes on this host's GPUs, each beside its variants and torchtitan's own Trainer.

    python tools/bench_train.py recipes/qwen3_30b_a3b.toml recipes/deepseek_v2_lite.toml --nproc 8 --peer \\
        --train.force_balanced_routing=true --vary "--compile.cudagraph=step --parallel.dispatcher=allgather" \\
        --append tools/RESULTS.md

Every recipe runs as given, then once for each `--vary` (or line of `--variants`) with those overrides on top, then,
with `--peer`, as torchtitan's model on as many tokens; the table has them in this order. What cannot run is told before
anything starts. Then all that is ours follows each other in the same processes (tools/time_steps.py), and each peer in
processes of its own. A candidate that fails or takes too long is a row too: it ends its processes, and new ones go on
after it. The figure is the median of the steps after warm-up.

With `--profile FOLDER` each candidate of ours takes a further step under the profiler, and a text file there has its
longest kernels, numbered in the order of the rows, from 0. The profiler stays loaded: figures to be published are
taken without it.
"""

import argparse
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from rank_processes import Result, run_jobs, run_ranks
from result_table import Row, append, facts_of, flops_per_token, peer_facts, section, table

from titan_moe.config import Recipe, RecipeError, check_rules, load_recipe
from titan_moe.config.parse import split_overrides

WORKER = Path(__file__).with_name("time_steps.py")
PEER = Path(__file__).with_name("peer_torchtitan.py")
PEER_MODELS = {"qwen3_30b_a3b": "qwen3_30b_a3b", "deepseek_v2_lite": "deepseek_v2_lite"}
HOLDS_WORDS = ("--vary", "--peer-args")
"""Options whose value is words of another command line, which begin with dashes too."""


@dataclass(frozen=True)
class Candidate:
    """Something to be timed."""

    recipe: Path
    overrides: tuple[str, ...]
    name: str
    is_peer: bool = False


def main(argv: Sequence[str]) -> list[Row]:
    args, overrides = parse(argv)
    wanted = [*candidates(args, overrides)]
    told: dict[int, Row] = {}
    for number, row in run(wanted, args):
        told[number] = row
        print("\n".join([*table([row])][2:]), flush=True)
    rows = [told[number] for number in range(len(wanted))]
    print("\n".join(["", *table(rows)]))
    if args.out:
        args.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if args.append:
        timing = f"median of {args.steps} steps after {args.warmup}"
        command = shlex.join(["python", "tools/bench_train.py", *argv])
        append(args.append, section(rows, command, date.today().isoformat(), args.nproc, timing))
    return rows


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides that all candidates share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--nproc", type=int, default=1, help="GPUs")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--vary", action="append", default=[], metavar="WORDS", help="overrides of one more candidate")
    parser.add_argument("--variants", type=Path, help="file with such words, a candidate a line; # begins a comment")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds that a candidate, or its start, may take")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="gets the kernel times of our candidates (GPU)")
    parser.add_argument("--peer", action="store_true", help="run torchtitan's Trainer too")
    parser.add_argument("--peer-args", default="", help="further arguments of peer_torchtitan.py, in one string")
    parser.add_argument("--append", type=Path, help="Markdown file that gets the table at its end")
    parser.add_argument("--out", type=Path, help="JSON file for all results")
    overrides, others = split_overrides(_joined(argv))
    return parser.parse_args(others), overrides


def candidates(args: argparse.Namespace, overrides: Sequence[str]) -> Iterator[Candidate]:
    """Recipe by recipe: as given, varied, the peer."""
    variants = [*args.vary, *(_lines(args.variants) if args.variants else [])]
    for recipe in args.recipes:
        yield Candidate(recipe, tuple(overrides), recipe.stem)
        for words in variants:
            yield Candidate(recipe, (*overrides, *shlex.split(words)), f"{recipe.stem}, {words.replace('--', '')}")
        if args.peer:
            yield Candidate(recipe, tuple(overrides), f"{recipe.stem}, torchtitan", is_peer=True)


def run(wanted: Sequence[Candidate], args: argparse.Namespace) -> Iterator[tuple[int, Row]]:
    """The number and the row of each candidate, as they come: what cannot run, ours, the peer."""
    recipes: dict[int, Recipe] = {}
    for number, candidate in enumerate(wanted):
        try:
            recipes[number] = _checked(candidate, args)
        except RecipeError as error:
            yield number, Row(candidate.name, candidate.recipe.stem, {"error": "; ".join(error.problems)})
    for number, result in _time_ours({n: r for n, r in recipes.items() if not wanted[n].is_peer}, wanted, args):
        yield number, _row(wanted[number], recipes[number], result, facts_of(recipes[number], args.nproc))
    for number, recipe in recipes.items():
        if wanted[number].is_peer:
            yield number, _row(wanted[number], recipe, *_time_peer(wanted[number], recipe, args))


def _row(candidate: Candidate, recipe: Recipe, result: Result, facts: dict[str, str]) -> Row:
    return Row(candidate.name, candidate.recipe.stem, result, facts, flops_per_token(recipe))


def _checked(candidate: Candidate, args: argparse.Namespace) -> Recipe:
    """The candidate's recipe.

    Raises: RecipeError if it cannot run.
    """
    recipe = load_recipe(candidate.recipe, candidate.overrides)
    problems = []
    if not candidate.is_peer:
        problems = check_rules(recipe, args.nproc)
        if args.profile and recipe.run.device == "cpu":
            problems.append('--profile records a GPU\'s kernels, and run.device = "cpu"; leave it out')
    elif candidate.recipe.stem not in PEER_MODELS:
        problems = [f"torchtitan has no {candidate.recipe.stem}"]
    elif recipe.train.forced_routing == "skewed":
        problems = ["torchtitan cannot be skewed"]
    if problems:
        raise RecipeError(problems)
    return recipe


def _time_ours(
    recipes: dict[int, Recipe], wanted: Sequence[Candidate], args: argparse.Namespace
) -> Iterator[tuple[int, Result]]:
    """One start for all that agree on what holds for a whole process."""
    words = [str(WORKER), f"--steps={args.steps}", f"--warmup={args.warmup}"]
    if args.profile:
        words.append(f"--profile={args.profile}")
    starts: dict[tuple[str, bool], dict[str, int]] = defaultdict(dict)
    for number, recipe in recipes.items():
        told = {"number": number, "recipe": str(wanted[number].recipe), "overrides": wanted[number].overrides}
        starts[recipe.run.device, recipe.run.is_deterministic][json.dumps(told)] = number
    for jobs in starts.values():
        for job, result in run_jobs(words, [*jobs], args.nproc, args.timeout):
            yield jobs[job], result


def _time_peer(candidate: Candidate, recipe: Recipe, args: argparse.Namespace) -> tuple[Result, dict[str, str]]:
    """The same model, depth, tokens and expert parallelism for torchtitan."""
    train = recipe.train
    words = [
        f"--model={PEER_MODELS[candidate.recipe.stem]}",
        f"--steps={args.steps}",
        f"--warmup={args.warmup}",
        f"--num-layers={recipe.model.num_layers}",
        f"--seq={train.seq_len_tokens}",
        f"--batch={train.global_batch_sequences // args.nproc}",
        f"--ep={recipe.parallel.ep}",
        "--forced-balance" if train.forced_routing else "--natural",
    ]
    result = run_ranks([str(PEER), *words, *shlex.split(args.peer_args)], args.nproc, args.timeout)
    if "versions" in result:
        result["torch"] = result["versions"]["torch"]
    recompute = result.get("settings", {}).get("recompute", "unknown")
    return result, peer_facts(recipe, args.nproc, recompute)


def _joined(argv: Sequence[str]) -> list[str]:
    """`--vary WORDS` as one word, or its value would be taken for an option."""
    words, joined = list(argv), []
    while words:
        word = words.pop(0)
        joined.append(f"{word}={words.pop(0)}" if word in HOLDS_WORDS and words else word)
    return joined


def _lines(file: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


if __name__ == "__main__":
    main(sys.argv[1:])
