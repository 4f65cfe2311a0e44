"""Which files of a folder belong to which split, as `datasets` and the Hugging Face hub name them."""

import re
from pathlib import Path

DICT_FILE = "dataset_dict.json"
"""Beside the folders of splits, as `save_to_disk` of a `DatasetDict` writes them."""
_ALIASES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""A word of a name -> its split."""
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\b")
_WORD = re.compile(r"[a-z]+")


def of_split(names: list[Path], dicts: list[Path], split: str, key: str, path: str) -> tuple[list[Path], str]:
    """The files of `split` among those of a folder, and its name. All files, and the name of their one split or none,
    where they do not belong to several. `dicts` are the files DICT_FILE among them.

    Raises: ValueError if they belong to several splits, and none is the wanted one.
    """
    splits = {name: _split_of(name, dicts) for name in names}
    found = sorted(set(splits.values()))
    if not found or "" in found:
        return names, ""
    if len(found) == 1:
        return names, found[0]
    if split not in found:
        raise ValueError(
            f"{key} = {path!r} is a folder with the splits {', '.join(found)}, and data.split = {split!r}; set "
            "data.split to one of them, or give a glob with the files of several"
        )
    return [name for name in names if splits[name] == split], split


def _split_of(name: Path, dicts: list[Path]) -> str:
    """The split that a name says: by a folder or by the first word of the file. Empty if it says none."""
    for file in dicts:
        if name.is_relative_to(file.parent):
            return name.relative_to(file.parent).parts[0]
    for folder in name.parts[:-1]:
        if folder in _ALIASES:
            return _ALIASES[folder]
    shard = _SHARD.match(name.name)
    word = _WORD.match(name.name)
    if word is None or word[0] not in _ALIASES:
        return ""
    return _ALIASES[word[0]] if shard is None or shard[1] == word[0] else shard[1]
