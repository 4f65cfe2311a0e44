"""torchao: one version bound in the package and in its requirements."""

import tomllib
from pathlib import Path

from titan_moe.titan.torchao import TORCHAO


def test_the_bound_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert TORCHAO in project["dependencies"]
