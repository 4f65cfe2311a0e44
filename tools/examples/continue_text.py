"""Load the last checkpoint of a run, of any layout, and continue a text: python tools/examples/continue_text.py
runs/quickstart "def " (torch warns that this process is not distributed, which is so)"""

import sys
from pathlib import Path

import torch
from torch.distributed import checkpoint

from titan_moe import RecipeError, Transformer, load_recipe


def load_last(run_folder: Path) -> Transformer:
    model = Transformer(load_recipe(run_folder / "recipe.toml").model)
    steps = [*(run_folder / "checkpoints").glob("step-*")]
    if not steps:
        raise FileNotFoundError(f"{run_folder} has no checkpoints/step-N: name the folder of a run")
    last = max(steps, key=lambda path: int(path.name.removeprefix("step-")))
    state = model.state_dict()
    checkpoint.load(state, checkpoint_id=last)
    model.load_state_dict(state)
    return model


def main(run_folder: str, prompt: str, num_tokens: int = 20) -> bytes:
    """For data.tokenizer = "bytes"."""
    tokens_BN = torch.tensor([[*prompt.encode()]])
    continued_BN = load_last(Path(run_folder)).generate(tokens_BN, num_tokens, temperature=0.8)
    return bytes(continued_BN[0].tolist())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        print(main(*sys.argv[1:3]))
    except (FileNotFoundError, RecipeError) as error:
        sys.exit(str(error))
