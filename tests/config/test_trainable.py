"""The names of the table are those of the model, and what patterns leave of a step."""

from dataclasses import replace

import pytest
import torch

from titan_moe.config import Recipe
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.train import OptimConfig, TrainConfig
from titan_moe.config.trainable import names_of, rows_in_order, unmatched
from titan_moe.models.transformer import Transformer
from titan_moe.plan.check_report import describe
from titan_moe.plan.cost.count import training_flops_per_token
from titan_moe.plan.cost.memory import state_bytes, trained_of
from titan_moe.plan.pipeline.parts import parts_of

ATTENTION = AttentionConfig(
    num_heads=9, num_kv_heads=3, head_dim=6, qk_norm=True, qkv_bias=True, out_bias=True, sinks=True
)
MOE = MoEConfig(
    num_experts=5,
    top_k=3,
    ffn_hidden_size=14,
    shared_ffn_hidden_size=22,
    shared_expert_gate=True,
    expert_mlp_bias=True,
    router_bias=True,
    latent_size=10,
)
MODEL = ModelConfig(
    vocab_size=61,
    num_layers=4,
    num_dense_layers=1,
    hidden_size=54,
    ffn_hidden_size=38,
    attention=ATTENTION,
    moe=MOE,
    norm="layer",
    head_bias=True,
)
REFERENCE = Kernels(experts="reference")
MLA = AttentionConfig(
    kind="mla", num_heads=9, kv_lora_rank=10, q_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5
)


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        replace(MODEL, attention=replace(ATTENTION, qk_norm_over="all_heads"), embeddings_are_tied=True, norm="rms"),
        replace(MODEL, attention=MLA),
    ],
    ids=["gqa", "norm_over_all_heads-tied", "mla"],
)
def test_the_table_names_the_parameters_of_the_model(model: ModelConfig) -> None:
    with torch.device("meta"):
        built = {
            name: parameter.numel() for name, parameter in Transformer(model, kernels=REFERENCE).named_parameters()
        }
    listed = {name: size for row, layer in rows_in_order(model) for name, size in names_of(row, layer) if size}
    assert listed == built


def test_a_pattern_without_a_match_is_told_what_is_near() -> None:
    names = ["embed.weight", "layers.0.attention.qkv.weight", "layers.1.feed_forward.router.weight", "head.weight"]
    assert not list(unmatched(names, ("*.qkv.*", "head.weight")))
    hed, qvk = unmatched(names, ("hed.weight", "layers.3.attention.qvk.weight"))
    assert hed.startswith('optim.trainable: "hed.weight" matches no parameter; near it: head.weight')
    assert "near it: layers.*.attention.qkv.weight" in qvk


def with_trainable(*patterns: str, **parallel: int) -> Recipe:
    train = TrainConfig(seq_len_tokens=8, global_batch_sequences=8, micro_batch_sequences=2)
    parallel = ParallelConfig(**parallel)
    return Recipe(model=MODEL, optim=OptimConfig(trainable=patterns), train=train, parallel=parallel)


def test_gradients_of_frozen_weights_have_no_flops() -> None:
    """Everything trains: a third of the FLOPs are forward. The head alone: forward, and the gradient of its weight. A
    part: no gradient passes what lies before it."""
    whole, head = training_flops_per_token(MODEL, 8), 2 * 54 * 61
    assert training_flops_per_token(MODEL, 8, ("*",)) == pytest.approx(whole, abs=8)
    assert training_flops_per_token(MODEL, 8, ("head.weight",)) == pytest.approx(whole / 3 + head, abs=8)
    down = 2 * 3 * 10 * 14  # of three experts
    behind = training_flops_per_token(replace(MODEL, num_layers=1), 8) / 3  # as large as layer 0 and the head
    behind -= 2 * (54 * 6 * 15 + 9 * 6 * 54 + 3 * 54 * 38) + 2 * 9 * 6 * 9  # without layer 0
    latent_up, shared = 2 * 10 * 54, 2 * (3 * 54 * 22)
    expected = whole / 3 + down + latent_up + shared + behind
    found = training_flops_per_token(MODEL, 8, ("layers.3.feed_forward.experts.down",))
    assert found == pytest.approx(expected, abs=60), "routed experts are one module"


def test_states_are_those_of_what_trains() -> None:
    (whole,), (part,) = (parts_of(with_trainable(*patterns), 1) for patterns in ((), ("*.experts.down", "head.bias")))
    trained = 3 * 5 * 10 * 14 + 61
    assert trained_of(part) == trained and part.count.trained == trained
    assert state_bytes(part) == 16 * trained + 2 * (whole.count.total - trained)
    assert "2,161 parameters" in describe(with_trainable("*.experts.down", "head.bias"), 1)


def test_patterns_go_by_the_numbers_of_the_whole_model() -> None:
    """A rank of a pipeline counts its layers from 0."""
    recipe = with_trainable("layers.2.attention.sinks", "layers.3.ffn_norm.*", pp=2, pp_layout="Ett|ttL")
    assert [trained_of(part) for part in parts_of(recipe, 2)] == [0, 9 + 2 * 54]
