"""`MoE.reset_parameters` under FSDP2, from the meta device: the weights of one process."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from titan_moe import Kernels, ModelConfig, MoE, MoEConfig, apply_expert_parallel

CONFIG = ModelConfig(
    hidden_size=15, moe=MoEConfig(num_experts=6, top_k=2, ffn_hidden_size=5, shared_ffn_hidden_size=7, latent_size=9)
)
"""Widths that ranks do not divide."""


def shard_all(layer: MoE) -> None:
    fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def shard_experts_over_ep(layer: MoE) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    apply_expert_parallel(layer, mesh)
    fully_shard(layer, mesh=mesh, ignored_params=set(layer.experts.parameters()))


SHARDINGS: dict[str, Callable[[MoE], None]] = {"fsdp": shard_all, "ep and fsdp": shard_experts_over_ep}


def weights_of(layer: nn.Module) -> dict[str, Tensor]:
    tensors = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors.items()}


def reset_sharded(sharding: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        layer = MoE(CONFIG, kernels=Kernels(experts="reference"))
    SHARDINGS[sharding](layer)
    layer.to_empty(device="cpu")
    torch.manual_seed(3)
    layer.reset_parameters()
    assert any(isinstance(parameter, DTensor) for parameter in layer.parameters())
    assert not layer.router.expert_bias_E.any() and layer.router.balance.scale == 1
    return weights_of(layer)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_reset_parameters_does_not_depend_on_the_layout(ranks, sharding: str) -> None:
    layer = MoE(CONFIG, kernels=Kernels(experts="reference"))
    torch.manual_seed(3)
    layer.reset_parameters()
    expected = weights_of(layer)
    for weights in ranks(2, reset_sharded, sharding):
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)
