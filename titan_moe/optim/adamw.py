"""AdamW (arXiv:1711.05101) over all parts of a model, in a container whose state reshards."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.config.train import OptimConfig
from titan_moe.optim.fused_adamw import FusedAdamW
from titan_moe.optim.groups import decay_groups
from titan_moe.optim.state import local, make_state, put_lr_on_device
from titan_moe.titan import OptimizersContainer


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW with decay groups; parameter, gradient and moments are in one dtype."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, weight_decay: float, capturable: bool = False, **options: Any
    ) -> None:
        options |= {"weight_decay": weight_decay, "capturable": capturable, "fused": True}
        super().__init__(decay_groups(parameters, weight_decay), **options)
        make_state(self)
        if capturable:
            put_lr_on_device(self)

    @torch.no_grad()
    def step(self, *, found_inf: Tensor | None = None, grad_factor: Tensor | None = None) -> None:
        """Update all parameters that have a gradient; `Optimizers.step` says what the guard means."""
        if grad_factor is not None:
            parameters = (parameter for group in self.param_groups for parameter in group["params"])
            grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
            # torch would divide by `grad_scale` instead, which rounds otherwise than clipping always did
            torch._foreach_mul_(grads, grad_factor)
        self.found_inf = found_inf  # the kernels of torch look for it here
        super().step()


class Optimizers(OptimizersContainer):
    """One AdamW a model part, saved flat by parameter name, so that a checkpoint loads onto any layout.

    A checkpoint brings step counts and moments, into the tensors that are there and in their dtype; learning rate,
    betas, epsilon and decay are not saved: a resumed run obeys its recipe.
    """

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


def build_optimizer(
    model_parts: list[nn.Module],
    config: OptimConfig,
    *,
    kind: str = "torch",
    moments: torch.dtype | None = None,
    seed: int = 0,
    capturable: bool = False,
) -> Optimizers:
    """Build AdamW for the parameters of every part that want a gradient; they must be on their device by now.

    Args:
        kind: `torch` or `fused`, as `perf.optimizer` has it.
        moments: dtype of the moments, the parameters' without it; only `fused` knows another.
        seed: of the run, for rounding at random.
        capturable: keep the learning rate on the device, so that a CUDA graph may hold the step; `fused` always does.
            It is fp32 there and fp64 on the host, so last digits of the weights differ between the two.
    """
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if kind == "fused":
        return Optimizers(model_parts, FusedAdamW, options | {"moments": moments, "seed": seed})
    return Optimizers(model_parts, AdamW, options | {"capturable": capturable})
