"""The rows of `titan-moe check` about a pipeline."""

import re
from pathlib import Path

import pytest

from titan_moe.config import check_rules, load_recipe
from titan_moe.config.arena import has_arena
from titan_moe.plan.check_report import describe
from titan_moe.plan.memory import arena_bytes_per_rank
from titan_moe.plan.pipeline.describe import name_modules
from titan_moe.plan.pipeline.parts import parts_of

QWEN3 = Path(__file__).parents[3] / "recipes" / "qwen3_30b_a3b.toml"
SCHEDULES = {
    "1f1b": 1,
    "interleaved_1f1b": 3,
    "interleaved_zero_bubble": 2,
    "zbv": 2,
    "dualpipev": 2,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_check_of_a_published_model_in_a_pipeline(schedule: str) -> None:
    """Qwen3-30B-A3B on 4 nodes: ep inside each, pp between them."""
    overrides = [
        "--parallel.pp=4",
        f"--parallel.pp_schedule={schedule}",
        f"--parallel.vpp={SCHEDULES[schedule]}",
        "--parallel.accumulate_unsharded=true",
        "--train.micro_batch_sequences=1",
        "--train.global_batch_sequences=128",
        "--compile.cudagraph=off",
    ]
    recipe = load_recipe(QWEN3, overrides)
    assert check_rules(recipe, 32) == []
    lines = describe(recipe, 32).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("pipeline"))
    assert lines[start].split(maxsplit=1)[1].startswith(f"{schedule}, {4 * SCHEDULES[schedule]} stages")
    assert "16 microbatches a step; bubble " in lines[start]
    ranks = lines[start + 1 : start + 5]
    assert [line.split(":")[0].strip() for line in ranks] == [f"pp rank {rank}" for rank in range(4)]
    assert "embedding, layers 0 to" in ranks[0] and sum("head" in line for line in ranks) == 1
    assert all("microbatches in flight" in line and "GiB at the peak" in line for line in ranks)
    assert lines[start + 5].startswith("memory") and "GiB on the ranks that have most" in lines[start + 5]


def test_check_of_a_pipeline_that_interleaves_microbatches() -> None:
    overrides = ["--parallel.pp=4", "--parallel.pp_schedule=dualpipev", "--parallel.vpp=2"]
    overrides += ["--parallel.accumulate_unsharded=true", "--train.micro_batch_sequences=1", "--compile.cudagraph=off"]
    overrides += ["--train.global_batch_sequences=128", "--parallel.dispatcher=alltoall"]
    pairs = []
    for overlap in ("none", "microbatch"):
        recipe = load_recipe(QWEN3, [*overrides, f"--parallel.overlap={overlap}"])
        assert check_rules(recipe, 32) == []
        pairs.append(re.findall(r"; (\S+ of \S+) forwards beside a backward; ", describe(recipe, 32)))
    assert pairs == [[], ["21 of 32", "22 of 32", "23 of 32", "23 of 32"]], "2 stages of 16 microbatches"


def test_check_without_a_pipeline_does_not_name_one() -> None:
    assert "pipeline" not in describe(load_recipe(QWEN3, []), 8)


def test_microbatches_in_flight_have_places_in_the_arena() -> None:
    """As large together as one of all layers, where as many are in flight as there are stages."""
    overrides = ["--parallel.dispatcher=symm_mem", "--train.global_batch_sequences=128"]
    without, within = (load_recipe(QWEN3, [*overrides, f"--parallel.pp={pp}"]) for pp in (1, 2))
    assert has_arena(without, "fused") and has_arena(within, "fused")
    whole = arena_bytes_per_rank(without, 1.5)
    arenas = [arena_bytes_per_rank(part.recipe, 1.5, part.places) for part in parts_of(within, 16)]
    assert arenas == pytest.approx([2 * 25 / 48 * whole, 23 / 48 * whole], rel=0.1)
    assert f"of it {max(arenas) / 2**30:.3g} GiB in the arena of rows" in describe(
        load_recipe(QWEN3, [*overrides, "--parallel.pp=2", "--parallel.expert_rank_capacity_factor=1.5"]), 16
    )


def test_modules_in_words() -> None:
    assert name_modules(["embed", "layers.0", "layers.1"]) == "embedding, layers 0 to 1"
    assert name_modules(["layers.7", "norm", "head"]) == "layer 7, head"
    assert name_modules(["norm", "head"]) == "head" and name_modules([]) == "nothing"
