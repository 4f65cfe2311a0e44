"""Statistics of the inputs of a model's routers, and of their routing.

If the inputs of a router have one dominant direction, common to all tokens, it sends all tokens to the same experts.
The direction comes from attention: its output is an average over earlier tokens, nearly equal for all tokens at the
start of training.

B batch · N sequence · D model width · E experts · K experts a token
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titan_moe.layers.router import TopKRouter
from titan_moe.metrics.experts import expert_loads, idle_experts, read_values


class Signal(NamedTuple):
    """Statistics of a tensor [B, N, D]."""

    rms: float
    common: float
    """Share of the direction common to all tokens: |mean of x|² over the mean of |x|². 0 for independent tokens."""
    common_in_sequence: float
    """The same with the mean over a sequence, averaged over sequences."""


class LayerSignals(NamedTuple):
    """The signals of a block, and the routing of its tokens; a dense block has none."""

    layer: str
    residual: Signal  # before the block
    attention: Signal  # its output
    router: Signal | None  # its input
    tokens_per_expert_E: Tensor | None  # fp64, on the host

    @property
    def num_idle(self) -> int:
        """Experts without a token."""
        assert self.tokens_per_expert_E is not None
        return int(idle_experts({"": self.tokens_per_expert_E})[""])

    @property
    def load(self) -> float:
        """Busiest expert over the mean."""
        assert self.tokens_per_expert_E is not None
        return float(expert_loads({"": self.tokens_per_expert_E})[""])


@torch.no_grad()
def observe_forward(model: nn.Module, *inputs: Tensor | None) -> tuple[float, list[LayerSignals]]:
    """Run one forward of an uncompiled model on tokens, labels and document ids.

    Returns: the model's output, a summed loss, and the signals of each block.
    """
    blocks = dict(model.get_submodule("layers").named_children())
    seen: dict[str, dict[str, Tensor]] = {name: {} for name in blocks}
    with _hooks(blocks, seen):
        loss = model(*inputs)
    names = [(layer, name) for layer in seen for name in seen[layer]]
    values = iter(read_values([loss, *(seen[layer][name] for layer, name in names)]))
    total = next(values).item()
    read = {key: next(values) for key in names}
    return total, [_signals_of(layer, {name: read[layer, name] for name in seen[layer]}) for layer in blocks]


def _signals_of(layer: str, read: dict[str, Tensor]) -> LayerSignals:
    signals = {name: Signal(*read[name].tolist()) for name in ("residual", "attention", "router") if name in read}
    return LayerSignals(
        layer, signals["residual"], signals["attention"], signals.get("router"), read.get("tokens_per_expert")
    )


@contextmanager
def _hooks(blocks: dict[str, nn.Module], seen: dict[str, dict[str, Tensor]]) -> Iterator[None]:
    """Record what blocks, their attention and their routers read and write, reduced on the device."""
    handles = []

    def record(layer: str, block: nn.Module) -> None:
        def before_block(_: nn.Module, args: tuple[Any, ...]) -> None:
            seen[layer]["residual"] = _reduce(args[0])

        def after_attention(_: nn.Module, __: tuple[Any, ...], out_BND: Tensor) -> None:
            seen[layer]["attention"] = _reduce(out_BND)

        def after_router(router: nn.Module, args: tuple[Any, ...], out: tuple[Tensor, Tensor]) -> None:
            num_experts = router.get_parameter("weight").shape[0]
            seen[layer]["router"] = _reduce(args[0])
            seen[layer]["tokens_per_expert"] = torch.bincount(out[1].flatten() + 1, minlength=num_experts + 1)[1:]

        handles.append(block.register_forward_pre_hook(before_block))
        handles.append(block.get_submodule("attention").register_forward_hook(after_attention))
        for module in block.modules():
            if isinstance(module, TopKRouter):
                handles.append(module.register_forward_hook(after_router))

    for layer, block in blocks.items():
        record(layer, block)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _reduce(x_BND: Tensor) -> Tensor:
    """The three numbers of a `Signal`, on the device."""
    x_BND = x_BND.to(torch.promote_types(x_BND.dtype, torch.float32))
    size = x_BND.square().sum(-1).mean()
    common = x_BND.mean((0, 1)).square().sum() / size
    in_sequence = x_BND.mean(1).square().sum(-1).mean() / size
    return torch.stack([(size / x_BND.shape[-1]).sqrt(), common, in_sequence])
