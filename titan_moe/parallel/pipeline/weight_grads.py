"""Select the weight gradients of a stage that `backward_weight` computes; `backward_input` computes all others.

Delayed are those of routed experts (in Triton, also in fp8, or as grouped GEMMs) and of dense linear layers: attention
projections, dense layers, shared experts, latent projections. Not delayed are

* embeddings, norms, biases and routers, which are small;
* the head: its loss computes both gradients in forward;
* what runs in a compiled graph, which has no side effects: attention, shared experts and dense layers. Experts in
  Triton run outside of graphs then, so their gradients are delayed;
* converted linear layers, those of `tp_comm_overlap`, and experts in emulated formats;
* fused experts that get their rows over symmetric memory, while their arena keeps nothing: while a capacity factor
  of "auto" has no bound, and in steps that are taken again.

plan/pipeline/weight_grads.py says the same of a recipe; the bubble of `titan-moe check` follows from it.
"""

from functools import partial

import torch
from torch import Tensor, nn

from titan_moe.compile.regional import modules_in_graphs
from titan_moe.config.perf import CompileConfig
from titan_moe.kernels.choose import QUEUED_SWIGLU_DOWN, choose_queued_expert_mlp
from titan_moe.kernels.delayed_weight_grads import WeightGradQueue
from titan_moe.kernels.experts.fused_mlp import FusedMLP
from titan_moe.kernels.linear.delayed import queued_linear
from titan_moe.layers.mlp import SwiGLUDown
from titan_moe.layers.moe import MoE


def apply(stage: nn.Module, queue: WeightGradQueue | None, config: CompileConfig, device: torch.device) -> None:
    """Let the layers of a stage delay their weight gradients to `queue`, in place.

    Call it after dispatchers are set, and before compile, which does not compile layers that delay. Names and classes
    of modules do not change. A gradient that comes after its parameter is resharded would be lost, and a recomputed
    forward delays none: rules refuse both beside a schedule that splits backwards.
    """
    if queue is None:
        return
    compiled = modules_in_graphs(stage, config, device)
    for module in stage.modules():
        if isinstance(module, MoE):
            _delay_experts(module, queue, is_compiled=module.experts in compiled)
        elif module in compiled:
            continue
        elif type(module).forward is SwiGLUDown.forward:
            queued = QUEUED_SWIGLU_DOWN.get(module.swiglu_down)
            module.swiglu_down = module.swiglu_down if queued is None else queued(queue)
        elif _is_plain_linear(module):
            module.forward = partial(_linear, module, queue)


def _delay_experts(moe: MoE, queue: WeightGradQueue, *, is_compiled: bool) -> None:
    mlp = choose_queued_expert_mlp(moe.experts.mlp, queue)
    if mlp is not None and (isinstance(mlp, FusedMLP) or not is_compiled):
        moe.experts.mlp = mlp


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether it computes as `nn.Linear` does, whatever its class is."""
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module)


def _linear(linear: nn.Linear, queue: WeightGradQueue, x: Tensor) -> Tensor:
    return queued_linear(x, linear.weight, linear.bias, queue)
