"""Every key of a recipe can explain itself."""

import pytest

from titan_moe.config import Recipe, RecipeError
from titan_moe.config.explain import explain
from titan_moe.config.schema import all_keys, docstring_of


def test_explain_field_shows_type_default_and_purpose() -> None:
    page = explain("model.moe.score_fn")
    assert 'one of "softmax", "sigmoid", "softmax" by default' in page
    assert "How router logits become scores" in page


def test_explain_field_with_an_underscore_by_its_key() -> None:
    assert explain("model.class").startswith("model.class: a string")


def test_explain_section_lists_fields_and_inner_sections() -> None:
    page = explain("model")
    assert "hidden_size = 128" in page and "[model.moe]" in page and "decoder-only" in page


def test_explain_unknown_key_error_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="did you mean model.moe.top_k?"):
        explain("moe.top_k")


def test_explain_has_a_docstring_for_every_field() -> None:
    silent = [key.dotted for key in all_keys(Recipe).values() if "." in key.dotted and not docstring_of(key)]
    assert silent == []
