"""The shapes by which a run looks up kernels."""

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from titan_moe.config import load_recipe
from titan_moe.config.kernels import KernelOverrides
from titan_moe.plan.kernel_shapes import OPERATIONS, OTHER_WORD, shapes_of

QWEN3 = Path(__file__).parents[2] / "recipes" / "qwen3_30b_a3b.toml"


def shapes(*overrides: str, world_size: int = 8):
    return shapes_of(load_recipe(QWEN3, ["--train.micro_batch_sequences=4", *overrides]), world_size)


def test_kernel_shapes_of_every_operation() -> None:
    assert list(OPERATIONS) == [field.name for field in fields(KernelOverrides)]
    for name, shape in shapes().items():
        assert OPERATIONS[name].ratio(shape, shape) == 1 and set(OPERATIONS[name].same) <= set(shape)


@pytest.mark.parametrize(
    ("operation", "overrides", "ratio"),
    [
        ("head", "--model.vocab_size=303_872", 2),
        ("head", "--model.vocab_size=75_968", 2),
        ("head", "--model.vocab_size=303_872 --perf.loss_chunk_tokens=1024", 8),
        ("head", "--perf.loss_chunk_tokens=0", math.inf),  # all logits at once is another way to run
        ("rotary", "--model.attention.qk_norm=false", OTHER_WORD),
        ("rotary", "--model.attention.qk_norm=false --model.attention.num_kv_heads=8", 2 * OTHER_WORD),
        ("router", "--model.moe.score_fn=sigmoid --model.moe.normalize_topk=false", OTHER_WORD**2),
        ("router", "--model.moe.num_groups=8 --model.moe.top_k_groups=4", 8 * 4 * OTHER_WORD**2),
        ("permute", "--compile.extent=block", OTHER_WORD),
        ("experts", "--compile.extent=block", 1),
        ("gradients", "--model.moe.ffn_hidden_size=384", 2),
        ("gradients", "--precision.master=fp64", math.inf),
    ],
)
def test_kernel_shape_ratio(operation: str, overrides: str, ratio: float) -> None:
    rule, here, there = OPERATIONS[operation], shapes(), shapes(*overrides.split())
    for a, b in ((here, there), (there, here)):
        assert rule.ratio(a[operation], b[operation]) == pytest.approx(ratio)


def test_kernel_shape_slots_do_not_depend_on_ep() -> None:
    experts = shapes()["experts"]
    rows = experts.pop("rows")
    assert experts == {"choices": 8, "slots": 131_072, "experts": 16, "width": 2048, "hidden": 768}
    assert rows == pytest.approx(16_384 * 5.34, rel=1e-3), "a row is sent once to each rank with one of its experts"


def test_kernel_shapes_of_ranks_that_split_sequences_and_heads() -> None:
    whole = shapes()
    split = shapes("--parallel.cp=4", "--parallel.tp=2")
    gathered = shapes("--parallel.cp=4", "--parallel.cp_kind=allgather")
    assert split["router"]["tokens"] == whole["router"]["tokens"] // 8
    assert split["head"]["tokens"] == whole["head"]["tokens"] // 4
    assert split["head"]["vocabulary"] == whole["head"]["vocabulary"] // 2
    heads = ("tokens", "query_heads", "key_heads")
    assert [whole["rotary"][name] for name in heads] == [16_384, 32, 4]
    assert [split["rotary"][name] for name in heads] == [16_384, 4, 1], "shared key heads"
    assert [gathered["rotary"][name] for name in heads] == [4_096, 32, 4]


@pytest.mark.parametrize(("dispatcher", "ep", "rows"), [("allgather", 8, 131_072), ("local", 1, 16_384)])
def test_kernel_shape_rows_by_dispatcher(dispatcher: str, ep: int, rows: int) -> None:
    found = shapes(f"--parallel.dispatcher={dispatcher}", f"--parallel.ep={ep}")
    assert found["experts"]["rows"] == found["permute"]["rows"] == rows
    assert found["experts"]["experts"] == 128 // ep and found["experts"]["slots"] == 131_072


def test_kernel_shapes_of_the_other_operations() -> None:
    found = shapes("--perf.loss_chunk_tokens=100_000")
    assert found["router"]["tokens"] == found["head"]["tokens"] == 16_384
    assert found["head"]["chunk"] == 16_384
    assert shapes()["head"] == {"tokens": 16_384, "chunk": 4096, "width": 2048, "vocabulary": 151_936}
    assert shapes("--perf.loss_chunk_tokens=0")["head"]["chunk"] == 0, "all logits at once is another way to run"
    assert found["rotary"] == {
        "tokens": 16_384,
        "sequences": 4,
        "query_heads": 32,
        "key_heads": 4,
        "head_width": 128,
        "norm": "qk norm",
        "pairs": "halves",
    }
    assert "rotary" not in shapes("--model.attention.kind=mla", "--model.attention.qk_norm=false")


def test_kernel_shape_of_the_router() -> None:
    sizes = {"tokens": 16_384, "sequences": 4, "width": 2048, "experts": 128, "choices": 8}
    groups = {"groups": 1, "chosen_groups": 1, "group_score": "ungrouped"}
    assert shapes()["router"] == sizes | groups | {"score": "softmax", "weights": "normalised", "losses": "aux loss"}
    changed = ("--model.moe.num_groups=8", "--model.moe.top_k_groups=4", "--model.moe.z_loss_coef=1e-3")
    router = shapes(*changed, "--model.moe.normalize_topk=false")["router"]
    assert (router["groups"], router["chosen_groups"], router["group_score"]) == (8, 4, "top2_sum")
    assert (router["weights"], router["losses"]) == ("as scored", "aux loss by score and z loss")


@pytest.mark.parametrize(
    ("overrides", "graph"),
    [
        ("", "eager"),
        ("--compile.extent=block --parallel.dispatcher=allgather", "in a block's graph"),
        ("--compile.extent=block --parallel.dispatcher=allgather --compile.regional=off", "eager"),
    ],
)
def test_kernel_shape_of_permute_says_graph_or_eager(overrides: str, graph: str) -> None:
    assert shapes(*overrides.split())["permute"]["graph"] == graph


def test_kernel_shape_of_gradients_is_the_larger_weight() -> None:
    assert shapes()["gradients"] == {"elements": 16 * 2 * 768 * 2048, "dtypes": "bf16 to fp32"}
    alone = shapes("--parallel.ep=1", "--parallel.dispatcher=local", world_size=1)
    assert alone["gradients"]["elements"] == 8 * shapes()["gradients"]["elements"]


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ("", 16),  # edp = 2
        ("--parallel.dp_replicate=2", 16),
        ("--precision.master=bf16", 8),  # coarser than the sum should be
        ("--precision.master=bf16 --precision.reduce=bf16", 8),  # nothing is cast
        ("--compile.extent=block", 8),  # symm_mem: the graph has the cast
        ("--model.num_dense_layers=48", 8),
    ],
)
def test_kernel_shape_of_gradients_needs_cast_unsharded_experts(overrides: str, world_size: int) -> None:
    others = shapes(*overrides.split(), world_size=world_size)
    assert "gradients" not in others and "rotary" in others


def test_kernel_shapes_of_a_dense_model_have_no_router() -> None:
    recipe = load_recipe(QWEN3)
    dense = replace(recipe, model=replace(recipe.model, moe=replace(recipe.model.moe, num_experts=0)))
    assert set(shapes_of(dense, 8)) == {"rotary", "head"}
