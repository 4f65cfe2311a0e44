"""Adapters in PEFT's files, held against its formulae and, where it is installed, against PEFT itself."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_twins import OnUse, ours_for, twin
from torch import Tensor, nn

from titan_moe.adapters import low_rank
from titan_moe.adapters.frozen import freeze
from titan_moe.checkpoint.hf import load_adapter, load_hf, save_hf
from titan_moe.checkpoint.hf_folder import HuggingFaceError
from titan_moe.checkpoint.hf_names.families import family_for
from titan_moe.checkpoint.hf_weights import pieces_of, weights_of
from titan_moe.checkpoint.peft import CONFIG_FILE, WEIGHTS_FILE, save_adapter
from titan_moe.config.adapter import AdapterConfig, AdapterOfKind
from titan_moe.models.transformer import Transformer
from titan_moe.parameters import factors_of, local_chunks

safetensors = pytest.importorskip("safetensors.torch")
peft = OnUse("peft", reason="PEFT is not among the packages of the tests")
ADAPTER = AdapterConfig(rank=3, alpha=5.0, experts=AdapterOfKind(rank=2, alpha=7.0))
EXPERTS = "base_model.model.model.layers.1.mlp.experts"


def adapted(folder: Path, adapter: AdapterConfig = ADAPTER) -> Transformer:
    """Ours, of their checkpoint in a folder, with an adapter that changes it."""
    ours = ours_for(folder)
    ours.config = replace(ours.config, adapter=adapter)
    low_rank.apply(ours, adapter)
    freeze(ours, (), torch.float32, has_adapters=True)
    load_hf(ours, folder)
    for parameter in ours.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return ours


def written(ours: Transformer, folder: Path, **options: Any) -> dict[str, Tensor]:
    parameters, weights = dict(ours.named_parameters()), weights_of(ours, None)
    own = pieces_of(family_for(ours.config), ours.config, weights.shapes)
    save_adapter(folder, ours.config, factors_of(ours), own, lambda name: parameters[name].detach(), **options)
    return safetensors.load_file(folder / WEIGHTS_FILE)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    twin("qwen3_moe").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def deltas(ours: Transformer) -> dict[str, Tensor]:
    """What merged weights have more than the base."""
    merged = weights_of(ours, None, merges=True).merged
    plain = {name: local_chunks(p.detach(), ())[0].values for name, p in ours.named_parameters() if name in merged}
    return {name: merged[name][0].values - plain[name] for name in plain}


def test_a_file_has_a_matrix_for_each_expert_and_projection(base: Path, tmp_path: Path) -> None:
    """Each product of two of them is what is added to one of Hugging Face's weights."""
    ours = adapted(base)
    tensors, config = written(ours, tmp_path / "adapter", base="base"), None
    config = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 7, "base")
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["rank_pattern"]["self_attn.q_proj"] == 3 and config["alpha_pattern"]["self_attn.q_proj"] == 5
    assert len(tensors) == 2 * (3 * 4 + 2 * 5 * 3)
    own = deltas(ours)

    def product(name: str, scale: float) -> Tensor:
        a, b = (tensors[f"{name}.lora_{end}.weight"] for end in "AB")
        return scale * (b @ a)

    attention = "base_model.model.model.layers.2.self_attn"
    qkv = torch.cat([product(f"{attention}.{x}_proj", 5 / 3) for x in "qkv"])
    assert torch.allclose(qkv, own["layers.2.attention.qkv.weight"], atol=1e-5)
    for expert in range(5):
        names = [f"{EXPERTS}.{expert}.{name}_proj" for name in ("gate", "up", "down")]
        gate, up, down = (product(name, 3.5) for name in names)
        assert torch.allclose(torch.stack([gate, up]), own["layers.1.feed_forward.experts.gate_up"][expert], atol=1e-5)
        assert torch.allclose(down, own["layers.1.feed_forward.experts.down"][expert], atol=1e-5)


def test_the_fused_form_has_columns_by_expert(base: Path, tmp_path: Path) -> None:
    """Column j of B belongs to expert j mod 5: PEFT's formula, written out."""
    ours = adapted(base)
    tensors, own = written(ours, tmp_path / "adapter", is_fused=True), deltas(ours)
    for name, key in (("gate_up", f"{EXPERTS}.base_layer"), ("down", EXPERTS)):
        a, b = (tensors[f"{key}.lora_{end}.weight"] for end in "AB")
        a_eri, b_ore = a.reshape(5, -1, a.shape[-1]), b.reshape(len(b), -1, 5)
        delta = 3.5 * torch.einsum("ore,eri->eoi", b_ore, a_eri)
        expected = own[f"layers.1.feed_forward.experts.{name}"]
        assert torch.allclose(delta, expected.reshape(delta.shape), atol=1e-5)
    config = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert config["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    assert config["rank_pattern"][r".*\.gate_up_proj"] == 4 and config["alpha_pattern"][r".*\.gate_up_proj"] == 14


@pytest.mark.parametrize("is_fused", [False, True])
def test_peft_computes_what_ours_does(base: Path, tmp_path: Path, is_fused: bool) -> None:
    ours, theirs = adapted(base), twin("qwen3_moe")
    written(ours, tmp_path / "adapter", is_fused=is_fused)
    tokens = torch.randint(61, (2, 40))
    plain = theirs(tokens).logits
    with_adapter = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    logits = with_adapter(tokens).logits
    assert (logits - plain).abs().max() > 0.1
    assert (logits - ours(tokens)).abs().max() < 1e-4 * logits.abs().max()
    own = deltas(ours)
    wrappers = {name: module for name, module in with_adapter.named_modules() if hasattr(module, "get_delta_weight")}
    found = {name: module.get_delta_weight("default") for name, module in wrappers.items()}
    key = "base_model.model.model.layers.1.mlp.experts"
    for name, theirs_name in (("gate_up", f"{key}.base_layer"), ("down", key)):
        expected = own[f"layers.1.feed_forward.experts.{name}"]
        assert torch.allclose(found[theirs_name], expected.reshape(found[theirs_name].shape), atol=1e-5)


def test_merged_weights_are_the_base_and_the_product_bit_for_bit(base: Path, tmp_path: Path) -> None:
    ours = adapted(base)
    save_hf(ours, tmp_path / "merged", source=base)
    merged = safetensors.load_file(tmp_path / "merged" / "model-00001-of-00001.safetensors")
    before = {}
    for file in base.glob("*.safetensors"):
        before |= safetensors.load_file(file)
    tensors = written(ours, tmp_path / "adapter")
    assert merged.keys() == before.keys()
    for name, weight in before.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in tensors:
            scale = 3.5 if ".experts." in name else 5.0 / 3
            weight = weight + tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"] * scale
        assert torch.equal(merged[name], weight), name


def test_an_adapter_comes_in_again(base: Path, tmp_path: Path) -> None:
    ours, other = adapted(base), adapted(base)
    written(ours, tmp_path / "adapter")
    load_adapter(other, tmp_path / "adapter")
    for (name, one), another in zip(ours.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, another), name
    with pytest.raises(HuggingFaceError, match=r"give a scale of 3.5, and model.adapter one of 7; set model.adapter"):
        load_adapter(adapted(base, replace(ADAPTER, experts=AdapterOfKind(2, 14.0))), tmp_path / "adapter")
    with pytest.raises(
        HuggingFaceError, match="of no adapter of this model: base_model.model.model.layers.0.self_attn"
    ):
        load_adapter(adapted(base, replace(ADAPTER, targets=("experts",))), tmp_path / "adapter")
    with pytest.raises(HuggingFaceError, match=r"has factors \[2, 54\] and \[14, 2\], and the model \[4, 54\]"):
        load_adapter(adapted(base, replace(ADAPTER, experts=AdapterOfKind(4, 14.0))), tmp_path / "adapter")
    with pytest.raises(HuggingFaceError, match="it has no adapter that can be read"):
        load_adapter(other, tmp_path / "absent")
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    for damaged, words in (
        ([], "does not say r and lora_alpha"),
        ({"lora_alpha": 1}, "does not say r and lora_alpha"),
        (config | {"rank_pattern": {"[": 2}}, "a pattern of adapter_config.json cannot be read"),
    ):
        file.write_text(json.dumps(damaged))
        with pytest.raises(HuggingFaceError, match=words):
            load_adapter(other, tmp_path / "adapter")
