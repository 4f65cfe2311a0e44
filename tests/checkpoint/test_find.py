"""What an evaluation takes from the recipe of a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import make_tokenizer

from titan_moe.checkpoint import find
from titan_moe.checkpoint.folders import METADATA_FILE
from titan_moe.config import Recipe, RecipeError
from titan_moe.config.chat import ChatConfig
from titan_moe.config.resume import flatten
from titan_moe.config.schema import Table
from titan_moe.entry import recipes_of_evaluation


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipes with which a run on conversations is evaluated, with some overrides, and whether held out."""
    (tmp_path / METADATA_FILE).touch()
    recipe, chat = Recipe(), ChatConfig(answers="prefixes", train_on="last_answer")
    data = {"source": "auto", "path": "chats.jsonl", "tokenizer": make_tokenizer(tmp_path), "document_attention": True}
    own = replace(recipe.validation, path="own.jsonl", sets=Table(code="code.jsonl"), every_steps=5)
    run = replace(
        recipe,
        model=replace(recipe.model, vocab_size=400, ffn_hidden_size=128),
        data=replace(recipe.data, **data, format="chat", chat=chat),
        validation=own,
    )
    monkeypatch.setattr(find, "saved_fields", lambda folder: flatten(run))
    return lambda *overrides: recipes_of_evaluation(tmp_path, overrides, 1)


def test_other_rows_of_a_run_on_conversations_are_conversations(evaluated: Any) -> None:
    (name, recipe), (other, _) = evaluated("--data.path=a.jsonl", "--data.path=b.jsonl")[0]
    assert (name, other, recipe.data.format, recipe.data.document_attention) == ("a.jsonl", "b.jsonl", "chat", True)
    assert (recipe.data.chat.answers, recipe.data.chat.train_on) == ("prefixes", "last_answer")
    assert not recipe.validation.has_own_data, "it is of the run's own data"


@pytest.mark.parametrize(
    "overrides",
    [
        ["--data.path=a/*.txt"],
        ["--data.path=a.jsonl", "--data.format=text"],
        ["--data.path=a/*.py", "--data.source", "text"],
        ["--data.path=ids/*", "--data.source=tokens"],
    ],
)
def test_other_texts_are_no_conversations(evaluated: Any, overrides: list[str]) -> None:
    ((_, recipe),), _ = evaluated(*overrides)
    assert (recipe.data.format, recipe.data.chat) == ("text", ChatConfig())


def test_own_data_of_validation_is_named(evaluated: Any) -> None:
    ((name, recipe),), is_held_out = evaluated()
    assert (name, is_held_out, dict(recipe.validation.sets)) == ("own.jsonl", True, {"code": "code.jsonl"})


def test_for_a_checkpoint_that_is_gone_those_beside_it_are_named(tmp_path: Path) -> None:
    for step in (14, 18):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / METADATA_FILE).touch()
    with pytest.raises(RecipeError, match=r"step-10 is no folder \(beside it: step-14, step-18\); name"):
        find.find_checkpoint(tmp_path / "step-10")
    with pytest.raises(RecipeError, match="other is no folder; name"):
        find.find_checkpoint(tmp_path / "runs" / "other")
