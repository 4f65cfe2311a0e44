"""What a refusal offers has been tried: every way out that it prints passes the rule, and breaks no other."""

from pathlib import Path

import pytest
from support.calls import CALLS_OF_A_SECOND, count_calls
from support.ways_out import ways_in

from titan_moe.config import check_rules, load_recipe, refusals

LAYERS = "--model.num_layers=4 --model.moe.num_experts=16 --model.moe.top_k=4 --model.moe.ffn_hidden_size=64"
GOOD = (
    f"{LAYERS} --parallel.ep=4 --parallel.dispatcher=alltoall --train.global_batch_sequences=96 "
    "--train.micro_batch_sequences=2"
)
"""A recipe for 4, 8 and 12 ranks."""
ONE = "--parallel.ep=1 --parallel.dispatcher=local"
CPU = "--run.device=cpu --precision.compute=fp32"
QWEN3 = Path(__file__).parents[2] / "recipes" / "qwen3_30b_a3b.toml"


@pytest.fixture
def empty_file(tmp_path: Path) -> Path:
    file = tmp_path / "empty.toml"
    file.write_text("")
    return file


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        # the nearest first; of those that mend it, those that mend the others too
        ("--parallel.ep=6", 12, "take model.moe.num_experts = 18, 12, 24 or 30"),
        ("--parallel.ep=3", 8, "take parallel.ep = 4, 2, 8 or 1, or model.moe.num_experts = 15"),
        ("--parallel.tp=3", 12, "take parallel.tp = 1, or model.vocab_size = 255, 258, 252 or 261"),
        # choices, booleans, words, and what only a change of two fields mends
        ("--parallel.expert_rank_capacity_factor=0.5 --parallel.dispatcher=allgather", 8, 'factor = "auto" or 1.25'),
        ("--parallel.tp=2 --parallel.tp_comm_overlap=true --precision.linears=fp8_rowwise", 8, "overlap = false"),
        ("--parallel.tp=3 --parallel.cp=3", 8, "take parallel.cp = 4 with parallel.tp = 2"),
        # what no search finds
        ("--parallel.ep=8", 4, "or --nproc 8 or a multiple"),
        ("--data.source=text --data.path=", 8, 'or data.path = a glob of files, or "python-stdlib"'),
        # edp, which several fields decide
        (ONE, 12, "take parallel.dp_replicate = 3, 6 or 12, or model.hidden_size = 144"),
        ("--model.moe.num_experts=12", 12, "take parallel.ep = 3, 6 or 12, or parallel.dp_replicate = 3"),
        (
            f"{ONE} --parallel.cp=3 --parallel.cp_kind=allgather --train.seq_len_tokens=252",
            12,
            "model.hidden_size = 144",
        ),
        (
            f"{ONE} --parallel.etp=2 --model.hidden_size=192 --model.moe.expert_mlp_bias=true",
            12,
            "ffn_hidden_size = 48, 96",
        ),
    ],
)
def test_ways_out_are_found(empty_file: Path, overrides: str, world_size: int, expected: str) -> None:
    told = told_and_tried(empty_file, overrides, world_size)
    assert expected in "\n".join(told), told


def test_nothing_is_offered_where_nothing_helps(empty_file: Path) -> None:
    overrides = f"{ONE} --parallel.dp_replicate=3 --parallel.cp=3 --parallel.tp=3"
    told = told_and_tried(empty_file, overrides, 28)
    (problem,) = [problem for problem in told if "= 27 does not divide the 28 ranks" in problem]
    assert problem.endswith("(every rank has one place in the dense mesh)")


@pytest.mark.parametrize("ranks_of_a_node", [8, 4, 2])
@pytest.mark.parametrize(
    "overrides",
    [
        "--parallel.dispatcher=local",
        f"--parallel.dispatcher=local {CPU}",
        f"--parallel.dispatcher=symm_mem {CPU}",
        "--parallel.dispatcher=symm_mem --parallel.ep=1",
        "--parallel.dispatcher=symm_mem --parallel.ep=8",
        "--parallel.dispatcher=hierarchical --parallel.ep=1",
        "--parallel.dispatcher=hierarchical --parallel.ep=2",
        "--parallel.expert_rank_capacity_factor=1.5 --parallel.ep=1",
        "--parallel.ep_ranks_per_node=2",
        "--parallel.dispatcher=alltoall --parallel.overlap=tile --perf.kernels=fused",
        "--compile.cudagraph=step",
    ],
)
def test_dispatchers_of_a_way_out_fit_the_nodes(
    empty_file: Path, monkeypatch: pytest.MonkeyPatch, overrides: str, ranks_of_a_node: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_of_a_node))
    for problem in told_and_tried(empty_file, overrides, 8):
        assert ways_in(problem), problem


def told_and_tried(file: Path, overrides: str, world_size: int) -> list[str]:
    """The refusals of a recipe, after each way out was tried."""
    words = [*GOOD.split(), *overrides.split()]
    before = check_rules(load_recipe(file, words), world_size)
    told = refusals(load_recipe(file, words), world_size)
    assert all(problem.startswith(plain) for plain, problem in zip(before, told, strict=True))
    for problem in told:
        for way in ways_in(problem):
            after = check_rules(load_recipe(file, [*words, *way]), world_size)
            assert len(after) < len(before), (problem, way, after)
    return told


@pytest.mark.parametrize(
    "overrides",
    [
        "--precision.format=fp8_rowwise --parallel.tp=3 --parallel.cp=5",
        "--parallel.ep=7",
        "--precision.format=fp8_rowwise --parallel.tp=3 --parallel.cp=5 --parallel.ep=7 --model.num_layers=1000",
    ],
)
def test_a_search_takes_less_than_a_second(overrides: str) -> None:
    recipe = load_recipe(QWEN3, overrides.split())
    assert refusals(recipe, 8)
    assert count_calls(lambda: refusals(recipe, 8)) < CALLS_OF_A_SECOND
