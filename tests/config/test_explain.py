"""`check --explain`: every key of a recipe has an explanation."""

from pathlib import Path

import pytest

from titan_moe.config import Recipe, RecipeError, load_recipe
from titan_moe.config.adapter import KINDS
from titan_moe.config.explain import explain, list_fields, recipe_with_explanations, split_values
from titan_moe.config.offload import OFFLOADABLE
from titan_moe.config.recompute import AUTO, NONE, RECOMPUTABLE
from titan_moe.config.schema import all_keys, docstring_of


def test_explain_field_shows_type_default_purpose_and_values() -> None:
    lines = explain("model.moe.score_fn").splitlines()
    assert lines[:4] == [
        'model.moe.score_fn: one of "softmax", "sigmoid", "sqrtsoftplus", "sparsemixer", "softmax" by default',
        "    The function of router logits that gives scores.",
        '    "softmax"      Softmax over all experts.',
        '    "sigmoid"      Sigmoid of each logit (arXiv:2408.15664).',
    ]
    assert lines[-1] == "    A resume may not change it."


def test_explain_values_of_a_docstring() -> None:
    docstring = """The purpose,
    in two lines with `code`: here.

    `a`: One.
    `b`: Two,
    continued.
    """
    assert split_values(docstring) == (
        "The purpose, in two lines with `code`: here.",
        {"a": "One.", "b": "Two, continued."},
    )


def test_explain_covers_all_values_of_a_field_or_none() -> None:
    of_lists = {"memory.recompute": {AUTO, NONE, *RECOMPUTABLE}, "memory.offload": {*OFFLOADABLE}}
    of_lists["model.adapter.targets"] = {*KINDS}
    for key in all_keys(Recipe).values():
        values = split_values(docstring_of(key))[1]
        assert not values or values.keys() == of_lists.get(key.dotted, key.choices.keys()), key.dotted


def test_explain_field_with_an_underscore_has_its_name_in_recipes() -> None:
    assert explain("model.class").startswith("model.class: a string")


def test_explain_says_that_the_class_of_a_model_is_code() -> None:
    assert "The class is code: a run imports and executes it." in " ".join(explain("model.class").split())


def test_explain_section_lists_fields_and_inner_sections() -> None:
    text = explain("model")
    assert "hidden_size = 128" in text and "[model.moe]" in text and "decoder-only" in text


def test_explain_section_lists_the_values_that_have_no_explanation() -> None:
    lines = explain("perf.override").splitlines()
    assert lines[lines.index('router = "no"') + 2] == '    Values: "no", "torch", "triton".'
    assert explain("parallel").count("Values: ") == 0, "every value has an explanation"


def test_explain_base() -> None:
    assert "relative to this file" in explain("base")


def test_explain_unknown_key_suggests_the_nearest() -> None:
    with pytest.raises(RecipeError, match="did you mean model.moe.top_k?"):
        explain("moe.top_k")


def test_explain_every_field_has_a_docstring() -> None:
    missing = [key.dotted for key in all_keys(Recipe).values() if "." in key.dotted and not docstring_of(key)]
    assert missing == []


@pytest.mark.parametrize("field", ["tokenizer", "path", "files", "split", "text_column", "token_dtype"])
def test_explain_says_that_a_resume_needs_the_same_tokens(field: str) -> None:
    assert explain(f"data.{field}").splitlines()[-1].strip() == (
        "A resume may change it if the tokens stay the same: the data's fingerprint is compared."
    )


def test_all_fields_are_listed_by_section() -> None:
    lines = list_fields().splitlines()
    assert len([line for line in lines if line.startswith("  ")]) == sum(
        not key.is_section for key in all_keys(Recipe).values()
    )
    (top_k,) = (line for line in lines if line.startswith("  top_k = 2"))
    assert top_k.endswith("Number of experts per token (K).") and "[model.moe]" in list_fields()


def test_recipe_with_explanations_is_the_default_recipe(tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    file.write_text(recipe_with_explanations())
    assert load_recipe(file) == Recipe()
    assert "# Number of experts per token (K).\ntop_k = 2\n" in file.read_text()
