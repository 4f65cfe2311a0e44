"""Renamed and removed keys of recipes, and names of other frameworks: the error for such a key names its replacement or
what to do instead. And keys of later releases: what a run without them did."""

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
    'compile.cudagraph = "microbatch"': 'a graph of each microbatch was slower and took more memory; take "step"',
    "compile.extent": "whole blocks as one graph were not faster; every block is compiled in pieces",
    "parallel.chunks": "exchanges in chunks were slower",
    'parallel.overlap = "layer"': 'overlap = "microbatch" hides more between nodes, overlap = "tile" inside a node',
    "parallel.expert_clones = a number": '0 is now "off"; for any other take "auto"',
    'parallel.pp_schedule = "interleaved_zero_bubble"': '"zbv" was faster; take it, or '
    '"interleaved_1f1b" where weight gradients are not delayed',
    "precision.all_gather": "weights are gathered in the dtype of precision.compute",
    'precision.moments = "int8"': '"fp8" trains as well and takes half of the time; take it, also to resume a run with '
    '"int8": its checkpoints have moments in fp32',
    "perf.override.norm": "PyTorch's norm was as fast; it is used everywhere",
}
"""Removed key, or value of a key -> the reason."""

SPELLINGS = {
    "run.folder": "output_dir dump_folder run_name logging_dir log_dir job.folder",
    "run.folder (checkpoints are in its folder checkpoints)": "save save_dir checkpoint_dir checkpoint.folder",
    "run.folder (a run goes on from its newest checkpoint)": "resume resume_from_checkpoint restore_from "
    "auto_resume_from_checkpoints load_step",
    "run.seed": "data_seed rng_seed random_seed",
    'run.device (true -> "cpu")': "use_cpu no_cuda",
    "run.is_deterministic": "deterministic deterministic_mode full_determinism use_deterministic_algorithms",
    "run.step_timeout_minutes": "distributed_timeout_minutes",
    "run.step_timeout_minutes (the seconds / 60)": "train_timeout_seconds ddp_timeout",
    "train.steps": "train_iters max_steps num_steps_total total_steps max_iters max_train_steps "
    "num_iterations train.num_steps",
    "train.steps (train_samples / global_batch_size)": "train_samples",
    "train.epochs": "epoch num_epochs max_epochs num_train_epochs train_epochs",
    "train.tokens": "train_tokens max_tokens num_tokens total_tokens",
    "train.seq_len_tokens": "seq_len seq_length max_seq_len max_seq_length max_length sequence_len sequence_length "
    "cutoff_len block_size model_max_length context_length packed_sequence_size",
    "train.batch_schedule": "rampup_batch_size batch_size_schedule batch_size_warmup step_batch_size_schedule",
    "train.global_batch_sequences": "batch_size global_batch_size train_batch_size global_train_batch_size",
    "train.global_batch_sequences (gradient_accumulation_steps * micro_batch_sequences * data-parallel ranks)": ""
    "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches num_microbatches grad_accum_steps",
    "train.micro_batch_sequences": "micro_batch_size local_batch_size per_device_train_batch_size microbatch_size "
    "train_micro_batch_size_per_gpu per_device_batch_size per_gpu_train_batch_size batch_size_per_gpu "
    "pipeline_parallel_microbatch_size",
    'train.forced_load (true -> "uniform")': "moe_router_force_load_balancing",
    'train.forced_load (true -> "balanced")': "moe_force_load_balance force_load_balance",
    # The shape of the model.
    "model.vocab_size": "padded_vocab_size n_vocab",
    "model.num_layers": "num_hidden_layers n_layers n_layer num_decoder_layers",
    "model.num_dense_layers": "first_k_dense_replace n_dense_layers",
    "model.moe_every": "decoder_sparse_step interleave_moe_layer_step moe_layer_interval",
    "model.moe_every (moe_every counts layers from 1, moe_layer_freq from 0)": "moe_layer_freq",
    "model.dense_layers": "mlp_only_layers",
    "model.dense_layers (the numbers of those that are dense)": "mlp_layer_types",
    "model.hidden_size": "dim d_model n_embd model_dim embedding_dim",
    "model.ffn_hidden_size": "inter_dim",
    "model.ffn_hidden_size (of experts: model.moe.ffn_hidden_size)": "intermediate_size",
    'model.norm ("RMSNorm" -> "rms", "LayerNorm" -> "layer")': "normalization norm_type",
    "model.norm_eps": "layernorm_epsilon norm_epsilon rms_norm_eps layer_norm_eps layer_norm_epsilon rms_norm_epsilon",
    "model.embeddings_are_tied": "tie_word_embeddings share_embeddings_and_output_weights tie_embeddings "
    "enable_weight_tying",
    "model.embeddings_are_tied (the opposite value)": "untie_embeddings_and_output_weights",
    "model.init_std": "init_method_std initializer_range",
    "model.embedding_init_std": "embedding_init_method_std",
    "model.head_bias": "lm_head_bias",
    "model.logits_scaling (1 / lm_head_multiplier)": "lm_head_multiplier",
    'model.attention.kind (true -> "mla")': "multi_latent_attention",
    "model.attention.softmax_scale": "attention_multiplier",
    "model.attention.num_heads": "num_attention_heads n_heads n_head heads",
    "model.attention.num_kv_heads": "num_query_groups num_key_value_heads n_kv_heads group_query_attention",
    "model.attention.head_dim": "kv_channels",
    "model.attention.qk_norm": "qk_layernorm use_qk_norm",
    'model.attention.qk_norm_over ("per_layer" -> "all_heads")': "qk_norm_type",
    'model.attention.qk_norm (and qk_norm_is_after_rope; "L2Norm" -> qk_norm_has_weights = false)': "qk_l2_norm",
    "model.attention.qkv_bias": "add_qkv_bias",
    "model.attention.qkv_bias (and out_bias, of the output projection)": "attention_bias",
    'model.attention.sinks ("learnable" -> true)': "softmax_type",
    'model.attention.output_gate (true -> "element")': "attention_output_gate attn_output_gate",
    "model.attention.sliding_window (the token itself included)": "window_size",
    "model.attention.full_attention_every (every n-th layer is full)": "window_attn_skip_freq sliding_window_pattern",
    "model.attention.window_layers (the numbers of those with windows)": "layer_types max_window_layers",
    "model.attention.rope_theta": "rotary_base",
    "model.attention.partial_rotary_factor (of heads of gqa)": "rotary_percent",
    "model.attention.partial_rotary_factor (a share of model.attention.head_dim)": "rotary_dim",
    "model.attention.nope_every": "no_rope_layer_interval every_n_layers_nope no_rope_freq",
    "model.attention.nope_every (every n-th layer has no rotary embedding)": "no_rope_layers",
    "model.attention.attn_scale (0 means none)": "attn_temperature_tuning",
    "model.attention.rope_is_interleaved": "rotary_interleaved rope_interleave",
    'model.attention.yarn_factor (type "yarn" alone)': "rotary_scaling_factor rope_scaling rope_factor",
    "model.attention.yarn_original_tokens": "original_max_position_embeddings original_seq_len",
    "model.attention.yarn_beta_fast": "beta_fast",
    "model.attention.yarn_beta_slow": "beta_slow",
    "model.attention.yarn_truncate": "truncate yarn_correction_range_round_to_int",
    "model.attention.yarn_mscale": "mscale",
    "model.attention.yarn_mscale_all_dim": "mscale_all_dim",
    'model.attention.llama3_factor (type "llama3" alone)': "rope_scaling_factor",
    "model.attention.llama3_low_freq_factor": "low_freq_factor",
    "model.attention.llama3_high_freq_factor": "high_freq_factor",
    "model.attention.window_rope_theta": "rope_local_base_freq",
    "model.attention.longrope_short_factor": "short_factor",
    "model.attention.longrope_long_factor": "long_factor",
    "model.attention.longrope_short_scale": "short_mscale",
    "model.attention.longrope_long_scale": "long_mscale",
    "model.attention.qk_nope_head_dim": "qk_head_dim",
    "model.attention.qk_rope_head_dim": "qk_pos_emb_head_dim",
    "model.moe.hash_layers (their numbers: 3 is [0, 1, 2])": "num_hash_layers n_hash_layers moe_n_hash_layers "
    "hash_routing",
    "model.moe.num_experts": "num_moe_experts n_routed_experts num_local_experts",
    "model.moe.top_k": "num_experts_per_tok moe_router_topk num_experts_per_token moe_top_k",
    'model.moe.num_groups (Megatron\'s group_score is "top_share_sum")': "moe_router_num_groups",
    "model.moe.num_groups": "n_group n_groups num_expert_groups",
    "model.moe.top_k_groups": "moe_router_group_topk topk_group num_limited_groups",
    'model.moe.group_score ("group_limited_greedy" -> "max", "noaux_tc" -> "top2_sum")': "topk_method",
    "model.moe.sparsemixer_jitter": "router_jitter_noise",
    "model.moe.score_fn": "moe_router_score_function scoring_func",
    "model.moe.normalize_topk": "norm_topk_prob route_norm moe_renormalize",
    "model.moe.normalize_topk (the opposite value)": "moe_router_pre_softmax",
    "model.moe.input_jitter": "moe_input_jitter_eps input_jitter_eps router_input_jitter jitter_noise",
    "model.moe.router_dtype": "moe_router_dtype",
    "model.moe.route_scale": "moe_router_topk_scaling_factor routed_scaling_factor",
    'model.moe.score_on (true -> "input")': "moe_apply_probs_on_input score_before_experts",
    "model.moe.bias_update_speed": "moe_router_bias_update_rate load_balance_coeff",
    "model.moe.bias_update_speed (true -> 1e-3, false -> 0)": "moe_router_enable_expert_bias use_expert_bias",
    "model.moe.aux_loss_coef": "moe_aux_loss_coeff aux_loss_alpha moe_aux_loss_coef",
    "model.moe.aux_loss_coef (another formula: of each sequence and layer)": "router_aux_loss_coef",
    'model.moe.aux_losses.sequence ("seq_aux_loss"; "aux_loss" -> microbatch, "global_aux_loss" -> global_batch)': ""
    "moe_router_load_balancing_type",
    "model.moe.capacity_factor": "moe_expert_capacity_factor expert_capacity_factor",
    "model.moe.capacity_factor (0 drops nothing)": "moe_token_dropping",
    "model.moe.drop_policy": "moe_token_drop_policy",
    "model.moe.pad_to_capacity": "moe_pad_expert_input_to_capacity",
    "model.moe.z_loss_coef": "moe_z_loss_coeff router_z_loss_coef moe_z_loss_coef",
    "model.moe.swiglu_limit": "activation_func_clamp_value",
    "model.moe.swiglu_up_offset": "glu_linear_offset",
    "model.moe.latent_size": "moe_latent_size",
    "model.moe.ffn_hidden_size": "moe_ffn_hidden_size moe_intermediate_size moe_inter_dim",
    "model.moe.shared_ffn_hidden_size": "moe_shared_expert_intermediate_size shared_expert_intermediate_size",
    "model.moe.shared_ffn_hidden_size (n_shared_experts * moe_intermediate_size)": "n_shared_experts "
    "num_shared_experts",
    "model.moe.shared_expert_gate": "moe_shared_expert_gate",
    # Where it runs.
    "parallel.dispatcher": "moe_token_dispatcher_type moe_flex_dispatcher_backend expert_parallel_comm_backend",
    'parallel.dispatcher (over NVLink: "symm_mem" or "hierarchical_symm_mem")': "moe_enable_deepep enable_deepep",
    "parallel.tp (sequence parallelism comes with it)": "sequence_parallel",
    "parallel.cp": "sequence_parallel_degree sequence_parallel_size ulysses_parallel_size "
    "ulysses_sequence_parallel_size ring_attn_size",
    'parallel.cp_kind ("p2p" -> "ring", "a2a" -> "ulysses", "all_gather" -> "allgather")': "cp_comm_type",
    "parallel.cp_kind": "context_parallel_rotate_method",
    "parallel.vpp": "num_virtual_stages_per_pipeline_rank virtual_pipeline_model_parallel_size",
    "parallel.vpp (stages of a rank, not layers of a stage)": "num_layers_per_virtual_pipeline_stage "
    "pipeline_parallel_layers_per_stage",
    "parallel.pp_schedule": "pipeline_parallel_schedule",
    "parallel.pp_layout": "pipeline_model_parallel_layout module_fqns_per_model_part "
    "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage decoder_first_pipeline_num_layers "
    "decoder_last_pipeline_num_layers",
    "parallel.dp_shard": "dp dp_size data_parallel_size data_parallel_degree dp_shard_size dp_shard_degree "
    "data_parallel_shard_degree",
    "parallel.dp_shard (parameters, gradients and moments are sharded over these ranks)": "fsdp fsdp_config "
    "zero_stage use_fsdp2 use_torch_fsdp2 use_megatron_fsdp zero_optimization.stage",
    "parallel.dp_replicate": "dp_replicate_size dp_replicate_degree data_parallel_replicate_degree",
    "parallel.tp_comm_overlap": "enable_async_tensor_parallel",
    "parallel.reshard_after_forward": "fsdp_reshard_after_forward",
    'parallel.overlap (true -> "microbatch")': "overlap_moe_expert_parallel_comm",
    "memory.offload (parts of a block)": "offload_modules fine_grained_activation_offloading cpu_offload_activations "
    "activation_offloading enable_activation_offloading",
    "memory.recompute": "recompute_granularity recompute_modules activation_checkpoint.mode",
    'memory.recompute (true -> "block")': "gradient_checkpointing activation_checkpointing use_gradient_checkpointing "
    "recompute_activations activation_checkpoint",
    'memory.recompute (true -> "experts")': "moe_layer_recompute",
    'memory.park (true -> "moments")': "optimizer_cpu_offload offload_optimizer",
    "compile.regional": "torch_compile compile.enable enable_compile",
    "compile.cudagraph": "cuda_graph_impl cuda_graph_scope enable_cuda_graph external_cuda_graph cuda_graph",
    "perf.attention": "attention_backend attn_implementation flash_attention flash_attn use_flash_attn sdp_attention "
    "flex_attention attn_type attn_backend",
    'perf.override.permute (true -> "triton")': "moe_permute_fusion",
    'perf.override.router (true -> "triton")': "moe_router_fusion",
    'perf.override.head (true -> "triton")': "cross_entropy_loss_fusion",
    "precision.compute": "dtype torch_dtype params_dtype model_dtype mixed_precision mixed_precision_param",
    'precision.compute (true -> "bf16")': "bf16 bfloat16",
    "precision.master": "training.dtype main_params_dtype",
    'precision.master (true -> "fp32_split")': "store_param_remainders split_master_weight_for_bf16",
    "precision.gradients": "main_grads_dtype",
    "precision.reduce": "mixed_precision_reduce grad_reduce_dtype",
    'precision.reduce (true -> "fp32")': "accumulate_allreduce_grads_in_fp32 grad_reduce_in_fp32",
    'precision.reduce (true -> "bf16")': "grad_reduce_in_bf16",
    "precision.moments": "exp_avg_dtype exp_avg_sq_dtype",
    "precision.format": "fp8 fp8_recipe fp8_format fp4 fp4_recipe recipe_name",
    "precision.modules_in_compute": "filter_fqns",
    'precision.backend (true -> "emulated")': "emulate",
    "precision.num_layers_at_start_in_compute": "num_layers_at_start_in_bf16",
    "precision.num_layers_at_start_in_compute (and num_layers_at_end_in_compute)": "first_last_layers_bf16",
    "precision.num_layers_at_end_in_compute": "num_layers_at_end_in_bf16",
    # The optimizer and its schedule.
    "model.mtp.num_depths": "mtp_num_layers num_nextn_predict_layers num_mtp_modules",
    "model.mtp.loss_weight": "mtp_loss_scaling_factor",
    "model.mtp.repeats_layer": "mtp_use_repeated_layer",
    "model.adapter.rank": "lora_r lora_rank",
    "model.adapter.alpha": "lora_alpha",
    "model.adapter.targets": "lora_target target_modules",
    'model.adapter.base (true -> "fp8_rowwise")': "load_in_8bit",
    "optim.groups": "param_groups optimizer_groups decoupled_lr embedding_lr weight_decay_modules lr_multipliers",
    "optim.trainable": "freeze_params trainable_modules unfrozen_parameters",
    "optim.kind": "optimizer optimizer.name optimizer.type optimizer_type optimizer_name",
    "optim.muon.momentum": "muon_momentum",
    "optim.muon.nesterov": "muon_use_nesterov muon_nesterov",
    "optim.muon.ns_steps": "muon_num_ns_steps muon_ns_steps",
    "optim.muon.adjust_lr": "muon_scale_mode adjust_lr_fn",
    "optim.qk_clip.threshold": "qk_clip_threshold qk_clip_balancing_threshold",
    "optim.qk_clip.threshold (true -> 100.0)": "muon_qk_clip log_max_attention_logit",
    "optim.qk_clip.alpha": "qk_clip_alpha",
    "optim.lr": "learning_rate max_lr peak_lr",
    "optim.min_lr_ratio": "min_lr_factor min_lr_rate cosine_min_lr_ratio",
    "optim.min_lr_ratio (min_lr / lr)": "min_lr",
    "optim.beta1": "adam_beta1 adamw_beta1",
    "optim.beta2": "adam_beta2 adamw_beta2",
    "optim.beta1 (and optim.beta2)": "betas adam_betas",
    "optim.eps": "adam_eps adam_epsilon",
    "optim.weight_decay": "wd adam_weight_decay",
    "optim.max_grad_norm": "clip_grad max_norm gradient_clipping gradient_clip_val clip_grad_norm grad_clip",
    "optim.warmup_steps": "lr_warmup_iters lr_warmup_steps warmup_iters num_warmup_steps",
    "optim.warmup_steps (lr_warmup_samples / global_batch_sequences)": "lr_warmup_samples",
    "optim.warmup_steps (the share * train.steps)": "warmup_ratio lr_warmup_fraction warmup_fraction",
    "optim.ema_decay": "ema ema_rate model_ema ema_beta ema_decay_rate weight_ema use_ema",
    "optim.decay_ends": "lr_restarts num_cycles t_mult first_cycle_steps lr_scheduler_kwargs.num_cycles",
    'optim.decay ("constant" -> decay_steps = 0)': "lr_decay_style lr_scheduler lr_scheduler_type lr_scheduler_name "
    "decay_type lr_wsd_decay_style lr_schedule",
    "optim.decay_steps (lr_decay_iters - lr_warmup_iters; the decay ends with the run)": "lr_decay_iters "
    "lr_decay_steps",
    "optim.decay_steps (lr_decay_samples / global_batch_sequences - warmup_steps; the decay ends with the run)": ""
    "lr_decay_samples",
    "optim.decay_steps": "lr_wsd_decay_iters num_decay_steps",
    "optim.decay_steps (decay_ratio * train.steps)": "decay_ratio",
    # Data, validation, checkpoints, metrics, traces.
    "data.path": "data_path train_data_path dataset dataset_path dataset_name train_file train_files data_files "
    "dataset_dir datasets data_dir",
    "data.subset": "dataset_config_name dataset_config",
    "data.text_column": "text_field text_column_name dataset_text_field",
    "data.mixture": "dataset_mixer dataset_mixture blend data_blend interleave_probs",
    "data.is_streamed": "streaming",
    "data.shuffle_buffer_sequences": "shuffle_buffer_size streaming_shuffle_buffer",
    "data.is_shuffled": "shuffle",
    "data.tokenizer": "tokenizer_path tokenizer_model tokenizer_type tokenizer_name tokenizer_name_or_path vocab_file "
    "hf_assets_path",
    'data.format ("chat")': "dataset_type",
    "data.chat.template (a file, or empty for the tokenizer's own)": "chat_template conversation_template "
    "chat_template_path chat_template_jinja",
    'data.chat.train_on (true -> "all"; false -> "answers")': "train_on_inputs train_on_prompt",
    'data.chat.train_on (true -> "answers")': "assistant_only_loss completion_only_loss mask_prompt answer_only_loss",
    'data.chat.train_on (true -> "last_answer")': "mask_history",
    "data.document_attention": "document documents document_mask reset_attention_mask neat_packing",
    'data.document_attention ("block_causal" -> true)': "attn_mask_type",
    "data.holdout_fraction": "val_set_size val_size test_size validation_split_percentage validation.dataset "
    "eval_dataset valid_data_path",
    "data.cache_folder": "cache_dir data_cache_path dataset_prepared_path",
    "validation.every_steps": "eval_interval eval_steps eval_every eval_freq val_interval val_every_steps "
    "val_check_interval eval_strategy evaluation_strategy validation.freq validation.interval validation.enable",
    "validation.every_steps (steps of an epoch / evals_per_epoch)": "evals_per_epoch",
    "validation.num_sequences (eval_iters * global_batch_size)": "eval_iters",
    "validation.num_sequences (steps * sequences of all ranks in a step)": "validation.steps validation.num_steps",
    "checkpoint": "checkpoint_path",
    "checkpoint.every_steps": "save_interval save_steps save_every save_freq save_strategy ckpt_every_steps "
    "checkpoint_interval checkpoint.interval checkpoint.enable",
    "checkpoint.every_steps (steps of an epoch / saves_per_epoch)": "saves_per_epoch",
    "checkpoint.keep_latest": "save_total_limit keep_latest_k",
    "checkpoint.is_async": "async_save async_mode",
    "checkpoint.export_hf_at_end": "last_save_in_hf",
    "checkpoint.upcycle.granularity": "moe_upcycling_granularity",
    "checkpoint.upcycle.granularity (true -> 1 or moe_upcycling_granularity)": "moe_use_upcycling",
    "checkpoint.load_from": "initial_load_path pretrained_checkpoint",
    "checkpoint.load_from (to resume keep run.folder)": "load load_path load_checkpoint_path",
    "metrics.every_steps": "log_interval logging_steps log_freq log_every_n_steps steps_per_print log_every",
    "metrics.tensorboard": "enable_tensorboard use_tensorboard report_to tensorboard_dir",
    "metrics.wandb": "enable_wandb use_wandb",
    "metrics.wandb_name": "wandb_run_name wandb_exp_name",
    "metrics.progress_bar (the opposite value)": "disable_tqdm",
    "profile.start_step": "profile_step_start enable_profiling use_pytorch_profiler profile_freq",
    "profile.num_steps": "profiler_active",
    "profile.num_steps (profile_step_end - profile_step_start)": "profile_step_end",
}
"""Key, and its value if that has another unit -> what other frameworks call it. A name with a section is this one's
alone."""
AXES = {"tensor": "tp", "context": "cp", "pipeline": "pp", "expert": "ep", "expert_tensor": "etp"}
NAMES_ELSEWHERE = (
    {name: key for key, names in SPELLINGS.items() for name in names.split()}
    | {f"{key}_{word}": f"parallel.{key}" for key in AXES.values() for word in ("size", "degree")}
    | {
        f"{axis}{model}_parallel{word}": f"parallel.{key}"
        for axis, key in AXES.items()
        for model in ("", "_model")
        for word in ("", "_size", "_degree")
    }
)
"""What other frameworks call a field -> its key, and its value if that has another unit."""

SECTIONS_ELSEWHERE = {
    name: section
    for section, names in {
        "run": "job debug comm rng",
        "train": "training trainer train_config training_args step_scheduler",
        "optim": "optimizer lr_scheduler scheduler lr_schedule adam",
        "parallel": "parallelism parallel_dims distributed parallelism_config zero_optimization",
        "model.attention": "attn self_attn self_attention",
        "model.adapter": "lora peft peft_config lora_config",
        "model.moe": "moe_args moe_config router experts",
        "precision": "mixed_precision fp16 bf16 quantize float8 fp8 mx quantization dtypes",
        "memory": "activation_checkpoint activation_checkpointing recompute",
        "data": "dataset datasets dataloader tokenizer packed_sequence",
        "validation": "eval evaluation validation_dataset validation_dataloader",
        "checkpoint": "checkpointing ckpt save",
        "metrics": "logging logger tensorboard wandb",
        "profile": "profiling profiler",
        "compile": "torch_compile cuda_graph",
    }.items()
    for name in names.split()
}
"""What other frameworks call a section -> ours."""

ABSENT = {
    "precision.compute is bf16 or fp32, which need no scaling of the loss": "fp16 loss_scale initial_loss_scale "
    "loss_scale_window fp16_enabled",
    "sequences are always packed; data.document_attention keeps documents apart": "packing sample_packing "
    "eval_sample_packing pad_to_sequence_len group_by_length pad_to_max_length packing_strategy",
    "positions are relative (RoPE), also in packed documents": "reset_position_ids max_position_embeddings "
    "position_embedding_type",
    'memory.recompute = ["block:8"] recomputes the first 8 layers': "recompute_num_layers recompute_method "
    "selective_ac_option checkpoint_num_layers gradient_checkpointing_kwargs distribute_saved_activations",
    "router and scores are always fp32 or wider": "moe_router_fp32",
    "routed experts are always grouped; perf.kernels has their implementations": "moe_grouped_gemm use_grouped_mm "
    "moe_use_legacy_grouped_gemm use_liger_kernel",
    "parameters, gradients and moments are always sharded over parallel.dp_shard": "use_distributed_optimizer "
    "overlap_grad_reduce overlap_param_gather ddp_bucket_size zero3_save_16bit_model",
    'weights stay on the GPU; memory.recompute, memory.offload, precision.moments = "fp8" and more ranks save '
    "memory": "cpu_offload enable_cpu_offload offload_param fsdp_offload_params cpu_offloading",
    "weights are gathered in the dtype of precision.compute": "enable_fsdp_float8_all_gather",
    "models have no dropout, and adapters none": "lora_dropout dropout hidden_dropout attention_dropout "
    "attn_dropout resid_dropout embd_pdrop",
    "logits have no noise; model.moe.input_jitter is that of their inputs": "router_noise_eps noisy_gate_policy",
    'no iteration makes assignments even while a step routes; model.moe.bias_update = "quantile" balances those of a '
    "step exactly, without a loss": "sinkhorn moe_sinkhorn sinkhorn_iterations use_sinkhorn",
    "the ranks of cp are those of the recipe in every microbatch, so that each has one shape; packing evens lengths, "
    "and data.document_attention skips what other documents have": "dynamic_context_parallel hybrid_context_parallel "
    "dynamic_cp hybrid_cp max_seqlen_per_dp_cp_rank max_seqlen_per_cp_rank",
    'weights that an optimizer updates are at least bf16; precision.master = "fp32_split" takes two bytes beside bf16 '
    "ones, precision.format computes in fp8, and model.adapter.base keeps frozen ones as codes": "fp8_param_gather "
    "fp8_param fp8_params fp8_primary_weights fp8_model_init enable_fp8_primary_weights "
    "reuse_grad_buf_for_mxfp8_param_ag",
    "a run sends no weights to a rollout engine, whose layout it does not know; hf_weights(model) of titan_moe gives "
    "whole tensors by Hugging Face name to send": "refit refit_method rollout_engine weight_sync_backend "
    "update_weights_nccl nccl_weight_sync",
    "layers are SwiGLU without biases; model.class takes a model of your own": "swiglu hidden_act "
    "activation activation_func gated_linear_unit add_bias_linear disable_bias_linear mlp_bias",
    'weights of Hugging Face are read with checkpoint.load_from = "hf:FOLDER"; titan-moe recipe FOLDER writes the '
    "[model] of such a folder": "model_name_or_path pretrained_model_name_or_path base_model from_pretrained "
    "initial_load_in_hf model_type flavor hf_model_path safe_serialization ckpt_format",
    "frozen weights are in the dtype of precision.compute; model.adapter.base stores them in fp8": "finetuning_type "
    "load_in_4bit qlora freeze_vision_tower",
    'data.format = "chat" trains on conversations, with the options of data.chat': "dataset_kwargs",
    "the next batch is read while a step runs": "num_workers dataloader_num_workers pin_memory prefetch_factor "
    "dataloader_pin_memory preprocessing_num_workers persistent_workers",
    "the loss is the cross entropy of the label tokens of a step": "label_smoothing_factor label_smoothing loss_fn "
    "calculate_per_token_loss neftune_noise_alpha eod_mask_loss",
    "validation has the microbatches of training, train.micro_batch_sequences": "per_device_eval_batch_size "
    "eval_batch_size",
    "metrics are in metrics.jsonl and TensorBoard, both in run.folder, and in Weights & Biases": "use_mlflow comet",
    "the environment variables of Weights & Biases hold: WANDB_ENTITY, WANDB_MODE": "wandb_entity wandb_mode",
    "the number of ranks is that of the command line: --nproc N, or torchrun": "world_size num_nodes nnodes num_gpus "
    "nproc_per_node gpus devices local_rank n_gpus",
    "a run that gets SIGTERM saves, and goes on when it is started again": "exit_duration_in_mins exit_interval "
    "exit_signal_handler max_time",
    "the start of a run has no limit": "init_timeout_seconds",
    "the vocabulary is not padded: model.vocab_size rows": "make_vocab_size_divisible_by",
    "memory is collected when PyTorch does": "manual_gc manual_gc_interval gc_freq empty_unused_memory_level",
    "weight decay is constant": "start_weight_decay end_weight_decay weight_decay_incr_style",
}
"""What to do instead -> names of other frameworks for which there is no field."""
WITHOUT_FIELD = {name: way_out for way_out, names in ABSENT.items() for name in names.split()}
"""A name of other frameworks for which there is no field -> what to do instead."""


def values_before(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Where a run of an earlier release did something else than the default of a later field: the field's value.

    `fields` are all those of the run, by dotted key.
    """
    values: dict[str, Any] = {"data.split_special_tokens": False}
    if fields.get("data.is_streamed"):
        values["data.stream_lanes"] = 0
    if fields.get("model.attention.kind") == "mla" and "model.norm_eps" in fields:
        values["model.attention.latent_norm_eps"] = fields["model.norm_eps"]
    return {dotted: value for dotted, value in values.items() if dotted not in fields}
