"""Conversations of JSON lines through the loader: cached and streamed, on any number of ranks, resumed."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat_templates import TEMPLATES, make_tokenizer, without_marks

from titan_moe.config import Recipe
from titan_moe.config.chat import ChatConfig
from titan_moe.data.bad_rows import BadRowError
from titan_moe.data.lanes import cut
from titan_moe.data.loader import Loader
from titan_moe.data.packing import IGNORE_LABEL

NUM_ROWS = 60
DEFAULT = ChatConfig()
LONG = 20
"""The number of a row that no sequence holds."""


def row(number: int) -> dict[str, Any]:
    question = "the user " * (1 + number % 3) + ("system " * 60 if number == LONG else "")
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": f"#{number}#"}]}


@pytest.fixture
def make(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    """Make a recipe of conversations, in sequences of 48 tokens, whose answers have their numbers."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    make_tokenizer(folder, TEMPLATES["chatml"])
    for part, name in enumerate("ab"):
        rows = [json.dumps(row(number)) for number in range(part * NUM_ROWS // 2, (part + 1) * NUM_ROWS // 2)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))

    def make_(chat: ChatConfig = DEFAULT, **data: Any) -> Recipe:
        fields: dict[str, Any] = {"source": "datasets", "path": "json", "files": f"{tmp_path}/*.jsonl"}
        fields |= {"format": "chat", "tokenizer": str(folder), "document_attention": True, "chat": chat}
        recipe = make_recipe(data=fields | data, train={"seq_len_tokens": 48, "global_batch_sequences": 4})
        return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, vocab_size=400))

    return make_


def learned(loader: Loader) -> tuple[list[int], list[torch.Tensor]]:
    """The numbers of the answers of a step, and its tensors."""
    batch = loader.next_step()
    assert batch.document_ids_MBN is not None
    labels = batch.labels_MBN[batch.labels_MBN != IGNORE_LABEL].tolist()
    numbers = loader.tokenizer.decode(labels).split("#")[1::2]
    return [int(number) for number in numbers], [*batch[:2], batch.document_ids_MBN]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_files_by_their_ending_give_the_same_conversations(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path, is_streamed: bool
) -> None:
    by_ending: dict[str, Any] = {"source": "auto", "path": f"{tmp_path}/*.jsonl", "files": ""}
    one, other = (open_loader(make(is_streamed=is_streamed, is_shuffled=False, **data)) for data in ({}, by_ending))
    for _ in range(3):
        assert learned(one)[0] == learned(other)[0]
    text = tmp_path / "text.txt"
    text.write_text("no conversation")
    with pytest.raises(ValueError, match="files of text; give"):
        open_loader(make(source="auto", path=str(text), files=""))


def test_an_epoch_has_every_answer_once(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        loader = open_loader(make())
    assert "*.jsonl has 59 conversations of" in caplog.text and "tokenised 59 documents: " in caplog.text
    assert "49 tokens: 1 dropped, 0 cut, 0 left out" in caplog.text
    numbers: list[int] = []
    for _ in range(loader.state_dict()["samples_per_epoch"]):  # four epochs
        numbers += learned(loader)[0]
    assert sorted(numbers) == sorted(4 * [number for number in range(NUM_ROWS) if number != LONG])


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_resume_on_other_ranks_goes_on_exactly(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], is_streamed: bool
) -> None:
    recipe = make(is_streamed=is_streamed)
    whole = open_loader(recipe)
    for _ in range(3):
        learned(whole)
    state, expected = whole.state_dict(), [learned(whole)[1] for _ in range(9)]
    ranks = [open_loader(recipe, rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    for step in expected:
        parts = [learned(rank)[1] for rank in ranks]
        for tensor, *of_ranks in zip(step, *parts, strict=True):
            assert torch.equal(tensor.flatten(0, 1), torch.cat([part.flatten(0, 1) for part in of_ranks]))


def test_a_stream_has_the_order_of_the_unshuffled_corpus(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    cached, streamed = open_loader(make(is_shuffled=False)), open_loader(make(is_streamed=True))
    for _ in range(12):
        for tensor, other in zip(learned(cached)[1], learned(streamed)[1], strict=True):
            assert torch.equal(tensor, other)
    assert cached.fingerprint() != streamed.fingerprint()


def test_held_out_conversations_are_not_trained_on(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    loader = open_loader(make(holdout_fraction=0.1))
    batches = loader.held_out_batches()
    held_out = "".join(loader.tokenizer.decode(batch.tokens_MBN.flatten().tolist()) for batch in batches)
    assert all(f"#{number}#" in held_out for number in range(54, 60)) and "#53#" not in held_out
    assert max(number for _ in range(20) for number in learned(loader)[0]) == 53


def test_long_conversations_are_cut_or_left_out(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        open_loader(make(ChatConfig(too_long="cut")))
        assert "0 dropped, 0 cut, 1 left out because no answer remained" in caplog.text
        open_loader(make(ChatConfig(too_long="cut", train_on="all")))
        assert "60 conversations" in caplog.text and "0 dropped, 1 cut, 0 left out" in caplog.text


def test_bad_rows_are_named_or_skipped(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write('\n\n{"messages": [{"role": "user", "content": "a"}]}\n{"messages":\n{"text": "a"}\n')
    for is_streamed in (False, True):
        with pytest.raises(BadRowError, match=r"b.jsonl, line 32, has no answer.*or set data.bad_rows = .skip.$"):
            loader = open_loader(make(is_streamed=is_streamed))
            for _ in range(10):
                loader.next_step()
        loader = open_loader(make(is_streamed=is_streamed, bad_rows="skip"))
        for _ in range(10):
            loader.next_step()
        assert len(loader.bad_rows) == 3


def test_answers_without_marks_name_the_way_out(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    marked = open_loader(make())
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(without_marks(TEMPLATES["chatml"]))
    with pytest.raises(ValueError, match=r'no {% generation %} block.*set data.chat.answers = "prefixes"'):
        open_loader(make())
    prefixes = open_loader(make(ChatConfig(answers="prefixes")))
    assert prefixes.fingerprint() == marked.fingerprint()
    for tensor, other in zip(learned(marked)[1], learned(prefixes)[1], strict=True):
        assert torch.equal(tensor, other)


def test_another_vocabulary_and_empty_data_are_refused(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    recipe = make()
    with pytest.raises(ValueError, match="set model.vocab_size to at least 325"):
        open_loader(dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, vocab_size=300)))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="data.path gives no conversation: it has no rows, or all of them are bad"):
        open_loader(make(files=f"{tmp_path}/empty.jsonl"))
    short = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, seq_len_tokens=4))
    with pytest.raises(ValueError, match='gives no conversation to learn from: 0 .*60 dropped.*too_long = "cut"'):
        open_loader(short)
    with pytest.raises(ValueError, match="holds out 59 of 59 conversations"):
        open_loader(make(holdout_fraction=0.999))


def test_the_date_of_a_template_is_refused_in_a_stream(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}" + TEMPLATES["chatml"])
    open_loader(make())
    with pytest.raises(ValueError, match=r"writes the date .strftime_now.*set data.is_streamed = false"):
        open_loader(make(is_streamed=True))


def test_tables_have_the_same_conversations(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [row(number) | ({"tools": [{"name": "f"}]} if number == 7 else {}) for number in range(NUM_ROWS)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    table = {"path": "parquet", "files": f"{tmp_path}/rows.parquet"}
    lines = open_loader(make())
    for is_streamed in (False, True):
        loader = open_loader(make(is_streamed=is_streamed, is_shuffled=is_streamed, **table))
        learned(loader)
        state, first = loader.state_dict(), [learned(loader) for _ in range(4)]
        again = open_loader(make(is_streamed=is_streamed, is_shuffled=is_streamed, **table))
        again.load_state_dict(state)
        assert [numbers for numbers, _ in first] == [learned(again)[0] for _ in range(4)]
    assert open_loader(make(**table)).fingerprint() == lines.fingerprint()


def test_lanes_pack_conversations_and_resume_on_other_ranks(
    make: Callable[..., Recipe], open_loader: Callable[..., Loader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "MIN_PART_BYTES", 1)
    recipe = make(is_streamed=True, stream_lanes=8, stream_has_worker=False, shuffle_buffer_sequences=2)
    loader = open_loader(recipe)
    numbers = [number for _ in range(4) for number in learned(loader)[0]]
    assert len(numbers) > 15
    state = json.loads(json.dumps(loader.state_dict()))
    ranks = [open_loader(recipe, rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    for _ in range(4):
        whole, parts = learned(loader), [learned(rank) for rank in ranks]
        assert [number for part, _ in parts for number in part] == whole[0]
        assert all(
            torch.equal(torch.cat(own), tensor)
            for *own, tensor in zip(*(part for _, part in parts), whole[1], strict=True)
        )
