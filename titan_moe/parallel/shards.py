"""The shard of a parameter on this rank."""

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_moe.layers.init import Slice, unsharded_slice
from titan_moe.optim.state import local


def local_slice(parameter: Tensor) -> Slice:
    """The local tensor of a parameter and its offsets in the full one."""
    if not isinstance(parameter, DTensor):
        return unsharded_slice(parameter)
    offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)[1]
    return Slice(local(parameter), tuple(offsets))
