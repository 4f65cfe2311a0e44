"""Know the weights that a run began with, where its checkpoints lack those that are frozen."""

import hashlib
import os
from pathlib import Path

ENDINGS = (".safetensors", ".distcp")
SAMPLE_BYTES = 1 << 20
NUM_SAMPLES = 3
"""Of a file: its start, its middle and its end."""


def fingerprint(folder: Path) -> str:
    """Describe the content of the files of weights in a folder, wherever it lies: their number, their size, and a hash
    of samples. It reads some megabytes of each."""
    files = sorted(file for file in folder.iterdir() if file.name.endswith(ENDINGS))
    sha256, num_bytes = hashlib.sha256(), 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            num_bytes += size
            sha256.update(size.to_bytes(8, "little"))
            for number in range(NUM_SAMPLES):
                file.seek(max(size - SAMPLE_BYTES, 0) * number // (NUM_SAMPLES - 1))
                sha256.update(file.read(SAMPLE_BYTES))
    return f"{len(files)} files, {num_bytes:,} bytes, sha256 of samples {sha256.hexdigest()[:32]}"
