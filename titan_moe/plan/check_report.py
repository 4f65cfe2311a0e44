"""The report of `titan-moe check`: shape, cost, meshes and kernels of a recipe."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, repeat

from titan_moe.config.arena import bounds_layers, why_no_arena
from titan_moe.config.clones import why_no_clones
from titan_moe.config.experimental import describe_experimental
from titan_moe.config.model import ModelConfig
from titan_moe.config.parallel import assumes_nodes, planning, ranks_of_a_node
from titan_moe.config.recipe import Recipe
from titan_moe.config.recompute import with_entries
from titan_moe.config.rules import RULES, check_rules
from titan_moe.config.rules.capture import step_can_be_captured
from titan_moe.config.run_length import step_tokens
from titan_moe.config.schema import counted, in_toml
from titan_moe.config.ways_out import Search
from titan_moe.plan.choice.formats import FASTER_FROM, choose_formats, describe_formats
from titan_moe.plan.choice.hardware import dotted, find_hardware, gpus_here
from titan_moe.plan.choice.kernel_table import read_tables
from titan_moe.plan.choice.kernels import FUSED_WINS, as_run_on, describe_kernels, resolve_kernels
from titan_moe.plan.choice.recompute import Choice, choose_recompute, is_auto
from titan_moe.plan.cost.count import ParameterCount, count_parameters, describe_trained, training_flops_per_token
from titan_moe.plan.cost.hugging_face import describe_weights
from titan_moe.plan.cost.links import describe_links
from titan_moe.plan.cost.memory import (
    arena_bytes_per_rank,
    replica_bytes_per_rank,
    table_bytes,
    temporary_bytes_per_rank,
)
from titan_moe.plan.cost.muon import describe_muon
from titan_moe.plan.cost.offload import copied_bytes, host_bytes
from titan_moe.plan.cost.replicated_grads import flat_copy_bytes, received_bytes, replicated_elements
from titan_moe.plan.data_report import describe_data
from titan_moe.plan.fit import warn_of_excess
from titan_moe.plan.pipeline.describe import describe_pipeline
from titan_moe.plan.resolved import Resolved
from titan_moe.plan.speed_report import describe_accumulation, describe_speed

LABEL_WIDTH = 12


@planning()
def describe(recipe: Recipe, world_size: int, gpu: str | None = None) -> str:
    """Describe a recipe that passed its rules. Its peak of memory is compared with that of `gpu`, a known one; by
    default with the GPUs of this machine, or else with the measured ones."""
    devices = [gpu] if gpu else gpus_here() or list(read_tables())
    hardware = next(filter(None, map(find_hardware, devices)), None)
    as_given, recipe = recipe, as_run_on(recipe, world_size, hardware)
    again = _recompute(recipe, world_size, devices)
    recipe = as_run_on(with_entries(recipe, again[1].entries) if again else recipe, world_size, hardware)
    resolved = Resolved(recipe, world_size)
    recipe = resolved.recipe
    rows = [
        ("model", _shape(recipe)),
        ("attention", _attention(recipe)),
        ("experts", _experts(recipe)),
        *_count_rows(recipe),
        *_parallel_rows(resolved),
        *_clones(as_given, resolved),
        *_labelled("options", filter(None, [describe_experimental(recipe)])),
        ("step", _step(resolved)),
        *_labelled("data", describe_data(recipe)),
        *_labelled("pipeline", describe_pipeline(resolved, resolved.usual_factor)),
        *_labelled("muon", describe_muon(resolved.parts)),
        ("memory", _memory(resolved)),
        *_peak_itself(resolved),
        *_fit_rows(as_given, world_size, gpu, devices),
        *_labelled("speed", describe_speed(resolved, devices)),
        *_recompute_rows(again),
        *_offload_rows(resolved, devices),
        *_labelled("weights", describe_weights(recipe, world_size)),
        *_labelled("", describe_accumulation(resolved)),
        *_capture_rows(recipe, world_size),
        *_format_rows(recipe),
        *_kernel_rows(as_given, world_size),
    ]
    return "\n".join(f"{label:<{LABEL_WIDTH}}{text}" for label, text in rows)


def abbreviate(count: float) -> str:
    """Format a count with a unit: `30.53B`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return f"{count:.0f}"


def _shape(recipe: Recipe) -> str:
    m = recipe.model
    num_dense_layers = len(m.layers_by_kind[0])
    dense = f" ({num_dense_layers} dense, width {m.ffn_hidden_size})" if num_dense_layers else ""
    dense += f" and {counted(m.mtp.num_layers, 'block')} of MTP" if m.mtp.num_layers else ""
    return f"{m.name}: {m.num_layers} layers{dense}, width {m.hidden_size}, vocabulary {m.vocab_size:,}"


def _attention(recipe: Recipe) -> str:
    a = recipe.model.attention
    if a.kind == "gqa":
        shape = f"gqa, {a.num_heads} heads over {a.num_kv_heads} key/value heads of {a.head_dim}"
    else:
        shape = f"mla, {a.num_heads} heads of {a.qk_nope_head_dim} + {a.qk_rope_head_dim}, latent {a.kv_lora_rank}"
    window = f", window {a.sliding_window:,}" if a.sliding_window else ""
    window += f", chunks of {a.attention_chunk_size:,}" if a.attention_chunk_size else ""
    full = f", 1 layer in {a.full_attention_every} full" if a.full_attention_every else ""
    full += f" in {counted(len(a.window_layers), 'layer')} of {recipe.model.num_layers}" if a.window_layers else ""
    full += ", RoPE in windowed layers alone" if a.rope_layers == "windowed" else ""
    full += f", RoPE of base {a.window_rope_theta:,g} in windowed layers" if a.window_rope_theta else ""
    full += f", 1 layer in {a.nope_every} without RoPE" if a.nope_every else ""
    full += f", context extended by {a.llama3_factor:g} as in Llama 3.1" if a.llama3_factor != 1 else ""
    full += f", gates of each {a.output_gate}" if a.output_gate != "none" else ""
    norms = {"before": "", "both": ", norms before and after", "after_moe": ", norms before, and after experts"}
    return shape + window + full + norms[recipe.model.norm_placement]


def _experts(recipe: Recipe) -> str:
    moe = recipe.model.moe
    if not recipe.model.num_moe_layers:
        return "none"
    shared = f", shared width {moe.shared_ffn_hidden_size}" if moe.shared_ffn_hidden_size else ""
    latent = f", latent width {moe.latent_size}" if moe.latent_size else ""
    forced = f"; FORCED load: {recipe.train.forced_load}" if recipe.train.forces_load else ""
    chosen = f"{moe.top_k} of {moe.num_experts} a token, width {moe.ffn_hidden_size}"
    table = table_bytes(recipe.model)
    by_token = f", {counted(len(moe.hash_layers), 'layer')} by token id ({table / 2**20:.3g} MiB of tables)"
    return f"{chosen}{shared}{latent}, {moe.score_fn} scores{by_token if table else ''}{forced}"


def _count_rows(recipe: Recipe) -> list[tuple[str, str]]:
    """Parameters and FLOPs. A class of the user's is code, which is not run here; its table is."""
    if recipe.model.class_ != ModelConfig.class_ and not recipe.model.table:
        whose = f"those of model.class = {in_toml(recipe.model.class_)} are counted when a run starts"
        return [
            ("parameters", f"and FLOPs: {whose};"),
            ("", "memory, peak and pipeline below are those of the default class; set model.table to describe yours"),
        ]
    num_tokens = recipe.train.seq_len_tokens
    gflop = training_flops_per_token(recipe.model, num_tokens, recipe.optim.trainable) / 1e9
    flops = f"{gflop:.4g} GFLOP per token of training, with sequences of {num_tokens:,} tokens"
    trained = [("trained", words)] if (words := describe_trained(recipe)) else []
    return [*_parameter_rows(count_parameters(recipe.model)), *trained, ("FLOPs", flops)]


def _parameter_rows(parameters: ParameterCount) -> list[tuple[str, str]]:
    parts = {
        "embedding and head": parameters["embedding"] + parameters["head"],
        "attention": parameters["attention"],
        "dense layers": parameters["dense"],
        "routed experts": parameters["experts"],
        "shared experts": parameters["shared"],
        "latent": parameters["latent"],
        "joins of MTP": parameters["mtp"],
        "router and norms": parameters["router"] + parameters["norms"],
    }
    listed = ", ".join(f"{name} {abbreviate(size)}" for name, size in parts.items() if size)
    total = f"{abbreviate(parameters.total)}, {abbreviate(parameters.active)} active a token"
    return _labelled("parameters", [total, listed])


def _parallel_rows(resolved: Resolved) -> list[tuple[str, str]]:
    recipe, s, num_replicas = resolved.recipe, resolved.sizes, resolved.num_clones
    cp = f"{s.cp} ({recipe.parallel.cp_kind})" if s.cp > 1 else "1"
    clones = f"; up to {counted(num_replicas, 'clone')} of other ranks' experts on each" if num_replicas else ""
    width = recipe.model.moe.ffn_hidden_size
    parts = f"; {width // s.etp} of the width {width} of an expert, for rows of {s.etp} ranks" if s.etp > 1 else ""
    lines = [
        f"{s.world}{_nodes(s.world)}; dispatcher {recipe.parallel.dispatcher}{clones}{parts}",
        f"dense   pp {s.pp} · dp_replicate {s.dp_replicate} · dp_shard {s.dp_shard} · cp {cp} · tp {s.tp}",
        f"expert  pp {s.pp} · edp_replicate {s.dp_replicate} · edp {s.edp} · ep {s.ep} · etp {s.etp}",
        describe_links(recipe, s.world),
        _replicated(resolved),
    ]
    return _labelled("ranks", filter(None, lines))


def _nodes(world_size: int) -> str:
    """Where the ranks are."""
    of_node = ranks_of_a_node(world_size)
    if world_size == 1:
        return ""
    if of_node >= world_size:
        return " on one node"
    most = "" if world_size % of_node == 0 else "at most "
    assumed = ", assumed; --nproc-per-node says another" if assumes_nodes(world_size) else ""
    return f" on {-(-world_size // of_node)} nodes of {most}{of_node}{assumed}"


def _clones(as_given: Recipe, resolved: Resolved) -> list[tuple[str, str]]:
    """What `expert_clones = "auto"` means."""
    if not as_given.parallel.has_clones:
        return []
    if not resolved.num_clones:
        wanted = with_entries(as_given, resolved.recipe.memory.recompute)
        return [("clones", f'"auto" means "off": {why_no_clones(wanted, resolved.world_size)}')]
    gib = replica_bytes_per_rank(resolved.recipe) / 2**30
    slots = f"{counted(resolved.num_clones, 'replica slot')} of a rank in each layer"
    used = f"used while the busiest rank has more than {resolved.clones_pay_from:.3g} times the mean load"
    return [("clones", f'"auto" means {slots}, {used}; {gib:.3g} GiB a rank, used or not')]


def _replicated(resolved: Resolved) -> str:
    """What ranks of tp sum once a step; of a pipeline the rank that sums most."""
    if resolved.sizes.tp == 1:
        return ""
    part = max(resolved.parts, key=replicated_elements)
    copy, received = (f"{size / 2**20:,.3g} MiB" for size in (flat_copy_bytes(part), received_bytes(part)))
    number = abbreviate(replicated_elements(part))
    words = "on the rank that has most" if resolved.sizes.pp > 1 else "a rank"
    return (
        f"gradients of parameters on every tp rank, summed once a step: {number} {words}, a copy of {copy}, {received} "
        "received"
    )


def _step(resolved: Resolved) -> str:
    t = resolved.recipe.train
    return (
        f"{step_tokens(t):,} tokens = microbatches {resolved.num_microbatches} · data-parallel ranks "
        f"{resolved.sizes.dp} · sequences {t.micro_batch_sequences} · tokens {t.seq_len_tokens:,}{t.batch_sizes.growth}"
    )


def _capture_rows(recipe: Recipe, world_size: int) -> list[tuple[str, str]]:
    if recipe.run.device == "cpu":
        return []
    rules = [*RULES, step_can_be_captured]
    problems = Search(recipe, lambda changed: rules, lambda changed: world_size).refusals()
    if not problems:
        return [("CUDA graph", f"{recipe.compile.cudagraph}; the step can be captured")]
    return _labelled("CUDA graph", ["the step cannot be captured:", *problems])


def _memory(resolved: Resolved) -> str:
    recipe, gib = resolved.recipe, resolved.state_bytes / 2**30
    p, kinds = recipe.precision, dict[str, list[str]]()
    dtypes = {"parameters": p.master, "gradients": p.gradients_dtype, "moments": p.moments_dtype}
    if recipe.memory.park != "none":
        del dtypes["moments"]
    for kind, dtype in dtypes.items():
        kinds.setdefault(dtype, []).append(kind)
    kept = ", ".join(
        f"{' and '.join(names) if len(names) < 3 else ', '.join(names)} in {dtype}" for dtype, names in kinds.items()
    )
    gathered = resolved.gathered_bytes / 2**30
    is_once = recipe.parallel.accumulate_unsharded
    of_experts = p.compute if p.compute != p.parameters else "codes"
    are_resharded = resolved.experts_are_unsharded or recipe.parallel.reshard_experts_after_forward
    held = "unsharded parameters and gradients" if is_once else "unsharded parameters"
    if not is_once and are_resharded and recipe.parallel.reshard_after_forward:
        held = f"experts in {of_experts}"
    during_a_step = f" {gathered:.3g} GiB of {held} during a step and" if gathered else ""
    shared = resolved.shared_bytes / 2**30
    among_ranks = f" {shared:.3g} GiB of memory that ranks share and" if shared else ""
    if of_nccl := (resolved.outside_bytes - resolved.shared_bytes) / 2**30:
        among_ranks += f" {of_nccl:.3g} GiB of NCCL's buffers for Muon's messages and"
    among_ranks += f" {resolved.parked_bytes / 2**30:.3g} GiB on the host and" if recipe.memory.park != "none" else ""
    rank = "on the ranks that have most" if recipe.parallel.pp > 1 else "a rank"
    return f"{gib:.3g} GiB {rank}: {kept};{during_a_step}{among_ranks} activations come on top"


def _recompute(recipe: Recipe, world_size: int, devices: list[str]) -> tuple[str, Choice] | None:
    """What "auto" computes again on the first of these devices that is known; None if the recipe says it itself."""
    known = [device for device in devices if find_hardware(device)]
    if not is_auto(recipe) or recipe.run.device == "cpu" or not known:
        return None
    hardware = find_hardware(known[0])
    assert hardware is not None
    return known[0], choose_recompute(recipe, world_size, hardware)


def _recompute_rows(again: tuple[str, Choice] | None) -> list[tuple[str, str]]:
    if again is None:
        return []
    device, choice = again
    first, *others = choice.lines()
    return _labelled("recompute", [f'"auto" on {device}: {first}', *others])


def _offload_rows(resolved: Resolved, devices: list[str]) -> list[tuple[str, str]]:
    """What the host keeps, and how long the copies take, on the rank that copies most."""
    part = max(resolved.parts, key=copied_bytes)
    if not (copied := copied_bytes(part)):
        return []
    lines = [
        f"{max(map(host_bytes, resolved.parts)) / 2**30:.3g} GiB a rank in pinned memory of the host; "
        f"{copied / 2**30:.3g} GiB a rank go there in a step, and come back"
    ]
    for device in devices:
        if (hardware := find_hardware(device)) and resolved.recipe.run.device != "cpu":
            rate, number = hardware.host_bytes_per_second, resolved.recipe.run.ranks_per_gpu
            seconds = f"{1e3 * number * copied / rate:,.3g} ms of copies in each direction"
            lines.append(f"on {device} {seconds}, at {rate / 1e9:g} GB/s")
    return _labelled("offload", lines)


def _for_gpus(recipe: Recipe, world_size: int) -> str:
    """The overrides with which a recipe for CPUs runs on GPUs; empty if there are none."""
    on_gpus = replace(recipe, run=replace(recipe.run, device="cuda"))
    in_bf16 = replace(on_gpus, precision=replace(on_gpus.precision, compute="bf16"))
    for changed, words in ((on_gpus, ""), (in_bf16, " --precision.compute=bf16")):
        if not check_rules(changed, world_size):
            return f"; for GPUs add --run.device=cuda{words}"
    return ""


def _fit_rows(recipe: Recipe, world_size: int, gpu: str | None, devices: list[str]) -> list[tuple[str, str]]:
    """Whether the peak exceeds the memory of a GPU, and with what changes it does not."""
    if recipe.run.device == "cpu":
        words = f'not compared with {gpu}: run.device = "cpu"{_for_gpus(recipe, world_size)}'
        return [("peak", words)] if gpu else []
    lines: list[str] = []
    for device in devices:

        def need(changed: Recipe, num_ranks: int, device: str = device) -> float:
            """GiB of the peak, of all ranks on a GPU."""
            hardware = find_hardware(device)
            changed = as_run_on(changed, num_ranks, hardware)
            if again := _recompute(changed, num_ranks, [device]):
                changed = as_run_on(with_entries(changed, again[1].entries), num_ranks, hardware)
            return changed.run.ranks_per_gpu * _peak_gib(Resolved(changed, num_ranks))

        lines += warn_of_excess(recipe, world_size, need, [device])
        if not lines and gpu and (hardware := find_hardware(gpu)):
            lines = [f"{need(recipe, world_size):.3g} GiB fit {hardware.room(gpu)}"]
    return [("", line) for line in lines]


def _peak_gib(resolved: Resolved) -> float:
    """The peak of a step, with what is outside PyTorch's allocator; in a pipeline on the rank that has most."""
    return (resolved.peak_bytes(resolved.usual_factor) + resolved.outside_bytes) / 2**30


def _peak_itself(resolved: Resolved) -> list[tuple[str, str]]:
    """The peak of a step, and what of it lies in the arena of fused experts."""
    recipe = resolved.recipe
    if recipe.run.device == "cpu":
        return []
    factor, gib = resolved.usual_factor, _peak_gib(resolved)
    peak = f"about {gib:.3g} GiB at the peak of a step"
    if recipe.compile.cudagraph != "off":
        launched = replace(recipe, compile=replace(recipe.compile, cudagraph="off"))
        peak += f", {gib - _peak_gib(replace(resolved, recipe=launched)):.3g} GiB more than without a CUDA graph"
    if not resolved.has_arena:
        return [("", peak), *(("", line) for line in why_no_arena(recipe, resolved.experts))]
    slabs = [part.slabs for part in resolved.parts]
    arena, eighth = (
        max(arena_bytes_per_rank(recipe, at, of_rank) for of_rank in slabs) / 2**30 for at in (factor, factor + 0.125)
    )
    temporary, of_layer = temporary_bytes_per_rank(recipe) / 2**30, recipe.parallel.expert_layer_capacity_factor
    up_to = f", of up to {of_layer:g} times a balanced load, or of pieces and their sums"
    bounded = up_to if bounds_layers(recipe) else ""
    is_fixed = bool(recipe.parallel.fixed_capacity_factor) or "block" in resolved.recompute.layers
    grows = f" at a capacity factor of {factor:g}, {eighth - arena:.3g} GiB more for each eighth,"
    if is_fixed or eighth == arena:
        grows = ""
    return [
        ("", f"{peak};"),
        ("", f"of it {arena:.3g} GiB in the arena of rows{grows}"),
        ("", f"and {temporary:.3g} GiB of one layer's temporaries{bounded}"),
    ]


def _format_rows(recipe: Recipe) -> list[tuple[str, str]]:
    """The format of every module with a GEMM, and by measured architecture where the gate decides otherwise."""
    if not recipe.precision.formats:
        return []
    head, *lines = describe_formats(recipe, choose_formats(recipe))
    for capability in FASTER_FROM:
        head, *there = describe_formats(recipe, choose_formats(recipe, capability), capability)
        place = f"on GPUs of compute capability {dotted(capability)}"
        lines += [f"{place}: {line}" for line in there if line not in lines]
    return _labelled("formats", [head, *lines])


def _kernel_rows(recipe: Recipe, world_size: int) -> list[tuple[str, str]]:
    """The kernels: with `auto` by architecture, else the same on all."""
    if recipe.perf.kernels != "auto":
        return [("kernels", describe_kernels(recipe.perf))]
    elsewhere = describe_kernels(resolve_kernels(recipe, world_size, None))
    chosen = {name: describe_kernels(resolve_kernels(recipe, world_size, name)) for name in FUSED_WINS}
    places = [
        f"{kernels} on GPUs of compute capability {dotted(capability)} ({FUSED_WINS[capability]}), else "
        for capability, kernels in chosen.items()
        if kernels != elsewhere
    ]
    return [("kernels", f'"auto" means {"".join(places)}{elsewhere}')]


def _labelled(label: str, lines: Iterable[str]) -> list[tuple[str, str]]:
    """Rows of which the first has the label."""
    return list(zip(chain([label], repeat("")), lines, strict=False))
