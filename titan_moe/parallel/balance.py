"""Auxiliary-loss-free balancing over all ranks (arXiv:2408.15664): once an optimizer step, nudge each expert's bias."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.layers.router import TopKRouter


class ExpertBalancer:
    """Collects what the routers booked during a step, and moves their biases."""

    def __init__(self, parts: list[nn.Module], bias_update_speed: float, group: dist.ProcessGroup) -> None:
        modules = ((name, module) for part in parts for name, module in part.named_modules())
        self.routers = {name: module for name, module in modules if isinstance(module, TopKRouter)}
        self.bias_update_speed, self.group = bias_update_speed, group

    def start(self, scale: Tensor) -> None:
        """Empty the books and give the balancing losses the main loss's scale (one over the step's tokens)."""
        for router in self.routers.values():
            router.balance.tokens_per_expert_E.zero_()
            router.balance.aux_loss.zero_()
            router.balance.scale.copy_(scale)

    @torch.no_grad()
    def finish(self, skips_update: Tensor) -> dict[str, Tensor]:
        """Sum the counts over ranks, move every bias by `u · sign(mean - count)`; returns the counts by router name.

        Where `skips_update`, a bool on the device, the step does not count and the biases stay.
        """
        if not self.routers:
            return {}
        counts_LE = torch.stack([router.balance.tokens_per_expert_E for router in self.routers.values()])
        dist.all_reduce(counts_LE, group=self.group)
        load_LE = counts_LE.float()
        nudges_LE = self.bias_update_speed * torch.sign(load_LE.mean(1, keepdim=True) - load_LE) * ~skips_update
        for router, nudge_E in zip(self.routers.values(), nudges_LE, strict=True):
            router.expert_bias_E.add_(nudge_E)
        return dict(zip(self.routers, counts_LE, strict=True))

    def aux_loss(self, like: Tensor) -> Tensor:
        """This rank's balancing losses of the step, summed over layers."""
        losses = [router.balance.aux_loss for router in self.routers.values()]
        return torch.stack(losses).sum().to(like.dtype) if losses else torch.zeros_like(like)
