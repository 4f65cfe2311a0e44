"""The weights of a run as a checkpoint has them: masters in one part."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_moe.kernels.optim.split_master import merge_reference, store_split
from titan_moe.parameters import local, remainder_of
from titan_moe.titan.checkpoints import CurrentModelState


class MasterState(CurrentModelState):
    """The model's state, without the names of `left_out`, with fp32 numbers in host memory for split masters. On a GPU
    there may be no room for all of them. A checkpoint is that of a run with fp32 masters, and each loads the other's,
    bit for bit."""

    left_out: frozenset[str] = frozenset()
    """Frozen weights that another checkpoint has."""

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self.whole().items() if name not in self.left_out}

    @torch.no_grad()
    def whole(self) -> dict[str, Any]:
        """The same with all names."""
        state = super().state_dict()
        for name, parameter, remainder in self._split():
            wide = parameter.detach().float()
            master = merge_reference(local(parameter), local(remainder).to(parameter.device)).cpu()
            # not from_local: it moves the shard to the device of the mesh
            state[name] = DTensor(master, wide._spec, requires_grad=False) if isinstance(wide, DTensor) else master
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        masters = {name: state_dict[name] for name, *_ in self._split() if name in state_dict}
        super().load_state_dict({name: value for name, value in state_dict.items() if name not in masters})
        for name, parameter, remainder in self._split():
            if name in masters:
                store_split(local(parameter), local(remainder), local(masters[name]))

    def _split(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, weight and remainder of each parameter with a split master."""
        for part in self.model:
            for name, parameter in part.named_parameters(remove_duplicate=False):
                if (remainder := remainder_of(parameter)) is not None:
                    yield name, parameter, remainder
