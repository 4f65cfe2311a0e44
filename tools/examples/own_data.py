"""Train on text files of one's own, from Python: python tools/examples/own_data.py 'my_texts/*.txt' --train.steps=100

A file is a document, and at least one is held out: give two or more, or `--data.holdout_fraction=0` with
`--validation.every_steps=0 --metrics.sample_tokens=0`. Ids, datasets and tokenizers: recipes/README.md.
"""

import sys
from pathlib import Path

import titan_moe

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


def main(glob: str, *overrides: str) -> None:
    words = ["--run.folder=runs/mine", f"--data.path={glob}", *overrides]
    print(titan_moe.check(RECIPE, words))  # the shape, memory and cost of the run; raises RecipeError if it cannot run
    titan_moe.train(RECIPE, words)  # the same call again goes on from the last checkpoint


if __name__ == "__main__":
    main(*sys.argv[1:])
