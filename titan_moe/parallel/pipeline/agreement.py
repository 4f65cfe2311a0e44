"""Check that all ranks run parts of one schedule. With unequal lists of actions in an ep group, an exchange would wait
for ever."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from titan_moe.config import Recipe
from titan_moe.config.recipe import num_microbatches
from titan_moe.parallel.mesh import Meshes
from titan_moe.plan.pipeline.action import Entry
from titan_moe.plan.pipeline.schedules import entries_of


def check_one_schedule(recipe: Recipe, meshes: Meshes, device: torch.device) -> None:
    """Compare the schedule of a recipe on all ranks, once. A collective call where there is a pipeline."""
    p = recipe.parallel
    if p.pp > 1:
        entries = entries_of(p, num_microbatches(recipe, meshes.sizes.world))
        compare_schedules(entries, meshes.world_group, device)


def compare_schedules(entries: Sequence[Sequence[Entry]], group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare the lists of all pipeline ranks by a hash. A collective call of `group`.

    Raises: RuntimeError that names the ranks with another schedule than the first one's.
    """
    digest = hashlib.sha256(repr([[tuple(entry) for entry in of_rank] for of_rank in entries]).encode()).digest()
    own = torch.tensor([int.from_bytes(digest[:8], "big", signed=True)], device=device)
    hashes = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(hashes, own, group=group)
    numbers = [int(number) for number in hashes]
    others = [rank for rank, number in enumerate(numbers) if number != numbers[0]]
    if others:
        ranks = ", ".join(str(dist.get_global_rank(group, rank)) for rank in others)
        first = dist.get_global_rank(group, 0)
        raise RuntimeError(
            f"the pipeline's schedule of ranks {ranks} is not that of rank {first}, so exchanges would wait for ever; "
            "start all ranks with one recipe, environment and version of titan_moe"
        )
