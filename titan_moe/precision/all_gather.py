"""All-gather of weights as fp8 codes: FSDP2 gathers half the bytes, and no layer rounds its gathered weight again.

A shard is rounded with the scale of the whole weight, known after an all-reduce of one number a weight. So only
tensorwise scales can be gathered. torchao does this with a tensor subclass as parameter. Here parameters stay plain:
optimizers and checkpoints see what they see without fp8, and FSDP2 finds the two hooks on the local shards.
"""

import logging

from torch import nn
from torch.distributed.tensor import DTensor

logger = logging.getLogger("titan_moe")


def gather_in_fp8(model: nn.Module) -> list[str]:
    """Let FSDP2 gather the weights of `Float8Linear` layers as codes, and return the names of these layers.

    Call it on a sharded model with memory, before its first forward: FSDP2 looks for hooks then. A weight that FSDP2
    pads, because the ranks do not divide its rows, is gathered in compute's dtype; the log says so.
    """
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    gathered, padded = [], []
    for name, module in model.named_modules():
        if not isinstance(module, Float8Linear) or not isinstance(module.weight, DTensor):
            continue
        mesh, shard = module.weight.device_mesh, module.weight._local_tensor
        if module.weight.shape[0] % mesh.size(mesh.ndim - 1):
            padded.append(name)
            continue
        hooks = WeightWithDynamicFloat8CastTensor(
            shard.detach(), module.linear_mm_config, module.config.cast_config_weight.target_dtype
        )
        shard.fsdp_pre_all_gather = hooks.fsdp_pre_all_gather
        shard.fsdp_post_all_gather = hooks.fsdp_post_all_gather
        gathered.append(name)
    if padded:
        logger.warning("precision.all_gather: not in fp8, because ranks do not divide them: %s", ", ".join(padded))
    return gathered
