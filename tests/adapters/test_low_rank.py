"""Adapters beside a model of transformers: PEFT's formula, W + scale · B A, written out."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_twins import ours_for, twin
from torch import Tensor, nn
from torch.func import functional_call

from titan_moe.adapters import low_rank
from titan_moe.adapters.frozen import freeze
from titan_moe.checkpoint.hf import load_hf
from titan_moe.config.adapter import AdapterConfig, AdapterOfKind
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.modules import modules_of
from titan_moe.config.trainable import names_of, rows_in_order, trains
from titan_moe.models.transformer import Transformer
from titan_moe.parameters import named_kinds
from titan_moe.plan.cost.count import ParameterCount

ADAPTER = AdapterConfig(
    rank=3, alpha=5.0, targets=("attention", "dense", "experts"), experts=AdapterOfKind(rank=2, alpha=7.0)
)


@pytest.fixture
def both(tmp_path: Path) -> tuple[nn.Module, Transformer]:
    """A model of theirs, and ours with adapters beside its weights, which are frozen."""
    theirs = twin("qwen3_moe")
    theirs.save_pretrained(tmp_path)
    ours = ours_for(tmp_path)
    low_rank.apply(ours, ADAPTER)
    freeze(ours, (), torch.float32, has_adapters=True)
    load_hf(ours, tmp_path)
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3 if name.endswith("A") else 0.2)
    return theirs, ours


def theirs_with(theirs: nn.Module, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their weights with ours factors added, expert by expert and matrix by matrix."""
    weights = {name: tensor.detach() for name, tensor in theirs.state_dict().items()}
    for layer in range(3):
        own = {
            name.removeprefix(f"layers.{layer}."): factor for name, factor in factors.items() if f".{layer}." in name
        }
        for ours, names in {
            "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention.out": ("self_attn.o_proj",),
            "feed_forward.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "feed_forward.down": ("mlp.down_proj",),
        }.items():
            if f"{ours}.adapter.A" not in own:
                continue
            start = 0
            for a, name in zip(own[f"{ours}.adapter.A"].split(3), names, strict=True):
                key = f"model.layers.{layer}.{name}.weight"
                b = own[f"{ours}.adapter.B"][start : start + len(weights[key])]
                weights[key] = weights[key] + 5.0 / 3 * (b @ a)
                start += len(b)
        if "feed_forward.experts.down_A" in own:
            of = {name.removeprefix("feed_forward.experts."): factor for name, factor in own.items()}
            keys = [f"model.layers.{layer}.mlp.experts.{name}_proj" for name in ("gate_up", "down")]
            up, down = [], []
            for expert in range(5):
                of_expert = [of["gate_up_B"][expert, i] @ of["gate_up_A"][expert, i] for i in range(2)]
                up.append(weights[keys[0]][expert] + 3.5 * torch.cat(of_expert))
                down.append(weights[keys[1]][expert] + 3.5 * of["down_B"][expert] @ of["down_A"][expert])
            weights[keys[0]], weights[keys[1]] = torch.stack(up), torch.stack(down)
    return weights


def test_steps_are_those_of_the_formula(both: tuple[nn.Module, Transformer]) -> None:
    theirs, ours = both
    tokens, labels = torch.randint(61, (2, 2, 40)).unbind()
    trained = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert len(trained) == 3 * 4 + 4 + 2 * 4
    copies = {name: p.detach().clone().requires_grad_() for name, p in trained.items()}
    plain = theirs(tokens).logits

    def losses(parameters: dict[str, Tensor], loss_of: Any) -> Iterator[tuple[float, dict[str, Tensor]]]:
        optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
        for _ in range(3):
            loss = loss_of()
            loss.backward()
            yield loss.item(), {name: p.grad.clone() for name, p in parameters.items()}
            optimizer.step()
            optimizer.zero_grad()

    def their_loss() -> Tensor:
        logits = functional_call(theirs, theirs_with(theirs, copies), (tokens,)).logits
        assert not torch.allclose(logits, plain, atol=0.1), "adapters change the output"
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    pairs = zip(losses(copies, their_loss), losses(trained, lambda: ours(tokens, labels)), strict=True)
    for (expected, their_grads), (actual, grads) in pairs:
        assert actual == pytest.approx(expected, rel=1e-5)
        for name, grad in grads.items():
            assert (grad - their_grads[name]).norm() <= 1e-4 * their_grads[name].norm(), name
    assert all(p.grad is None for p in ours.parameters() if not p.requires_grad)


def test_a_weight_trains_beside_its_adapter(both: tuple[nn.Module, Transformer]) -> None:
    """Also in a layer that adds the adapter in its GEMM."""
    theirs, ours = both
    freeze_but = ("*.attention.qkv.weight", "*.experts.down")
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or trains(name, freeze_but))
    tokens, labels = torch.randint(61, (2, 2, 40)).unbind()
    ours(tokens, labels).backward()
    factors = {name: p.detach() for name, p in ours.named_parameters()}
    weights = {name: weight.requires_grad_() for name, weight in theirs_with(theirs, factors).items()}
    logits = functional_call(theirs, weights, (tokens,)).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    for layer in range(3):
        own = ours.get_parameter(f"layers.{layer}.attention.qkv.weight").grad
        names = (f"model.layers.{layer}.self_attn.{name}_proj.weight" for name in "qkv")
        expected = torch.cat([weights[name].grad for name in names])
        assert (own - expected).norm() <= 1e-4 * expected.norm()
    assert [name for name, p in ours.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_the_table_names_the_factors(kind: Any) -> None:
    """Of a model with everything that has adapters."""
    sizes: Any = {"q_lora_rank": 8, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    attention = AttentionConfig(kind=kind, num_heads=9, num_kv_heads=3, head_dim=6, **sizes)
    moe = MoEConfig(num_experts=5, top_k=3, ffn_hidden_size=14, shared_ffn_hidden_size=22, shared_expert_gate=True)
    adapter = replace(ADAPTER, targets=("attention", "dense", "shared", "experts"))
    shape: Any = {"num_layers": 2, "num_dense_layers": 1, "hidden_size": 54, "ffn_hidden_size": 38}
    model = ModelConfig(vocab_size=61, attention=attention, moe=moe, adapter=adapter, **shape)
    with torch.device("meta"):
        built = Transformer(model, kernels=Kernels(experts="reference"))
        low_rank.apply(built, adapter)
    listed = {name: size for row, layer in rows_in_order(model) for name, size in names_of(row, layer) if size}
    assert listed == {name: parameter.numel() for name, parameter in built.named_parameters()}
    count = ParameterCount(modules_of(model), model, ())
    factors = sum(parameter.numel() for name, parameter, kind in named_kinds(built) if kind.is_factor)
    assert count.trained == factors and count.total == sum(parameter.numel() for parameter in built.parameters())
