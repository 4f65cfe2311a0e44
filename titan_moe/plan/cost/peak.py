"""The peak of a rank's memory in a step, estimated.

Four moments of a step may have the peak:

* At the end of a microbatch's forward, all its activations exist, in a pipeline also those of other microbatches in
  flight, what delayed weight gradients need, the gradients of the previous microbatches, and what the loss computes
  with.
* At the beginning of its backward, the temporaries of the last layer and the gradient of the head have replaced those
  of the loss.
* At its end all gradients exist, and the temporaries of the first layer. Its activations are freed, but not the arena.
* After the last backward, gathered parameters are freed. The gradients of embedding and head are reduced, which FSDP
  does last, tp ranks sum gradients, and parked states pass through the GPU.

The estimate counts the tensors that compiled blocks keep. It leaves out workspaces of libraries, symmetric memory, the
dense parameters of blocks that are gathered at a time, and messages between stages. With `perf.kernels = "auto"` the
loss is Triton's, which H100s and H200s take; PyTorch's needs more. Free memory between tensors, and of other streams,
is counted in the pool of a CUDA graph alone, where no other tensor can use it (graph_pool.py).
"""

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from titan_moe.config.arena import experts_of, has_arena
from titan_moe.config.gemms import count_packed_experts, gemm_modules, why_kept
from titan_moe.config.modules import modules_of
from titan_moe.config.parallel import resolve
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import (
    Recipe,
    expert_hidden_size,
    microbatch_tokens,
    num_microbatches,
    sums_replicas_once,
)
from titan_moe.config.recompute import recompute_of
from titan_moe.config.trainable import trains_head
from titan_moe.plan.cost import muon
from titan_moe.plan.cost.codes import numbers_bytes
from titan_moe.plan.cost.graph_pool import FRAGMENTATION, other_streams_bytes, reduced_bytes, sharded_experts
from titan_moe.plan.cost.loads import layer_loads
from titan_moe.plan.cost.memory import (
    arena_bytes_per_rank,
    assignment_bytes_of_pieces,
    copied_bytes_of_a_parameter,
    gathered_bytes,
    state_bytes,
    temporary_bytes,
    temporary_bytes_per_rank,
    trained_experts_per_rank,
    trained_of,
    window_bytes,
)
from titan_moe.plan.cost.offload import sent_bytes
from titan_moe.plan.cost.replicated_grads import flat_copy_bytes
from titan_moe.plan.cost.sharded_experts import Held, held_bytes
from titan_moe.plan.pipeline.parts import LAYERS_UNDER_WAY, RankPart
from titan_moe.plan.pipeline.slabs import ArenaSlabs
from titan_moe.plan.pipeline.weight_grads import obstacle_of

CHOICE_BYTES = 4
"""Of a token's choice of an expert, which a recomputed block keeps (layers/choice.py)."""


def peak_bytes(part: RankPart, capacity_factor: float, experts: str = "fused") -> int:
    """Estimate the peak of a rank in bytes, with this implementation of the experts. If the capacity is "auto",
    `capacity_factor` is that of the load, with its margin."""
    peak = RankPeak(part, capacity_factor, experts)
    return peak.bytes_with(peak.microbatch(part.recipe), part.slabs)


class Microbatch(NamedTuple):
    """What a microbatch takes on a rank, by what the rank computes again."""

    recipe: Recipe
    """In which the model has only the layers of the rank, with what is computed again."""
    kept: int
    """Bytes that all layers keep for backward, without the arena."""
    temporary: float
    """Bytes of the temporaries of the layer that has most."""
    ahead: float
    """Bytes of a layer's experts that are gathered meanwhile."""


class RankPeak:
    """The peak of a rank, whatever it computes again: all that this leaves as it is is counted once."""

    def __init__(self, part: RankPart, capacity_factor: float, experts: str) -> None:
        recipe, p, count = part.recipe, part.recipe.precision, part.count
        dtypes = (p.compute, p.reduce, p.gradients_dtype)
        compute, reduce, gradient = (BYTES_OF_DTYPE[dtype] for dtype in dtypes)
        is_once, sizes = recipe.parallel.accumulate_unsharded, resolve(recipe.parallel, part.world_size)
        has_copies = sizes.experts_are_unsharded(p)
        is_first = num_microbatches(recipe, part.world_size) == 1  # and the last: nothing is accumulated before
        gradients, experts_of_rank = trained_of(part) * gradient, trained_experts_per_rank(recipe)
        sent = sent_bytes(recipe)
        # what FSDP gathers for all of forward and backward, and reduces after it
        of_root = (count["embedding"] + count["head"]) / recipe.parallel.tp
        reduced_root = of_root
        if not count.all_train:
            root = (it for it in count.modules if it.region in ("embedding", "head"))
            reduced_root = sum(count.num_trained(it) * it.parameters for it in root) / recipe.parallel.tp
            of_root = of_root if sizes.fsdp > 1 else reduced_root  # what is frozen and not sharded is not gathered
        delayed = part.num_delayed * _delayed_bytes(part, capacity_factor, experts)
        self.part, self.factor, self.has_arena = part, capacity_factor, part.has_arena(experts)
        self.num_kept = _num_kept(part, experts)
        self.loss = _loss_bytes(recipe) if part.has_head else 0
        self.of_head = (count["head"] or count["embedding"]) / recipe.parallel.tp * compute if part.has_head else 0

        self.sharded, self.has_sums = sharded_experts(part), is_once and not is_first
        self.is_first, self.gathered = is_first, gathered_bytes(part, has_gradients=not is_first)
        has_all = is_once or not recipe.parallel.reshard_after_forward
        self.begin = delayed + sum(sent[-LAYERS_UNDER_WAY:]) + (0 if has_all else of_root * compute)
        if not is_first:  # sums of the microbatches before; unsharded ones are gathered
            of_shards = trained_of(part) * (reduce if sums_replicas_once(recipe) else gradient)
            self.begin += of_shards if not is_once else experts_of_rank * gradient if has_copies else 0

        are_kept = is_once or recipe.parallel.pp > 1
        copies = experts_of_rank * copied_bytes_of_a_parameter(recipe) if has_copies else 0
        of_first = copies if are_kept else copies / max(recipe.model.num_moe_layers, 1)  # whose backward they last for
        copies = copies if are_kept else 0
        accumulated = reduce if is_once and not is_first else 0
        self.end = gradients + delayed + of_first + of_root * compute + reduced_root * accumulated
        self.end += sum(sent[:LAYERS_UNDER_WAY])  # on the way back
        reductions = copies + reduced_root * (reduce + (accumulated or compute))
        self.after = gradients + max(reductions, flat_copy_bytes(part), window_bytes(part), muon.temporary_bytes(part))

        self.resident, self.share = state_bytes(part) - gradients, 1.0
        if recipe.compile.cudagraph != "off":
            reduced = reduced_bytes(part)
            self.begin -= reduced if not (is_once or is_first) else 0
            self.end, self.after = self.end - reduced, self.after - reduced
            self.resident, self.share = self.resident + other_streams_bytes(part), 1 + FRAGMENTATION

    def microbatch(self, recipe: Recipe) -> Microbatch:
        """A microbatch, with what this recipe of the rank's layers computes again."""
        kept = _activation_bytes(recipe, self.factor, has_arena=self.has_arena)
        held = self._held_of_experts(recipe)
        temporary = _temporary_bytes(recipe, self.factor, held, has_arena=self.has_arena)
        return Microbatch(recipe, kept, temporary, held.ahead)

    def _held_of_experts(self, recipe: Recipe) -> Held:
        """What is held of a layer's experts where FSDP shards them."""
        if self.sharded is None:
            return Held()
        kept = 0 if self.has_arena else _expert_elements(recipe, self.factor)
        kept_of_one = kept * BYTES_OF_DTYPE[recipe.precision.compute] / max(recipe.model.num_moe_layers, 1)
        return held_bytes(self.part, self.sharded, kept_of_one, has_sums=self.has_sums)

    def bytes_with(self, microbatch: Microbatch, slabs: ArenaSlabs | None) -> int:
        """The peak with such microbatches, and the slabs that these need."""
        recipe, kept, temporary, ahead = microbatch
        temporary += self.of_head
        arena = arena_bytes_per_rank(recipe, self.factor, slabs) if self.has_arena else 0
        gathered = self.gathered
        if self.part.run is None:  # in a pipeline it is the same, whatever is computed again
            gathered = gathered_bytes(replace(self.part, recipe=recipe), has_gradients=not self.is_first)
        begin = self.begin + gathered + self.num_kept * kept + max(self.loss, temporary + ahead)
        end = self.end + temporary + max(self.num_kept - 1, 0) * kept  # of the others in flight
        return round(self.resident + arena + self.share * max(begin, end, self.after))


def graph_bytes(part: RankPart, capacity_factor: float = 1.0, experts: str = "fused") -> int:
    """Estimate by how much the CUDA graph of a recipe raises the peak of a pipeline rank; 0 without one. With an arena,
    which lies outside the graph's pool, this is the same for all factors."""
    launched = replace(part.recipe, compile=replace(part.recipe.compile, cudagraph="off"))
    whole, alone = (peak_bytes(of, capacity_factor, experts) for of in (part, replace(part, recipe=launched)))
    return whole - alone


def _num_kept(part: RankPart, experts: str) -> float:
    """How many microbatches have kept their activations. A backward without weight gradients frees them, unless delayed
    ones need them."""
    if part.num_in_flight == part.num_before_backward:
        return part.num_in_flight
    experts_free = part.has_arena(experts) or not part.num_delayed
    return part.num_before_backward if experts_free and not _linears_delay(part.recipe) else part.num_in_flight


def activation_bytes_per_rank(recipe: Recipe, experts: str = "fused", capacity_factor: float = 1.0) -> int:
    """Count the bytes that all blocks of a recipe keep of a microbatch on the GPU, without the arena."""
    return _activation_bytes(recipe, capacity_factor, has_arena=has_arena(recipe, experts))


def _activation_bytes(recipe: Recipe, capacity_factor: float, *, has_arena: bool) -> int:
    m, num_tokens, again = recipe.model, microbatch_tokens(recipe), recompute_of(recipe)
    element = BYTES_OF_DTYPE[recipe.precision.compute]
    blocks, modules = again.layers.get("block", frozenset()), modules_of(m, recipe.parallel)
    of_token = float(len(blocks) * m.hidden_size)
    apart = {name: layers - blocks for name, layers in again.layers.items() if name != "block"}
    for module in modules:
        layers = module.layers or ()
        of_token += module.kept * (module.number - len(blocks.intersection(layers)))
        of_token -= sum(
            number * len(apart[name].intersection(layers)) for name, number in module.freed if name in apart
        )
    choices = len(blocks.intersection(m.moe_layers)) * m.moe.top_k * CHOICE_BYTES
    of_experts = 0 if has_arena else _expert_elements(recipe, capacity_factor)
    of_token += _clip_elements(recipe) + _code_elements(recipe)
    kept = round(of_token * num_tokens + of_experts) * element + choices * num_tokens
    if has_arena and m.num_moe_layers:  # of recomputed blocks one at a time
        num_at_once = max(m.num_moe_layers - len(blocks.intersection(m.moe_layers)), 1)
        kept += num_at_once * assignment_bytes_of_pieces(recipe)
    return kept - sum(sent_bytes(recipe))


def _delayed_bytes(part: RankPart, capacity_factor: float, experts: str) -> int:
    """The bytes by which a microbatch that waits for weight gradients of experts keeps more than one before backward,
    beside the arena: gradients of results and of activations, less what attention, routers and shared experts kept, if
    they delay nothing themselves."""
    if part.has_arena(experts):
        return 0
    recipe, m, (rows, slots) = part.recipe, part.recipe.model, _sizes(part.recipe, capacity_factor)
    elements = m.num_moe_layers * (rows * m.expert_width + slots * expert_hidden_size(recipe))
    if not _linears_delay(recipe):
        modules = (module for module in modules_of(m, recipe.parallel) if module.region != "dense")
        elements -= sum(module.number * module.kept for module in modules) * microbatch_tokens(recipe)
    return max(round(elements * BYTES_OF_DTYPE[recipe.precision.compute]), 0)


def _linears_delay(recipe: Recipe) -> bool:
    """Whether dense linear layers delay their weight gradients under split backwards, so that their inputs are kept."""
    linears = (module for module in gemm_modules(recipe.model) if module.part == "linears")
    return any(obstacle_of(recipe, module) is None for module in linears)


def _clip_elements(recipe: Recipe) -> float:
    """Elements of a token that QK-clip keeps in all layers: queries and keys, where attention keeps copies of them that
    are as wide as sinks need. A part that is computed again makes the copies again."""
    a, p = recipe.model.attention, recipe.parallel
    is_ring = p.cp > 1 and p.cp_kind == "ring"
    if not (recipe.optim.qk_clip.is_used and a.sinks) or recipe.perf.attention == "flex" or is_ring:
        return 0.0
    core = next(it for it in modules_of(recipe.model, p) if it.path == "attention")
    attended = core.kept - dict(core.freed)["attention"]  # queries, keys and values
    again = recompute_of(recipe).of("block", "attention")
    number = sum(layer not in again for layer in core.layers or ())
    return number * (a.num_heads * a.head_dim + attended) / 2


def _code_elements(recipe: Recipe) -> float:
    """Elements of a token that our linear layers in fp8 keep in all layers, beyond what they keep in the dtype of
    compute."""
    formats, backend = recipe.precision.gemm_formats("linears"), recipe.precision.backend
    is_ours = formats.fprop in ("fp8_rowwise", "fp8_blockwise") and formats.fprop == formats.dgrad == formats.wgrad
    if not is_ours or backend == "emulated" or recipe.run.device == "cpu":
        return 0.0
    linears = [it for it in gemm_modules(recipe.model, recipe.parallel) if it.part == "linears"]
    again, elements = recompute_of(recipe), 0.0
    for it in linears:
        names = () if it.layer is None else again.names_of(it.layer)
        if "block" not in names and not why_kept(recipe, it):
            elements += it.row.kept_as_codes + (it.row.own_widths[0] if it.row.reads in names else 0)
    return elements


class _Sizes(NamedTuple):
    """Rows and slots that a MoE layer allocates."""

    rows: float
    slots: float


def _sizes(recipe: Recipe, capacity_factor: float) -> _Sizes:
    """Without an arena: what a balanced load needs where sizes are exact, that times the factor where a bound is set,
    and the worst case where sizes are neither read nor bounded."""
    if not recipe.model.num_moe_layers:
        return _Sizes(0, 0)
    loads, p = layer_loads(recipe), recipe.parallel
    rows, slots = loads.rows, float(loads.slots)
    if p.facts.sends == "every_row":
        rows = p.ep * p.etp * microbatch_tokens(recipe)
    if not p.facts.can_be_bounded:
        return _Sizes(rows, min(slots, loads.worst_slots))
    factor = capacity_factor if p.has_auto_capacity or p.fixed_capacity_factor else float("inf")
    return _Sizes(min(factor * rows, loads.worst_rows), min(factor * slots, loads.worst_slots))


def _expert_elements(recipe: Recipe, capacity_factor: float) -> int:
    """Elements of rows and hidden states of all layers; rows that are not sent are the norm's. In fp8, which layers may
    have or not, rows are copies in any case, and two codes are an element of bf16. Where experts are recomputed, only
    rows are kept."""
    (rows, slots), p = _sizes(recipe, capacity_factor), recipe.parallel
    sent = rows if p.facts.moves_rows or p.etp > 1 else 0
    width, hidden, m = recipe.model.expert_width, 2 * expert_hidden_size(recipe), recipe.model
    if not m.num_moe_layers:
        return 0
    again, of_moe = recompute_of(recipe).layers, m.moe_layers
    of_mtp = [layer for layer in m.mtp_layers if layer in of_moe]
    repeated, in_blocks, without_hidden = (
        len(again.get(name, frozenset()).intersection(of_moe)) for name in ("experts", "block", "moe_act")
    )
    again_by_mtp = max(m.mtp.num_uses - 1, 0) * len(of_mtp)
    kept = m.num_moe_layers + again_by_mtp - repeated - in_blocks
    native = kept * count_packed_experts(recipe) / m.num_moe_layers
    copied = sent or microbatch_tokens(recipe)
    share = 1 - without_hidden / max(kept, 1)
    rank = m.adapter.rank_of("experts")
    if recipe.perf.fuses_experts if rank else experts_of(recipe) == "fused":
        hidden += 3 * rank
    else:  # composed: rows of slots, activations and results of first factors are kept
        hidden, share = round(width + 1.5 * hidden + 3 * rank), 1.0
    plain, codes = sent * width + share * slots * hidden, (copied * width + share * slots * hidden) / 2
    received = 0 if p.facts.shares_memory_of_ep else sent * width  # else experts get rows again
    return round((kept - native) * plain + native * codes + repeated * received)


def _temporary_bytes(recipe: Recipe, capacity_factor: float, held: Held, *, has_arena: bool) -> float:
    """Bytes of the temporaries of the layer that has most, in backward; with those that it computes again."""
    m, num_tokens, element = recipe.model, microbatch_tokens(recipe), BYTES_OF_DTYPE[recipe.precision.compute]
    gradients, again = defaultdict[str, int](int), recompute_of(recipe).layers
    for module in modules_of(m, recipe.parallel):
        gradients[module.region] += (module.gradients + module.freed_by(again)) if module.number else 0
    most: float = max(gradients.values()) * num_tokens * element
    if m.num_moe_layers and has_arena:
        most = max(most, temporary_bytes_per_rank(recipe) + held.computing, held.reducing)
    elif m.num_moe_layers:
        sizes, num_native = _sizes(recipe, capacity_factor), count_packed_experts(recipe)
        for is_native in {num_native > 0, num_native == m.num_moe_layers}:
            of_layer = temporary_bytes(recipe, *sizes, is_native=is_native)
            most = max(most, of_layer + held.computing, held.reducing)
    return most + _recomputed_bytes(recipe, capacity_factor, has_arena=has_arena) + numbers_bytes(recipe)


def _recomputed_bytes(recipe: Recipe, capacity_factor: float, *, has_arena: bool) -> float:
    """Bytes of what backward computes again of one layer, without the arena."""
    m, again = recipe.model, recompute_of(recipe)
    elements = 0.0
    if "block" in again.layers and m.num_moe_layers and not has_arena:
        elements += _sizes(recipe, capacity_factor).slots * 2 * expert_hidden_size(recipe)
    if rank := m.adapter.rank_of("experts"):  # composed: rows and results of slots, activations; low products
        of_slot = 3 * rank + (0 if recipe.perf.fuses_experts else 2 * m.expert_width + expert_hidden_size(recipe))
        elements += _sizes(recipe, capacity_factor).slots * of_slot if m.num_moe_layers else 0
    if "norms" in again.layers:  # what reads it first in backward makes it, and the router reads it last
        elements += m.hidden_size * microbatch_tokens(recipe)
    if "block" in again.layers:
        modules = modules_of(m, recipe.parallel)
        of_layers = [0] * m.num_blocks
        for it in modules:
            for layer in it.layers or ():
                of_layers[layer] += it.kept
        elements += max(of_layers, default=0) * microbatch_tokens(recipe)
    return elements * BYTES_OF_DTYPE[recipe.precision.compute]


def _loss_bytes(recipe: Recipe) -> int:
    """Bytes of what the loss computes with: logits of a chunk of tokens, their gradients, and the gradients of its
    inputs and, in fp32, of the head (kernels/loss)."""
    m, p, perf = recipe.model, recipe.parallel, recipe.perf
    element = BYTES_OF_DTYPE[recipe.precision.compute]
    wide = max(element, BYTES_OF_DTYPE["fp32"])
    num_tokens = microbatch_tokens(recipe) * p.tp  # ranks of tp have other words
    num_words = m.vocab_size // p.tp
    logits = min(perf.loss_chunk_tokens or num_tokens, num_tokens) * num_words
    weight = num_words * m.hidden_size if trains_head(m, recipe.optim.trainable) else 0
    inputs = num_tokens * m.hidden_size * element * (1 if p.tp == 1 else 2)  # gathered over tp
    inputs += m.mtp.num_depths * (inputs + weight * wide)  # the losses of other depths keep their gradients
    if _has_triton_loss(recipe):
        return inputs + max(logits * element + weight * wide, weight * (wide + element))
    # the sum of weight gradients is a new tensor in each chunk, and in backward
    products = max(logits * element + 2 * weight * wide, weight * (2 * wide + element))
    if p.tp == 1 and perf.loss_chunk_tokens == 0:  # logits, log-softmax and its gradients in fp32
        softmax = 3 * logits * wide
    elif p.tp == 1 and recipe.compile.compiles("cpu" if recipe.run.device == "cpu" else "cuda"):
        softmax = 2 * logits * element + weight * wide
    else:  # in fp32: logits, exponentials and what becomes the gradient, beside the words of labels
        softmax = logits * (element + (4 if p.tp == 1 else 5) * wide + 1) + weight * wide
    return inputs + max(softmax, products)


def _has_triton_loss(recipe: Recipe) -> bool:
    """Whether Triton computes the loss, before the machine is known: where `auto` may choose it for a GPU
    (plan/choice/kernels.py)."""
    perf = recipe.perf
    if perf.kernels != "auto" or perf.override.head != "no":
        return perf.chosen_kernels.head == "triton"
    may_be_fused = recipe.run.device != "cpu" and recipe.precision.compute == "bf16"
    return may_be_fused and "head" not in recipe.model.unmet_needs_of_triton
