"""What "auto" computes again: nothing where a step fits, else the cheapest that makes it fit."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from support.calls import CALLS_OF_A_SECOND, count_calls

from titan_moe.config import Recipe, check_rules, load_recipe
from titan_moe.config.recompute import RECOMPUTABLE, of_entries, with_entries
from titan_moe.plan.choice.hardware import OUTSIDE_GIB, USABLE_SHARE, Hardware, find_hardware
from titan_moe.plan.choice.peaks import GROWN_FACTOR
from titan_moe.plan.choice.recompute import _Search, choose_recompute, is_auto
from titan_moe.plan.resolved import Resolved

RECIPES = Path(__file__).parents[3] / "recipes"
ON_EIGHT = ("qwen3_30b_a3b", "deepseek_v2_lite", "mixtral_8x7b")


def gpu(name: str, limit: float | None = None) -> Hardware:
    """A known GPU, or one whose ranks may need so many GiB."""
    hardware = find_hardware(name)
    assert hardware is not None
    return hardware if limit is None else replace(hardware, memory_gib=(limit + OUTSIDE_GIB) / USABLE_SHARE)


def gib_of(recipe: Recipe, num_ranks: int) -> list[float]:
    """The peak of each pipeline rank, as a report has that of all."""
    resolved = Resolved(recipe, num_ranks)
    of_ranks = (replace_parts(resolved, rank) for rank in range(recipe.parallel.pp))
    return [(one.peak_bytes(GROWN_FACTOR) + resolved.shared_bytes) / 2**30 for one in of_ranks]


def replace_parts(resolved: Resolved, rank: int) -> Resolved:
    """The same, with one pipeline rank alone."""
    one = Resolved(resolved.recipe, resolved.world_size)
    one.__dict__["parts"] = (resolved.parts[rank],)
    return one


@pytest.mark.parametrize("name", ON_EIGHT)
def test_all_of_a_step_is_kept_on_gpus_of_141_gb(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.toml")
    choice = choose_recompute(recipe, 8, gpu("NVIDIA H200"))
    assert is_auto(recipe) and choice.entries == () and choice.fits
    assert choice.gib == pytest.approx(max(gib_of(with_entries(recipe, ()), 8)))
    (line,) = choice.lines()
    assert line == f"nothing: {choice.gib:.3g} GiB at the peak of a step fit {gpu('NVIDIA H200').room()}"


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "deepseek_v2_lite"])
def test_parts_make_a_step_fit_on_gpus_of_80_gb(name: str) -> None:
    recipe, hardware = load_recipe(RECIPES / f"{name}.toml"), gpu("NVIDIA H100")
    choice = choose_recompute(recipe, 8, hardware)
    resolved = with_entries(recipe, choice.entries)
    assert check_rules(resolved, 8) == [] and "block" not in of_entries(choice.entries, 48).layers
    (gib,) = gib_of(resolved, 8)
    assert gib == pytest.approx(choice.gib) and choice.fits and gib <= hardware.free_gib()
    (before,) = gib_of(with_entries(recipe, ()), 8)
    assert before > 1.5 * hardware.free_gib()
    *rows, verdict = choice.lines()
    assert len(rows) == len(of_entries(choice.entries, recipe.model.num_layers).layers)
    assert all(" layer" in row and ": frees " in row and row.endswith(" ms a step") for row in rows)
    assert verdict == f"with them {gib:.3g} GiB at the peak of a step fit {hardware.room()}"


def test_a_step_that_does_not_fit_gets_the_lowest_peak() -> None:
    overrides = ["--precision.master=fp32", "--precision.moments=bf16", "--parallel.accumulate_unsharded=true"]
    recipe = load_recipe(RECIPES / "mixtral_8x7b.toml", overrides)
    choice = choose_recompute(recipe, 8, gpu("NVIDIA H100"))
    lowest = min(max(gib_of(with_entries(recipe, entries), 8)) for entries in (("block",), ("norms", "experts")))
    assert not choice.fits and choice.gib <= lowest * (1 + 1e-9)
    assert choice.lines()[-1].endswith(
        f"{choice.gib:.3g} GiB at the peak of a step do NOT fit {gpu('NVIDIA H100').room()}"
    )


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    assert gpu("NVIDIA H200").free_gib(2) == gpu("NVIDIA H200").free_gib() / 2
    recipe = load_recipe(RECIPES / "qwen3_30b_a3b.toml")
    shared = replace(recipe, run=replace(recipe.run, ranks_per_gpu=2))
    assert choose_recompute(shared, 8, gpu("NVIDIA H200")).limit_gib == gpu("NVIDIA H200").free_gib(2)


@pytest.mark.parametrize("name", ON_EIGHT)
def test_no_set_of_whole_parts_is_cheaper(name: str) -> None:
    """By all sets, at limits between the lowest peak and that with nothing computed again."""
    recipe = load_recipe(RECIPES / f"{name}.toml", ["--parallel.expert_clones=off"])
    search, sets = _Search(recipe, 8, gpu("NVIDIA H100")), []
    for chosen in itertools.product((False, True), repeat=len(RECOMPUTABLE)):
        names = [part for part, is_chosen in zip(RECOMPUTABLE, chosen, strict=True) if is_chosen]
        if not check_rules(with_entries(recipe, tuple(names)), 8):
            gib = max(search.gib({part: search._layers(part) for part in names}))
            sets.append((gib, sum(map(search.cost_ms, names))))
    most, least = sets[0][0], min(gib for gib, _ in sets)
    for step in range(1, 12):
        limit = least + (most - least) * step / 12
        choice = choose_recompute(recipe, 8, gpu("NVIDIA H100", limit))
        layers = of_entries(choice.entries, recipe.model.num_layers).layers
        cost = sum(search.cost_ms(part) * search._share(part, own) for part, own in layers.items())
        assert choice.fits and cost <= 1.01 * min(ms for gib, ms in sets if gib <= limit), limit


PIPELINE = ["--parallel.pp=4", "--train.micro_batch_sequences=1", "--train.global_batch_sequences=64"]
PIPELINES = {
    "1f1b": [*PIPELINE, "--parallel.expert_clones=off"],
    "zbv": [*PIPELINE, "--parallel.vpp=2", "--parallel.pp_schedule=zbv", "--parallel.accumulate_unsharded=true"],
}


@pytest.mark.parametrize("schedule", PIPELINES)
@pytest.mark.parametrize("share", [0.98, 0.95])
def test_ranks_of_a_pipeline_that_fit_compute_nothing_again(schedule: str, share: float) -> None:
    recipe = with_entries(load_recipe(RECIPES / "qwen3_30b_a3b.toml", PIPELINES[schedule]), ())
    before = gib_of(recipe, 32)
    hardware = gpu("NVIDIA H100", share * max(before))
    choice = choose_recompute(recipe, 32, hardware)
    search, again = _Search(recipe, 32, hardware), of_entries(choice.entries, 48).layers
    changed = with_entries(recipe, choice.entries)
    after = gib_of(changed, 32)
    assert check_rules(changed, 32) == [] and max(after) == pytest.approx(choice.gib) and choice.fits
    for rank in range(4):
        own = [name for name, layers in again.items() if layers & search._layers(name, rank)]
        assert bool(own) == (before[rank] > hardware.free_gib()), (rank, own)
        assert own or after[rank] == before[rank]
    assert any(gib <= hardware.free_gib() for gib in before)


def test_experts_of_a_pipeline_keep_the_rule_of_their_arena() -> None:
    recipe = with_entries(load_recipe(RECIPES / "qwen3_30b_a3b.toml", PIPELINES["1f1b"]), ())
    choice = choose_recompute(recipe, 32, gpu("NVIDIA H100", 0.7 * max(gib_of(recipe, 32))))
    assert choice.fits and any(entry.startswith("experts") for entry in choice.entries)
    assert check_rules(with_entries(recipe, choice.entries), 32) == []


def test_the_choice_for_61_layers_on_16_pipeline_ranks_takes_less_than_half_a_second() -> None:
    recipe = with_entries(load_recipe(RECIPES / "deepseek_v3.toml"), ("auto",))
    assert recipe.parallel.pp == 16 and choose_recompute(recipe, 128, gpu("NVIDIA H200")).fits
    assert count_calls(lambda: choose_recompute(recipe, 128, gpu("NVIDIA H200"))) < CALLS_OF_A_SECOND / 2


def test_weights_with_clones_behind_them_are_kept() -> None:
    """Casts that are made again have no clones."""
    with_clones = load_recipe(RECIPES / "qwen3_30b_a3b.toml", ["--train.micro_batch_sequences=2"])
    without = replace(with_clones, parallel=replace(with_clones.parallel, expert_clones="off"))
    assert with_clones.parallel.has_clones
    chosen = [
        of_entries(choose_recompute(recipe, 8, gpu("NVIDIA H100")).entries, 48) for recipe in (with_clones, without)
    ]
    assert ["expert_weights" in again.layers for again in chosen] == [False, True]
