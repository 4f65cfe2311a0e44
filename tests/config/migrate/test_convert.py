"""Jobs of torchtitan, Megatron-Core and Megatron-Bridge become recipes: fields, comments, refusals with their lines."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from titan_moe.config import Recipe, RecipeError, check_rules, load_recipe
from titan_moe.config.migrate.convert import recipe_of_job
from titan_moe.config.parallel import planning
from titan_moe.config.resume import flatten

MODELS = Path(__file__).parents[3] / "recipes" / "models"
OF_MEGATRON = """
--swiglu --disable-bias-linear --position-embedding-type rope --normalization RMSNorm --seq-length 4096
--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights --max-position-embeddings 4096
--micro-batch-size 1 --global-batch-size 1024 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --bf16 --mock-data
--adam-beta2 0.95 --weight-decay 0.1 --moe-grouped-gemm --sequence-parallel
"""
MIXTRAL = """
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --norm-epsilon 1e-5 --rotary-base 1000000 --vocab-size 32000 --num-experts 8 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2
--expert-model-parallel-size 8 --train-iters 500000 --lr-decay-iters 320000 --lr-warmup-iters 500
"""
QWEN3 = """
--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128
--group-query-attention --num-query-groups 4 --qk-layernorm --norm-epsilon 1e-6 --rotary-base 1000000
--vocab-size 151936 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-aux-loss-coeff 1e-3
--moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type flex --moe-enable-deepep
--expert-model-parallel-size 8 --train-iters 1000 --lr-warmup-iters 100
--recompute-granularity selective --recompute-modules moe_act layernorm
"""
DEEPSEEK = """
--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --multi-latent-attention
--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
--norm-epsilon 1e-6 --vocab-size 129280 --init-method-std 0.006 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58)
--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-num-groups 8
--moe-router-group-topk 4 --moe-router-pre-softmax --moe-router-score-function sigmoid
--moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type flex
--mtp-num-layers 1 --pipeline-model-parallel-size 16 --expert-model-parallel-size 64 --expert-tensor-parallel-size 1
--pipeline-model-parallel-layout Et*3|(tt|)*29m|L --train-samples 1024000 --lr-warmup-samples 102400
--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --fp8-format e4m3 --fp8-recipe blockwise
--recompute-granularity selective --recompute-modules mla_up_proj mlp moe_act
"""


def converted(tmp_path: Path, text: str, name: str = "job.sh", nproc: int | None = None) -> tuple[str, Recipe]:
    """The recipe of a job, as text and read."""
    (tmp_path / name).write_text(text)
    written = recipe_of_job(tmp_path / name, nproc)
    (tmp_path / "recipe.toml").write_text(written)
    return written, load_recipe(tmp_path / "recipe.toml")


def refusal(tmp_path: Path, text: str, name: str = "job.sh") -> str:
    """The problems of a job, without its path."""
    with pytest.raises(RecipeError) as refused:
        converted(tmp_path, text, name)
    return "\n".join(refused.value.problems).replace(f"{tmp_path / name}: ", "")


SHAPE_DIFFERS = {
    "model.name": "that of the file",
    "model.embedding_init_std": "Megatron's are those of matrices",
    "model.mtp.num_depths": "ours leaves it out",
}


@pytest.mark.parametrize(
    ("job", "ranks", "model", "differ"),
    [
        (MIXTRAL, 64, "mixtral_8x7b", {"model.moe.aux_loss_coef", "model.moe.aux_losses.microbatch"}),
        (QWEN3, 8, "qwen3_30b_a3b", set()),
        (DEEPSEEK, 1024, "deepseek_v3", set()),
    ],
    ids=["mixtral", "qwen3", "deepseek"],
)
def test_arguments_of_megatron_give_the_shape_of_our_recipe(
    tmp_path: Path, job: str, ranks: int, model: str, differ: set[str]
) -> None:
    text, recipe = converted(tmp_path, OF_MEGATRON + job, nproc=ranks)
    assert f"--nproc {ranks} accepts it" in text
    with planning():
        assert check_rules(recipe, ranks) == []
    ours, theirs = flatten(load_recipe(MODELS / f"{model}.toml")), flatten(recipe)
    of_model = {key for key in ours if key.startswith("model.") and ours[key] != theirs[key]}
    assert of_model - SHAPE_DIFFERS.keys() == differ


def test_values_of_megatron_have_our_units(tmp_path: Path) -> None:
    text, recipe = converted(tmp_path, OF_MEGATRON + DEEPSEEK, nproc=1024)
    assert recipe.train.steps == 1000  # samples over the batch
    assert (recipe.optim.warmup_steps, recipe.optim.decay_steps) == (100, 900)
    assert recipe.optim.min_lr_ratio == 0.1
    assert recipe.memory.recompute == ("mla_up", "dense_mlp", "moe_act")
    assert (recipe.optim.kind, recipe.precision.moments) == ("fused_adamw", "bf16")
    assert recipe.precision.format == "fp8_blockwise"
    assert (recipe.parallel.dispatcher, recipe.parallel.ep, recipe.parallel.etp) == ("hierarchical_symm_mem", 64, 1)
    assert (recipe.parallel.vpp, recipe.parallel.pp_layout) == (2, "Et*3|(tt|)*29|mL")
    assert "m is beside L here" in text
    _, mixtral = converted(tmp_path, OF_MEGATRON + MIXTRAL, nproc=64)
    assert (mixtral.parallel.vpp, mixtral.parallel.pp_schedule) == (4, "interleaved_1f1b")
    assert mixtral.optim.decay_steps == 320_000 - 500
    assert mixtral.model.moe.aux_losses.microbatch == 1e-2


SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-experts 8 --bf16\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--tensor-model-parallel-size 2", {"parallel.tp": 2, "parallel.etp": 2}),
        ("--ffn-hidden-size 96", {"model.moe.ffn_hidden_size": 96, "model.ffn_hidden_size": 0}),
        ("--ffn-hidden-size 96 --moe-layer-freq 2", {"model.dense_layers": (1, 3), "model.ffn_hidden_size": 96}),
        ("--moe-router-pre-softmax", {"model.moe.normalize_topk": False}),
        ("--moe-router-num-groups 4 --moe-router-group-topk 2", {"model.moe.group_score": "top_share_sum"}),
        ("--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff .1",
         {"model.moe.aux_losses.global_batch": 0.1}),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff .1", {"model.moe.aux_losses.microbatch": 0.0}),
        ("--moe-router-enable-expert-bias", {"model.moe.bias_update_speed": 1e-3}),
        ("--moe-aux-loss-coeff .1 --moe-z-loss-coeff .2",
         {"model.moe.aux_losses.microbatch": 0.1, "model.moe.z_loss_coef": 0.2}),
        ("--data-path 0.7 a/x 0.3 b/y", {"data.source": "mixture"}),
        ("--moe-expert-capacity-factor -1", {"model.moe.capacity_factor": 0.0}),
        ("--moe-expert-capacity-factor 1.5 --moe-token-drop-policy position", {"model.moe.drop_policy": "position"}),
        ("--moe-n-hash-layers 2", {"model.moe.hash_layers": (0, 1)}),
        ("--window-size 7,0", {"model.attention.sliding_window": 8}),
        ("--context-parallel-size 2", {"parallel.cp_kind": "ring"}),
        ("--context-parallel-size 2 --multi-latent-attention", {"parallel.cp_kind": "allgather"}),
        ("--context-parallel-size 2 --cp-comm-type a2a", {"parallel.cp_kind": "ulysses"}),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1", {"parallel.pp_layout": "Et*1|t*3L"}),
        ("--expert-model-parallel-size 4", {"parallel.dispatcher": "allgather"}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2",
         {"memory.recompute": ("block:2",)}),
        ("--recompute-granularity selective", {"memory.recompute": ("attention",)}),
        ("--offload-modules attn_norm core_attn", {"memory.offload": ("block", "attention")}),
        ("--fp8-format hybrid --fp8-recipe tensorwise", {"precision.linears": "fp8_tensorwise"}),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", {"precision.format": "mxfp8"}),
        ("--optimizer muon", {"optim.kind": "muon"}),
        ("--qk-clip --qk-clip-alpha 0.3", {"optim.qk_clip.threshold": 100.0, "optim.qk_clip.alpha": 0.3}),
        ("--qk-clip-threshold 30", {"optim.qk_clip.threshold": 0.0}),
        ("--lr 1e-3 --min-lr 1e-4 --train-iters 100 --lr-decay-style WSD --lr-wsd-decay-style minus_sqrt "
         "--lr-wsd-decay-iters 10", {"optim.decay": "sqrt", "optim.decay_steps": 10, "optim.min_lr_ratio": 0.1}),
        ("--train-iters 100 --lr-warmup-fraction 0.1", {"optim.warmup_steps": 10, "optim.decay": "linear"}),
        ("--global-batch-size 8 --eval-interval 5 --eval-iters 2", {"validation.num_sequences": 16}),
        ("--data-path a/text --split 9,1,0", {"data.path": "a/text.bin", "data.holdout_fraction": 0.1}),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", {"compile.cudagraph": "step"}),
        ("--attention-backend fused", {"perf.attention": "cudnn"}),
        ("--moe-router-force-load-balancing", {"train.forced_load": "uniform"}),
        ("--wandb-project p --wandb-exp-name n", {"metrics.wandb": True, "metrics.wandb_name": "n"}),
        ("--save runs/x --load runs/x", {"run.folder": "runs/x", "checkpoint.load_from": ""}),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_value_of_megatron_has_its_field(tmp_path: Path, arguments: str, expected: dict[str, Any]) -> None:
    text, recipe = converted(tmp_path, SMALL + arguments)
    fields = flatten(recipe)
    assert {key: fields[key] for key in expected} == expected, text


def test_what_megatron_does_by_default_is_written_where_ours_differs(tmp_path: Path) -> None:
    text, recipe = converted(tmp_path, "--num-layers 4 --hidden-size 64 --num-attention-heads 4")
    assert (recipe.precision.compute, recipe.model.norm, recipe.optim.beta2) == ("fp32", "layer", 0.999)
    assert recipe.model.embeddings_are_tied and recipe.model.ffn_hidden_size == 256
    assert "Megatron-Core's swiglu = false (its default): layers are SwiGLU" in text
    assert "#   train.steps = 100 (steps of the run)" in text


def test_a_name_without_counterpart_is_a_comment_with_what_to_take(tmp_path: Path) -> None:
    text, _ = converted(tmp_path, SMALL + "--manual-gc\n--no-rope-fusion\n--hidden-dropout 0.1 --load other $WHAT")
    assert "#   --manual-gc = true (line 2): memory is collected when PyTorch does" in text
    assert "#   --no-rope-fusion = true (line 3): no field here is like it" in text
    assert "#   --hidden-dropout = 0.1 (line 4): models have no dropout" in text
    assert "(line 4): $WHAT is not in the file; set checkpoint.load_from yourself" in text


def test_a_word_without_counterpart_takes_no_other_field_with_it(tmp_path: Path) -> None:
    words = "--tensor-model-parallel-size 2 --moe-token-dispatcher-type magic --recompute-granularity selective "
    text, recipe = converted(tmp_path, SMALL + words + "--recompute-modules moe_act magic --offload-modules magic")
    assert (recipe.parallel.tp, recipe.memory.recompute, recipe.memory.offload) == (2, ("moe_act",), ())
    for name in ("--moe-token-dispatcher-type", "--recompute-modules", "--offload-modules"):
        assert f"#   {name} = " in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--num-layers 8", "line 2: --num-layers = 8, but line 1: --num-layers = 4; keep one of them"),
        ("--ffn-hidden-size $H", "$H is not in the file; write its value"),
        ("--hidden-size $H", "line 2: --hidden-size = \"$H\": $H is not in the file; write its value"),
        ("--moe-router-topk two", 'line 2: --moe-router-topk: model.moe.top_k = "two" must be an integer'),
        ("--fp16", "line 2: --fp16 = true must be left out beside line 1: --bf16"),
        ("--train-iters 1 --train-samples 9",
         "line 2: --train-samples = 9 must be left out: line 2: --train-iters says it too"),
        ("--moe-layer-freq [1]*3",
         'line 2: --moe-layer-freq = "[1]*3" must be a list of as many entries as there are layers, 4; it has 3'),
        ("--lr 1e-4 --min-lr 1e-3", "line 2: --min-lr = 0.001 must be at least 0 and at most line 2: --lr = 0.0001"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
         "line 2: --num-layers-per-virtual-pipeline-stage = 3 must be a number whose 2 pipeline ranks divide 4 layers"),
        ("--save 'x", "line 2: the quote ' is not closed"),
        ("if [ $X ]; then", "line 2: if is not evaluated; write the words that hold into a file without it"),
    ],
    ids=lambda value: value[:30],
)  # fmt: skip
def test_what_contradicts_itself_names_line_and_word(tmp_path: Path, arguments: str, expected: str) -> None:
    assert expected in refusal(tmp_path, SMALL + arguments)


TITAN = """
[job]
dump_folder = "./outputs"
[metrics]
log_freq = 5
enable_tensorboard = true
[model]
name = "{name}"
flavor = "{flavor}"
hf_assets_path = "assets/x"
converters = ["quantize.linear.float8"]
[optimizer]
name = "AdamW"
lr = 2.2e-4
implementation = "fused"
[lr_scheduler]
warmup_steps = 20
decay_ratio = 0.8
decay_type = "cosine"
min_lr_factor = 0.1
[training]
local_batch_size = 4
seq_len = 4096
steps = 100
dataset = "c4"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
fsdp_reshard_after_forward = "never"
expert_parallel_degree = 4
[checkpoint]
enable = true
folder = "checkpoint"
interval = 10
async_mode = "async"
[activation_checkpoint]
mode = "full"
[compile]
enable = true
[quantize.linear.float8]
recipe_name = "rowwise"
filter_fqns = ["output"]
"""


@pytest.mark.parametrize(
    ("name", "flavor", "model"),
    [
        ("qwen3", "30B-A3B", "qwen3_30b_a3b"),
        ("qwen3", "235B-A22B", "qwen3_235b_a22b"),
        ("deepseek_v3", "671B", "deepseek_v3"),
    ],
)
def test_a_job_of_torchtitan_gives_the_shape_of_our_recipe(tmp_path: Path, name: str, flavor: str, model: str) -> None:
    text, recipe = converted(tmp_path, TITAN.format(name=name, flavor=flavor), "job.toml", 16)
    assert "--nproc 16 accepts it" in text
    ours, theirs = flatten(load_recipe(MODELS / f"{model}.toml")), flatten(recipe)
    differ = {key for key in ours if key.startswith("model.") and ours[key] != theirs[key]}
    balance = {"model.moe.aux_loss_coef", "model.moe.bias_update_speed"}
    epsilons = {"model.norm_eps", "model.attention.latent_norm_eps", "model.init_std", "model.attention.rope_theta"}
    assert differ - {"model.name"} <= balance | epsilons


def test_values_of_torchtitan_have_our_units(tmp_path: Path) -> None:
    text, recipe = converted(tmp_path, TITAN.format(name="qwen3", flavor="debugmodel_moe"), "job.toml", 16)
    assert recipe.train.global_batch_sequences == 4 * 8  # data-parallel ranks beside tp
    assert "8 data-parallel of 16 ranks" in text
    assert (recipe.optim.warmup_steps, recipe.optim.decay_steps, recipe.optim.min_lr_ratio) == (20, 80, 0.1)
    assert (recipe.precision.linears, recipe.precision.experts) == ("fp8_rowwise", "format")
    assert (recipe.checkpoint.every_steps, recipe.checkpoint.is_async) == (10, True)
    assert (recipe.parallel.tp, recipe.parallel.etp, recipe.parallel.dispatcher) == (2, 1, "alltoall")
    assert not recipe.parallel.reshard_after_forward
    assert (recipe.memory.recompute, recipe.data.path, recipe.run.folder) == (("block",), "allenai/c4", "./outputs")
    assert (recipe.model.vocab_size, recipe.model.moe.num_experts) == (2048, 64)


def test_an_unknown_flavor_is_missing_and_a_recipe_of_ours_is_refused(tmp_path: Path) -> None:
    text, _ = converted(tmp_path, TITAN.format(name="llama3", flavor="8B"), "job.toml")
    assert "the shape of llama3 8B is not known here" in text
    assert "#   model.num_layers = 2 (blocks)" in text
    assert "is a recipe already, by [train]" in refusal(tmp_path, "[train]\nsteps = 1", "job.toml")


BRIDGE = """
model:  # as its recipes are dumped
  _target_: some.provider
  num_layers: 4
  hidden_size: 64
  num_attention_heads: 4
  num_query_groups: 2
  num_moe_experts: 8
  moe_router_topk: 2
  moe_ffn_hidden_size: 96
  moe_layer_freq: [0, 1, 1, 1]
  ffn_hidden_size: 128
  seq_length: 64
  vocab_size: 512
  normalization: RMSNorm
  share_embeddings_and_output_weights: false
  virtual_pipeline_model_parallel_size: null
  tensor_model_parallel_size: 2
  params_dtype: torch.bfloat16
train:
  train_iters: 10
  global_batch_size: 8
  micro_batch_size: 2
optimizer:
  lr: 3.0e-4
  min_lr: 3.0e-5
scheduler:
  lr_decay_style: cosine
  lr_warmup_iters: 2
mixed_precision: bf16_mixed
"""


def test_values_of_bridge_and_its_overrides_give_one_recipe(tmp_path: Path) -> None:
    text, recipe = converted(tmp_path, BRIDGE, "job.yaml", 4)
    assert "--nproc 4 accepts it" in text
    assert (recipe.model.num_dense_layers, recipe.model.ffn_hidden_size, recipe.model.attention.head_dim) == (
        1,
        128,
        16,
    )
    assert (recipe.model.attention.num_kv_heads, recipe.parallel.etp, recipe.optim.decay_steps) == (2, 2, 8)
    section, lines = "", []
    for line in BRIDGE.splitlines():
        name, _, value = line.partition(" #")[0].partition(":")
        section = section if line.startswith(" ") else name
        if value.strip() and line.startswith(" "):
            lines.append(f"{section}.{name.strip()}={value.strip().replace(', ', ',')}")
    overrides, same = converted(tmp_path, "\n".join(lines), "job.txt", 4)
    assert same == load_recipe(tmp_path / "recipe.toml")
    assert flatten(same) == flatten(recipe), overrides


def test_arguments_of_megatron_in_yaml_are_arguments(tmp_path: Path) -> None:
    text = "ENV_VARS:\n  X: 1\nMODEL_ARGS:\n  --num-layers: 4\n  --swiglu: true\n  --recompute-granularity: selective\n"
    written, recipe = converted(tmp_path, text + "  --recompute-modules: moe_act layernorm\n", "job.yaml")
    assert recipe.memory.recompute == ("moe_act", "norms")
    assert "Megatron-Core's names" in written and tomllib.loads(written)["model"]["num_layers"] == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model:\n  x: &a 1", "line 2: '&a 1' is beyond plain YAML"),
        ("model:\n\tx: 1", "line 2: a tab indents it"),
        ("model:\n  a: 1\n  what", "line 3: 'what' is no `name: value`"),
        ("model:\n  num_layers: 4\ndataset:\n  num_layers: 5",
         "line 4: dataset.num_layers = 5, but line 2: model.num_layers = 4"),
    ],
)  # fmt: skip
def test_yaml_beyond_the_plain_part_names_its_line(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, text, "job.yaml")


def test_a_script_is_read_as_its_shell_would(tmp_path: Path) -> None:
    script = """#!/bin/bash
    LAYERS=4; export HEADS="4"
    MODEL=(--num-layers $LAYERS # four
      --num-attention-heads "${HEADS}" --hidden-size $((16 * HEADS)))
    MOE="--num-experts ${EXPERTS:-8} \\
      --moe-router-topk 3"
    MODEL+=(--seq-length 64)
    torchrun --nproc_per_node 8 train.py "${MODEL[@]}" ${MOE} --lr=1e-3 2>&1 | tee log
    """
    _, recipe = converted(tmp_path, script)
    moe = recipe.model.moe
    assert (recipe.model.num_layers, recipe.model.hidden_size, moe.num_experts, moe.top_k) == (4, 64, 8, 3)
    assert (recipe.train.seq_len_tokens, recipe.optim.lr) == (64, 1e-3)


def test_a_file_that_is_no_job_is_refused(tmp_path: Path) -> None:
    assert "no argument such as --num-layers is in it" in refusal(tmp_path, "hello world")
    with pytest.raises(RecipeError, match="is no file"):
        recipe_of_job(tmp_path)
