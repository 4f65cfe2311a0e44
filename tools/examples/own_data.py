"""Train on text files of one's own, from Python: python tools/examples/own_data.py 'my_texts/*.txt' --train.steps=100

Or on JSON lines, Parquet, a folder, a hub name: recipes/README.md. With little data `--validation.num_sequences=8`.
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
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except titan_moe.RecipeError as error:  # it names the field, the value and a way out
        sys.exit(str(error))
