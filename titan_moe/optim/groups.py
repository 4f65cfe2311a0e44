"""Sort parameters by what weight decay may touch."""

from collections.abc import Iterable
from typing import Any

from torch import nn


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters into optimizer groups: matrices decay, vectors do not.

    A norm's scale and a bias set a level that decay would only pull away from; everything with two or more dimensions
    is a matrix or a stack of them (expert weights are `[e, 2, F, D]` and `[e, D, F]`). The dimensions counted are the
    whole parameter's, also where this rank holds a shard of it. A group without members is left out.
    """
    parameters = list(parameters)
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
