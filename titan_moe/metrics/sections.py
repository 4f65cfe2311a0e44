"""The sections that charts of metrics lie in, in TensorBoard and Weights & Biases.

Both show sections in the order of the alphabet: the loss is in the first one, the losses of validations in the last.
"""

from collections.abc import Iterator, Mapping
from typing import Any

SECTION_OF = {
    name: section
    for section, names in {
        "moe": "aux_loss expert_load idle_experts router_entropy bias_spread overload busiest_rank "
        "capacity expert_clones dropped_share",
        "optim": "lr grad_norm max_attention_logit clipped_heads",
        "progress": "tokens_seen epoch bad_rows",
        "speed": "tokens_per_second_per_gpu tflops_per_gpu mfu step_ms memory_gib",
        "steps": "skipped_steps rerun_steps rerun_share spikes graph_recordings",
    }.items()
    for name in names.split()
}
"""Metric -> section. One without an entry has a section of its own name."""
LOADS = "moe/loads"
"""The image of the loads of experts."""


def charted(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by chart: `section/name`, and `section/name/member` of a nested record. Other values
    (None, strings, booleans) are skipped."""
    charts = {f"{SECTION_OF[name]}/{name}" if name in SECTION_OF else name: value for name, value in record.items()}
    return dict(_numbers({name: value for name, value in charts.items() if name != "step"}))


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + name, value
