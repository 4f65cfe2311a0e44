"""The shapes under which a run looks its kernels up."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from titan_moe.config import load_recipe
from titan_moe.config.kernels import KernelOverrides
from titan_moe.plan.kernel_shapes import OPERATIONS, shapes_of

QWEN3 = Path(__file__).parents[2] / "recipes" / "qwen3_30b_a3b.toml"


def shapes(*overrides: str):
    return shapes_of(load_recipe(QWEN3, ["--train.micro_batch_sequences=4", *overrides]))


def test_every_choice_has_a_shape() -> None:
    assert list(OPERATIONS) == [field.name for field in fields(KernelOverrides)]
    for name, shape in shapes().items():
        rule = OPERATIONS[name]
        assert set(rule.same) < set(shape) and rule.load(shape) > 0


def test_a_rank_of_eight_serves_as_many_slots_as_it_fills() -> None:
    experts = shapes()["experts"]
    rows = experts.pop("rows")
    assert experts == {"choices": 8, "slots": 131_072, "experts": 16, "width": 2048, "hidden": 768}
    assert rows == pytest.approx(16_384 * 5.34, rel=1e-3), "a row travels once a rank that wants it"


@pytest.mark.parametrize(("dispatcher", "ep", "rows"), [("allgather", 8, 131_072), ("local", 1, 16_384)])
def test_rows_are_what_a_dispatcher_brings(dispatcher: str, ep: int, rows: int) -> None:
    found = shapes(f"--parallel.dispatcher={dispatcher}", f"--parallel.ep={ep}")
    assert found["experts"]["rows"] == found["slots"]["rows"] == rows
    assert found["experts"]["experts"] == 128 // ep and found["experts"]["slots"] == 131_072


def test_the_other_operations() -> None:
    found = shapes("--perf.loss_chunk_tokens=0")
    assert found["router"]["tokens"] == found["norm"]["tokens"] == found["head"]["tokens"] == 16_384
    assert found["head"]["chunk"] == 16_384
    assert shapes()["head"] == {"tokens": 16_384, "chunk": 4096, "width": 2048, "vocabulary": 151_936}
    assert found["rotary"] == {"tokens": 16_384, "query_heads": 32, "key_heads": 4, "head_width": 128, "norm": "qk"}
    assert "rotary" not in shapes("--model.attention.kind=mla", "--model.attention.qk_norm=false")


def test_a_dense_model_has_no_router() -> None:
    recipe = load_recipe(QWEN3)
    dense = replace(recipe, model=replace(recipe.model, moe=replace(recipe.model.moe, num_experts=0)))
    assert set(shapes_of(dense)) == {"norm", "rotary", "head"}
