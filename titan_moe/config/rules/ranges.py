"""Which values each number of a recipe may take on its own."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Rule


@dataclass(frozen=True)
class Range:
    """An interval, described in the words of an error message."""

    low: float
    high: float = math.inf
    includes_low: bool = True
    includes_high: bool = True

    def __contains__(self, value: float) -> bool:
        """Whether a value is finite and inside."""
        above = value >= self.low if self.includes_low else value > self.low
        below = value <= self.high if self.includes_high else value < self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        """Complete the sentence "the value must be ..."."""
        low = f"at least {self.low:,}" if self.includes_low else f"above {self.low:,}"
        if self.high == math.inf:
            return low
        return f"{low} and {'at most' if self.includes_high else 'below'} {self.high:,}"


POSITIVE = Range(1)
ZERO_OR_MORE = Range(0)
ABOVE_ZERO = Range(0, includes_low=False)
SHARE = Range(0, 1)
SHARE_BELOW_ONE = Range(0, 1, includes_high=False)

RANGES: dict[str, Range] = {
    "parallel.expert_clones": ZERO_OR_MORE,
    "parallel.expert_rank_capacity_factor": ZERO_OR_MORE,
    "run.seed": Range(0, 2**63 - 1),
    "model.vocab_size": POSITIVE,
    "model.num_layers": POSITIVE,
    "model.num_dense_layers": ZERO_OR_MORE,
    "model.hidden_size": POSITIVE,
    "model.ffn_hidden_size": ZERO_OR_MORE,
    "model.norm_eps": ABOVE_ZERO,
    "model.init_std": ABOVE_ZERO,
    "model.attention.num_heads": POSITIVE,
    "model.attention.num_kv_heads": POSITIVE,
    "model.attention.head_dim": POSITIVE,
    "model.attention.sliding_window": ZERO_OR_MORE,
    "model.attention.full_attention_every": ZERO_OR_MORE,
    "model.attention.rope_theta": Range(1, includes_low=False),
    "model.attention.yarn_factor": POSITIVE,
    "model.attention.yarn_original_tokens": POSITIVE,
    "model.attention.yarn_beta_fast": ABOVE_ZERO,
    "model.attention.yarn_beta_slow": ABOVE_ZERO,
    "model.attention.yarn_mscale": ZERO_OR_MORE,
    "model.attention.yarn_mscale_all_dim": ZERO_OR_MORE,
    "model.attention.q_lora_rank": ZERO_OR_MORE,
    "model.attention.kv_lora_rank": POSITIVE,
    "model.attention.qk_nope_head_dim": POSITIVE,
    "model.attention.qk_rope_head_dim": POSITIVE,
    "model.attention.v_head_dim": POSITIVE,
    "model.moe.num_experts": ZERO_OR_MORE,
    "model.moe.top_k": POSITIVE,
    "model.moe.ffn_hidden_size": ZERO_OR_MORE,
    "model.moe.shared_ffn_hidden_size": ZERO_OR_MORE,
    "model.moe.latent_size": ZERO_OR_MORE,
    "model.moe.route_scale": ABOVE_ZERO,
    "model.moe.num_groups": POSITIVE,
    "model.moe.top_k_groups": POSITIVE,
    "model.moe.aux_loss_coef": ZERO_OR_MORE,
    "model.moe.z_loss_coef": ZERO_OR_MORE,
    "model.moe.bias_update_speed": ZERO_OR_MORE,
    "parallel.pp": POSITIVE,
    "parallel.dp_replicate": POSITIVE,
    "parallel.dp_shard": Range(-1),
    "parallel.cp": POSITIVE,
    "parallel.tp": POSITIVE,
    "parallel.ep": POSITIVE,
    "parallel.etp": POSITIVE,
    "perf.loss_chunk_tokens": ZERO_OR_MORE,
    "train.steps": POSITIVE,
    "train.seq_len_tokens": POSITIVE,
    "train.global_batch_sequences": POSITIVE,
    "train.micro_batch_sequences": POSITIVE,
    "optim.lr": ABOVE_ZERO,
    "optim.beta1": SHARE_BELOW_ONE,
    "optim.beta2": SHARE_BELOW_ONE,
    "optim.eps": ABOVE_ZERO,
    "optim.weight_decay": ZERO_OR_MORE,
    "optim.max_grad_norm": ZERO_OR_MORE,
    "optim.warmup_steps": ZERO_OR_MORE,
    "optim.decay_steps": ZERO_OR_MORE,
    "optim.min_lr_ratio": SHARE,
    "data.holdout_fraction": SHARE_BELOW_ONE,
    "validation.every_steps": ZERO_OR_MORE,
    "validation.num_sequences": POSITIVE,
    "checkpoint.every_steps": ZERO_OR_MORE,
    "checkpoint.keep_latest": ZERO_OR_MORE,
    "metrics.every_steps": POSITIVE,
    "metrics.sample_tokens": ZERO_OR_MORE,
    "metrics.sample_temperature": ZERO_OR_MORE,
    "profile.start_step": ZERO_OR_MORE,
    "profile.num_steps": POSITIVE,
}


def _out_of_range(recipe: Recipe, world_size: int) -> Iterator[str]:
    for dotted, allowed in RANGES.items():
        value = attrgetter(dotted)(recipe)
        if value not in allowed:
            yield f"{dotted} = {value} must be {'' if math.isfinite(value) else 'finite and '}{allowed}"


RANGE_RULES = [Rule("every number is in its range", _out_of_range, "outside of it the number means nothing")]
