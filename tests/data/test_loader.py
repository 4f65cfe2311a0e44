"""The loader: one global order of samples for every number of ranks, one cursor to resume."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from titan_moe.config import Recipe
from titan_moe.config.batch_schedule import BatchPhase
from titan_moe.config.context import SequenceShard
from titan_moe.data.loader import Loader
from titan_moe.data.packing import IGNORE_LABEL


@pytest.fixture
def counting_recipe(make_recipe: Callable[..., Recipe], counting_tokens: Path) -> Callable[..., Recipe]:
    """124 samples of 16 tokens. The first token of sample i is 16 * i."""

    def make(**sections: dict) -> Recipe:
        data = {"source": "tokens", "path": str(counting_tokens), "tokenizer": "", **sections.pop("data", {})}
        return make_recipe(data=data, model={"vocab_size": 2000}, **sections)

    return make


def _numbers(loader: Loader) -> list[int]:
    return (loader.next_step().tokens_MBN[..., 0].flatten() // 16).tolist()


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_loader_reads_each_sample_once_an_epoch_on_one_rank(
    counting_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], dp_size: int
) -> None:
    recipe = counting_recipe()
    alone = open_loader(recipe)
    ranks = [open_loader(recipe, rank, dp_size) for rank in range(dp_size)]
    order: list[int] = []
    for _ in range(31):  # two epochs of 124 samples
        step = [number for rank in ranks for number in _numbers(rank)]
        assert step == _numbers(alone)
        order += step
    assert sorted(order[:124]) == sorted(order[124:]) == list(range(124))
    assert order[:124] != order[124:]


@pytest.mark.parametrize("dp_size", [1, 2])
def test_loader_grows_its_batches_and_resumes_between_them(
    counting_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], dp_size: int
) -> None:
    phases = BatchPhase(5 * 16, 2), BatchPhase(9 * 16, 4)
    recipe = counting_recipe(train={"batch_schedule": phases, "micro_batch_sequences": 1}, data={"is_shuffled": False})
    ranks = [open_loader(recipe, rank, dp_size) for rank in range(dp_size)]
    expected = [[0, 1], [2, 3], [4, 5], [6, 7, 8, 9], list(range(10, 18)), list(range(18, 26))]
    for number, step in enumerate(expected):
        if number == 3:
            ranks[0].read_ahead()
            states = [rank.state_dict() for rank in ranks]
            ranks = [open_loader(recipe, rank, dp_size) for rank in range(dp_size)]
            for rank, state in zip(ranks, states, strict=True):
                rank.load_state_dict(state)
        assert [sample for rank in ranks for sample in _numbers(rank)] == step


def test_loader_cuts_microbatches_from_the_slice_of_the_rank(
    counting_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    batch = open_loader(counting_recipe(data={"is_shuffled": False}), 1, 2).next_step()
    assert batch.tokens_MBN.shape == (2, 2, 16)
    assert (batch.tokens_MBN[..., 0] // 16).tolist() == [[4, 5], [6, 7]]
    assert batch.labels_MBN.equal(batch.tokens_MBN + 1)
    assert batch.document_ids_MBN is None


@pytest.mark.parametrize("is_head_and_tail", [False, True])
def test_loader_gives_context_parallel_ranks_parts_of_the_same_sequences(
    make_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], is_head_and_tail: bool
) -> None:
    recipe = make_recipe(data={"source": "synthetic", "document_attention": True})
    whole = open_loader(recipe)
    shards = [open_loader(recipe, shard=SequenceShard(rank, 2, is_head_and_tail)) for rank in range(2)]
    own = {False: ([*range(8)], [*range(8, 16)]), True: ([*range(4), *range(12, 16)], [*range(4, 12)])}[
        is_head_and_tail
    ]
    for read in (Loader.next_step, lambda loader: next(loader.validation_batches())):
        batch = read(whole)
        for places, part in zip(own, map(read, shards), strict=True):
            assert part.tokens_MBN.equal(batch.tokens_MBN[..., places])
            assert part.labels_MBN.equal(batch.labels_MBN[..., places])
            assert part.document_ids_MBN.equal(batch.document_ids_MBN), "masks need those of all keys"
    prompt = next(whole.validation_batches()).tokens_MBN[0, :1, :12]
    assert all(loader.held_out_prompt(12).equal(prompt) for loader in (whole, *shards))


def test_loader_resumes_at_any_step_on_any_number_of_ranks(
    counting_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    recipe = counting_recipe()
    running, ahead = open_loader(recipe, 1, 2), open_loader(recipe)
    expected = [_numbers(ahead) for _ in range(24)]
    for step in range(20):
        state = json.loads(json.dumps(running.state_dict()))
        for dp_size in (1, 4):
            ranks = [open_loader(recipe, rank, dp_size) for rank in range(dp_size)]
            for rank in ranks:
                rank.load_state_dict(state)
            for later in range(3):
                assert [number for rank in ranks for number in _numbers(rank)] == expected[step + later]
        assert _numbers(running) == expected[step][4:]


def test_loader_resumes_with_another_batch_size(
    counting_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    running, ahead = open_loader(counting_recipe()), open_loader(counting_recipe())
    expected = [number for _ in range(6) for number in _numbers(ahead)]
    _numbers(running)
    larger = open_loader(counting_recipe(train={"global_batch_sequences": 16}))
    larger.load_state_dict(running.state_dict())
    assert _numbers(larger) == expected[8:24]


def test_loader_refuses_a_position_in_other_data(
    counting_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], counting_tokens: Path
) -> None:
    state = open_loader(counting_recipe()).state_dict()
    with pytest.raises(ValueError, match="seq_len_tokens = 16, this run has 8.*checkpoint.load_from"):
        open_loader(counting_recipe(train={"seq_len_tokens": 8})).load_state_dict(state)
    for order, other in {
        "shuffled by run.seed = 7": counting_recipe(run={"seed": 7}),
        "unshuffled": counting_recipe(data={"is_shuffled": False}),
    }.items():
        with pytest.raises(ValueError, match=f"samples are shuffled by run.seed = 0, this run's are {order}"):
            open_loader(other).load_state_dict(state)
    open_loader(counting_recipe(run={"seed": 7})).load_state_dict(
        state | {"stream": ""}
    )  # written before there was an order
    counting_tokens.write_bytes(counting_tokens.read_bytes()[:2000])
    with pytest.raises(ValueError, match="samples_per_epoch = 124, this run has 62"):
        open_loader(counting_recipe()).load_state_dict(state)


@pytest.mark.parametrize(("dp_size", "num_batches"), [(1, 3), (2, 2), (4, 1)])
def test_validation_batches_are_equal_for_any_number_of_ranks(
    make_recipe: Callable[..., Recipe],
    open_loader: Callable[..., Loader],
    tmp_path: Path,
    dp_size: int,
    num_batches: int,
) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(
            chr(ord("a") + number) * 47
        )  # with the end token 48 tokens: 3 sequences
    recipe = make_recipe(
        data={"source": "text", "path": str(tmp_path / "*.txt"), "holdout_fraction": 0.5},
        validation={"every_steps": 1, "num_sequences": 5},
    )
    ranks = [open_loader(recipe, rank, dp_size) for rank in range(dp_size)]
    seen: list[str] = []
    for rank in ranks:
        batches = list(rank.validation_batches())
        assert len(batches) == num_batches
        assert all(batch.tokens_MBN.shape == (1, 2, 16) for batch in batches)
        for again, batch in zip(rank.validation_batches(), batches, strict=True):
            assert again.tokens_MBN.equal(batch.tokens_MBN)
            assert again.labels_MBN.equal(batch.labels_MBN)
        labels = torch.cat([batch.labels_MBN.flatten(0, 1) for batch in batches])
        tokens = torch.cat([batch.tokens_MBN.flatten(0, 1) for batch in batches])
        seen += [chr(row[0]) for row, label in zip(tokens, labels, strict=True) if (label != IGNORE_LABEL).all()]
    assert sorted(seen) == ["f", "f", "g", "h", "i"]  # sequences 0, 2, 5, 8 and 11 of the 14 that are held out
    for _ in range(2):  # held-out documents are never trained on
        assert all(rank.next_step().tokens_MBN.max() <= ord("e") for rank in ranks)


def test_loader_document_attention_equals_brute_force(
    make_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    texts = ["one", "two and a half", "three", "x" * 40, "end"] * 4
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02}.txt").write_text(text)
    data = {"source": "text", "path": str(tmp_path / "*.txt"), "document_attention": True, "is_shuffled": False}
    recipe = make_recipe(data=data)
    batch = open_loader(recipe).next_step()
    flat = [(token, number) for number, text in enumerate(texts) for token in [*text.encode(), 0]]
    assert batch.document_ids_MBN is not None
    for sample in range(8):
        cut = flat[sample * 16 : sample * 16 + 17]
        at = divmod(sample, 2)
        assert batch.tokens_MBN[at].tolist() == [token for token, _ in cut[:16]]
        labels = [
            label if same == number else IGNORE_LABEL for (_, number), (label, same) in zip(cut, cut[1:], strict=False)
        ]
        assert batch.labels_MBN[at].tolist() == labels
        assert batch.document_ids_MBN[at].tolist() == [number - cut[0][1] for _, number in cut[:16]]
        ends = batch.tokens_MBN[at] == 0
        assert (batch.labels_MBN[at][ends] == IGNORE_LABEL).all()  # the next document cannot be predicted
    assert (batch.labels_MBN == 0).any()  # the end of a document can


def test_loader_synthetic_is_equal_for_any_number_of_ranks(
    make_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    recipe = make_recipe(
        model={"vocab_size": 60},
        data={"document_attention": True},
        validation={"every_steps": 1, "num_sequences": 3},
    )
    alone, pair = open_loader(recipe), [open_loader(recipe, rank, 2) for rank in range(2)]
    for _ in range(3):
        whole, parts = alone.next_step(), [rank.next_step() for rank in pair]
        assert whole.tokens_MBN.equal(torch.cat([part.tokens_MBN for part in parts]))
        assert whole.labels_MBN.equal(torch.cat([part.labels_MBN for part in parts]))
    assert whole.tokens_MBN.max() < 60
    resumed = open_loader(recipe)
    resumed.load_state_dict(alone.state_dict())
    assert resumed.next_step().tokens_MBN.equal(alone.next_step().tokens_MBN)
    assert [len(list(rank.validation_batches())) for rank in (alone, *pair)] == [2, 1, 1]


def test_loader_tokenises_text_once_on_rank_0(
    make_recipe: Callable[..., Recipe],
    open_loader: Callable[..., Loader],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "a.txt").write_text("some text " * 50)
    recipe = make_recipe(data={"source": "text", "path": str(tmp_path / "a.txt")})
    with pytest.raises(FileNotFoundError, match="data.cache_folder"):
        open_loader(recipe, 1, 2)
    first = open_loader(recipe, 0, 2).next_step()
    monkeypatch.setattr("titan_moe.data.text.read_documents", lambda files: pytest.fail("read again"))
    assert open_loader(recipe, 0, 2).next_step().tokens_MBN.equal(first.tokens_MBN)
    open_loader(recipe, 1, 2).next_step()
    other = make_recipe(data={"source": "text", "path": str(tmp_path / "a.txt"), "cache_folder": str(tmp_path / "c")})
    with pytest.raises(pytest.fail.Exception, match="read again"):
        open_loader(other)


def test_loader_masks_and_counts_bad_sequences(
    counting_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader]
) -> None:
    """The ids of the file are its places: those of the last sequence, from 1,968 on, are outside the vocabulary."""
    good = open_loader(counting_recipe(data={"is_shuffled": False}))
    recipe = counting_recipe(data={"is_shuffled": False, "bad_rows": "skip"})
    bad = open_loader(dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, vocab_size=1970)))
    for step in range(32):  # two epochs of 15.5 steps
        expected, found = good.next_step(), bad.next_step()
        is_bad = (torch.maximum(expected.tokens_MBN, expected.labels_MBN) >= 1970).any(-1, keepdim=True)
        assert is_bad.any() == (step in (15, 30))
        assert found.labels_MBN.equal(expected.labels_MBN.masked_fill(is_bad, IGNORE_LABEL))
        assert found.tokens_MBN.equal(expected.tokens_MBN * (expected.tokens_MBN < 1970))
        assert len(bad.bad_rows) == (step >= 15)


def test_loader_reads_ahead_and_keeps_its_position(
    counting_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, straight = open_loader(counting_recipe()), open_loader(counting_recipe())
    for _ in range(2):
        loader.read_ahead()
    assert loader.state_dict() == straight.state_dict()
    assert loader.next_step().tokens_MBN.equal(straight.next_step().tokens_MBN)
    assert loader.state_dict() == straight.state_dict()
    monkeypatch.setattr(loader._training, "take", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loader.read_ahead()
    assert loader.state_dict() == straight.state_dict()
    assert loader.next_step().tokens_MBN.equal(straight.next_step().tokens_MBN)
    resumed = open_loader(counting_recipe())
    resumed.read_ahead()
    resumed.load_state_dict(loader.state_dict())
    assert resumed.next_step().tokens_MBN.equal(straight.next_step().tokens_MBN)


def test_loader_goes_on_in_grown_data_where_the_recipe_says_so(
    counting_recipe: Callable[..., Recipe],
    open_loader: Callable[..., Loader],
    counting_tokens: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = open_loader(counting_recipe()).state_dict() | {"next_sample": 64}
    with counting_tokens.open("ab") as file:
        file.write(counting_tokens.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"samples_per_epoch = 124, this run has 156.*accept_changed_data = true"):
        open_loader(counting_recipe()).load_state_dict(state)
    accepting = counting_recipe(checkpoint={"accept_changed_data": True})
    grown = open_loader(accepting)
    grown.load_state_dict(state)
    assert "an epoch has 156 sequences (was 124); sequences follow in a new random order" in caplog.text
    assert (grown.state_dict()["next_sample"], grown.state_dict()["samples_per_epoch"]) == (64, 156)


@pytest.mark.parametrize("is_large", [False, True])
def test_loader_never_reads_damaged_tokens_of_the_cache(
    make_recipe: Callable[..., Recipe],
    open_loader: Callable[..., Loader],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_large: bool,
) -> None:
    """A small cache is built again at once, a large one at the start after the read that has met the damage."""
    monkeypatch.setattr("titan_moe.data.cache._READ_AT_START_BYTES", 0 if is_large else 1 << 30)
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(f"some text {number} " * 20)
    data = {"source": "text", "path": str(tmp_path / "*.txt"), "document_attention": True, "holdout_fraction": 0.2}
    recipe = make_recipe(data=data)
    first, fingerprint = open_loader(recipe).next_step(), open_loader(recipe).fingerprint()
    (entry,) = (tmp_path / "token_cache").glob("text-*")
    for file in (*entry.iterdir(), entry / "tokens.bin"):  # the hash of the content and the ends of documents too
        contents = bytearray(file.read_bytes())
        contents[200 % len(contents)] ^= 1
        file.write_bytes(contents)
        loader = open_loader(recipe)
        if is_large and file.name == "tokens.bin":
            with pytest.raises(ValueError, match=f"{file} is damaged: block 0 of 1 "):
                loader.next_step()
            loader = open_loader(recipe)
        again = loader.next_step()
        assert again.tokens_MBN.equal(first.tokens_MBN) and again.labels_MBN.equal(first.labels_MBN)
        assert loader.fingerprint() == fingerprint


def test_loader_refuses_data_that_does_not_fit(
    make_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="global_batch_sequences = 8 is not a multiple .*make it a multiple of 6"):
        open_loader(make_recipe(), 0, 3)
    (tmp_path / "a.txt").write_text("short")
    text = {"source": "text", "path": str(tmp_path / "*.txt")}
    with pytest.raises(ValueError, match="6 training tokens, fewer than one sequence"):
        open_loader(make_recipe(data=text))
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text("long enough " * 4)
    with pytest.raises(ValueError, match="validation.num_sequences = 64, but data.holdout_fraction = 0.1 holds out"):
        open_loader(make_recipe(data={**text, "holdout_fraction": 0.1}, validation={"every_steps": 5}))
    with pytest.raises(ValueError, match="metrics.sample_tokens = 5 needs a held-out prompt, but data.holdout"):
        too_little = {"seq_len_tokens": 128}
        open_loader(make_recipe(data={**text, "holdout_fraction": 0.1}, metrics={"sample_tokens": 5}, train=too_little))
    loader = open_loader(make_recipe(data=text))
    with pytest.raises(ValueError, match="nothing is held out"):
        list(loader.validation_batches())


def test_loader_splits_control_tokens_as_the_recipe_says(
    make_recipe: Callable[..., Recipe], open_loader: Callable[..., Loader], tmp_path: Path
) -> None:
    """Also after a run with the other choice has filled the cache. The fingerprints differ, so no resume mixes them."""
    inner = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "<": 2, "end": 3, ">": 4, "?": 5}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Punctuation()
    inner.add_special_tokens(["<end>"])
    inner.enable_truncation(30)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (tmp_path / "a.txt").write_text("<end>" * 40)
    text = {"source": "text", "path": str(tmp_path / "*.txt"), "tokenizer": str(tmp_path), "is_shuffled": False}
    fingerprints = set()
    for is_split, expected in ((False, [0] * 41), (True, [2, 3, 4] * 40 + [0])) * 2:
        loader = open_loader(make_recipe(data={**text, "split_special_tokens": is_split}))
        assert loader.next_step().tokens_MBN.flatten().tolist()[: len(expected) - 9] == expected[:-9]
        assert loader.fingerprint().startswith(f"{len(expected)} tokens")
        fingerprints.add(loader.fingerprint())
    assert len(fingerprints) == 2
