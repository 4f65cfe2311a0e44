"""How values of a model's shape become `[model]`, a row for each that is not simply another name."""

from collections.abc import Mapping
from typing import Any

from titan_moe.config.migrate.arithmetic import NotArithmetic, evaluate
from titan_moe.config.migrate.flavors import FLAVORS, SMALL_FLAVORS, SMALL_MSCALE, YARN_FROM_TOKENS
from titan_moe.config.migrate.given import Given, NoCounterpart, Row, Unreadable

MAX_LAYERS = 10_000
MEGATRON = ("megatron", "bridge")


def is_mla(given: Given) -> bool:
    """Whether attention is multi-head latent."""
    return given.flag("multi_latent_attention")


def _flavor(given: Given) -> Mapping[str, Any]:
    name, flavor = str(given.raw("model.name", "")), str(given.raw("model.flavor", ""))
    if "model.flavor" not in given or (name, flavor) not in FLAVORS:
        of_name = [known for model, known in FLAVORS if model == name]
        others = f"flavors of {name} are {', '.join(of_name)}" if of_name else "models are qwen3 and deepseek_v3"
        raise NoCounterpart(f"the shape of {name} {flavor} is not known here; {others}. Write the shape into [model]")
    yarn: dict[str, Any] = {}
    if name == "deepseek_v3" and given.whole("train.seq_len_tokens", 2048) > YARN_FROM_TOKENS:
        scale = SMALL_MSCALE if flavor in SMALL_FLAVORS else 1.0  # of the softmax alone
        yarn = {"yarn_factor": 40.0, "yarn_original_tokens": YARN_FROM_TOKENS}
        yarn |= {"yarn_mscale": scale, "yarn_mscale_all_dim": scale}
        yarn = {f"model.attention.{name}": value for name, value in yarn.items()}
    return {"model.name": f"{name}_{flavor.lower()}".replace("-", "_"), **FLAVORS[name, flavor], **yarn}


def _attention(given: Given) -> Mapping[str, Any]:
    if is_mla(given):
        widths = {
            "qk_nope_head_dim": ("qk_head_dim", 128),
            "qk_rope_head_dim": ("qk_pos_emb_head_dim", 64),
            "v_head_dim": ("v_head_dim", 128),
            "kv_lora_rank": ("kv_lora_rank", 512),
            "q_lora_rank": ("q_lora_rank", 0),
        }
        eps = {"latent_norm_eps": given.number("model.norm_eps")} if "model.norm_eps" in given else {}
        values = {"kind": "mla", "rope_is_interleaved": True, **eps}
        values |= {ours: given.whole(theirs, default) for ours, (theirs, default) in widths.items()}
    else:
        heads, hidden = given.whole("model.attention.num_heads"), given.whole("model.hidden_size")
        values = {}
        if width := given.whole("kv_channels", hidden // heads if heads else 0):
            values["head_dim"] = width
        groups_hold = given.dialect == "bridge" or given.flag("group_query_attention")
        if kv_heads := given.whole("num_query_groups", heads) if groups_hold else heads:
            values["num_kv_heads"] = kv_heads
        if "qk_layernorm" in given:
            values["qk_norm"] = given.flag("qk_layernorm")
    if "model.attention.num_heads" in given:
        values["num_heads"] = given.whole("model.attention.num_heads", 0, 1)
    return {f"model.attention.{name}": value for name, value in values.items()}


def _yarn(given: Given) -> Mapping[str, Any]:
    kind = given.word("rope_type", "yarn" if is_mla(given) else "rope")
    factor = given.number("rotary_scaling_factor", 1.0)
    if kind != "yarn" or factor == 1:
        return {}
    names = {
        "yarn_original_tokens": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
        "yarn_mscale": "mscale",
        "yarn_mscale_all_dim": "mscale_all_dim",
    }
    values = {ours: given.number(theirs) for ours, theirs in names.items() if theirs in given}
    if "yarn_original_tokens" in values:
        values["yarn_original_tokens"] = given.whole("original_max_position_embeddings")
    return {f"model.attention.{name}": value for name, value in ({"yarn_factor": factor} | values).items()}


def _llama3_rope(given: Given) -> Mapping[str, Any]:
    used = given.flag("use_rope_scaling", "rope_scaling" in given and given.raw("rope_scaling") is True)
    return {"model.attention.llama3_factor": given.number("rope_scaling_factor", 8.0)} if used else {}


def _window(given: Given) -> Mapping[str, Any]:
    if "window_size" not in given:
        raise NoCounterpart("model.attention.full_attention_every, beside a sliding_window")
    words = [word.strip("()[]") for word in given.words("window_size")]
    if len(words) != 2 or not words[0].lstrip("-").isdecimal() or words[1] not in ("0", "-1"):
        raise Unreadable(given["window_size"], "two whole numbers: tokens before, and 0 after")
    values = {"model.attention.sliding_window": max(int(words[0][:18]) + 1, 0)}
    if "window_attn_skip_freq" in given:
        values["model.attention.full_attention_every"] = given.whole("window_attn_skip_freq")
    return values


def layers_with_experts(given: Given) -> list[bool] | None:
    """Of each layer, whether it has experts; None where that is not said."""
    number = given.whole("model.num_layers")
    if "moe_layer_freq" not in given or not number:
        return None
    entry, value = given["moe_layer_freq"], given.raw("moe_layer_freq")
    expected = "a number, or a list with a 0 or 1 for each layer such as ([0]*3+[1]*58)"
    if isinstance(value, str):
        try:
            value = evaluate(value)
        except NotArithmetic as error:
            raise Unreadable(entry, f"{expected}: {error}") from error
    if number > MAX_LAYERS:
        raise Unreadable(given["model.num_layers"], f"at most {MAX_LAYERS:,}")
    if type(value) is int and value > 0:
        return [layer % value == 0 for layer in range(number)]
    if not isinstance(value, list) or any(type(one) is not int or one not in (0, 1) for one in value):
        raise Unreadable(entry, expected)
    if len(value) != number:
        raise Unreadable(entry, f"a list of as many entries as there are layers, {number}; it has {len(value)}")
    return [one == 1 for one in value]


def _feed_forward(given: Given) -> Mapping[str, Any]:
    """Megatron's experts have the width of dense layers where they have none of their own."""
    has_experts = "model.moe.num_experts" in given
    pattern = layers_with_experts(given) if has_experts else None
    values: dict[str, Any] = {}
    if pattern and not all(pattern):
        leading = pattern.index(True) if any(pattern) else len(pattern)
        values["model.num_dense_layers"] = leading
        if others := [at for at in range(leading, len(pattern)) if not pattern[at]]:
            values["model.dense_layers"] = others
    width = given.whole("ffn_hidden_size")
    if not width and given.dialect == "megatron" and (hidden := given.whole("model.hidden_size")):
        width = hidden * 8 // 3 // 64 * 64 if given.flag("swiglu") else 4 * hidden
    if width and (not has_experts or values):
        values["model.ffn_hidden_size"] = width
    if has_experts and (of_expert := given.whole("moe_ffn_hidden_size", width)):
        values["model.moe.ffn_hidden_size"] = of_expert
    return values


def _router(given: Given) -> Mapping[str, Any]:
    """Scores of softmax are normed if Megatron takes the softmax behind top-k; those of sigmoid always are."""
    score = given.word("moe_router_score_function", "softmax")
    if score not in ("softmax", "sigmoid"):
        raise NoCounterpart("model.moe.score_fn takes softmax and sigmoid")
    normed = score == "sigmoid" or not given.flag("moe_router_pre_softmax")
    return {"model.moe.score_fn": score, "model.moe.normalize_topk": normed}


def _groups(given: Given) -> Mapping[str, Any]:
    """A group's score is the sum of its best top_k / top_k_groups; where these are two, it is that of DeepSeek-V3."""
    number, chosen = given.whole("moe_router_num_groups", 1, 1), given.whole("moe_router_group_topk", 1, 1)
    if number == 1:
        return {}
    score = "top2_sum" if given.whole("model.moe.top_k", 2) == 2 * chosen else "top_share_sum"
    return {"model.moe.num_groups": number, "model.moe.top_k_groups": chosen, "model.moe.group_score": score}


def _bias(given: Given) -> Mapping[str, Any]:
    if not given.flag("moe_router_enable_expert_bias"):
        return {}
    return {"model.moe.bias_update_speed": given.number("moe_router_bias_update_rate", 1e-3)}


AUX_LOSSES = {
    "aux_loss": "model.moe.aux_losses.microbatch",
    "seq_aux_loss": "model.moe.aux_loss_coef",
    "global_aux_loss": "model.moe.aux_losses.global_batch",
    "none": "",
    "null": "",
}
"""Megatron's kinds of balancing losses -> our coefficients."""


def _aux_losses(given: Given) -> Mapping[str, Any]:
    kinds = given.words("moe_router_load_balancing_type", ("aux_loss",))
    coefs = given.words("moe_aux_loss_coeff", ("0",))
    if unknown := [kind for kind in kinds if kind not in AUX_LOSSES]:
        raise NoCounterpart(f"{unknown[0]} does not balance here; take model.moe.aux_losses or bias_update_speed")
    try:
        numbers = [float(coef) for coef in coefs]
    except ValueError as error:
        raise Unreadable(given["moe_aux_loss_coeff"], "a number for each loss") from error
    if len(numbers) not in (1, len(kinds)):
        raise Unreadable(given["moe_aux_loss_coeff"], f"one number, or one for each of {', '.join(kinds)}")
    numbers = numbers * len(kinds) if len(numbers) == 1 else numbers
    return {AUX_LOSSES[kind]: coef for kind, coef in zip(kinds, numbers, strict=True) if AUX_LOSSES[kind] and coef}


def _hash_layers(given: Given) -> Mapping[str, Any]:
    names = [name for name in ("num_hash_layers", "n_hash_layers", "moe_n_hash_layers") if name in given]
    number = given.whole(names[0]) if names else 0
    if number > MAX_LAYERS:
        raise Unreadable(given[names[0]], f"at most {MAX_LAYERS:,}")
    return {"model.moe.hash_layers": tuple(range(number))}


def _capacity(given: Given) -> Mapping[str, Any]:
    """Negative factors are Megatron's word for none."""
    factor = given.number("moe_expert_capacity_factor")
    return {"model.moe.capacity_factor": factor} if factor > 0 else {}


def _init(given: Given) -> Mapping[str, Any]:
    """Megatron draws embeddings as all matrices; ours are larger by default."""
    std = given.number("init_method_std", 0.02)
    is_tied = given.flag("share_embeddings_and_output_weights") or not given.flag(
        "untie_embeddings_and_output_weights", default=True
    )
    of_embeddings = {} if is_tied else {"model.embedding_init_std": given.number("embedding_init_method_std", std)}
    return {"model.init_std": std, **of_embeddings}


ROWS = (
    Row("model.flavor model.name", _flavor),
    Row(
        "model.attention.num_heads kv_channels group_query_attention num_query_groups multi_latent_attention "
        "qk_layernorm qk_head_dim qk_pos_emb_head_dim q_lora_rank kv_lora_rank v_head_dim",
        _attention,
    ),
    Row(
        "rope_type rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim",
        _yarn,
    ),
    Row("use_rope_scaling rope_scaling rope_scaling_factor", _llama3_rope),
    Row("window_size window_attn_skip_freq", _window),
    Row("ffn_hidden_size moe_ffn_hidden_size moe_layer_freq", _feed_forward),
    Row("moe_router_score_function moe_router_pre_softmax", _router),
    Row("moe_router_num_groups moe_router_group_topk", _groups),
    Row("moe_router_enable_expert_bias moe_router_bias_update_rate", _bias),
    Row("moe_router_load_balancing_type moe_aux_loss_coeff", _aux_losses),
    Row("num_hash_layers n_hash_layers moe_n_hash_layers", _hash_layers),
    Row("moe_expert_capacity_factor", _capacity),
    Row("init_method_std embedding_init_method_std", _init),
)
