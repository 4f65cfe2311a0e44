"""What twice the GPUs, and the next card, would give a layout."""

from pathlib import Path

from titan_moe.config import load_recipe
from titan_moe.config.parallel import planning
from titan_moe.plan.beyond import describe_beyond
from titan_moe.plan.search import search

RECIPE = Path(__file__).parents[2] / "recipes" / "qwen3_30b_a3b.toml"


def test_twice_the_gpus_and_the_next_card() -> None:
    recipe = load_recipe(RECIPE, ["--model.num_layers=4", "--train.global_batch_sequences=64"])
    with planning():
        (found,) = search(recipe, 2, "H100", 1).found
        twice, other = describe_beyond(found, 2, "H100")
        assert "on 4 x H100" in twice
        assert 1 < float(twice.split(" times as fast")[0].split()[-1]) <= 2.05
        assert "on 2 x H200" in other
        (by_sheet,) = [line for line in describe_beyond(found, 2, "H200") if "B200" in line]
        assert "by its data sheet" in by_sheet
