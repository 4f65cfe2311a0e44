"""The range of each number of a recipe."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from operator import attrgetter

from titan_moe.config.adapter import KINDS
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, rule, rules_in
from titan_moe.config.schema import shown

LARGEST = 10**12
"""End of a range without another one."""
LAYERS = 1_000
RANKS = 2**16


@dataclass(frozen=True)
class Range:
    """An interval that error messages print."""

    low: float
    high: float = LARGEST
    includes_low: bool = True
    includes_high: bool = True

    def __contains__(self, value: float) -> bool:
        """Whether a value is inside; a NaN is not."""
        above = value >= self.low if self.includes_low else value > self.low
        below = value <= self.high if self.includes_high else value < self.high
        return above and below

    def must_be(self, value: float) -> str:
        """Complete the sentence "the value must be ..." for one outside."""
        if not isinstance(value, int) and not math.isfinite(value):
            return f"finite and {self}"
        return f"at most {self.high:,}" if value > self.high == LARGEST else str(self)

    def __str__(self) -> str:
        """The interval in words, without an end that only a mistake reaches."""
        low = f"at least {self.low:,}" if self.includes_low else f"above {self.low:,}"
        if self.high == LARGEST:
            return low
        return f"{low} and {'at most' if self.includes_high else 'below'} {self.high:,}"


POSITIVE = Range(1)
ZERO_OR_MORE = Range(0)
ABOVE_ZERO = Range(0, includes_low=False)
SHARE = Range(0, 1)
SHARE_BELOW_ONE = Range(0, 1, includes_high=False)

SECTIONS: dict[str, dict[str, Range]] = {
    "run": {"seed": Range(0, 2**63 - 1), "ranks_per_gpu": Range(1, 8), "step_timeout_minutes": Range(0, 525_600)},
    "model": {
        "vocab_size hidden_size": POSITIVE,
        "num_layers": Range(1, LAYERS),
        "num_dense_layers": Range(0, LAYERS),
        "moe_every": Range(1, LAYERS),
        "ffn_hidden_size": ZERO_OR_MORE,
        "norm_eps": ABOVE_ZERO,
        "init_std embedding_init_std embedding_multiplier": Range(0, 10_000, includes_low=False),
        "residual_multiplier logits_scaling": Range(0, 10_000, includes_low=False),
    },
    "model.attention": {
        "num_heads num_kv_heads": Range(1, RANKS),
        "head_dim yarn_factor yarn_original_tokens longrope_original_tokens": POSITIVE,
        "llama3_factor llama3_original_tokens": POSITIVE,
        "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim": POSITIVE,
        "sliding_window full_attention_every q_lora_rank yarn_mscale yarn_mscale_all_dim": ZERO_OR_MORE,
        "clip_qkv softmax_scale attn_scale attention_chunk_size window_rope_theta": ZERO_OR_MORE,
        "floor_scale": POSITIVE,
        "nope_every": Range(0, LAYERS),
        "rope_theta": Range(1, includes_low=False),
        "partial_rotary_factor": Range(0, 1, includes_low=False),
        "llama3_low_freq_factor llama3_high_freq_factor": ABOVE_ZERO,
        "yarn_beta_fast yarn_beta_slow longrope_short_scale longrope_long_scale latent_norm_eps": ABOVE_ZERO,
    },
    "model.moe": {
        "top_k num_groups top_k_groups": POSITIVE,
        "num_experts ffn_hidden_size shared_ffn_hidden_size latent_size": ZERO_OR_MORE,
        "aux_loss_coef z_loss_coef bias_update_speed": ZERO_OR_MORE,
        "bias_ema input_jitter": SHARE_BELOW_ONE,
        "capacity_factor": ZERO_OR_MORE,
        "route_scale swiglu_alpha": ABOVE_ZERO,
        "swiglu_limit swiglu_up_offset sparsemixer_jitter": ZERO_OR_MORE,
    },
    "model.moe.aux_losses": {"sequence microbatch global_batch": ZERO_OR_MORE},
    "model.mtp": {"num_depths": Range(0, LAYERS), "loss_weight": ZERO_OR_MORE},
    "model.adapter": {"rank": ZERO_OR_MORE, "alpha": ABOVE_ZERO},
    **{f"model.adapter.{kind}": {"rank alpha": ZERO_OR_MORE} for kind in KINDS},
    "parallel": {
        "pp vpp dp_replicate cp tp ep etp": Range(1, RANKS),
        "dp_shard": Range(-1, RANKS),
        "expert_rank_capacity_factor expert_layer_capacity_factor ep_ranks_per_node": ZERO_OR_MORE,
    },
    "perf": {"loss_chunk_tokens": ZERO_OR_MORE},
    "precision": {"num_layers_at_start_in_compute num_layers_at_end_in_compute": ZERO_OR_MORE},
    "train": {
        "steps seq_len_tokens global_batch_sequences micro_batch_sequences": POSITIVE,
        "tokens epochs max_skipped_in_row spike_sigmas": ZERO_OR_MORE,
    },
    "optim": {
        "lr eps": ABOVE_ZERO,
        "beta1 beta2 ema_decay": SHARE_BELOW_ONE,
        "weight_decay max_grad_norm warmup_steps decay_steps restart_warmup_steps": ZERO_OR_MORE,
        "min_lr_ratio": SHARE,
    },
    "optim.muon": {"momentum": SHARE_BELOW_ONE, "ns_steps": Range(1, 99), "lr_scale": ABOVE_ZERO},
    "optim.qk_clip": {"threshold": ZERO_OR_MORE, "alpha": SHARE},
    "data": {
        "holdout_fraction": SHARE_BELOW_ONE,
        "mixture_temperature": ZERO_OR_MORE,
        "stream_lanes": Range(0, 65_536),
        "shuffle_buffer_sequences": Range(1, 65_536),
    },
    "validation": {"every_steps": ZERO_OR_MORE, "num_sequences": POSITIVE},
    "checkpoint": {"every_steps keep_latest keep_every_steps": ZERO_OR_MORE},
    "checkpoint.upcycle": {"granularity noise_std": ZERO_OR_MORE},
    "metrics": {"every_steps": POSITIVE, "sample_tokens sample_temperature": ZERO_OR_MORE},
    "profile": {"start_step": ZERO_OR_MORE, "num_steps": Range(1, 100)},
}
RANGES = {
    f"{section}.{key}": SECTIONS[section][keys]
    for section in SECTIONS
    for keys in SECTIONS[section]
    for key in keys.split()
}
"""Range of each number of a recipe, by dotted key."""
NUMBERS = attrgetter(*RANGES)
"""The numbers of a recipe in this order."""

LARGE = 100
"""Numbers up to it cost no rule much."""


@rule("the value is out of range", " ".join(RANGES))
def numbers_are_in_range(recipe: Recipe, world_size: int) -> Iterator[str]:
    yield from numbers_out_of_range(recipe, SECTIONS)


def numbers_out_of_range(recipe: Recipe, sections: Collection[str]) -> Iterator[str]:
    """The numbers of some sections that are out of their range."""
    for value, (dotted, allowed) in zip(NUMBERS(recipe), RANGES.items(), strict=True):
        is_wrong = not isinstance(value, str) and value not in allowed  # a word, such as "auto", is right
        if is_wrong and dotted.rpartition(".")[0] in sections:
            yield Problem(f"{dotted} = {shown(value)} must be {allowed.must_be(value)}", dotted)


def has_excessive_numbers(recipe: Recipe) -> bool:
    """Whether a large number is above its range. Rules take time and memory that grow with some of them."""
    return any(
        not isinstance(value, str) and value > max(allowed.high, LARGE)
        for value, allowed in zip(NUMBERS(recipe), RANGES.values(), strict=True)
    )


RANGE_RULES = rules_in(globals())
