"""What `titan-moe check` says as data: one object, with the same numbers."""

from typing import Any

from titan_moe.config.model import ModelConfig
from titan_moe.config.parallel import planning
from titan_moe.config.recipe import Recipe
from titan_moe.config.recompute import with_entries
from titan_moe.plan.choice.hardware import find_hardware, gpus_here
from titan_moe.plan.choice.kernels import as_run_on
from titan_moe.plan.choice.recompute import choose_recompute, is_auto
from titan_moe.plan.cost.count import count_parameters, training_flops_per_token
from titan_moe.plan.cost.memory import arena_bytes_per_rank
from titan_moe.plan.cost.rates import rates_of
from titan_moe.plan.cost.step_time import Prediction, predict
from titan_moe.plan.resolved import Resolved
from titan_moe.plan.search_report import FIELDS


@planning()
def check_data(recipe: Recipe, world_size: int, gpu: str | None = None) -> dict[str, Any]:
    """The report of a recipe that passed its rules, on a GPU, by default that of this machine, or H100. Memory and
    speed of runs on CPUs, and of a model class of the user's without a table, are null."""
    found: dict[str, Any] = {"name": recipe.model.name, "num_ranks": world_size, "breaches": []}
    device = gpu or next(iter(gpus_here()), "H100")
    hardware = find_hardware(device)
    recipe = as_run_on(recipe, world_size, hardware)
    if is_auto(recipe):
        is_known = hardware is not None and recipe.run.device != "cpu"
        entries = choose_recompute(recipe, world_size, hardware).entries if hardware and is_known else ()
        recipe = as_run_on(with_entries(recipe, entries), world_size, hardware)
    resolved = Resolved(recipe, world_size)
    found |= {"shape": _shape(resolved), "layout": {name: getattr(recipe.parallel, name) for name in FIELDS}}
    found["recompute"] = list(recipe.memory.recompute)
    is_counted = recipe.model.class_ == ModelConfig.class_ or bool(recipe.model.table)
    found["parameters"] = _parameters(recipe) if is_counted else None
    length, trainable = recipe.train.seq_len_tokens, recipe.optim.trainable
    found["flops_per_token"] = training_flops_per_token(recipe.model, length, trainable) if is_counted else None
    on_gpu = recipe.run.device != "cpu" and is_counted
    found["gpu"] = device if on_gpu else None
    found["memory_gib"] = _memory(resolved) if on_gpu else None
    found["limit_gib"] = round(hardware.free_gib(recipe.run.ranks_per_gpu), 2) if on_gpu and hardware else None
    rates = rates_of(device) if on_gpu and resolved.num_microbatches else None
    found["speed"] = _speed(predict(resolved, rates)) if rates else None
    return found


def _shape(resolved: Resolved) -> dict[str, Any]:
    m, train = resolved.recipe.model, resolved.recipe.train
    return {
        "layers": m.num_layers,
        "moe_layers": m.num_moe_layers,
        "mtp_blocks": m.mtp.num_layers,
        "hidden_size": m.hidden_size,
        "vocab_size": m.vocab_size,
        "experts": m.moe.num_experts if m.num_moe_layers else 0,
        "top_k": m.moe.top_k if m.num_moe_layers else 0,
        "hash_layers": len(m.moe.hash_layers),
        "seq_len_tokens": train.seq_len_tokens,
        "tokens_per_step": train.global_batch_sequences * train.seq_len_tokens,
        "microbatches": resolved.num_microbatches,
    }


def _parameters(recipe: Recipe) -> dict[str, int]:
    count = count_parameters(recipe.model)
    of_regions: dict[str, int] = {
        region: count[region] for region in sorted({module.region for module in count.modules})
    }
    return {"total": count.total, "active": count.active, **of_regions}


def _memory(resolved: Resolved) -> dict[str, float]:
    """GiB of the rank that has most: what is held, what exists in a step, the arena of rows, and the peak."""
    recipe, factor = resolved.recipe, resolved.usual_factor
    arena = 0
    if resolved.has_arena:
        arena = max(arena_bytes_per_rank(recipe, factor, part.slabs) for part in resolved.parts)
    sizes = {
        "states": resolved.state_bytes,
        "gathered": resolved.gathered_bytes,
        "arena": arena,
        "shared": resolved.shared_bytes,
        "on_host": resolved.parked_bytes,
        "peak": resolved.peak_bytes(factor) + resolved.outside_bytes,
    }
    return {name: round(size / 2**30, 3) for name, size in sizes.items()}


def _speed(found: Prediction) -> dict[str, Any]:
    return {
        "tokens_per_second_per_gpu": round(found.tokens_per_second),
        "mfu": round(found.mfu, 4),
        "step_ms": round(1e3 * found.seconds, 1),
        "bubble": round(found.bubble, 4),
        "exposed_messages": round(found.exposed_messages, 4),
        "by_data_sheet": not found.rates.is_measured,
        "parts_ms": {name: round(1e3 * seconds, 2) for name, seconds in found.parts.items()},
    }
