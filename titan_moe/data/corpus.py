"""Tokens with their document boundaries, and the fixed-length samples cut from them."""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from titan_moe.data.bad_rows import BadRows
from titan_moe.data.checked_file import CheckedFile, CheckedTokenFile, CheckedWriter, DamagedFileError
from titan_moe.data.sample import Sample
from titan_moe.data.token_file import TokenFile

TOKENS_FILE = "tokens.bin"
DOCUMENTS_FILE = "documents.idx"
HASH_FILE = "hash"
_SAMPLE_TOKENS = 1 << 15
_NUM_SAMPLES = 1024


class Corpus:
    """One long sequence of tokens, read from one or more files, and the end of each document.

    `document_ends[i]` is the position after the last token of document i. The end-of-document token belongs to it.
    """

    def __init__(
        self,
        parts: Sequence[np.ndarray | TokenFile | CheckedTokenFile],
        document_ends: np.ndarray,
        vocab_size: int,
        content_hash: str = "",
        bad_rows: BadRows | None = None,
        has_indexes: bool = False,
        knows_documents: bool = True,
    ) -> None:
        """`has_indexes`: the tokens do not tell where documents end, so the fingerprint does. Without
        `knows_documents` the ends are those of files."""
        self.knows_documents = knows_documents
        self._has_indexes = has_indexes
        self.document_ends = document_ends
        self._content_hash = content_hash
        self._bad_rows = BadRows() if bad_rows is None else bad_rows
        self._parts = parts
        self._part_ends = np.cumsum([len(part) for part in parts])
        self._vocab_size = vocab_size

    @property
    def num_tokens(self) -> int:
        return int(self._part_ends[-1])

    def read(self, start: int, stop: int) -> Sample:
        """Read tokens [start, stop), across files. Document ids start at 0. A sample with an id outside the vocabulary
        is a bad row: if these are skipped, nothing is learned from it.

        Raises: BadRowError for one if they are not skipped.
        """
        tokens = np.concatenate([part.astype(np.int64) for part in self._slices(start, stop)])
        is_outside = (tokens < 0) | (tokens >= self._vocab_size)
        if is_bad := bool(is_outside.any()):
            offset = int(np.argmax(is_outside))
            self._bad_rows.found(start, self._describe_bad(int(tokens[offset]), start, offset))
            tokens[is_outside] = 0
        first = np.searchsorted(self.document_ends, start, side="right")
        last = np.searchsorted(self.document_ends, stop - 1, side="right")
        boundaries = self.document_ends[first:last]
        document_ids = np.searchsorted(boundaries, np.arange(start, stop), side="right").astype(np.int32)
        return Sample(tokens, document_ids, is_bad)

    def _describe_bad(self, token: int, start: int, offset: int) -> str:
        """Name the file and the place of an id outside the vocabulary, in the sequence from token `start` on."""
        number = int(np.searchsorted(self._part_ends, start + offset, side="right"))
        part = self._parts[number]
        place = start + offset - int(self._part_ends[number]) + len(part)
        file = getattr(part, "path", "the data")
        return (
            f"data.path: {file} has the token id {token} at token {place:,} (in the sequence from token "
            f"{place - offset:,} on), but data.tokenizer has only ids below {self._vocab_size}; repair the file, give "
            "the folder of the tokenizer that made it, or check data.token_dtype"
        )

    def fingerprint(self) -> str:
        """Describe the content: the number of tokens and a hash. A corpus that `write_corpus` wrote has a hash of all
        tokens and document ends, of the same bytes as the checksums with which each block is compared when it is read.
        Of other files at most _NUM_SAMPLES evenly spaced pieces are read and hashed."""
        if self._content_hash:
            return f"{self.num_tokens} tokens, sha256 {self._content_hash}"
        last = max(0, self.num_tokens - _SAMPLE_TOKENS)
        count = min(_NUM_SAMPLES, last // _SAMPLE_TOKENS + 2)
        sha256 = hashlib.sha256()
        for start in np.linspace(0, last, count, dtype=np.int64).tolist():
            for tokens in self._slices(start, min(start + _SAMPLE_TOKENS, self.num_tokens)):
                sha256.update(tokens.tobytes())
        documents = hashlib.sha256(self.document_ends.data).hexdigest() if self._has_indexes else ""
        end = f", sha256 of document ends {documents}" if documents else ""
        return f"{self.num_tokens} tokens, sha256 of samples {sha256.hexdigest()}{end}"

    def _slices(self, start: int, stop: int) -> Iterable[np.ndarray]:
        number = int(np.searchsorted(self._part_ends, start, side="right"))
        while start < stop:
            part, part_end = self._parts[number], int(self._part_ends[number])
            part_start = part_end - len(part)
            yield part[start - part_start : min(stop, part_end) - part_start]
            start, number = min(stop, part_end), number + 1


class CorpusSamples:
    """Cut [start, stop) of a corpus into samples of N + 1 tokens; consecutive samples share one token.

    Sample i covers tokens [i*N, i*N + N], so every token except the first is a label exactly once. A remainder shorter
    than one sequence is dropped.
    """

    def __init__(self, corpus: Corpus, start: int, stop: int, seq_len_tokens: int) -> None:
        self._corpus = corpus
        self._start = start
        self._num_tokens = stop - start
        self._seq_len_tokens = seq_len_tokens
        self._num_samples = max(0, (stop - start - 1) // seq_len_tokens)

    def __len__(self) -> int:
        return self._num_samples

    @property
    def num_tokens(self) -> int:
        """With those after the last whole sample."""
        return self._num_tokens

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        start = self._start + index * self._seq_len_tokens
        return self._corpus.read(start, start + self._seq_len_tokens + 1)


def split_holdout(corpus: Corpus, holdout_fraction: float, seq_len_tokens: int) -> tuple[CorpusSamples, CorpusSamples]:
    """Split the corpus into training and held-out samples. The last whole documents are held out, at least one; of a
    single document its end, one sequence at least.

    Raises: ValueError if no document, or less than one sequence, is left for training.
    """
    holdout_start = corpus.num_tokens
    if holdout_fraction > 0:
        num_documents = len(corpus.document_ends)
        num_held_out = max(1, round(holdout_fraction * num_documents))
        if num_documents == 1:
            num_tokens = max(round(holdout_fraction * corpus.num_tokens), seq_len_tokens + 1)
            holdout_start = max(corpus.num_tokens - num_tokens, 0)
        elif num_held_out >= num_documents:
            raise ValueError(
                f"data.holdout_fraction = {holdout_fraction} holds out {num_held_out} of {num_documents} documents "
                "and leaves none for training; lower it, add documents, or set it to 0"
            )
        else:
            holdout_start = int(corpus.document_ends[-num_held_out - 1])
    training = CorpusSamples(corpus, 0, holdout_start, seq_len_tokens)
    if len(training) == 0:
        raise ValueError(
            f"data.path gives {holdout_start} training tokens, fewer than one sequence needs: "
            f"train.seq_len_tokens + 1 = {seq_len_tokens + 1}; add files or shorten train.seq_len_tokens"
        )
    return training, CorpusSamples(corpus, holdout_start, corpus.num_tokens, seq_len_tokens)


def write_corpus(folder: Path, documents: Iterable[np.ndarray], dtype: np.dtype) -> None:
    """Write tokenised documents one after another, their ends, and a hash of both. Documents without tokens are
    skipped."""
    ends = array("q")
    num_tokens = 0
    sha256 = hashlib.sha256()
    with CheckedWriter(folder / TOKENS_FILE) as file:
        for document in documents:
            if len(document) > 0:
                tokens = document.astype(dtype).tobytes()
                file.write(tokens)
                sha256.update(tokens)
                num_tokens += len(document)
                ends.append(num_tokens)
    sha256.update(ends)
    with CheckedWriter(folder / HASH_FILE) as file:
        file.write(sha256.hexdigest().encode())
    write_document_ends(folder, np.frombuffer(ends, dtype=np.int64))


def write_document_ends(folder: Path, ends: np.ndarray) -> None:
    """Write the ends of documents as a .npy file that can be memory-mapped."""
    with CheckedWriter(folder / DOCUMENTS_FILE) as file:
        np.save(file, ends, allow_pickle=False)


def open_corpus(folder: Path, dtype: np.dtype, vocab_size: int) -> Corpus:
    """Open the files of `write_corpus`. The tokens are compared with their checksums when they are read.

    Raises: ValueError for a corpus without tokens; DamagedFileError for a damaged file.
    """
    document_ends = open_document_ends(folder)
    if len(document_ends) == 0:
        raise ValueError("data.path gives no token: every document is empty; give files or a column that contain text")
    tokens = CheckedTokenFile(folder / TOKENS_FILE, dtype)
    num_bytes = int(document_ends[-1]) * dtype.itemsize
    if tokens.file.num_bytes != num_bytes:
        raise DamagedFileError(tokens.path, f"it has {tokens.file.num_bytes:,} bytes instead of {num_bytes:,}")
    content_hash = CheckedFile(folder / HASH_FILE)
    return Corpus([tokens], document_ends, vocab_size, content_hash.read(0, content_hash.num_bytes).decode())


def open_document_ends(folder: Path) -> np.ndarray:
    """Memory-map the file of `write_document_ends`, after its comparison with its checksums.

    Raises: DamagedFileError if it is not as it was written, or does not contain integers. Nothing in it is run.
    """
    file = folder / DOCUMENTS_FILE
    CheckedFile(file).read_all()
    try:
        ends = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DamagedFileError(file, "it is not an array of numbers") from error
    if not isinstance(ends, np.ndarray) or ends.dtype != np.int64 or ends.ndim != 1:
        raise DamagedFileError(file, "it is not a list of 64-bit integers")
    return ends
