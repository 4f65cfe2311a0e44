"""What an installed package holds beside its code, and the names that it exports."""

import ast
import inspect
import pydoc
import subprocess
import sys
import typing
import zipfile
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from shutil import copy, copytree, ignore_patterns
from typing import Any

import pytest

import titan_moe

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_wheel_brings_the_tables_of_measured_kernels(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    copytree(ROOT / "titan_moe", source / "titan_moe", ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, source)
    build = "import setuptools.build_meta as backend, sys; backend.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    tables = {str(path.relative_to(ROOT)) for path in (ROOT / "titan_moe").rglob("*.toml")}
    assert "titan_moe/plan/tables/nvidia_h200.toml" in tables and tables <= files
    assert "titan_moe/py.typed" in files


def test_type_checkers_see_the_names_that_load_on_first_use() -> None:
    body = ast.parse(Path(titan_moe.__file__).read_text()).body
    (checked,) = (statement for statement in body if isinstance(statement, ast.If))
    imports = {name.asname: one.module for one in checked.body for name in one.names if name.asname == name.name}
    assert imports == titan_moe._MODULES
    for name in titan_moe.__all__:
        assert getattr(titan_moe, name) is not None


OF_ONE_DISPATCHER = {"AllGatherExchange", "AllToAllExchange", "LocalExchange", "PendingRows", "SymmMemExchange"}
INTERNAL = {"Arena", "Collectives", "DelayedWeights", "KVCache", "LayerLoads", "Permutation"}
"""What parts of this package pass to each other."""


def _classes_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and hint.__module__.startswith("titan_moe"):
        yield hint
    for argument in typing.get_args(hint):
        yield from _classes_in(argument)


@pytest.mark.parametrize("name", titan_moe.__all__)
def test_what_signatures_name_is_exported(name: str) -> None:
    exported = getattr(titan_moe, name)
    hints = [typing.get_type_hints(exported)] if is_dataclass(exported) or inspect.isfunction(exported) else []
    methods = vars(exported).items() if inspect.isclass(exported) and not is_dataclass(exported) else ()
    public = (method for key, method in methods if key == "__init__" or not key.startswith("_"))
    hints += [typing.get_type_hints(method) for method in public if inspect.isfunction(method)]
    named = {one.__name__ for of_one in hints for hint in of_one.values() for one in _classes_in(hint)}
    assert named - OF_ONE_DISPATCHER - INTERNAL <= set(titan_moe.__all__)


def test_help_lists_the_fields_of_a_section() -> None:
    text = pydoc.render_doc(titan_moe.MoEConfig, renderer=pydoc.plaintext)
    assert "top_k = 2" in text and "Number of experts per token (K)." in text.replace("\n", " ")
