"""Each rule refuses the recipe that breaks it, and only that one."""

from pathlib import Path
from typing import Any

import pytest
from support.ways_out import ways_in

from titan_moe.config import RULES, Recipe, check_rules, load_recipe, refusals
from titan_moe.config.schema import all_keys

GOOD = [
    "--model.num_layers=4",
    "--model.num_dense_layers=1",
    "--model.ffn_hidden_size=512",
    "--model.moe.num_experts=16",
    "--model.moe.top_k=4",
    "--model.moe.ffn_hidden_size=64",
    "--parallel.ep=4",
    "--parallel.dispatcher=alltoall",
    "--train.global_batch_sequences=16",
    "--train.micro_batch_sequences=2",
    "--data.source=text",
    "--data.path=python-stdlib",
    "--data.holdout_fraction=0.1",
    "--validation.every_steps=10",
    "--metrics.sample_tokens=8",
]
"""A recipe for 8 ranks to which as many rules as possible apply."""

INTERLEAVED = (
    "--parallel.overlap=microbatch --parallel.accumulate_unsharded=true --train.global_batch_sequences=32 "
    "--parallel.dispatcher=allgather"
)
"""Overrides that interleave two microbatches."""

BOUNDED_LAYERS = "--parallel.dispatcher=symm_mem --parallel.expert_layer_capacity_factor=2 --run.device=cuda"
RING = "--parallel.cp=2 --parallel.cp_kind=ring"
ALLGATHER = "--parallel.cp=2 --parallel.cp_kind=allgather"

PIPELINE = "--parallel.pp=2 --train.micro_batch_sequences=1"
"""Overrides that run 4 microbatches through 2 stages."""

ZERO_BUBBLE = f"{PIPELINE} --parallel.pp_schedule=zbv --parallel.vpp=2 --parallel.accumulate_unsharded=true"
"""The same with split backwards."""

LONGROPE = f"--model.attention.longrope_short_factor={[1.5] * 32} --model.attention.longrope_long_factor={[3.0] * 32}"
LONGROPE = LONGROPE.replace(", ", ",")

# rule -> (overrides that break it, a part of the message)
BROKEN = {
    "numbers_are_in_range": ("--optim.beta2=1.0", "optim.beta2 = 1.0 must be at least 0 and below 1"),
    "class_is_addressable": ("--model.class=Transformer", '"package.module:Class"'),
    "table_is_of_a_class": (
        "--model.table=titan_moe.config.modules:default_modules",
        "describes a model.class of your own",
    ),
    "tied_embeddings_have_one_deviation": (
        "--model.embeddings_are_tied=true --model.embedding_init_std=0.5",
        "embedding_init_std = 0.5 has no effect with model.embeddings_are_tied = true",
    ),
    "layer_capacity_has_an_arena": (
        "--parallel.expert_layer_capacity_factor=2",
        "parallel.expert_layer_capacity_factor = 2 has no effect without an arena: ep groups share no memory with",
    ),
    "tied_embeddings_decay": (
        "--model.embeddings_are_tied=true --optim.embeddings_decay=false",
        "optim.embeddings_decay = false has no effect with model.embeddings_are_tied = true",
    ),
    "patterns_match_parameters": (
        '--optim.trainable=["*.routr.*"]',
        'optim.trainable: "*.routr.*" matches no parameter; near it: layers.*.feed_forward.router.weight',
    ),
    "clones_are_of_trained_experts": (
        '--optim.trainable=["head.*"] --parallel.expert_clones=auto',
        'parallel.expert_clones = "auto" needs routed experts that optim.trainable = ["head.*"] trains',
    ),
    "depths_are_in_the_sequence": (
        "--model.mtp.num_depths=8 --train.seq_len_tokens=8 --parallel.cp=1 --parallel.tp=1",
        "model.mtp.num_depths = 8 needs sequences of more tokens than train.seq_len_tokens = 8",
    ),
    "mtp_is_of_the_default_class": (
        "--model.mtp.num_depths=1 --model.class=package.module:Mine",
        'model.mtp.num_depths = 1 is built for the default class alone, not for model.class = "package.module:Mine"',
    ),
    "mtp_has_no_adapters": (
        "--model.mtp.num_depths=1 --model.adapter.rank=8",
        "model.mtp.num_depths = 1 trains no adapters, as model.adapter.rank = 8 asks for",
    ),
    "mtp_is_in_no_pieces": (
        "--model.mtp.num_depths=1 --parallel.overlap=microbatch",
        'model.mtp.num_depths = 1 cannot be interleaved by parallel.overlap = "microbatch"',
    ),
    "repeated_layer_has_no_clones": (
        "--model.mtp.num_depths=2 --model.mtp.repeats_layer=true --parallel.expert_clones=auto",
        'repeats_layer = true applies a block 2 times, which parallel.expert_clones = "auto" has clones for once',
    ),
    "repeated_layer_has_no_arena": (
        "--model.mtp.num_depths=2 --model.mtp.repeats_layer=true --parallel.dispatcher=symm_mem",
        "model.mtp.repeats_layer = true applies a block 2 times, and the rows that parallel.dispatcher",
    ),
    "adapter_options_need_a_rank": (
        "--model.adapter.alpha=32.0",
        "model.adapter.alpha = 32.0 needs adapters, but model.adapter.rank = 0",
    ),
    "codes_are_of_frozen_weights": (
        '--model.adapter.rank=8 --model.adapter.base=fp8_rowwise --optim.trainable=["*"]',
        'model.adapter.base = "fp8_rowwise" has no effect: optim.trainable = ["*"] trains every weight',
    ),
    "targets_are_there": (
        '--model.adapter.rank=8 --model.adapter.targets=["attention","shared","heads"]',
        'model.adapter.targets: the model has no shared experts for "shared"',
    ),
    "adapters_are_of_the_default_class": (
        "--model.adapter.rank=8 --model.class=own.models:Mine",
        "model.adapter.rank = 8 needs the default model.class",
    ),
    "frozen_experts_are_fused_by_themselves": (
        "--model.adapter.rank=8 --parallel.overlap=tile",
        'parallel.overlap = "tile" has weights that train, and model.adapter.targets has "experts"',
    ),
    "adapted_experts_multiply_in_compute": (
        "--model.adapter.rank=8 --precision.format=fp8_rowwise --precision.compute=bf16",
        "needs experts in compute's dtype",
    ),
    "muon_has_matrices": (
        "--model.adapter.rank=8 --optim.kind=muon",
        'optim.kind = "muon" has no matrix to update where model.adapter.rank = 8 freezes them',
    ),
    "clones_are_of_whole_experts": (
        '--optim.trainable=["*.experts.down"] --parallel.expert_clones=auto',
        'parallel.expert_clones = "auto" needs layers whose routed experts optim.trainable = ["*.experts.down"] trains',
    ),
    "adapted_experts_have_no_clones": (
        "--model.adapter.rank=8 --parallel.expert_clones=auto",
        'parallel.expert_clones = "auto" has no adapters',
    ),
    "upcycled_weights_are_of_hugging_face": (
        "--checkpoint.upcycle.granularity=1",
        'granularity = 1 needs `hf:` and the folder of a dense model in checkpoint.load_from = ""',
    ),
    "noise_is_on_copies": (
        "--checkpoint.upcycle.noise_std=0.1",
        "checkpoint.upcycle.noise_std = 0.1 has no effect with checkpoint.upcycle.granularity = 0",
    ),
    "virtual_groups_are_whole": (
        "--checkpoint.load_from=hf:dense --checkpoint.upcycle.granularity=5",
        "checkpoint.upcycle.granularity = 5 does not divide model.moe.top_k",
    ),
    "upcycled_scores_have_one_sum": (
        "--checkpoint.load_from=hf:dense --checkpoint.upcycle.granularity=1 --model.moe.normalize_topk=false",
        "needs scores whose sum is the same for all tokens, which model.moe.score_fn",
    ),
    "upcycled_experts_are_parts_of_the_mlp": (
        "--checkpoint.load_from=hf:dense --checkpoint.upcycle.granularity=1 --model.moe.latent_size=32",
        "checkpoint.upcycle.granularity = 1 cannot be had with model.moe.latent_size = 32",
    ),
    "upcycled_weights_train": (
        "--checkpoint.load_from=hf:dense --checkpoint.upcycle.granularity=1 --model.adapter.rank=8",
        "checkpoint.upcycle.granularity = 1 cannot be had with adapters (model.adapter.rank = 8)",
    ),
    "noise_is_saved": (
        "--checkpoint.load_from=hf:dense --checkpoint.upcycle.granularity=1 --checkpoint.upcycle.noise_std=0.1 "
        '--checkpoint.saves_frozen=false --optim.trainable=["*.router.*"]',
        "checkpoint.upcycle.noise_std = 0.1 with checkpoint.saves_frozen = false",
    ),
    "frozen_weights_are_somewhere": (
        "--model.adapter.rank=8 --checkpoint.saves_frozen=false",
        'checkpoint.saves_frozen = false needs frozen weights, and checkpoint.load_from = "" with them',
    ),
    "adapter_files_need_adapters": (
        "--checkpoint.load_adapter=adapters/mine",
        'checkpoint.load_adapter = "adapters/mine" and checkpoint.export_adapter_at_end = false need',
    ),
    "adapter_is_exported_from_a_checkpoint": (
        "--model.adapter.rank=8 --checkpoint.export_adapter_at_end=true --checkpoint.save_last_step=false",
        "needs a checkpoint of the last step, not checkpoint.save_last_step = false",
    ),
    "codes_are_multiplied_in_compute": (
        '--model.adapter.rank=8 --model.adapter.targets=["attention"] --model.adapter.base=fp8_rowwise '
        "--precision.linears=fp8_rowwise --precision.compute=bf16",
        'model.adapter.base = "fp8_rowwise" needs GEMMs in compute\'s dtype',
    ),
    "codes_are_whole_matrices": (
        '--model.adapter.rank=8 --model.adapter.targets=["attention"] --model.adapter.base=fp8_rowwise --parallel.tp=2',
        'model.adapter.base = "fp8_rowwise" needs whole matrices on a rank, not parallel.tp = 2 and parallel.etp = 1',
    ),
    "codes_have_no_clones": (
        '--model.adapter.rank=8 --model.adapter.targets=["attention"] --model.adapter.base=fp8_rowwise '
        "--parallel.expert_clones=auto",
        'parallel.expert_clones = "auto" has no codes, and model.adapter.base = "fp8_rowwise"',
    ),
    "codes_of_experts_are_whole": (
        "--model.adapter.rank=8 --model.adapter.base=fp8_blockwise --parallel.ep=1 --parallel.dispatcher=local",
        'model.adapter.base = "fp8_blockwise" needs experts that FSDP does not shard, and edp = 8',
    ),
    "own_heads_have_whole_blocks": (
        "--model.adapter.rank=8 --model.adapter.base=fp8_blockwise --model.attention.kind=mla --parallel.cp=2 "
        "--model.attention.v_head_dim=24",
        "own heads of parallel.cp = 2 have",
    ),
    "adapters_do_not_overlap_tp": (
        '--model.adapter.rank=8 --model.adapter.targets=["attention"] --parallel.tp=2 --parallel.tp_comm_overlap=true',
        "parallel.tp_comm_overlap = true has no adapters",
    ),
    "adapted_heads_are_not_shared": (
        '--model.adapter.rank=8 --model.adapter.targets=["attention"] --parallel.tp=4 --model.attention.num_kv_heads=2',
        "parallel.tp = 4 exceeds model.attention.num_kv_heads = 2, with adapters of attention",
    ),
    "edp_divides_adapted_width": (
        "--model.adapter.rank=8 --model.moe.ffn_hidden_size=36 --parallel.ep=1 --parallel.dispatcher=local",
        "edp = 8 does not divide the hidden width 36 of a rank",
    ),
    "adapted_rank_is_aligned": (
        "--model.adapter.rank=12",
        "the rank 12 of adapters of routed experts is no multiple of 8",
    ),
    "kv_heads_divide_heads": (
        "--model.attention.num_kv_heads=3",
        "num_kv_heads = 3 does not divide model.attention.num_heads = 8",
    ),
    "rotated_width_is_even": ("--model.attention.head_dim=33", "head_dim = 33 is odd"),
    "rotated_share_is_even": (
        "--model.attention.partial_rotary_factor=0.3",
        "partial_rotary_factor = 0.3 rotates 19 of head_dim = 64 elements",
    ),
    "norm_after_rope_is_over_heads": (
        "--model.attention.qk_norm_is_after_rope=true",
        'needs model.attention.qk_norm = true and qk_norm_over = "head"',
    ),
    "norm_without_weights_is_after_rope": (
        "--model.attention.qk_norm=true --model.attention.qk_norm_has_weights=false",
        "qk_norm_has_weights = false needs",
    ),
    "norm_of_rope_layers_has_no_weights": (
        "--model.attention.qk_norm=true --model.attention.qk_norm_layers=rope --model.attention.nope_every=2",
        'or rope_layers = "windowed", but they are true, 2 and "all"',
    ),
    "options_of_rope_have_layers": (
        "--model.attention.attn_scale=0.1 --model.attention.rope_layers=windowed --model.attention.sliding_window=8",
        "attn_scale = 0.1 has no effect: every layer has a rotary embedding",
    ),
    "chunks_have_no_windows": (
        "--model.attention.attention_chunk_size=8 --model.attention.sliding_window=8",
        "set one of them to 0",
    ),
    "some_layers_have_chunks": (
        "--model.attention.attention_chunk_size=8 --model.attention.nope_every=1",
        "has no effect with model.attention.nope_every = 1",
    ),
    "rope_of_windows_needs_windows": ("--model.attention.rope_layers=windowed", "leaves no layer a rotary embedding"),
    "theta_of_windows_needs_windows": (
        "--model.attention.window_rope_theta=500",
        "window_rope_theta = 500 has no effect with model.attention.sliding_window = 0",
    ),
    "theta_of_windows_is_a_base": (
        "--model.attention.window_rope_theta=0.5 --model.attention.sliding_window=8",
        "window_rope_theta = 0.5 must be above 1, or 0",
    ),
    "llama3_factors_are_ordered": (
        "--model.attention.llama3_factor=8 --model.attention.llama3_low_freq_factor=4",
        "llama3_high_freq_factor = 4 is not above model.attention.llama3_low_freq_factor = 4",
    ),
    "llama3_excludes_others": (
        "--model.attention.llama3_factor=8 --model.attention.yarn_factor=4",
        "llama3_factor = 8 goes neither with YaRN nor with LongRoPE",
    ),
    "gqa_options_need_gqa": ("--model.attention.kind=mla --model.attention.qk_norm=true", "qk_norm"),
    "full_layers_are_some_of_the_layers": (
        "--model.attention.sliding_window=8 --model.attention.full_attention_every=5",
        "full_attention_every = 5 exceeds model.num_layers = 4",
    ),
    "window_layers_are_layers": (
        "--model.attention.sliding_window=8 --model.attention.window_layers=[1,4]",
        "window_layers = [1, 4] must be different layers of model.num_layers = 4",
    ),
    "yarn_betas_are_ordered": (
        "--model.attention.yarn_factor=4 --model.attention.yarn_beta_slow=40",
        "yarn_beta_fast",
    ),
    "longrope_has_a_divisor_for_each_pair": (
        "--model.attention.longrope_short_factor=1,1.5",
        "longrope_short_factor has 2 numbers for the 32 rotated pairs",
    ),
    "longrope_excludes_yarn": (
        f"{LONGROPE} --model.attention.yarn_factor=4",
        "yarn_factor = 4 does not go with model.attention.longrope_short_factor",
    ),
    "longrope_covers_the_sequences": (
        f"{LONGROPE} --model.attention.longrope_original_tokens=8",
        'exceeds model.attention.longrope_original_tokens = 8 with model.attention.longrope_applies = "short"',
    ),
    "groups_match_parameters": (
        '--optim.groups=[{parameters="*.routr.*"}]',
        'optim.groups: "*.routr.*" matches no parameter; near it: layers.*.feed_forward.router.weight',
    ),
    "groups_have_factors": (
        '--optim.groups=[{parameters="head.*",lr_scale=0}]',
        "optim.groups[0].lr_scale = 0.0 must be finite and above 0",
    ),
    "decays_end_in_order": ("--optim.decay_ends=[20,10]", "optim.decay_ends = [20, 10] must be steps in rising order"),
    "restarts_follow_a_decay": (
        "--optim.decay_ends=[10] --optim.decay_steps=0",
        "optim.decay_ends = [10] with optim.decay_steps = 0",
    ),
    "restarts_have_an_end": (
        "--optim.restart_warmup_steps=3",
        "optim.restart_warmup_steps = 3 with optim.decay_ends = []",
    ),
    "batches_grow": (
        "--train.batch_schedule=[{until_tokens=4096,global_batch_sequences=12}]",
        "train.batch_schedule[0]: train.global_batch_sequences = 12 is not a multiple of",
    ),
    "averages_follow_weights_on_the_gpu": (
        "--memory.park=states --optim.ema_decay=0.9",
        'memory.park = "states" with optim.ema_decay = 0.9',
    ),
    "noise_is_of_the_blocks_of_a_model": (
        "--model.moe.input_jitter=0.01 --model.mtp.num_depths=1",
        "model.moe.input_jitter = 0.01 with model.mtp.num_depths = 1",
    ),
    "dense_layers_fit": ("--model.num_dense_layers=5", "exceeds model.num_layers = 4"),
    "some_layers_have_experts": (
        "--model.moe_every=2 --model.dense_layers=[1,3]",
        "moe_every = 2 and model.dense_layers = [1, 3] leave none of model.num_layers = 4 to the experts",
    ),
    "norms_after_experts_need_experts": (
        "--model.norm_placement=after_moe --model.num_dense_layers=0 --model.moe.num_experts=0 --parallel.ep=1 "
        "--parallel.dispatcher=local",
        'norm_placement = "after_moe" has no effect in a model without MoE layers',
    ),
    "norm_over_all_heads_is_a_norm": (
        "--model.attention.qk_norm_over=all_heads",
        'qk_norm_over = "all_heads" needs model.attention.qk_norm = true',
    ),
    "layers_without_rope_are_some_of_the_layers": (
        "--model.attention.nope_every=5",
        "nope_every = 5 exceeds model.num_layers = 4",
    ),
    "moe_layers_are_some_of_the_layers": ("--model.moe_every=5", "moe_every = 5 exceeds model.num_layers = 4"),
    "dense_layers_are_layers": ("--model.dense_layers=[1,4]", "[1, 4] must be different layers of"),
    "dense_layers_have_a_width": ("--model.ffn_hidden_size=0", "num_dense_layers = 1 makes 1 layer dense"),
    "experts_have_a_width": ("--model.moe.ffn_hidden_size=0", "MoE layers have 16 experts"),
    "sparsemixer_has_its_settings": (
        "--model.moe.score_fn=sparsemixer",
        "needs model.moe.normalize_topk = false, not true",
    ),
    "top_k_fits_experts": ("--model.moe.top_k=17", "top_k = 17 exceeds model.moe.num_experts = 16"),
    "one_weight_is_not_normalised": (
        "--model.moe.top_k=1",
        "gives the router no gradient through the scores",
    ),
    "groups_divide_experts": ("--model.moe.num_groups=3", "num_groups = 3 does not divide model.moe.num_experts = 16"),
    "top_k_groups_fit_groups": (
        "--model.moe.num_groups=4 --model.moe.top_k_groups=5",
        "top_k_groups = 5 exceeds model.moe.num_groups = 4",
    ),
    "top_k_fits_chosen_groups": (
        "--model.moe.num_groups=8 --model.moe.top_k_groups=1",
        "exceeds the 2 experts in the groups of a token",
    ),
    "top2_groups_hold_two": (
        "--model.moe.num_groups=16 --model.moe.top_k_groups=4",
        "two experts a group",
    ),
    "top_k_groups_share_experts": (
        "--model.moe.num_groups=4 --model.moe.top_k_groups=3 --model.moe.group_score=top_share_sum",
        'which model.moe.group_score = "top_share_sum" needs',
    ),
    "shared_gate_needs_shared_experts": ("--model.moe.shared_expert_gate=true", "shared_ffn_hidden_size = 0"),
    "sequences_are_whole_where_they_drop": (
        "--model.moe.capacity_factor=1 --model.moe.drop_over=sequence --parallel.tp=2",
        'drop_over = "sequence" with parallel.cp = 1 and parallel.tp = 2',
    ),
    "forced_loads_are_not_dropped": (
        "--model.moe.capacity_factor=1 --train.forced_load=balanced",
        'would drop tokens of train.forced_load = "balanced"',
    ),
    "hash_layers_are_moe_layers": (
        "--model.moe.hash_layers=[0,1]",
        "model.moe.hash_layers = [0, 1] must be different MoE layers of model.num_layers = 4",
    ),
    "hash_table_has_layers": (
        "--model.moe.hash_table=table.npy",
        'model.moe.hash_table = "table.npy" has no effect with model.moe.hash_layers = []',
    ),
    "hash_layers_drop_nothing": (
        "--model.moe.hash_layers=[1] --model.moe.capacity_factor=1",
        "model.moe.hash_layers = [1] with model.moe.capacity_factor = 1",
    ),
    "hash_layers_have_no_order": (
        "--model.moe.hash_layers=[1] --model.moe.score_fn=sparsemixer --model.moe.top_k=2 "
        "--model.moe.normalize_topk=false",
        'model.moe.hash_layers = [1] with model.moe.score_fn = "sparsemixer"',
    ),
    "hash_layers_are_of_the_default_class": (
        "--model.moe.hash_layers=[1] --model.class=package.module:Mine",
        'model.moe.hash_layers = [1] is built for the default class alone, not for model.class = "package.module:Mine"',
    ),
    "padding_has_a_capacity": ("--model.moe.pad_to_capacity=true", "with model.moe.capacity_factor = 0"),
    "padded_slots_have_their_dispatcher": (
        "--model.moe.pad_to_capacity=true --model.moe.capacity_factor=1 --parallel.ep=2 --parallel.dispatcher=alltoall",
        'not parallel.dispatcher = "alltoall"',
    ),
    "quantiles_have_their_settings": (
        "--model.moe.bias_update=quantile --model.moe.bias_update_speed=1e-3",
        'bias_update = "quantile" needs model.moe.bias_update_speed = 0',
    ),
    "quantiles_alone_are_averaged": ("--model.moe.bias_ema=0.5", 'bias_ema = 0.5 with model.moe.bias_update = "sign"'),
    "sequence_loss_is_given_once": (
        "--model.moe.aux_loss_coef=0.1 --model.moe.aux_losses.sequence=0.2",
        "aux_loss_coef = 0.1 and model.moe.aux_losses.sequence = 0.2",
    ),
    "pipeline_options_need_pp": (
        "--parallel.vpp=2",
        "parallel.vpp = 2 needs a pipeline, but parallel.pp = 1",
    ),
    "vpp_fits_the_schedule": (
        f"{PIPELINE} --parallel.vpp=3 --parallel.pp_schedule=zbv",
        'vpp = 3 does not fit parallel.pp_schedule = "zbv"',
    ),
    "stages_have_layers": (
        f"{PIPELINE} --parallel.pp_schedule=interleaved_1f1b --parallel.vpp=3",
        "parallel.pp * vpp = 2 * 3 = 6 stages are more than model.num_layers = 4",
    ),
    "layout_fits_the_model": (
        f"{PIPELINE} --parallel.pp_layout=Ett|t|L",
        'parallel.pp_layout = "Ett|t|L": it has 3 layers (t), but model.num_layers = 4',
    ),
    "microbatches_fill_the_pipeline": (
        "--parallel.pp=2 --train.micro_batch_sequences=4",
        'makes 1 microbatch a step, but parallel.pp_schedule = "1f1b" with pp = 2 needs 2 or more',
    ),
    "split_backwards_are_possible": (
        f"{PIPELINE} --parallel.pp_schedule=zbv --parallel.vpp=2",
        "after the last weight gradient, which needs parallel.accumulate_unsharded = true",
    ),
    "interleaved_pipeline_has_pairs": (
        f"{ZERO_BUBBLE} {INTERLEAVED}",
        'pp_schedule = "zbv" has no pairs',
    ),
    "cp_kind_needs_cp": (
        "--parallel.cp_kind=ring --data.document_attention=true",
        'parallel.cp_kind = "ring" needs context parallelism, but parallel.cp = 1',
    ),
    "cp_divides_sequences": (
        "--parallel.cp=2 --train.seq_len_tokens=129",
        "parallel.cp * tp = 2 * 1 = 2 does not divide train.seq_len_tokens = 129",
    ),
    "cp_divides_heads": (
        "--parallel.cp=4 --model.attention.num_heads=12 --model.attention.num_kv_heads=6",
        "num_heads = 12 over 6 key/value heads",
    ),
    "cp_supports_the_recipe": (
        "--parallel.cp=2 --model.class=my.model:Mine",
        '"my.model:Mine"',
    ),
    "ring_supports_the_recipe": (
        f"{RING} --data.document_attention=true",
        'parallel.cp_kind = "ring" does not support data.document_attention = true',
    ),
    "tp_divides_heads": (
        "--parallel.tp=4 --model.attention.num_heads=12 --model.attention.num_kv_heads=6",
        "num_heads = 12 over 6 key/value heads",
    ),
    "tp_divides_widths": ("--parallel.tp=2 --model.vocab_size=257", "= 257"),
    "tp_divides_sequences": (
        "--parallel.tp=2 --train.seq_len_tokens=129",
        "parallel.tp = 2 does not divide train.seq_len_tokens = 129",
    ),
    "dp_shard_divides_columns": ("--parallel.tp=2 --model.hidden_size=130", "dp_shard = 4 does not divide"),
    "tp_overlap_is_possible": (
        "--parallel.tp_comm_overlap=true",
        "has no messages to hide with parallel.tp = 1",
    ),
    "tp_supports_the_recipe": (
        "--parallel.tp=2 --model.class=mine:Model",
        'model.class = "mine:Model"',
    ),
    "dp_shard_is_a_size": (
        "--parallel.dp_shard=0",
        "is neither a number of ranks nor -1, for all that the other axes leave",
    ),
    "dense_view_fills_the_world": ("--parallel.dp_shard=4", "= 4, but the run has 8 ranks"),
    "expert_view_divides_the_world": ("--parallel.dp_replicate=4", "does not divide the 8 ranks"),
    "ep_divides_experts": ("--parallel.ep=6", "parallel.ep = 6 does not divide model.moe.num_experts = 16"),
    "etp_divides_expert_hidden_width": (
        "--parallel.etp=3 --perf.kernels=reference",
        "parallel.etp = 3 does not divide model.moe.ffn_hidden_size = 64",
    ),
    "ep_needs_experts": ("--model.num_dense_layers=4", "this model has none"),
    "ep_needs_a_dispatcher_that_moves_rows": ("--parallel.dispatcher=local", "parallel.ep = 4 spreads the experts"),
    "overlap_has_communication": (
        "--parallel.ep=1 --parallel.dispatcher=local --parallel.overlap=tile",
        'parallel.dispatcher = "local" has none',
    ),
    "dispatcher_supports_overlap": (
        "--parallel.overlap=tile --parallel.dispatcher=alltoall",
        'by parallel.dispatcher = "alltoall"',
    ),
    "tile_overlap_needs_fused_experts": (
        "--parallel.overlap=tile --parallel.dispatcher=symm_mem --model.moe.score_on=input",
        'parallel.overlap = "tile" needs fused experts, which need model.moe.score_on = "activation"',
    ),
    "dispatcher_has_its_device": (
        "--parallel.dispatcher=symm_mem --run.device=cpu",
        'with run.device = "cpu"',
    ),
    "shared_memory_has_peers": (
        "--parallel.dispatcher=symm_mem --parallel.ep=1",
        "parallel.ep = 1 leaves one rank in each",
    ),
    "ep_group_stays_on_a_node": (
        "--parallel.dispatcher=symm_mem --parallel.ep=3",
        "parallel.ep = 3 does not divide the 8 ranks of a node",
    ),
    "ep_group_has_nodes": (
        "--parallel.ep_ranks_per_node=2",
        'has no effect with parallel.dispatcher = "alltoall"',
    ),
    "interleaved_microbatches_run_in_pieces": (
        "--parallel.overlap=microbatch",
        "for two microbatches and needs parallel.accumulate_unsharded = true",
    ),
    "capacity_factor_fits_the_dispatcher": (
        "--parallel.expert_rank_capacity_factor=1.5",
        'parallel.dispatcher = "alltoall", whose sizes are exact',
    ),
    "graphs_can_be_captured": (
        "--compile.cudagraph=step",
        "of every layer on the host",
    ),
    "edp_divides_expert_width": ("--model.moe.latent_size=31 --perf.kernels=reference", "edp = 2"),
    "batch_divides": (
        "--train.global_batch_sequences=40",
        "train.global_batch_sequences = 40 is not a multiple of train.micro_batch_sequences * data-par",
    ),
    "validation_divides": (
        "--validation.num_sequences=8",
        "validation.num_sequences = 8 is not a multiple of train.micro",
    ),
    "grouped_mm_has_the_dtype": ("--precision.compute=fp32 --run.device=cuda", 'run.device = "cuda"'),
    "triton_kernels_can_run": (
        "--perf.override.router=triton --run.device=cpu",
        'perf.override.router = "triton" is a Triton kernel, which does not run with run.device = "cpu"',
    ),
    "expert_rows_are_aligned": ("--model.moe.ffn_hidden_size=68", "68 is not a multiple of 8"),
    "master_and_reduce_are_no_coarser_than_compute": (
        "--precision.compute=fp32 --precision.master=bf16 --optim.kind=fused_adamw",
        'precision.master = "bf16" is coarser than precision.compute = "fp32"',
    ),
    "optimizer_has_the_dtypes": ("--precision.moments=bf16", 'precision.master = "fp32" has no optim.kind = "adamw"'),
    "alpha_needs_a_threshold": (
        "--optim.qk_clip.alpha=0.4",
        "optim.qk_clip.alpha = 0.4 has no effect with optim.qk_clip.threshold = 0",
    ),
    "clipped_logits_are_not_normed": (
        "--optim.qk_clip.threshold=100 --model.attention.qk_norm=true",
        "optim.qk_clip.threshold = 100 scales projections, whose results model.attention.qk_norm = true norms",
    ),
    "clipped_logits_are_not_clamped": (
        "--optim.qk_clip.threshold=100 --model.attention.clip_qkv=8",
        "optim.qk_clip.threshold = 100 scales projections, whose results model.attention.clip_qkv = 8 clamps",
    ),
    "clipped_attention_is_ours": (
        "--optim.qk_clip.threshold=100 --model.class=my_package:MyModel",
        'optim.qk_clip.threshold = 100 does not support model.class = "my_package:MyModel"',
    ),
    "clipped_weights_train": (
        "--optim.qk_clip.threshold=100 --optim.trainable=layers.1.attention.*",
        "optim.qk_clip.threshold = 100 scales projections, of which model.adapter.rank = 0 and optim.trainable",
    ),
    "clipped_weights_are_not_rounded_away": (
        "--optim.qk_clip.threshold=100 --optim.kind=fused_adamw --precision.master=bf16",
        'optim.qk_clip.threshold = 100 does not support precision.master = "bf16"',
    ),
    "clipped_masters_are_on_the_device": (
        "--optim.qk_clip.threshold=100 --optim.kind=fused_adamw --precision.master=fp32_split --memory.park=states",
        'optim.qk_clip.threshold = 100 does not support memory.park = "states" with precision.master = "fp32_split"',
    ),
    "options_of_muon_have_an_effect": (
        "--optim.muon.momentum=0.9",
        'optim.muon.momentum = 0.9 has no effect with optim.kind = "adamw"',
    ),
    "states_are_parked_by_our_kernel": (
        "--memory.park=moments",
        'memory.park = "moments" has no optim.kind = "adamw"',
    ),
    "parked_states_exist": (
        "--memory.park=states --optim.kind=fused_adamw",
        'which precision.master = "fp32" does not have',
    ),
    "split_masters_are_for_bf16": (
        "--precision.compute=fp32 --precision.master=fp32_split --optim.kind=fused_adamw",
        'precision.master = "fp32_split" has no precision.compute = "fp32"',
    ),
    "bf16_weights_are_rounded_stochastically": (
        "--precision.master=bf16",
        'precision.master = "bf16" needs stochastic rounding, which optim.kind = "adamw" has not',
    ),
    "attention_backend_exists": ("--run.device=cpu --perf.attention=cudnn", 'perf.attention = "cudnn"'),
    "dense_masks_fit": (
        f"{ALLGATHER} --train.seq_len_tokens=131072",
        'parallel.cp_kind = "allgather" needs a dense mask of 65536 * 131072 bytes, 8 GiB, which is more than 1 GiB',
    ),
    "attention_is_deterministic": (
        "--run.is_deterministic=true --perf.attention=cudnn",
        'run.is_deterministic = true excludes perf.attention = "cudnn"',
    ),
    "flex_has_the_dtype": ("--precision.compute=fp64 --perf.attention=flex", '"fp64" has no perf.attention = "flex"'),
    "recomputed_parts_are_known": (
        "--memory.recompute=norms,layernorm",
        'memory.recompute has "layernorm": "layernorm" is no part of a block; "norms" is',
    ),
    "recomputed_parts_exist": (
        "--model.num_dense_layers=4 --memory.recompute=experts",
        'memory.recompute has "experts", which needs layers with experts among its own, and this model has none',
    ),
    "recomputed_parts_are_apart": (
        "--memory.recompute=norms,block:2-3",
        'memory.recompute has "block" and, of the same layers, norms, which blocks contain',
    ),
    "recomputed_blocks_are_all": (
        "--memory.recompute=block:-1 --parallel.dispatcher=symm_mem --parallel.overlap=tile --run.device=cuda "
        "--parallel.expert_rank_capacity_factor=1.5",
        'memory.recompute has "block" in 1 of 3 layers, whose rows lie in an arena',
    ),
    "pieces_are_not_recomputed": (
        f"{INTERLEAVED} --memory.recompute=norms",
        'parallel.overlap = "microbatch" runs blocks in pieces, not memory.recompute = "norms"',
    ),
    "split_backwards_repeat_outputs_alone": (
        f"{ZERO_BUBBLE} --memory.recompute=norms,attention",
        'splits backwards, but memory.recompute = "attention" needs whole ones',
    ),
    "offloaded_parts_are_known": (
        "--memory.offload=block,qkv_linear",
        'has "qkv_linear": its input stays on the GPU, memory.recompute = "norms" frees it',
    ),
    "offloaded_parts_are_kept": (
        "--memory.offload=attention:2-3 --memory.recompute=qkv_rope:-1",
        'memory.offload has "attention" and, of the same layers, memory.recompute has "qkv_rope"',
    ),
    "pieces_are_not_offloaded": (
        f"{INTERLEAVED} --memory.offload=block",
        'parallel.overlap = "microbatch" runs blocks in pieces, not memory.offload = ["block"]',
    ),
    "forced_load_needs_a_router": (
        "--model.num_dense_layers=4 --train.forced_load=balanced",
        'train.forced_load = "balanced" needs layers with experts',
    ),
    "forced_load_has_enough_experts": (
        "--train.forced_load=one_rank --parallel.ep=8 --model.moe.top_k=4",
        'train.forced_load = "one_rank" has 2 experts for all tokens with parallel.ep = 8',
    ),
    "skewed_loads_are_possible": (
        "--model.moe.num_experts=4 --model.moe.top_k=2 --train.forced_load=skewed",
        "parallel.ep = 4 leaves each rank one of the 4 experts",
    ),
    "options_of_formats_need_a_format": (
        "--precision.wgrad=compute --precision.modules_in_compute=*.out",
        'precision.wgrad = "compute", precision.modules_in_compute = ["*.out"] needs a format, but the recipe has none',
    ),
    "formats_have_experts": (
        "--model.num_dense_layers=4 --parallel.ep=1 --precision.experts=fp8_rowwise",
        "this model has none",
    ),
    "formats_round_from_bf16": (
        "--precision.linears=fp8_rowwise --precision.compute=fp32",
        'precision.compute = "fp32" cannot be rounded to fp8_rowwise',
    ),
    "native_formats_are_on_gpus": (
        "--precision.linears=fp8_rowwise --run.device=cpu",
        'precision.backend = "auto" does not compute fp8_rowwise with run.device = "cpu"',
    ),
    "native_formats_have_kernels": (
        "--precision.linears=mxfp8",
        'precision.linears = "mxfp8" has no native kernels yet',
    ),
    "native_linears_are_triton": (
        "--precision.linears=fp8_rowwise --perf.kernels=reference",
        "in fp8_rowwise, which are Triton",
    ),
    "native_experts_are_triton": (
        "--precision.experts=fp8_rowwise --perf.kernels=grouped_mm",
        'precision.experts = "fp8_rowwise" has no native kernels with "grouped_mm" experts',
    ),
    "emulated_experts_are_composite": (
        "--precision.experts=fp8_rowwise --precision.backend=emulated --perf.kernels=fused",
        "replaces fused experts",
    ),
    "tokens_are_aligned": (
        "--precision.linears=fp8_rowwise --train.seq_len_tokens=20",
        "* seq_len_tokens = 40 is not a multiple of 16, which weight gradients in fp8_rowwise need",
    ),
    "patterns_fit_modules": (
        "--precision.linears=fp8_rowwise --precision.modules_in_compute=*.qvk",
        "matches no module; the modules are layers.0 to layers.3, each with some of attention.qkv, attention.out,",
    ),
    "some_modules_have_formats": (
        "--precision.linears=fp8_rowwise --precision.num_layers_at_start_in_compute=1 "
        "--precision.num_layers_at_end_in_compute=3",
        "= 4 keep all of model.num_layers = 4",
    ),
    "folder_is_named": ("--run.folder=", 'run.folder = ""'),
    "source_has_a_path": ("--data.path=", "nothing to read"),
    "datasets_options_need_datasets": ("--data.subset=en", 'data.subset = "en"'),
    "bytes_fit_the_vocabulary": ("--model.vocab_size=255", "model.vocab_size = 255 is below the 256 ids"),
    "text_has_a_tokenizer": ("--data.tokenizer=", 'data.tokenizer = "" names no tokenizer'),
    "conversations_are_rows": ("--data.format=chat", 'data.format = "chat" cannot be read from data.source = "text"'),
    "validation_is_of_conversations_too": (
        "--data.format=chat --validation.sets.code=a.jsonl --validation.source=text",
        'validation.source = "text" has no conversations for data.format = "chat"',
    ),
    "validation_text_has_a_tokenizer": (
        "--data.source=tokens --data.tokenizer= --validation.sets.code=a.txt --validation.source=text",
        'validation.source = "text" is text, but data.tokenizer = "" names no tokenizer',
    ),
    "conversations_have_a_tokenizer_folder": ("--data.format=chat", 'has no template in data.tokenizer = "bytes"'),
    "conversations_are_kept_apart": ("--data.format=chat", "to each other with data.document_attention = false"),
    "chat_options_need_conversations": (
        "--data.chat.train_on=all",
        'data.chat.train_on = "all" belongs to data.format = "chat"',
    ),
    "streams_hold_out_no_share": (
        "--data.source=datasets --data.is_streamed=true",
        "data.holdout_fraction = 0.1 cannot be taken",
    ),
    "synthetic_data_holds_out_no_share": ("--data.source=synthetic", "data.holdout_fraction = 0.1 has no effect"),
    "validation_has_data": ("--data.holdout_fraction=0", "needs documents that training does not see"),
    "own_validation_leaves_nothing_held_out": (
        "--validation.path=other.txt",
        'validation.path = "other.txt" and data.holdout_fraction = 0.1 both give data',
    ),
    "synthetic_data_validates_itself": (
        "--data.source=synthetic --data.holdout_fraction=0 --metrics.sample_tokens=0 --validation.sets.code=a.txt",
        'data.source = "synthetic" has no tokens in common with validation.path = "" and validation.sets = { code =',
    ),
    "sets_have_plain_names": ("--validation.sets.a/b=x.txt", 'validation.sets has the name "a/b"'),
    "sample_has_a_tokenizer": (
        "--data.source=tokens --data.tokenizer=",
        "metrics.sample_tokens = 8 cannot be read with data.tokenizer",
    ),
    "sample_has_a_prompt": ("--data.source=synthetic", 'needs held-out text, but data.source = "synthetic" has none'),
    "one_length_is_given": (
        "--train.tokens=1000 --train.epochs=2",
        "train.steps = 100, train.tokens = 1000 and train.epochs = 2 are not all left at their defaults but one",
    ),
    "epochs_have_an_end": (
        "--train.epochs=2 --data.source=auto --data.path=a.jsonl --data.is_streamed=true --data.holdout_fraction=0",
        'train.epochs = 2 cannot be counted with data.source = "auto" and data.is_streamed = true',
    ),
    "mixture_is_read": ("--data.mixture_temperature=2", 'belong to data.source = "mixture", not data.source = "text"'),
    "mixture_has_sources": ("--data.source=mixture", 'data.mixture = [] leaves data.source = "mixture" nothing'),
    "mixture_has_no_path": ("--data.source=mixture", 'is not read with data.source = "mixture"'),
    "temperature_replaces_weights": (
        '--data.source=mixture --data.mixture_temperature=2 --data.mixture=[{path="a.txt",weight=2}]',
        "data.mixture_temperature = 2 and weights of data.mixture = [{",
    ),
    "temperature_needs_sizes": (
        '--data.source=mixture --data.mixture_temperature=2 --data.mixture=[{path="a.jsonl",is_streamed=true}]',
        "data.mixture_temperature = 2 makes shares of sizes, and a source of data.mixture = [{",
    ),
    "streams_of_a_mixture_hold_out_no_share": (
        '--data.source=mixture --data.holdout_fraction=0.1 --data.mixture=[{path="a.jsonl",is_streamed=true}]',
        "data.holdout_fraction = 0.1 is of all sources, and one of data.mixture = [{",
    ),
    "weights_give_shares": (
        '--data.source=mixture --data.mixture=[{path="a.txt",weight=-1}]',
        "data.mixture[0].weight = -1.0 must be finite and at least 0",
    ),
    "sources_have_plain_names": (
        '--data.source=mixture --data.mixture=[{path="x/a.txt"},{path="y/a/*.txt"}]',
        'data.mixture[0] has the name "a" of another source',
    ),
    "sources_can_be_read": (
        '--data.source=mixture --data.mixture=[{path="a.txt",files="b"}]',
        'the source \'b\' of data.mixture: files = "b" belongs to source = "datasets", not "auto"',
    ),
    "two_checkpoints_are_kept": ("--checkpoint.keep_latest=1", "keep_latest = 1 is too few; 0 keeps all"),
    "best_needs_a_validation": (
        "--checkpoint.keep_best=true --validation.every_steps=0",
        "keep_best = true compares losses, but validation.every_steps = 0",
    ),
    "best_is_validated_where_it_is_saved": (
        "--checkpoint.keep_best=true --validation.every_steps=3 --checkpoint.every_steps=10",
        "validation.every_steps = 3 does not divide checkpoint.every_steps = 10",
    ),
    "kept_steps_are_saved": (
        "--checkpoint.keep_every_steps=15 --checkpoint.every_steps=10",
        "keep_every_steps = 15 is no multiple of checkpoint.every_steps = 10",
    ),
    "trace_ends_in_the_run": ("--profile.start_step=99", "ends at step 101, after train.steps = 100"),
}


@pytest.fixture
def empty_file(tmp_path: Path) -> Path:
    file = tmp_path / "empty.toml"
    file.write_text("")
    return file


def test_rules_pass_a_good_recipe(empty_file: Path) -> None:
    assert check_rules(load_recipe(empty_file, GOOD), 8) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rules_refuse_what_breaks_them(empty_file: Path, rule: Any) -> None:
    overrides, expected = BROKEN[rule.name]
    broken = load_recipe(empty_file, [*GOOD, *overrides.split()])
    messages = list(rule.check(broken, 8))
    assert any(expected in message for message in messages), messages
    assert f"{messages[0]} ({rule.why})" in check_rules(broken, 8)
    good = load_recipe(empty_file, GOOD)
    assert list(rule.check(good, 8)) == []


@pytest.mark.slow
def test_ways_out_of_broken_recipes_pass(empty_file: Path) -> None:
    """Every way that is printed, of every broken recipe: where one rule is broken, all rules pass with it."""
    without = set()
    for name, (overrides, _) in BROKEN.items():
        words = [*GOOD, *overrides.split()]
        before, told = check_rules(load_recipe(empty_file, words), 8), refusals(load_recipe(empty_file, words), 8)
        ways = [way for problem in told for way in ways_in(problem)]
        for way in ways:
            after = check_rules(load_recipe(empty_file, [*words, *way]), 8)
            assert len(after) < len(before), (name, way, after)
        without |= set() if ways else {name}
    assert without == {"source_has_a_path", "sets_have_plain_names"}, "they name a path or a name in words"


def test_rules_each_have_a_broken_recipe_and_fields() -> None:
    assert set(BROKEN) == {rule.name for rule in RULES}
    assert len(RULES) == len(BROKEN), "names are unique"
    assert {field for rule in RULES for field in rule.fields} <= all_keys(Recipe).keys()


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (
            "--parallel.overlap=tile --parallel.dispatcher=symm_mem --perf.kernels=grouped_mm",
            8,
            'perf.kernels chooses "grouped_mm" for experts',
        ),
        (
            "--parallel.dp_replicate=3",
            8,
            "parallel.pp * dp_replicate * cp * tp = 1 * 3 * 1 * 1 = 3 does not divide the 8",
        ),
        ("--model.attention.kind=mla --model.attention.qk_rope_head_dim=31", 8, "qk_rope_head_dim = 31 is odd"),
        (
            "--model.attention.rope_layers=windowed --model.attention.sliding_window=8 --model.attention.nope_every=1",
            8,
            'rope_layers = "windowed" leaves no layer one with model.attention.nope_every = 1',
        ),
        (
            "--model.attention.window_rope_theta=500 --model.attention.sliding_window=8 --model.attention.nope_every=1",
            8,
            "window_rope_theta = 500 has no effect: no layer with a window has a rotary embedding",
        ),
        (
            "--model.attention.rope_layers=windowed --model.attention.sliding_window=8 "
            "--model.attention.full_attention_every=2 --model.attention.window_rope_theta=500 "
            "--model.attention.yarn_factor=4",
            8,
            "yarn_factor = 4.0 has no effect: with window_rope_theta = 500 it is that of layers without window",
        ),
        (
            '--model.adapter.rank=8 --model.adapter.targets=["attention","attention"]',
            8,
            'model.adapter.targets names "attention" more than once',
        ),
        ("--model.moe.num_experts=0 --model.ffn_hidden_size=0", 8, "moe.num_experts = 0 makes 4 layers dense"),
        ("--precision.compute=fp64 --precision.master=fp64", 8, 'precision.compute = "fp64"'),
        ("--precision.compute=fp64 --precision.master=fp64", 8, 'precision.reduce = "fp32" is coarser'),
        (
            "--precision.master=fp64 --precision.moments=bf16 --optim.kind=fused_adamw",
            8,
            'precision.moments = "bf16" is coarser than precision.master = "fp64"',
        ),
        (
            "--precision.master=fp64 --optim.kind=fused_adamw --run.device=cuda",
            8,
            'precision.master = "fp64" has no optim.kind = "fused_adamw" with run.device = "cuda"',
        ),
        ("--precision.moments=fp8 --optim.kind=muon", 8, 'precision.moments = "fp8" has no optim.kind = "muon"'),
        (
            "--precision.master=fp32_split --precision.gradients=bf16 --precision.moments=fp32 --optim.kind=adamw",
            8,
            'precision.master = "fp32_split" has no optim.kind = "adamw"',
        ),
        ("--precision.master=bf16 --optim.kind=muon", 8, 'which optim.kind = "muon" has not'),
        ("--memory.park=moments --optim.kind=muon", 8, 'memory.park = "moments" has no optim.kind = "muon"'),
        ("--model.moe.latent_size=12", 8, "model.moe.latent_size = 12 is not a multiple of 8"),
        ("--model.hidden_size=130", 8, "model.hidden_size = 130 is not a multiple of 8"),
        ("--model.attention.full_attention_every=2", 8, "model.attention.sliding_window = 0"),
        ("--model.attention.sliding_window=8 --model.attention.full_attention_every=1", 8, "leaves no layer to"),
        (
            "--parallel.tp=2 --parallel.tp_comm_overlap=true --model.attention.output_gate=head",
            8,
            'for queries and keys alone, not for model.attention.output_gate = "head"',
        ),
        ("--model.attention.kind=mla --model.attention.output_gate=head", 8, 'output_gate = "head" needs'),
        ("--model.attention.window_layers=[1]", 8, "needs a window, but model.attention.sliding_window = 0"),
        (
            "--model.attention.sliding_window=8 --model.attention.window_layers=[1] "
            "--model.attention.full_attention_every=2",
            8,
            "window_layers = [1] does not go with model.attention.full_attention_every = 2",
        ),
        ("--run.device=cpu --perf.attention=flex", 8, 'perf.attention = "flex" does not exist'),
        (
            "--train.forced_load=skewed --model.moe.top_k=9",
            8,
            "gives the hottest at most 1.78 times the mean, which is every token, and not 1.8",
        ),
        ("--model.num_dense_layers=4 --train.forced_load=skewed", 8, 'train.forced_load = "skewed" needs'),
        ("--model.num_layers=0", 8, "model.num_layers = 0 must be at least 1"),
        ("--model.attention.rope_theta=1", 8, "model.attention.rope_theta = 1.0 must be above 1"),
        ("--optim.lr=nan", 8, "optim.lr = nan must be finite and above 0"),
        (
            "--data.holdout_fraction=0 --validation.every_steps=0",
            8,
            "needs held-out text, but data.holdout_fraction = 0",
        ),
        ("--precision.compute=fp64 --perf.override.rotary=triton", None, "has no Triton kernels (rotary)"),
        (
            "--precision.compute=fp32 --perf.override.gradients=triton",
            None,
            'perf.override.gradients = "triton" adds gradients in bf16 to fp32, not precision.compute = "fp32"',
        ),
        (f"{INTERLEAVED} --parallel.accumulate_unsharded=false", 8, "and needs parallel.accumulate_unsharded = true"),
        (
            f"{INTERLEAVED} --parallel.dispatcher=symm_mem",
            8,
            'parallel.overlap = "microbatch" is not supported by parallel.dispatcher = "symm_mem" (tile',
        ),
        (f"{INTERLEAVED} --memory.recompute=block", 8, 'runs blocks in pieces, not memory.recompute = "block"'),
        (f"{INTERLEAVED} --model.class=my.model:Mine", 8, 'but model.class = "my.model:Mine"'),
        (
            f"{INTERLEAVED} --train.global_batch_sequences=16",
            8,
            "of 16 sequences over all ranks",
        ),
        (f"{INTERLEAVED} --parallel.dispatcher=local --parallel.ep=1", 8, 'parallel.dispatcher = "local" has none'),
        (
            "--parallel.pp_schedule=zbv",
            8,
            'parallel.pp_schedule = "zbv" needs a pipeline, but parallel.pp = 1',
        ),
        ("--parallel.pp_layout=EttttL", 8, 'parallel.pp_layout = "EttttL" needs a pipeline'),
        (
            f"{PIPELINE} --parallel.vpp=2",
            8,
            'does not fit parallel.pp_schedule = "1f1b"',
        ),
        (
            f"{PIPELINE} --parallel.pp_schedule=interleaved_1f1b",
            8,
            'parallel.vpp = 1 does not fit parallel.pp_schedule = "interleaved_1f1b"',
        ),
        (
            f"{PIPELINE} --parallel.pp_schedule=interleaved_1f1b --parallel.vpp=2 --train.global_batch_sequences=20",
            8,
            "needs a multiple of pp = 2",
        ),
        (
            f"{PIPELINE} --parallel.pp_schedule=dualpipev --parallel.vpp=2 --train.global_batch_sequences=12",
            8,
            "with pp = 2 needs 4 or more",
        ),
        (
            "--parallel.pp=4 --train.micro_batch_sequences=1 --parallel.pp_layout=E|tttt||L",
            8,
            "leaves pipeline rank 2 without modules",
        ),
        (
            f"{ZERO_BUBBLE} --memory.recompute=experts",
            8,
            '"experts" needs whole ones',
        ),
        (f"{ZERO_BUBBLE} --memory.recompute=block", 8, 'memory.recompute = "block" needs whole ones'),
        ("--memory.recompute=norms:5", 8, "the model has 4 layers, not 5"),
        ("--memory.recompute=norms:2-4", 8, "layers 2-4 are not in 0-3"),
        ("--memory.recompute=norms:all", 8, 'layers are written "norms:8", the first eight, "norms:-8", the last'),
        ("--memory.recompute=norm", 8, '"norm" is no part of a block; parts are norms, qkv_rope'),
        ("--memory.recompute=auto,norms", 8, 'memory.recompute = ["auto", "norms"]: "auto" stands alone'),
        ("--memory.recompute=mla_up", 8, '"mla_up", which needs attention of kind mla, and this model has none'),
        ("--memory.recompute=dense_mlp:-3", 8, '"dense_mlp", which needs dense layers among its own'),
        ("--memory.recompute=experts:2-3,moe_act", 8, '"experts" and, of the same layers, "moe_act", which experts'),
        (  # 5 has no divisor between 1 and itself
            "--parallel.dispatcher=hierarchical --parallel.ep=5 --parallel.ep_ranks_per_node=3",
            10,
            "do not divide parallel.ep = 5",
        ),
        ("--parallel.ep=8", 4, "does not divide the 4 ranks"),
        ("--parallel.tp=4 --parallel.dp_replicate=2", 4, "the 4 ranks"),
        (
            "--parallel.dispatcher=local --run.device=cpu --precision.compute=fp32",
            8,
            "over ranks",
        ),
        (
            "--parallel.overlap=tile --run.device=cpu --precision.compute=fp32",
            8,
            'is not supported by parallel.dispatcher = "alltoall" (tile',
        ),
        (
            "--parallel.ep=1 --parallel.dispatcher=local --parallel.overlap=tile --run.device=cpu",
            8,
            'parallel.dispatcher = "local" has none (an option',
        ),
        (
            "--parallel.etp=3",
            12,
            "parallel.etp = 3 does not divide model.moe.ffn_hidden_size = 64",
        ),
        (
            "--perf.override.experts=fused --precision.compute=fp32 --run.device=cpu",
            8,
            'has no "fused" experts (perf.override.experts) with run.device = "cpu"',
        ),
        (
            "--precision.compute=fp32 --run.device=cuda",
            8,
            'has no "grouped_mm" experts (perf.kernels = "auto") with run.device = "cuda"',
        ),
        (
            "--perf.kernels=fused --precision.compute=fp32",
            8,
            'perf.kernels = "fused" adds gradients in bf16 to fp32, not precision.compute = "fp32"',
        ),
        (
            "--perf.override.experts=fused --model.moe.score_on=input",
            8,
            'perf.override.experts = "fused" needs model.moe.score_on = "activation"',
        ),
        ("--parallel.dp_shard=6 --parallel.ep=3", None, "parallel.ep = 3 does not divide model.moe.num_experts = 16"),
        (
            "--parallel.dispatcher=symm_mem --parallel.expert_rank_capacity_factor=0.5",
            8,
            "less than a balanced load",
        ),
        ("--parallel.expert_layer_capacity_factor=0.5", 8, "every step would be repeated in pieces"),
        (f"{BOUNDED_LAYERS} --parallel.ep=1", 8, "a rank has no peers with parallel.ep = 1"),
        (f"{BOUNDED_LAYERS} --parallel.expert_rank_capacity_factor=0", 8, "all layers together have no bound with"),
        (f"{BOUNDED_LAYERS} --perf.kernels=grouped_mm", 8, "experts are not fused but grouped_mm"),
        (
            f"{BOUNDED_LAYERS} --precision.experts=fp8_rowwise --precision.num_layers_at_start_in_compute=2",
            8,
            "without an arena: experts of 1 layer is in bf16, the others in fp8_rowwise",
        ),
        ("--precision.experts=fp8_tensorwise", 8, 'precision.experts = "fp8_tensorwise" has no native kernels yet'),
        (
            "--precision.experts=fp8_rowwise --precision.dgrad=compute --perf.kernels=fused",
            8,
            'precision.experts = "fp8_rowwise" does not support precision.dgrad = "compute"',
        ),
        (
            "--precision.linears=fp8_rowwise --precision.compute=fp64 --precision.backend=emulated",
            8,
            'compute = "fp64" cannot be rounded to fp8_rowwise',
        ),
        (
            "--precision.experts=mxfp8 --precision.backend=emulated --parallel.overlap=tile "
            "--parallel.dispatcher=symm_mem",
            8,
            'has no parallel.overlap = "tile"',
        ),
        (
            "--precision.linears=fp8_blockwise --precision.wgrad=compute",
            8,
            "for all three GEMMs together only",
        ),
        (
            "--parallel.cp=2 --parallel.tp=2 --parallel.cp_kind=allgather --train.seq_len_tokens=132",
            8,
            "2 * parallel.cp * tp = 2 * 2 * 2 = 8 does not divide train.seq_len_tokens = 132",
        ),
        (
            f"{RING} --train.seq_len_tokens=130",
            8,
            "2 * parallel.cp * tp = 2 * 2 * 1 = 4 does not divide train.seq_len_tokens = 130",
        ),
        (f"{RING} --model.attention.kind=mla", 8, 'model.attention.kind = "mla", whose latents are narrower than'),
        (f"{RING} --model.attention.sliding_window=16", 8, "sliding_window = 16"),
        (
            "--data.document_attention=true --train.seq_len_tokens=32768",
            8,
            "document_attention = true needs a dense mask of 2 sequences * 32768 * 32768 bytes, 2 GiB",
        ),
        ("--model.attention.sliding_window=16 --train.seq_len_tokens=65536", 8, "sliding_window = 16 needs a dense"),
        (f"{RING} --model.attention.attention_chunk_size=8", 8, "model.attention.attention_chunk_size = 8"),
        (f"{RING} --perf.attention=math", 8, 'perf.attention = "math", which returns no log-sum-exp of each query'),
        (
            f"{RING} --perf.attention=efficient --run.device=cuda",
            8,
            'perf.attention = "efficient", which returns no log-sum-exp of each query',
        ),
        (
            f"{RING} --run.device=cuda --precision.compute=fp32 --perf.kernels=reference",
            8,
            "where the kernels of ring attention take bf16",
        ),
        (  # on a host with GPUs it would fail in the first step
            f"{RING} --precision.compute=fp32 --perf.kernels=reference",
            8,
            "where the kernels of ring attention take bf16",
        ),
        (
            f"{RING} --model.attention.head_dim=320",
            8,
            "head_dim = 320, more than the kernels of ring attention take",
        ),
        (
            f"{RING} --model.attention.head_dim=36",
            8,
            "which is not a multiple of 8",
        ),
        (
            "--parallel.cp=2 --parallel.tp=4 --model.attention.num_heads=4 --model.attention.num_kv_heads=4",
            8,
            "num_heads = 4 over 4 key/value heads on 4 tp ranks",
        ),
        ("--parallel.cp=3 --model.attention.kind=mla --train.seq_len_tokens=96", 12, "num_heads = 8"),
        ("--parallel.cp=2 --parallel.tp=2 --model.hidden_size=130", 8, "dp_shard * cp = 4 does not divide"),
        (
            "--parallel.cp=2 --precision.linears=fp8_rowwise --train.seq_len_tokens=40",
            8,
            "seq_len_tokens / (cp * tp) = 40 is not a multiple of",
        ),
        (
            "--parallel.dispatcher=hierarchical",
            8,
            "4 ranks on a node hold all of parallel.ep = 4",
        ),
        ("--parallel.dispatcher=hierarchical --parallel.ep_ranks_per_node=1", 8, "each node has 1 rank"),
        (
            "--parallel.dispatcher=hierarchical --parallel.ep_ranks_per_node=3",
            8,
            "ep = 4",
        ),
        ("--parallel.dispatcher=hierarchical --parallel.ep_ranks_per_node=-1", 8, "must be at least 0"),
        (
            "--parallel.tp=2 --parallel.tp_comm_overlap=true --run.device=cpu --precision.compute=fp32",
            8,
            'parallel.tp_comm_overlap = true needs run.device = "cuda", not "cpu"',
        ),
        (
            "--parallel.tp=2 --parallel.tp_comm_overlap=true --precision.linears=fp8_rowwise",
            8,
            'does not support precision.linears = "fp8_rowwise"',
        ),
        ("--parallel.tp=3 --model.attention.kind=mla", 8, "num_heads = 8"),
        (
            '--model.adapter.rank=8 --optim.trainable=["*.experts.down"] --perf.kernels=fused',
            8,
            'no gradient of weights beside adapters: optim.trainable = ["*.experts.down"], and',
        ),
        (
            "--parallel.tp=2 --model.class=my.model:Mine",
            8,
            '"my.model:Mine"',
        ),
        ("--parallel.tp=2 --model.ffn_hidden_size=513", 8, "model.ffn_hidden_size = 513"),
        ("--parallel.tp=2 --model.moe.shared_ffn_hidden_size=33", 8, "model.moe.shared_ffn_hidden_size = 33"),
        (
            "--parallel.tp=2 --model.attention.kind=mla --model.attention.kv_lora_rank=30",
            8,
            "dp_shard = 4 does not divide model.attention.kv_lora_rank = 30",
        ),
        ("--parallel.etp=2 --parallel.ep=1 --model.num_dense_layers=4", 8, "this model has none"),
        ("--parallel.etp=4 --parallel.ep=4", 8, "ep * etp = 1 * 1 * 4 * 4 = 16 does not divide the 8 ranks"),
        (
            "--parallel.etp=4 --model.moe.ffn_hidden_size=48",
            8,
            "48 is not a multiple of 8 for each of 4 etp ranks, which grouped_mm needs in bf16",
        ),
        (
            "--parallel.etp=3 --parallel.ep=2 --parallel.dispatcher=symm_mem",
            8,
            "parallel.ep * etp = 2 * 3 = 6 does not divide the 8 ranks of a node",
        ),
        (
            "--parallel.etp=2 --parallel.ep=1 --model.moe.ffn_hidden_size=60 --model.moe.expert_mlp_bias=true "
            "--perf.kernels=reference --run.device=cpu",
            8,
            "does not divide model.moe.ffn_hidden_size / etp = 30",
        ),
        (
            "--parallel.etp=2 --parallel.ep=1 --parallel.dispatcher=local --parallel.overlap=microbatch",
            8,
            'hides communication over ep, and parallel.dispatcher = "local" has none',
        ),
    ],
)
def test_rules_with_several_cases_refuse_each(
    empty_file: Path, overrides: str, world_size: int | None, expected: str
) -> None:
    problems = check_rules(load_recipe(empty_file, [*GOOD, *overrides.split()]), world_size)
    assert any(expected in problem for problem in problems), problems


@pytest.mark.parametrize(
    "overrides",
    [
        "--parallel.ep=1",  # a collective over one rank is trivial
        "--parallel.ep=1 --parallel.dispatcher=local",
        "--precision.compute=fp32 --run.device=cpu",
        "--model.moe.ffn_hidden_size=68 --precision.compute=fp32 --run.device=cpu",  # four fp32 are 16 bytes
        "--model.moe.ffn_hidden_size=67 --perf.kernels=reference",
        "--precision.compute=fp64 --precision.master=fp64 --precision.reduce=fp64 --perf.kernels=reference",
        "--model.attention.kind=mla --model.attention.num_kv_heads=3",  # mla does not read it
        "--model.attention.sliding_window=9999 --model.attention.full_attention_every=4",  # a window may hide nothing
        "--data.source=synthetic --data.holdout_fraction=0 --metrics.sample_tokens=0",  # makes its own held-out data
        "--data.source=datasets --data.is_streamed=true --data.holdout_fraction=0",  # the first documents are held out
        "--data.source=auto --data.path=a.parquet --data.is_streamed=true --data.holdout_fraction=0",
        "--data.holdout_fraction=0 --validation.path=other.txt",
        "--train.epochs=2.5 --profile.start_step=500",  # whose end is known once the data is
        "--data.holdout_fraction=0 --validation.sets.code=code",
        "--optim.warmup_steps=60 --optim.decay_steps=50 --train.steps=20",  # the schedule adapts itself
        "--checkpoint.keep_latest=0",
        "--checkpoint.keep_best=true --validation.every_steps=5 --checkpoint.every_steps=10",
        "--checkpoint.keep_every_steps=20 --checkpoint.every_steps=10",
        "--parallel.dp_replicate=2",
        "--run.is_deterministic=true --perf.attention=flash",
        "--run.is_deterministic=true --perf.attention=flex --compile.cudagraph=step --parallel.dispatcher=symm_mem",
        "--precision.moments=fp32",  # what master is
        "--precision.moments=bf16 --optim.kind=fused_adamw",
        "--precision.master=fp32_split --precision.gradients=bf16 --optim.kind=muon",
        "--precision.moments=bf16 --optim.kind=muon --optim.muon.adjust_lr=original --optim.muon.lr_scale=60",
        "--precision.moments=fp8 --optim.kind=fused_adamw --compile.cudagraph=step --parallel.dispatcher=symm_mem",
        "--precision.moments=fp8 --precision.master=bf16 --optim.kind=fused_adamw",
        "--precision.moments=fp32 --precision.master=bf16 --optim.kind=fused_adamw",
        "--precision.master=fp64 --optim.kind=fused_adamw --run.device=cpu",  # the reference
        "--parallel.expert_clones=auto",
        "--parallel.dispatcher=hierarchical --parallel.ep_ranks_per_node=2",
        "--parallel.dispatcher=hierarchical_symm_mem --parallel.ep_ranks_per_node=2 "
        "--compile.cudagraph=step --parallel.expert_rank_capacity_factor=1.5 --parallel.expert_clones=auto",
        "--parallel.dispatcher=hierarchical --parallel.ep=8 --parallel.ep_ranks_per_node=2 --parallel.tp=2",
        f"{INTERLEAVED} --parallel.dispatcher=hierarchical --parallel.ep_ranks_per_node=2",
        "--parallel.dispatcher=symm_mem --parallel.expert_clones=auto",
        INTERLEAVED,
        f"{INTERLEAVED} --parallel.dispatcher=alltoall --memory.recompute=experts",
        "--memory.recompute=norms:2,norms:-1,dense_mlp,moe_act:1-2,experts:3-3",
        f"{ZERO_BUBBLE} --memory.recompute=norms,dense_mlp,qkv_rope --model.attention.qk_norm=true",
        "--train.forced_load=skewed",
        "--train.forced_load=collapsed --parallel.ep=8 --model.moe.top_k=4",
        "--parallel.dispatcher=symm_mem",
        "--parallel.dispatcher=symm_mem --parallel.expert_rank_capacity_factor=1.5 --run.device=cuda",
        "--parallel.dispatcher=symm_mem --compile.cudagraph=step --run.device=cuda",
        "--parallel.dispatcher=symm_mem --compile.cudagraph=step --memory.recompute=block --run.device=cuda",
        "--precision.linears=fp8_tensorwise --precision.modules_in_compute=layers.0.*",
        "--precision.linears=fp8_rowwise --precision.wgrad=compute --train.seq_len_tokens=20",
        "--precision.format=nvfp4 --precision.backend=emulated --run.device=cpu --precision.compute=fp32",
        "--precision.format=fp8_rowwise --precision.experts=compute",
        "--precision.backend=native",  # of a run that had formats
        "--parallel.cp=4 --model.attention.num_kv_heads=2 --parallel.dispatcher=symm_mem --parallel.overlap=tile "
        "--perf.kernels=fused",
        "--parallel.cp=8 --parallel.dispatcher=allgather --compile.cudagraph=step",
        "--parallel.cp=2 --parallel.cp_kind=allgather --perf.attention=flex --model.attention.num_heads=9 "
        "--model.attention.num_kv_heads=3",
        f"{RING} --model.attention.num_heads=9 --model.attention.num_kv_heads=3 --perf.attention=flex",
        f"{RING} --run.device=cpu --precision.compute=fp32 --model.attention.head_dim=36",
        f"{RING} --run.device=cpu --precision.compute=fp32 --model.attention.head_dim=320",
        f"{RING} --model.attention.head_dim=256",
        f"{RING} --model.attention.sliding_window=4096 --parallel.tp=2",
        f"{ALLGATHER} --train.seq_len_tokens=32768 --run.device=cuda",  # 16,384 * 32,768 booleans
        f"{ALLGATHER} --train.seq_len_tokens=131072 --run.device=cuda --perf.attention=flex",
        f"{ALLGATHER} --train.seq_len_tokens=131072 --run.device=cpu --precision.compute=fp32",
        f"{RING} --train.seq_len_tokens=131072",
        "--data.document_attention=true --train.seq_len_tokens=32768 --train.micro_batch_sequences=1",
        "--parallel.cp=2 --model.attention.kind=mla --precision.linears=fp8_rowwise",
        "--parallel.cp=2 --parallel.tp=2 --parallel.dispatcher=symm_mem --perf.attention=flex --compile.cudagraph=step",
        "--parallel.cp=2 --parallel.dp_replicate=2 --parallel.ep=2",
        "--parallel.tp=2 --parallel.tp_comm_overlap=true --compile.cudagraph=step --parallel.dispatcher=symm_mem",
        "--parallel.tp=2 --parallel.tp_comm_overlap=true --precision.experts=fp8_rowwise --parallel.cp=2",
        "--parallel.tp=2 --run.device=cpu --precision.compute=fp32",
        "--parallel.tp=2 --run.device=cpu --precision.moments=fp8 --optim.kind=fused_adamw",
        "--parallel.tp=8 --model.attention.num_kv_heads=4",
        "--parallel.tp=2 --parallel.dispatcher=symm_mem --parallel.overlap=tile --compile.cudagraph=step",
        "--parallel.tp=2 --precision.format=fp8_rowwise --perf.attention=flex",
        f"{INTERLEAVED} --parallel.tp=2",
        "--parallel.tp=4 --parallel.dp_replicate=2 --perf.kernels=fused",
        "--parallel.tp=2 --parallel.ep=1 --parallel.dispatcher=local --perf.kernels=grouped_mm",
        "--parallel.etp=2 --parallel.ep=1 --parallel.dispatcher=local",
        "--parallel.etp=2 --parallel.tp=4",
        "--parallel.etp=2 --parallel.dispatcher=symm_mem --parallel.overlap=tile --compile.cudagraph=step",
        f"{INTERLEAVED} --parallel.etp=2",
        "--parallel.etp=2 --parallel.dp_replicate=2 --parallel.ep=2 --parallel.dispatcher=allgather",
        "--parallel.etp=8 --parallel.ep=1 --parallel.dispatcher=local --model.moe.expert_mlp_bias=true",
        "--parallel.etp=2 --precision.format=fp8_rowwise",
        "--precision.experts=fp8_rowwise --model.moe.expert_mlp_bias=true",
        "--precision.experts=fp8_rowwise --model.moe.score_on=input --perf.kernels=grouped_mm",
        f"{PIPELINE} --memory.recompute=block --parallel.dispatcher=allgather",
        f"{PIPELINE} --model.class=my.model:Mine",
        f"{PIPELINE} --model.embeddings_are_tied=true",
        "--model.embeddings_are_tied=true --model.embedding_init_std=0.02",  # init_std
        "--model.embedding_init_std=0.5 --optim.embeddings_decay=false",
        f"{PIPELINE} --parallel.pp_schedule=interleaved_1f1b --parallel.vpp=2 --memory.recompute=experts",
        f"{PIPELINE} --parallel.pp_schedule=interleaved_1f1b --parallel.vpp=3 --parallel.pp_layout=Et|t|tt|||L",
        f"{PIPELINE} --parallel.tp=2 --parallel.ep=2 --parallel.etp=2 --parallel.pp_layout=(Ettt)|tL",
        f"{PIPELINE} --train.global_batch_sequences=12 --validation.num_sequences=4",  # an odd number of microbatches
        ZERO_BUBBLE,
        f"{ZERO_BUBBLE} --train.global_batch_sequences=8 --validation.num_sequences=8",
        f"{ZERO_BUBBLE} --parallel.pp_schedule=dualpipev",
        f"{PIPELINE} {INTERLEAVED}",
        f"{PIPELINE} {INTERLEAVED} --parallel.dispatcher=alltoall --memory.recompute=experts",
        f"{PIPELINE} {INTERLEAVED} --parallel.pp_schedule=interleaved_1f1b --parallel.vpp=2",
        f"{ZERO_BUBBLE} {INTERLEAVED} --parallel.pp_schedule=dualpipev",
        f"{ZERO_BUBBLE} {INTERLEAVED} --parallel.pp_schedule=dualpipev --parallel.dispatcher=alltoall",
        f"{PIPELINE} --parallel.dispatcher=allgather --compile.cudagraph=step --run.device=cuda",
        f"{ZERO_BUBBLE} {INTERLEAVED} --parallel.pp_schedule=dualpipev --compile.cudagraph=step --run.device=cuda",
        f"{ZERO_BUBBLE} --parallel.dispatcher=symm_mem --perf.kernels=fused --parallel.ep=2 "
        "--compile.cudagraph=step --run.device=cuda",
        "--model.moe.num_experts=0 --parallel.ep=1 --precision.compute=fp32 --run.device=cuda",  # no experts
        "--model.moe.num_experts=0 --parallel.ep=1 --precision.compute=fp64 --precision.master=fp64 "
        "--precision.reduce=fp64 --run.device=cpu",
    ],
)
def test_rules_pass_what_may_run(empty_file: Path, overrides: str) -> None:
    assert check_rules(load_recipe(empty_file, [*GOOD, *overrides.split()]), 8) == []


def test_rules_answer_at_once_for_any_number_of_ranks(empty_file: Path) -> None:
    problems = check_rules(load_recipe(empty_file, [*GOOD, "--parallel.tp=3"]), 1_000_000_007)  # a prime
    assert any("does not divide the 1000000007 ranks" in problem for problem in problems)


def test_rule_of_nodes_reads_the_ranks_of_torchrun(empty_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(empty_file, [*GOOD, "--parallel.dispatcher=symm_mem"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    (problem,) = check_rules(recipe, 8)
    assert "parallel.ep = 4 does not divide the 2 ranks of a node" in problem
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert check_rules(recipe, 8) == []


def test_rule_of_two_levels_reads_the_ranks_of_torchrun(empty_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(ranks_of_a_node: int, *overrides: str) -> list[str]:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_of_a_node))
        run = [*GOOD, "--parallel.dispatcher=hierarchical", "--parallel.ep=8", *overrides]
        return check_rules(load_recipe(empty_file, run), 8)

    assert problems(4) == problems(2) == problems(4, "--parallel.ep_ranks_per_node=2") == []
    assert "each node has 1 rank" in problems(1)[0] and "8 ranks on a node hold all" in problems(8)[0]
    assert "3 ranks on a node" in problems(3)[0]
    (spans,) = problems(2, "--parallel.ep_ranks_per_node=4")
    assert "ep_ranks_per_node = 4 does not divide the 2 ranks that torchrun starts" in spans and "(a row" in spans
    etp = ("--parallel.ep=4", "--parallel.etp=2")
    assert problems(4, *etp) == [] and "each node has 1 rank" in problems(2, *etp)[0]
    (spans,) = problems(2, *etp, "--parallel.ep_ranks_per_node=2")
    assert "ep_ranks_per_node * etp = 2 * 2 does not divide the 2 ranks that torchrun starts" in spans


def test_rules_assume_the_fewest_ranks_without_a_world(empty_file: Path) -> None:
    recipe = load_recipe(empty_file, GOOD)
    assert check_rules(recipe) == check_rules(recipe, 4) == []
    assert check_rules(recipe, 3) != []
