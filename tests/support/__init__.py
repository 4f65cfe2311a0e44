"""What several files of tests share: processes for ranks, the interpreter, inputs, references.

A test imports from here (`from support import load`); `load` gives it what another file of tests defines.
"""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parents[1]


@cache
def load(path: str) -> ModuleType:
    """A file of tests as a module, by its path below tests/ without the ending: `distributed/test_one_loss`."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), TESTS / f"{path}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
