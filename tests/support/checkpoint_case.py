"""A tiny run with every kind of parameter in a checkpoint.

Gradients are drawn at random, not computed. AdamW is element-wise, so the layout adds no rounding error.
"""

import json
import os
import signal
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titan_moe.checkpoint.dcp import Checkpointer
from titan_moe.checkpoint.manifest import Manifest
from titan_moe.config import Recipe
from titan_moe.config.train import CheckpointConfig, OptimConfig
from titan_moe.optim.build import build_optimizer
from titan_moe.optim.schedule import build_schedule

TOTAL_STEPS = 8


class Cursor:
    """A stand-in for the data loader and for the trainer's counters."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"sample": 0, "order": "first", "window": torch.zeros(2)}

    def fingerprint(self) -> str:
        return "100 tokens"

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


class TinyModel(nn.Module):
    """Dense parameters for FSDP2, an expert stack on its own mesh, and an expert bias that each step replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 5, dtype=torch.float64)
        self.norm = nn.LayerNorm(5, dtype=torch.float64)
        self.experts = nn.Parameter(torch.randn(4, 2, 3, 5, dtype=torch.float64))
        self.register_buffer("expert_bias_E", torch.zeros(4))


class CheckpointCase:
    """Model, optimizer, schedule, data and checkpoints of one rank."""

    def __init__(self, folder: Path, config: CheckpointConfig, optim: OptimConfig | None = None) -> None:
        optim = optim or OptimConfig(lr=0.1, warmup_steps=3, decay_steps=3)
        torch.manual_seed(7)
        self.model = TinyModel()
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("edp", "ep"))
        experts = distribute_tensor(self.model.experts.data, mesh, [Shard(1), Shard(0)])
        self.model.experts = nn.Parameter(experts)
        fully_shard(self.model, mesh=mesh["ep"], ignored_params={self.model.experts})
        self.optimizers = build_optimizer([self.model], optim)
        self.schedules = build_schedule(self.optimizers, optim, TOTAL_STEPS)
        self.loader, self.train_state = Cursor(), Cursor()
        parts = (self.optimizers, self.schedules, self.loader, self.train_state)
        recipe = Recipe(checkpoint=config, optim=optim)
        self.checkpointer = Checkpointer(recipe, folder, [self.model], *parts)

    def train(self, num_steps: int = 1) -> list[float]:
        """Take steps. Return, for each, one random number and the learning rate."""
        seen: list[float] = []
        for _ in range(num_steps):
            seen += [torch.rand(()).item(), self.schedules.lr]
            for parameter in self.model.parameters():
                assert isinstance(parameter, DTensor)
                gradient = torch.randn(parameter.shape, dtype=torch.float64)
                parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            self.optimizers.step()
            self.schedules.step()
            self.optimizers.zero_grad()
            self.model.expert_bias_E = self.model.expert_bias_E + torch.rand(4)
            for cursor in (self.loader, self.train_state):
                sample = cursor.state["sample"] + 1
                cursor.state = {"sample": sample, "order": f"after {sample}", "window": torch.full((2,), float(sample))}
        return seen

    def snapshot(self) -> dict[str, torch.Tensor]:
        """All state that a resumed run must reproduce, as full tensors."""
        states = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        states |= {
            name: value for name, value in self.optimizers.state_dict().items() if isinstance(value, torch.Tensor)
        }
        for name, cursor in {"loader": self.loader, "train_state": self.train_state}.items():
            states[f"{name}.sample"] = torch.tensor(cursor.state["sample"])
            states[f"{name}.order"] = torch.tensor(list(cursor.state["order"].encode()))
            states[f"{name}.window"] = cursor.state["window"]
        states["rng"] = torch.get_rng_state()
        return {n: v.full_tensor() if isinstance(v, DTensor) else v.detach().clone() for n, v in states.items()}


def straight(folder: Path) -> None:
    """Train to the end with a save at step 3. Write what `train` returned, and snapshots at step 3 and at the end."""
    case = CheckpointCase(folder / "run", CheckpointConfig())
    assert not case.checkpointer.load()
    seen = case.train(3)
    case.checkpointer.save(3)
    _write_snapshot(folder, "at_3", case)
    seen += case.train(TOTAL_STEPS - 3)
    _write_snapshot(folder, "at_end", case)
    case.checkpointer.close()
    (folder / "seen.json").write_text(json.dumps(seen))


def background(folder: Path) -> None:
    """Save asynchronously. The write starts only after training has changed every tensor."""
    write = FileSystemWriter.write_data
    trained = Event()

    def write_late(self: Any, *args: Any) -> Any:
        trained.wait(60)  # a synchronous save would finish before the training, and the test would fail
        return write(self, *args)

    FileSystemWriter.write_data = write_late  # type: ignore[method-assign]
    case = CheckpointCase(folder / "background", CheckpointConfig(is_async=True))
    case.train(2)
    case.checkpointer.save(2)
    _write_snapshot(folder, "background_at_2", case)
    case.train(2)
    complete = case.checkpointer.folders.complete_steps()
    (folder / f"complete_while_saving.{dist.get_rank()}.json").write_text(json.dumps(complete))
    trained.set()
    case.checkpointer.close()
    FileSystemWriter.write_data = write  # type: ignore[method-assign]


def resume(folder: Path) -> None:
    """Resume from the newest checkpoint, train to the end and write snapshots."""
    case = CheckpointCase(folder / "run", CheckpointConfig())
    assert case.checkpointer.load()
    _write_snapshot(folder, "resumed", case)
    case.train(TOTAL_STEPS - case.train_state.state["sample"])
    _write_snapshot(folder, "resumed_at_end", case)
    case.checkpointer.close()


def die_while_saving(folder: Path, owner: type, method: str) -> None:
    """Save steps 1 to 3. Kill the process when the fourth save calls a method."""
    case = CheckpointCase(folder / "killed", CheckpointConfig())
    for step in (1, 2, 3):
        case.train()
        case.checkpointer.save(step)
    _write_snapshot(folder, "killed_at_3", case)
    case.train()
    setattr(owner, method, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    case.checkpointer.save(4)


def _write_snapshot(folder: Path, name: str, case: CheckpointCase) -> None:
    snapshot = case.snapshot()
    if dist.get_rank() == 0:
        torch.save(snapshot, folder / f"{name}.pt")


PHASES = {
    "straight": straight,
    "background": background,
    "resume": resume,
    "die_before_metadata": partial(die_while_saving, owner=FileSystemWriter, method="finish"),
    "die_before_manifest": partial(die_while_saving, owner=Manifest, method="write"),
    "die_after_manifest": partial(die_while_saving, owner=FileSystem, method="rename"),
}


def run_phases(folder: str, *names: str) -> None:
    """What a rank does in a folder, by names of PHASES."""
    for name in names:
        PHASES[name](Path(folder))
