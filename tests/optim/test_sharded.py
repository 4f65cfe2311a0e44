"""Optimizers over sharded parameters: placements, empty shards, replicas, guards, and checkpoints for other layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titan_moe.config.train import OptimConfig
from titan_moe.optim.build import Optimizers, build_optimizer
from titan_moe.optim.fused_adamw import shard_seed

TORCH, FUSED = (OptimConfig(kind=kind, lr=0.0625) for kind in ("adamw", "fused_adamw"))
KINDS: dict[str, tuple[OptimConfig, dict[str, Any]]] = {
    "torch": (TORCH, {}),
    "torch_capturable": (TORCH, {"capturable": True}),
    "fused": (FUSED, {}),
    "fused_bf16": (FUSED, {"moments": torch.bfloat16}),
}


class Model(nn.Module):
    """Dense parameters, one of them shorter than the number of ranks, and experts on their own mesh."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(6, 5)
        self.short = nn.Parameter(torch.randn(1, 3))
        self.experts = nn.Parameter(torch.randn(4, 2, 3, 6))


def build(num_ranks: int, kind: str, num_replicas: int = 1) -> tuple[nn.Module, Optimizers]:
    model = Model()
    folded = init_device_mesh("cpu", (2 if num_ranks == 4 else 1, num_ranks // (2 if num_ranks == 4 else 1)))
    model.experts = nn.Parameter(distribute_tensor(model.experts.data, folded, [Shard(3), Shard(0)]))
    shape = (num_replicas, num_ranks // num_replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    fully_shard(model, mesh=mesh if num_replicas > 1 else mesh["dp_shard"], ignored_params={model.experts})
    config, options = KINDS[kind]
    return model, build_optimizer([model], config, seed=3, **options)


def take_steps(model: nn.Module, optimizers: Optimizers, num_steps: int, **guard: Tensor) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            whole = torch.randn(parameter.shape, generator=generator)
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        optimizers.step(**guard)


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of the full state."""
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for name, v in state.items()}


def everything(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    return whole(dict(model.named_parameters()) | optimizers.state_dict())


def run(num_ranks: int, kind: str, num_replicas: int = 1) -> dict[str, Any]:
    """Three steps, and one that is skipped."""
    model, optimizers = build(num_ranks, kind, num_replicas)
    take_steps(model, optimizers, 3, found_inf=torch.tensor(0.0), grad_factor=torch.tensor(0.5))
    after = everything(model, optimizers)
    take_steps(model, optimizers, 1, found_inf=torch.tensor(1.0), grad_factor=torch.tensor(torch.nan))
    skipped = everything(model, optimizers)
    for name, parameter in model.named_parameters():
        moment = optimizers.state_dict()[f"state.{name}.exp_avg"]
        assert moment.placements == parameter.placements and moment.device_mesh == parameter.device_mesh
        assert moment.to_local().dtype == (torch.bfloat16 if kind == "fused_bf16" else torch.float32)
    return {
        "after": after,
        "is_skipped": all(torch.equal(skipped[name], after[name]) for name in after),
        "empty": [name for name, parameter in model.named_parameters() if parameter.to_local().numel() == 0],
        "seed": shard_seed(model.dense.weight, "dense.weight", 3),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_updates_shards_as_full_parameters(ranks: Any, kind: str) -> None:
    (alone,) = ranks(1, run, 1, kind)
    for num_ranks in (2, 4):
        seen = ranks(num_ranks, run, num_ranks, kind)
        assert "short" in seen[-1]["empty"], "a rank without a row takes part"
        for rank in seen:
            assert rank["is_skipped"]
            for name, expected in alone["after"].items():
                # another layout draws other bits
                tolerance = 2e-2 if kind == "fused_bf16" else 1e-6
                torch.testing.assert_close(rank["after"][name], expected, rtol=tolerance, atol=tolerance)


def test_optimizer_rounds_replicas_alike_and_shards_differently(ranks: Any) -> None:
    seen = ranks(4, run, 4, "fused_bf16", 2)
    seeds = [rank["seed"] for rank in seen]
    assert seeds[0] == seeds[2] != seeds[1] == seeds[3]
    for rank in seen[1:]:
        assert all(torch.equal(rank["after"][name], value) for name, value in seen[0]["after"].items())


def save(num_ranks: int, kind: str, folder: Path) -> dict[str, Tensor]:
    model, optimizers = build(num_ranks, kind)
    take_steps(model, optimizers, 2)
    dcp.save({"optimizer": optimizers}, checkpoint_id=str(folder))
    return whole(optimizers.state_dict())


def load(num_ranks: int, kind: str, folder: Path) -> dict[str, Tensor]:
    model, optimizers = build(num_ranks, kind)
    dcp.load({"optimizer": optimizers}, checkpoint_id=str(folder))
    loaded = whole(optimizers.state_dict())
    take_steps(model, optimizers, 1)
    assert all(value == 3 for name, value in optimizers.state_dict().items() if name.endswith(".step"))
    return loaded


@pytest.mark.parametrize(("kind", "other"), [("fused_bf16", "fused_bf16"), ("torch", "fused_bf16"), ("fused", "torch")])
@pytest.mark.parametrize(("num_ranks", "num_others"), [(2, 1), (1, 2)])
def test_optimizer_state_loads_on_another_number_of_ranks(
    ranks: Any, tmp_path: Path, kind: str, other: str, num_ranks: int, num_others: int
) -> None:
    """Bit for bit; into bf16 moments by rounding to nearest, once."""
    saved = ranks(num_ranks, save, num_ranks, kind, tmp_path)[0]
    for loaded in ranks(num_others, load, num_others, other, tmp_path):
        assert loaded.keys() == saved.keys()
        for name, value in loaded.items():
            assert torch.equal(value, saved[name].to(value.dtype)), name
