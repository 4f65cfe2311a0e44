"""Time whole optimizer steps of recipes on this host's GPUs, each beside its variants and torchtitan's own Trainer.

    python tools/bench_train.py recipes/qwen3_30b_a3b.toml recipes/deepseek_v2_lite.toml --nproc 8 --peer \\
        --train.force_balanced_routing=true --vary "--compile.cudagraph=step --parallel.dispatcher=allgather" \\
        --append tools/RESULTS.md

Every recipe runs as given, then once for each `--vary` (or line of `--variants`) with those overrides on top, then,
with `--peer`, as torchtitan's model on as many tokens. Each candidate runs in processes of its own, in this order; one
that fails or takes too long is a row too. The figure is the median of the steps after warm-up (tools/time_steps.py).
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rank_processes import run_ranks
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
    rows: list[Row] = []
    for candidate in candidates(args, overrides):
        print(f"--- {candidate.name}", flush=True)
        rows.append(run(candidate, args))
        print("\n".join([*table(rows[-1:])][2:]), flush=True)
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
    parser.add_argument("--timeout", type=float, default=1200, help="seconds that a candidate may take")
    parser.add_argument("--peer", action="store_true", help="run torchtitan's Trainer too")
    parser.add_argument("--peer-args", default="", help="further arguments of peer_torchtitan.py, in one string")
    parser.add_argument("--append", type=Path, help="Markdown file that gets the table as a new section")
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


def run(candidate: Candidate, args: argparse.Namespace) -> Row:
    """Time one candidate; what cannot run is told without starting it."""
    name, group = candidate.name, candidate.recipe.stem
    try:
        recipe = load_recipe(candidate.recipe, candidate.overrides)
    except RecipeError as error:
        return Row(name, group, {"error": "; ".join(error.problems)})
    time = _time_peer if candidate.is_peer else _time_ours
    result, facts = time(candidate, recipe, args)
    return Row(name, group, result, facts, flops_per_token(recipe))


def _time_ours(candidate: Candidate, recipe: Recipe, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    problems = check_rules(recipe, args.nproc)
    if problems:
        return {"error": "; ".join(problems)}, {}
    words = [str(candidate.recipe), f"--steps={args.steps}", f"--warmup={args.warmup}", *candidate.overrides]
    return run_ranks([str(WORKER), *words], args.nproc, args.timeout), facts_of(recipe, args.nproc)


def _time_peer(candidate: Candidate, recipe: Recipe, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """The same model, depth, tokens and expert parallelism for torchtitan."""
    train = recipe.train
    if candidate.recipe.stem not in PEER_MODELS:
        return {"error": f"torchtitan has no {candidate.recipe.stem}"}, {}
    if train.forced_routing == "skewed":
        return {"error": "torchtitan cannot be skewed"}, {}
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
