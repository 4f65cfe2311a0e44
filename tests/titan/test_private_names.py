"""Names that PyTorch and torchtitan keep to themselves: all that the package uses are listed, exist, and are used."""

import ast
import importlib
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.private_names import NEEDS_CUDA, OF_THE_LIBRARY, PRIVATE_NAMES, TORCH, TORCHTITAN

from titan_moe.titan import import_torchtitan
from titan_moe.versions import installed_release, release

PACKAGE = Path(__file__).parents[2] / "titan_moe"
TREES = [ast.parse(file.read_text("utf-8")) for file in sorted(PACKAGE.rglob("*.py"))]
PACKAGES = ("torch", "torchtitan")
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def origins_of(tree: ast.AST) -> dict[str, str]:
    """What the names of a file stand for: of imports, also inside functions, and of assigned members of modules."""
    origins: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                name = each.asname or each.name.partition(".")[0]
                origins[name] = each.name if each.asname else name
        elif isinstance(node, ast.ImportFrom):
            origins |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if origin := dotted(node.value, origins):
                origins.setdefault(node.targets[0].id, origin)
    return origins


def dotted(node: ast.AST, origins: dict[str, str]) -> str:
    """The full name of a member of an imported module; empty for any other expression."""
    if isinstance(node, ast.Name):
        return origins.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner, member = dotted(node.value, origins), node.attr
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
        owner, member = dotted(node.args[0], origins), str(getattr(node.args[1], "value", ""))
    else:
        return ""
    return f"{owner}.{member}" if owner and member else ""


def own_members(trees: list[ast.Module]) -> set[str]:
    """What objects of the package's own classes have."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    stored = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    declared = [each for node in nodes if isinstance(node, ast.ClassDef) for each in node.body]
    methods = {each.name for each in declared if isinstance(each, ast.FunctionDef)}
    fields = {
        each.target.id for each in declared if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    return OF_NAMED_TUPLES | stored | methods | fields


def private_names(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Every private name of other packages in a file: full, or with a leading point for members of any object."""
    origins = origins_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{each.name}" for each in node.names]
        else:
            found = [dotted(node, origins)]
        for name in filter(None, found):
            if name.partition(".")[0] in PACKAGES and any(map(is_private, name.split("."))):
                yield name
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not dotted(node, origins):
            is_of_a_base = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
            if is_of_a_base or node.attr not in own:
                yield f".{node.attr}"


def unlisted(trees: list[ast.Module], listed: set[str]) -> set[str]:
    """Private names that are not in the list, nor members of listed ones, nor modules of listed ones."""
    own = own_members(trees) | OF_THE_LIBRARY
    found = {name for tree in trees for name in private_names(tree, own)}
    return {
        name
        for name in found
        if not any(f"{name}.".startswith(f"{known}.") or known.startswith(f"{name}.") for known in listed)
        and not (name.startswith(".") and any(known.endswith(name) for known in listed))
    }


def unused(trees: list[ast.Module], listed: set[str]) -> set[str]:
    """Listed names of which no file has the last part: as a member, an import, a keyword or a string."""
    used: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        for field in ("attr", "arg", "value"):
            if isinstance(word := getattr(node, field, None), str):
                used.add(word)
        if isinstance(node, ast.Import | ast.ImportFrom):
            used |= {each.name.rpartition(".")[2] for each in node.names}
    return {name for name in listed if name.rpartition(".")[2] not in used}


def exists(name: str) -> bool:
    """Whether an installed package has it: the package, a module, a class and a member, each of the one before."""
    first, *owners, member = name.split(".")
    owner: Any = import_torchtitan() if first == "torchtitan" else importlib.import_module(first)
    try:
        for depth, part in enumerate(owners, 2):
            if isinstance(owner, ModuleType) and not hasattr(owner, part):
                importlib.import_module(".".join(name.split(".")[:depth]))
            owner = getattr(owner, part)
    except (ImportError, AttributeError):
        return False
    assert not isinstance(getattr(owner, member, None), ModuleType), f"{name} is a module: list what is used of it"
    return has(owner, member)


def has(owner: Any, name: str) -> bool:
    """Whether it has a member; of a class also one that its methods give to each object."""
    if hasattr(owner, name):
        return True
    for base in getattr(owner, "__mro__", ())[:-1]:
        given = f"self.{name} ", f"self.{name}:", f"self.{name},"
        if name in vars(base).get("__annotations__", {}) or any(each in inspect.getsource(base) for each in given):
            return True
    return False


def is_expected(name: str) -> bool:
    """Whether the installed version of its package should have it."""
    first, last = map(release, PRIVATE_NAMES[name])
    return first <= installed_release(name.partition(".")[0])[:2] <= last


def test_listed_names_exist_in_the_versions_that_the_list_says() -> None:
    names = {name: is_expected(name) for name in PRIVATE_NAMES if name not in NEEDS_CUDA or torch.version.cuda}
    assert {name: exists(name) for name in names} == names


def test_the_list_ends_with_the_newest_version_that_may_be_installed() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    bounds = {each.partition(">=")[0]: each.rpartition("<")[2] for each in project["dependencies"]}
    for package, (_, last) in (("torch", TORCH), ("torchtitan", TORCHTITAN)):
        major, minor = release(last)
        assert (major, minor + 1) == release(bounds[package])


def test_all_private_names_are_listed() -> None:
    assert unlisted(TREES, set(PRIVATE_NAMES)) == set()


def test_all_listed_names_are_used() -> None:
    assert unused(TREES, set(PRIVATE_NAMES)) == set()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._new(1)", "torch._new"),
        ("import torch as t\nt.ops.aten._new(1)", "torch.ops.aten._new"),
        ("def f():\n    from torch._new import g", "torch._new.g"),
        ("import torch._new.module as module\nmodule.g()", "torch._new.module.g"),
        ("import torch\naten = torch.ops._new\naten.g(1)", "torch.ops._new.g"),
        ("import torch\ng = getattr(torch._C, '_new', None)", "torch._C._new"),
        ("class A:\n    def f(self):\n        super()._new()", "._new"),
        ("def f(x):\n    return x._new", "._new"),
    ],
)
def test_a_private_name_is_found(source: str, name: str) -> None:
    trees, listed = [ast.parse(source)], {"torch.A" + name if name.startswith(".") else name}
    assert name in unlisted(trees, {"torch._old"})
    assert unlisted(trees, listed) == set() == unused(trees, listed)


def test_own_names_and_those_of_the_library_are_not_private_names_of_torch() -> None:
    own = "import os\nclass A:\n    _b: int\n    def _c(self): self._d = self._b\ndef f(a): a._c(a._d); os._exit(1)"
    assert unlisted([ast.parse(own)], set()) == set()


def test_a_name_that_is_used_no_more_is_found() -> None:
    assert unused([ast.parse("import torch")], {"torch._old"}) == {"torch._old"}
