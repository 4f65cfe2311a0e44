"""What an installed package holds beside its code."""

import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest

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
