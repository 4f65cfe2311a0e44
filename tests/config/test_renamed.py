"""A key of an earlier recipe is refused with its new name."""

import re
from pathlib import Path

import pytest

from titan_moe.config import Recipe, RecipeError, load_recipe
from titan_moe.config.explain import explain
from titan_moe.config.nearest import nearest_key
from titan_moe.config.renamed import (
    ABSENT,
    NAMES_ELSEWHERE,
    REMOVED,
    RENAMED,
    SECTIONS_ELSEWHERE,
    SPELLINGS,
    WITHOUT_FIELD,
)
from titan_moe.config.schema import all_keys

OPTIMIZER = "perf.optimizer is now optim.kind (torch -> adamw, fused -> fused_adamw)"


def test_renamed_key_error_names_the_new_key(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text('[perf]\noptimizer = "fused"\n[parallel]\nchunks = 2\n')
    with pytest.raises(RecipeError) as refused:
        load_recipe(file, ["--parallel.gathers_once_a_step", "--train.force_skewed_routing=true"])
    assert refused.value.problems == [
        f"{file}: {OPTIMIZER}",
        f"{file}: parallel.chunks was removed: exchanges in chunks were slower; drop it",
        "command line: parallel.gathers_once_a_step is now parallel.accumulate_unsharded",
        "command line: train.force_skewed_routing is now train.forced_load (true -> skewed; false: drop it)",
    ]


@pytest.mark.parametrize("removed", [key for key in REMOVED if " = " in key])
def test_removed_value_error_says_what_replaces_it(tmp_path: Path, removed: str) -> None:
    file, (key, value) = tmp_path / "recipe.toml", removed.split(" = ")
    file.write_text("")
    for written, is_removed in ((value.strip('"').replace("a number", "2"), True), ("other", False)):
        with pytest.raises(RecipeError) as refused:
            load_recipe(file, [f"--{key}={written}"])
        assert (f"({REMOVED[removed]})" in str(refused.value)) == is_removed


@pytest.mark.parametrize(
    ("text", "overrides"), [("[parallel]\nexpert_clones = 2\n", []), ("", ["--parallel.expert_clones=0"])]
)
def test_a_number_that_is_a_word_now_says_which(tmp_path: Path, text: str, overrides: list[str]) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    with pytest.raises(RecipeError, match='must be one of "off", "auto" .0 is now "off"; for any other take "auto".$'):
        load_recipe(file, overrides)


def test_renamed_key_explain_names_the_new_key() -> None:
    with pytest.raises(RecipeError) as refused:
        explain("perf.optimizer")
    assert refused.value.problems == [OPTIMIZER]


def test_renamed_keys_are_no_keys_and_new_ones_are() -> None:
    known = all_keys(Recipe)
    assert not (RENAMED.keys() | REMOVED.keys()) & known.keys()
    assert {new.partition(" ")[0] for new in RENAMED.values()} <= known.keys()
    assert {key.partition(" ")[0] for key in NAMES_ELSEWHERE.values()} <= known.keys()
    assert {key.partition(" ")[0] for key in SECTIONS_ELSEWHERE.values()} <= known.keys()
    elsewhere = [name for names in (*SPELLINGS.values(), *ABSENT.values()) for name in names.split()]
    assert len(set(elsewhere)) == len(elsewhere), "one name, one answer"
    assert not set(elsewhere) & {key.rpartition(".")[2] for key in known}, "these are found by their name"
    fields = set("|".join(WITHOUT_FIELD.values()).replace(",", " ").replace(";", " ").replace("|", " ").split())
    assert {word for word in fields if "." in word.strip(".") and word != "metrics.jsonl"} <= known.keys()


NO_FIELD = "no field"
KEYS_OF_OTHERS = """
total_tokens                            train.tokens
max_steps                               train.steps
save_steps                              checkpoint.every_steps
logging_steps                           metrics.every_steps
eval_steps                              validation.every_steps
num_train_epochs                        train.epochs
gradient_checkpointing                  memory.recompute (true -> "block")
gradient_accumulation_steps             train.global_batch_sequences (gradient_accumulation_steps *
per_device_train_batch_size             train.micro_batch_sequences
per_device_eval_batch_size              no field
bf16                                    precision.compute (true -> "bf16")
fp16                                    no field
learning_rate                           optim.lr
warmup_ratio                            optim.warmup_steps (the share *
lr_scheduler_type                       optim.decay
adam_beta1                              optim.beta1
adam_epsilon                            optim.eps
save_total_limit                        checkpoint.keep_latest
output_dir                              run.folder
resume_from_checkpoint                  run.folder
report_to                               metrics.tensorboard
torch_compile                           compile.regional
full_determinism                        run.is_deterministic
disable_tqdm                            metrics.progress_bar (the opposite
label_smoothing_factor                  no field
dataloader_num_workers                  no field
norm_topk_prob                          model.moe.normalize_topk
n_routed_experts                        model.moe.num_experts
num_local_experts                       model.moe.num_experts
n_group                                 model.moe.num_groups
topk_group                              model.moe.top_k_groups
scoring_func                            model.moe.score_fn
num_nextn_predict_layers                model.mtp.num_depths
rms_norm_eps                            model.norm_eps
hidden_act                              no field
initializer_range                       model.init_std
max_position_embeddings                 no field
num_key_value_heads                     model.attention.num_kv_heads
rope_scaling                            model.attention.yarn_factor
lr_decay_style                          optim.decay
lr_decay_iters                          optim.decay_steps (lr_decay_iters - lr_warmup_iters
lr_decay_samples                        optim.decay_steps (lr_decay_samples /
lr_wsd_decay_iters                      optim.decay_steps
lr_warmup_iters                         optim.warmup_steps
lr_warmup_samples                       optim.warmup_steps (lr_warmup_samples / global_batch_sequences)
train_iters                             train.steps
train_samples                           train.steps (train_samples /
min_lr                                  optim.min_lr_ratio (min_lr / lr)
attention_backend                       perf.attention
recompute_num_layers                    no field
recompute_method                        no field
recompute_granularity                   memory.recompute
recompute_activations                   memory.recompute
offload_modules                         memory.offload
moe_layer_freq                          model.moe_every
moe_router_enable_expert_bias           model.moe.bias_update_speed
moe_router_load_balancing_type          model.moe.aux_losses.sequence
moe_router_pre_softmax                  model.moe.normalize_topk (the opposite
moe_router_dtype                        model.moe.router_dtype
moe_aux_loss_coeff                      model.moe.aux_loss_coef
moe_z_loss_coeff                        model.moe.z_loss_coef
moe_grouped_gemm                        no field
moe_expert_capacity_factor              model.moe.capacity_factor
moe_token_dispatcher_type               parallel.dispatcher
moe_shared_expert_gate                  model.moe.shared_expert_gate
num_moe_experts                         model.moe.num_experts
multi_latent_attention                  model.attention.kind (true -> "mla")
qk_pos_emb_head_dim                     model.attention.qk_rope_head_dim
untie_embeddings_and_output_weights     model.embeddings_are_tied (the opposite
add_qkv_bias                            model.attention.qkv_bias
hidden_dropout                          no field
mtp_num_layers                          model.mtp.num_depths
load                                    checkpoint.load_from
save                                    run.folder
save_interval                           checkpoint.every_steps
async_save                              checkpoint.is_async
eval_iters                              validation.num_sequences (eval_iters *
distributed_timeout_minutes             run.step_timeout_minutes
use_distributed_optimizer               no field
cp_comm_type                            parallel.cp_kind
virtual_pipeline_model_parallel_size    parallel.vpp
expert_tensor_parallel_size             parallel.etp
rampup_batch_size                       train.batch_schedule
moe_input_jitter_eps                    model.moe.input_jitter
num_hash_layers                         model.moe.hash_layers
moe_sinkhorn                            no field
dynamic_context_parallel                no field
fp8_param_gather                        no field
refit_method                            no field
qk_clip                                 optim.qk_clip
qk_clip_threshold                       optim.qk_clip.threshold
reset_attention_mask                    data.document_attention
accumulate_allreduce_grads_in_fp32      precision.reduce
first_last_layers_bf16                  precision.num_layers_at_start_in_compute
cuda_graph_impl                         compile.cudagraph
mixed_precision_param                   precision.compute
mixed_precision_reduce                  precision.reduce
metrics.log_freq                        metrics.every_steps
training.dtype                          precision.master
training.local_batch_size               train.micro_batch_sequences
training.steps                          train.steps
training.max_norm                       optim.max_grad_norm
optimizer.name                          optim.kind
optimizer.beta2                         optim.beta2
lr_scheduler.decay_ratio                optim.decay_steps (decay_ratio *
lr_scheduler.min_lr_factor              optim.min_lr_ratio
parallelism.data_parallel_shard_degree  parallel.dp_shard
parallelism.pipeline_parallel_schedule  parallel.pp_schedule
checkpoint.interval                     checkpoint.every_steps
checkpoint.folder                       run.folder
checkpoint.initial_load_path            checkpoint.load_from
activation_checkpoint.mode              memory.recompute
activation_checkpoint.selective_ac_option  no field
validation.freq                         validation.every_steps
validation.steps                        validation.num_sequences (steps *
comm.train_timeout_seconds              run.step_timeout_minutes (the seconds / 60)
debug.moe_force_load_balance            train.forced_load
model.flavor                            no field
model.hf_assets_path                    data.tokenizer
compile.enable                          compile.regional
sequence_len                            train.seq_len_tokens
sample_packing                          no field
sequence_parallel_degree                parallel.cp
val_set_size                            data.holdout_fraction
saves_per_epoch                         checkpoint.every_steps
base_model                              no field
wandb_project                           metrics.wandb_project
train_batch_size                        train.global_batch_sequences
train_micro_batch_size_per_gpu          train.micro_batch_sequences
gradient_clipping                       optim.max_grad_norm
steps_per_print                         metrics.every_steps
zero_optimization.stage                 parallel.dp_shard
offload_optimizer                       memory.park
cutoff_len                              train.seq_len_tokens
packing                                 no field
neat_packing                            data.document_attention
flash_attn                              perf.attention
finetuning_type                         no field
model_name_or_path                      no field
last_save_in_hf                         checkpoint.export_hf_at_end
ckpt_every_steps                        checkpoint.every_steps
val_every_steps                         validation.every_steps
packed_sequence_size                    train.seq_len_tokens
tp_size                                 parallel.tp
document                                data.document_attention
world_size                              no field
"""
"""A key of Megatron-LM, Hugging Face, torchtitan, Axolotl, DeepSpeed, LLaMA-Factory or NeMo Automodel, and the start of
the answer."""


@pytest.mark.parametrize("row", KEYS_OF_OTHERS.strip().splitlines(), ids=lambda row: row.split()[0])
def test_a_name_of_another_framework_has_its_field_or_none(row: str) -> None:
    name, expected = row.split(maxsplit=1)
    start = "there is no field for it:" if expected == NO_FIELD else f"did you mean {expected}"
    for spelt in (name, name.replace("_", "-"), name if "." in name else f"train.{name}"):
        assert re.match(re.escape(start) + r"(?![\w.])", nearest_key(spelt))


TABLES_OF_OTHERS = {
    "activation_checkpoint": "did you mean memory.recompute?",
    "training": "did you mean train?",
    "optimizer": "did you mean optim?",
    "lr_scheduler": "did you mean optim?",
    "parallelism": "did you mean parallel?",
    "profiling": "did you mean profile?",
    "zero_optimization": "did you mean parallel?",
    "model.router": "did you mean model.moe?",
    "model.attn": "did you mean model.attention?",
    "wandb": "did you mean metrics?",
    "model.layers": "titan-moe check --explain model lists",
    "lora": "did you mean model.adapter?",
}


@pytest.mark.parametrize(("name", "expected"), TABLES_OF_OTHERS.items())
def test_a_table_of_another_framework_has_its_section_or_none(tmp_path: Path, name: str, expected: str) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(f"[{name}]\nx = 1")
    with pytest.raises(RecipeError) as refused:
        load_recipe(file)
    assert refused.value.problems[0].startswith(f"{file}: {name} is not a known section; {expected}")


@pytest.mark.parametrize(
    ("dotted", "expected"),
    [
        ("optim.beta3", "titan-moe check --explain optim lists"),  # not beta1
        ("model.moe.top_p", "titan-moe check --explain model.moe lists"),  # not top_k
        ("parallel.sp", "titan-moe check --explain parallel lists"),  # not pp
        ("optim.steps_of_decay", "titan-moe check --explain optim lists"),
        ("data.name", "titan-moe check --explain data lists"),  # not model.name
        ("training.stages", "titan-moe check --explain train lists"),  # their section
        ("checkpoint.every_hours", "titan-moe check --explain checkpoint lists"),
        ("heat", "the sections are run"),
        ("frequency", "the sections are run"),
        ("logs.every_steps", "did you mean validation.every_steps or checkpoint.every_steps or metrics.every_steps?"),
        ("optim.warm_up_steps", "did you mean optim.warmup_steps?"),
        ("optim.weigth_decay", "did you mean optim.weight_decay?"),
        ("model.num_layer", "did you mean model.num_layers?"),
        ("data.tokeniser", "did you mean data.tokenizer?"),
        ("x" * 100_000, "the sections are run"),
    ],
    ids=lambda value: value[:20],
)
def test_letters_decide_within_a_section_and_between_misspelt_names(dotted: str, expected: str) -> None:
    assert nearest_key(dotted).startswith(expected)
