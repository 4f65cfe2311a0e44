"""Write a small file as a whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace the content of a file. On a full disk, or if the process is killed, the old content stays."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    os.replace(new, path)
