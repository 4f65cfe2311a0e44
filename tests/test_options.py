"""Every option of a recipe has won a measurement, or there is a reason that keeps it, or it is marked EXPERIMENTAL.

An option that has none of these does not enter, and one whose row is gone from tools/results must find another or
go.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from titan_moe.config.adapter import KINDS
from titan_moe.config.experimental import EXPERIMENTAL, Experimental, describe_experimental
from titan_moe.config.explain import explain
from titan_moe.config.offload import OFFLOADABLE
from titan_moe.config.parse import load_recipe
from titan_moe.config.recipe import Recipe
from titan_moe.config.schema import all_keys
from titan_moe.plan.check_report import describe

RESULTS = Path(__file__).parents[1] / "tools" / "results"


class Won(NamedTuple):
    """Words of tools/results that end with a figure of the option, and those that end with the figure it beat."""

    figure: str
    beaten: str
    less_is_better: bool = False

    @property
    def is_won(self) -> bool:
        ours, theirs = (float(re.findall(r"[\d,.]*\d", words)[-1].replace(",", "")) for words in self[:2])
        return ours < theirs if self.less_is_better else ours > theirs


LESS = True
WON = {
    "model.embedding_init_std": Won(
        "With deviation 1 the load at step 24 is 1.6", "the load at step 24 is 1.6 × instead of 15", LESS
    ),
    "model.moe.aux_loss_coef": Won(
        "1e-2 holds 3.8", "with `aux_loss_coef = 1e-3` the load is back at 3.3 × at step 90 and at 7", LESS
    ),
    "parallel.dispatcher": Won("| bound 1.5; 2.0 (first 11 steps) | 28,990", "| `alltoall`, exact sizes | 25,756"),
    "parallel.overlap": Won("forced | 30,146 | 31,273 | 31,841", "| Qwen3, 24 layers, forced | 30,146"),
    "parallel.expert_rank_capacity_factor": Won(
        "| bound 1.5; 2.0 (first 11 steps) | 28,990", "as shipped (bound 1.25) | **15,011"
    ),
    "parallel.expert_layer_capacity_factor": Won(
        "`parallel.expert_layer_capacity_factor = 2` | 77,931 | **33.9", "3 microbatches, ep 4 | 77,648 | 38.1", LESS
    ),
    "parallel.expert_clones": Won("1.36 | 49,323 | 52,375", "1.36 | 49,323"),
    "parallel.accumulate_unsharded": Won("+ parameters gathered once a step | **16,263", "| Qwen3-30B-A3B | **15,835"),
    "perf.kernels": Won("+ `auto` kernels, fused optimizer | **62,511", "+ parameters gathered once a step | 57,177"),
    "perf.loss_chunk_tokens": Won("test_memory_at_full_size`), 1.2", "* Head: under 1.5", LESS),
    "optim.kind": Won(
        "| AdamW fp32; bf16; bf16 moments under fp32 | 4.05", "under fp32 | 4.05; 3.50; 4.08 TB/s | | 3.48"
    ),
    "perf.override.experts": Won("fused **545", "compiled `grouped_mm` path 515"),
    "perf.override.permute": Won("of 128 experts | 0.021", "of 128 experts | 0.021 ms | 0.199", LESS),
    "perf.override.router": Won(
        "| router after its logits, 32,768 × 128 | 0.037", "× 128 | 0.037 / 0.059 ms | 0.227", LESS
    ),
    "perf.override.head": Won("2048 × 151,936 | 50.0", "of its GEMMs alone (45.0) | 54.9", LESS),
    "perf.override.gradients": Won("46; 117 million | 0.183", "0.183; 0.454 ms, 2.6 TB/s | | 0.301", LESS),
    "compile.cudagraph": Won("(36.7 with Triton's kernels), **8.6", "4,096 tokens a step: 34.2", LESS),
}
"""Option -> the measurement that it won."""
KEPT = {
    "run.folder": "where a run writes",
    "run.seed": "another seed is another run",
    "run.device": "a GPU host can try a recipe on its CPU",
    "run.ranks_per_gpu": "every layout can be tried on one GPU",
    "run.is_deterministic": "two runs that differ in nothing: how a defect is found",
    "run.step_timeout_minutes": "a hung run ends; how long a step may take differs by run",
    "model.class": "a model of one's own",
    "model.table": "the plan of a model of one's own",
    "model.name": "what the logs call a shape",
    "model.vocab_size": "shape of every model",
    "model.num_layers": "shape of every model",
    "model.num_dense_layers": "DeepSeek",
    "model.dense_layers": "mlp_only_layers of Qwen3-MoE",
    "model.moe_every": "Llama 4, Ernie 4.5",
    "model.hidden_size": "shape of every model",
    "model.ffn_hidden_size": "width of dense layers: DeepSeek, and models without experts",
    "model.norm": "Phi-3.5-MoE",
    "model.norm_placement": "AFMoE, A.X-K1",
    "model.norm_eps": "families differ: 1e-5 and 1e-6",
    "model.embeddings_are_tied": "small Qwen3, Gemma",
    "model.init_std": "families differ",
    "model.embedding_multiplier": "Gemma; gives tied embeddings the size of untied ones",
    "model.residual_multiplier": "Granite",
    "model.logits_scaling": "Granite",
    "model.head_bias": "Phi-3.5-MoE",
    "model.attention.softmax_scale": "Granite",
    "model.attention.kind": "mla: DeepSeek, Kimi-K2, GLM-4.7-Flash",
    "model.attention.num_heads": "shape of every model",
    "model.attention.num_kv_heads": "shape of gqa",
    "model.attention.head_dim": "shape of gqa",
    "model.attention.qk_norm": "Qwen3",
    "model.attention.qk_norm_over": "all heads in OLMoE and MiniMax-M2",
    "model.attention.qk_norm_is_after_rope": "Hunyuan-V1",
    "model.attention.qk_norm_has_weights": "Llama 4",
    "model.attention.qk_norm_layers": "Llama 4",
    "model.attention.clip_qkv": "OLMoE, DBRX",
    "model.attention.qkv_bias": "Qwen2-MoE",
    "model.attention.out_bias": "gpt-oss, Phi-3.5-MoE",
    "model.attention.sinks": "gpt-oss",
    "model.attention.sliding_window": "Mistral, gpt-oss, Gemma 3",
    "model.attention.attention_chunk_size": "Llama 4",
    "model.attention.full_attention_every": "gpt-oss, Gemma 3",
    "model.attention.window_layers": "dots1, Qwen2-MoE",
    "model.attention.rope_theta": "families differ: 1e4 to 1e6",
    "model.attention.partial_rotary_factor": "GLM-4.5, MiniMax-M2",
    "model.attention.rope_layers": "AFMoE, EXAONE-MoE",
    "model.attention.window_rope_theta": "Mellum 2",
    "model.attention.llama3_factor": "Llama 3.1 and what is built on it",
    "model.attention.llama3_original_tokens": "llama3_factor",
    "model.attention.llama3_low_freq_factor": "llama3_factor",
    "model.attention.llama3_high_freq_factor": "llama3_factor",
    "model.attention.nope_every": "Llama 4, SmolLM3",
    "model.attention.attn_scale": "Llama 4",
    "model.attention.floor_scale": "Llama 4",
    "model.attention.rope_is_interleaved": "DeepSeek",
    "model.attention.yarn_factor": "DeepSeek-V2, gpt-oss",
    "model.attention.yarn_original_tokens": "YaRN",
    "model.attention.yarn_beta_fast": "YaRN",
    "model.attention.yarn_beta_slow": "YaRN",
    "model.attention.yarn_truncate": "off in gpt-oss",
    "model.attention.yarn_mscale": "DeepSeek's YaRN",
    "model.attention.yarn_mscale_all_dim": "DeepSeek's YaRN",
    "model.attention.longrope_short_factor": "Phi-3.5-MoE",
    "model.attention.longrope_long_factor": "Phi-3.5-MoE",
    "model.attention.longrope_applies": "one list for a run: cached keys and new ones have the same frequencies",
    "model.attention.longrope_original_tokens": "LongRoPE",
    "model.attention.longrope_short_scale": "short_mscale of Phi-3.5-MoE",
    "model.attention.longrope_long_scale": "long_mscale of Phi-3.5-MoE",
    "model.attention.q_lora_rank": "shape of mla: DeepSeek-V2 and V3, not V2-Lite",
    "model.attention.kv_lora_rank": "shape of mla",
    "model.attention.qk_nope_head_dim": "shape of mla",
    "model.attention.qk_rope_head_dim": "shape of mla",
    "model.attention.v_head_dim": "shape of mla",
    "model.attention.latent_norm_eps": "1e-6 in Hugging Face's families, norm_eps in Megatron",
    "model.moe.router_bias": "gpt-oss",
    "model.moe.expert_mlp_bias": "gpt-oss",
    "model.moe.num_experts": "shape of every mixture",
    "model.moe.top_k": "shape of every mixture",
    "model.moe.ffn_hidden_size": "shape of every mixture",
    "model.moe.swiglu_limit": "gpt-oss",
    "model.moe.swiglu_alpha": "gpt-oss",
    "model.moe.swiglu_up_offset": "gpt-oss",
    "model.moe.shared_ffn_hidden_size": "DeepSeek, Qwen2-MoE",
    "model.moe.shared_expert_gate": "Qwen2-MoE",
    "model.moe.latent_size": "latent MoE: narrower rows",
    "model.moe.score_fn": "sigmoid in DeepSeek-V3, sqrtsoftplus in V4, sparsemixer in Phi-3.5-MoE, softmax elsewhere",
    "model.moe.sparsemixer_jitter": "Phi-3.5-MoE",
    "model.moe.normalize_topk": "off in DeepSeek-V2",
    "model.moe.route_scale": "DeepSeek",
    "model.moe.input_jitter": "Switch Transformer, Megatron",
    "model.moe.num_groups": "DeepSeek-V2 and V3",
    "model.moe.top_k_groups": "DeepSeek-V2 and V3",
    "model.moe.group_score": "V2 and V3 differ",
    "model.moe.score_on": "input in Llama 4",
    "model.moe.aux_losses.sequence": "model.moe.aux_loss_coef beside the others",
    "model.moe.aux_losses.microbatch": "Megatron's aux_loss, Switch",
    "model.moe.aux_losses.global_batch": "Qwen3; arXiv:2501.11873",
    "model.moe.z_loss_coef": "ST-MoE, OLMoE",
    "model.moe.hash_layers": "DeepSeek-V4",
    "model.moe.hash_table": "tables by frequency or by clusters of words, as arXiv:2106.04426 compares",
    "model.moe.capacity_factor": "Switch, GShard, Megatron: steps of one size",
    "model.moe.bias_update_speed": "DeepSeek-V3",
    "model.moe.bias_update": "by signs in DeepSeek-V3; quantiles balance at once",
    "model.moe.bias_ema": "quantile balancing",
    "model.moe.router_dtype": "fp64 as in Megatron Core's option",
    "model.mtp.loss_weight": "0.3, then 0.1 in DeepSeek-V3",
    "model.adapter.rank": "LoRA",
    "model.adapter.alpha": "LoRA",
    "model.mtp.num_depths": "DeepSeek-V3, GLM-4.5",
    "model.adapter.base": "QLoRA: a base of half the bytes",
    "model.adapter.targets": "PEFT's target_modules, by kind",
    "model.adapter.use_rslora": "rsLoRA: ranks of 64 and more",
    **{
        f"model.adapter.{kind}.{name}": "PEFT's rank_pattern and alpha_pattern"
        for kind in ("attention", "dense", "shared", "experts")
        for name in ("rank", "alpha")
    },
    "parallel.pp": "models that the other axes do not fit into memory, and links between nodes that FSDP fills",
    "parallel.pp_schedule": "bubble, memory and messages differ: torch.distributed.pipelining and Megatron offer them",
    "parallel.vpp": "Megatron's virtual pipeline: a smaller bubble for more messages",
    "parallel.pp_layout": "Megatron's pipeline-model-parallel-layout: stages that FLOPs do not find",
    "parallel.cp": "sequences whose activations one rank does not hold",
    "parallel.cp_kind": "heads, or how few of them keys and values have, limit ulysses; allgather has masks, ring none",
    "parallel.tp": "what one rank does not hold of a layer, and fewer sequences than ranks",
    "parallel.ep": "experts that one rank does not hold",
    "parallel.etp": "experts too large for a rank, or too few for ep (Mixtral); Megatron's expert-tensor-parallel-size",
    "parallel.dp_replicate": "HSDP: parameters are gathered inside a node, gradients alone cross nodes",
    "parallel.dp_shard": "fewer shards than ranks: the other half of HSDP",
    "parallel.ep_ranks_per_node": "a plan for nodes that the host of `check` does not have; nodes of two for a test",
    "parallel.reshard_after_forward": "memory for a gather a block, as in FSDP2",
    "parallel.reshard_experts_after_forward": "memory for a gather of experts a block where edp > 1",
    "perf.attention": "PyTorch's choice is not always the fastest; flex skips what a mask hides",
    "perf.override.rotary": "around a bad kernel, as the other overrides; Triton's won in plan/tables",
    "precision.compute": "fp32 and fp64 for tests and small models, bf16 for all others",
    "precision.master": "bf16 weights are half as large; fp32 is finer, in two parts without a copy for compute",
    "precision.gradients": "bf16 gradients are half as large; fp32 sums of many microbatches keep their digits",
    "precision.reduce": "bf16 halves the bytes of gradients between ranks; fp32 is exact",
    "precision.moments": "bf16 and 8-bit moments are smaller; fp32 is finer",
    "precision.format": "DeepSeek-V3 (fp8_blockwise), Megatron and torchao train in these formats",
    "precision.experts": "experts and dense layers gain differently: experts are most FLOPs of a mixture",
    "precision.linears": "torchao converts dense layers alone, DeepSeek-V3 both",
    "precision.num_layers_at_start_in_compute": "Megatron's num_layers_at_start_in_bf16",
    "precision.num_layers_at_end_in_compute": "Megatron's num_layers_at_end_in_bf16; NVFP4 keeps the last layers",
    "precision.modules_in_compute": "a sensitive or small layer; torchtitan's filter_fqns",
    "precision.only_where_faster": "fp8 loses on small layers, and whether depends on the GPU",
    "precision.backend": "a format can be tried where no matrix unit has it",
    "compile.regional": "off to debug; on to compile on a CPU",
    "memory.offload": "what neither recompute nor more ranks make room for, where the host has memory",
    "memory.recompute": "what does not fit otherwise; no figure of RESULTS needed it",
    "train.steps": "length of a run",
    "train.seq_len_tokens": "shape of a batch",
    "train.global_batch_sequences": "shape of a batch",
    "train.batch_schedule": "DeepSeek-V3, and `rampup_batch_size` of Megatron",
    "train.micro_batch_sequences": "shape of a batch",
    "train.forced_load": "an even load for benchmarks, uneven ones for tests",
    "train.tokens": "how long a run is, as papers say it",
    "train.epochs": "how long a run is, by its data",
    "train.max_skipped_in_row": "a diverged run costs time and leaves no model",
    "train.spike_sigmas": "OLMo 2: a bad batch moves no weight",
    "optim.lr": "AdamW",
    "optim.muon.momentum": "Muon",
    "optim.muon.nesterov": "Muon",
    "optim.muon.ns_steps": "Muon",
    "optim.muon.adjust_lr": "Muon: Moonlight's and Keller Jordan's are both in use",
    "optim.qk_clip.threshold": "Kimi K2: logits of attention that grow",
    "optim.qk_clip.alpha": "QK-clip: how its factor is divided between queries and keys",
    "optim.muon.lr_scale": "Muon: matrices under `original` want other rates than the rest",
    "optim.beta1": "AdamW",
    "optim.beta2": "AdamW",
    "optim.eps": "AdamW",
    "optim.weight_decay": "AdamW",
    "optim.embeddings_decay": "off in OLMo 2",
    "optim.max_grad_norm": "clipping",
    "optim.warmup_steps": "schedule",
    "optim.decay_steps": "schedule",
    "optim.decay": "schedule: cosine, linear and WSD's root are all in use",
    "optim.decay_ends": "decayed checkpoints on the way of a long run: WSD-S",
    "optim.restart_warmup_steps": "optim.decay_ends",
    "optim.min_lr_ratio": "schedule",
    "optim.ema_decay": "DeepSeek-V3 judges its weights by an average of them",
    "optim.groups": "muP, embeddings and routers with rates of their own",
    "optim.trainable": "fine-tuning of a part of a model, adapters, frozen routers",
    "data.source": "files by their ending, datasets, tokens, or none for a benchmark",
    "data.path": "where the data is",
    "data.files": "a part of a data set",
    "data.subset": "a part of a data set",
    "data.split": "a part of a data set",
    "data.text_column": "data sets name it differently",
    "data.mixture": "several data sets, each with its share",
    "data.mixture_temperature": "shares of sizes need not be computed by hand",
    "data.is_streamed": "data sets larger than a disk",
    "data.stream_lanes": "ranks read and tokenise their own parts of a stream; 0 goes on with runs from before",
    "data.shuffle_buffer_sequences": "a stream is in the order of its files, which may be sorted",
    "data.stream_has_worker": "false reads in the rank itself, where a process beside it is not wanted",
    "data.token_dtype": "uint16 and uint32 files are both common",
    "data.tokenizer": "a model's own vocabulary",
    "data.split_special_tokens": "off for text that is written with control tokens, such as chats",
    "data.document_attention": "documents of a packed sequence do not see each other",
    "data.is_shuffled": "off for data that comes in an order of its own",
    "data.holdout_fraction": "validation without a data set of its own",
    "data.bad_rows": "one broken row of a large corpus need not be repaired first",
    "data.format": "fine-tuning has conversations",
    "data.chat.template": "a base model has no template, or one that does not mark answers",
    "data.chat.answers": "most published templates do not mark answers",
    "data.chat.train_on": "the prompt is rarely learned, and a reasoning model learns the last answer alone",
    "data.chat.too_long": "conversations longer than a sequence are left out, or cut",
    "data.cache_folder": "runs share a tokenised corpus",
    "validation.every_steps": "how often the held-out loss is read",
    "validation.num_sequences": "how exactly",
    "validation.path": "a data set of its own",
    "validation.source": "a data set of its own",
    "validation.split": "a part of a data set",
    "validation.sets": "a model is asked what it has learnt of each kind of data",
    "checkpoint.every_steps": "how much work a crash may cost",
    "checkpoint.save_last_step": "a finished run keeps its model; a benchmark needs none",
    "checkpoint.keep_latest": "how much disk it may take",
    "checkpoint.keep_best": "the last model of a run is not always its best one",
    "checkpoint.keep_every_steps": "a model's course is studied, or averaged, from checkpoints at even distances",
    "checkpoint.is_async": "training goes on while a checkpoint is written",
    "checkpoint.accept_changed_data": "a run goes on when its data has grown",
    "checkpoint.load_from": "training goes on from another run's weights",
    "checkpoint.load_without": "a checkpoint has layers that are not built here",
    "checkpoint.upcycle.noise_std": "copies of an MLP may differ from the start, as arXiv:2212.05055 compares",
    "checkpoint.saves_frozen": "an adapter of 1 GB needs no 60 GB of base beside it in every checkpoint",
    "checkpoint.load_adapter": "an adapter of PEFT trains on",
    "checkpoint.export_adapter_at_end": "an adapter is served beside its base",
    "checkpoint.export_hf_at_end": "the result is served or evaluated elsewhere",
    "metrics.every_steps": "a logged step waits for the device",
    "metrics.tensorboard": "off where nobody reads it",
    "metrics.wandb": "charts where a team has those of its other runs",
    "metrics.wandb_project": "where they are there",
    "metrics.wandb_name": "how they are called there",
    "metrics.progress_bar": "off where standard error is a log",
    "metrics.sample_tokens": "a look at what was learnt",
    "metrics.sample_temperature": "how the sample is drawn",
    "profile.start_step": "a trace after the warm-up",
    "profile.num_steps": "a trace of a few steps",
}
"""Option -> why it is there all the same."""
LISTED = {"memory.offload": OFFLOADABLE, "model.adapter.targets": KINDS}
"""The entries of lists."""
OPTIONS = {name: key for name, key in all_keys(Recipe).items() if not key.is_section}


def test_every_option_has_won_or_has_a_reason_or_is_experimental() -> None:
    experimental = set()
    for name, key in OPTIONS.items():
        others = (set(key.choices) or {True, False}) - {key.default}
        if others == key.experimental.keys():
            experimental.add(name)
    entries = WON.keys() | KEPT.keys() | experimental
    assert sorted(OPTIONS.keys() - entries) == [], (
        "new: measure that they win, or say in KEPT why they are there, or in config/experimental.py what is missing"
    )
    assert sorted(entries - OPTIONS.keys()) == [], "gone from the recipe, or renamed"
    assert len(entries) == len(WON) + len(KEPT) + len(experimental), "one of the three is enough"


@pytest.mark.parametrize("option", WON)
def test_the_measurement_is_there_and_is_won(option: str) -> None:
    text, won = " ".join("\n".join(file.read_text() for file in RESULTS.glob("*.md")).split()), WON[option]
    assert won.figure in text and won.beaten in text, f"no row of tools/results keeps {option} any more"
    assert won.is_won


@pytest.mark.parametrize("row", EXPERIMENTAL, ids=lambda row: row.setting)
def test_what_is_experimental_is_said(row: Experimental) -> None:
    key = OPTIONS[row.key]
    assert row.value in (LISTED.get(row.key) or key.choices or {True, False}) and row.value != key.default
    said = " ".join(explain(row.key).split())
    assert f"EXPERIMENTAL: {row.reason}." in said


RECIPES = {
    # overrides: what is said of them
    "parallel.dispatcher=alltoall parallel.cp_kind=ring parallel.tp_comm_overlap=true precision.wgrad=compute": [],
    "parallel.dispatcher=hierarchical_symm_mem": ['parallel.dispatcher = "hierarchical_symm_mem"'],
    "parallel.tp=2 parallel.tp_comm_overlap=true parallel.cp=2 parallel.cp_kind=ring": [
        'parallel.cp_kind = "ring"',
        "parallel.tp_comm_overlap = true",
    ],
    "precision.format=fp8_rowwise precision.dgrad=compute": ['precision.dgrad = "compute"'],
    "parallel.overlap=microbatch": [],
    "memory.offload=block:2,attention": ['memory.offload = "block"', 'memory.offload = "attention"'],
    "parallel.overlap=microbatch parallel.pp=2": ['parallel.overlap = "microbatch"'],
    "parallel.overlap=microbatch parallel.pp=2 parallel.pp_schedule=dualpipev": [],
}


@pytest.mark.parametrize("words", RECIPES)
def test_a_recipe_that_uses_an_experimental_option_is_told_so(tmp_path: Path, words: str) -> None:
    (tmp_path / "recipe.toml").write_text("")
    line = describe_experimental(load_recipe(tmp_path / "recipe.toml", [f"--{word}" for word in words.split()]))
    assert re.findall(r"([\w.]+ = \S+) \(", line) == RECIPES[words]
    assert line.startswith("EXPERIMENTAL: ") == bool(RECIPES[words]) and "\n" not in line


def test_check_says_what_is_experimental() -> None:
    recipe = load_recipe(RESULTS.parents[1] / "recipes" / "qwen3_30b_a3b.toml", [])
    assert "EXPERIMENTAL" not in describe(recipe, 8)
    overlapped = replace(recipe, parallel=replace(recipe.parallel, tp=2, tp_comm_overlap=True))
    assert f"options     {describe_experimental(overlapped)}" in describe(overlapped, 8).splitlines()
