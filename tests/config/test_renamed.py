"""A key of an earlier recipe is refused with its new name."""

from pathlib import Path

import pytest

from titan_moe.config import Recipe, RecipeError, load_recipe
from titan_moe.config.explain import explain
from titan_moe.config.renamed import NAMES_ELSEWHERE, REMOVED, RENAMED
from titan_moe.config.schema import all_keys

OPTIMIZER = "perf.optimizer is now optim.kind (torch -> adamw, fused -> fused_adamw)"


def test_renamed_key_error_names_the_new_key(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text('[perf]\noptimizer = "fused"\n[parallel]\nchunks = 2\n')
    with pytest.raises(RecipeError) as refused:
        load_recipe(file, ["--parallel.gathers_once_a_step", "--train.force_skewed_routing=true"])
    assert refused.value.problems == [
        f"{file}: {OPTIMIZER}",
        f"{file}: parallel.chunks was removed: exchanges in chunks were slower; drop it",
        "command line: parallel.gathers_once_a_step is now parallel.accumulate_unsharded",
        "command line: train.force_skewed_routing is now train.forced_load (true -> skewed; false: drop it)",
    ]


@pytest.mark.parametrize("override", ["--parallel.overlap=layer", "--parallel.overlap=all"])
def test_removed_value_error_says_what_replaces_it(tmp_path: Path, override: str) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text("")
    with pytest.raises(RecipeError) as refused:
        load_recipe(file, [override])
    assert ('overlap = "tile" inside a node)' in str(refused.value)) is override.endswith("layer")


def test_renamed_key_explain_names_the_new_key() -> None:
    with pytest.raises(RecipeError) as refused:
        explain("perf.optimizer")
    assert refused.value.problems == [OPTIMIZER]


def test_renamed_keys_are_no_keys_and_new_ones_are() -> None:
    known = all_keys(Recipe)
    assert not (RENAMED.keys() | REMOVED.keys()) & known.keys()
    assert {new.partition(" ")[0] for new in RENAMED.values()} <= known.keys()
    assert {key.partition(" ")[0] for key in NAMES_ELSEWHERE.values()} <= known.keys()
    assert not NAMES_ELSEWHERE.keys() & {key.rpartition(".")[2] for key in known}, "these are found by their name"
