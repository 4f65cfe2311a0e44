"""Parts of a model in sequence equal the model."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from titan_moe.config.kernels import PRESETS
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.mtp import MTPConfig
from titan_moe.layers.init import init_weights
from titan_moe.models.part import part_of, tied_weight
from titan_moe.models.transformer import Transformer
from titan_moe.parameters import ParameterKind, named_kinds, untied_embeddings

CONFIG = ModelConfig(
    vocab_size=32,
    num_layers=4,
    num_dense_layers=1,
    hidden_size=16,
    embedding_multiplier=4.0,
    ffn_hidden_size=24,
    # every other layer has a window: what a layer sees depends on its number
    attention=AttentionConfig(
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        qk_norm=True,
        sliding_window=3,
        full_attention_every=2,
        nope_every=3,
        attn_scale=0.5,
        floor_scale=2,
    ),
    moe=MoEConfig(num_experts=4, ffn_hidden_size=16, shared_ffn_hidden_size=8, aux_loss_coef=0.1, z_loss_coef=0.01),
)
CUTS = {
    "three": [["embed", "layers.0", "layers.1"], ["layers.2"], ["layers.3", "norm", "head"]],
    "ends alone": [["embed"], ["layers.0", "layers.1", "layers.2", "layers.3"], ["norm", "head"]],
    "one": [["embed", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "head"]],
}


def on_meta(config: ModelConfig = CONFIG) -> Transformer:
    with torch.device("meta"):
        return Transformer(config, kernels=PRESETS["reference"], loss_chunk_tokens=5).double()


def filled(part: nn.Module) -> nn.Module:
    part.to_empty(device="cpu")
    init_weights(part, seed=3, std=0.3, num_layers=CONFIG.num_layers)
    return part


def run(parts: list[nn.Module], labels_BN: Tensor | None) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The result of the last part; gradients and counts of the routers, by name."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(32, (2, 9), generator=generator)
    document_ids_BN = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    for part in parts:
        x = part(x, labels_BN, document_ids_BN)
    x.sum().backward()
    grads = {name: p.grad for part in parts for name, p in part.named_parameters()}
    return x.detach(), grads, {name: buffer for part in parts for name, buffer in part.named_buffers()}


@pytest.mark.parametrize("has_labels", [True, False])
@pytest.mark.parametrize("cut", CUTS)
def test_parts_in_sequence_equal_the_model(cut: str, has_labels: bool) -> None:
    model = on_meta()
    parts = [filled(part_of(model, kept)) for kept in CUTS[cut]]
    labels_BN = torch.arange(18).view(2, 9) if has_labels else None
    actual, expected = run(parts, labels_BN), run([filled(model)], labels_BN)
    assert actual[0].shape == (() if has_labels else (2, 9, 32))
    assert list(actual[1]) == list(expected[1]) and actual[2].keys() == expected[2].keys()
    assert all(grad is not None and grad.abs().max() > 0 for grad in expected[1].values())
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


def test_part_keeps_its_modules_and_leaves_the_model_unchanged() -> None:
    model = on_meta()
    names = set(model.state_dict())
    held = [set(part_of(model, kept).state_dict()) for kept in CUTS["three"]]
    assert set(model.state_dict()) == names == set.union(*held)
    assert sum(map(len, held)) == len(names), "nothing is in two parts"


def test_part_of_error_names_an_unknown_module() -> None:
    with pytest.raises(ValueError, match=r"'layers.7' is no module of the model; it has embed, layers.0, "):
        part_of(on_meta(), ["embed", "layers.7"])


TIED = ModelConfig(num_layers=2, ffn_hidden_size=8, embeddings_are_tied=True)


def test_tied_embeddings_are_in_the_first_and_the_last_part() -> None:
    model = on_meta(TIED)
    first, middle, last = (part_of(model, kept) for kept in (["embed", "layers.0"], ["layers.1"], ["norm", "head"]))
    for part in (first, last):
        assert part.embed.weight is part.head.weight is tied_weight(part)
        names = [(name, kind) for name, _, kind in named_kinds(part) if name.startswith(("embed", "head"))]
        assert names == [("embed.weight", ParameterKind.EMBEDDING)] and not untied_embeddings(part)
    assert tied_weight(middle) is None and not list(middle.embed.parameters())
    assert first.embed.weight is not last.embed.weight


def test_multi_token_prediction_has_the_embedding_in_its_part() -> None:
    model = on_meta(replace(CONFIG, mtp=MTPConfig(2)))
    cut = [["embed", "layers.0", "layers.1"], ["layers.2", "layers.3"], ["layers.4", "layers.5", "norm", "head"]]
    first, middle, last = (filled(part_of(model, kept)) for kept in cut)
    assert torch.equal(first.embed.weight, last.embed.weight) and not list(middle.embed.parameters())
    tokens_BN, labels_BN = torch.randint(32, (2, 2, 9), generator=torch.Generator().manual_seed(0)).unbind()
    whole = filled(on_meta(replace(CONFIG, mtp=MTPConfig(2))))
    expected = whole(tokens_BN, labels_BN)
    expected.backward()
    actual = last(middle(first(tokens_BN)), labels_BN, None, None, tokens_BN)
    actual.backward()
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
    grads = {name: p.grad for part in (first, middle, last) for name, p in part.named_parameters()}
    grads["embed.weight"] = first.embed.weight.grad + last.embed.weight.grad
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-12, atol=1e-13, msg=name)


def test_part_of_refuses_any_other_weight_in_two_parts() -> None:
    model = on_meta(TIED)
    model.norm.weight = model.layers["0"].ffn_norm.weight
    with pytest.raises(ValueError, match="layers.0.ffn_norm.weight and norm.weight are one weight"):
        part_of(model, ["embed", "layers.0"])
    assert part_of(model, ["layers.1"]).state_dict()
