"""Conversations as prompts: as transformers renders them, and from the command line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.chat_templates import ENDS, TEMPLATES, make_tokenizer
from support.runs import one_process, tiny
from transformers import AutoTokenizer

from titan_moe import cli
from titan_moe.config import Recipe, RecipeError
from titan_moe.data.chat.prompts import read_prompts
from titan_moe.data.chat.records import Conversation
from titan_moe.data.tokenizer import build_tokenizer
from titan_moe.training.chat_prompts import render

__all__ = ["one_process", "tiny"]
MESSAGES = [
    {"role": "user", "content": "what is it?"},
    {"role": "assistant", "content": "the answer"},
    {"role": "user", "content": "and that?"},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_rendered_as_by_transformers(name: str, tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, TEMPLATES[name])
    recipe = Recipe(data=replace(Recipe().data, source="text", tokenizer=folder))
    chats = render(recipe, build_tokenizer(folder, "text", 400), [Conversation(MESSAGES), Conversation(MESSAGES[:1])])
    reference = AutoTokenizer.from_pretrained(folder)
    options = {"add_generation_prompt": True, "tokenize": False}
    assert chats.texts == [reference.apply_chat_template(each, **options) for each in (MESSAGES, MESSAGES[:1])]
    assert [reference.decode(ids) for ids in chats.ids] == chats.texts
    assert chats.end_tokens == {reference.convert_tokens_to_ids(ENDS[name])}
    with pytest.raises(RecipeError, match="--chat needs the chat template of a tokenizer's folder, and .*= 'bytes'"):
        render(replace(recipe, data=Recipe().data), build_tokenizer("bytes", "text", 256), [Conversation(MESSAGES)])


def test_conversations_are_read_from_files(tmp_path: Path) -> None:
    rows = [
        {"messages": MESSAGES},
        {"prompt": "what is it?", "completion": "the answer"},
        {"prompt": "what?"},
        {"conversations": [{"from": "human", "value": "what?"}], "system": "be brief"},
    ]
    lines = tmp_path / "chats.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    found = [chat.messages for chat in read_prompts(None, str(lines), is_chat=True)]  # type: ignore[union-attr]
    what = [{"role": "user", "content": "what?"}]
    assert found == [MESSAGES, MESSAGES[:1], what, [{"role": "system", "content": "be brief"}, *what]]
    (tmp_path / "one.json").write_text(json.dumps(MESSAGES[:2], indent=1))
    assert read_prompts(None, f"{tmp_path}/one.json", is_chat=True) == [Conversation(MESSAGES[:1])]
    lines.write_text('{"text": "a"}')
    with pytest.raises(RecipeError, match=r"line 1 of .*chats.jsonl has the keys 'text', but not messages"):
        read_prompts(None, str(lines), is_chat=True)


@pytest.mark.slow
def test_a_model_answers(tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tokenizer(tmp_path, TEMPLATES["chatml"])
    run = tiny("--train.steps=1", "--model.vocab_size=400")
    assert run.train() == 0
    (tmp_path / "one.json").write_text(json.dumps(MESSAGES))
    words = [
        f"--data.tokenizer={folder}",
        "--data.source=text",
        "--data.path=none",
        "--run.device=cpu",
        "--max-tokens=4",
    ]
    capsys.readouterr()
    assert cli.main(["generate", str(run.folder), "--chat", f"--prompts={tmp_path}/one.json", *words]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["prompt"].endswith("<|im_start|>user\nand that?<|im_end|>\n<|im_start|>assistant\n")
    assert cli.main(["generate", str(run.folder), "what is it?", "--chat", *words]) == 0
    assert "what is it?" not in capsys.readouterr().out
    assert cli.main(["generate", str(run.folder), "what is it?", "--chat", "--run.device=cpu"]) == 2
