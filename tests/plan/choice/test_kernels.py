"""The kernels that `perf.kernels = "auto"` means."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe.config import Recipe, check_rules, load_recipe
from titan_moe.config.kernels import DEFAULT_KERNELS, PRESETS, Kernels
from titan_moe.config.parallel import planning, smallest_world
from titan_moe.plan import check_report
from titan_moe.plan.check_data import check_data
from titan_moe.plan.check_report import describe
from titan_moe.plan.choice.hardware import Capability, find_hardware
from titan_moe.plan.choice.kernels import as_run_on, describe_kernels, resolve_kernels

RECIPES = Path(__file__).parents[3] / "recipes"
HOPPER = (9, 0)
FUSED = PRESETS["fused"]
LAUNCHED = "--parallel.dispatcher=alltoall --compile.cudagraph=off"
VARIANTS = (
    "",
    "--precision.format=fp8_rowwise",
    "--precision.format=fp8_blockwise",
    "--parallel.tp=2",
    "--parallel.cp=2",
    "--parallel.ep=4 --parallel.etp=2",
    "--parallel.ep=2",
    f"{LAUNCHED} --parallel.overlap=none",
    "--train.micro_batch_sequences=1",
)


def recipe(*overrides: str, name: str = "qwen3_30b_a3b") -> Recipe:
    return load_recipe(RECIPES / f"{name}.toml", list(overrides))


def kernels(*overrides: str, capability: Capability | None = HOPPER) -> Kernels:
    """Kernels that run on any machine, without the overlap that needs fused experts."""
    allowed = recipe("--parallel.overlap=none", *overrides)
    assert check_rules(allowed, 8) == []
    return resolve_kernels(allowed, 8, capability).chosen_kernels


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "deepseek_v2_lite", "mixtral_8x7b", "deepseek_v3"])
def test_auto_is_fused_for_the_recipes_on_hopper(name: str, variant: str) -> None:
    """On H100 and H200, whose compute capability is 9.0."""
    shipped = recipe(*variant.split(), name=name)
    num_ranks = smallest_world(shipped.parallel)
    with planning():
        assert shipped.perf.kernels == "auto" and check_rules(shipped, num_ranks) == []
        assert resolve_kernels(shipped, num_ranks, HOPPER) == replace(shipped.perf, kernels="fused")


def test_memory_is_that_of_the_kernels_of_the_card() -> None:
    """PyTorch's loss and other composed kernels of an A100 or a B200 keep more."""
    left = recipe("--parallel.overlap=none", "--memory.recompute=none")
    assert as_run_on(left, 8, find_hardware("H100")).perf.kernels == "auto"
    composed = as_run_on(left, 8, find_hardware("B200"))
    assert composed.perf == resolve_kernels(left, 8, (10, 0)) and composed.perf.kernels == "grouped_mm"
    more = [check_data(it, 8, gpu)["memory_gib"]["peak"] for it in (left, composed) for gpu in ("H100", "B200")]
    assert more[0] < more[1] == more[2] == more[3]


def test_adapters_of_experts_have_the_kernels_that_rules_leave() -> None:
    """Over symmetric memory fused experts have no adapters, which "auto" alone does not tell."""
    adapter = "--model.adapter.rank=8", '--model.adapter.targets=["experts"]'
    adapted, local = recipe(*adapter, name="mixtral_8x7b"), recipe(name="qwen3_30b_a3b_lora")
    for hardware in (None, find_hardware("H100")):
        assert adapted.perf.fuses_experts and not as_run_on(adapted, 8, hardware).perf.fuses_experts
        assert as_run_on(adapted, 8, hardware).perf.chosen_kernels.experts == "grouped_mm"
        assert as_run_on(local, 1, hardware).perf.fuses_experts


def test_the_first_known_card_of_a_host_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = recipe("--memory.recompute=none", "--parallel.overlap=none")
    monkeypatch.setattr(check_report, "gpus_here", lambda: ["NVIDIA B200", "NVIDIA H100"])
    both, first, second = (
        next(line for line in describe(shipped, 8, gpu).splitlines() if "at the peak of a step" in line)
        for gpu in (None, "B200", "H100")
    )
    assert both == first != second


@pytest.mark.parametrize("capability", [None, (8, 0), (10, 0)])
def test_auto_is_grouped_mm_elsewhere(capability: Capability | None) -> None:
    assert Recipe().perf.kernels == "auto" and Recipe().perf.chosen_kernels == DEFAULT_KERNELS
    assert kernels(capability=capability) == DEFAULT_KERNELS


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("--precision.compute=fp32 --run.device=auto", DEFAULT_KERNELS),
        (f"--run.device=cpu --perf.attention=auto {LAUNCHED}", DEFAULT_KERNELS),
        ("--model.moe.score_on=input", replace(FUSED, experts="grouped_mm")),
        ("--model.moe.expert_mlp_bias=true", FUSED),
        ("--model.moe.expert_mlp_bias=true --precision.experts=fp8_rowwise", replace(FUSED, experts="grouped_mm")),
        ("--precision.experts=nvfp4 --precision.backend=emulated", replace(FUSED, experts="grouped_mm")),
        ("--model.head_bias=true", replace(FUSED, head="torch")),
        (
            "--model.moe.score_fn=sparsemixer --model.moe.top_k=2 --model.moe.normalize_topk=false",
            replace(FUSED, router="torch"),
        ),
        ("--model.moe.router_dtype=fp64", replace(FUSED, router="torch")),
        ("--precision.master=fp64", replace(FUSED, gradients="torch")),
        (
            "--precision.master=fp64 --model.moe.score_on=input",
            replace(FUSED, experts="grouped_mm", gradients="torch"),
        ),
        (
            "--perf.override.experts=grouped_mm --perf.override.head=torch",
            replace(FUSED, experts="grouped_mm", head="torch"),
        ),
        ("--perf.override.gradients=torch", replace(FUSED, gradients="torch")),
    ],
)
def test_auto_keeps_pytorch_where_the_recipe_excludes_triton(overrides: str, expected: Kernels) -> None:
    assert kernels("--optim.kind=adamw", "--precision.moments=master", *overrides.split()) == expected


@pytest.mark.parametrize("overrides", ["--parallel.overlap=tile", "--precision.experts=fp8_rowwise"])
def test_auto_takes_fused_experts_where_nothing_else_can_run(overrides: str) -> None:
    assert kernels(overrides, capability=(10, 0)) == replace(DEFAULT_KERNELS, experts="fused")


@pytest.mark.parametrize("preset", ["grouped_mm", "fused", "reference"])
def test_named_kernels_are_kept(preset: str) -> None:
    named = recipe(f"--perf.kernels={preset}", "--perf.override.head=torch")
    assert resolve_kernels(named, 8, HOPPER) is named.perf
    assert describe_kernels(named.perf) == f'"{preset}" with head "torch"'


def test_resolved_kernels_repeat_the_run() -> None:
    before = recipe("--perf.override.head=torch", "--model.moe.score_on=input", "--parallel.overlap=none")
    after = replace(before, perf=resolve_kernels(before, 8, HOPPER))
    assert check_rules(after, 8) == [] and after.perf.override.head == "torch"
    assert resolve_kernels(after, 8, None) is after.perf


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("", '"auto" means "fused" on GPUs of compute capability 9.0 (H100, H200), else "grouped_mm"'),
        ("--run.device=cpu", '"auto" means "grouped_mm"'),
        ("--perf.kernels=fused", '"fused"'),
    ],
)
def test_check_shows_the_kernels_in_a_short_line(overrides: str, line: str) -> None:
    page = describe(recipe("--parallel.overlap=none", *overrides.split()), 8)
    assert page.splitlines()[-1] == f"kernels     {line}" and len(line) < 120
