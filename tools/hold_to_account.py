"""Time steps that the plan has not seen, and put its predictions beside them.

    python tools/hold_to_account.py rows.txt --nproc 4 --name "4 x H100" --out measured.toml

A line of the file is a recipe of recipes/ and overrides (`qwen3_30b_a3b --parallel.ep=4 --model.num_layers=12`); #
begins a comment. Rows run in the same processes (time_steps.py), those with Muon in others: its messages leave buffers
of NCCL behind. The table has tokens/s of a GPU and the peak of its memory, as measured and as predicted, and the errors
in percent. The file that is written is a call of tests/plan/cost/held_back_steps.toml: its overrides name what "auto"
chose on this card.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rank_processes import Result, run_jobs

from titan_moe.config import RecipeError, load_recipe, refusals
from titan_moe.config.schema import in_toml
from titan_moe.plan.cost.rates import rates_of
from titan_moe.plan.cost.step_time import predict
from titan_moe.plan.resolved import Resolved

RECIPES = Path(__file__).parents[1] / "recipes"
WORKER = Path(__file__).with_name("time_steps.py")
HEAD = ("row", "tokens/s", "predicted", "error %", "peak GiB", "predicted", "error %", "load of rank")


class Row(NamedTuple):
    """A measured step, and what the plan says of it."""

    recipe: str
    overrides: str
    result: Result
    tokens: float
    gib: float

    @property
    def errors(self) -> tuple[float, float]:
        """Of tokens/s and of the peak, in percent."""
        measured = self.result["tokens_per_second_per_gpu"], self.result["peak_memory_gib"]
        return tuple(100 * (value / of - 1) for value, of in zip((self.tokens, self.gib), measured, strict=True))

    def cells(self) -> list[str]:
        if "error" in self.result:
            return [f"{self.recipe} {self.overrides}", str(self.result["error"]), *[""] * 6]
        of_tokens, of_peak = self.errors
        return [
            f"{self.recipe} {self.overrides}",
            f"{self.result['tokens_per_second_per_gpu']:,.0f}",
            f"{self.tokens:,.0f}",
            f"{of_tokens:+.1f}",
            f"{self.result['peak_memory_gib']:.1f}",
            f"{self.gib:.1f}",
            f"{of_peak:+.1f}",
            f"{self.result['rank_load'].get('mean', 1):.2f}",
        ]

    def in_toml(self) -> str:
        tokens, peak = self.result["tokens_per_second_per_gpu"], self.result["peak_memory_gib"]
        load = self.result["rank_load"].get("mean", 1.0)
        fields = f'recipe = "{self.recipe}", tokens = {tokens:.0f}, gib = {peak:.1f}, load = {load:.2f}'
        return f"  {{ {fields}, overrides = '{self.overrides}' }},"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="file of recipes with overrides")
    parser.add_argument("--nproc", type=int, default=1, help="GPUs")
    parser.add_argument("--card", default="H100", help="whose rates predict")
    parser.add_argument("--name", default="", help="of the call")
    parser.add_argument("--steps", type=int, default=4, help="timed steps")
    parser.add_argument("--warmup", type=int, default=9, help="steps before the timed ones")
    parser.add_argument("--timeout", type=float, default=90, help="seconds of a row")
    parser.add_argument("--out", type=Path, help="TOML file of the measured rows")
    args = parser.parse_args()
    rows = []
    print(_line(HEAD), _line(["---"] * len(HEAD)), sep="\n", flush=True)
    for row in measure(args):
        print(_line(row.cells()), flush=True)
        if "error" not in row.result:
            rows.append(row)
            if args.out:
                args.out.write_text(_call(args, rows), "utf-8")
    for name, errors in zip(("tokens/s", "peak"), zip(*(row.errors for row in rows), strict=True), strict=True):
        sizes = [*map(abs, errors)]
        print(f"{name}: median error {statistics.median(sizes):.1f} %, worst {max(sizes):.1f} % of {len(rows)} rows")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of the file, in order; those that a rule refuses first."""
    launches: dict[bool, dict[str, tuple[str, list[str]]]] = {False: {}, True: {}}
    for line in args.rows.read_text("utf-8").splitlines():
        stem, *overrides = line.partition("#")[0].split() or [""]
        if not stem:
            continue
        recipe = RECIPES / f"{stem}.toml"
        try:
            loaded = load_recipe(recipe, overrides)
            problems = refusals(loaded, args.nproc)
        except RecipeError as error:
            problems = error.problems
        if problems:
            yield Row(stem, " ".join(overrides), {"error": "; ".join(map(str, problems))}, 0, 0)
        else:
            job = json.dumps({"recipe": str(recipe), "overrides": overrides})
            launches[loaded.optim.kind == "muon"][job] = stem, overrides
    command = [str(WORKER), f"--steps={args.steps}", f"--warmup={args.warmup}"]
    for jobs in launches.values():
        for job, result in run_jobs(command, [*jobs], args.nproc, args.timeout):
            yield _row(*jobs[job], result, args)


def _row(stem: str, overrides: list[str], result: Result, args: argparse.Namespace) -> Row:
    if "error" in result:
        return Row(stem, " ".join(overrides), result, 0, 0)
    chosen = in_toml(tuple(result["recompute"])).replace(" ", "")
    others = [word for word in overrides if not word.startswith("--memory.recompute")]
    words = [*others, f"--memory.recompute={chosen}"]
    rates, resolved = rates_of(args.card), Resolved(load_recipe(RECIPES / f"{stem}.toml", words), args.nproc)
    assert rates is not None, f"no rates of {args.card}"
    tokens = predict(resolved, rates, result["rank_load"].get("mean", 0.0)).tokens_per_second
    peak = resolved.peak_bytes(result["capacity_factor"] or 1.0) + resolved.shared_bytes
    return Row(stem, " ".join(words), result, tokens, peak / 2**30)


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _call(args: argparse.Namespace, rows: list[Row]) -> str:
    head = f'[[calls]]\nname = "{args.name}"\ncard = "{args.card}"\ngpus = {args.nproc}\nrows = ['
    return "\n".join([head, *(row.in_toml() for row in rows), "]", ""])


if __name__ == "__main__":
    main()
