"""Weights go in from Hugging Face and out to it: the same numbers, every tensor once, under any layout."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from support.hf_twins import TWINS, assert_equal_in_transformers, on_disk, ours_for, twin
from torch import Tensor, nn

from titan_moe.checkpoint import hf_export, hf_reader
from titan_moe.checkpoint.hf import check_exportable, load_hf, save_hf
from titan_moe.checkpoint.hf_folder import HuggingFaceError
from titan_moe.checkpoint.hf_names.families import family_for
from titan_moe.checkpoint.hf_stream import hf_weights
from titan_moe.checkpoint.hf_weights import pieces_of, weights_of
from titan_moe.checkpoint.masters import MasterState
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.layers.init import init_weights
from titan_moe.models.transformer import Transformer
from titan_moe.parallel import masters

safetensors = pytest.importorskip("safetensors.torch")
STEPS, ALL_STEPS_OF = 20, "deepseek_v3"
"""Of one twin, and with --all-cases of each: most of a test's time, and gradients are equal already."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints that transformers has saved, by name of a twin."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            twin(name).save_pretrained(made[name], max_shard_size="30KB")
        return made[name]

    return folder


def in_their_names(model: Transformer, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    weights = weights_of(model, None)._replace(tensors=tensors)
    family = family_for(model.config)
    own = pieces_of(family, model.config, {name: tuple(t.shape) for name, t in tensors.items()})
    boxes = weights.boxes(own)
    own = {piece.name: piece.shape for piece in own}
    return {name: next(iter(box.chunks.values())).reshape(own[name]) for name, box in boxes.items()}


def assert_near(actual: Tensor, expected: Tensor, name: str, limit: float) -> None:
    assert (actual - expected).abs().max() <= limit * expected.abs().max(), name


@pytest.mark.parametrize("name", TWINS)
def test_a_model_of_theirs_comes_in_and_goes_out(
    name: str, folders: Callable[[str], Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    theirs, ours = twin(name), ours_for(folders(name))
    assert load_hf(ours, folders(name)) == {}
    tokens, labels = torch.randint(61, (2, 2, 40)).unbind()
    assert_near(ours(tokens), theirs(tokens).logits, "logits", 1e-4)
    their_loss(theirs, tokens, labels).backward()
    ours(tokens, labels).backward()
    expected = on_disk(theirs, {key: p.grad for key, p in theirs.named_parameters() if p.requires_grad})
    actual = in_their_names(ours, {key: p.grad for key, p in ours.named_parameters()})
    assert actual.keys() == expected.keys()
    for key, gradient in actual.items():
        assert_near(gradient, expected[key], key, 1e-3)

    save_hf(ours, tmp_path / "source", source=folders(name), max_file_bytes=30_000)
    save_hf(ours, tmp_path / "recipe")
    for folder in ("source", "recipe"):
        assert_equal_in_transformers(tmp_path / folder, theirs)
    assert len(list((tmp_path / "source").glob("model-*.safetensors"))) > 2
    theirs.train()
    num_steps = STEPS if request.config.option.all_cases or name == ALL_STEPS_OF else 2
    both = (
        trained(model, loss_of, num_steps, tokens, labels)
        for model, loss_of in ((theirs, their_loss), (ours, Transformer.__call__))
    )
    assert all(abs(one - other) < 1e-5 * one for one, other in zip(*both, strict=True))


def test_sparsemixer_near_ties_is_theirs_in_evaluation(tmp_path: Path) -> None:
    theirs = twin("phimoe", router_jitter_noise=0.3).eval()
    theirs.save_pretrained(tmp_path)
    ours = ours_for(tmp_path)
    load_hf(ours, tmp_path)
    tokens, labels = torch.randint(61, (2, 2, 40)).unbind()
    assert_near(ours(tokens), theirs(tokens).logits, "logits", 1e-4)
    their_loss(theirs, tokens, labels).backward()
    ours(tokens, labels).backward()
    expected = on_disk(theirs, {key: p.grad for key, p in theirs.named_parameters() if p.requires_grad})
    for key, gradient in in_their_names(ours, {key: p.grad for key, p in ours.named_parameters()}).items():
        assert "gate" not in key or gradient.any(), key
        assert_near(gradient, expected[key], key, 1e-3)


def their_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten(), reduction="sum")


def trained(model: nn.Module, loss_of: Callable[..., Tensor], num_steps: int, *batch: Tensor) -> Iterator[float]:
    """The losses of steps on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        yield loss.item()


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object], **config: Any) -> None:
    """Change the tensors of a file, and config.json."""
    file = sorted(folder.glob("*.safetensors"))[-1]
    tensors = safetensors.load_file(file)
    change(tensors)
    safetensors.save_file(tensors, file, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def one_file_unlisted(folder: Path) -> None:
    tensors = safetensors.load_file(folder / "model.safetensors")
    halves = [dict(list(tensors.items())[i::2]) for i in range(2)]
    for i, half in enumerate(halves):
        safetensors.save_file(half, folder / f"model-{i}.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = dict.fromkeys(halves[0], "model-0.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def listed_and_absent(folder: Path) -> None:
    one_file_unlisted(folder)
    (folder / "model-0.safetensors").unlink()


def index_leads_out(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b.safetensors"}}))


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "one expert too few": (lambda folder: edit(folder, lambda t: t.pop(EXPERT)), f"missing: {EXPERT}"),
    "another shape": (
        lambda folder: edit(folder, lambda t: t.update({EXPERT: t[EXPERT][1:].clone()})),
        f"other shapes: {EXPERT} \\[13, 54\\] \\(the model has \\[14, 54\\]\\)",
    ),
    "an unknown tensor": (
        lambda folder: edit(folder, lambda t: t.update({"model.layers.7.norm.weight": torch.ones(1)})),
        "unknown: model.layers.7.norm.weight",
    ),
    "integers": (lambda folder: edit(folder, lambda t: t.update({EXPERT: t[EXPERT].int()})), f"dtypes.*{EXPERT} I32"),
    "truncated": (truncate, "model.safetensors cannot be read: it is truncated"),
    "unlisted": (one_file_unlisted, "model-1.safetensors is not in model.safetensors.index.json"),
    "absent": (listed_and_absent, "model-0.safetensors cannot be read: No such file"),
    "outside": (index_leads_out, "names ../b.safetensors"),
    "another family": (lambda folder: edit(folder, len, model_type="mamba", architectures=[]), "model_type = 'mamba'"),
    "another activation": (lambda folder: edit(folder, len, hidden_act="gelu"), "hidden_act = 'gelu'"),
    "another rotary embedding": (
        lambda folder: edit(folder, len, rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
        "the rotary embedding 'linear'",
    ),
    "a word for a number": (
        lambda folder: edit(folder, len, num_hidden_layers="3"),
        "config.json gives '3' for model.num_layers, which is of type int",
    ),
    "a number for a table": (lambda folder: edit(folder, len, rope_parameters=5), "is not as qwen3_moe writes it"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read: No such file"),
}


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    twin("qwen3_moe").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_refused_by_name(damage: str, whole_folder: Path, tmp_path: Path) -> None:
    ours = ours_for(whole_folder)
    change, words = DAMAGES[damage]
    change(copytree(whole_folder, tmp_path / "damaged"))
    with pytest.raises(HuggingFaceError, match=words):
        load_hf(ours, tmp_path / "damaged")
    assert all(tensor.isnan().all() for tensor in ours.state_dict().values())


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_layers_that_are_not_built_are_left_out_by_name_alone(
    name: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copytree(folders(name), tmp_path / "source")
    extra = {"model.layers.3.eh_proj.weight": torch.ones(3)}
    safetensors.save_file(extra, source / "model-mtp.safetensors")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(extra, "model-mtp.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    ours = ours_for(folders(name))
    words = r'model.layers.3.eh_proj.weight; --skip mtp, or in a recipe checkpoint.load_without = \["mtp"\]'
    with pytest.raises(HuggingFaceError, match=rf"mtp is no part of \[model\]: {words}"):
        load_hf(ours, source)
    with pytest.raises(HuggingFaceError, match=f"vision cannot be skipped: {name} has mtp"):
        load_hf(ours, source, skip=["mtp", "vision"])
    assert load_hf(ours, source, skip=["mtp"]) == {"mtp": list(extra)}


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, whole_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ours_for(whole_folder)
    load_hf(ours, whole_folder)
    ours.layers["1"].feed_forward.router.expert_bias_E[0] = 1
    with pytest.raises(HuggingFaceError, match="qwen3_moe has no place for layers.1.feed_forward.router.expert_bias_E"):
        save_hf(ours, tmp_path / "out")
    with pytest.raises(HuggingFaceError, match="qwen3_moe has no place for"):
        check_exportable(ours, None, tmp_path)
    ours.layers["1"].feed_forward.router.expert_bias_E.zero_()
    check_exportable(ours, None, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(hf_export, "write_manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save_hf(ours, tmp_path / "out")
    ours.config = replace(ours.config, embedding_multiplier=2.0)
    with pytest.raises(HuggingFaceError, match="qwen3_moe has no words for model.embedding_multiplier = 2.0"):
        save_hf(ours, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(HuggingFaceError, match="is not empty"):
        save_hf(ours_for(whole_folder), whole_folder)


def test_an_export_is_in_the_dtype_asked_for_and_lists_its_files(whole_folder: Path, tmp_path: Path) -> None:
    source = copytree(whole_folder, tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    ours = ours_for(source)
    load_hf(ours, source)
    save_hf(ours, tmp_path / "out", torch.bfloat16, source=source)
    tensors = safetensors.load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    expected = safetensors.load_file(source / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in tensors.items())
    streamed = dict(hf_weights(ours, torch.bfloat16))
    assert streamed.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in streamed.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    manifest = json.loads((tmp_path / "out" / "titan_moe.json").read_text())
    files = {file.name: sha256(file.read_bytes()).hexdigest() for file in (tmp_path / "out").iterdir()}
    assert manifest["files"] == {name: hash_ for name, hash_ in files.items() if name != "titan_moe.json"}
    assert "tokenizer.json" in files and "generation_config.json" in files
    save_hf(ours, tmp_path / "without_source", tokenizer=source)
    names = {file.name for file in (tmp_path / "without_source").iterdir()}
    assert "tokenizer.json" in names and "generation_config.json" not in names


def test_a_head_beside_tied_embeddings_is_their_copy_or_refused(tmp_path: Path) -> None:
    twin("qwen3_moe-tied").save_pretrained(tmp_path)
    ours, head, embedding = ours_for(tmp_path), "lm_head.weight", "model.embed_tokens.weight"
    edit(tmp_path, lambda tensors: tensors.update({head: tensors[embedding].clone()}))
    assert load_hf(ours, tmp_path) == {}
    edit(tmp_path, lambda tensors: tensors[head][60, 50].add_(1))
    with pytest.raises(HuggingFaceError, match=f"true in config.json, but {head} differs from {embedding}"):
        load_hf(ours, tmp_path)
    assert load_hf(ours, tmp_path, skip=["lm_head"]) == {}


def test_a_failure_while_weights_are_read_names_the_file(
    whole_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, ours = copytree(whole_folder, tmp_path / "source"), ours_for(whole_folder)
    one_file_unlisted(source)
    (source / "model.safetensors.index.json").unlink()
    names = {
        file: list(safetensors.load_file(source / file)) for file in ("model-0.safetensors", "model-1.safetensors")
    }
    weight_map = {name: file for file, of_file in names.items() for name in of_file}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    def fail(self: Any, file: Any, request: Any, planner: Any) -> None:
        if weight_map[request.storage_index.fqn] == "model-1.safetensors":
            raise OSError("Input/output error")

    monkeypatch.setattr(hf_reader._Reader, "_process_read_request", fail)
    with pytest.raises(ValueError, match="model-1.safetensors cannot be read: Input/output error$"):
        load_hf(ours, source)


def test_fused_experts_in_fp8_are_refused(tmp_path: Path) -> None:
    twin("gpt_oss").save_pretrained(tmp_path)
    fused = "model.layers.2.mlp.experts.down_proj"
    edit(tmp_path, lambda tensors: tensors.update({fused: tensors[fused].to(torch.float8_e4m3fn)}))
    with pytest.raises(HuggingFaceError, match=f"in F8_E4M3, of which single matrices alone are read here: {fused}"):
        load_hf(ours_for(tmp_path), tmp_path)


def test_weights_in_fp8_are_multiplied_by_the_scales_of_their_blocks(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    source, size = tmp_path / "fp8", 16
    twin("deepseek_v3").save_pretrained(source)
    tensors, expected = safetensors.load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if "proj" in name]:
        rows, columns = tensors[name].shape
        scales = torch.rand(-(-rows // size), -(-columns // size)) + 0.5
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        whole = scales.repeat_interleave(size, 0)[:rows].repeat_interleave(size, 1)[:, :columns]
        expected[name] = tensors[name].float() * whole
    safetensors.save_file(tensors, source / "model.safetensors")
    quantised = {"quant_method": "fp8", "weight_block_size": [size, size]}
    edit(source, len, quantization_config=quantised)
    ours = ours_for(source)
    load_hf(ours, source)
    theirs = in_their_names(ours, ours.state_dict())
    assert all(torch.equal(theirs[name], tensor) for name, tensor in (tensors | expected).items() if name in theirs)
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    safetensors.save_file(tensors, source / "model.safetensors")
    with pytest.raises(HuggingFaceError, match="without scales: model.layers.0.mlp.up_proj.weight"):
        load_hf(ours, source)


def test_split_masters_are_what_was_on_disk(tmp_path: Path) -> None:
    model = ModelConfig(moe=MoEConfig(4, 2, 64))
    source, ours = Transformer(model), Transformer(model).bfloat16()
    init_weights(source, 0, 0.02, 2)
    masters.apply(ours, PrecisionConfig(master="fp32_split"))
    init_weights(ours, 1, 0.02, 2)
    for dtype in (torch.bfloat16, torch.float32):
        save_hf(source, tmp_path / str(dtype), dtype)
        load_hf(ours, tmp_path / str(dtype))
        state = MasterState([ours]).state_dict()
        for name, parameter in source.named_parameters():
            assert state[name].dtype == torch.float32 and state[name].equal(parameter.to(dtype).float()), name
