"""The results of bench_train.py as rows of a Markdown table for tools/results."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_moe.config import Recipe
from titan_moe.config.clones import num_clones, resolve_clones
from titan_moe.config.recipe import microbatch_tokens, num_microbatches
from titan_moe.plan.choice.hardware import find_hardware
from titan_moe.plan.cost.count import training_flops_per_token
from titan_moe.plan.pipeline.describe import simulate_step
from titan_moe.plan.resolved import Resolved

FIGURES = ("tokens/s/GPU", "of the first", "of pp 1 less bubble", "TF", "MFU", "step ms", "peak GiB")
FACTS = (
    "layers",
    "tokens a microbatch",
    "microbatches",
    "pipeline",
    "recompute",
    "optimizer",
    "routing",
    "kernels",
    "dispatcher",
    "clones",
    "overlap",
    "CUDA graph",
)
LOADS = "load of expert / rank"
NOTES = "notes"
COLUMNS = ("run", *FIGURES, *FACTS, LOADS, NOTES)
NOTHING = "–"


@dataclass(frozen=True)
class Row:
    """A candidate and its result."""

    name: str
    group: str
    """Rows of one group are compared with its first row that has figures."""
    result: dict[str, Any]
    facts: dict[str, str] = field(default_factory=dict)
    """The columns of `FACTS`; empty if the recipe is invalid."""
    flops_per_token: float = 0.0
    bubble_share: float | None = None
    """Of a pipeline of this package, computed; 0 without one, None for a peer."""

    @property
    def speed(self) -> float:
        """tokens/s/GPU; 0 after a failure."""
        return self.result.get("tokens_per_second_per_gpu", 0.0)


def facts_of(recipe: Recipe, num_ranks: int) -> dict[str, str]:
    """The settings that a figure of this package depends on."""
    p, train = recipe.precision, recipe.train
    graph = recipe.compile.cudagraph
    compiled = "not compiled" if recipe.compile.regional == "off" else "compiled"
    override = recipe.perf.override
    overridden = "" if override == type(override)() else ", some overridden"
    return {
        "layers": str(recipe.model.num_layers),
        "tokens a microbatch": f"{microbatch_tokens(recipe):,}",
        "microbatches": str(num_microbatches(recipe, num_ranks)),
        "pipeline": _pipeline(recipe, num_ranks),
        "recompute": ", ".join(recipe.memory.recompute) or "none",
        "optimizer": f"{recipe.optim.kind}; master {p.master}, reduce {p.reduce}, moments {p.moments_dtype}",
        "routing": train.forced_load if train.forces_load else f"natural ({recipe.data.source})",
        "kernels": f"{recipe.perf.kernels}{overridden}",
        "dispatcher": f"{recipe.parallel.dispatcher}, ep {recipe.parallel.ep}",
        "clones": str(num_clones(resolve_clones(recipe, num_ranks))),
        "overlap": recipe.parallel.overlap,
        "CUDA graph": f"{graph} ({compiled})",
    }


def peer_facts(recipe: Recipe, num_ranks: int, recompute: str) -> dict[str, str]:
    """The same for torchtitan's Trainer with the same number of tokens, in one microbatch without a pipeline."""
    train, p = recipe.train, recipe.parallel
    number = num_microbatches(recipe, num_ranks) if p.pp > 1 else 1
    return {
        "layers": str(recipe.model.num_layers),
        "tokens a microbatch": f"{p.pp * train.global_batch_sequences * train.seq_len_tokens // num_ranks // number:,}",
        "microbatches": str(number),
        "pipeline": f"{p.pp_schedule}, pp {p.pp}" if p.pp > 1 else NOTHING,
        "recompute": recompute,
        "optimizer": "torch; master fp32, reduce fp32, moments fp32",
        "routing": train.forced_load if train.forces_load else "natural (synthetic)",
        "kernels": "torchtitan",
        "dispatcher": f"torchtitan, ep {recipe.parallel.ep}",
        "overlap": "none",
        "CUDA graph": "off",
    }


def bubble_share(recipe: Recipe, num_ranks: int) -> float:
    """The share of a step in which pipeline ranks wait, computed from FLOPs; 0 without a pipeline."""
    return simulate_step(Resolved(recipe, num_ranks)).bubble_share if recipe.parallel.pp > 1 else 0.0


def _pipeline(recipe: Recipe, num_ranks: int) -> str:
    p = recipe.parallel
    if p.pp == 1:
        return NOTHING
    stages = f", vpp {p.vpp}" if p.vpp > 1 else ""
    return f"{p.pp_schedule}, pp {p.pp}{stages}, bubble {bubble_share(recipe, num_ranks):.1%}"


def flops_per_token(recipe: Recipe) -> float:
    """Model FLOPs of training per token. Causal attention is halved, recompute is not counted."""
    return float(training_flops_per_token(recipe.model, recipe.train.seq_len_tokens, recipe.optim.trainable))


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown. A failed candidate has a row without figures, and its error in the notes."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|" + "---|" * len(COLUMNS)
    for row in rows:
        alike = [other for other in rows if other.group == row.group and other.speed]
        cells = {"run": row.name, LOADS: _loads(row), NOTES: _notes(row), **row.facts, **_figures(row, alike)}
        yield f"| {' | '.join(cells.get(column, NOTHING).replace('|', '/') for column in COLUMNS)} |"


def section(rows: Sequence[Row], command: str, date: str, num_ranks: int, timing: str) -> str:
    """A section of RESULTS for one call, with date, device, command and table."""
    results = [row.result for row in rows if "device" in row.result]
    device, torch = (results[0]["device"], results[0]["torch"]) if results else ("an unknown device", "unknown")
    lines = [
        f"### {date}: whole steps, {num_ranks} × {device}",
        "",
        f"torch {torch}; {timing}.",
        "",
        f"    {command}",
        "",
        *table(rows),
    ]
    return "\n".join(lines) + "\n"


def append(path: Path, text: str) -> None:
    """Append a section to a file, after an empty line."""
    before = path.read_text(encoding="utf-8").rstrip("\n") if path.exists() else ""
    path.write_text(f"{before}\n\n{text}" if before else text, encoding="utf-8")


def _figures(row: Row, alike: Sequence[Row]) -> dict[str, str]:
    """The figures of a row beside those of its group."""
    if not row.speed:
        return {}
    first = alike[0]
    without = next((other for other in alike if other.bubble_share == 0), None)
    flops = row.speed * row.flops_per_token
    hardware = find_hardware(row.result.get("device", ""))
    return {
        "tokens/s/GPU": f"{row.speed:,.0f}",
        "of the first": f"{row.speed / first.speed:.2f}",
        "of pp 1 less bubble": f"{row.speed / (without.speed * (1 - row.bubble_share)):.2f}"
        if without and row.bubble_share
        else NOTHING,
        "TF": f"{flops / 1e12:.3g}",
        "MFU": f"{flops / hardware.bf16_flops:.1%}" if hardware else NOTHING,
        "step ms": f"{row.result['median_step_ms']:.1f}",
        "peak GiB": f"{row.result['peak_memory_gib']:.1f}",
    }


def _loads(row: Row) -> str:
    """Maximum over mean of experts and of ranks: mean and worst over layers and steps."""
    expert, rank = row.result.get("expert_load"), row.result.get("rank_load")
    if not expert or not rank:
        return NOTHING
    return f"{expert['mean']:.2f} / {rank['mean']:.2f}, worst {expert['worst']:.2f} / {rank['worst']:.2f}"


def _notes(row: Row) -> str:
    result, notes = row.result, []
    if "error" in result:
        notes.append(f"failed: {result['error']}")
    num_reruns, num_before = result.get("num_reruns", 0), result.get("num_warmup_reruns", 0)
    if num_reruns or num_before:
        notes.append(f"{num_reruns} of the timed steps rerun, {num_before} of the warm-up")
    if result.get("num_recordings"):
        notes.append(f"graphs recorded in the timed steps: {result['num_recordings']}; steps before them are launched")
    if result.get("num_skipped"):
        notes.append(f"{result['num_skipped']} steps skipped")
    if not result.get("is_finite", True):
        notes.append("the loss was not finite")
    return "; ".join(notes) or NOTHING
