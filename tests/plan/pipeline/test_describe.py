"""The rows of `titan-moe check` about a pipeline."""

import math
import re
from pathlib import Path

import pytest

from titan_moe.config import check_rules, load_recipe, pipeline_schedules
from titan_moe.config.arena import has_arena
from titan_moe.config.gemms import gemm_modules
from titan_moe.plan.check_report import describe
from titan_moe.plan.cost.memory import arena_bytes_per_rank
from titan_moe.plan.pipeline.describe import name_modules
from titan_moe.plan.pipeline.flops import flops_of_module
from titan_moe.plan.pipeline.parts import parts_of

QWEN3 = Path(__file__).parents[3] / "recipes" / "qwen3_30b_a3b.toml"
SCHEDULES = {
    "1f1b": 1,
    "interleaved_1f1b": 3,
    "zbv": 2,
    "dualpipev": 2,
}
SPLITS = {name: facts.splits_backward for name, facts in pipeline_schedules.SCHEDULES.items()}


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
    assert lines[start + 1].strip().startswith("weight gradients: 59.8 % delayed") == SPLITS[schedule]
    hints = [line for line in lines[start + 2 :] if "has whole backwards" in line]
    assert len(hints) == (schedule == "dualpipev"), "interleaved_1f1b has a smaller bubble"
    start += SPLITS[schedule] + len(hints)
    ranks = lines[start + 1 : start + 5]
    assert [line.split(":")[0].strip() for line in ranks] == [f"pp rank {rank}" for rank in range(4)]
    assert "embedding, layers 0 to" in ranks[0] and sum("head" in line for line in ranks) == 1
    assert all("microbatches in flight" in line and "GiB at the peak" in line for line in ranks)
    assert lines[start + 5].startswith("memory") and "GiB on the ranks that have most" in lines[start + 5]


COLLECTIVES = ("--parallel.dispatcher=alltoall", "--parallel.overlap=none")


@pytest.mark.parametrize(
    ("schedule", "vpp", "overrides", "share", "bubbles"),
    [
        pytest.param("1f1b", 1, (), "", ["27.9"], id="1f1b"),
        pytest.param("interleaved_1f1b", 2, (), "", ["15.7"], id="interleaved_1f1b"),
        pytest.param("zbv", 2, (), "59.8", ["12.6", "7.58"], id="zbv"),
        pytest.param("zbv", 2, ("--parallel.overlap=none",), "59.8", ["12.6", "7.58"], id="zbv_arena"),
        pytest.param("dualpipev", 2, (), "59.8", ["17.5", "13.4"], id="dualpipev"),
        pytest.param("zbv", 2, COLLECTIVES, "59.8", ["12.6", "7.58"], id="zbv_alltoall"),
        pytest.param("zbv", 2, (*COLLECTIVES, "--compile.regional=off"), "89.7", ["9.66", "7.58"], id="zbv_eager"),
        pytest.param("zbv", 2, (*COLLECTIVES, "--perf.kernels=grouped_mm"), "0", ["20.4", "7.58"], id="zbv_grouped"),
    ],
)
def test_the_bubble_is_that_of_the_weight_gradients_that_are_delayed(
    schedule: str, vpp: int, overrides: tuple[str, ...], share: str, bubbles: list[str]
) -> None:
    """In percent; the second one if all were delayed. Only experts in Triton are delayed beside compiled pieces."""
    settings = ["--parallel.pp=4", f"--parallel.pp_schedule={schedule}", f"--parallel.vpp={vpp}"]
    settings += ["--parallel.accumulate_unsharded=true", "--train.micro_batch_sequences=1", "--compile.cudagraph=off"]
    recipe = load_recipe(QWEN3, [*settings, "--train.global_batch_sequences=64", *overrides])
    assert check_rules(recipe, 32) == []
    text = describe(recipe, 32)
    first = next(line for line in text.splitlines() if line.startswith("pipeline"))
    assert "8 microbatches a step" in first and re.findall(r"([\d.]+) % (?:of the step|if all)", first) == bubbles
    assert re.findall(r"weight gradients: (\S+) % delayed", text) == [share] * bool(share)


def test_check_says_why_weight_gradients_are_not_delayed() -> None:
    settings = ["--parallel.pp=4", "--parallel.pp_schedule=zbv", "--parallel.vpp=2"]
    settings += ["--parallel.accumulate_unsharded=true", "--train.micro_batch_sequences=1"]
    settings += ["--train.global_batch_sequences=64", "--compile.cudagraph=off", *COLLECTIVES]
    recipe, delayed = (load_recipe(QWEN3, [*settings, f"--perf.kernels={name}"]) for name in ("grouped_mm", "fused"))
    lines = [line.strip() for line in describe(recipe, 32).splitlines()]
    start = lines.index(
        "weight gradients: 0 % delayed, by FLOPs; not those of attention and routed experts (in compiled graphs; "
        'delayed with compile.regional = "off"); head (its loss computes them in forward)'
    )
    hint = 'hint: pp_schedule = "interleaved_1f1b" has whole backwards, and a bubble of 15.7 %'
    assert lines[start + 1] == hint, "1f1b has a larger one than zbv"
    assert "has whole backwards" not in describe(delayed, 32), "12.6 % with zbv"


def test_check_hints_at_gathering_once_a_step() -> None:
    """A rank with 1 / 8 of 311M embeddings or head and of 12 to 13 layers, whose dense parameters are 19M each; experts
    are on one rank."""
    settings = ["--parallel.pp=4", "--train.micro_batch_sequences=1", "--train.global_batch_sequences=64"]
    text = describe(load_recipe(QWEN3, settings), 32)
    saved, added = map(
        float, re.findall(r"hint: .* 8 microbatches; .* up to (\S+) GiB .* up to (\S+) GiB more", text)[0]
    )
    embedding, layers = 151_936 * 2048, 13 * 19.2e6
    assert added * 2**30 == pytest.approx(6 * (embedding + layers), rel=0.03), "bf16, and sums in fp32"
    received = 7 / 8 * (6 * embedding + 8 * layers)  # parameters of layers are gathered twice in a microbatch
    assert saved * 2**30 == pytest.approx(8 * received - 7 / 8 * 6 * (embedding + layers), rel=0.03)
    for others in (["--parallel.accumulate_unsharded=true"], ["--parallel.ep=1", "--parallel.dispatcher=local"]):
        num_ranks = 4 if "--parallel.ep=1" in others else 32
        recipe = load_recipe(QWEN3, [*settings, "--parallel.overlap=none", *others])
        assert check_rules(recipe, num_ranks) == [] and "hint" not in describe(recipe, num_ranks)


SHAPES = sorted((QWEN3.parent / "models").glob("*.toml"))


@pytest.mark.parametrize("file", SHAPES, ids=lambda file: file.stem)
def test_weight_gradients_of_modules_are_those_of_their_layers(file: Path) -> None:
    recipe = load_recipe(file)
    for layer in range(recipe.model.num_layers):
        of_modules = [2 * it.row.multiply_adds for it in gemm_modules(recipe.model) if it.layer == layer]
        assert sum(of_modules) == flops_of_module(recipe, f"layers.{layer}").backward_weight


@pytest.mark.parametrize(
    ("schedule", "vpp", "num_pairs", "in_flight", "bubbles"),
    [
        ("1f1b", 1, (9, 11, 13, 15), [(4, 3, 2, 1), (8, 6, 4, 2)], ["16.7", "17.6"]),
        ("interleaved_1f1b", 2, (21, 23, 25, 27), [(5.38, 4.46, 3.46, 3.89), (5.85, 4.92, 4, 4.67)], ["9.08", "15.3"]),
        ("dualpipev", 2, (21, 22, 23, 23), [(6.44, 4.31, 4.38, 4.46)] * 2, ["10.2", "10.2"]),
    ],
)
def test_check_of_a_pipeline_that_interleaves_microbatches(
    schedule: str, vpp: int, num_pairs: tuple[int, ...], in_flight: list[tuple[float, ...]], bubbles: list[str]
) -> None:
    """A pair waits for the slower of two ranks; all gradients of the head are in a forward."""
    overrides = ["--parallel.pp=4", f"--parallel.pp_schedule={schedule}", f"--parallel.vpp={vpp}"]
    overrides += ["--parallel.accumulate_unsharded=true", "--train.micro_batch_sequences=1", "--compile.cudagraph=off"]
    overrides += ["--train.global_batch_sequences=128", "--parallel.dispatcher=alltoall"]
    pairs, found, waits, memory = [], [], [], []
    for overlap in ("none", "microbatch"):
        recipe = load_recipe(QWEN3, [*overrides, f"--parallel.overlap={overlap}"])
        assert check_rules(recipe, 32) == []
        text = describe(recipe, 32)
        pairs.append(re.findall(r"; (\S+ of \S+) forwards beside a backward; ", text))
        found.append(tuple(map(float, re.findall(r"microbatches in flight ([\d.]+);", text))))
        waits += re.findall(r"bubble (\S+) %", text)
        memory.append([float(gib) for gib in re.findall(r"about (\S+) GiB at the peak", text)])
    assert pairs == [[], [f"{number} of {16 * vpp}" for number in num_pairs]], "forwards of 16 microbatches"
    assert found == in_flight, "stages of a rank have 2 to 7 layers"
    assert waits == bubbles
    assert all((after > before) == (schedule != "dualpipev") for before, after in zip(*memory, strict=True))


def test_check_without_a_pipeline_does_not_name_one() -> None:
    assert "pipeline" not in describe(load_recipe(QWEN3, []), 8)


def test_microbatches_in_flight_have_slabs_in_the_arena() -> None:
    """As large together as one of all layers, where as many are in flight as there are stages."""
    overrides = ["--parallel.dispatcher=symm_mem", "--train.global_batch_sequences=128"]
    without, within = (load_recipe(QWEN3, [*overrides, f"--parallel.pp={pp}"]) for pp in (1, 2))
    assert has_arena(without, "fused") and has_arena(within, "fused")
    whole = arena_bytes_per_rank(without, 1.5)
    arenas = [arena_bytes_per_rank(part.recipe, 1.5, part.slabs) for part in parts_of(within, 16)]
    assert arenas == pytest.approx([2 * 25 / 48 * whole, 23 / 48 * whole], rel=0.1)
    assert f"of it {max(arenas) / 2**30:.3g} GiB in the arena of rows" in describe(
        load_recipe(QWEN3, [*overrides, "--parallel.pp=2", "--parallel.expert_rank_capacity_factor=1.5"]), 16
    )


def test_delayed_weight_gradients_have_slabs_in_the_arena() -> None:
    """Of gradients of rows, as wide as rows, and of activations, half as wide as hidden states."""
    settings = ["--parallel.pp=4", "--parallel.vpp=2", "--parallel.accumulate_unsharded=true"]
    settings += ["--train.micro_batch_sequences=1", "--train.global_batch_sequences=64"]
    recipe = load_recipe(QWEN3, [*settings, "--parallel.pp_schedule=zbv"])
    numbers = [(8, 2), (8, 4), (8, 6), (8, 8)]
    for part, (number, num_delayed) in zip(parts_of(recipe, 32), numbers, strict=True):
        assert part.slabs == (number, 7, num_delayed, 7)
        kept = arena_bytes_per_rank(part.recipe, 1.5, part.slabs._replace(num_delayed=0))
        width, hidden, rows = 2048, 768, 8 * (1 - math.comb(112, 8) / math.comb(128, 8))  # a token; 8 slots
        share = (rows * width + 8 * hidden) / (rows * width + 8 * 2 * hidden) * num_delayed / number
        assert arena_bytes_per_rank(part.recipe, 1.5, part.slabs) == pytest.approx((1 + share) * kept, rel=1e-3)


def test_modules_in_words() -> None:
    assert name_modules(["embed", "layers.0", "layers.1"]) == "embedding, layers 0 to 1"
    assert name_modules(["layers.7", "norm", "head"]) == "layer 7, head"
    assert name_modules(["norm", "head"]) == "head" and name_modules([]) == "nothing"


@pytest.mark.parametrize(
    ("override", "frozen"),
    [
        ('optim.trainable=["layers.1*"]', ["layers 24 to 31, head"]),
        ('optim.trainable=["embed.*", "head.*", "norm.*"]', ["layers 8 to 15", "layers 16 to 23"]),
        ("model.adapter.rank=4", []),
        ("optim.trainable=[]", []),
    ],
)
def test_stages_in_which_all_is_frozen_are_told(override: str, frozen: list[str]) -> None:
    overrides = ["--parallel.pp=4", "--model.num_layers=32", f"--{override}", "--parallel.overlap=none"]
    overrides += ["--compile.cudagraph=off", "--parallel.expert_clones=off", "--parallel.dispatcher=alltoall"]
    recipe = load_recipe(
        QWEN3, [*overrides, "--train.global_batch_sequences=128", "--parallel.pp_layout=Et*8|t*8|t*8|t*8L"]
    )
    told = [line for line in describe(recipe, 32).splitlines() if "all parameters of" in line]
    assert [line.partition("all parameters of ")[2].partition(" are frozen")[0] for line in told] == frozen
