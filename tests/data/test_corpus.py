"""Corpora on disk and their samples, compared with a brute-force reading of the same documents."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from titan_moe.data.bad_rows import BadRowError
from titan_moe.data.checked_file import CheckedWriter
from titan_moe.data.corpus import Corpus, CorpusSamples, open_corpus, split_holdout, write_corpus

DOCUMENTS = [[1, 2, 3, 0], [4, 0], [], [5, 6, 7, 8, 9, 10, 0], [11, 0], [12, 13, 0]]
FLAT = [(token, number) for number, document in enumerate(DOCUMENTS) for token in document]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    write_corpus(tmp_path, [np.array(document, dtype=np.int64) for document in DOCUMENTS], np.dtype("u1"))
    return open_corpus(tmp_path, np.dtype("u1"), vocab_size=256)


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 17])
def test_corpus_samples_share_one_token_and_have_document_ids(corpus: Corpus, seq_len: int) -> None:
    samples = CorpusSamples(corpus, 0, corpus.num_tokens, seq_len)
    assert len(samples) == (len(FLAT) - 1) // seq_len
    for number in range(len(samples)):
        expected = FLAT[number * seq_len : number * seq_len + seq_len + 1]
        assert samples[number].tokens.tolist() == [token for token, _ in expected]
        ids = samples[number].document_ids
        assert ids[0] == 0
        assert (np.diff(ids) > 0).tolist() == [a[1] != b[1] for a, b in zip(expected, expected[1:], strict=False)]
        assert np.diff(ids).max() <= 1


def test_corpus_reads_across_files() -> None:
    parts = [np.arange(3, dtype="u2"), np.arange(3, 4, dtype="u2"), np.arange(4, 9, dtype="u2")]
    corpus = Corpus(parts, np.array([3, 4, 9]), vocab_size=100)
    for start in range(9):
        for stop in range(start + 1, 10):
            sample = corpus.read(start, stop)
            assert sample.tokens.tolist() == list(range(start, stop))
    assert corpus.read(2, 6).document_ids.tolist() == [0, 1, 2, 2]


@pytest.mark.parametrize(("fraction", "num_held_out"), [(0.01, 1), (0.4, 2), (0.6, 3)])
def test_holdout_is_the_last_documents(corpus: Corpus, fraction: float, num_held_out: int) -> None:
    training, held_out = split_holdout(corpus, fraction, seq_len_tokens=1)
    holdout_start = int(corpus.document_ends[5 - num_held_out - 1])
    read = [int(training[number].tokens[0]) for number in range(len(training))] + [
        int(training[len(training) - 1].tokens[1])
    ]
    assert read == [token for token, _ in FLAT[:holdout_start]]
    assert held_out[0].tokens.tolist() == [token for token, _ in FLAT[holdout_start : holdout_start + 2]]
    assert len(held_out) == len(FLAT) - holdout_start - 1


def test_holdout_of_all_documents_is_refused(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match=r"data.holdout_fraction = 0.9 holds out 4 of 5|leaves none"):
        split_holdout(corpus, 0.95, seq_len_tokens=1)


@pytest.mark.parametrize(("fraction", "seq_len", "num_held_out"), [(0.1, 1, 2), (0.3, 1, 6), (0.1, 5, 6)])
def test_holdout_of_one_document_is_its_end(fraction: float, seq_len: int, num_held_out: int) -> None:
    corpus = Corpus([np.arange(20)], np.array([20]), vocab_size=256)
    training, held_out = split_holdout(corpus, fraction, seq_len)
    assert held_out.num_tokens == num_held_out
    assert held_out[0].tokens.tolist() == list(range(20 - num_held_out, 20 - num_held_out + seq_len + 1))
    assert training[len(training) - 1].tokens.max() < 20 - num_held_out
    with pytest.raises(ValueError, match="gives 0 training tokens"):
        split_holdout(corpus, 0.1, seq_len_tokens=19)


def test_corpus_below_one_sequence_is_refused(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match=r"18 training tokens.*train.seq_len_tokens \+ 1 = 19"):
        split_holdout(corpus, 0.0, seq_len_tokens=18)
    training, held_out = split_holdout(corpus, 0.0, seq_len_tokens=17)
    assert (len(training), len(held_out)) == (1, 0)


def test_corpus_without_tokens_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path, [np.array([], dtype="u1")], np.dtype("u1"))
    with pytest.raises(ValueError, match="every document is empty"):
        open_corpus(tmp_path, np.dtype("u1"), 256)


def test_corpus_id_outside_the_vocabulary_is_refused() -> None:
    corpus = Corpus([np.array([1, 2, 300], dtype="u2")], np.array([3]), vocab_size=256)
    assert corpus.read(0, 2).tokens.tolist() == [1, 2]
    with pytest.raises(BadRowError, match="the data has the token id 300 at token 2 .*below 256"):
        corpus.read(1, 3)
    for id in (-1, 256):
        part = np.array([0, 3, id], dtype="i4")
        with pytest.raises(BadRowError, match=f"the data has the token id {id} at token 2 "):
            Corpus([np.zeros(5, "i4"), part], np.array([8]), vocab_size=256).read(4, 8)


class Command:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, makes: Path) -> None:
        self.makes = makes

    def __reduce__(self):
        return os.system, (f"touch {self.makes}",)


@pytest.mark.parametrize("kind", ["array of objects", "pickle", "numbers of another kind", "empty"])
def test_corpus_with_a_crafted_file_runs_nothing(corpus: Corpus, tmp_path: Path, kind: str) -> None:
    made, file = tmp_path / "made", tmp_path / "documents.idx"
    with CheckedWriter(file) as stream:
        if kind == "array of objects":
            np.save(stream, np.array([Command(made)], dtype=object), allow_pickle=True)
        elif kind == "pickle":
            pickle.dump(Command(made), stream)
        elif kind == "numbers of another kind":
            np.save(stream, np.array([[1.5]]))
    with pytest.raises(ValueError, match=rf"{file} is damaged: .*; start the run again, or remove {tmp_path}: it is"):
        open_corpus(tmp_path, np.dtype("u1"), vocab_size=256)
    assert not made.exists()


def test_corpus_that_was_shortened_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").write_bytes((tmp_path / "tokens.bin").read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"tokens.bin is damaged: it has 17 bytes instead of 18; start the run again"):
        open_corpus(tmp_path, np.dtype("u1"), vocab_size=256)
