"""Words of other frameworks for our values, what is so here anyway, and what they take where a file says nothing."""

from collections.abc import Mapping
from typing import Any

WORDS: Mapping[str, Mapping[Any, Any]] = {
    "model.norm": {"rmsnorm": "rms", "layernorm": "layer"},
    "precision.compute": {"bfloat16": "bf16", "float32": "fp32", "bf16": "bf16", "fp32": "fp32"},
    "precision.master": {"bfloat16": "bf16", "float32": "fp32", "fp32": "fp32", "bf16": "bf16"},
    "precision.reduce": {"bfloat16": "bf16", "float32": "fp32", "fp32": "fp32", "bf16": "bf16"},
    "parallel.reshard_after_forward": {"always": True, "never": False, "default": True, True: True, False: False},
    "compile.regional": {True: "on_cuda", False: "off"},
    "perf.attention": {
        "flash": "flash",
        "fused": "cudnn",
        "unfused": "math",
        "auto": "auto",
        "sdpa": "auto",
        "flex": "flex",
        "flash_attention_2": "flash",
    },
    "model.moe.drop_policy": {"probs": "probs", "position": "position"},
}
"""By our key: a word or a truth of others, in small letters -> our value."""

ANYTHING = object()
AGREEING: Mapping[str, Any] = {
    "swiglu": True,
    "gated_linear_unit": True,
    "disable_bias_linear": True,
    "add_bias_linear": False,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "position_embedding_type": "rope",
    "use_rotary_position_embeddings": True,
    "max_position_embeddings": ANYTHING,
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "moe_router_fusion": True,
    "moe_router_dtype": ANYTHING,
    "cross_entropy_loss_fusion": True,
    "use_flash_attn": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "accumulate_allreduce_grads_in_fp32": True,
    "calculate_per_token_loss": True,
    "use_mcore_models": True,
    "distributed_backend": "nccl",
    "bias_swiglu_fusion": True,
    "bias_dropout_fusion": True,
    "apply_rope_fusion": True,
    "attention_softmax_in_fp32": True,
    "finalize_model_grads": ANYTHING,
    "num_workers": ANYTHING,
    "use_precision_aware_optimizer": ANYTHING,
    "optimizer.implementation": ANYTHING,
    "job.description": ANYTHING,
    "job.print_config": ANYTHING,
    "moe_router_force_load_balancing": False,
    "fp16": False,
}
"""Names whose value all recipes have, as ours is built."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "megatron": {
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "position_embedding_type": "learned_absolute",
        "rotary_base": 10_000,
        "ffn_hidden_size": 0,
        "swiglu": False,
        "disable_bias_linear": False,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "untie_embeddings_and_output_weights": False,
        "init_method_std": 0.02,
        "bf16": False,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-8,
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "lr_decay_style": "linear",
        "min_lr": 0.0,
        "seed": 1234,
        "moe_router_topk": 2,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_token_dispatcher_type": "allgather",
        "cp_comm_type": "p2p",
    },
    "torchtitan": {
        "training.local_batch_size": 8,
        "training.global_batch_size": -1,
        "training.seq_len": 2048,
        "training.steps": 10_000,
        "training.max_norm": 1.0,
        "optimizer.name": "AdamW",
        "optimizer.lr": 8e-4,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.95,
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.1,
        "lr_scheduler.warmup_steps": 200,
        "lr_scheduler.decay_type": "linear",
        "lr_scheduler.min_lr_factor": 0.0,
        "parallelism.expert_parallel_comm_backend": "standard",
        "parallelism.context_parallel_rotate_method": "allgather",
    },
    "bridge": {},
}
"""By dialect, what a job does where its file says nothing, as far as ours may differ. Bridge's recipes say all."""
OF_EXPERTS = "moe_"
"""Defaults whose names begin so hold for models with experts."""

NAMES = {"megatron": "Megatron-Core", "torchtitan": "torchtitan", "bridge": "Megatron-Bridge"}
"""By dialect."""
