"""The exponential moving average of a run's weights, beside the state of the optimizer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_moe.config.optimizers import EMA
from titan_moe.kernels.optim.split_master import merge_reference
from titan_moe.parameters import local, remainder_of


class WeightAverage:
    """Follows the weights of optimizers: average = decay * average + (1 - decay) * weight, after each step.

    In the first steps the decay is smaller, that of the mean of all weights so far. An average is a state of its
    parameter, in fp32 or wider, so it is sharded, saved and loaded as moments are. The share of a step's weights is on
    the device: a captured step reads it. A step that changes no weights changes no average.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], decay: float) -> None:
        self.decay, self.pairs = decay, list[tuple[Tensor, Tensor]]()
        for optimizer in optimizers:
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                average = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                optimizer.state[parameter][EMA] = average
                self.pairs.append((parameter, average))
        device = local(self.pairs[0][0]).device if self.pairs else None
        self.share = torch.ones((), dtype=torch.float32, device=device)
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin with the weights as they are."""
        for parameter, average in self.pairs:
            local(average).copy_(_master(parameter))

    def follow(self, num_steps: int) -> None:
        """Make ready for the step after so many others."""
        self.share.fill_(1 - min(self.decay, num_steps / (num_steps + 1)))

    @torch.no_grad()
    def update(self, found_inf: Tensor | None) -> None:
        """After a step, without a host read. Where `found_inf` is 1, averages stay."""
        share = self.share if found_inf is None else self.share * (1 - found_inf)
        for parameter, average in self.pairs:
            own = local(average)
            own.lerp_(_master(parameter).to(own.dtype), share.to(own.dtype))


def _master(parameter: Tensor) -> Tensor:
    """The local weights as the optimizer has them."""
    own, remainder = local(parameter), remainder_of(parameter)
    return own if remainder is None else merge_reference(own, local(remainder))
