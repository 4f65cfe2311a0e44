"""Find where the ids of a token file lie, and of which dtype they are. A file that says it is believed; of one without
a header the first, middle and last ids must look like ids of `data.token_dtype`."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from titan_moe.config.train import DataConfig
from titan_moe.data.file_kinds import MEGATRON_INDEX, NUMPY, kind_of, read_head
from titan_moe.data.megatron_index import MegatronIndex, is_index, read_index

PROBE_TOKENS = 4096
_MIN_PROBE_BYTES = 32
_LLM_C_HEADER_BYTES = 1024
_LLM_C: dict[int, tuple[int, str]] = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""Magic of a token file of llm.c -> its version, and the dtype of its ids: of GPT-2, of Llama 3."""
_LARGEST_HIGH_HALF = 15
"""Of a 32-bit id: no vocabulary has 2**20 ids."""
_CONTROL_BYTES = np.isin(np.arange(256), [*range(9), 11, *range(14, 32), 127])


class TokenLayout(NamedTuple):
    """Where the ids of a file lie."""

    dtype: np.dtype
    offset_bytes: int
    num_tokens: int
    megatron_index: MegatronIndex | None = None
    """Says where documents end."""

    @property
    def is_described(self) -> bool:
        """Whether a header or an index gives the dtype, not `data.token_dtype`."""
        return self.offset_bytes > 0 or self.megatron_index is not None


def read_layout(file: Path, data: DataConfig) -> TokenLayout:
    """Read the header of a token file, or the index of Megatron beside it.

    Raises: ValueError for a file that contains other things than ids, or ids of another width than it says.
    """
    head, size = read_head(file), file.stat().st_size
    if size == 0:
        raise ValueError(f"data.path: {file} is empty; remove it, or leave it out of the glob")
    kind = kind_of(head, is_text=False)
    if kind is NUMPY:
        return _read_numpy(file, size)
    if kind is not None:
        raise _refuse(file, f"is {kind.name}, not token ids", kind.way_out)
    if (beside := index_beside(file)) is not None:
        return _read_megatron(file, size, beside)
    if (layout := _read_llm_c(file, head, size)) is not None:
        return layout
    dtype = np.dtype(data.token_dtype).newbyteorder("<")
    if size % dtype.itemsize != 0:
        raise ValueError(
            f"data.path: {file} has {size} bytes, not a multiple of the {dtype.itemsize} bytes of an id of "
            f"data.token_dtype = {data.token_dtype!r}; remove the file or correct data.token_dtype"
        )
    layout = TokenLayout(dtype, 0, size // dtype.itemsize)
    _check_width(file, size, data.token_dtype)
    return layout


def index_beside(file: Path) -> Path | None:
    """The index of Megatron that belongs to a token file.

    Raises: ValueError for one of an old format.
    """
    index = file.with_suffix(".idx")
    if index == file or not index.is_file():
        return None
    if is_index(index):
        return index
    kind = kind_of(read_head(index), is_text=False)
    if kind is not None and "index" in kind.name:
        raise _refuse(index, f"is {kind.name}", kind.way_out)
    return None


def leave_out_indexes(files: list[Path]) -> list[Path]:
    """Take the indexes of Megatron out of the files of a glob.

    Raises: ValueError for an index without its token file.
    """
    indexes = {file for file in files if is_index(file)}
    for index in sorted(indexes - {file.with_suffix(".idx") for file in files if file not in indexes}):
        raise _refuse(index, f"is {MEGATRON_INDEX.name}, without its token file", f"give {index.with_suffix('.bin')}")
    return [file for file in files if file not in indexes]


def _read_numpy(file: Path, size: int) -> TokenLayout:
    read_header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    try:
        with file.open("rb") as stream:
            shape, _, dtype = read_header[np.lib.format.read_magic(stream)[0]](stream)
            offset = stream.tell()
    except Exception as error:  # NumPy parses the header as Python, and raises what its tokenizer raises
        raise _refuse(file, f"has a header of NumPy that cannot be read ({error})", "write it again") from error
    if dtype.kind not in "iu" or len(shape) != 1:
        problem = f"is {NUMPY.name} of {dtype} with the shape {shape}, not a list of integers"
        raise _refuse(file, problem, "save a flat array of uint16 or uint32")
    return _whole(file, size, TokenLayout(dtype, offset, shape[0]), "NumPy's header")


def _read_megatron(file: Path, size: int, index_file: Path) -> TokenLayout:
    index = read_index(index_file)
    layout = TokenLayout(index.dtype, 0, index.num_bytes() // index.dtype.itemsize, index)
    return _whole(file, size, layout, f"Megatron's index {index_file}")


def _read_llm_c(file: Path, head: bytes, size: int) -> TokenLayout | None:
    """Read the header of llm.c: 256 integers, of which the first are magic, version and number of ids."""
    magic, version, num_tokens = [*np.frombuffer(head[: len(head) // 4 * 4], "<u4")[:3].tolist(), 0, 0, 0][:3]
    if size < _LLM_C_HEADER_BYTES or _LLM_C.get(magic, ("", ""))[0] != version:
        return None
    layout = TokenLayout(np.dtype(_LLM_C[magic][1]).newbyteorder("<"), _LLM_C_HEADER_BYTES, num_tokens)
    return _whole(file, size, layout, "llm.c's header")


def _whole(file: Path, size: int, layout: TokenLayout, says: str) -> TokenLayout:
    """Compare the size of a file with the one that its header or index gives."""
    expected = layout.offset_bytes + layout.num_tokens * layout.dtype.itemsize
    if size != expected:
        problem = f"has {size:,} bytes, and {says} gives it {layout.num_tokens:,} ids of {layout.dtype}: "
        raise _refuse(file, f"{problem}{expected:,} bytes", "write or copy the file again")
    return layout


def _check_width(file: Path, size: int, token_dtype: str) -> None:
    """Refuse text, and ids that are wider than `data.token_dtype`."""
    width_bytes = np.dtype(token_dtype).itemsize
    data = np.concatenate(
        [
            np.fromfile(file, np.uint8, PROBE_TOKENS * width_bytes, offset=start // 8 * 8)
            for start in sorted({0, max(0, size // 2), max(0, size - PROBE_TOKENS * width_bytes)})
        ]
    )
    data = data[: len(data) // 8 * 8]
    if len(data) < _MIN_PROBE_BYTES:
        return
    if _is_text(data):
        raise _refuse(file, "contains text, not token ids", 'set data.source = "text", or give files of ids')
    found = _stored_width_bytes(data)
    if width_bytes < found == 4:
        problem = f"every second id is 0 or small when read as data.token_dtype = '{token_dtype}'"
        raise _refuse(file, f"is a file of 32-bit ids: {problem}", "set data.token_dtype to 'uint32'")
    if width_bytes < found:
        convert = f'np.fromfile("{file.name}", "<i8").astype("<u4").tofile(...)'
        problem = f"the upper 32 of every 64 bits are 0, so every second id is 0 as data.token_dtype = '{token_dtype}'"
        raise _refuse(file, f"is a file of 64-bit ids: {problem}", f"convert it: {convert}")


def _is_text(data: np.ndarray) -> bool:
    """Whether bytes are UTF-8 without control characters. The pieces may be cut within a character."""
    lost = len(data) - len(data.tobytes().decode("utf-8", errors="ignore").encode())
    return not _CONTROL_BYTES[data].any() and lost <= len(data) // 100


def _stored_width_bytes(data: np.ndarray) -> int:
    """The width of integers whose upper half never has more than a small number, but whose lower half has: 8, 4 or,
    where nothing tells, 0."""
    low, high = data.view("<u4")[0::2], data.view("<u4")[1::2]
    if low.any() and not high.any():
        return 8
    low, high = data.view("<u2")[0::2], data.view("<u2")[1::2]
    is_small = high.max() <= _LARGEST_HIGH_HALF and low.max() > 255
    return 4 if is_small or (low.any() and not high.any()) else 0


def _refuse(file: Path, problem: str, way_out: str) -> ValueError:
    return ValueError(f"data.path: {file} {problem}; {way_out}")
