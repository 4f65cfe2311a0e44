"""Rules of QK-clip: what has no logits to clip, or no weights to scale."""

from titan_moe.config.model import ModelConfig
from titan_moe.config.modules import modules_of
from titan_moe.config.qk_clip import QKClipConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import row, rules_in
from titan_moe.config.trainable import num_trained, trains_all

SCALED = frozenset({"attention.qkv", "attention.qkv.bias", "attention.q_up", "attention.kv_up"})
"""Modules of a layer whose rows a clip scales."""


def _freezes_projections(recipe: Recipe) -> bool:
    model, patterns = recipe.model, recipe.optim.trainable
    if trains_all(model, patterns) or model.adapter.is_used or model.class_ != ModelConfig.class_:
        return not trains_all(model, patterns)
    rows = [row for row in modules_of(model) if row.path in SCALED and row.parameters]
    return any(num_trained(row, model, patterns) < row.number for row in rows)


alpha_needs_a_threshold = row(
    "an option without effect hides a mistake",
    lambda r: not r.optim.qk_clip.is_used and r.optim.qk_clip.alpha != QKClipConfig.alpha,
    "{optim.qk_clip.alpha} has no effect with {optim.qk_clip.threshold}",
)
clipped_logits_are_not_normed = row(
    "the norm bounds the logits, and would undo the scale of the projections",
    lambda r: r.optim.qk_clip.is_used and r.model.attention.kind == "gqa" and r.model.attention.qk_norm,
    "{optim.qk_clip.threshold} scales projections, whose results {model.attention.qk_norm} norms",
)
clipped_logits_are_not_clamped = row(
    "the clamp bounds the logits, which do not follow the scale of the projections",
    lambda r: r.optim.qk_clip.is_used and r.model.attention.kind == "gqa" and r.model.attention.clip_qkv > 0,
    "{optim.qk_clip.threshold} scales projections, whose results {model.attention.clip_qkv} clamps",
)
clipped_attention_is_ours = row(
    "it scales the projections of gqa and mla, and a class of your own may have others",
    lambda r: r.optim.qk_clip.is_used and r.model.class_ != ModelConfig.class_,
    "{optim.qk_clip.threshold} does not support {model.class}",
)
clipped_weights_train = row(
    "it scales the projections of all layers, and frozen ones stay as they are",
    lambda r: r.optim.qk_clip.is_used and _freezes_projections(r),
    "{optim.qk_clip.threshold} scales projections, of which {model.adapter.rank} and {optim.trainable} freeze some",
)
clipped_weights_are_not_rounded_away = row(
    "rounded to the nearest bf16 number, a factor above 511/512 scales no weight, and one near it some of them",
    lambda r: r.optim.qk_clip.is_used and r.precision.master == "bf16",
    "{optim.qk_clip.threshold} does not support {precision.master}",
)
clipped_masters_are_on_the_device = row(
    "it scales a master in both of its parts, and a remainder on the host would be copied there and back",
    lambda r: r.optim.qk_clip.is_used and r.precision.has_split_masters and r.memory.park == "states",
    "{optim.qk_clip.threshold} does not support {memory.park} with {precision.master}",
)

QK_CLIP_RULES = rules_in(globals())
