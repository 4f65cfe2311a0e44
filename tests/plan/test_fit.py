"""A recipe whose estimated peak exceeds the memory of a known GPU is warned of, with the nearest changes that fit."""

import itertools
import re
from pathlib import Path

import pytest

from titan_moe.config import Recipe, check_rules, load_recipe
from titan_moe.config.recompute import with_entries
from titan_moe.plan.check_report import describe
from titan_moe.plan.choice.hardware import find_hardware, gpus_here
from titan_moe.plan.choice.kernels import as_run_on
from titan_moe.plan.choice.recompute import choose_recompute, is_auto
from titan_moe.plan.cost.memory import shared_bytes_per_rank
from titan_moe.plan.fit import CHANGES
from titan_moe.plan.resolved import Resolved

MIXTRAL = Path(__file__).parents[2] / "recipes" / "mixtral_8x7b.toml"
QWEN3 = Path(__file__).parents[2] / "recipes" / "qwen3_30b_a3b.toml"
H100, H200 = (gpu for name in ("H100", "H200") if (gpu := find_hardware(name)))
NOTHING = "--memory.recompute=none"
FP32 = ("--precision.master=fp32", "--precision.moments=bf16")
ONCE = (*FP32, "--parallel.accumulate_unsharded=true")


def warnings_of(monkeypatch: pytest.MonkeyPatch, gpus: list[str], *overrides: str, num_ranks: int = 8) -> list[str]:
    monkeypatch.setattr("titan_moe.plan.check_report.gpus_here", lambda: gpus)
    lines = describe(load_recipe(QWEN3, [NOTHING, *overrides]), num_ranks).splitlines()
    return [line.strip() for line in lines if "WARNING" in line]


def test_peak_is_compared_with_the_gpus_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warnings_of(monkeypatch, ["NVIDIA H200"]) == []
    assert warnings_of(monkeypatch, ["NVIDIA H200"], "--run.device=cpu", "--parallel.ep=1") == []
    assert warnings_of(monkeypatch, ["Some GPU"]) == [], "its memory is not known"
    gpus = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "Some GPU"]
    (warning,) = warnings_of(monkeypatch, gpus, "--compile.cudagraph=off")
    assert f"GiB exceed {H100.room('NVIDIA H100 80GB HBM3')}; memory.recompute" in warning
    assert '; memory.recompute = ["auto"] fits: 74.7 GiB; or train.micro_batch_sequences = 1 fits: ' in warning
    assert "micro_batch_sequences = 2" not in warning, "half of 4 sequences is still too much"


def test_the_peak_that_exceeds_is_the_one_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_moe.plan.check_report.gpus_here", lambda: ["NVIDIA H200"])
    overrides = ["--parallel.pp=4", "--train.micro_batch_sequences=16", "--train.global_batch_sequences=512"]
    text = describe(load_recipe(QWEN3, [NOTHING, *overrides, "--parallel.pp_schedule=1f1b"]), 32)
    (exceeds,) = re.findall(r"WARNING: (\S+) GiB exceed", text)
    of_ranks = re.findall(r"about (\S+) GiB at the peak\n", text)
    assert re.findall(r"about (\S+) GiB at the peak of a step", text) == [exceeds] and exceeds in of_ranks


def test_peak_is_compared_with_measured_gpus_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = warnings_of(monkeypatch, [], "--parallel.ep=4", "--compile.cudagraph=off", num_ranks=4)
    assert f"exceed {H200.room('NVIDIA H200')}" in warning and "train.micro_batch_sequences = 1 fits: 119 " in warning
    assert "precision.moments" not in warning, "moments in fp8 alone do not fit"


def test_a_launched_step_may_fit_where_a_graph_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = warnings_of(monkeypatch, [], "--parallel.ep=4", "--model.num_layers=36", num_ranks=4)
    assert 'compile.cudagraph = "off" fits: 13' in warning
    report = describe(load_recipe(QWEN3), 8)
    assert re.search(r"at the peak of a step, [2-4]\.\d+ GiB more than without a CUDA graph", report)
    launched = describe(load_recipe(QWEN3, ["--compile.cudagraph=off"]), 8)
    assert "at the peak of a step;" in launched and "without a CUDA graph" not in launched


def test_an_arena_of_one_layer_has_room_for_all_factors() -> None:
    one, two = (describe(load_recipe(QWEN3, [f"--model.num_layers={number}"]), 8) for number in (1, 2))
    assert "GiB in the arena of rows\n" in one and "GiB more for each eighth" in two


def test_peak_is_compared_with_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_moe.plan.check_report.gpus_here", lambda: ["NVIDIA H200"])
    recipe = load_recipe(QWEN3, [NOTHING])
    assert f"GiB exceed {H100.room('H100')}; " in describe(recipe, 8, "H100")
    assert f"GiB fit {H200.room('h200')}" in describe(recipe, 8, "h200")
    on_cpus = load_recipe(QWEN3.with_name("quickstart.toml"))
    words = 'not compared with H100: run.device = "cpu"; for GPUs add --run.device=cuda --precision.compute=bf16\n'
    assert words in describe(on_cpus, 1, "H100")


def test_ranks_of_a_gpu_need_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    alltoall = ("--parallel.dispatcher=alltoall", "--parallel.overlap=none", "--compile.cudagraph=off")
    shared = ("--run.ranks_per_gpu=2", *alltoall)
    one = warnings_of(monkeypatch, ["NVIDIA H200"], *alltoall, "--train.micro_batch_sequences=2")
    (two,) = warnings_of(monkeypatch, ["NVIDIA H200"], *shared, "--train.micro_batch_sequences=2")
    assert one == [] and "run.ranks_per_gpu = 1 fits" in two


def by_hand(
    file: Path, num_ranks: int, limit_gib: float, given: tuple[str, ...]
) -> list[tuple[int, int, list[str], float]]:
    """All sets of up to three changes of the table that fit, as overrides, from fresh recipes: how many fields, their
    costs, and the peak that the report of the changed recipe has."""
    recipe, fitting = load_recipe(file, [NOTHING, *given]), []
    options = []
    for key, values in CHANGES.items():
        section, field = key.split(".")
        options.append([(key, *one) for one in values(getattr(getattr(recipe, section), field))])
    for number in (1, 2, 3):
        for keys in itertools.combinations(options, number):
            for chosen in itertools.product(*keys):  # one value of each
                overrides = [f"--{key}={_as_text(value)}" for key, value, _ in chosen]
                changed = load_recipe(file, [NOTHING, *given, *overrides])
                if check_rules(changed, num_ranks) or (gib := peak_of(changed, num_ranks)) > limit_gib:
                    continue
                fitting.append((number, sum(cost for _, _, cost in chosen), overrides, gib))
        if fitting:
            break
    return sorted(fitting)


def _as_text(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value).lower()


def peak_of(recipe: Recipe, num_ranks: int, gpu: str = "H100") -> float:
    hardware = find_hardware(gpu)
    recipe = as_run_on(recipe, num_ranks, hardware)
    if is_auto(recipe) and hardware:
        entries = choose_recompute(recipe, num_ranks, hardware).entries
        recipe = as_run_on(with_entries(recipe, entries), num_ranks, hardware)
    peak = Resolved(recipe, num_ranks).peak_bytes(1.125) + shared_bytes_per_rank(recipe)
    return peak / 2**30


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (16, "parallel.accumulate_unsharded = false fits: 65.2 GiB"),
        (
            8,
            'precision.moments = "fp8", parallel.accumulate_unsharded = false and memory.recompute = ["auto"] '
            "fit: 74.1 GiB",
        ),
    ],
)
def test_nearest_changes_that_fit_are_found(num_ranks: int, expected: str) -> None:
    """Mixtral on H100s, beside a search of all sets of changes."""
    report = describe(load_recipe(MIXTRAL, [NOTHING, *ONCE]), num_ranks, "H100")
    (ways,) = re.findall(r"WARNING: 1\d\d GiB exceed .* of 79 on H100 .*?; (.*)", report)
    least, *others = by_hand(MIXTRAL, num_ranks, H100.free_gib(), ONCE)
    cheapest = {tuple(overrides): gib for *cost, overrides, gib in [least, *others] if cost == [*least[:2]]}
    assert ways.split("; or ")[0] == expected
    assert f": {cheapest[tuple(in_overrides(expected))]:.3g} GiB" in expected
    for way in ways.split("; or "):
        changed = load_recipe(MIXTRAL, [NOTHING, *ONCE, *in_overrides(way)])
        assert check_rules(changed, num_ranks) == []
        assert f"{peak_of(changed, num_ranks):.3g} GiB fit {H100.room('H100')}" in describe(changed, num_ranks, "H100")


def in_overrides(way: str) -> list[str]:
    """What is to be typed for a printed way out."""
    return [f"--{key}={value}" for key, value in re.findall(r'([a-z_.]+) = \[?"?([a-z0-9_]+)', way)]


@pytest.mark.parametrize("text", CHANGES)
def test_changes_are_fields_and_cost_more_the_less_is_needed(text: str) -> None:
    section, field = text.split(".")
    value = getattr(getattr(Recipe(), section), field)
    costs = [cost for _, cost in CHANGES[text](value)]
    assert costs == sorted(costs) and value not in [changed for changed, _ in CHANGES[text](value)]


def test_changes_that_need_each_other_are_found_together() -> None:
    """Moments in 8 bits break a rule without the optimizer that has them."""
    overrides = ["--model.num_layers=28", "--memory.recompute=block", "--parallel.accumulate_unsharded=false"]
    recipe = load_recipe(MIXTRAL, [*FP32, *overrides, "--optim.kind=adamw", "--precision.moments=master"])
    assert check_rules(recipe, 8) == []
    expected = 'optim.kind = "fused_adamw" and precision.moments = "bf16" fit: '
    assert f"{H100.room('H100')}; {expected}" in describe(recipe, 8, "H100")


def test_a_recipe_that_fits_gets_no_advice() -> None:
    report = describe(load_recipe(MIXTRAL, ONCE), 8, "H200")
    assert "WARNING" not in report and " fits: " not in report and f"117 GiB fit {H200.room('H200')}" in report


def test_a_recipe_that_nothing_fits_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = warnings_of(monkeypatch, [gpu := "NVIDIA A100-SXM4-40GB"])
    nearest, gib = re.search(r"; no changes fit; the nearest, (.*), need (\S+) GiB; ", warning).groups()
    assert 'precision.moments = "fp8"' in nearest and 'memory.recompute = ["auto"]' in nearest
    changed = load_recipe(QWEN3, [NOTHING, *in_overrides(nearest)])
    assert check_rules(changed, 8) == [] and gib == f"{peak_of(changed, 8, gpu):.3g}" and float(gib) > 39
    number, fitting = re.findall(r"; (\d+) ranks with them fit: (\S+) GiB$", warning)[0]
    assert fitting == f"{peak_of(changed, int(number), gpu):.3g}" and check_rules(changed, int(number)) == []
    assert peak_of(changed, int(number) // 2, gpu) > 39


def test_a_recipe_of_any_size_is_told_what_to_do() -> None:
    report = describe(load_recipe(MIXTRAL, ["--model.num_layers=100", "--model.hidden_size=32768"]), 8, "H100")
    assert "GiB; take fewer layers, or another layout on more ranks" in report


def test_gpus_here_are_those_of_the_driver(tmp_path: Path) -> None:
    assert gpus_here(tmp_path / "absent") == []
    for number, name in enumerate(["NVIDIA H200", "NVIDIA H200", "NVIDIA A100-SXM4-80GB"]):
        folder = tmp_path / f"0000:{number}b:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 18\nVideo BIOS: \t 96.00\n")
    assert gpus_here(tmp_path) == ["NVIDIA A100-SXM4-80GB", "NVIDIA H200"]
