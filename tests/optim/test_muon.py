"""Muon against `torch.optim.Muon`, matrix by matrix: stacks, fused weights, shards on all kinds of meshes, resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titan_moe.config.muon import MuonConfig
from titan_moe.config.train import OptimConfig
from titan_moe.optim.build import Optimizers, build_optimizer
from titan_moe.parameters import ParameterKind, full_tensor, local

CONFIG = OptimConfig(kind="muon", lr=2**-10, weight_decay=0.3)
ROWS = (12, 4, 4)
LAYOUTS = {
    "fsdp_ep": {"dp": 2, "ep": 2},
    "tp_edp": {"tp": 2, "edp": 2},
    "fsdp_tp_edp_ep": {"dp": 2, "tp": 2, "edp": 2, "ep": 2},
}


class Experts(nn.Module):
    parameter_kinds = {"gate_up": ParameterKind.EXPERT_MATRIX, "bias": ParameterKind.BIAS}

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(4, 2, 6, 10))
        self.bias = nn.Parameter(torch.randn(4, 10))


class Model(nn.Module):
    """A fused weight, two matrices of one shape, one of another whose rows two ranks do not divide, experts, others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 8)
        self.qkv = nn.Linear(8, sum(ROWS), bias=False)
        self.out = nn.Linear(12, 8)
        self.more = nn.ModuleList(nn.Linear(12, 8, bias=False) for _ in range(2))
        self.odd = nn.Linear(8, 5, bias=False)
        self.gate = nn.Linear(8, 1, bias=False)
        self.experts = Experts()
        self.fused_rows = {"qkv.weight": ROWS}


def build(config: OptimConfig, dp: int = 1, tp: int = 1, edp: int = 1, ep: int = 1, **options: Any) -> Any:
    model = Model()
    if dp * tp * edp * ep == 1:
        return model, build_optimizer([model], config, **options)
    dense = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    experts = init_device_mesh("cpu", (edp, ep), mesh_dim_names=("edp", "ep"))
    for name, parameter in list(model.experts.named_parameters()):
        spread = distribute_tensor(parameter.data, experts["ep"], [Shard(0)])
        setattr(model.experts, name, nn.Parameter(spread))
    if tp > 1:
        own = torch.cat([part.chunk(tp)[dense["tp"].get_local_rank()] for part in model.qkv.weight.data.split(ROWS)])
        model.qkv.weight = nn.Parameter(DTensor.from_local(own, dense["tp"], [Shard(0)], run_check=False))
        for linear in (model.out, *model.more):
            linear.weight = nn.Parameter(distribute_tensor(linear.weight.data, dense["tp"], [Shard(1)]))
    if edp > 1:
        fully_shard(model.experts, mesh=experts["edp"], shard_placement_fn=lambda p: Shard(p.ndim - 1))
    if dp > 1:
        by_rows = model.qkv.weight
        ignored = set() if edp > 1 else set(model.experts.parameters())
        if tp > 1:  # the others would need a mesh of one more axis
            ignored |= {p for p in model.parameters() if not isinstance(p, DTensor)}
        fully_shard(
            model,
            mesh=dense["dp"],
            ignored_params=ignored,
            shard_placement_fn=lambda p: Shard(1) if tp > 1 and p is by_rows else None,
        )
    return model, build_optimizer([model], config, **options)


def gradients(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in model.named_parameters()}


def take_steps(model: nn.Module, optimizers: Optimizers, num_steps: int, num_before: int = 0, **guard: Tensor) -> None:
    generator, alone = torch.Generator().manual_seed(1), Model()
    for grads in [gradients(alone, generator) for _ in range(num_before + num_steps)][num_before:]:
        for name, grad in grads.items():
            parameter = model.get_parameter(name)
            grad = grad.to(parameter.dtype)
            if not isinstance(parameter, DTensor):
                parameter.grad = grad
                continue
            mesh = parameter.device_mesh
            if name == "qkv.weight" and "tp" in (mesh.mesh_dim_names or ()):  # rows in the order of the ranks
                by_rank = zip(*(part.chunk(2) for part in grad.split(ROWS)), strict=True)
                grad = torch.cat([part for rank in by_rank for part in rank])
            parameter.grad = distribute_tensor(grad, mesh, parameter.placements)
        optimizers.step(**guard)


def whole(model: nn.Module) -> dict[str, Tensor]:
    rows = {"qkv.weight": ROWS}
    return {n: full_tensor(p, rows.get(n, ())).detach().clone() for n, p in model.named_parameters()}


def of_torch(num_steps: int, config: OptimConfig) -> dict[str, Tensor]:
    """What torch's Muon makes of each matrix, and AdamW of the rest."""
    model, rest = Model(), {}
    matrices: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if name == "qkv.weight":
            matrices[name] = [part.clone() for part in parameter.data.split(ROWS)]
        elif name == "experts.gate_up":
            matrices[name] = [part.clone() for part in parameter.data.flatten(0, 1)]
        elif parameter.ndim == 2 and "weight" in name and name not in ("embed.weight", "gate.weight"):
            matrices[name] = [parameter.data.clone()]
        else:
            rest[name] = parameter
    muon, options = config.muon, {"lr": config.lr * config.muon.lr_scale, "weight_decay": config.weight_decay}
    torchs = torch.optim.Muon(
        [nn.Parameter(part) for parts in matrices.values() for part in parts],
        momentum=muon.momentum, nesterov=muon.nesterov, ns_steps=muon.ns_steps, adjust_lr_fn=muon.adjust_lr, **options,
    )  # fmt: skip
    adamw = build_optimizer([model], replace(config, kind="fused_adamw"))
    generator = torch.Generator().manual_seed(1)
    parameters = iter(torchs.param_groups[0]["params"])
    own = {name: [next(parameters) for _ in parts] for name, parts in matrices.items()}
    for _ in range(num_steps):
        for name, grad in gradients(model, generator).items():
            model.get_parameter(name).grad = grad
            parts = grad.split(ROWS) if name == "qkv.weight" else [grad]
            parts = grad.flatten(0, 1) if name == "experts.gate_up" else parts
            for parameter, part in zip(own.get(name, []), parts, strict=False):
                parameter.grad = part
        torchs.step()
        adamw.step()
    joined = {name: torch.cat(list(parts)) for name, parts in own.items()}
    joined["experts.gate_up"] = torch.stack(list(own["experts.gate_up"])).unflatten(0, (4, 2))
    return {name: value.detach() for name, value in (joined | rest).items()}


def run(layout: dict[str, int], config: OptimConfig) -> dict[str, Any]:
    """One step, four more in smaller buckets, and one that is skipped."""
    model, optimizers = build(config, **layout)
    take_steps(model, optimizers, 1)
    once = whole(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titan_moe.config.optimizers.MUON_BUCKET_ELEMENTS", 100)
        take_steps(model, optimizers, 4, num_before=1)
    after = whole(model)
    state = {name: local(value).clone() for name, value in optimizers.state_dict().items()}
    guard = {"found_inf": torch.tensor(1.0), "grad_factor": torch.tensor(torch.nan)}
    take_steps(model, optimizers, 1, **guard)
    skipped = optimizers.state_dict()
    return {
        "once": once,
        "after": after,
        "is_skipped": all(torch.equal(after[n], v) for n, v in whole(model).items())
        and all(torch.equal(local(skipped[name]), value) for name, value in state.items()),
    }


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
def test_steps_are_those_of_torch(adjust_lr: Any) -> None:
    for num_steps, nesterov in ((1, True), (5, False)):
        muon = MuonConfig(adjust_lr=adjust_lr, nesterov=nesterov, momentum=0.9, lr_scale=2.0)
        model, optimizers = build(config := replace(CONFIG, muon=muon))
        take_steps(model, optimizers, num_steps)
        for name, expected in of_torch(num_steps, config).items():
            torch.testing.assert_close(model.get_parameter(name).detach(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_step_as_torch_steps_whole_matrices(ranks: Any, layout: str) -> None:
    sizes, expected = LAYOUTS[layout], {"once": of_torch(1, CONFIG), "after": of_torch(5, CONFIG)}
    for rank in ranks(4 if len(sizes) == 4 else 2, run, sizes, CONFIG):
        assert rank["is_skipped"]
        for when, values in expected.items():
            for name, value in values.items():
                torch.testing.assert_close(rank[when][name], value, rtol=1e-5, atol=1e-5)


def save(layout: dict[str, int], config: OptimConfig, options: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """The weights of three steps, saved after the first two."""
    model, optimizers = build(config, **layout, **options)
    take_steps(model, optimizers, 2)
    weights = dict(model.named_parameters())
    dcp.save({"model": weights, "optimizer": optimizers}, checkpoint_id=str(folder))
    take_steps(model, optimizers, 1, num_before=2)
    return whole(model)


def load(layout: dict[str, int], config: OptimConfig, options: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    model, optimizers = build(config, **layout, **options)
    dcp.load({"model": dict(model.named_parameters()), "optimizer": optimizers}, checkpoint_id=str(folder))
    take_steps(model, optimizers, 1, num_before=2)
    return whole(model)


@pytest.mark.parametrize("options", [{}, {"moments": torch.bfloat16}], ids=["fp32", "bf16"])
def test_state_resumes_bit_for_bit_and_on_another_layout(ranks: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    """Without tensor parallelism, whose rows of fused weights checkpoints put in order (checkpoint/storage.py)."""
    sizes = LAYOUTS["fsdp_ep"]
    saved = ranks(2, save, sizes, CONFIG, options, tmp_path)[0]
    for exact, loaded in [
        (True, ranks(2, load, sizes, CONFIG, options, tmp_path)[0]),
        (False, ranks(1, load, {}, CONFIG, options, tmp_path)[0]),
    ]:
        for name, value in loaded.items():
            if exact:
                assert torch.equal(value, saved[name]), name
            else:
                torch.testing.assert_close(value, saved[name], rtol=1e-5, atol=1e-5)
