"""The commands around Hugging Face checkpoints: import, export, recipe, and a run between two of them."""

import json
from pathlib import Path

import pytest
from support.hf_twins import assert_equal_in_transformers, twin

from titan_moe import cli
from titan_moe.checkpoint import hf_convert
from titan_moe.config import load_recipe


@pytest.mark.parametrize("name", ["qwen3_moe-tied", "deepseek_v3"])
def test_an_import_and_its_export_are_the_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_convert, "MAX_CHUNK_BYTES", 4_000)  # tensors are cut into slices
    theirs = twin(name)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    imported, out = tmp_path / "imported", tmp_path / "out"
    assert cli.main(["import", str(tmp_path / "theirs"), str(imported)]) == 0
    assert cli.main(["export", str(imported), str(out)]) == 0
    assert_equal_in_transformers(out, theirs)
    assert (out / "config.json").read_text() and (out / "generation_config.json").exists()
    assert cli.main(["export", str(imported), str(tmp_path / "bf16"), "--dtype", "bf16"]) == 0
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_cannot_be_converted_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    twin("mixtral").save_pretrained(theirs)
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(config | {"num_local_experts": 6}))
    assert cli.main(["import", str(theirs), str(out)]) == 2
    assert "missing: model.layers.0.block_sparse_moe.experts.5.w1.weight" in capsys.readouterr().err
    assert cli.main(["export", str(theirs), str(out)]) == 2
    assert "is no complete checkpoint" in capsys.readouterr().err
    (theirs / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    assert cli.main(["recipe", str(theirs)]) == 2
    assert not out.exists()


def test_a_run_goes_from_one_checkpoint_of_theirs_to_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, recipe, run = twin("qwen2_moe"), tmp_path / "recipe.toml", tmp_path / "run"
    theirs.save_pretrained(tmp_path / "theirs")
    assert cli.main(["recipe", str(tmp_path / "theirs")]) == 0
    recipe.write_text(capsys.readouterr().out)
    assert load_recipe(recipe).model.moe.shared_ffn_hidden_size == 22
    steps = ["--train.steps=1", "--train.seq_len_tokens=8", "--optim.lr=1e-30", "--precision.compute=fp32"]
    steps += ["--perf.kernels=reference"]
    assert cli.main(["train", str(recipe), f"--run.folder={run}", "--run.device=cpu", *steps]) == 0
    assert_equal_in_transformers(run / "hf" / "step-1", theirs)
    assert cli.main(["export", str(run / "checkpoints" / "step-1"), str(tmp_path / "out")]) == 0
    assert_equal_in_transformers(tmp_path / "out", theirs)
    config = (tmp_path / "out" / "config.json").read_text()
    assert config == (run / "hf" / "step-1" / "config.json").read_text()
