"""What a parameter is: declared by the class that owns it, whatever its shape and whatever took its place."""

import pytest
import torch
from torch import nn

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.layers.experts import GroupedExperts
from titan_moe.models.transformer import Transformer
from titan_moe.parameters import ParameterKind, kind_of, named_kinds, residual_ends, untied_embeddings

MOE = MoEConfig(num_experts=4, ffn_hidden_size=8, shared_ffn_hidden_size=8, shared_expert_gate=True, latent_size=8)
GQA = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, qk_norm=True, qkv_bias=True)
MLA = AttentionConfig(
    kind="mla", num_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
)
KINDS = {
    "embed.weight": ParameterKind.EMBEDDING,
    "head.weight": ParameterKind.HEAD,
    "router.weight": ParameterKind.ROUTER,
    "experts.gate_up": ParameterKind.EXPERT_MATRIX,
    "experts.down": ParameterKind.EXPERT_MATRIX,
    "norm.weight": ParameterKind.SCALE,
    "norm_weight": ParameterKind.SCALE,
    "bias": ParameterKind.BIAS,
}
"""By the end of the name; everything else is a matrix."""
ENDS = {"attention.out.weight", "down.weight", "experts.down", "latent_up.weight"}


def built(attention: AttentionConfig, **changes: object) -> Transformer:
    config = ModelConfig(
        num_layers=2, num_dense_layers=1, hidden_size=16, ffn_hidden_size=8, attention=attention, moe=MOE, **changes
    )
    with torch.device("meta"):
        return Transformer(config, kernels=Kernels())


@pytest.mark.parametrize("attention", [GQA, MLA], ids=["gqa", "mla"])
def test_parameter_kinds_are_declared_for_a_model(attention: AttentionConfig) -> None:
    model = built(attention)
    assert [name for name, _, _ in named_kinds(model)] == [name for name, _ in model.named_parameters()]
    for name, _, kind in named_kinds(model):
        expected = next((kind for end, kind in KINDS.items() if name.endswith(end)), ParameterKind.MATRIX)
        assert kind is expected, name


@pytest.mark.parametrize("attention", [GQA, MLA], ids=["gqa", "mla"])
def test_residual_ends_are_declared_by_layers(attention: AttentionConfig) -> None:
    model = built(attention)
    names = {name for name, _ in model.named_parameters()}
    expected = {name for name in names if name.endswith(tuple(f".{end}" for end in ENDS))}
    assert residual_ends(model) & names == expected and len(expected) == 6
    assert residual_ends(model.layers["1"].feed_forward.experts) == {"down"}


def test_parameter_kind_of_a_tied_weight_is_of_its_first_owner() -> None:
    kinds = {name: kind for name, _, kind in named_kinds(built(GQA, embeddings_are_tied=True))}
    assert kinds["embed.weight"] is ParameterKind.EMBEDDING and "head.weight" not in kinds


def test_embeddings_that_are_not_tied() -> None:
    assert untied_embeddings(built(GQA)) == untied_embeddings(built(GQA, embedding_multiplier=4.0)) == {"embed.weight"}
    assert untied_embeddings(built(GQA, embeddings_are_tied=True)) == set()


class BiasedExperts(GroupedExperts):
    """Experts with biases, and one more that a subclass declares."""

    parameter_kinds = {"offset": ParameterKind.BIAS}

    def __init__(self) -> None:
        super().__init__(4, 8, 16, has_bias=True)
        self.offset = nn.Parameter(torch.ones(4, 32))


def test_parameter_kind_of_an_expert_bias() -> None:
    experts = BiasedExperts()
    kinds = {name: kind for name, _, kind in named_kinds(experts)}
    assert kinds["down_bias"] is kinds["offset"] is ParameterKind.BIAS and experts.down_bias.ndim == 2
    assert kinds["gate_up_bias"] is ParameterKind.BIAS and experts.gate_up_bias.ndim == 3
    assert kinds["gate_up"] is kinds["down"] is ParameterKind.EXPERT_MATRIX, "a subclass adds to what is declared"


def test_parameter_kind_of_an_undeclared_parameter() -> None:
    module = nn.Module()
    for name, shape in {"table": (3, 2), "level": (3,), "my_bias": (3, 2)}.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    kinds = {name: kind for name, _, kind in named_kinds(module)}
    assert kinds == {"table": ParameterKind.MATRIX, "level": ParameterKind.SCALE, "my_bias": ParameterKind.BIAS}


def test_parameter_kind_survives_replacement() -> None:
    """As DTensors of FSDP are; and a class that is made on the fly is still of the class that declares."""
    experts = BiasedExperts()
    experts.down = nn.Parameter(torch.zeros(2))
    experts.__class__ = type("Wrapped", (nn.Identity, BiasedExperts), {})
    assert kind_of(experts, "down") is ParameterKind.EXPERT_MATRIX
