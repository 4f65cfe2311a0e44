"""Rules of low-rank adapters."""

from collections.abc import Iterator

from titan_moe.config.adapter import KINDS, SCALED_BLOCK, AdapterConfig, AdapterOfKind, kind_of_linear
from titan_moe.config.gemms import has_native_experts
from titan_moe.config.kernels import GROUPED_MM_STRIDE_BYTES
from titan_moe.config.model import ModelConfig
from titan_moe.config.parallel import resolve
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import Recipe, expert_hidden_size
from titan_moe.config.rules.rule import Problem, is_no_divisor, row, rule, rules_in
from titan_moe.config.schema import in_toml
from titan_moe.config.trainable import passes_of, rows_in_order

REGIONS = {"dense": "dense layers", "shared": "shared experts", "experts": "routed experts"}


def _adapts_experts(recipe: Recipe) -> bool:
    return recipe.model.adapter.has("experts") and recipe.model.num_moe_layers > 0


@rule("an option without effect hides a mistake", "model.adapter.rank alpha use_rslora targets base")
def adapter_options_need_a_rank(recipe: Recipe, world_size: int) -> Iterator[str]:
    adapter = recipe.model.adapter
    if not adapter.rank:
        for name in ("alpha", "use_rslora", "targets", "base"):
            if (value := getattr(adapter, name)) != getattr(AdapterConfig, name):
                yield f"model.adapter.{name} = {in_toml(value)} needs adapters, but model.adapter.rank = 0"
    for kind in KINDS:
        if getattr(adapter, kind) != AdapterOfKind() and not adapter.has(kind):
            yield Problem(f"[model.adapter.{kind}] needs model.adapter.rank above 0, and targets with {in_toml(kind)}")


@rule("each target is a kind of modules that the model has", "model.adapter.targets")
def targets_are_there(recipe: Recipe, world_size: int) -> Iterator[str]:
    model, adapter = recipe.model, recipe.model.adapter
    if not adapter.rank:
        return
    if not adapter.targets:
        yield "model.adapter.targets = [] leaves model.adapter.rank nothing to adapt"
    dense, moe_layers = model.layers_by_kind
    lacking = {"dense": not dense, "experts": not moe_layers}
    lacking["shared"] = not moe_layers or not model.moe.shared_ffn_hidden_size
    if twice := [target for target in KINDS if adapter.targets.count(target) > 1]:
        yield f"model.adapter.targets names {', '.join(map(in_toml, twice))} more than once"
    for target in adapter.targets:
        if target not in KINDS:
            yield f'model.adapter.targets: "{target}" is none of {", ".join(map(in_toml, KINDS))}'
        elif lacking.get(target):
            yield f'model.adapter.targets: the model has no {REGIONS[target]} for "{target}"'


def _freezes_experts(recipe: Recipe) -> bool:
    return _adapts_experts(recipe) or (recipe.model.adapter.has_codes and recipe.model.num_moe_layers > 0)


def _trains_experts(recipe: Recipe) -> bool:
    """Whether weights of routed experts train, beside adapters or not."""
    passes = passes_of(recipe.model, recipe.optim.trainable)
    of_experts = (at for at in rows_in_order(recipe.model) if at[0].region == "experts" and not at[0].is_adapter)
    return any(passes[row.path, layer].share > 0 for row, layer in of_experts)


def _freezes_matrices(recipe: Recipe) -> bool:
    """Whether weights of blocks that can be codes do not train."""
    model = recipe.model
    passes = passes_of(model, recipe.optim.trainable)
    of_blocks = ((each, layer) for each, layer in rows_in_order(model) if layer is not None and not each.is_adapter)
    return any(
        passes[each.path, layer].share < 1
        for each, layer in of_blocks
        if each.part == "experts" or (each.part is not None and kind_of_linear(each.path))
    )


adapters_are_of_the_default_class = row(
    "adapters stand beside modules of the default class, which they know by name",
    lambda r: r.model.adapter.rank > 0 and r.model.class_ != ModelConfig.class_,
    "{model.adapter.rank} needs the default model.class",
    "model.adapter.rank",
)


@rule(
    "fused experts of frozen weights have rows that this rank has, no biases, and no gradients of weights",
    "perf.kernels perf.override.experts parallel.dispatcher overlap model.adapter.targets base optim.trainable",
)
def frozen_experts_are_fused_by_themselves(recipe: Recipe, world_size: int) -> Iterator[str]:
    if not _freezes_experts(recipe):
        return
    what = 'model.adapter.targets has "experts"'
    if not _adapts_experts(recipe):
        what = f"model.adapter.base = {in_toml(recipe.model.adapter.base)}"
    if recipe.parallel.overlap == "tile":
        yield f'parallel.overlap = "tile" has weights that train, and {what}'
    if recipe.perf.chosen_kernels.experts != "fused":
        return
    if recipe.parallel.facts.shares_memory_of_ep and recipe.parallel.ep > 1:
        yield f"fused experts share memory with parallel.dispatcher = {in_toml(recipe.parallel.dispatcher)}, and {what}"
    if recipe.model.moe.expert_mlp_bias:
        yield f"fused experts with model.moe.expert_mlp_bias = true have weights that train, and {what}"
    if _adapts_experts(recipe) and _trains_experts(recipe):
        trainable = in_toml(recipe.optim.trainable)
        yield f"fused experts compute no gradient of weights beside adapters: optim.trainable = {trainable}, and {what}"


adapted_experts_multiply_in_compute = row(
    "native kernels of experts have no factors beside codes",
    lambda r: _adapts_experts(r) and has_native_experts(r),
    'model.adapter.targets with "experts" needs experts in compute\'s dtype, not {precision.experts} of '
    "{precision.format}",
    "precision.experts model.adapter.targets",
)
adapted_experts_have_no_clones = row(
    "factors are not sent with the weights of clones",
    lambda r: _adapts_experts(r) and r.parallel.expert_clones != "off",
    '{parallel.expert_clones} has no adapters, and model.adapter.targets has "experts"',
    "parallel.expert_clones",
)
codes_are_of_frozen_weights = row(
    "a weight that trains is none, and adapters are beside it",
    lambda r: r.model.adapter.has_codes and r.model.class_ == ModelConfig.class_ and not _freezes_matrices(r),
    "{model.adapter.base} has no effect: {optim.trainable} trains every weight that could be codes",
    "model.adapter.base optim.trainable",
)
codes_are_multiplied_in_compute = row(
    "codes of the base become numbers of compute's dtype for each product",
    lambda r: r.model.adapter.has_codes and bool(r.precision.formats),
    "{model.adapter.base} needs GEMMs in compute's dtype, not {precision.format}, {precision.experts}, "
    "{precision.linears}",
    "model.adapter.base precision.format experts linears",
)
codes_are_whole_matrices = row(
    "a rank of tp or etp has a part of a row, which has one scale",
    lambda r: r.model.adapter.has_codes and max(r.parallel.tp, r.parallel.etp) > 1,
    "{model.adapter.base} needs whole matrices on a rank, not {parallel.tp} and {parallel.etp}",
    "model.adapter.base parallel.tp etp",
)
codes_have_no_clones = row(
    "clones are of weights in compute's dtype",
    lambda r: r.model.adapter.has_codes and r.parallel.expert_clones != "off",
    "{parallel.expert_clones} has no codes, and {model.adapter.base}",
    "parallel.expert_clones model.adapter.base",
)


@rule("FSDP would shard codes, and gather them as numbers of compute's dtype", "model.adapter.base parallel.ep")
def codes_of_experts_are_whole(recipe: Recipe, world_size: int) -> Iterator[str]:
    if not recipe.model.adapter.has_codes or not recipe.model.num_moe_layers:
        return
    try:
        edp = resolve(recipe.parallel, world_size).edp
    except ValueError:  # another rule says so
        return
    if edp > 1:
        base, p = in_toml(recipe.model.adapter.base), recipe.parallel
        hint = f"parallel.dp_replicate = {p.dp_replicate * edp}"
        hint += f', or parallel.ep = {p.ep * edp} with parallel.dispatcher = "alltoall"'
        yield Problem(f"model.adapter.base = {base} needs experts that FSDP does not shard, and edp = {edp}", hint=hint)


@rule(
    "ranks of cp read the rows of own heads of a matrix in codes, with the scales of their blocks",
    "model.adapter.base parallel.cp cp_kind",
)
def own_heads_have_whole_blocks(recipe: Recipe, world_size: int) -> Iterator[str]:
    a, p, base = recipe.model.attention, recipe.parallel, recipe.model.adapter.base
    if a.kind != "mla" or p.cp == 1 or p.cp_kind != "ulysses" or not recipe.model.adapter.has_codes:
        return
    own = a.num_heads // max(p.cp, 1) * (a.qk_nope_head_dim + a.v_head_dim)
    if base == "fp8_blockwise" and own % SCALED_BLOCK:
        problem = f"own heads of parallel.cp = {p.cp} have {own} rows of keys and values, no multiple of {SCALED_BLOCK}"
        yield f'model.adapter.base = {in_toml(base)} with model.attention.kind = "mla": {problem}'


adapter_files_need_adapters = row(
    "a model without adapters has nothing to load, or to write",
    lambda r: not r.model.adapter.is_used and (r.checkpoint.load_adapter or r.checkpoint.export_adapter_at_end),
    "{checkpoint.load_adapter} and {checkpoint.export_adapter_at_end} need {model.adapter.rank} above 0",
)
adapter_is_exported_from_a_checkpoint = row(
    "the files are made of the last checkpoint",
    lambda r: r.checkpoint.export_adapter_at_end and not r.checkpoint.save_last_step,
    "{checkpoint.export_adapter_at_end} needs a checkpoint of the last step, not {checkpoint.save_last_step}",
)
adapters_do_not_overlap_tp = row(
    "layers that exchange tokens in their GEMMs hide them from adapters",
    lambda r: r.model.adapter.is_used and r.parallel.tp > 1 and r.parallel.tp_comm_overlap,
    "{parallel.tp_comm_overlap} has no adapters",
    "parallel.tp_comm_overlap",
)


@rule("the adapter of a shared key/value head would be on several ranks in part", "parallel.tp")
def adapted_heads_are_not_shared(recipe: Recipe, world_size: int) -> Iterator[str]:
    a, tp = recipe.model.attention, recipe.parallel.tp
    if recipe.model.adapter.has("attention") and a.kind == "gqa" and tp > a.num_kv_heads:
        yield f"parallel.tp = {tp} exceeds model.attention.num_kv_heads = {a.num_kv_heads}, with adapters of attention"


@rule(
    "FSDP shards the factors of an expert along its hidden width over edp ranks, in equal parts",
    "parallel.ep dp_replicate model.moe.ffn_hidden_size",
)
def edp_divides_adapted_width(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, hidden = recipe.parallel, expert_hidden_size(recipe)
    edp = world_size // max(p.pp * p.dp_replicate * p.ep * p.etp, 1)
    if _adapts_experts(recipe) and is_no_divisor(edp, hidden):
        width = f"model.moe.ffn_hidden_size = {recipe.model.moe.ffn_hidden_size}"
        problem = f"edp = {edp} does not divide the hidden width {hidden} of a rank, with {width}"
        yield Problem(problem, steps=[edp * p.etp])


@rule("grouped GEMMs need rows of multiples of 16 bytes", "model.adapter.rank model.adapter.experts.rank perf.kernels")
def adapted_rank_is_aligned(recipe: Recipe, world_size: int) -> Iterator[str]:
    rank, element = recipe.model.adapter.rank_of("experts"), BYTES_OF_DTYPE[recipe.precision.compute]
    if _adapts_experts(recipe) and recipe.perf.chosen_kernels.experts != "reference":
        step = GROUPED_MM_STRIDE_BYTES // element
        if step and rank % step:
            problem = f"the rank {rank} of adapters of routed experts is no multiple of {step}"
            yield Problem(f"model.adapter: {problem}", steps=[step])


ADAPTER_RULES = rules_in(globals())
