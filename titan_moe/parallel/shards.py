"""The shard of a parameter on this rank."""

from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_moe.layers.init import Slice, unsharded_slice
from titan_moe.parameters import local, shard_offsets


def local_slice(parameter: Tensor) -> Slice:
    """The local tensor of a parameter and its offsets in the full one."""
    if not isinstance(parameter, DTensor):
        return unsharded_slice(parameter)
    return Slice(local(parameter), shard_offsets(parameter))
