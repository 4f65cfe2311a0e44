"""The table of a model's modules: what each is, holds, computes and keeps. All counts of a recipe read it.

A row is a module of a block, in some of the layers, or a module of the whole model. Its numbers are those of one layer
and, where the layout matters, of one rank. A new part of a model is one more row.
"""

import importlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

from titan_moe.config.adapter import kind_of_linear, num_matrices
from titan_moe.config.layer_kinds import Layers, consecutive
from titan_moe.config.model import ModelConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.parse import RecipeError
from titan_moe.config.precision import Part

Region = Literal["embedding", "attention", "norms", "dense", "router", "experts", "shared", "latent", "mtp", "head"]
"""What a module counts as. Most are regions of a trace too."""


class Split(NamedTuple):
    """A number of the model that ranks divide, each an equal part."""

    key: str  # of its field, without `model.`
    number: int
    shared: int = 0  # of heads: those of keys and values, of which ranks have several or share one

    @property
    def is_of_heads(self) -> bool:
        """Whether each rank has whole heads."""
        return self.key.endswith("heads")

    def fits(self, num_ranks: int, num_before: int = 1) -> bool:
        """Whether so many ranks can divide a part of it, which is that of one of `num_before` ranks."""
        number, shared = self.number // num_before, max(self.shared // num_before, self.shared > 0)
        are_shared = shared == 0 or shared % num_ranks == 0 or num_ranks % shared == 0
        return number % num_ranks == 0 and are_shared


@dataclass(frozen=True)
class Module:
    """A row of the table. Elements are of a token, of those that a rank has between layers, in the dtype of compute."""

    path: str  # inside a block, `attention.qkv`, or in the model, `embed`
    region: Region
    layers: Layers | None = None  # that have it; None for a module of the whole model
    part: Part | None = None  # the kind of module that has a format; None without one
    widths: tuple[int, int] = (0, 0)  # input and output; of routed experts row and hidden
    own_widths: tuple[int, int] = (0, 0)  # those of a rank: its part where tp, etp or exchanged heads split them
    parameters: int = 0
    tensors: tuple[tuple[str, int], ...] = ()  # its parameters by name and size, "" for the path itself; else `weight`
    owner: str = ""  # whose parameters they are, if not of the path
    is_adapter: bool = False  # whether it is one beside the module before it
    own_parameters: float = 0  # those of a rank of tp, or of ep and etp, before FSDP shards them
    whole: int = 0  # of the parameters, those that every rank of tp has
    idle: int = 0  # of the parameters, those that one token does not use
    multiply_adds: int = 0  # with weights, of a token in forward
    pair_width: int = 0  # multiply-adds of a query and a key that it attends to, in QK^T and PV
    kept: int = 0  # elements that backward keeps
    freed: tuple[tuple[str, int], ...] = ()  # of these, those that a part of memory.recompute does not keep, by name
    sent: tuple[tuple[str, int], ...] = ()  # of these, those that the host keeps with a part of memory.offload, by name
    reads: str = ""  # the part of memory.recompute that has its input, which nothing else reads
    gradients: int = 0  # elements of gradients that exist at a time, and of what is computed again beside them
    kept_as_codes: float = 0
    """Elements that it keeps beyond these if it keeps codes of its input, half an element each. Inputs that nothing
    else reads in backward are not kept then."""
    tp_split: Split | None = None  # what tp divides; of heads, what `ulysses` divides too
    fsdp_split: Split | None = None  # the other width of weights that tp divides, which FSDP does
    received: float = 0  # elements that a rank of cp receives from others in forward
    overlaps: bool = False  # whether it multiplies while it exchanges tokens, with `tp_comm_overlap`

    @property
    def number(self) -> int:
        """How many the model has."""
        return 1 if self.layers is None else len(self.layers)

    def freed_by(self, names: Collection[str]) -> int:
        """Elements that are not kept where these parts are computed again."""
        return sum(elements for name, elements in self.freed if name in names)

    def sent_with(self, names: Collection[str]) -> int:
        """Elements that the host keeps where these parts are offloaded."""
        return sum(elements for name, elements in self.sent if name in names)

    def is_in(self, layer: int) -> bool:
        """Whether a layer has it."""
        return self.layers is not None and layer in self.layers


ALONE = ParallelConfig()
"""The layout of one rank."""


@lru_cache(maxsize=512)
def modules_of(model: ModelConfig, parallel: ParallelConfig = ALONE) -> tuple[Module, ...]:
    """The table of a model, in the order of its forward.

    Raises: RecipeError where `model.table` cannot be imported, or returns something else.
    """
    table = import_named("model.table", model.table) if model.table else default_modules
    rows = tuple(table(model, parallel))
    if model.mtp.num_uses > 1:
        rows = tuple(each for row in rows for each in _by_uses(row, model))
    if model.adapter.is_used:
        rows = tuple(each for row in rows for each in (row, *_adapters(row, model, parallel)))
    if not all(isinstance(row, Module) for row in rows):
        raise RecipeError([f'model.table = "{model.table}" must return rows of titan_moe.config.modules.Module'])
    return rows


def import_named(key: str, path: str) -> Any:
    """Import what a recipe names as `package.module:name`.

    Raises: RecipeError with key and reason.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        way_out = 'write it as "package.module:name"'
        if isinstance(error, ModuleNotFoundError) and not f"{module}.".startswith(f"{error.name}."):
            way_out = f"install {error.name}, which it imports"
        raise RecipeError([f'{key} = "{path}" cannot be imported: {error}; {way_out}']) from error


def parameters_of_an_expert(model: ModelConfig, etp: int = 1) -> int:
    """Count the weights of one routed expert, and its biases; or of the part that each of `etp` ranks has."""
    width, hidden = model.expert_width, model.moe.ffn_hidden_size // etp
    return 3 * width * hidden + (2 * hidden + width if model.moe.expert_mlp_bias else 0)


def default_modules(model: ModelConfig, p: ParallelConfig) -> Iterator[Module]:
    """The rows of the default class."""
    width, words, layers, tp = model.hidden_size, model.vocab_size, range(model.num_blocks), max(p.tp, 1)
    dense_layers, moe_layers = model.layers_by_kind
    attention = _gqa if model.attention.kind == "gqa" else _mla
    vocabulary, columns = Split("vocab_size", words), Split("hidden_size", width)
    splits: Any = {"part": None, "tp_split": vocabulary, "fsdp_split": columns}
    yield _matrix("embedding", None, tp, "embed", (words, width), "inputs", multiply_adds=0, **splits)
    own_input = (("norms", width),) if tp == 1 else ()  # over tp, what is gathered of it is kept
    stream: Any = {"kept": 2 * width, "sent": (("block", width),)}  # input and output
    of_norm = {"rms": 1, "layer": 2}[model.norm] * width  # weight and bias
    two: Any = {"tensors": (("weight", width), ("bias", width)) if model.norm == "layer" else ()}
    stream |= two
    yield _vectors("norms", layers, "attention_norm", of_norm, **stream, freed=own_input)
    stream["sent"] = (("ffn_norm", width),)
    yield from attention(model, layers, p)
    of_results: Any = two | {"kept": width}  # their input
    by_placement: dict[str, Layers] = {"before": (), "both": layers, "after_moe": moe_layers}
    if model.norm_placement == "both":
        yield _vectors("norms", layers, "attention_post_norm", of_norm, **of_results)
    yield _vectors("norms", dense_layers, "ffn_norm", of_norm, **stream, freed=own_input)
    yield _vectors("norms", moe_layers, "ffn_norm", of_norm, **stream, freed=(("norms", width),))
    hidden = Split("ffn_hidden_size", model.ffn_hidden_size)
    yield from _mlp("dense", dense_layers, tp, "feed_forward", width, hidden)
    yield from _moe(model, moe_layers, p)
    yield _vectors("norms", by_placement[model.norm_placement], "ffn_post_norm", of_norm, **of_results)
    if model.mtp.num_layers:
        yield from _mtp(model, tp, of_norm, two)
    yield _vectors("norms", None, "norm", of_norm, **two)
    splits["multiply_adds"] = (1 + model.mtp.num_depths) * width * words  # each depth has a loss
    head = _matrix("head", None, tp, "head", (width, words), "outputs", **splits)
    yield replace(head, parameters=0, own_parameters=0) if model.embeddings_are_tied else head
    yield _vectors("head", None, "head.bias", words if model.head_bias else 0)


def _matrix(
    region: Region, layers: Layers | None, tp: int, path: str, widths: tuple[int, int], split: str = "",
    *, copies: int = 1, reads_alone: bool = False, **row: Any,
) -> Module:  # fmt: skip
    """A linear layer whose inputs or outputs the ranks of tp split, if any. It reads `copies` ranks' tokens."""
    (inputs, outputs), weights = widths, widths[0] * widths[1]
    own = {"inputs": (inputs // tp, outputs), "outputs": (inputs, outputs // tp)}.get(split, widths)
    own_parameters, whole = (weights / tp, 0) if split else (weights, weights)
    counts = {"parameters": weights, "own_parameters": own_parameters, "whole": whole, "multiply_adds": weights}
    codes = copies * inputs * (0.5 - reads_alone)
    facts: Any = {"part": "linears", "own_widths": own, "kept_as_codes": codes, "overlaps": bool(split)}
    return Module(path, region, layers, widths=widths, **(counts | facts | row))


def _vectors(region: Region, layers: Layers | None, path: str, size: int, **row: Any) -> Module:
    """Parameters that every rank of tp has. Their FLOPs are few and not counted."""
    itself: Any = {"tensors": (("", size),)} if path.endswith(("bias", "sinks")) else {}
    return Module(path, region, layers, parameters=size, own_parameters=size, whole=size, **(itself | row))


def _ranks(p: ParallelConfig) -> tuple[int, int, int, int]:
    """The ranks of tp and of cp, and those of cp of whose tokens a rank has some heads, or all keys."""
    tp, cp = max(p.tp, 1), max(p.cp, 1)
    by_heads, by_keys = (cp if p.cp_kind == kind else 1 for kind in ("ulysses", "allgather"))
    return tp, cp, by_heads, by_keys


def _gqa(model: ModelConfig, layers: range, p: ParallelConfig) -> Iterator[Module]:
    """A rank has some heads of the tokens of several ranks, which are as many elements; ranks may share a key/value
    head. What is gathered is kept in place of the rank's own part: over tp the input, over cp keys and values."""
    a, width, (tp, cp, by_heads, by_keys) = model.attention, model.hidden_size, _ranks(p)
    queries, fused = a.num_heads * a.head_dim, (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    keys = 2 * max(a.num_kv_heads, tp * by_heads) * a.head_dim  # and values
    own = (width, (a.num_heads // tp + 2 * max(a.num_kv_heads // tp, 1)) * a.head_dim)
    kept: Any = {"kept": (tp - 1) * width + queries + keys, "gradients": queries + keys, "overlaps": True}
    split = "outputs" if tp <= a.num_kv_heads else ""  # else every rank has all of them
    row = partial(_matrix, "attention", layers, tp)
    reads: Any = {"reads_alone": True, "reads": "norms" * (tp == 1)}
    own_reads = {} if a.output_gate_width else reads  # two modules read the norm's result: the second one counts it
    yield row("attention.qkv", (width, fused), split, own_widths=own, copies=tp, **own_reads, **kept)
    yield _vectors("attention", layers, "attention.qkv.bias", fused if a.qkv_bias else 0)
    has_weights = a.qk_norm and a.qk_norm_has_weights
    normed_widths = 2 * a.head_dim if a.qk_norm_over == "head" else queries + a.num_kv_heads * a.head_dim
    both = (("q_norm_weight", a.head_dim), ("k_norm_weight", a.head_dim))
    norms = both if a.qk_norm_over == "head" else (("all_heads.weight", normed_widths),)
    sizes: Any = {"tensors": norms if has_weights else ()}
    yield _vectors("attention", layers, "attention.qk_norm_rope", normed_widths if has_weights else 0, **sizes)
    yield _vectors("attention", layers, "attention.sinks", a.num_heads if a.sinks else 0)
    if gates := a.output_gate_width:  # their sigmoids are kept
        yield row("attention.gate", (width, gates), "outputs", copies=tp, kept=gates, overlaps=False, **reads)
    exchanged = keys + 2 * queries if by_heads > 1 else 0
    received = (1 - 1 / by_heads) * exchanged + (cp // by_heads - 1) * keys
    attended = queries + by_keys * keys
    normed = (queries if by_keys > 1 else attended) if a.qk_norm and by_heads == 1 else 0  # and rotated, not exchanged
    freed = ("qkv_rope", normed)
    sizes = {"attended": attended, "result": queries, "received": received}
    sizes["num_scales"] = (a.sinks and not (cp > 1 and p.cp_kind == "ring")) + (a.output_gate_width > 0)
    heads = Split("attention.num_heads", a.num_heads, a.num_kv_heads)
    yield _core(layers, by_heads, heads, 2 * queries, **sizes, freed=freed)
    yield row("attention.out", (queries, width), "inputs", reads_alone=by_heads > 1)
    yield _vectors("attention", layers, "attention.out.bias", width if a.out_bias else 0)


def _mla(model: ModelConfig, layers: range, p: ParallelConfig) -> Iterator[Module]:
    """Latents are gathered, before and after their norm: they are narrower than the keys and values that they become.
    The rotated part of keys is a part of the projection."""
    a, width, (tp, cp, by_heads, by_keys) = model.attention, model.hidden_size, _ranks(p)
    rank, latent, projected = a.q_lora_rank, a.kv_lora_rank, a.kv_lora_rank + a.qk_rope_head_dim
    queries, result = a.num_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim), a.num_heads * a.v_head_dim
    values = a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)  # beside keys, whose copies they are
    row = partial(_matrix, "attention", layers, tp)
    if rank:
        yield row("attention.q_down", (width, rank), kept=rank, gradients=rank)
        yield _vectors("attention", layers, "attention.q_norm", rank)
    compressed = tp * rank + queries
    kept: Any = {"kept": compressed + (tp * width if tp > 1 and not rank else 0), "gradients": compressed}
    # without compression it reads what `kv_down` does, but for the tokens of other ranks
    kept["sent"] = (("attention", queries),)
    if is_whole := by_heads == 1:  # heads are not exchanged
        kept["freed"] = (("mla_up", queries),)
    yield row(
        "attention.q_up",
        (rank or width, queries),
        "outputs",
        copies=tp,
        reads_alone=tp > 1 or rank > 0,
        **kept,
        fsdp_split=Split("attention.q_lora_rank", rank) if rank else None,
    )
    size = tp * by_heads * projected
    yield row(
        "attention.kv_down", (width, projected), reads_alone=True, reads="norms" * (tp == 1), kept=size, gradients=size
    )
    yield _vectors("attention", layers, "attention.kv_norm", latent)
    own, copies = (latent, values // (tp * by_heads)), tp * by_heads * by_keys
    size = copies * latent + by_keys * values
    kept = {"kept": size, "gradients": size, "copies": copies, "reads_alone": True, "overlaps": False}
    kept |= {"freed": (("mla_up", is_whole * by_keys * values),), "sent": (("attention", by_keys * values),)}
    columns = Split("attention.kv_lora_rank", latent)
    yield row("attention.kv_up", (latent, values), "outputs", own_widths=own, fsdp_split=columns, **kept)
    received = (1 - 1 / by_heads) * (queries + result) + (cp - 1) * tp * projected
    sizes: Any = {"attended": by_keys * queries, "result": result, "received": received}
    heads, freed = Split("attention.num_heads", a.num_heads), ("mla_up", is_whole * by_keys * queries)
    yield _core(layers, by_heads, heads, queries + result, **sizes, freed=freed)
    yield row("attention.out", (result, width), "inputs", reads_alone=by_heads > 1)


def _core(
    layers: range, by_heads: int, heads: Split, pair_width: int,
    *, attended: int, result: int, received: float, freed: tuple[str, int], num_scales: int = 0,
) -> Module:  # fmt: skip
    """Attention without projections. `ulysses` keeps the result before and after its exchange, FlexAttention before and
    after sinks have scaled it, a gate too. SDPA's copies of what is attended, wider for sinks, are not counted."""
    kept, gradients = attended + (1 + (by_heads > 1) + num_scales) * result, attended + result
    sizes: Any = {"kept": kept, "gradients": gradients, "received": received, "tp_split": heads}
    sizes |= {"freed": (freed, ("attention", kept - attended)), "sent": (("attention", attended + result),)}
    return Module("attention", "attention", layers, pair_width=pair_width, **sizes)


def _adapters(row: Module, model: ModelConfig, p: ParallelConfig) -> Iterator[Module]:
    """The adapter beside a module, if it has one. Each matrix of a fused weight has its own factors. tp splits the
    factor of the widths that it splits, and every rank has the other one."""
    kind = "experts" if row.part == "experts" else kind_of_linear(row.path) if row.part else None
    if kind is None or not (rank := model.adapter.rank_of(kind)):
        return
    rows: Any = {"path": f"{row.path}.adapter", "region": row.region, "layers": row.layers, "is_adapter": True}
    if kind != "experts":
        number, (inputs, outputs), share = (
            num_matrices(row.path),
            row.widths,
            row.own_parameters / max(row.parameters, 1),
        )
        reads, writes = number * rank * inputs, rank * outputs
        splits_inputs = share < 1 and row.own_widths[0] < inputs
        own = (reads * share, writes) if splits_inputs else (reads, writes * share)
        whole = (share == 1 or not splits_inputs) * reads + (share == 1 or splits_inputs) * writes
        sizes: Any = {"parameters": reads + writes, "own_parameters": sum(own), "whole": whole}
        if share < 1 and not splits_inputs:
            sizes["fsdp_split"] = Split(f"adapter.{'' if rank == model.adapter.rank else kind + '.'}rank", rank)
        yield Module(
            **rows, **sizes, tensors=(("A", reads), ("B", writes)), multiply_adds=reads + writes, kept=number * rank
        )
        return
    (width, hidden), number, top_k = row.widths, model.moe.num_experts, model.moe.top_k
    sizes = {
        "gate_up_A": 2 * rank * width,
        "gate_up_B": 2 * hidden * rank,
        "down_A": rank * hidden,
        "down_B": width * rank,
    }
    of_one, etp = sum(sizes.values()), max(p.etp, 1)
    of_rank = sizes["gate_up_A"] + sizes["down_B"] + (sizes["gate_up_B"] + sizes["down_A"]) / etp
    yield Module(
        **rows,
        owner=row.path,
        tensors=tuple((name, number * size) for name, size in sizes.items()),
        parameters=number * of_one,
        own_parameters=number / max(p.ep, 1) * of_rank,
        idle=(number - top_k) * of_one,
        multiply_adds=top_k * of_one,
    )


def _mlp(region: Region, layers: Layers, tp: int, path: str, width: int, split: Split) -> Iterator[Module]:
    """It keeps hidden states, and its gathered input over tp, beside which the router keeps its own part of that of
    shared experts. The activation is computed again."""
    hidden, is_dense, row = split.number, region == "dense", partial(_matrix, region, layers, tp)
    kept: Any = {"kept": 2 * hidden + ((tp - is_dense) * width if tp > 1 else 0)}
    kept["gradients"] = 4 * hidden if is_dense else 0  # of hidden states and of activations, and the activations
    kept |= {
        "freed": (("dense_mlp" if is_dense else "shared_experts", 2 * hidden),),
        "reads": "norms" * (is_dense and tp == 1),
    }
    alone = tp > 1 or is_dense
    yield row(f"{path}.gate_up", (width, 2 * hidden), "outputs", copies=tp, reads_alone=alone, tp_split=split, **kept)
    yield row(f"{path}.down", (hidden, width), "inputs")


def _mtp(model: ModelConfig, tp: int, of_norm: int, tensors: Any) -> Iterator[Module]:
    """What a block of multi-token prediction has beside a block: it joins two hidden states, and norms its result."""
    width, layers = model.hidden_size, model.mtp_layers
    for name in ("embedding_norm", "hidden_norm"):
        yield _vectors("norms", layers, name, of_norm, kept=width, **tensors)
    yield _matrix("mtp", layers, tp, "eh_proj", (2 * width, width), kept=2 * width, gradients=3 * width)
    yield _vectors("norms", layers, "final_norm", of_norm, kept=2 * width, **tensors)


def _by_uses(row: Module, model: ModelConfig) -> Iterator[Module]:
    """A module as it is in a block of multi-token prediction that is applied several times, and in others."""
    others, number = consecutive([i for i in row.layers or () if i < model.num_layers]), model.mtp.num_uses
    if row.layers is None or len(others) == len(row.layers):
        yield row
        return
    if others:
        yield replace(row, layers=others)
    counts: Any = {name: number * getattr(row, name) for name in ("multiply_adds", "pair_width", "kept", "received")}
    counts |= {name: tuple((part, number * n) for part, n in getattr(row, name)) for name in ("freed", "sent")}
    yield replace(row, layers=model.mtp_layers, **counts, kept_as_codes=number * row.kept_as_codes)


def _moe(model: ModelConfig, layers: Layers, p: ParallelConfig) -> Iterator[Module]:
    """Routed experts keep rows and slots, whose numbers differ by dispatcher: plan/cost/peak.py counts them."""
    width, row_width, moe, tp, etp = model.hidden_size, model.expert_width, model.moe, max(p.tp, 1), max(p.etp, 1)
    of_latent = partial(_matrix, "latent", layers, tp, kept=row_width)
    # logits in fp32, and rows with noise; fp64 has a copy of the rows in any case
    kept = 2 * moe.num_experts + (width if moe.input_jitter else 0)
    kept = kept if moe.router_dtype == "fp32" else 4 * (moe.num_experts + width)
    yield _matrix("router", layers, tp, "feed_forward.router", (width, moe.num_experts), part=None, kept=kept)
    yield _vectors("router", layers, "feed_forward.router.bias", moe.num_experts if moe.router_bias else 0)
    if moe.latent_size:
        yield of_latent("feed_forward.latent_down", (width, row_width))
    one_expert, hidden = parameters_of_an_expert(model), moe.ffn_hidden_size
    biases = (("gate_up_bias", 2 * hidden), ("down_bias", row_width)) if moe.expert_mlp_bias else ()
    tensors = (("gate_up", 2 * row_width * hidden), ("down", row_width * hidden), *biases)
    yield Module(
        "feed_forward.experts", "experts", layers, "experts", (row_width, hidden), (row_width, hidden // etp),
        parameters=moe.num_experts * one_expert,
        tensors=tuple((name, moe.num_experts * size) for name, size in tensors),
        own_parameters=moe.num_experts / max(p.ep, 1) * parameters_of_an_expert(model, etp),
        idle=(moe.num_experts - moe.top_k) * one_expert,
        multiply_adds=3 * row_width * hidden * moe.top_k,
    )  # fmt: skip
    if moe.latent_size:
        yield of_latent("feed_forward.latent_up", (row_width, width), reads_alone=True)
    if moe.shared_ffn_hidden_size:
        path, inner = "feed_forward.shared_experts", ".mlp" if moe.shared_expert_gate else ""
        hidden_of_all = Split("moe.shared_ffn_hidden_size", moe.shared_ffn_hidden_size)
        yield from _mlp("shared", layers, tp, path + inner, width, hidden_of_all)
        yield _vectors("shared", layers, f"{path}.gate", width if moe.shared_expert_gate else 0)
