"""Ranks started by `--nproc`: their messages and exit codes are those of the command."""

import pytest

pytestmark = pytest.mark.slow


def test_launch_prints_a_recipe_error_once(tiny) -> None:
    missing = ("--data.source=text", "--data.path=nowhere/*", "--model.vocab_size=256")
    process = tiny().start("--nproc", "2", *missing)
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert stderr.count("titan-moe: 1 problem\n  data.path = 'nowhere/*' matches no file") == 1
    assert "Traceback" not in stderr and "torch/distributed" not in stderr


def test_launch_ranks_have_different_random_numbers(tiny, tmp_path) -> None:
    (tmp_path / "drawing.py").write_text(
        "import os, pathlib, torch\n"
        "from titan_moe.models.transformer import Transformer\n"
        "class Model(Transformer):\n"
        "    def forward(self, *args, **kwargs):\n"
        "        pathlib.Path(os.environ['RANK']).write_text(str(torch.rand(()).item()))\n"
        "        return super().forward(*args, **kwargs)\n"
    )
    process = tiny("--train.steps=1").start("--nproc", "2", "--model.class=drawing:Model", folder=tmp_path)
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 0, stderr
    assert (tmp_path / "0").read_text() != (tmp_path / "1").read_text()


def test_launch_returns_the_signal_of_a_killed_rank(tiny, tmp_path) -> None:
    (tmp_path / "killed.py").write_text(
        "import os, signal\n"
        "from titan_moe.models.transformer import Transformer\n"
        "class Model(Transformer):\n"
        "    def __init__(self, *args, **kwargs):\n"
        "        os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL)\n"
        "        super().__init__(*args, **kwargs)\n"
    )
    process = tiny().start("--nproc", "2", "--model.class=killed:Model", folder=tmp_path)
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + 9
    assert "titan-moe: rank 1 was ended by SIGKILL" in stderr
