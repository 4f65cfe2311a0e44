"""Rules of QK-clip: what has no logits to clip, or no weights to scale."""

from titan_moe.config.model import ModelConfig
from titan_moe.config.qk_clip import QKClipConfig
from titan_moe.config.rules.rule import row, rules_in
from titan_moe.config.trainable import trains_all

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
    "it scales weights, and frozen ones stay as they are",
    lambda r: r.optim.qk_clip.is_used and (r.model.adapter.is_used or not trains_all(r.model, r.optim.trainable)),
    "{optim.qk_clip.threshold} needs weights that all train, but {model.adapter.rank} and {optim.trainable}",
)
clipped_weights_are_not_rounded_away = row(
    "rounded to the nearest bf16 number, a factor above 1 - 1/512 scales no weight, and others not as they should",
    lambda r: r.optim.qk_clip.is_used and r.precision.master == "bf16",
    "{optim.qk_clip.threshold} does not support {precision.master}",
)
clipped_masters_are_on_the_device = row(
    "it scales a master in both of its parts, and a remainder on the host would be copied there and back",
    lambda r: r.optim.qk_clip.is_used and r.precision.has_split_masters and r.memory.park == "states",
    "{optim.qk_clip.threshold} does not support {memory.park} with {precision.master}",
)

QK_CLIP_RULES = rules_in(globals())
