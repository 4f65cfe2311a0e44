"""Predict the best layouts of DeepSeek-V3 and Qwen3-235B-A22B on 256 to 16,384 H100s, and published runs of others.

    python tools/on_paper.py                   # tables in Markdown, as titan_moe/plan/README.md has them
    python tools/on_paper.py --models deepseek_v3 --gpus 1024 --gpu H200

Nothing is run: `titan-moe plan` searches. Nodes have 8 GPUs, each with an adapter of 400 Gbit/s. A GPU has 8 sequences
of 4,096 tokens a step (weak scaling), or all GPUs have 8,192 sequences (strong scaling). Published runs are predicted
with their own layouts (tests/plan/cost/published_steps.toml); rules of this package are not asked for these.
"""

import argparse
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

from titan_moe.config import load_recipe
from titan_moe.config.parallel import planning
from titan_moe.plan.cost.count import training_flops_per_token
from titan_moe.plan.cost.rates import rates_of
from titan_moe.plan.cost.step_time import predict
from titan_moe.plan.resolved import Resolved
from titan_moe.plan.search import Found, search
from titan_moe.plan.search_report import layout_in_words

REPOSITORY = Path(__file__).parents[1]
RECIPES = REPOSITORY / "recipes"
PUBLISHED = REPOSITORY / "tests" / "plan" / "cost" / "published_steps.toml"
MODELS = ("qwen3_235b_a22b", "deepseek_v3")
NUMBERS = (256, 512, 1024, 2048, 4096, 8192, 16384)
OF_A_GPU, OF_ALL = 8, 8192
"""Sequences of a step, in weak and in strong scaling."""
STATES = ("--precision.master=fp32_split", "--precision.moments=bf16")
FORMATS = {"bf16": "compute", "fp8": "fp8_rowwise"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--gpus", nargs="+", type=int, default=NUMBERS)
    parser.add_argument("--gpu", default="H100")
    args = parser.parse_args()
    with planning():
        for model in args.models:
            print("\n".join(scaling(model, args.gpus, args.gpu)), end="\n\n", flush=True)
        print("\n".join(published()))


def scaling(model: str, numbers: list[int], gpu: str) -> Iterator[str]:
    """A row for each number of GPUs: TFLOP/s of a GPU in weak scaling, in fp8, in strong scaling, and a layout."""
    yield f"| {model}: GPUs | weak, bf16 | fp8 | strong, bf16 | best layout in weak scaling, bf16 | found in |"
    yield "|---|---|---|---|---|---|"
    for number in numbers:
        start = time.perf_counter()
        weak = _best(model, number, OF_A_GPU * number, "bf16", gpu)
        seconds = time.perf_counter() - start
        others = _best(model, number, OF_A_GPU * number, "fp8", gpu), _best(model, number, OF_ALL, "bf16", gpu)
        cells = [f"{number:,}", *(_teraflops(found) for found in (weak, *others))]
        yield "| " + " | ".join([*cells, layout_in_words(weak) if weak else "", f"{seconds:.0f} s"]) + " |"


def published() -> Iterator[str]:
    """A row for each published run: TFLOP/s of a GPU as published, and as predicted with its layout."""
    yield "| run | GPUs | published | predicted | ratio | largest parts, % of the step |"
    yield "|---|---|---|---|---|---|"
    for row in tomllib.loads(PUBLISHED.read_text("utf-8"))["runs"]:
        recipe = load_recipe(RECIPES / f"{row['recipe']}.toml", row["overrides"].split())
        rates = rates_of("H100")
        assert rates is not None
        found = predict(Resolved(recipe, row["gpus"]), rates)
        parts = sorted(found.parts.items(), key=lambda part: -part[1])[:4]
        words = ", ".join(f"{name} {100 * seconds / found.seconds:.0f}" for name, seconds in parts)
        teraflops = found.mfu * rates.peak / 1e12
        ratio = teraflops / row["teraflops"]
        yield f"| {row['name']} | {row['gpus']:,} | {row['teraflops']} | {teraflops:.0f} | {ratio:.2f} | {words} |"


def _best(model: str, number: int, sequences: int, dtype: str, gpu: str) -> Found | None:
    words = [*STATES, f"--precision.format={FORMATS[dtype]}", f"--train.global_batch_sequences={sequences}"]
    words += ["--memory.recompute=auto", "--parallel.accumulate_unsharded=false"]
    found = search(load_recipe(RECIPES / f"{model}.toml", words), number, gpu, 1).found
    return found[0] if found else None


def _teraflops(found: Found | None) -> str:
    if found is None:
        return "does not fit"
    train = found.recipe.train
    flops = training_flops_per_token(found.recipe.model, train.seq_len_tokens, found.recipe.optim.trainable)
    teraflops = found.prediction.tokens_per_second * flops / 1e12
    return f"{teraflops:.0f} ({100 * found.prediction.mfu:.0f} %)"


if __name__ == "__main__":
    main()
