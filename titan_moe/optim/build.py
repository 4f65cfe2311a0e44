"""The optimizers of a model's parts from `[optim]` of a recipe, in a container whose state can be resharded."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from titan_moe.config.perf import Park
from titan_moe.config.train import OptimConfig
from titan_moe.optim.adamw import AdamW
from titan_moe.optim.ema import WeightAverage
from titan_moe.optim.fused_adamw import FusedAdamW
from titan_moe.optim.groups import decay_groups
from titan_moe.optim.moments_8bit import copy_from_plain, is_8bit, to_plain
from titan_moe.optim.muon import Muon, muon_matrices
from titan_moe.optim.qk_clip import QKClip
from titan_moe.parameters import fused_rows
from titan_moe.titan import OptimizersContainer


class RunOptions(NamedTuple):
    """Options beside `[optim]`, of which each kind uses some."""

    moments: torch.dtype | None = None
    """dtype of the moments, a value of `state.MOMENTS`; None: the parameters'."""
    seed: int = 0  # of stochastic rounding
    park: Park = "none"  # the states that rest on the host
    capturable: bool = False
    """Keep the learning rate on the device, so that a CUDA graph can capture the step. It is fp32 there and fp64 on the
    host, so last digits of the weights differ."""


Builder = Callable[[nn.Module, OptimConfig, RunOptions], torch.optim.Optimizer]


def build_adamw(part: nn.Module, config: OptimConfig, run: RunOptions) -> AdamW:
    return AdamW(_groups(part, config), capturable=run.capturable, **_adam_options(config))


def build_fused_adamw(part: nn.Module, config: OptimConfig, run: RunOptions) -> FusedAdamW:
    names: dict[Tensor, str] = {parameter: name for name, parameter in part.named_parameters()}
    options = _adam_options(config) | {"moments": run.moments, "seed": run.seed, "park": run.park}
    return FusedAdamW(_groups(part, config), names=names, **options)


def build_muon(part: nn.Module, config: OptimConfig, run: RunOptions) -> Muon:
    names: dict[Tensor, str] = {parameter: name for name, parameter in part.named_parameters()}
    rows = fused_rows(part)
    matrices = {parameter: rows.get(name, ()) for parameter, name in muon_matrices(part).items()}
    options = _adam_options(config) | {"moments": run.moments, "seed": run.seed}
    return Muon(_groups(part, config), matrices, names=names, config=config.muon, **options)


BUILDERS: dict[str, Builder] = {"adamw": build_adamw, "fused_adamw": build_fused_adamw, "muon": build_muon}
"""`optim.kind` -> builder; config/optimizers.py has the facts for rules."""


def _groups(part: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    return decay_groups(part, config.weight_decay, config.groups, embeddings_decay=config.embeddings_decay)


def _adam_options(config: OptimConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}


def build_optimizer(parts: list[nn.Module], config: OptimConfig, **options: Any) -> "Optimizers":
    """Build the optimizer of a recipe for the trainable parameters of every part, which are on their device.

    `options` are fields of `RunOptions`.
    """
    return Optimizers(parts, BUILDERS[config.kind], config, RunOptions(**options))


class Optimizers(OptimizersContainer):
    """One optimizer a model part, with a state dict flat by parameter name, so that a checkpoint loads on any layout.

    Loading copies step counts and moments into the existing tensors, in their dtype. Moments in 8 bits are plain fp32
    tensors in host memory in a state dict, so that they load into any dtype. Learning rate, betas, epsilon and weight
    decay are not saved: they come from the recipe.
    """

    def __init__(self, parts: list[nn.Module], build: Builder, config: OptimConfig, run: RunOptions) -> None:
        # not the parent's: it passes bare parameters, without their kinds
        # a stage may be empty, or frozen
        self.model_parts = [part for part in parts if any(it.requires_grad for it in part.parameters())]
        self.optimizers = [build(part, config, run) for part in self.model_parts]
        self.clip: QKClip | None = None
        """What scales weights after each update."""
        self.average = WeightAverage(self.optimizers, config.ema_decay) if config.ema_decay else None
        self._post_init([p for part in parts for p in part.parameters() if p.requires_grad], {})

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All updated parameters, in the order of the model."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def step(self, *, found_inf: Tensor | None = None, grad_factor: Tensor | None = None) -> None:
        """Update every parameter that has a gradient, without a copy between host and device.

        Args:
            found_inf: fp32 scalar on the device. Where it is 1, weights, moments and step counts stay bit for bit as
                they are, whatever the gradients are.
            grad_factor: scalar on the device by which gradients are multiplied first, for clipping. Our kernel does
                this as it reads them and leaves them unchanged; torch's AdamW changes them.
        """
        super().step(found_inf=found_inf, grad_factor=grad_factor)
        if self.clip is not None:
            self.clip(found_inf)
        if self.average is not None:
            self.average.update(found_inf)

    def state_dict(self) -> dict[str, Any]:
        self._finish_copies()
        return {
            name: to_plain(value) if is_8bit(value) else value
            for state in self._states()
            for name, value in state.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._finish_copies()
        # not torch's: it makes new tensors in the parameter's dtype, and a captured step keeps the old ones
        for state in self._states():
            for name, value in state.items():
                if is_8bit(value):
                    copy_from_plain(value, state_dict[name], is_signed=not name.endswith(".exp_avg_sq"))
                else:
                    value.copy_(state_dict[name])

    def _finish_copies(self) -> None:
        """Wait for states that are on their way to the host, where they rest."""
        for optimizer in self.optimizers:
            if (window := getattr(optimizer, "window", None)) is not None:
                window.finish()

    def _states(self) -> list[dict[str, Any]]:
        """The tensors of each part's optimizer by name, as they are.

        Two parts may have the same name: in a V schedule one rank has the first and the last stage, each with a copy of
        a tied embedding, whose moments are equal.
        """
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return [
            {
                name: value
                for name, value in get_optimizer_state_dict(part, optimizer, options=options).items()
                if name.startswith("state.")
            }
            for part, optimizer in zip(self.model_parts, self.optimizers, strict=True)
        ]
