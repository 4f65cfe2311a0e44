"""Every recipe of the repository parses, keeps the rules on its ranks, and fits the hardware that it names."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from titan_moe.config import check_rules, dump_recipe, load_recipe
from titan_moe.plan.check_report import describe
from titan_moe.plan.choice.hardware import find_hardware
from titan_moe.plan.pipeline.describe import simulate_step
from titan_moe.plan.resolved import Resolved

RECIPES = Path(__file__).parents[1] / "recipes"
RUNS = sorted(file for file in RECIPES.glob("*.toml"))
SHAPES = sorted((RECIPES / "models").glob("*.toml"))
RANKS = {"quickstart": 1, "deepseek_v3": 128, "qwen3_235b_a22b": 64, "qwen3_30b_a3b_lora": 1}
"""Ranks that a recipe is written for; 8 where it says nothing else."""


def ranks_of(file: Path) -> int:
    return RANKS.get(file.stem, 8)


def by_name(file: Path) -> str:
    return file.stem


def test_the_recipes_are_there() -> None:
    names = {file.stem for file in RUNS}
    assert {"quickstart", "qwen3_30b_a3b", "deepseek_v2_lite", "mixtral_8x7b"} <= names and SHAPES


@pytest.mark.parametrize("file", RUNS, ids=by_name)
def test_it_keeps_every_rule(file: Path) -> None:
    assert check_rules(load_recipe(file), ranks_of(file)) == []


@pytest.mark.parametrize("file", RUNS, ids=by_name)
def test_it_can_be_described_and_rerun_from_its_dump(file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(file)
    assert recipe.model.name in describe(recipe, ranks_of(file))
    (tmp_path / "recipe.toml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "recipe.toml") == recipe


@pytest.mark.parametrize("file", RUNS, ids=by_name)
def test_it_writes_into_a_folder_of_its_own_name(file: Path) -> None:
    assert load_recipe(file).run.folder == f"runs/{file.stem}"


@pytest.mark.parametrize("file", [file for file in RUNS if ranks_of(file) >= 8], ids=by_name)
def test_its_states_leave_room_on_an_h200(file: Path) -> None:
    h200 = find_hardware("NVIDIA H200")
    assert h200 is not None
    recipe = load_recipe(file)
    assert Resolved(recipe, ranks_of(file)).state_bytes / 2**30 < 0.75 * h200.memory_gib
    tokens_per_gpu = recipe.train.global_batch_sequences * recipe.train.seq_len_tokens // 8
    assert ranks_of(file) > 8 or tokens_per_gpu in (4 * 4096, 8 * 4096, 12 * 4096), (
        "recipes for one host are comparable"
    )


def test_adapters_of_a_model_of_30b_are_planned_for_80_gb() -> None:
    """With its whole frozen base, on one rank; with blocks computed again for 48 GB."""
    recipe = RECIPES / "qwen3_30b_a3b_lora.toml"
    for overrides, gib in (([], 72), (["--memory.recompute=block"], 44)):
        assert Resolved(load_recipe(recipe, overrides), 1).peak_bytes(1.0) / 2**30 < gib


def test_the_bubble_that_the_recipe_of_a_pipeline_names() -> None:
    """And the one without its layout."""
    recipe = load_recipe(RECIPES / "deepseek_v3.toml")
    assert round(100 * simulate_step(Resolved(recipe, 128)).bubble_share, 1) == 5.8
    divided = dataclasses.replace(recipe, parallel=dataclasses.replace(recipe.parallel, pp_layout=""))
    assert round(100 * simulate_step(Resolved(divided, 128)).bubble_share) == 12


@pytest.mark.parametrize("file", [file for file in RUNS if ranks_of(file) == 8], ids=by_name)
def test_the_memory_of_a_cuda_graph_is_that_of_check(file: Path) -> None:
    (named,) = re.findall(r"some (\d+) GiB more in the graph's pool", file.read_text(encoding="utf-8"))
    (checked,) = re.findall(r", (\S+) GiB more than without a CUDA graph", describe(load_recipe(file), 8))
    assert round(float(checked)) == int(named)


@pytest.mark.parametrize("file", RUNS, ids=by_name)
def test_it_names_its_own_command(file: Path) -> None:
    num_ranks, text = ranks_of(file), file.read_text(encoding="utf-8")
    if num_ranks > 8:
        assert f"torchrun --nnodes {num_ranks // 8} --nproc-per-node 8 " in text
        assert f" -m titan_moe train recipes/{file.name}\n" in text
    else:
        nproc = "" if num_ranks == 1 else f" --nproc {num_ranks}"
        assert f"titan-moe train recipes/{file.name}{nproc}\n" in text


@pytest.mark.parametrize("file", SHAPES, ids=by_name)
def test_a_shape_says_nothing_but_the_model(file: Path) -> None:
    assert set(tomllib.loads(file.read_text(encoding="utf-8"))) == {"model"}
    assert load_recipe(file).model.name == file.stem


@pytest.mark.parametrize("file", SHAPES, ids=by_name)
def test_a_shape_runs_in_layouts_from_one_rank_to_eight(file: Path) -> None:
    recipe = load_recipe(file, ["--train.global_batch_sequences=8", "--train.micro_batch_sequences=1"])
    assert check_rules(recipe, 1) == []
    for ep in (2, 4, 8):
        parallel = dataclasses.replace(recipe.parallel, ep=ep, dispatcher="allgather")
        assert check_rules(dataclasses.replace(recipe, parallel=parallel), 8) == []
