"""A model class of one's own in a recipe, with all that a run has: python tools/examples/own_model_class.py

The same by the command line, in this folder: titan-moe train RECIPE.toml --model.class=own_model_class:Parallel
"""

import sys
from pathlib import Path

from torch import Tensor

import titan_moe
from titan_moe import Block, Transformer
from titan_moe.layers.attention import Context

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


class ParallelBlock(Block):
    """Attention and experts beside each other (arXiv:2204.02311)."""

    def forward(self, x_BND: Tensor, context: Context) -> Tensor:
        attended_BND = self.attention(self.attention_norm(x_BND), context)
        return x_BND + attended_BND + self.feed_forward(self.ffn_norm(x_BND))


class Parallel(Transformer):
    block_class = ParallelBlock


def main(*overrides: str) -> None:
    words = ["--model.class=own_model_class:Parallel", "--run.folder=runs/parallel", *overrides]
    titan_moe.train(RECIPE, words)


if __name__ == "__main__":
    main(*sys.argv[1:])
