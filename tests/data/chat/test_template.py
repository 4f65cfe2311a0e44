"""Chat templates by transformers: the tokenizer's own, of a file, and `plain`."""

import json
import sys
from pathlib import Path

import pytest
from support.chat_templates import TEMPLATES, make_tokenizer

from titan_moe.data.chat.records import Conversation, RecordError, read_conversation
from titan_moe.data.chat.template import ChatTemplate, fingerprint


def test_plain_template_has_contents_only(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    chat = read_conversation({"prompt": "what? ", "completion": "that"})
    for begins_with_bos in (False, True):
        template = ChatTemplate(folder, "plain", begins_with_bos=begins_with_bos)
        assert template.text(chat, 2) == "<s>" * begins_with_bos + "what? that</s>"
        ids, _, marks = template.encode_marked(chat)
        answer, _ = template.encode("that</s>")
        assert [id for id, mark in zip(ids, marks, strict=True) if mark] == answer


def test_variables_of_the_template_are_no_arguments(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, "{{ 'deep' if think else 'short' }}" + TEMPLATES["chatml"])
    template, messages = ChatTemplate(folder, "", begins_with_bos=True), [{"role": "user", "content": "what?"}]
    for options, begin in (({"think": True}, "deep<"), ({}, "short<")):
        assert template.text(Conversation(messages, options=options), 1).startswith(begin)
    with pytest.raises(RecordError, match="'chat_template' in `chat_template_kwargs`, which is no variable"):
        template.text(Conversation(messages, options={"chat_template": "{{ 1 }}"}), 1)


def test_templates_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="has no chat template; set data.chat.template to a file"):
        ChatTemplate(folder, "", begins_with_bos=False)
    with pytest.raises(ValueError, match="cannot be read: .*give a file with a template in Jinja"):
        ChatTemplate(folder, f"{folder}/none.jinja", begins_with_bos=False)
    (tmp_path / "own.jinja").write_text(TEMPLATES["chatml"])
    assert ChatTemplate(folder, f"{folder}/own.jinja", begins_with_bos=False).has_answers
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read by transformers"):
        ChatTemplate(folder, "plain", begins_with_bos=False)


def test_chats_without_transformers_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install -e '.\[hf\]'"):
        ChatTemplate(make_tokenizer(tmp_path), "", begins_with_bos=False)


def test_a_fingerprint_is_of_the_template_that_is_used(tmp_path: Path) -> None:
    folder, own = make_tokenizer(tmp_path, TEMPLATES["chatml"]), tmp_path / "own.jinja"
    own.write_text(TEMPLATES["roles as words"])
    before = [fingerprint(folder, template) for template in ("", "plain", str(own))]
    assert len(set(before)) == 3
    for file in (tmp_path / "chat_template.jinja", own):
        file.write_text(TEMPLATES["[INST], as Mistral"])
    after = [fingerprint(folder, template) for template in ("", "plain", str(own))]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True, False]
    assert after[0] == after[2]


def test_a_fingerprint_has_the_control_tokens_that_transformers_reads_beside_the_configuration(tmp_path: Path) -> None:
    folder, file = make_tokenizer(tmp_path, "{{ eos_token }}"), tmp_path / "special_tokens_map.json"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    rendered, found = [], []
    for token in ("</s>", "<|im_end|>"):
        file.write_text(json.dumps({"eos_token": token}))
        rendered.append(ChatTemplate(folder, "", begins_with_bos=True).text(Conversation([{"role": "user"}]), 1))
        found.append(fingerprint(folder, ""))
    assert rendered == ["</s>", "<|im_end|>"] and found[0] != found[1]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": {}}))
    with_map = fingerprint(folder, "")
    file.unlink()
    assert fingerprint(folder, "") == with_map, "which transformers does not read then"
