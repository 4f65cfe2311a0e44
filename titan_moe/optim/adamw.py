"""AdamW (arXiv:1711.05101) over all parts of a model, in a container whose state reshards."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from titan_moe.config.train import OptimConfig
from titan_moe.optim.groups import decay_groups
from titan_moe.titan import OptimizersContainer


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW with decay groups, whose state exists from the start.

    torch makes the state at a parameter's first gradient. A checkpoint could then lack parameters that have had none
    yet, and asking for the state before the first step would take a step to make it, which counts in the bias
    correction.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, weight_decay: float, **options: Any) -> None:
        super().__init__(decay_groups(parameters, weight_decay), weight_decay=weight_decay, fused=True, **options)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }


class Optimizers(OptimizersContainer):
    """One AdamW a model part, saved flat by parameter name, so that a checkpoint loads onto any layout.

    A checkpoint brings the moments; learning rate, betas, epsilon and decay stay as the recipe of this run has them,
    so that a resumed run obeys its recipe.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = [group for optimizer in self for group in optimizer.param_groups]
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        super().load_state_dict(state_dict)
        loaded = [group for optimizer in self for group in optimizer.param_groups]
        for group, own in zip(loaded, options, strict=True):
            group.update(own)


def build_optimizer(model_parts: list[nn.Module], config: OptimConfig) -> Optimizers:
    """Build AdamW for the parameters of every part that want a gradient; they must be on their device by now."""
    options = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    return Optimizers(model_parts, AdamW, options)
