"""Optimizers at full size: shards of a real layer, their work, and the implementations to compare."""

import torch
from benchmark_case import Benchmark, Case
from torch import Tensor

from titan_moe.kernels.optim.adamw import Rule, Shard
from titan_moe.kernels.optim.adamw_8bit import Shard8
from titan_moe.kernels.optim.moments_8bit import BLOCK, Moment
from titan_moe.kernels.registry import Sample, load_all

KERNELS = load_all()
QWEN3_EP8 = 16 * 2 * 768 * 2048
"""Elements of gate and up in a layer of a rank with ep = 8."""
FP32, BF16 = torch.float32, torch.bfloat16


def adamw(num_elements: int, bytes_moved: float, dtype: torch.dtype, moments: torch.dtype) -> Case:
    def draw(device: torch.device) -> Sample:
        tensors = [torch.randn(num_elements, device=device, dtype=kind) for kind in (dtype, dtype, moments, moments)]
        tensors[3].abs_()
        lr, step, found_inf, grad_factor = (torch.tensor(value, device=device) for value in (0.01, 7.0, 0.0, 0.5))
        shard = Shard(step, 2**40 + 1, *tensors)
        return Sample("", (shard, Rule(lr, found_inf, grad_factor, 0.9, 0.999, 1e-8, 0.1)), 0)

    moved = bytes_moved * num_elements
    return Case(draw, 0, 0, moved, moved)


def adamw_8bit(num_elements: int, bytes_moved: float, dtype: torch.dtype) -> Case:
    def draw(device: torch.device) -> Sample:
        param, grad = (torch.randn(num_elements, device=device, dtype=dtype) for _ in range(2))
        moments = []
        for _ in range(2):
            codes = torch.randint(0, 127, (num_elements,), device=device, dtype=torch.uint8)  # e4m3's 127 is NaN
            scales_B = torch.rand(num_elements // BLOCK, device=device) * 1e-3
            moments.append(Moment(codes, scales_B))
        lr, step, found_inf, grad_factor = (torch.tensor(value, device=device) for value in (0.01, 7.0, 0.0, 0.5))
        shard = Shard8(step, 2**40 + 1, param, grad, *moments)
        return Sample("", (shard, Rule(lr, found_inf, grad_factor, 0.9, 0.999, 1e-8, 0.1)), 0)

    moved = bytes_moved * num_elements
    return Case(draw, 0, 0, moved, moved)


def torch_fused_adamw(shard: Shard, rule: Rule) -> Tensor:
    """PyTorch's fused kernel, on a gradient that is clipped already."""
    torch._fused_adamw_(
        [shard.param], [shard.grad], [shard.exp_avg], [shard.exp_avg_sq], [], [shard.step], amsgrad=False,
        lr=rule.lr, beta1=rule.beta1, beta2=rule.beta2, weight_decay=rule.weight_decay, eps=rule.eps,
        maximize=False, found_inf=rule.found_inf,
    )  # fmt: skip
    return shard.param


OPTIMIZER_BENCHMARKS = {
    "adamw": Benchmark(
        {"fp32": adamw(QWEN3_EP8, 28.0, FP32, FP32), "bf16": adamw(QWEN3_EP8, 14.0, BF16, BF16)},
        {"titan_moe": KERNELS["adamw"].op, "torch fused": torch_fused_adamw},
    ),
    "adamw_bf16_moments": Benchmark(
        {"qwen3_ep8": adamw(QWEN3_EP8, 20.0, FP32, BF16)}, {"titan_moe": KERNELS["adamw"].op}
    ),
    "adamw_8bit": Benchmark(
        {"fp8": adamw_8bit(QWEN3_EP8, 16.06, FP32), "fp8_bf16": adamw_8bit(QWEN3_EP8, 10.06, BF16)},
        {"titan_moe": KERNELS["adamw_8bit"].op},
    ),
}
