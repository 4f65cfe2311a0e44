"""The house stands: a room imports lower floors only, no files import in circles, some rooms keep stricter promises."""

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "titan_moe"
FLOORS = [
    {"config", "plan", "versions"},
    {"kernels", "titan", "parameters"},
    {"dispatch", "checkpoint", "optim", "data", "profile", "run"},
    {"layers"},
    {"models", "precision", "memory", "adapters", "compile", "metrics"},
    {"parallel"},
    {"training"},
    {"entry", "arguments"},
    {"cli"},
]
ROOF = len(FLOORS) - 1
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))
SOURCES = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file.read_text("utf-8") for file in FILES}
"""By module name; of a package `titan_moe.dispatch.__init__`."""


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
            may_meet = other == room or (room, other) == ("plan", "config")
            if not may_meet and FLOOR_OF.get(other, ROOF) >= FLOOR_OF[room]:
                yield f"{room} (floor {FLOOR_OF[room]}) imports {name} (floor {FLOOR_OF.get(other, ROOF)})"
        elif room in FLOORS[0] and first not in sys.stdlib_module_names:
            yield f"{room} imports {name}: floor 0 knows the standard library only"
        if room == "kernels" and name.startswith("torch.distributed"):
            yield f"kernels import {name}: a kernel knows one device"
        if room != "titan" and first == "torchtitan":
            yield f"{room} imports {name}: titan/ is the one door to torchtitan"


def home_of(name: str, sources: Mapping[str, str]) -> str | None:
    """The file that an imported name comes from, past packages that hand it on; None if it is none of these."""
    module, _, attribute = name.rpartition(".")
    for known in (name, module):
        if known in sources:
            return known
    handed_on = imports_of(sources.get(f"{module}.__init__", ""))
    origins = (home_of(origin, sources) for origin in handed_on if origin.endswith(f".{attribute}") and origin != name)
    return next(origins, None)


def graph_of(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Which files each file imports, also inside functions. Packages' own files only hand names on."""
    files = [module for module in sources if not module.endswith(".__init__")]
    return {
        module: {home for name in imports_of(sources[module]) if (home := home_of(name, sources))} for module in files
    }


def circle_in(sources: Mapping[str, str]) -> list[str]:
    """Files of which each imports the one before it, the first and the last the same; empty if there is no circle."""
    try:
        TopologicalSorter(graph_of(sources)).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def reached_from(room: str, sources: Mapping[str, str]) -> set[str]:
    """The files that those of a room import, and what these import."""
    graph = graph_of(sources)
    reached = {module for module in graph if module.startswith(f"{room}.")}
    while more := {home for module in reached for home in graph[module]} - reached:
        reached |= more
    return reached


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
    assert room in FLOOR_OF, f"{room} has no floor: give it one in FLOORS and in the README's list of levels"
    assert list(breaches(room, file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("layers", "from titan_moe.parallel.mesh import Meshes"),
        ("models", "import titan_moe.metrics.meter"),  # neighbours do not meet
        ("layers", "def f():\n    from titan_moe import train"),
        ("plan", "import torch"),
        ("kernels", "from torch import distributed"),
        ("training", "from torchtitan.tools import utils"),
    ],
)
def test_a_breach_is_seen(room: str, line: str) -> None:
    assert len(list(breaches(room, line))) == 1


def test_plan_knows_config_and_not_the_other_way_round() -> None:
    assert list(breaches("plan", "from titan_moe.config import Recipe\nimport math")) == []
    assert len(list(breaches("config", "from titan_moe.plan.cost.count import count_parameters"))) == 1


def test_no_files_import_in_circles() -> None:
    assert circle_in(SOURCES) == []


@pytest.mark.parametrize(
    ("sources", "files"),
    [
        (
            {"titan_moe.a.b": "def f():\n    from titan_moe.a.c import g", "titan_moe.a.c": "import titan_moe.a.b"},
            {"titan_moe.a.b", "titan_moe.a.c"},
        ),
        (
            {
                "titan_moe.a.__init__": "from titan_moe.a.b import X",
                "titan_moe.a.b": "from titan_moe.c import d",
                "titan_moe.c.d": "from titan_moe.e import f",
                "titan_moe.e": "from titan_moe.a import X",
            },
            {"titan_moe.a.b", "titan_moe.c.d", "titan_moe.e"},
        ),
        (
            {
                "titan_moe.a.__init__": "from titan_moe.a.b import X\nfrom titan_moe.a.c import Y",
                "titan_moe.a.b": "from titan_moe.a import Y",
                "titan_moe.a.c": "",
            },
            set(),
        ),
    ],
    ids=["inside a function", "past a package", "a package is no file"],
)
def test_a_circle_is_found(sources: dict[str, str], files: set[str]) -> None:
    circle = circle_in(sources)
    assert set(circle) == files
    assert circle[:1] == circle[-1:]


def test_gemms_of_one_gpu_do_not_import_what_moves_rows() -> None:
    reached = reached_from("titan_moe.kernels.experts", SOURCES)
    assert "titan_moe.kernels.permute.rows" in reached, "what files of the room import is seen"
    assert [module for module in sorted(reached) if module.startswith("titan_moe.kernels.symm_mem.")] == []


def test_what_is_imported_on_the_way_is_reached() -> None:
    sources = {"titan_moe.a.b": "import titan_moe.c", "titan_moe.c": "from titan_moe.d.e import f", "titan_moe.d.e": ""}
    assert "titan_moe.d.e" in reached_from("titan_moe.a", sources)
