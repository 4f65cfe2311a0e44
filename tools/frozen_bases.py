"""Losses of adapters beside a base that is frozen in compute's dtype, and in codes of each format.

    python tools/frozen_bases.py --steps 200

A small model learns to write Python first, as in recipes/quickstart.toml; then adapters train beside it, from the same
factors, on the same batches.
"""

import argparse
import json
import tempfile
from pathlib import Path

from titan_moe import cli
from titan_moe.config.adapter import BaseFormat

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
BASES: tuple[BaseFormat, ...] = ("compute", "fp8_rowwise", "fp8_blockwise")
WINDOW = 50
SMALL = (
    "--model.num_layers=2",
    "--model.hidden_size=96",
    "--model.moe.ffn_hidden_size=160",
    "--train.seq_len_tokens=128",
    "--metrics.every_steps=1",
    "--metrics.sample_tokens=0",
    "--metrics.tensorboard=false",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of adapters, after as many of the base")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        origin = Path(folder) / "base"
        train(origin, steps)
        words = ("--model.adapter.rank=8", "--model.adapter.alpha=16.0", "--run.seed=1", "--optim.lr=1e-3")
        words += (f"--checkpoint.load_from={origin / 'checkpoints' / f'step-{steps}'}",)
        losses = {base: train(Path(folder) / base, steps, *words, f"--model.adapter.base={base}") for base in BASES}
    print(f"| base | mean loss of the last {WINDOW} of {steps} steps | against compute | validation |")
    print("|---|---|---|---|")
    for base, (mean, validation) in losses.items():
        print(f"| {base} | {mean:.4f} | {mean / losses['compute'][0] - 1:+.3%} | {validation:.4f} |")


def train(folder: Path, steps: int, *words: str) -> tuple[float, float]:
    """Train, and return the mean of the last losses and the last validation loss."""
    common = (f"--run.folder={folder}", f"--train.steps={steps}", f"--validation.every_steps={steps}")
    if cli.main(["train", str(RECIPE), *common, *SMALL, *words]):
        raise SystemExit(f"{folder.name} has failed")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record][-WINDOW:]
    validation = [record["validation_loss"] for record in records if "validation_loss" in record]
    return sum(losses) / len(losses), validation[-1]


if __name__ == "__main__":
    main()
