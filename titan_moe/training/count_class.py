"""Count the parameters and FLOPs of a model of one's own (`model.class`), by running it on the meta device.

The counts of plan/cost/count.py are those of the default class. Here one training step of a sequence runs without
memory and numbers, and the products of its matrices are counted, by the same convention: two FLOPs a multiply-add,
causal attention half, routers not at all. Frozen weights have no gradients, so their products are fewer.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry, shape_wrapper

from titan_moe.adapters.frozen import freeze
from titan_moe.config import Recipe
from titan_moe.config.kernels import DEFAULT_KERNELS
from titan_moe.config.model import ModelConfig
from titan_moe.layers.moe import MoE
from titan_moe.layers.router import TopKRouter
from titan_moe.models.transformer import Transformer
from titan_moe.plan.check_report import abbreviate
from titan_moe.plan.cost.count import count_parameters, training_flops_per_token

logger = logging.getLogger("titan_moe")

FLOPS_HOOK = "training_flops_per_token"
"""A method of a class that knows better: sequence length -> FLOPs of training on a token."""
KNOWN_NAMESPACES = {"aten", "prim", "prims", "titan_moe", "_c10d_functional", "c10d"}
"""Of operators without a formula for FLOPs, which here have none. Those of others are unknown."""


class ModelCounts(NamedTuple):
    """The counts of a run's model, for its log and its metrics."""

    parameters: int
    active: int | None  # of one token; None where experts are none of ours
    flops_per_token: float | None  # of training; None where they cannot be known
    reason: str = ""  # why they cannot

    def in_words(self) -> str:
        """`30.53B parameters, 3.35B active a token`."""
        active = "" if self.active is None else f", {abbreviate(self.active)} active a token"
        return f"{abbreviate(self.parameters)} parameters{active}"


def count_model(recipe: Recipe, build: Callable[[], nn.Module]) -> ModelCounts:
    """Count a recipe's model; `build` makes it on the meta device, with the default kernels."""
    num_tokens = recipe.train.seq_len_tokens
    if recipe.model.class_ == ModelConfig.class_:
        count = count_parameters(recipe.model)
        return ModelCounts(
            count.total, count.active, training_flops_per_token(recipe.model, num_tokens, recipe.optim.trainable)
        )
    model = build()
    if not isinstance(model, nn.Module):
        return ModelCounts(0, None, None, "it makes no nn.Module")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters:
        freeze(model, recipe.optim.trainable, next(model.parameters()).dtype)
    active = _active(model, recipe.model, parameters)
    if (hook := getattr(model, FLOPS_HOOK, None)) is not None:
        return ModelCounts(parameters, active, float(hook(num_tokens)))
    flops, reason = _training_flops(model, recipe.model, num_tokens)
    return ModelCounts(parameters, active, None if flops is None else flops / num_tokens, reason)


def _active(model: nn.Module, config: ModelConfig, parameters: int) -> int | None:
    """The parameters that one token uses."""
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if config.moe.num_experts and not layers:
        return None
    idle = 0.0
    for moe in layers:
        experts = sum(parameter.numel() for parameter in moe.experts.parameters())
        idle += experts * (1 - moe.config.moe.top_k / moe.config.moe.num_experts)
    return parameters - round(idle)


def _training_flops(model: nn.Module, config: ModelConfig, num_tokens: int) -> tuple[float | None, str]:
    """FLOPs of training on a sequence, or None and the reason."""
    try:
        own = _run(model, num_tokens)
    except Exception as error:
        return None, f"it cannot run on the meta device ({type(error).__name__}: {str(error).splitlines()[0]})"
    if own.unknown:
        return None, f"no formula is registered for {', '.join(sorted(own.unknown))}"
    if any(call.is_masked for call in own.attention):
        with torch.device("meta"):
            default = _run(Transformer(config, kernels=DEFAULT_KERNELS), num_tokens)
        if (own.products, own.attention) == (default.products, default.attention):
            return float(training_flops_per_token(config, num_tokens) * num_tokens), ""
        return None, "its attention has masks"
    return own.products + sum(call.flops * number for call, number in own.attention.items()), ""


class Attention(NamedTuple):
    """A call of PyTorch's attention, forward or backward."""

    flops: float  # half of them where it is causal
    is_masked: bool  # by a tensor: how many pairs it leaves is unknown


@dataclass
class Counted:
    """What a step has multiplied."""

    products: float = 0.0
    attention: Counter[Attention] = field(default_factory=Counter)
    unknown: set[str] = field(default_factory=set)  # operators


def _run(model: nn.Module, num_tokens: int) -> Counted:
    """Forward and backward of one sequence."""
    counted = Counted()
    tokens_BN = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False, custom_mapping=GROUPED) as counter, _Operators(counted), _Attention(counted):
        model(tokens_BN, tokens_BN, None).backward()
    by_module = counter.get_flop_counts()
    name_of_model = type(model).__name__
    routers = [name for name, module in model.named_modules() if isinstance(module, TopKRouter)]
    of_routers = sum(sum(by_module.get(f"{name_of_model}.{name}", {}).values()) for name in routers)
    counted.products = sum(by_module["Global"].values()) - of_routers
    return counted


@shape_wrapper
def _grouped_mm_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Of [T, I] x [E, I, O], of [I, T] x [T, O], or of [E, T, I] x [E, I, O]."""
    groups = a[0] if len(a) == len(b) == 3 else 1
    return int(2 * groups * a[-2] * a[-1] * b[-1])


GROUPED = {
    getattr(torch.ops.aten, name): _grouped_mm_flops
    for name in ("_grouped_mm",)
    if hasattr(torch.ops.aten, name) and getattr(torch.ops.aten, name) not in flop_registry
}
"""Formulas that PyTorch lacks."""


class _Operators(TorchDispatchMode):
    """Notes operators whose FLOPs are unknown."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "_overloadpacket", func)
        if getattr(func, "namespace", "") not in KNOWN_NAMESPACES and packet not in flop_registry:
            self.counted.unknown.add(str(packet))
        return func(*args, **(kwargs or {}))


class _Attention(TorchFunctionMode):
    """Counts PyTorch's attention, which on the meta device would be products that no one can tell from others."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **options: Any
    ) -> Tensor:
        is_causal = options.get("is_causal", args[1] if len(args) > 1 else False)
        pairs = query.shape[:-1].numel() * key.shape[-2]
        flops = 2.0 * pairs * (query.shape[-1] + value.shape[-1]) / (2 if is_causal else 1)
        return _CountedAttention.apply(
            query, key, value, self.counted.attention, Attention(flops, attn_mask is not None)
        )


class _CountedAttention(torch.autograd.Function):
    """The shapes of attention without its products."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: Counter[Attention], call: Attention
    ) -> Tensor:
        calls[call] += 1
        ctx.save_for_backward(query, key, value)
        ctx.calls, ctx.call = calls, call
        return query.new_empty(*query.shape[:-1], value.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.calls[ctx.call] += 2
        return (*(torch.empty_like(x) for x in ctx.saved_tensors), None, None)
