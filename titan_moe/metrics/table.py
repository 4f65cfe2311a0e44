"""The metrics of a run: one line of `METRICS` adds a number to records, console and TensorBoard.

A metric with `measure` is measured by every step, on the device; the others are known to the host. Every rank measures
its own numbers, which are then reduced, unless they are of all ranks already.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config.arena import bounds_layers
from titan_moe.config.recipe import Recipe
from titan_moe.config.schema import counted
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.metrics.experts import mean_rank_load, share_entropy

Reduction = Literal["sum", "max", "total"]
"""Over the ranks that have a part of the loss, or over all ranks, of which tp ranks route different tokens."""
Record = Mapping[str, Any]
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "total": dist.ReduceOp.SUM}


class StepNumbers(NamedTuple):
    """What a step measures metrics from: scalars on the device, and what holds some."""

    loss: Tensor  # of this rank: a part of the sum
    aux_loss: Tensor  # the same of the balancing losses
    num_labels: Tensor  # of all ranks
    num_tokens: Tensor  # the same, with a label or not
    capacity: ExpertCapacity  # of this rank
    ep: int
    tokens_per_expert: dict[str, Tensor]  # of all ranks; empty while ranks measure their own numbers
    share_sums: Mapping[str, Tensor] = {}  # the same of each expert's share of the scores
    bias_spread: Callable[[Tensor], Tensor] = torch.zeros_like  # of this rank's routers, given the loss
    num_dropped: Callable[[Tensor], Tensor] = torch.zeros_like  # assignments of this rank's tokens, given the loss
    all_dropped: Tensor | None = None  # of all ranks; None until they are summed, and where nothing is dropped
    max_logit: Callable[[Tensor], Tensor] = torch.zeros_like  # of this rank's attention layers, given the loss
    num_clipped: Callable[[Tensor], Tensor] = torch.zeros_like  # query heads that QK-clip scales, one rank's of each
    mtp_K2: Tensor | None = None  # of this rank: the loss of each depth of multi-token prediction, and its label tokens


class Metric(NamedTuple):
    """A number of each step, or a dict of numbers."""

    name: str
    words: str | Callable[[Record], object] = ""
    """On the console: a format of the value, or a function of the record; nothing is said where they are empty."""
    measure: Callable[[StepNumbers], Tensor] | None = None
    reduction: Reduction | None = None
    when: Callable[[Recipe], bool] = lambda recipe: True
    """Whether runs of a recipe have it."""
    after: str = ""
    """On the console, the metric that its words follow; by default the one before."""
    is_recorded: bool = True


def _skipped(name: str, what: str, why: str = "") -> Callable[[Record], object]:
    return lambda record: record[name] and f"SKIPPED {counted(record[name], what)}{why}"


def _reruns(record: Record) -> object:
    num_steps = record["rerun_steps"]
    return num_steps and f"{counted(num_steps, 'step')} rerun ({record['rerun_share']:.1%})"


def _imbalance(step: StepNumbers) -> Tensor:
    """Load of the busiest ep rank over the mean, averaged over layers; tokens of clones count on the ranks that own the
    experts."""
    if not step.tokens_per_expert:
        return torch.ones_like(step.loss, dtype=torch.float32)
    return mean_rank_load(step.tokens_per_expert, step.ep).float()


def _has_experts(recipe: Recipe) -> bool:
    return recipe.model.num_moe_layers > 0


def _drops(recipe: Recipe) -> bool:
    return _has_experts(recipe) and recipe.model.moe.capacity_factor > 0


def _dropped_share(step: StepNumbers) -> Tensor:
    """Share of the assignments of all layers."""
    assert step.all_dropped is not None, "`num_dropped` is a metric of the same recipes"
    numbers = [count_E.sum() for count_E in step.tokens_per_expert.values()]
    return (step.all_dropped / sum(numbers, torch.zeros_like(numbers[0])).clamp(min=1)).float()


def _layer_overflowed(step: StepNumbers) -> Tensor:
    return step.capacity.layer_overflowed


def _moves_bias(recipe: Recipe) -> bool:
    return _has_experts(recipe) and recipe.model.moe.moves_bias


def _clips_qk(recipe: Recipe) -> bool:
    return recipe.optim.qk_clip.is_used


def _clipped(record: Record) -> object:
    return (number := record["clipped_heads"]) and f"{counted(number, 'head')} clipped"


SET_OF_VALIDATION = "validation_loss/"
"""Begins the name of the metric of one of `validation.sets`."""
EPOCH_OF_SOURCE = "epoch/"
"""Begins the name of the metric of a source of a mixture."""
MTP_LABELS = "mtp_labels/"
OF_DEPTH = "mtp_loss/"
"""Begins the name of the loss of a depth of multi-token prediction, a mean over the label tokens of that depth."""
METRICS = (
    Metric("loss", "loss {:.4f}", lambda step: step.loss, "sum"),
    Metric("aux_loss", lambda r: r["aux_loss"] and f"aux {r['aux_loss']:.2e}", lambda step: step.aux_loss, "sum"),
    Metric("has_overflowed", "", lambda step: step.capacity.invalidates_step, "max", is_recorded=False),
    Metric("has_overflowed_layer", "", _layer_overflowed, "max", when=bounds_layers, is_recorded=False),
    Metric("needed_factor", "", lambda step: step.capacity.needed_factor(), "max", is_recorded=False),
    Metric("imbalance", "", _imbalance, when=lambda recipe: recipe.parallel.has_clones, is_recorded=False),
    Metric("grad_norm", "norm {:.3f}"),  # before clipping
    Metric("lr", "lr {:.2e}"),
    Metric("tokens_seen"),
    Metric("epoch", "epoch {:.2f}", when=lambda recipe: recipe.data.source not in ("synthetic", "mixture")),
    Metric("tokens_per_second_per_gpu", "{:,.0f} tokens/s/{unit}"),
    Metric("tflops_per_gpu", "{:.3g} TFLOP/s"),
    Metric("mfu", "MFU {:.1%}"),
    Metric("step_ms", "{:.0f} ms", after="memory_gib"),
    Metric("memory_gib", "{:.2f} GiB"),
    Metric("expert_load", lambda r: r["expert_load"] and f"expert load {max(r['expert_load'].values()):.2f}"),
    Metric("idle_experts", lambda r: (n := r["idle_experts"].get("sum", 0)) and counted(n, "idle expert")),
    Metric("num_dropped", "", lambda step: step.num_dropped(step.loss), "total", when=_drops, is_recorded=False),
    Metric("dropped_share", lambda r: (s := r["dropped_share"]) and f"dropped {s:.2%}", _dropped_share, when=_drops),
    Metric("router_entropy", "", lambda step: share_entropy(step.share_sums), when=_has_experts),
    Metric("bias_spread", "", lambda step: step.bias_spread(step.loss), "max", when=_moves_bias),
    Metric("max_attention_logit", "max logit {:.1f}", lambda step: step.max_logit(step.loss), "max", when=_clips_qk),
    Metric("clipped_heads", _clipped, lambda step: step.num_clipped(step.loss), "total", when=_clips_qk),
    Metric("overload", "overload {[max]:.2f}"),
    Metric("busiest_rank"),
    Metric("skipped_steps", _skipped("skipped_steps", "step", ", where gradients were not finite")),
    Metric("rerun_steps", _reruns, after="bad_rows"),
    Metric("rerun_share"),
    Metric("spikes", _skipped("spikes", "spike")),
    Metric("graph_recordings", when=lambda recipe: recipe.compile.cudagraph != "off"),
    Metric("capacity"),
    Metric("expert_clones", when=lambda recipe: recipe.parallel.has_clones),
    Metric("bad_rows", _skipped("bad_rows", "bad row"), when=lambda recipe: recipe.data.bad_rows == "skip"),
    Metric("forced_load", lambda r: f"FORCED LOAD: {r['forced_load'].upper()}", when=lambda r: r.train.forces_load),
    Metric("validation_loss", "validation loss {:.4f}"),
)


def measured(recipe: Recipe) -> list[Metric]:
    """What the steps of a recipe measure."""
    return [metric for metric in METRICS if metric.measure is not None and metric.when(recipe)] + mtp_metrics(recipe)


def mtp_metrics(recipe: Recipe) -> list[Metric]:
    """The sums and numbers of label tokens of all depths of multi-token prediction, of which `finish_mtp` makes their
    losses."""

    def of(depth: int, part: int) -> Callable[[StepNumbers], Tensor]:
        return lambda step: step.loss.new_zeros(()) if step.mtp_K2 is None else step.mtp_K2[depth, part]

    depths = range(recipe.model.mtp.num_depths)
    sums = [Metric(f"{OF_DEPTH}{depth + 1}", "", of(depth, 0), "sum") for depth in depths]
    return sums + [Metric(f"{MTP_LABELS}{depth + 1}", "", of(depth, 1), "sum") for depth in depths]


def finish_mtp(metrics: dict[str, Tensor]) -> None:
    """Divide the losses of depths by their label tokens, once both are of all ranks. Both have one scale."""
    for name in [name for name in metrics if name.startswith(MTP_LABELS)]:
        number, depth = metrics.pop(name), OF_DEPTH + name.removeprefix(MTP_LABELS)
        metrics[depth] = torch.where(number > 0, metrics[depth] / number, 0.0)


def measure(
    metrics: Iterable[Metric], step: StepNumbers, groups: Mapping[Reduction, dist.ProcessGroup]
) -> dict[str, Tensor]:
    """Measure those with a reduction on this rank, and reduce them over `groups`: one message each."""
    reduced: dict[str, Tensor] = {}
    for reduction, group in groups.items():
        own = {m.name: m.measure(step) for m in metrics if m.measure is not None and m.reduction == reduction}
        if not own:
            continue
        dtype = {"sum": step.loss.dtype, "max": torch.float32, "total": torch.float64}[reduction]
        values = torch.stack([value.to(dtype) for value in own.values()])
        dist.all_reduce(values, OPS[reduction], group=group)
        reduced |= {name: value.to(own[name].dtype) for name, value in zip(own, values.unbind(), strict=True)}
    return reduced


def measure_of_all(metrics: Iterable[Metric], step: StepNumbers) -> dict[str, Tensor]:
    """Measure those without a reduction: from numbers of all ranks, once these are known."""
    return {m.name: m.measure(step) for m in metrics if m.measure is not None and m.reduction is None}


def record_of(step: int, known: Record, recipe: Recipe) -> dict[str, Any]:
    """The record of a step: what is known of it, in the order of the table."""
    recorded = [metric.name for metric in METRICS if metric.is_recorded and metric.when(recipe)]
    recorded += [EPOCH_OF_SOURCE + name for name in recipe.data.by_source() if name]
    recorded[1:1] = [f"{OF_DEPTH}{depth + 1}" for depth in range(recipe.model.mtp.num_depths)]
    recorded += [SET_OF_VALIDATION + name for name in recipe.validation.sets]
    return {"step": step} | {name: known[name] for name in recorded if name in known}


def words_of(record: Record, unit: str) -> list[str]:
    """A record in words for the console, without what is zero or unknown; `unit` is what a rank is."""
    places = {metric.name: place for place, metric in enumerate(METRICS)}
    in_order = sorted(METRICS, key=lambda metric: (places[metric.after or metric.name], bool(metric.after)))
    said = (
        metric.words.format(record[metric.name], unit=unit) if isinstance(metric.words, str) else metric.words(record)
        for metric in in_order
        if record.get(metric.name) is not None
    )
    sets = {name: loss for name, loss in record.items() if name.startswith(SET_OF_VALIDATION) and loss is not None}
    of_sets = [f"{name.removeprefix(SET_OF_VALIDATION)} {loss:.4f}" for name, loss in sets.items()]
    losses = [f"{value:.4f}" for name, value in record.items() if name.startswith(OF_DEPTH)]
    of_depths = [f"mtp {', '.join(losses)}"] if losses else []
    first, *others = [str(words) for words in said if words] or [""]
    return [*([first] if first else []), *of_depths, *others, *of_sets]
