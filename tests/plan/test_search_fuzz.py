"""Recipes of seeds through a search: none raises, and every layout that is found passes the rules and can be described.

`--all-cases` takes all 3,000 seeds. Times are not asserted.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe.config import Recipe, RecipeError, check_rules, load_recipe
from titan_moe.config.parallel import planning
from titan_moe.config.schema import all_keys
from titan_moe.plan.check_data import check_data
from titan_moe.plan.search import search
from titan_moe.plan.search_report import as_rows, describe_plan

RECIPE = Path(__file__).parents[2] / "recipes" / "qwen3_30b_a3b.toml"
SEEDS_OF_A_CASE, NUM_CASES = 10, 300
SECTIONS = ("model", "memory", "optim", "precision", "perf", "compile", "train", "parallel")
FIELDS = [
    key
    for key in all_keys(Recipe).values()
    if not key.is_section and key.dotted.startswith(SECTIONS) and (key.choices or key.plain_type in (int, float, bool))
]
SIZES = {
    "model.num_layers": (1, 2, 3, 5),
    "model.hidden_size": (96, 128, 2048),
    "model.moe.num_experts": (0, 1, 3, 8, 12),
    "model.moe.top_k": (1, 2, 3),
    "model.attention.num_heads": (3, 8, 12),
    "model.attention.num_kv_heads": (1, 4),
    "model.mtp.num_depths": (0, 0, 1),
    "train.seq_len_tokens": (128, 4096, 32_768),
    "train.global_batch_sequences": (1, 6, 8, 24),
}


def _overrides(rng: random.Random) -> list[str]:
    """Sizes that fit each other or not, and some other fields."""
    values = {key: str(rng.choice(sizes)) for key, sizes in SIZES.items()}
    values |= {"model.adapter.rank": "4", "model.adapter.base": "fp8_rowwise"} if rng.random() < 0.1 else {}
    for key in rng.sample(FIELDS, rng.randint(0, 4)):
        if key.choices:
            values[key.dotted] = str(rng.choice(list(key.choices)))
        else:
            values[key.dotted] = rng.choice(["true", "false"] if key.plain_type is bool else ["0", "1", "2", "3", "64"])
    return [f"--{name}={value}" for name, value in values.items()]


@pytest.mark.few("0")
@pytest.mark.parametrize("case", range(NUM_CASES), ids=str)
def test_no_recipe_raises(case: int) -> None:
    for seed in range(case * SEEDS_OF_A_CASE, (case + 1) * SEEDS_OF_A_CASE):
        rng = random.Random(seed)
        try:
            recipe = load_recipe(RECIPE, _overrides(rng))
        except RecipeError:
            continue
        if rng.random() < 0.5:
            recipe = replace(recipe, memory=replace(recipe.memory, recompute=("auto",)))
        world_size, gpu = rng.choice([1, 2, 3, 4, 6, 8]), rng.choice(["H100", "H200", "A100-80GB"])
        with planning():
            result = search(recipe, world_size, gpu, 2)
            assert describe_plan(result, recipe, world_size, gpu)
            assert len(as_rows(result, world_size)) == len(result.found)
            for found in result.found:
                assert not check_rules(found.recipe, world_size), seed
                assert check_data(found.recipe, world_size, gpu)["speed"], seed
