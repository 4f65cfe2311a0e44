"""From `[optim]` of a recipe to the optimizers of a model's parts, in a container whose state reshards."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titan_moe.config.train import OptimConfig
from titan_moe.optim.adamw import AdamW
from titan_moe.optim.fused_adamw import FusedAdamW
from titan_moe.optim.groups import decay_groups
from titan_moe.titan import OptimizersContainer


class RunOptions(NamedTuple):
    """What a run asks of an optimizer beside `[optim]`; a kind takes what it knows."""

    moments: torch.dtype | None = None
    """Dtype of the moments; None is the parameters'."""
    seed: int = 0
    """For rounding at random."""
    capturable: bool = False
    """Keep the learning rate on the device, so that a CUDA graph may hold the step. It is fp32 there and fp64 on the
    host, so last digits of the weights differ between the two."""


Builder = Callable[[nn.Module, OptimConfig, RunOptions], torch.optim.Optimizer]


def build_adamw(part: nn.Module, config: OptimConfig, run: RunOptions) -> AdamW:
    return AdamW(decay_groups(part, config.weight_decay), capturable=run.capturable, **_adam_options(config))


def build_fused_adamw(part: nn.Module, config: OptimConfig, run: RunOptions) -> FusedAdamW:
    groups = decay_groups(part, config.weight_decay)
    return FusedAdamW(groups, moments=run.moments, seed=run.seed, **_adam_options(config))


BUILDERS: dict[str, Builder] = {"adamw": build_adamw, "fused_adamw": build_fused_adamw}
"""`optim.kind` -> how it is built; config/optimizers.py has the facts that rules ask."""


def _adam_options(config: OptimConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}


def build_optimizer(
    parts: list[nn.Module],
    config: OptimConfig,
    *,
    moments: torch.dtype | None = None,
    seed: int = 0,
    capturable: bool = False,
) -> "Optimizers":
    """Build the optimizer of a recipe for the parameters of every part that want a gradient.

    They must be on their device by now. `RunOptions` explains the rest.
    """
    return Optimizers(parts, BUILDERS[config.kind], config, RunOptions(moments, seed, capturable))


class Optimizers(OptimizersContainer):
    """One optimizer a model part, saved flat by parameter name, so that a checkpoint loads onto any layout.

    A checkpoint brings step counts and moments, into the tensors that are there and in their dtype; learning rate,
    betas, epsilon and decay are not saved: a resumed run obeys its recipe.
    """

    def __init__(self, parts: list[nn.Module], build: Builder, config: OptimConfig, run: RunOptions) -> None:
        # not the parent's: it gives an optimizer bare parameters, which do not say what they are
        self.model_parts = parts
        self.optimizers = [build(part, config, run) for part in parts]
        self._post_init([p for part in parts for p in part.parameters() if p.requires_grad], {})

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that are updated, in the order of the model."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def step(self, *, found_inf: Tensor | None = None, grad_factor: Tensor | None = None) -> None:
        """Update every parameter that has a gradient, without a word from the host to the device or back.

        Args:
            found_inf: fp32 scalar on the device; where it is 1, weights, moments and step counts stay bit for bit what
                they are, whatever the gradients hold; where it is 0, or without it, the step is taken.
            grad_factor: scalar on the device that multiplies the gradients first: the clipping coefficient. Our kernel
                does it as it reads them and leaves them as they are, torch's way changes them.
        """
        super().step(found_inf=found_inf, grad_factor=grad_factor)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name.startswith("state.")}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # not torch's: it puts new tensors, in the parameter's dtype, where a captured step would not find them
        for name, value in self.state_dict().items():
            value.copy_(state_dict[name])
