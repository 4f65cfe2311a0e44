"""What has not won a measurement: an option, or a choice, that may be slower than the default, or was never timed.

`titan-moe check`, its `--explain` and the start of a run say so. An option that wins leaves the table.
"""

import json
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple


class Experimental(NamedTuple):
    """A value of a field."""

    key: str
    value: str | bool | int  # of a list, the name of an entry; of a number, the smallest that is meant
    reason: str
    """What is not measured, or by how much it did not win."""
    has_effect: Callable[[Any], bool] = lambda recipe: True
    """Whether a recipe that has the value uses it."""

    @property
    def setting(self) -> str:
        """As recipes write it."""
        return f"{self.key} = {json.dumps(self.value)}"


_UNTIMED_BETWEEN_NODES = "not timed on several nodes, which it is for"
_ON_CPUS_ALONE = "never run on GPUs"
_UNTIMED_GEMM = "neither its speed nor its losses are measured"
EXPERIMENTAL = (
    Experimental("parallel.dispatcher", "hierarchical", _UNTIMED_BETWEEN_NODES),
    Experimental("parallel.dispatcher", "hierarchical_symm_mem", _UNTIMED_BETWEEN_NODES),
    Experimental(
        "parallel.cp_kind",
        "ring",
        '1.4 % slower than "ulysses" on 2 GPUs, not timed on more',
        lambda recipe: recipe.parallel.cp > 1,
    ),
    Experimental(
        "parallel.overlap",
        "microbatch",
        'in pipelines of pp_schedule = "1f1b" or "interleaved_1f1b" not timed on GPUs',
        lambda recipe: recipe.parallel.pp > 1 and recipe.parallel.pp_schedule in ("1f1b", "interleaved_1f1b"),
    ),
    Experimental(
        "parallel.tp_comm_overlap",
        True,
        "1.2 % faster at most on 2 GPUs, not timed on more",
        lambda recipe: recipe.parallel.tp > 1,
    ),
    Experimental("model.attention.output_gate", "head", _ON_CPUS_ALONE),
    Experimental("model.attention.output_gate", "element", _ON_CPUS_ALONE),
    Experimental(
        "model.moe.group_score", "top_share_sum", _ON_CPUS_ALONE, lambda recipe: recipe.model.moe.num_groups > 1
    ),
    Experimental(
        "model.moe.drop_policy", "position", _ON_CPUS_ALONE, lambda recipe: recipe.model.moe.capacity_factor > 0
    ),
    Experimental(
        "model.moe.drop_over", "sequence", _ON_CPUS_ALONE, lambda recipe: recipe.model.moe.capacity_factor > 0
    ),
    Experimental("model.moe.pad_to_capacity", True, _ON_CPUS_ALONE),
    *(
        Experimental("model.adapter.targets", name, _ON_CPUS_ALONE, lambda recipe: recipe.model.adapter.rank > 0)
        for name in ("dense", "shared")
    ),
    Experimental("model.adapter.base", "fp8_blockwise", "not timed", lambda recipe: recipe.model.adapter.rank > 0),
    Experimental("model.mtp.repeats_layer", True, _ON_CPUS_ALONE, lambda recipe: recipe.model.mtp.num_depths > 1),
    Experimental("checkpoint.upcycle.granularity", 1, _ON_CPUS_ALONE),
    Experimental("memory.park", "moments", "not timed"),
    Experimental("memory.park", "states", "not timed"),
    Experimental("precision.gradients", "bf16", "its losses are not measured"),
    Experimental("precision.dgrad", "compute", _UNTIMED_GEMM, lambda recipe: bool(recipe.precision.formats)),
    Experimental("precision.wgrad", "compute", _UNTIMED_GEMM, lambda recipe: bool(recipe.precision.formats)),
    Experimental("memory.offload", "block", "4 % slower than recompute alone on 4 GPUs, with DeepSeek-V2-Lite"),
    *(Experimental("memory.offload", name, "not timed") for name in ("attention", "ffn_norm")),
)


def is_used(row: Experimental, recipe: Any) -> bool:
    """Whether a recipe has the value of a row, and uses it."""
    value = attrgetter(row.key)(recipe)
    if type(value) is tuple:
        has_value = row.value in [entry.partition(":")[0] for entry in value]
    else:
        has_value = value >= row.value if type(row.value) is int else value == row.value
    return has_value and row.has_effect(recipe)


def describe_experimental(recipe: Any) -> str:
    """What a recipe uses of the table, in one line; empty for nothing."""
    used = [row for row in EXPERIMENTAL if is_used(row, recipe)]
    said = (f"{_with_value(row, recipe).setting} ({row.reason})" for row in used)
    return f"EXPERIMENTAL: {'; '.join(said)}" if used else ""


def _with_value(row: Experimental, recipe: Any) -> Experimental:
    """A row of a number, with that of the recipe."""
    return row._replace(value=attrgetter(row.key)(recipe)) if type(row.value) is int else row
