"""Words of config.json that no tiny model of transformers shows: which layers are dense, and what cannot be said."""

from dataclasses import replace
from typing import Any

import pytest

from titan_moe.checkpoint.hf_names.families import FAMILIES, family_for, family_of
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "rms_norm_eps": 1e-5}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "q_lora_rank": None}
LATENT |= {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
V3 = LATENT | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
ERNIE = {"moe_k": 2, "moe_num_experts": 4}


@pytest.mark.parametrize(
    ("family", "settings", "kinds"),
    [
        ("qwen3_moe", {"num_experts": 4, "decoder_sparse_step": 3}, "ddMddM"),
        ("qwen3_moe", {"num_experts": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, "dMdddM"),
        ("qwen2_moe", {"num_experts": 4, "shared_expert_intermediate_size": 8, "mlp_only_layers": [5, 0]}, "dMMMMd"),
        ("deepseek_v2", LATENT | {"moe_layer_freq": 2}, "ddMdMd"),
        ("deepseek_v3", V3 | {"moe_layer_freq": 3, "first_k_dense_replace": 0}, "MddMdd"),
        ("deepseek_v3", V3, "dMMMMM"),
        ("glm4_moe_lite", V3 | {"mlp_layer_types": ["sparse", "dense"] * 3}, "MdMdMd"),
        ("ernie4_5_moe", ERNIE, "dMMMMM"),
        ("ernie4_5_moe", ERNIE | {"moe_layer_interval": 2, "moe_layer_start_index": 2}, "dddMdM"),
        ("ernie4_5_moe", ERNIE | {"moe_layer_start_index": 2, "moe_layer_end_index": 3}, "ddMMdd"),
        ("ernie4_5_moe", ERNIE | {"moe_layer_start_index": 4, "moe_layer_end_index": 4}, "ddddMd"),
    ],
)
def test_dense_layers_are_read_and_written(family: str, settings: dict[str, Any], kinds: str) -> None:
    model, _ = FAMILIES[family].read(SIZES | settings)
    assert "".join("M" if i in model.moe_layers else "d" for i in range(6)) == kinds
    hash(model)  # what it keeps of itself is no field
    again, _ = FAMILIES[family].read(FAMILIES[family].write(model))
    assert again.layers_by_kind == model.layers_by_kind


AFMOE = {"num_experts": 4, "sliding_window": 8}
EXAONE = {"num_experts": 4, "sliding_window": 8}
DOTS = V3 | {"head_dim": 8, "sliding_window": 8}
QWEN2 = {"num_experts": 4, "shared_expert_intermediate_size": 8, "use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "settings", "windows"),
    [
        ("dots1", DOTS, "ffffff"),  # by default from the 62nd layer on
        ("dots1", DOTS | {"max_window_layers": 4}, "ffffww"),
        ("dots1", DOTS | {"sliding_window": None, "max_window_layers": 4}, "ffffff"),
        ("qwen2_moe", QWEN2, "wfwfwf"),
        ("qwen2_moe", QWEN2 | {"max_window_layers": 3}, "wfwfff"),
        ("qwen2_moe", QWEN2 | {"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, "fffffw"),
        ("qwen2_moe", QWEN2 | {"use_sliding_window": False}, "ffffff"),
        ("afmoe", AFMOE, "wwwfww"),
        ("afmoe", AFMOE | {"global_attn_every_n_layers": 3}, "wwfwwf"),
        ("exaone_moe", EXAONE | {"sliding_window_pattern": 2}, "wfwfwf"),
        ("exaone_moe", EXAONE | {"sliding_window": None}, "ffffff"),
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 8, "sliding_window": 8}, "wfwfwf"),
    ],
)
def test_windows_of_layers_are_read_and_written(family: str, settings: dict[str, Any], windows: str) -> None:
    model, _ = FAMILIES[family].read(SIZES | settings)
    again, _ = FAMILIES[family].read(FAMILIES[family].write(model))
    for read in (model, again):
        assert "".join("fw"[read.attention.has_window(layer)] for layer in range(6)) == windows
    with pytest.raises(ValueError, match="layer_types in config.json has 2 entries, and num_hidden_layers = 6"):
        FAMILIES["dots1"].read(SIZES | DOTS | {"layer_types": ["full_attention"] * 2})
    with pytest.raises(ValueError, match="linear_attention are not built here"):
        FAMILIES["dots1"].read(SIZES | DOTS | {"layer_types": ["linear_attention"] * 6})


MODEL = ModelConfig(num_layers=6, ffn_hidden_size=48, attention=AttentionConfig(), moe=MoEConfig(4, ffn_hidden_size=16))


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("dots1", {"dense_layers": (1, 4)}, "dense_layers"),
        ("ernie4_5_moe", {"dense_layers": (0, 1, 4)}, "dense_layers"),
        ("granitemoe", {"dense_layers": (0,)}, "num_dense_layers = 1"),
        ("mixtral", {"residual_multiplier": 0.5}, "residual_multiplier = 0.5"),
        ("qwen3_moe", {"logits_scaling": 2.0}, "logits_scaling = 2.0"),
        ("qwen3_moe", {"attention": AttentionConfig(softmax_scale=0.5, qk_norm=True)}, "softmax_scale = 0.5"),
    ],
)
def test_what_a_family_has_no_words_for_is_named(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"{family} has no words for .*{words}"):
        FAMILIES[family].write(replace(MODEL, **changes))


def test_a_scale_of_attention_that_is_the_usual_one_has_words_everywhere() -> None:
    usual = replace(MODEL, attention=AttentionConfig(head_dim=64, softmax_scale=0.125, qk_norm=True))
    assert FAMILIES["qwen3_moe"].write(usual)["head_dim"] == 64
    granite = FAMILIES["granitemoe"].write(replace(usual, attention=AttentionConfig(head_dim=64)))
    assert granite["attention_multiplier"] == 0.125


def test_gpt_oss_is_stretched_where_config_json_does_not_say_it() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    assumed = transformers.GptOssConfig().rope_parameters
    sizes = SIZES | {"num_local_experts": 4, "head_dim": 8, "sliding_window": 8}
    for silent in ({}, {"rope_scaling": None, "rope_parameters": None}):
        model, settings = FAMILIES["gpt_oss"].read(sizes | silent)
        assert model == FAMILIES["gpt_oss"].read(sizes | {"rope_parameters": assumed})[0]
        assert model.attention.yarn_factor == settings.assumed["rope_parameters"]["factor"] == 32.0
    plain = FAMILIES["gpt_oss"].read(sizes | {"rope_scaling": {"rope_type": "default"}})[0]
    assert plain.attention.yarn_factor == 1.0


def test_a_dense_model_has_no_shared_experts() -> None:
    dense = replace(MODEL, moe=MoEConfig(0, ffn_hidden_size=0))
    with pytest.raises(ValueError, match="no family of Hugging Face"):
        family_for(dense)
    with pytest.raises(
        ValueError, match=r"does: (\w+ has no words for model\.[^;]+; ){3}and 1\d more families do not$"
    ):
        family_for(replace(MODEL, norm_placement="after_moe"))
    with pytest.raises(ValueError, match="is no multiple of model.moe.ffn_hidden_size = 16"):
        FAMILIES["ernie4_5_moe"].write(replace(MODEL, moe=MoEConfig(4, ffn_hidden_size=16, shared_ffn_hidden_size=24)))


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("afmoe", {"layer_types": ["full_attention"] * 6}, "only windowed layers of afmoe have a rotary embedding"),
        ("exaone_moe", {"layer_types": ["full_attention"] * 6}, "exaone_moe with a sliding_window has windowed layers"),
        ("exaone_moe", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern = 'LLLG' in config.json"),
        (
            "mellum",
            {
                "layer_types": ["full_attention", "sliding_attention"] * 3,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                    "sliding_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
                    | {"original_max_position_embeddings": 64},
                },
            },
            "rope_parameters of sliding_attention in config.json: of them rope_theta alone",
        ),
    ],
)
def test_what_a_family_of_windows_does_not_build_is_named(family: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FAMILIES[family].read(SIZES | {"num_experts": 4, "sliding_window": 8} | settings)


def test_a_score_of_groups_that_is_the_usual_one_has_words() -> None:
    """Megatron Core's rule is DeepSeek-V3's for its numbers."""
    moe = MoEConfig(16, 4, 16, score_fn="sigmoid", num_groups=4, top_k_groups=2, group_score="top_share_sum")
    attention = AttentionConfig(qk_norm=True)
    model = replace(MODEL, ffn_hidden_size=0, attention=attention, moe=moe)
    assert FAMILIES["dots1"].write(model)["topk_group"] == 2
    with pytest.raises(ValueError, match="dots1 has no words for model.moe.group_score = 'top_share_sum'"):
        FAMILIES["dots1"].write(replace(model, moe=replace(moe, top_k=6)))


@pytest.mark.parametrize(
    ("model_type", "block"),
    [("qwen3_5_moe_text", "gated delta rule"), ("jamba", "Mamba blocks"), ("lfm2_moe", "convo")],
)
def test_a_family_of_other_blocks_is_refused_by_the_block(model_type: str, block: str) -> None:
    with pytest.raises(ValueError, match=rf"model_type = '{model_type}' in config.json has .*{block}.* not built here"):
        family_of({"model_type": model_type})


def test_a_wrong_number_of_layers_is_no_endless_loop() -> None:
    with pytest.raises(ValueError, match="num_layers"):
        FAMILIES["ernie4_5_moe"].read(SIZES | ERNIE | {"num_hidden_layers": 10**12})
