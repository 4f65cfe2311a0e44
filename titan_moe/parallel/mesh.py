"""Parallel folding (arXiv:2504.14960): two views of the same ranks.

Dense `(pp, dp_replicate, dp_shard, cp, tp)` for attention and everything else, expert `(pp, edp_replicate, edp, ep,
etp)` for the routed experts. Only `pp` must agree. From one view to the other is a reshape, no communication.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_moe.config.parallel import ParallelSizes


@dataclass(frozen=True)
class Meshes:
    """The meshes that transforms use."""

    sizes: ParallelSizes
    dense: DeviceMesh  # all ranks, axes pp, dp_replicate, dp_shard, cp, tp
    expert: DeviceMesh  # all ranks, axes pp, edp_replicate, edp, ep, etp
    data_group: dist.ProcessGroup
    """The ranks of dp_replicate, dp_shard and cp, which have every token of a step once: sums labels."""
    loss_group: dist.ProcessGroup
    """The same of all stages: sums losses, which the last stage has, and balancing losses, which each has of its
    layers."""
    sequence_group: dist.ProcessGroup
    """The ranks of cp and tp, which have parts of the same sequences: sums the balancing losses of sequences."""
    stage_group: dist.ProcessGroup
    """The ranks of a pp coordinate, which compute the same layers on different tokens: sums expert counts."""

    @property
    def dense_fsdp(self) -> DeviceMesh:
        """Shards dense parameters over dp_shard and cp, and replicates them if there are replicas (HSDP)."""
        long = tuple(axis for axis in ("dp_shard", "cp") if self.dense[axis].size() > 1)
        shard = self.dense[long]._flatten() if len(long) > 1 else self.dense[long[0] if long else "dp_shard"]
        replicate = self.dense["dp_replicate"]
        return shard if self.sizes.dp_replicate == 1 else DeviceMesh._concatenate([replicate, shard])

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """Shards expert parameters, and replicates them if there are replicas."""
        return self.expert["edp"] if self.sizes.dp_replicate == 1 else self.expert["edp_replicate", "edp"]

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """The ranks that have the stages of a pipeline: sends activations and their gradients."""
        return self.dense["pp"].get_group()

    @property
    def ep(self) -> DeviceMesh:
        """The ranks that share a layer's experts."""
        return self.expert["ep"]

    @property
    def etp(self) -> DeviceMesh:
        """The ranks that share the hidden width of the same experts."""
        return self.expert["etp"]

    @property
    def expert_shares(self) -> DeviceMesh:
        """The ranks that have a layer's experts once together: of axis ep, and of etp if it splits them."""
        return self.ep if self.sizes.etp == 1 else self.expert["ep", "etp"]

    @property
    def world_group(self) -> dist.ProcessGroup:
        """All ranks: sums the gradient norm and the overflow flag of a step."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    @property
    def data_rank(self) -> int:
        """Which slice of a step's sequences this rank reads; ranks that differ only in cp, tp or pp read the same."""
        replicate, shard = (self.dense.get_local_rank(axis) for axis in ("dp_replicate", "dp_shard"))
        return replicate * self.sizes.dp_shard + shard

    @property
    def is_first_of_slice(self) -> bool:
        """Whether this rank is the first of those that read the same slice."""
        return not any(self.dense.get_local_rank(axis) for axis in ("pp", "cp", "tp"))

    @property
    def context_rank(self) -> int:
        """Which part of them this rank reads."""
        return self.dense.get_local_rank("cp")


def build_meshes(sizes: ParallelSizes, device: torch.device) -> Meshes:
    """Build both views of the world; the process group must exist."""
    world = init_device_mesh(device.type, (sizes.world,), mesh_dim_names=("world",))
    dense_sizes = (sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.cp, sizes.tp)
    expert_sizes = (sizes.pp, sizes.dp_replicate, sizes.edp, sizes.ep, sizes.etp)
    dense = world._unflatten(0, dense_sizes, ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    expert = world._unflatten(0, expert_sizes, ("pp", "edp_replicate", "edp", "ep", "etp"))
    data, stage = ("dp_replicate", "dp_shard", "cp"), ("dp_replicate", "dp_shard", "cp", "tp")
    groups = (_group(dense, axes) for axes in (data, ("pp", *data), ("cp", "tp"), stage))
    return Meshes(sizes, dense, expert, *groups)


def _group(mesh: DeviceMesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    """The ranks that differ from this one in these axes only.

    A communicator costs memory on every GPU, so the groups of the world and of single axes are reused.
    """
    long = tuple(axis for axis in axes if mesh[axis].size() > 1)
    if math.prod(mesh[axis].size() for axis in long) == mesh.size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if len(long) > 1:
        return mesh[long]._flatten().get_group()
    return mesh.get_group(long[0] if long else axes[0])
