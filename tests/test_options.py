"""Every option of a recipe has a measurement that shows what it is for, or a reason that keeps it.

An option that has neither does not enter, and one whose row is gone from tools/RESULTS.md must find another or go.
"""

from pathlib import Path

import pytest

from titan_moe.config.recipe import Recipe
from titan_moe.config.schema import all_keys

RESULTS = Path(__file__).parents[1] / "tools" / "RESULTS.md"
MEASURED = {
    "model.embedding_init_std": "| the same, embeddings of deviation 1, 60 steps",
    "model.moe.aux_loss_coef": "with `aux_loss_coef = 1e-3` the load is back",
    "parallel.ep": "ep = GPUs",
    "parallel.dispatcher": "| `symm_mem` (predicted 2.10 ms)",
    "parallel.overlap": "So `tile` is the overlap inside a node and `microbatch` the one between nodes",
    "parallel.expert_rank_capacity_factor": "| bound 1.5; 2.0 (first 11 steps)",
    "parallel.expert_clones": "1.36 | 49,323 | 52,375",
    "parallel.accumulate_unsharded": "| + parameters gathered once a step",
    "perf.kernels": "| + `auto` kernels, fused optimizer",
    "perf.loss_chunk_tokens": "1.2 in chunks of 2,048 tokens",
    "optim.kind": "| AdamW fp32; bf16; bf16 moments under fp32",
    "perf.override.experts": "fused **545 / 504**",
    "perf.override.permute": "| counting sort, 262,144 choices",
    "perf.override.router": "| router after its logits, 32,768",
    "perf.override.head": "| head and cross entropy, 16,384",
    "perf.override.gradients": "| sums of gradients, bf16 into fp32",
    "precision.master": "bf16 weights, gradients and moments",
    "precision.moments": "fused AdamW with bf16 moments",
    "compile.extent": "| whole blocks compiled, recorded, 12 layers",
    "compile.cudagraph": "34.2 ms launched",
    "train.force_balanced_routing": "Forced routing (`train.force_balanced_routing`)",
    "train.force_skewed_routing": "`--train.force_skewed_routing=true`, Qwen3",
}
"""Option -> words of its row or heading in tools/RESULTS.md."""
KEPT = {
    "run.folder": "where a run writes",
    "run.seed": "another seed is another run",
    "run.device": "a GPU host can try a recipe on its CPU",
    "run.is_deterministic": "two runs that differ in nothing: how a defect is found",
    "run.step_timeout_minutes": "a hung run ends; how long a step may take differs by run",
    "model.class": "a model of one's own",
    "model.name": "what the logs call a shape",
    "model.vocab_size": "shape of every model",
    "model.num_layers": "shape of every model",
    "model.num_dense_layers": "DeepSeek",
    "model.hidden_size": "shape of every model",
    "model.ffn_hidden_size": "width of dense layers: DeepSeek, and models without experts",
    "model.norm_eps": "families differ: 1e-5 and 1e-6",
    "model.embeddings_are_tied": "small Qwen3, Gemma",
    "model.init_std": "families differ",
    "model.embedding_multiplier": "Gemma; gives tied embeddings the size of untied ones",
    "model.attention.kind": "MLA in DeepSeek, GQA elsewhere",
    "model.attention.num_heads": "shape of every model",
    "model.attention.num_kv_heads": "shape of gqa",
    "model.attention.head_dim": "shape of gqa",
    "model.attention.qk_norm": "Qwen3",
    "model.attention.qkv_bias": "Qwen2-MoE",
    "model.attention.sliding_window": "Mistral, gpt-oss, Gemma 3",
    "model.attention.full_attention_every": "gpt-oss, Gemma 3",
    "model.attention.rope_theta": "families differ: 1e4 to 1e6",
    "model.attention.rope_is_interleaved": "DeepSeek",
    "model.attention.yarn_factor": "DeepSeek-V2, gpt-oss",
    "model.attention.yarn_original_tokens": "YaRN",
    "model.attention.yarn_beta_fast": "YaRN",
    "model.attention.yarn_beta_slow": "YaRN",
    "model.attention.yarn_mscale": "DeepSeek's YaRN",
    "model.attention.yarn_mscale_all_dim": "DeepSeek's YaRN",
    "model.attention.q_lora_rank": "shape of mla: DeepSeek-V2 and V3, not V2-Lite",
    "model.attention.kv_lora_rank": "shape of mla",
    "model.attention.qk_nope_head_dim": "shape of mla",
    "model.attention.qk_rope_head_dim": "shape of mla",
    "model.attention.v_head_dim": "shape of mla",
    "model.moe.num_experts": "shape of every mixture",
    "model.moe.top_k": "shape of every mixture",
    "model.moe.ffn_hidden_size": "shape of every mixture",
    "model.moe.expert_mlp_bias": "gpt-oss",
    "model.moe.shared_ffn_hidden_size": "DeepSeek, Qwen2-MoE",
    "model.moe.shared_expert_gate": "Qwen2-MoE",
    "model.moe.latent_size": "latent MoE: narrower rows",
    "model.moe.score_fn": "sigmoid in DeepSeek-V3, softmax elsewhere",
    "model.moe.normalize_topk": "off in DeepSeek-V2",
    "model.moe.route_scale": "DeepSeek",
    "model.moe.num_groups": "DeepSeek-V2 and V3",
    "model.moe.top_k_groups": "DeepSeek-V2 and V3",
    "model.moe.group_score": "V2 and V3 differ",
    "model.moe.score_on": "input in Llama 4",
    "model.moe.z_loss_coef": "ST-MoE, OLMoE",
    "model.moe.bias_update_speed": "DeepSeek-V3",
    "parallel.pp": "an axis of the mesh that is named and refused until it works",
    "parallel.cp": "an axis of the mesh that is named and refused until it works",
    "parallel.tp": "an axis of the mesh that is named and refused until it works",
    "parallel.etp": "an axis of the mesh that is named and refused until it works",
    "parallel.dp_replicate": "HSDP: parameters are gathered inside a node, gradients alone cross nodes",
    "parallel.dp_shard": "fewer shards than ranks: the other half of HSDP",
    "parallel.reshard_after_forward": "memory for a gather a block, as in FSDP2",
    "parallel.reshard_experts_after_forward": "memory for a gather of experts a block where edp > 1",
    "perf.attention": "PyTorch's choice is not always the fastest; flex skips what a mask hides",
    "perf.override.rotary": "around a bad kernel, as the other overrides; `auto` takes Triton's by its tables",
    "precision.compute": "fp32 and fp64 for tests and small models, bf16 for all others",
    "precision.reduce": "bf16 halves the bytes of gradients between ranks; fp32 is exact",
    "compile.regional": "off to debug; on to compile on a CPU",
    "memory.recompute": "what does not fit otherwise; no figure of RESULTS needed it",
    "train.steps": "length of a run",
    "train.seq_len_tokens": "shape of a batch",
    "train.global_batch_sequences": "shape of a batch",
    "train.micro_batch_sequences": "shape of a batch",
    "train.max_skipped_in_row": "a diverged run costs time and leaves no model",
    "train.spike_sigmas": "OLMo 2: a bad batch moves no weight",
    "optim.lr": "AdamW",
    "optim.beta1": "AdamW",
    "optim.beta2": "AdamW",
    "optim.eps": "AdamW",
    "optim.weight_decay": "AdamW",
    "optim.embeddings_decay": "off in OLMo 2",
    "optim.max_grad_norm": "clipping",
    "optim.warmup_steps": "schedule",
    "optim.decay_steps": "schedule",
    "optim.decay": "schedule: cosine, linear and WSD's root are all in use",
    "optim.min_lr_ratio": "schedule",
    "data.source": "text, datasets, tokens, or none for a benchmark",
    "data.path": "where the data is",
    "data.files": "a part of a data set",
    "data.subset": "a part of a data set",
    "data.split": "a part of a data set",
    "data.text_column": "data sets name it differently",
    "data.is_streamed": "data sets larger than a disk",
    "data.token_dtype": "uint16 and uint32 files are both common",
    "data.tokenizer": "a model's own vocabulary",
    "data.document_attention": "documents of a packed sequence do not see each other",
    "data.is_shuffled": "off for data that comes in an order of its own",
    "data.holdout_fraction": "validation without a data set of its own",
    "data.cache_folder": "runs share a tokenised corpus",
    "validation.every_steps": "how often the held-out loss is read",
    "validation.num_sequences": "how exactly",
    "checkpoint.every_steps": "how much work a crash may cost",
    "checkpoint.save_last_step": "a finished run keeps its model; a benchmark needs none",
    "checkpoint.keep_latest": "how much disk it may take",
    "checkpoint.is_async": "training goes on while a checkpoint is written",
    "checkpoint.load_from": "training goes on from another run's weights",
    "metrics.every_steps": "a logged step waits for the device",
    "metrics.tensorboard": "off where nobody reads it",
    "metrics.progress_bar": "off where standard error is a log",
    "metrics.sample_tokens": "a look at what was learnt",
    "metrics.sample_temperature": "how the sample is drawn",
    "profile.start_step": "a trace after the warm-up",
    "profile.num_steps": "a trace of a few steps",
}
"""Option -> why it is there all the same."""


def test_every_option_has_a_measurement_or_a_reason() -> None:
    options = {name for name, key in all_keys(Recipe).items() if not key.is_section}
    entries = MEASURED.keys() | KEPT.keys()
    assert sorted(options - entries) == [], "new: measure them, or say in KEPT why they are there"
    assert sorted(entries - options) == [], "gone from the recipe, or renamed"
    assert sorted(MEASURED.keys() & KEPT.keys()) == [], "what is measured needs no reason"


@pytest.mark.parametrize("option", MEASURED)
def test_the_measurement_is_there(option: str) -> None:
    assert MEASURED[option] in " ".join(RESULTS.read_text().split()), (
        f"no row of tools/RESULTS.md keeps {option} any more"
    )
