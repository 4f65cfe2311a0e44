"""The settings by which runs are told apart in lists of runs."""

from titan_moe.config.recipe import Recipe
from titan_moe.config.resume import flatten

IMPORTANT = (
    "model.name model.num_layers model.hidden_size model.moe.num_experts model.moe.top_k model.moe.ffn_hidden_size "
    "model.moe.aux_loss_coef optim.kind optim.lr optim.min_lr_ratio optim.warmup_steps optim.weight_decay "
    "optim.max_grad_norm train.steps train.seq_len_tokens train.global_batch_sequences data.source data.path "
    "precision.compute precision.format precision.experts parallel.pp parallel.tp parallel.cp "
    "parallel.ep parallel.dispatcher run.seed"
).split()
"""Fields of a recipe, by dotted key."""


def important_settings(recipe: Recipe) -> dict[str, str | float]:
    """Values of `IMPORTANT`: numbers and words; lists are joined."""
    fields = flatten(recipe)
    return {name: _plain(fields[name]) for name in IMPORTANT}


def _plain(value: object) -> str | float:
    if isinstance(value, (int, float, str)):
        return value
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
