"""Check that all ranks have one layout and run parts of one schedule. Otherwise collectives would wait for ever."""

import hashlib

import torch
import torch.distributed as dist

from titan_moe.plan.resolved import Resolved


def check_one_schedule(resolved: Resolved, device: torch.device) -> None:
    """Compare the sizes of all axes, the number of microbatches and the schedule of a recipe on all ranks, by a hash.

    A collective call of the world. It comes before any group is made, because that waits for all ranks too, and without
    a pipeline as well, because other ranks may have one.

    Raises: RuntimeError that names the ranks with another layout or schedule than the first one's.
    """
    listed = resolved.actions if resolved.sizes.pp > 1 else []
    schedule = [[tuple(action) for action in actions] for actions in listed]
    compared = resolved.sizes, resolved.num_microbatches, schedule
    digest = hashlib.sha256(repr(compared).encode()).digest()
    own = torch.tensor([int.from_bytes(digest[:8], "big", signed=True)], device=device)
    hashes = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(hashes, own)
    numbers = [int(number) for number in hashes]
    others = [rank for rank, number in enumerate(numbers) if number != numbers[0]]
    if others:
        ranks = ", ".join(map(str, others))
        raise RuntimeError(
            f"the layout or the schedule of ranks {ranks} is not that of rank 0, so exchanges would wait for ever; "
            "start all ranks with one recipe, environment and version of titan_moe"
        )
