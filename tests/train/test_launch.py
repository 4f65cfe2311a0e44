"""The ranks' words and exit codes are those of the command that started them."""


def test_launch_reports_a_refusal_once(tiny) -> None:
    missing = ("--data.source=text", "--data.path=nowhere/*", "--model.vocab_size=256")
    process = tiny().start("--nproc", "2", *missing)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert said.count("titan-moe: 1 problem\n  data.path = 'nowhere/*' matches no file") == 1
    assert "Traceback" not in said and "torch/distributed" not in said


def test_launch_ranks_with_other_data_draw_other_numbers(tiny, tmp_path) -> None:
    (tmp_path / "drawing.py").write_text(
        "import os, pathlib, torch\n"
        "from titan_moe.models.transformer import Transformer\n"
        "class Model(Transformer):\n"
        "    def forward(self, *args, **kwargs):\n"
        "        pathlib.Path(os.environ['RANK']).write_text(str(torch.rand(()).item()))\n"
        "        return super().forward(*args, **kwargs)\n"
    )
    process = tiny("--train.steps=1").start("--nproc", "2", "--model.class=drawing:Model", folder=tmp_path)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    assert (tmp_path / "0").read_text() != (tmp_path / "1").read_text()


def test_launch_fails_with_a_killed_rank(tiny, tmp_path) -> None:
    (tmp_path / "suicidal.py").write_text(
        "import os, signal\n"
        "from titan_moe.models.transformer import Transformer\n"
        "class Model(Transformer):\n"
        "    def __init__(self, *args, **kwargs):\n"
        "        os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL)\n"
        "        super().__init__(*args, **kwargs)\n"
    )
    process = tiny().start("--nproc", "2", "--model.class=suicidal:Model", folder=tmp_path)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + 9
    assert "titan-moe: rank 1 was ended by SIGKILL" in said
