"""Balancing from outside the layers: the scale of the balancing losses, and the biases of auxiliary-loss-free balancing
(arXiv:2408.15664), which each optimizer step updates from the token counts of all ranks."""

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.kernels.router.quantiles import balanced_biases
from titan_moe.layers.balance import LossReduction
from titan_moe.layers.router import TopKRouter


def scale_balancing_losses(model: nn.Module, scale: float | Tensor = 1.0, reduction: LossReduction = "mean") -> None:
    """Give the balancing losses of all routers the scale of a main loss that is a mean over tokens.

    Needed where the loss that `backward` starts from is not a mean over the tokens of one forward. Call it before the
    forward and, for a model that is compiled, before the first.

    Args:
        model: a `MoE` layer, or a module that contains some.
        scale: the factor on the main loss, a number or a scalar tensor: 1 / n for n accumulated microbatches whose
            losses are divided by n; times the factor of a gradient scaler.
        reduction: of the main loss over the tokens of a forward, before that factor. A sum over tokens that is divided
            by a count of the whole batch is "sum" with scale 1 / count; where labels are masked, the count is that of
            all tokens here, as tokens without a label are routed too.

    Raises: ValueError if the model has no router of ours, or for another reduction.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction = "{reduction}" is neither "mean" nor "sum"; name what the main loss is')
    for router in _routers_of(model).values():
        router.balance.reduction = reduction
        router.balance.scale.fill_(scale)


@torch.no_grad()
def update_expert_biases(model: nn.Module, group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """Update the expert biases at the end of an optimizer step, and reset the token counts.

    Call it once a step, after the last backward, beside `optimizer.step()`. It adds `u · sign(mean - count)` to the
    bias of each expert; u is the `bias_update_speed` of the router's config. With u = 0 it only counts. The sums of
    the balancing losses (`router.balance.aux_loss`) are zeroed too: read them before. With `bias_update = "quantile"`
    the bias becomes that which would have balanced these tokens.

    Args:
        model: a `MoE` layer, or a module that contains some.
        group: the ranks whose tokens are counted, all of which call this; their biases stay equal. Without it all ranks
            of the default process group, if there is one. A pipeline needs the group of the stage.

    Tokens are counted in backward, or in a forward with gradients where none passes the router: one that is frozen
    together with all that is before it. The bias of a frozen router stays.

    DDP needs `broadcast_buffers=False`, or its forwards replace the counts of all ranks by those of rank 0.

    Returns: name of each router -> tokens of each expert in the step, int64 [E], over all ranks of the group.

    Raises: ValueError if the model has no router of ours.
    """
    routers = _routers_of(model)
    counts = _update_biases(routers, group)
    _update_by_quantiles(routers, group)
    _reset_sums(routers)
    return counts


class ExpertBalancer:
    """The balancing of the trainer's steps.

    The main loss of a microbatch is a sum over tokens, so the balancing losses of all routers become sums too.
    """

    def __init__(
        self,
        parts: list[nn.Module],
        group: dist.ProcessGroup,
        num_experts: Mapping[str, int] | None = None,
        stage_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`group` has all ranks of all stages. `num_experts` are those of every router of the model, also on other
        stages, by name (`count_experts`); by default the routers of `parts` are all. `stage_group` has the ranks with
        the same routers, by default those of `group`."""
        self.routers = {name: router for part in parts for name, router in _named_routers(part).items()}
        self.group, self.num_experts, self.stage_group = group, num_experts, stage_group or group
        for router in self.routers.values():
            router.balance.reduction = "sum"

    def start(self, scale: Tensor) -> None:
        """Zero the counts and set the scale of the balancing losses: one over the tokens of the step that are routed,
        with a label or not, so that a coefficient does not depend on the share of labels."""
        _reset_sums(self.routers)
        for router in self.routers.values():
            router.balance.scale.copy_(scale)

    @torch.no_grad()
    def finish(self, skips_update: Tensor) -> dict[str, Tensor]:
        """Sum the counts over ranks and update every bias; returns the counts of all routers by name.

        Where `skips_update`, a bool on the device, is true, the biases stay.
        """
        _update_by_quantiles(self.routers, self.stage_group, skips_update)
        return _update_biases(self.routers, self.group, skips_update, self.num_experts)

    @torch.no_grad()
    def share_sums(self, like: Tensor) -> dict[str, Tensor]:
        """The sums of all tokens' shares of the scores, [E] of each router by name, over all ranks."""
        sums: dict[str, Tensor] = {}
        for number, alike in _by_width(self.routers, self.num_experts).items():
            sums_LE = _stack(self.routers, alike, like.new_zeros(number, dtype=torch.float32), "share_sums_E")
            dist.all_reduce(sums_LE, group=self.group)
            sums |= zip(alike, sums_LE, strict=True)
        return sums

    def num_dropped(self, like: Tensor) -> Tensor:
        """The assignments of this rank's tokens that its layers have dropped in the step, fp64."""
        numbers = [router.balance.num_dropped for router in self.routers.values()]
        return (torch.stack(numbers).sum() if numbers else torch.zeros_like(like)).double()

    @torch.no_grad()
    def bias_spread(self, like: Tensor) -> Tensor:
        """The largest distance between two expert biases of a router of this rank, fp32."""
        widths = _by_width(self.routers, None)
        of_width = [torch.stack([self.routers[name].expert_bias_E for name in names]) for names in widths.values()]
        spreads = [(biases_LE.amax(1) - biases_LE.amin(1)).max() for biases_LE in of_width]
        return torch.stack(spreads).max().float() if spreads else like.new_zeros((), dtype=torch.float32)

    def aux_loss(self, like: Tensor) -> Tensor:
        """This rank's balancing losses of the step, summed over layers."""
        losses = [router.balance.aux_loss for router in self.routers.values()]
        return torch.stack(losses).sum().to(like.dtype) if losses else torch.zeros_like(like)


def count_experts(model: nn.Module) -> dict[str, int]:
    """The number of experts of every router of a model, by name."""
    return _count_experts(_named_routers(model))


def _count_experts(routers: dict[str, TopKRouter]) -> dict[str, int]:
    return {name: len(router.expert_bias_E) for name, router in routers.items()}


def _named_routers(model: nn.Module) -> dict[str, TopKRouter]:
    return {name: module for name, module in model.named_modules() if isinstance(module, TopKRouter)}


def _routers_of(model: nn.Module) -> dict[str, TopKRouter]:
    routers = _named_routers(model)
    if not routers:
        raise ValueError("the model has no titan_moe.TopKRouter; use titan_moe.MoE as its feed-forward layer")
    return routers


def _reset_sums(routers: dict[str, TopKRouter]) -> None:
    for router in routers.values():
        router.balance.zero_sums()


def _update_biases(
    routers: dict[str, TopKRouter],
    group: dist.ProcessGroup | None,
    skips_update: Tensor | None = None,
    num_experts: Mapping[str, int] | None = None,
) -> dict[str, Tensor]:
    """Sum the counts over ranks, in one message for all layers with equally many experts, and update the biases."""
    counts: dict[str, Tensor] = {}
    for number, alike in _by_width(routers, num_experts).items():
        device = None if skips_update is None else skips_update.device
        counts_LE = _stack(routers, alike, torch.zeros(number, dtype=torch.int64, device=device), "tokens_per_expert_E")
        if dist.is_initialized():
            dist.all_reduce(counts_LE, group=group)
        load_LE = counts_LE.float()
        signs_LE = torch.sign(load_LE.mean(1, keepdim=True) - load_LE)
        if skips_update is not None:
            signs_LE *= ~skips_update
        for name, sign_E in zip(alike, signs_LE, strict=True):
            if name in routers and routers[name].weight.requires_grad:
                routers[name].expert_bias_E.add_(sign_E, alpha=routers[name].bias_update_speed)
        counts |= zip(alike, counts_LE, strict=True)
    return {name: counts[name] for name in num_experts or routers}


@torch.no_grad()
def _update_by_quantiles(
    routers: dict[str, TopKRouter], group: dist.ProcessGroup | None, skips_update: Tensor | None = None
) -> None:
    """Give the experts the biases that would have balanced the tokens of this step."""
    by_settings: defaultdict[tuple[int, int, float], list[TopKRouter]] = defaultdict(list)
    for router in routers.values():
        if router.balance.counts_margins:
            by_settings[len(router.expert_bias_E), router.rule.top_k, router.bias_ema].append(router)
    for (_, top_k, ema), alike in by_settings.items():
        margins_LEQ = torch.stack([router.balance.margins_EQ for router in alike])
        if dist.is_initialized():
            dist.all_reduce(margins_LEQ, group=group)
        old_LE = torch.stack([router.expert_bias_E for router in alike])
        bias_LE = balanced_biases(margins_LEQ, top_k).to(old_LE.dtype)
        bias_LE = torch.lerp(bias_LE, old_LE, ema)  # a number: a tensor of it would be copied from the host each step
        bias_LE = bias_LE - bias_LE.mean(1, keepdim=True)
        stays_L11 = margins_LEQ.sum((1, 2), keepdim=True) == 0
        stays_L1 = stays_L11.squeeze(2) if skips_update is None else stays_L11.squeeze(2) | skips_update
        for router, bias_E in zip(alike, torch.where(stays_L1, old_LE, bias_LE), strict=True):
            if router.weight.requires_grad:
                router.expert_bias_E.copy_(bias_E)


def _by_width(routers: dict[str, TopKRouter], num_experts: Mapping[str, int] | None) -> dict[int, list[str]]:
    """The names of routers by their number of experts."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, number in (_count_experts(routers) if num_experts is None else num_experts).items():
        names[number].append(name)
    return names


def _stack(routers: dict[str, TopKRouter], names: list[str], absent_E: Tensor, buffer: str) -> Tensor:
    """A buffer of the balances of these layers, that of `absent_E` for those of other stages: [L, E]."""
    own = {name: routers[name].balance.get_buffer(buffer) for name in names if name in routers}
    return torch.stack([own.get(name, absent_E) for name in names])
