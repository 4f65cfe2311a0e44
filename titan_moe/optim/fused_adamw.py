"""AdamW with moments in their own dtype and with fused clipping and guard, on the device."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from titan_moe.config.perf import PARKED, Park
from titan_moe.kernels.optim.adamw import Rule, Shard, adamw
from titan_moe.kernels.optim.adamw_8bit import Shard8, adamw_8bit
from titan_moe.optim.moments_8bit import is_8bit, parts_of
from titan_moe.optim.parked import Window, rest_on_host
from titan_moe.optim.state import make_state, put_lr_on_device
from titan_moe.parameters import give_remainder, local, remainder_of, seed_of, shard_offsets


class FusedAdamW(torch.optim.Optimizer):
    """Our AdamW kernel; its reference on CPUs.

    The state has the names and the layout of torch's AdamW, so that each loads checkpoints of the other. The learning
    rate is a tensor on the device and a step reads nothing on the host, so a CUDA graph can capture it. bf16 values and
    moments in 8 bits are rounded stochastically, but not the weights of split masters, whose remainders a step reads. A
    shard's random bits come from the run's seed, the parameter's name and the shard's offsets. Replicas of a shard get
    equal bits, and so does a tied weight on two stages; another layout gets others.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        names: Mapping[Tensor, str],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        moments: torch.dtype | None = None,
        seed: int = 0,
        park: Park = "none",
    ) -> None:
        """`names` are those of the parameters in the whole model."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        device = self.param_groups[0]["params"][0].device
        self.window = Window(park, device) if park != "none" else None
        if self.window is None:
            make_state(self, moments)
        else:
            make_state(self, moments, rest_on_host)
        put_lr_on_device(self)
        self.no, self.one = (torch.tensor(value, dtype=torch.float32, device=device) for value in (0.0, 1.0))
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in every if "remainder" in PARKED[park] else []:
            if (remainder := remainder_of(parameter)) is not None:
                give_remainder(parameter, rest_on_host(remainder))
        self.seeds = {parameter: shard_seed(parameter, names[parameter], seed) for parameter in every}

    @torch.no_grad()
    def step(self, *, found_inf: Tensor | None = None, grad_factor: Tensor | None = None) -> None:
        """As `Optimizers.step`."""
        found_inf = self.no if found_inf is None else found_inf
        grad_factor = self.one if grad_factor is None else grad_factor
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            shards = [self._shard(parameter) for parameter in parameters]
            # a list: a single tensor would be read on the host
            torch._foreach_add_([shard.step for shard in shards], [self.one - found_inf] * len(shards))
            options = (*group["betas"], group["eps"], group["weight_decay"])
            rule = Rule(group["lr"], found_inf, grad_factor, *options)
            if self.window is None:
                _update(shards, rule)
            else:
                self.window(shards, partial(_update, rule=rule))

    def _shard(self, parameter: Tensor) -> Shard | Shard8:
        state, seed = self.state[parameter], self.seeds[parameter]
        param, grad, *moments = parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        remainder = remainder_of(parameter)
        rest = [] if remainder is None else [local(remainder)]
        if not is_8bit(moments[0]):
            return Shard(state["step"], seed, *map(local, (param, grad, *moments)), *rest)
        return Shard8(state["step"], seed, local(param), local(grad), *map(parts_of, moments), *rest)


def _update(shards: list[Shard | Shard8], rule: Rule) -> None:
    if wide := [shard for shard in shards if isinstance(shard, Shard)]:
        adamw(wide, rule)
    if narrow := [shard for shard in shards if isinstance(shard, Shard8)]:
        adamw_8bit(narrow, rule)


def shard_seed(parameter: Tensor, name: str, seed: int) -> int:
    """63 bits, unique to a shard of a run and equal on all of its replicas. Stages know only their own parameters, so
    the name is that in the whole model."""
    return seed_of(f"{seed}/{name}/{'.'.join(map(str, shard_offsets(parameter)))}")
