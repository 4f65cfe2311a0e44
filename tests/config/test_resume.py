"""The table of what a resume does with a changed field."""

import json
from dataclasses import replace

import pytest

from titan_moe.config import Recipe
from titan_moe.config.model import AttentionConfig, ModelConfig
from titan_moe.config.recipe import Recipe as RecipeType
from titan_moe.config.resume import CHANGES, DEFAULT, Change, change_of, compare, flatten
from titan_moe.config.schema import Table, all_keys
from titan_moe.config.train import OptimConfig, ValidationConfig


def test_every_entry_is_a_section_or_a_field() -> None:
    assert sorted(CHANGES.keys() - all_keys(RecipeType).keys()) == []


def test_every_section_has_an_entry() -> None:
    sections = {key.partition(".")[0] for key in all_keys(RecipeType)}
    assert sorted(sections - CHANGES.keys()) == []


@pytest.mark.parametrize(
    ("dotted", "expected"),
    [
        ("model.moe.top_k", Change.REFUSED),  # by its section
        ("model.moe.aux_loss_coef", Change.LOGGED),
        ("model.name", Change.FREE),
        ("run.seed", Change.REFUSED),
        ("parallel.ep", Change.FREE),
        ("data.tokenizer", Change.SAME_CONTENT),
        ("model.moe.a_new_field", Change.REFUSED),
        ("parallel.a_new_field", Change.FREE),
        ("a_new_section.field", DEFAULT),
    ],
)
def test_the_longest_entry_decides(dotted: str, expected: Change) -> None:
    assert change_of(dotted) is expected


def test_no_entry_repeats_that_of_its_section() -> None:
    nested = {key: key.rpartition(".")[0] for key in CHANGES if "." in key}
    assert [key for key, section in nested.items() if CHANGES[key] is change_of(section)] == []


def test_equal_recipes_do_not_differ_after_json() -> None:
    recipe = Recipe(validation=ValidationConfig(sets=Table(code="a.txt")))
    changes = compare(json.loads(json.dumps(flatten(recipe))), recipe)
    assert compare(flatten(Recipe()), recipe).logged == ['validation.sets = { code = "a.txt" } (was {})']
    assert (changes.logged, changes.refused) == ([], [])
    assert flatten(recipe).keys() == {name for name, key in all_keys(RecipeType).items() if not key.is_section}


def test_changes_name_both_values() -> None:
    before = Recipe()
    moe = replace(before.model.moe, top_k=3, aux_loss_coef=0.01)
    after = replace(
        before,
        model=replace(before.model, moe=moe, name="other"),
        run=replace(before.run, folder="elsewhere", device="cpu"),
    )
    changes = compare(flatten(before), after)
    assert changes.refused == ["model.moe.top_k = 3 (was 2)"]
    assert changes.logged == ['run.device = "cpu" (was "auto")', "model.moe.aux_loss_coef = 0.01 (was 0.0)"]


def test_kinds_of_optimizers_change_where_they_have_the_same_states() -> None:
    adamw, ours, muon = (replace(Recipe(), optim=OptimConfig(kind=kind)) for kind in ("adamw", "fused_adamw", "muon"))
    assert compare(flatten(adamw), ours).logged == ['optim.kind = "fused_adamw" (was "adamw")']
    assert compare(flatten(ours), muon).refused == ['optim.kind = "muon" (was "fused_adamw")']


def test_fields_of_other_versions() -> None:
    saved = flatten(Recipe())
    saved["model.gone"] = 1
    del saved["model.moe.top_k"], saved["optim.lr"]
    assert compare(saved, Recipe()).refused == []
    recipe = Recipe()
    other = replace(recipe, model=replace(recipe.model, moe=replace(recipe.model.moe, top_k=4)))
    assert compare(saved, other).refused == ["model.moe.top_k = 4 (was 2)"]


@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_norms_of_latents_had_the_epsilon_of_all_norms(kind: str) -> None:
    model = ModelConfig(norm_eps=1e-5, attention=AttentionConfig(kind=kind))
    saved, key = flatten(Recipe(model=model)), "model.attention.latent_norm_eps"
    del saved[key]
    refused = compare(saved, Recipe(model=model)).refused
    assert refused == ([f"{key} = 1e-06 (was 1e-05)"] if kind == "mla" else [])
    same = replace(model, attention=replace(model.attention, latent_norm_eps=1e-5 if kind == "mla" else 1e-6))
    assert compare(saved, Recipe(model=same)).refused == []


def test_lists_are_compared_past_json() -> None:
    before = Recipe(precision=replace(Recipe().precision, modules_in_compute=("layers.0.*",)))
    assert compare(json.loads(json.dumps(flatten(before))), before).logged == []
    after = replace(before, precision=replace(before.precision, modules_in_compute=("a", "b")))
    assert compare(json.loads(json.dumps(flatten(before))), after).logged == [
        'precision.modules_in_compute = ["a", "b"] (was ["layers.0.*"])'
    ]
    saved = {"data.split_special_tokens": True}
    assert compare(saved, after).logged == ['precision.modules_in_compute = ["a", "b"] (was [])']


def test_a_checkpoint_from_before_a_field_had_what_was_done_then() -> None:
    saved = flatten(Recipe())
    del saved["data.split_special_tokens"]
    after = replace(Recipe(), data=replace(Recipe().data, split_special_tokens=False))
    assert compare(saved, after).logged == []
    del saved["data.stream_lanes"]
    assert compare(saved, after).refused == []
    saved["data.is_streamed"] = True
    streamed = replace(after, data=replace(after.data, is_streamed=True))
    assert compare(saved, streamed).refused == ["data.stream_lanes = 256 (was 0)"]
    assert compare(saved, replace(streamed, data=replace(streamed.data, stream_lanes=0))).refused == []
    assert compare(saved, Recipe()).logged == ["data.split_special_tokens = true (was false)"]
