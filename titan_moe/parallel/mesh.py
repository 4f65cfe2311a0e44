"""Parallel folding (arXiv:2504.14960): two views of the same ranks.

Dense `(pp, dp_replicate, dp_shard, cp, tp)` for attention and everything else, expert `(pp, edp_replicate, edp, ep,
etp)` for the routed experts. Only `pp` must agree; moving from one view to the other is a reshape, no message.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_moe.config.parallel import ParallelSizes


@dataclass(frozen=True)
class Meshes:
    """The meshes that transforms use."""

    sizes: ParallelSizes
    dense: DeviceMesh
    """All ranks, axes pp, dp_replicate, dp_shard, cp, tp."""
    expert: DeviceMesh
    """All ranks, axes pp, edp_replicate, edp, ep, etp."""

    @property
    def dense_fsdp(self) -> DeviceMesh:
        """Where dense parameters are sharded, and replicated if there are replicas (HSDP)."""
        return self.dense["dp_shard"] if self.sizes.dp_replicate == 1 else self.dense["dp_replicate", "dp_shard"]

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """Where expert parameters are sharded, and replicated if there are replicas."""
        return self.expert["edp"] if self.sizes.dp_replicate == 1 else self.expert["edp_replicate", "edp"]

    @property
    def ep(self) -> DeviceMesh:
        """The ranks that share a layer's experts."""
        return self.expert["ep"]

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that bring distinct tokens: all of them, while pp, cp and tp are one."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    @property
    def data_rank(self) -> int:
        """Which slice of every step's sequences this rank takes."""
        return dist.get_rank(self.data_group)


def build_meshes(sizes: ParallelSizes, device: torch.device) -> Meshes:
    """Fold the world into its two views; the process group must exist."""
    world = init_device_mesh(device.type, (sizes.world,), mesh_dim_names=("world",))
    dense = (sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.cp, sizes.tp)
    expert = (sizes.pp, sizes.dp_replicate, sizes.edp, sizes.ep, sizes.etp)
    return Meshes(
        sizes,
        world._unflatten(0, dense, ("pp", "dp_replicate", "dp_shard", "cp", "tp")),
        world._unflatten(0, expert, ("pp", "edp_replicate", "edp", "ep", "etp")),
    )
