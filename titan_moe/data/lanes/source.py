"""Open the stream of a recipe in lanes."""

from collections.abc import Callable
from functools import partial
from typing import Any

from titan_moe.config import Recipe
from titan_moe.config.data_files import Found
from titan_moe.config.train import DataConfig
from titan_moe.data import hub, json_lines
from titan_moe.data.bad_rows import BadRows
from titan_moe.data.chat.source import open_encoder
from titan_moe.data.chat.stream import ConversationStream
from titan_moe.data.documents import resolve
from titan_moe.data.lanes.cut import Part, cut
from titan_moe.data.lanes.lane import Lane, PackedPart
from titan_moe.data.lanes.samples import LaneSamples
from titan_moe.data.row_text import PLACE, Convert, RowTexts
from titan_moe.data.stream import Documents, OpenDocuments, StreamedSamples
from titan_moe.data.tokenizer import Tokenizer

_WINDOW_SEQUENCES = 16
"""Of conversations that are packed together in a lane."""

OpenPart = Callable[[BadRows, int, dict[str, Any] | None], Documents]
"""(bad_rows, num_read, place) -> a pass over the documents of a part, as `OpenDocuments`."""


def open_lanes(recipe: Recipe, tokenizer: Tokenizer, bad_rows: BadRows, num_reserved: int) -> LaneSamples:
    """Divide the rows after the first `num_reserved` documents into lanes. None of them is opened yet.

    Raises: ValueError, FileNotFoundError or ImportError, each naming the field of `[data]` to change.
    """
    seq_len, convert = recipe.train.seq_len_tokens, None
    if recipe.data.format == "chat":
        convert = open_encoder(recipe, tokenizer, bad_rows).encode
    parts = _parts(*resolve(recipe.data), convert, num_reserved)
    block = recipe.data.shuffle_buffer_sequences if recipe.data.is_shuffled else 1

    def open_lane(number: int) -> Lane:
        bad_rows_of_lane = bad_rows.of_source(f"lane {number}")
        documents: OpenDocuments = partial(parts[number], bad_rows_of_lane)
        part: PackedPart = StreamedSamples(documents, tokenizer, seq_len)
        if convert is not None:
            part = ConversationStream(documents, seq_len, window_sequences=_WINDOW_SEQUENCES)
        return Lane(part, number, len(parts), recipe.run.seed, block, seq_len, bad_rows_of_lane)

    return LaneSamples(open_lane, len(parts))


def _parts(data: DataConfig, found: Found, convert: Convert | None, num_reserved: int) -> list[OpenPart]:
    if found.kind != "datasets":
        return _parts_of_files(data, found, convert, num_reserved)
    if hub.is_read_by_line(data, convert is not None):
        return _parts_of_files(data, Found("json", json_lines.files_of(data)), convert, num_reserved)
    dataset = hub.load(data)
    num_lanes = min(data.stream_lanes, hub.num_shards(dataset))

    def open_(number: int, skipped: int, bad_rows: BadRows, num_read: int, place: Any) -> Documents:
        shard = dataset.shard(num_shards=num_lanes, index=number)
        return hub.DocumentStream(data, bad_rows, num_read or skipped, place, convert, shard)

    return [partial(open_, number, skipped) for number, skipped in _reserve(open_, num_lanes, num_reserved)]


def _reserve(open_: Callable[..., Documents], num_lanes: int, num_reserved: int) -> list[tuple[int, int]]:
    """The shards that are not reserved as a whole, and how many rows of each are."""
    for number in range(num_lanes):
        if num_reserved == 0:
            return [(number, 0) for number in range(number, num_lanes)]
        found = open_(number, 0, BadRows("skip"), num_reserved, None)
        has_more = found.num_read == num_reserved and found.read() is not None
        if has_more:
            return [(number, num_reserved), *((other, 0) for other in range(number + 1, num_lanes))]
        num_reserved -= min(found.num_read, num_reserved)
    raise ValueError(
        "data.path has no document after those reserved for validation; add data, or lower validation.num_sequences"
    )


def _parts_of_files(data: DataConfig, found: Found, convert: Convert | None, num_reserved: int) -> list[OpenPart]:
    start = [0, 0, 0]
    if num_reserved:
        reserved = RowTexts(data, found.files, found.kind, BadRows("skip"), num_reserved, None, convert)
        start = reserved.place()[PLACE]

    def open_(part: Part, bad_rows: BadRows, num_read: int, place: Any) -> Documents:
        return RowTexts(data, found.files, found.kind, bad_rows, num_read, place, convert, part)

    return [partial(open_, part) for part in cut(found.files, found.kind, start, data.stream_lanes)]
