"""The README keeps its word: its Python examples run, its files exist."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_examples_run() -> None:
    results = doctest.testfile(str(README), module_relative=False)
    assert results.attempted >= 8
    assert results.failed == 0


def test_dispatcher_of_ones_own_is_known_to_a_script(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (dispatcher,) = (text for text in examples if "register_dispatcher(" in text)
    (script,) = (text for text in examples if "from titan_moe.cli import main" in text)
    (tmp_path / "my_dispatcher.py").write_text(dispatcher)
    (tmp_path / "my_train.py").write_text(script)
    command = ["my_train.py", "check", README.with_name("recipes") / "quickstart.toml", "--nproc=2", "--parallel.ep=2"]
    options = ["--train.micro_batch_sequences=4", "--parallel.dispatcher=gathering"]
    run = subprocess.run(
        [sys.executable, *command, *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(README.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0 and "dispatcher gathering" in run.stdout, run.stderr


def test_named_files_exist() -> None:
    text = README.read_text()
    named = set(re.findall(r"recipes/[\w/.]+\.toml|tools/\w+\.\w+|\]\(([\w/]+\.md)\)", text)) - {""}
    named |= {f"titan_moe/{path}" for path in re.findall(r"`((?:train|models|layers|kernels)/[\w/]+\.py)`", text)}
    assert len(named) >= 8
    missing = [name for name in named if not (README.parent / name).exists()]
    assert not missing


def test_files_named_in_readmes_of_rooms_exist() -> None:
    readmes = list((README.parent / "titan_moe").rglob("README.md"))
    assert README.parent / "titan_moe" / "plan" / "pipeline" / "README.md" in readmes
    for readme in readmes:
        named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", readme.read_text()))
        places = (readme.parent, README.parent / "titan_moe", README.parent, *readme.parent.glob("*/"))
        assert len(named) >= 8
        assert not [name for name in named if not any((place / name).exists() for place in places)], readme
