"""Read PyTorch's flight recorder: the collective that this rank has not finished."""

import json
from typing import Any

import torch

DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of torch.distributed's extension: NCCL's recorder, absent in a build without CUDA, and that of gloo. Both
are on by default; TORCH_FR_BUFFER_SIZE (older: TORCH_NCCL_TRACE_BUFFER_SIZE) is their number of entries, 0 for none."""


def pending_collective() -> str:
    """Describe the oldest unfinished collective of this rank: name, number and group; empty without one.

    May block: call it from a thread that may be left behind. Returns an empty string too if the recorder is off.
    """
    entries = [entry for entry in _entries() if not entry.get("retired") and entry.get("state") != "completed"]
    if not entries:
        return ""
    oldest = min(entries, key=lambda entry: entry["time_created_ns"])
    number = oldest.get("collective_seq_id") or oldest.get("p2p_seq_id")
    group = oldest.get("process_group") or ["?", ""]
    return f"{oldest['profiling_name']}, number {number} of group {' '.join(filter(None, group))}"


def _entries() -> list[dict[str, Any]]:
    module = getattr(torch._C, "_distributed_c10d", None)
    entries: list[dict[str, Any]] = []
    for name in DUMPS:
        if (dump := getattr(module, name, None)) is not None:
            entries += json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    return entries
