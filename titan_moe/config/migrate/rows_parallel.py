"""How layouts, precision and memory become `[parallel]`, `[precision]`, `[memory]`, `[compile]`, a row for each value
that is not simply another name."""

import math
import re
from collections.abc import Mapping
from typing import Any

from titan_moe.config.dispatchers import facts_of
from titan_moe.config.migrate.given import Given, NoCounterpart, Noted, Row, Unreadable
from titan_moe.config.migrate.rows_model import is_mla
from titan_moe.config.offload import OFFLOADABLE, RECOMPUTED_INSTEAD
from titan_moe.config.recompute import RECOMPUTABLE

RANKS_OF_A_NODE = 8
MAX_STAGES = 10_000


def sizes(given: Given) -> dict[str, int]:
    """The sizes of the axes. Megatron splits experts over tp ranks unless it is told otherwise."""
    found = {axis: given.whole(f"parallel.{axis}", 1, 1) for axis in ("pp", "cp", "tp", "ep")}
    splits_experts = given.dialect == "megatron" and "model.moe.num_experts" in given
    splits_experts |= given.dialect == "bridge" and "parallel.tp" in given
    found["etp"] = given.whole("parallel.etp", found["tp"] if splits_experts else 1, 1)
    found["dp_replicate"] = given.whole("parallel.dp_replicate", 1, 1)
    return found


def ranks(given: Given) -> int:
    """All ranks, those of the command line or the fewest that the layout fits."""
    if given.num_ranks:
        return given.num_ranks
    of = sizes(given)
    dense = of["pp"] * of["cp"] * of["tp"] * of["dp_replicate"]
    shard = given.raw("parallel.dp_shard", -1)
    if type(shard) is int and shard > 0:
        return dense * shard
    return math.lcm(dense, of["pp"] * of["dp_replicate"] * of["ep"] * of["etp"])


def data_parallel_ranks(given: Given) -> int:
    """The ranks that read different sequences."""
    of = sizes(given)
    return max(ranks(given) // (of["pp"] * of["cp"] * of["tp"]), 1)


DISPATCHERS = {
    "allgather": "allgather",
    "alltoall": "alltoall",
    "alltoall_seq": "alltoall",
    "standard": "alltoall",
    "flex": "symm_mem",
    "deepep": "symm_mem",
    "hybridep": "symm_mem",
}
"""Megatron's and torchtitan's dispatchers -> ours inside a node."""
BETWEEN_NODES = {"symm_mem": "hierarchical_symm_mem"}


def _experts(given: Given) -> Mapping[str, Any]:
    of = sizes(given)
    values: dict[str, Any] = {f"parallel.{axis}": of[axis] for axis in ("tp", "ep", "etp")}
    named = given.word("moe_token_dispatcher_type", given.word("expert_parallel_comm_backend", "alltoall"))
    named = "deepep" if given.flag("moe_enable_deepep") else named
    if named not in DISPATCHERS:
        raise NoCounterpart(f"parallel.dispatcher has no {named}; {', '.join(DISPATCHERS)} are known of others", values)
    dispatcher = DISPATCHERS[named] if of["ep"] > 1 else "local"
    if of["ep"] * of["etp"] > RANKS_OF_A_NODE:
        dispatcher = BETWEEN_NODES.get(dispatcher, dispatcher)
    values["parallel.dispatcher"] = dispatcher
    if given.flag("overlap_moe_expert_parallel_comm") and (kinds := facts_of(dispatcher).overlaps):
        kind = "microbatch" if "microbatch" in kinds else kinds[0]
        values["parallel.overlap"] = kind
        if kind == "microbatch":
            values["parallel.accumulate_unsharded"] = True
    return values


SCHEDULES = {
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved_1f1b",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipev",
}
"""torchtitan's schedules -> ours."""


def _pipeline(given: Given) -> Mapping[str, Any]:
    pp, num_layers = sizes(given)["pp"], given.whole("model.num_layers")
    named = given.word("pipeline_parallel_schedule", "")
    layout = given.raw("pipeline_model_parallel_layout", "")
    if not isinstance(layout, str):
        raise Unreadable(given["pipeline_model_parallel_layout"], 'a layout such as "Et*3|(tt|)*29tL"')
    vpp = given.whole("parallel.vpp", 1, 1)
    if "num_layers_per_virtual_pipeline_stage" in given:
        vpp = _stages(given, "num_layers_per_virtual_pipeline_stage", num_layers, pp)
    elif "pipeline_parallel_layers_per_stage" in given:
        vpp = _stages(given, "pipeline_parallel_layers_per_stage", num_layers, pp)
    elif layout:
        vpp = _stages_of_layout(given, layout, pp)
    elif named.replace("_", "") in ("interleaved1f1b", "zbvzerobubble", "dualpipev"):
        vpp = 2
    values: dict[str, Any] = {"parallel.pp": pp}
    if pp == 1:
        return values
    values["parallel.vpp"] = vpp
    if layout:
        ours = re.sub(r"(m+)\|L$", r"|\1L", layout.replace(" ", ""))
        values["parallel.pp_layout"] = ours if ours == layout else Noted(ours, "m is beside L here")
    elif uneven := _uneven_layout(given, pp, vpp, num_layers):
        values["parallel.pp_layout"] = uneven
    default = "interleaved_1f1b" if vpp > 1 else "1f1b"
    schedule: Any = SCHEDULES.get(named.replace("_", ""), default)
    if named and named.replace("_", "") not in SCHEDULES:
        schedule = Noted(default, f"{given['pipeline_parallel_schedule'].value} is not built here")
    return values | {"parallel.pp_schedule": schedule}


def _stages(given: Given, name: str, num_layers: int, pp: int) -> int:
    of_stage = given.whole(name, 1, 1)
    is_exact = name.startswith("num_layers")  # torchtitan's stages may have fewer
    if is_exact and num_layers % (pp * of_stage):
        raise Unreadable(given[name], f"a number whose {pp} pipeline ranks divide {num_layers} layers")
    return max(-(-num_layers // (of_stage * pp)), 1)


def _stages_of_layout(given: Given, layout: str, pp: int) -> int:
    """Stages of a rank in a layout, of which only the bars count: `(tt|)*29` has 29."""
    bars, group = 0, 0
    for part in layout.replace(" ", "").split("("):
        inner, closed, behind = part.partition(")")
        group = inner.count("|") if closed else 0
        times = "".join(letter for letter in behind[1:7] if letter.isdecimal()) if behind.startswith("*") else ""
        bars += group * int(times or 1) + (behind if closed else inner).count("|")
    stages = bars + 1
    if stages % pp or stages > MAX_STAGES:
        words = f"a layout of a multiple of {pp} stages; it has {stages}"
        raise Unreadable(given["pipeline_model_parallel_layout"], words)
    return stages // pp


def _uneven_layout(given: Given, pp: int, vpp: int, num_layers: int) -> str:
    """The layout of other numbers of layers on the first and the last rank."""
    ends = [
        given.whole(f"decoder_{end}_pipeline_num_layers", given.whole(f"num_layers_in_{end}_pipeline_stage"))
        for end in ("first", "last")
    ]
    if not any(ends):
        return ""
    named = next(
        name
        for end in ("first", "last")
        for name in (f"decoder_{end}_pipeline_num_layers", f"num_layers_in_{end}_pipeline_stage")
        if name in given
    )
    if vpp > 1:
        raise Unreadable(given[named], "left out with several stages a rank; write a layout of all")
    between = pp - sum(map(bool, ends))
    rest = num_layers - sum(ends)
    if rest < 0 or (between and rest % between) or (not between and rest):
        raise Unreadable(given[named], f"such that {pp} pipeline ranks share {num_layers} layers evenly otherwise")
    each = rest // between if between else 0
    first, last = (end or each for end in ends)
    middle = pp - 2
    mtp = "m" * given.whole("model.mtp.num_depths")
    return f"E{_layers(first)}|" + (f"({_layers(each)}|)*{middle}" if middle else "") + f"{_layers(last)}{mtp}L"


def _layers(number: int) -> str:
    return f"t*{number}" if number else ""


CONTEXTS = {"p2p": "ring", "a2a": "ulysses", "all_gather": "allgather", "allgather": "allgather", "alltoall": "ring"}
"""How others exchange keys -> ours. torchtitan's alltoall passes keys around."""


def _context(given: Given) -> Mapping[str, Any]:
    if sizes(given)["cp"] == 1:
        return {}
    named = given.words("cp_comm_type", given.words("context_parallel_rotate_method", ("p2p",)))[0]
    if named not in CONTEXTS:
        raise NoCounterpart("parallel.cp_kind takes ulysses, allgather and ring")
    if CONTEXTS[named] == "ring" and is_mla(given):
        return {"parallel.cp_kind": Noted("allgather", "rings are for gqa alone")}
    return {"parallel.cp_kind": CONTEXTS[named]}


def _sequence_parallel(given: Given) -> Mapping[str, Any]:
    if sizes(given)["tp"] > 1 and not given.flag("sequence_parallel"):
        raise NoCounterpart("sequence parallelism comes with parallel.tp")
    return {}


def _recompute(given: Given) -> Mapping[str, Any]:
    granularity = given.word("recompute_granularity", "selective" if given.flag("recompute_activations") else "")
    if granularity == "full":
        first = given.whole("recompute_num_layers", 1, 1)
        is_part = given.word("recompute_method", "uniform") == "block" and sizes(given)["pp"] == 1
        is_part &= first < given.whole("model.num_layers")
        return {"memory.recompute": [f"block:{first}" if is_part else "block"]}
    if granularity != "selective":
        raise NoCounterpart("memory.recompute takes names of parts, such as block and attention")
    named = given.words("recompute_modules", ("core_attn",))
    ours = {word: part for part, row in RECOMPUTABLE.items() for word in (*row.other_names, part)}
    known = list(dict.fromkeys(ours[name] for name in named if name in ours))
    values = {"memory.recompute": known} if known else {}
    if unknown := [name for name in named if name not in ours]:
        raise NoCounterpart(f"no part here is {', '.join(unknown)}; parts are {', '.join(RECOMPUTABLE)}", values)
    return values


CHECKPOINTED = {"none": "none", "full": "block", "memory_budget": "auto"}
"""torchtitan's modes of activation checkpointing -> memory.recompute."""


def _activation_checkpoint(given: Given) -> Mapping[str, Any]:
    mode = given.word("activation_checkpoint.mode", "selective")
    if mode == "selective":
        return {
            "memory.recompute": Noted(["auto"], "selective: of single operations there; auto chooses parts by bytes")
        }
    if mode not in CHECKPOINTED:
        raise NoCounterpart("memory.recompute takes names of parts")
    return {"memory.recompute": [CHECKPOINTED[mode]]}


def _offload(given: Given) -> Mapping[str, Any]:
    ours = {word: part for part, row in OFFLOADABLE.items() for word in (*row.other_names, part)}
    named = given.words("offload_modules")
    known = list(dict.fromkeys(ours[name] for name in named if name in ours))
    values = {"memory.offload": known} if known else {}
    if unknown := [name for name in named if name not in ours]:
        instead = RECOMPUTED_INSTEAD.get(unknown[0])
        way_out = f'memory.recompute = ["{instead}"] frees it' if instead else f"parts are {', '.join(OFFLOADABLE)}"
        raise NoCounterpart(f"{unknown[0]} is not offloaded here; {way_out}", values)
    return values


def _cuda_graph(given: Given) -> Mapping[str, Any]:
    scopes = given.words("cuda_graph_scope", ())
    if given.raw("cuda_graph_impl", "none") == "none" and not given.raw("enable_cuda_graph", False):
        return {}
    if scopes not in (("full_iteration",), ("full",)):
        raise NoCounterpart('graphs of parts are not captured here; compile.cudagraph = "step" captures whole steps')
    return {"compile.cudagraph": "step"}


ROWS = (
    Row(
        "parallel.tp parallel.ep parallel.etp moe_token_dispatcher_type moe_flex_dispatcher_backend moe_enable_deepep "
        "expert_parallel_comm_backend overlap_moe_expert_parallel_comm",
        _experts,
    ),
    Row(
        "parallel.pp parallel.vpp pipeline_model_parallel_layout num_layers_per_virtual_pipeline_stage "
        "pipeline_parallel_layers_per_stage pipeline_parallel_schedule decoder_first_pipeline_num_layers "
        "decoder_last_pipeline_num_layers num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage",
        _pipeline,
    ),
    Row("cp_comm_type context_parallel_rotate_method", _context),
    Row("sequence_parallel", _sequence_parallel),
    Row(
        "recompute_granularity recompute_modules recompute_activations recompute_num_layers recompute_method",
        _recompute,
    ),
    Row("activation_checkpoint.mode", _activation_checkpoint),
    Row("offload_modules fine_grained_activation_offloading", _offload),
    Row("cuda_graph_impl cuda_graph_scope enable_cuda_graph", _cuda_graph),
)
