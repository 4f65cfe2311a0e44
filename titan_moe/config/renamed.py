"""Renamed and removed keys of recipes, and what others call ours: the error for such a key names its replacement or the
reason. And keys of later releases: what a run without them did."""

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "parallel.gathers_once_a_step": "parallel.accumulate_unsharded",
    "perf.optimizer": "optim.kind (torch -> adamw, fused -> fused_adamw)",
    "train.force_balanced_routing": "train.forced_load (true -> balanced; false: drop it)",
    "train.force_skewed_routing": "train.forced_load (true -> skewed; false: drop it)",
    "perf.override.slots": "perf.override.permute",
}
"""Old key -> new key, and its new values if they changed too."""

REMOVED = {
    "parallel.chunks": "exchanges in chunks were slower",
    'parallel.overlap = "layer"': 'overlap = "microbatch" hides more between nodes, overlap = "tile" inside a node',
    "perf.override.norm": "PyTorch's norm was as fast; it is used everywhere",
}
"""Removed key, or value of a key -> the reason."""

NAMES_ELSEWHERE = {
    "learning_rate": "optim.lr",
    "batch_size": "train.global_batch_sequences",
    "global_batch_size": "train.global_batch_sequences",
    "micro_batch_size": "train.micro_batch_sequences",
    "local_batch_size": "train.micro_batch_sequences",
    "seq_len": "train.seq_len_tokens",
    "seq_length": "train.seq_len_tokens",
    "train_iters": "train.steps",
    "train_samples": "train.steps (train_samples / global_batch_size)",
    "min_lr": "optim.min_lr_ratio (min_lr / lr)",
    "num_hidden_layers": "model.num_layers",
    "intermediate_size": "model.ffn_hidden_size (of experts: model.moe.ffn_hidden_size)",
    "first_k_dense_replace": "model.num_dense_layers",
    "tie_word_embeddings": "model.embeddings_are_tied",
    "num_attention_heads": "model.attention.num_heads",
    "num_query_groups": "model.attention.num_kv_heads",
    "num_key_value_heads": "model.attention.num_kv_heads",
    "kv_channels": "model.attention.head_dim",
    "rotary_base": "model.attention.rope_theta",
    "window_size": "model.attention.sliding_window (the token itself included)",
    "num_experts_per_tok": "model.moe.top_k",
    "moe_router_topk": "model.moe.top_k",
    "moe_router_group_topk": "model.moe.top_k_groups",
    "moe_router_score_function": "model.moe.score_fn",
    "moe_router_topk_scaling_factor": "model.moe.route_scale",
    "routed_scaling_factor": "model.moe.route_scale",
    "moe_router_bias_update_rate": "model.moe.bias_update_speed",
    "moe_ffn_hidden_size": "model.moe.ffn_hidden_size",
    "moe_intermediate_size": "model.moe.ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "model.moe.shared_ffn_hidden_size",
    "n_shared_experts": "model.moe.shared_ffn_hidden_size (n_shared_experts * moe_intermediate_size)",
    "moe_token_dispatcher_type": "parallel.dispatcher",
    "sequence_parallel": "parallel.tp (sequence parallelism comes with it)",
    "num_virtual_stages_per_pipeline_rank": "parallel.vpp",
    "num_layers_per_virtual_pipeline_stage": "parallel.vpp (stages of a rank, not layers of a stage)",
    "recompute_granularity": "memory.recompute",
    "clip_grad": "optim.max_grad_norm",
    "adam_eps": "optim.eps",
    "save_interval": "checkpoint.every_steps",
    "eval_interval": "validation.every_steps",
    "eval_iters": "validation.num_sequences (eval_iters * global_batch_size)",
    "log_interval": "metrics.every_steps",
} | {
    f"{axis}{model}_parallel{word}": f"parallel.{key}"
    for axis, key in {"tensor": "tp", "context": "cp", "pipeline": "pp", "expert": "ep", "expert_tensor": "etp"}.items()
    for model in ("", "_model")
    for word in ("", "_size", "_degree")
}
"""What other frameworks call a field -> its key, and its value if that has another unit."""


def values_before(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Where a run of an earlier release did something else than the default of a later field: the field's value.

    `fields` are all those of the run, by dotted key.
    """
    values: dict[str, Any] = {"data.split_special_tokens": False}
    if fields.get("model.attention.kind") == "mla" and "model.norm_eps" in fields:
        values["model.attention.latent_norm_eps"] = fields["model.norm_eps"]
    return {dotted: value for dotted, value in values.items() if dotted not in fields}
