"""Rules about `[memory]`: what backward computes again, and what the host keeps for it."""

from collections.abc import Iterator

from titan_moe.config.arena import experts_of, has_arena
from titan_moe.config.model import ModelConfig
from titan_moe.config.offload import OFFLOADABLE, RECOMPUTED_INSTEAD, offload_of
from titan_moe.config.optimizers import OPTIMIZERS
from titan_moe.config.pipeline_schedules import SCHEDULES
from titan_moe.config.recipe import Recipe
from titan_moe.config.recompute import AUTO, NONE, RECOMPUTABLE, Recompute, parse_entry, recompute_of
from titan_moe.config.rules.rule import row, rule, rules_in
from titan_moe.config.schema import in_toml


@rule("an entry is a part of a block, and the layers that it is computed again in", "memory.recompute")
def recomputed_parts_are_known(recipe: Recipe, world_size: int) -> Iterator[str]:
    entries = recipe.memory.recompute
    for entry in entries:
        try:
            if entry not in (AUTO, NONE):
                parse_entry(entry, recipe.model.num_blocks)
            elif len(entries) > 1:
                yield f'memory.recompute = {in_toml(entries)}: "{entry}" stands alone'
        except ValueError as error:
            yield f'memory.recompute has "{entry}": {error}'


@rule("without it nothing would be computed again", "memory.recompute model.attention.kind model.attention.qk_norm")
def recomputed_parts_exist(recipe: Recipe, world_size: int) -> Iterator[str]:
    model, again = recipe.model, recompute_of(recipe)
    if model.class_ != ModelConfig.class_:
        return
    attention, of_moe = model.attention, frozenset(model.moe_layers)
    needs = {
        "qkv_rope": ("attention of kind gqa with qk_norm", attention.kind == "gqa" and attention.qk_norm),
        "mla_up": ("attention of kind mla", attention.kind == "mla"),
        "dense_mlp": ("dense layers among its own", bool(again.layers.get("dense_mlp", of_moe) - of_moe)),
        "shared_experts": (
            "layers with shared experts among its own",
            bool(model.moe.shared_ffn_hidden_size and again.layers.get("shared_experts", of_moe) & of_moe),
        ),
    }
    for name in ("expert_weights", "moe_act", "experts"):
        needs[name] = "layers with experts among its own", bool(again.of(name) & of_moe)
    for name in again.layers:
        need, is_met = needs.get(name, ("", True))
        if not is_met:
            yield f'memory.recompute has "{name}", which needs {need}, and this model has none'


@rule("a part is computed again once", "memory.recompute")
def recomputed_parts_are_apart(recipe: Recipe, world_size: int) -> Iterator[str]:
    again = recompute_of(recipe)
    blocks = again.layers.get("block", frozenset())
    if others := [name for name, layers in again.layers.items() if name != "block" and layers & blocks]:
        yield f'memory.recompute has "block" and, of the same layers, {", ".join(others)}, which blocks contain'
    if again.of("experts") & again.of("moe_act"):
        yield 'memory.recompute has "experts" and, of the same layers, "moe_act", which experts contain'


@rule(
    "rows of recomputed blocks lie in an arena for one layer",
    "memory.recompute parallel.dispatcher expert_rank_capacity_factor overlap",
)
def recomputed_blocks_are_all(recipe: Recipe, world_size: int) -> Iterator[str]:
    of_moe = recipe.model.moe_layers
    layers = recompute_of(recipe).of("block").intersection(of_moe)
    if 0 < len(layers) < len(of_moe) and has_arena(recipe, experts_of(recipe)):
        yield f'memory.recompute has "block" in {len(layers)} of {len(of_moe)} layers, whose rows lie in an arena'


@rule("blocks run in pieces, without their own forward", "memory.recompute parallel.overlap")
def pieces_are_not_recomputed(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.parallel.overlap == "microbatch":
        for name in _needing_whole_blocks(recompute_of(recipe)):
            yield f'parallel.overlap = "microbatch" runs blocks in pieces, not memory.recompute = "{name}"'


def _needing_whole_blocks(again: Recompute) -> list[str]:
    return [name for name in again.layers if name == "block" or RECOMPUTABLE[name].how == "outputs"]


@rule(
    "a split backward computes weight gradients later, as separate operations", "parallel.pp_schedule memory.recompute"
)
def split_backwards_repeat_outputs_alone(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.pp > 1 and SCHEDULES[p.pp_schedule].splits_backward:
        for name in recompute_of(recipe).layers:
            if RECOMPUTABLE[name].how != "outputs":
                yield (
                    f'parallel.pp_schedule = "{p.pp_schedule}" splits backwards, but memory.recompute = "{name}" needs '
                    "whole ones"
                )


states_are_parked_by_our_kernel = row(
    "parked states pass through the GPU in chunks, shard after shard",
    lambda r: r.memory.park != "none" and not OPTIMIZERS[r.optim.kind].parks,
    "{memory.park} has no {optim.kind}",
)
averages_follow_weights_on_the_gpu = row(
    "an average reads the whole master after each step",
    lambda r: r.memory.park == "states" and r.optim.ema_decay > 0,
    "{memory.park} with {optim.ema_decay}",
)
parked_states_exist = row(
    "an option without effect hides a mistake",
    lambda r: r.memory.park == "states" and not r.precision.has_split_masters,
    "{memory.park} parks what bf16 weights lack of their masters, which {precision.master} does not have",
)


@rule("an entry is a part of a block whose inputs the host keeps, and layers", "memory.offload")
def offloaded_parts_are_known(recipe: Recipe, world_size: int) -> Iterator[str]:
    for entry in recipe.memory.offload:
        try:
            parse_entry(entry, recipe.model.num_blocks, OFFLOADABLE)
        except ValueError as error:
            instead = RECOMPUTED_INSTEAD.get(entry.partition(":")[0])
            answer = f'its input stays on the GPU, memory.recompute = "{instead}" frees it' if instead else error
            yield f'memory.offload has "{entry}": {answer}'


@rule("what is computed again is not kept, and a repeated block has its input itself", "memory.offload recompute")
def offloaded_parts_are_kept(recipe: Recipe, world_size: int) -> Iterator[str]:
    again, gone = recompute_of(recipe), offload_of(recipe)
    for name, layers in gone.layers.items():
        for other in OFFLOADABLE[name].recomputed:
            if layers & again.of(other):
                yield f'memory.offload has "{name}" and, of the same layers, memory.recompute has "{other}"'


@rule("blocks run in pieces, without their own forward", "memory.offload parallel.overlap")
def pieces_are_not_offloaded(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.parallel.overlap == "microbatch" and offload_of(recipe).layers:
        entries = in_toml(recipe.memory.offload)
        yield f'parallel.overlap = "microbatch" runs blocks in pieces, not memory.offload = {entries}'


MEMORY_RULES = rules_in(globals())
