"""Several GPUs over NCCL: messages in two halves give the bits of messages that block, and ask the host nothing."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gpus import NUM_GPUS, needs_gpus, take_gpu
from torch import Tensor

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.dispatch import AllGatherDispatcher, AllToAllDispatcher, HierarchicalDispatcher, TokenDispatcher
from titan_moe.dispatch.async_collectives import ASYNC
from titan_moe.dispatch.collectives import SYNC
from titan_moe.dispatch.hierarchical import open_node_groups
from titan_moe.layers.moe import MoE

pytestmark = [pytest.mark.gpu, needs_gpus]

LAYER = ModelConfig(
    hidden_size=512, moe=MoEConfig(num_experts=16, top_k=4, ffn_hidden_size=256, shared_ffn_hidden_size=1024)
)


def hierarchical(num_experts: int, group: dist.ProcessGroup, **options: Any) -> TokenDispatcher:
    """Of two nodes."""
    groups = open_node_groups(group, group.size() // 2)
    for members in groups:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=members)  # makes the communicator, as below
    return HierarchicalDispatcher(num_experts, groups, **options)


KINDS = {"allgather": AllGatherDispatcher, "alltoall": AllToAllDispatcher, "hierarchical": hierarchical}


def built(device: torch.device) -> MoE:
    """The layer of this rank, the same experts wherever they are drawn."""
    moe = MoE(LAYER, kernels=Kernels(experts="grouped_mm")).to(device)
    generator = torch.Generator(device).manual_seed(3)
    for parameter in moe.parameters():
        weights = torch.randn(parameter.shape, generator=generator, device=device) / 16
        parameter.data = weights.bfloat16()
    for parameter in moe.experts.parameters():
        parameter.data = parameter.data.chunk(dist.get_world_size())[dist.get_rank()].clone()
    return moe


def serve(moe: MoE, x_BND: Tensor, grad_BND: Tensor, *, forward: str, backward: str) -> list[Tensor]:
    """Output and gradients, and what a read of the device by the host is on the way: "default" or "error"."""
    x_BND = x_BND.clone().requires_grad_()
    try:
        torch.cuda.set_sync_debug_mode(forward)
        y_BND = moe(x_BND)
        torch.cuda.set_sync_debug_mode(backward)
        y_BND.backward(grad_BND)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [y_BND.detach(), x_BND.grad, *(parameter.grad for parameter in moe.parameters())]


def compare(kind: str, num_rounds: int) -> list[str]:
    """The results in which the wires differ, of several batches, skewed ones too."""
    device = take_gpu()
    group = dist.new_group(backend="nccl")
    dist.barrier(group, device_ids=[device.index])  # or the first message makes the communicator, which is no message
    blocking = built(device)
    split = copy.deepcopy(blocking)
    for moe, collectives in ((blocking, SYNC), (split, ASYNC)):
        moe.dispatcher = KINDS[kind](LAYER.moe.num_experts, group, collectives=collectives)
    different = []
    for number in range(num_rounds):
        generator = torch.Generator(device).manual_seed(10 * number + dist.get_rank())
        num_tokens = 1024 if kind == "allgather" else 256 + 511 * ((number + dist.get_rank()) % 3)
        x_BND, grad_BND = torch.randn(2, 2, num_tokens, 512, device=device, generator=generator).bfloat16()
        x_BND = x_BND + number % 2  # tokens that are alike choose alike
        results = []
        for moe in (blocking, split):
            moe.zero_grad()
            backward = "error" if number else "default"  # the first round may set libraries up
            forward = "default" if moe.dispatcher.facts.reads_host else backward
            results.append(serve(moe, x_BND, grad_BND, forward=forward, backward=backward))
        names = ("y", "dx", *(name for name, _ in blocking.named_parameters()))
        different += [
            f"{name} of round {number}" for name, a, b in zip(names, *results, strict=True) if not torch.equal(a, b)
        ]
        assert all(a.isfinite().all() and a.any() for a in results[0])
    dist.destroy_process_group(group)
    return different


@pytest.mark.parametrize("kind", KINDS)
def test_both_wires_give_the_same_bits(ranks, kind: str) -> None:
    num_ranks = min(NUM_GPUS, 8)
    assert ranks(num_ranks, compare, kind, 12) == [[]] * num_ranks
