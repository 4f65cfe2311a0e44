"""The commands around Hugging Face checkpoints: import, export, recipe, and a run between two of them."""

import errno
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from support.hf_twins import assert_equal_in_transformers, greedy, ours_for, transformers, twin

from titan_moe import cli
from titan_moe.checkpoint import hf_convert, hf_export, storage
from titan_moe.checkpoint.hf import load_hf
from titan_moe.checkpoint.hf_folder import HuggingFaceError
from titan_moe.checkpoint.hf_names.gpt_oss import EXPERTS
from titan_moe.config import load_recipe

safetensors = pytest.importorskip("safetensors.torch")
SafetensorError = pytest.importorskip("safetensors").SafetensorError


@pytest.mark.parametrize("name", ["qwen3_moe-tied", "deepseek_v3", "gpt_oss"])
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


def test_mxfp4_becomes_what_transformers_makes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded, and imported and exported again."""
    monkeypatch.setattr(hf_convert, "MAX_CHUNK_BYTES", 100_000)
    source, imported, out = tmp_path / "source", tmp_path / "imported", tmp_path / "out"
    twin("gpt_oss", hidden_size=96, intermediate_size=96, num_hidden_layers=2).bfloat16().save_pretrained(source)
    tensors, mxfp4 = safetensors.load_file(source / "model.safetensors"), transformers.integrations.mxfp4
    expected = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, blocks.shape[:-1], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = mxfp4.convert_moe_packed_tensors(blocks, scales).contiguous()
    safetensors.save_file(tensors, source / "model.safetensors")
    assert cli.main(["import", str(source), str(imported)]) == 0
    assert cli.main(["export", str(imported), str(out)]) == 0
    saved = safetensors.load_file(out / "model-00001-of-00001.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.items())
    ours, theirs = ours_for(source), transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    load_hf(ours, source)
    tokens = torch.arange(40)[None]
    assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-4 * theirs(tokens).logits.abs().max()
    scales = f"model.layers.1.{EXPERTS}.down_proj_scales"
    safetensors.save_file({key: t for key, t in tensors.items() if key != scales}, source / "model.safetensors")
    with pytest.raises(HuggingFaceError, match=f"missing: {scales}"):
        load_hf(ours, source)
    safetensors.save_file(tensors | {scales: tensors[scales][:, 1:].clone()}, source / "model.safetensors")
    with pytest.raises(HuggingFaceError, match=f"one U8 for each 32 values: {scales} U8"):
        load_hf(ours, source)


def test_a_checkpoint_of_theirs_and_its_import_continue_as_in_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids for want of a tokenizer; the end token is that of config.json. And in bf16, as by default."""
    theirs, prompts = twin("qwen3_moe", eos_token_id=60), [[5, 7, 11], [1, 2, 3, 4, 5]]
    theirs.save_pretrained(tmp_path / "theirs")
    assert cli.main(["import", str(tmp_path / "theirs"), str(tmp_path / "imported")]) == 0
    assert cli.main(["average", *2 * [str(tmp_path / "imported")], str(tmp_path / "mean")]) == 0
    imported, mean = capsys.readouterr().out.splitlines()
    assert imported.startswith(f"wrote {tmp_path / 'imported'}: ") and mean.startswith(f"wrote {tmp_path / 'mean'}: ")
    (tmp_path / "prompts.txt").write_text("\n".join(" ".join(map(str, prompt)) for prompt in prompts))
    expected = [text[len(prompt) :] for text, prompt in zip(greedy(theirs, prompts, 9), prompts, strict=True)]
    expected = [ids[: ids.index(60)] if 60 in ids else ids for ids in expected]
    options = ["--prompts", str(tmp_path / "prompts.txt"), "--max-tokens=9", "--run.device=cpu"]
    options += ["--perf.kernels=reference"]
    for folder in ("theirs", "imported", "mean"):
        assert cli.main(["generate", str(tmp_path / folder), *options, "--precision.compute=fp32"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["completion"] for line in lines] == [" ".join(map(str, ids)) for ids in expected]
    assert cli.main(["generate", str(tmp_path / "theirs"), *options]) == 0


def test_what_cannot_be_written_is_told_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk may be full in the middle of a file; errors of the system, of DCP and of safetensors say it otherwise."""
    theirs, imported, out = tmp_path / "theirs", tmp_path / "imported", tmp_path / "out"
    twin("mixtral").save_pretrained(theirs)
    full = OSError(errno.ENOSPC, "No space left on device")
    commands = {
        "import": (["import", str(theirs), str(out)], storage._HashedFile, "write", full),
        "average": (["average", *2 * [str(imported)], str(out)], storage._HashedFile, "write", full),
        "export": (
            ["export", str(imported), str(out)],
            safetensors,
            "save_file",
            SafetensorError("No space left (28)"),
        ),
        "index": (["export", str(imported), str(out)], hf_export, "write_description", full),
    }
    assert cli.main(["import", str(theirs), str(imported)]) == 0
    for words, place, name, error in commands.values():
        with monkeypatch.context() as patch:
            patch.setattr(place, name, Mock(side_effect=error))
            assert cli.main(words) == 2
        said = capsys.readouterr().err
        assert f"{out}: it cannot be written: " in said and "No space left" in said and "None" not in said
        assert not out.exists() and not list(tmp_path.glob(".*"))
    (imported / "manifest.json").write_text("{}")
    assert cli.main(["average", *2 * [str(imported)], str(out)]) == 2
    assert f"{imported}: manifest.json is not as it was written" in capsys.readouterr().err


def test_what_cannot_be_converted_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    twin("mixtral").save_pretrained(theirs)
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(config | {"num_local_experts": 6}))
    assert cli.main(["import", str(theirs), str(out)]) == 2
    assert "missing: model.layers.0.block_sparse_moe.experts.5.w1.weight" in capsys.readouterr().err
    assert cli.main(["export", str(theirs), str(out)]) == 2
    assert "is a Hugging Face checkpoint; titan-moe import" in capsys.readouterr().err
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
    capsys.readouterr()
    assert cli.main(["export", str(run / "checkpoints" / "step-1"), str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"wrote {tmp_path / 'out'}: ") and said.err.startswith("it has no tokenizer: the run")
    assert_equal_in_transformers(tmp_path / "out", theirs)
    config = (tmp_path / "out" / "config.json").read_text()
    assert config == (run / "hf" / "step-1" / "config.json").read_text()
