"""Checkpoint the state of torch's random generators, for resumes on other devices and numbers of ranks too."""

import base64
import json
from typing import Any

import torch
import torch.distributed as dist


class RngState:
    """The default generators of the host and of the device, of all ranks, in one string.

    A string and not tensors: loading compares tensor shapes and would fail for another number of ranks or another
    device type. A rank loads the state of its own number, modulo the number of saved ranks. A device of another type
    keeps the state of its seed.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.device = device
        self.group = group

    def state_dict(self) -> dict[str, Any]:
        """Gather the states of all ranks. Collective over `group`."""
        own = {"cpu": _to_text(torch.get_rng_state())}
        if self.device.type != "cpu":
            own[self.device.type] = _to_text(torch.get_device_module(self.device).get_rng_state(self.device))
        ranks: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(ranks, own, group=self.group)
        return {"ranks": json.dumps(ranks)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ranks = json.loads(state_dict["ranks"])
        saved = ranks[dist.get_rank(self.group) % len(ranks)]
        torch.set_rng_state(_to_state(saved["cpu"]))
        if self.device.type != "cpu" and self.device.type in saved:
            torch.get_device_module(self.device).set_rng_state(_to_state(saved[self.device.type]), self.device)


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def _to_state(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
