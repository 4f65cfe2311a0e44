"""Auxiliary-loss-free balancing over all ranks (arXiv:2408.15664): each optimizer step updates the expert biases."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.layers.router import TopKRouter


class ExpertBalancer:
    """Sums the routers' token counts of a step and updates their biases."""

    def __init__(self, parts: list[nn.Module], bias_update_speed: float, group: dist.ProcessGroup) -> None:
        modules = ((name, module) for part in parts for name, module in part.named_modules())
        self.routers = {name: module for name, module in modules if isinstance(module, TopKRouter)}
        self.bias_update_speed, self.group = bias_update_speed, group

    def start(self, scale: Tensor) -> None:
        """Zero the counts and set the scale of the auxiliary losses to the main loss's (one over the step's tokens)."""
        for router in self.routers.values():
            router.balance.tokens_per_expert_E.zero_()
            router.balance.aux_loss.zero_()
            router.balance.scale.copy_(scale)

    @torch.no_grad()
    def finish(self, skips_update: Tensor) -> dict[str, Tensor]:
        """Sum the counts over ranks, add `u · sign(mean - count)` to every bias; returns the counts by router name.

        Where `skips_update`, a bool on the device, is true, the biases stay.
        """
        if not self.routers:
            return {}
        counts_LE = torch.stack([router.balance.tokens_per_expert_E for router in self.routers.values()])
        dist.all_reduce(counts_LE, group=self.group)
        load_LE = counts_LE.float()
        updates_LE = self.bias_update_speed * torch.sign(load_LE.mean(1, keepdim=True) - load_LE) * ~skips_update
        for router, update_E in zip(self.routers.values(), updates_LE, strict=True):
            router.expert_bias_E.add_(update_E)
        return dict(zip(self.routers, counts_LE, strict=True))

    def aux_loss(self, like: Tensor) -> Tensor:
        """This rank's auxiliary losses of the step, summed over layers."""
        losses = [router.balance.aux_loss for router in self.routers.values()]
        return torch.stack(losses).sum().to(like.dtype) if losses else torch.zeros_like(like)
