"""Write rows as a file of any ending."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
ALL_ENDINGS = tuple(ending + compressed for compressed in ("", ".gz", ".zst") for ending in ENDINGS)


def write_rows(path: Path, rows: list[dict[str, Any]], *, as_array: bool = False) -> Path:
    """Write rows by the ending of the path; `.json` as lines or as an array. Tables have several groups of rows."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    sink = pa.BufferOutputStream()
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), sink, row_group_size=7)
        data = sink.getvalue().to_pybytes()
    elif name.endswith(".arrow"):
        table = pa.Table.from_pylist(rows)
        with (pa.ipc.new_file if as_array else pa.ipc.new_stream)(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
        data = sink.getvalue().to_pybytes()
    elif name.endswith(".json") and as_array:
        data = json.dumps(rows, indent=1).encode()
    else:
        data = "\n".join(map(json.dumps, rows)).encode()
    path.write_bytes(compressed(data, path.suffix))
    return path


def compressed(data: bytes, ending: str) -> bytes:
    """Bytes as a file of `.gz` or `.zst` has them, in two pieces one after the other; others as they are."""
    middle = len(data) // 2
    if ending == ".gz":
        return gzip.compress(data[:middle]) + gzip.compress(data[middle:])
    if ending == ".zst":
        return b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in (data[:middle], data[middle:]))
    return data
