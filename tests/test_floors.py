"""The house stands: a room imports lower floors only, and some rooms keep stricter promises."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "titan_moe"
FLOORS = [
    {"config", "plan"},
    {"kernels", "titan", "parameters"},
    {"dispatch", "checkpoint", "optim", "data", "profile"},
    {"layers"},
    {"models", "precision", "memory", "compile", "metrics"},
    {"parallel"},
    {"train"},
    {"cli"},
]
ROOF = len(FLOORS) - 1
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(file: Path) -> str:
    name = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "cli" if name in ("__main__", "__init__") else name


def imports_of(source: str) -> Iterator[str]:
    """Every module that a file may import, also inside functions; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the floor"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def breaches(room: str, source: str) -> Iterator[str]:
    for name in imports_of(source):
        first, _, rest = name.partition(".")
        if first == "titan_moe":
            other = rest.partition(".")[0]
            may_meet = other == room or {other, room} == FLOORS[0]
            if not may_meet and FLOOR_OF.get(other, ROOF) >= FLOOR_OF[room]:
                yield f"{room} (floor {FLOOR_OF[room]}) imports {name} (floor {FLOOR_OF.get(other, ROOF)})"
        elif room in FLOORS[0] and first not in sys.stdlib_module_names:
            yield f"{room} imports {name}: floor 0 knows the standard library only"
        if room == "kernels" and name.startswith("torch.distributed"):
            yield f"kernels import {name}: a kernel knows one device"
        if room != "titan" and first == "torchtitan":
            yield f"{room} imports {name}: titan/ is the one door to torchtitan"


def test_saved_tensors_are_looked_at_once() -> None:
    """Recompute makes them at the first look, and refuses a second."""
    for file in FILES:
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                looks = [n for n in ast.walk(function) if isinstance(n, ast.Attribute) and n.attr == "saved_tensors"]
                assert len(looks) <= 1, f"{file.name}: {function.name} looks at saved_tensors {len(looks)} times"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_file_stays_on_its_floor(file: Path) -> None:
    room = room_of(file)
    assert room in FLOOR_OF, f"{room} has no floor: give it one in FLOORS and in the picture of the house"
    assert list(breaches(room, file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("layers", "from titan_moe.parallel.mesh import Meshes"),
        ("models", "import titan_moe.metrics.meter"),  # neighbours do not meet
        ("layers", "def f():\n    from titan_moe import train"),
        ("plan", "import torch"),
        ("kernels", "from torch import distributed"),
        ("train", "from torchtitan.tools import utils"),
    ],
)
def test_a_breach_is_seen(room: str, line: str) -> None:
    assert len(list(breaches(room, line))) == 1


def test_config_and_plan_know_each_other() -> None:
    assert list(breaches("plan", "from titan_moe.config import Recipe\nimport math")) == []
