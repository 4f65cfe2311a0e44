"""The peak of a rank's memory in a step, estimated.

Three moments of a step may have the peak:

* At the beginning of a microbatch's backward, all its activations exist, in a pipeline also those of other microbatches
  in flight, and the gradients of the previous microbatches.
* At its end all gradients exist. Its activations are freed, but not the arena.
* After the last backward, gathered parameters are freed, and tp ranks sum gradients.

The estimate counts the tensors that compiled blocks keep. It leaves out workspaces of libraries, fragmentation,
symmetric memory and messages between stages.
"""

from titan_moe.config.arena import has_arena
from titan_moe.config.gemms import has_native_experts
from titan_moe.config.model import ModelConfig
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import Recipe, expert_hidden_size, microbatch_tokens, num_microbatches
from titan_moe.plan.count import expert_width
from titan_moe.plan.loads import layer_loads
from titan_moe.plan.memory import (
    arena_bytes_per_rank,
    experts_per_rank,
    gathered_bytes,
    parameters_of,
    temporary_bytes_per_rank,
)
from titan_moe.plan.pipeline.parts import Part, parts_of
from titan_moe.plan.replicated_grads import flat_copy_bytes


def peak_bytes_per_rank(recipe: Recipe, world_size: int, capacity_factor: float, experts: str = "fused") -> int:
    """Estimate the peak in bytes, with this implementation of the experts; in a pipeline on the rank that has most. If
    the capacity is "auto", `capacity_factor` is that of the load, with its margin."""
    return max(peak_bytes(part, capacity_factor, experts) for part in parts_of(recipe, world_size))


def peak_bytes(part: Part, capacity_factor: float, experts: str = "fused") -> int:
    """The same on a pipeline rank."""
    recipe, p, count = part.recipe, part.recipe.precision, part.count
    parameters = parameters_of(part)
    state = parameters * (BYTES_OF_DTYPE[p.master] + p.bytes_of_moments)
    gradients = parameters * BYTES_OF_DTYPE[p.master]
    gathered = gathered_bytes(part)
    # what FSDP gathers for all of forward and backward
    of_root = (count.embedding + count.head) / recipe.parallel.tp
    root = 0 if recipe.parallel.accumulate_unsharded else of_root * BYTES_OF_DTYPE[p.compute]
    arena, temporary = 0, 0
    if has_arena(recipe, experts):
        arena = arena_bytes_per_rank(recipe, capacity_factor, part.places)
        temporary = temporary_bytes_per_rank(recipe)
    of_one = activation_bytes_per_rank(recipe, experts)
    activations = part.num_in_flight * of_one
    begin: float = gathered + arena + activations + (_loss_bytes(recipe) if part.has_head else 0)
    if num_microbatches(recipe, part.world_size) > 1:  # sums of the microbatches before; unsharded ones are gathered
        experts_alone = experts_per_rank(recipe) * BYTES_OF_DTYPE[p.master]
        begin += experts_alone if recipe.parallel.accumulate_unsharded else gradients
    end = gradients + arena + temporary + (gathered if recipe.parallel.accumulate_unsharded else 0)
    end += max(part.num_in_flight - 1, 0) * of_one  # of the others in flight
    after = gradients + arena + flat_copy_bytes(part)
    return round(state + max(root + begin, root + end, after))


def activation_bytes_per_rank(recipe: Recipe, experts: str = "fused") -> int:
    """Count the bytes that all blocks of a recipe keep of a microbatch for backward, without the arena.

    A rank of cp or tp keeps its tokens, or its heads of all tokens; gathered inputs, keys and values are left out.
    """
    m, num_tokens = recipe.model, microbatch_tokens(recipe)
    if recipe.memory.recompute == "block":
        elements = m.num_layers * m.hidden_size * num_tokens
    else:
        of_blocks = m.num_layers * _attention_elements(m)
        of_dense = (m.num_layers - m.num_moe_layers) * 2 * m.ffn_hidden_size
        of_moe = m.num_moe_layers * (2 * m.moe.shared_ffn_hidden_size + 2 * m.moe.num_experts)  # logits are fp32
        elements = (of_blocks + of_dense + of_moe) * num_tokens
        if not has_arena(recipe, experts) and recipe.memory.recompute == "none":
            elements += m.num_moe_layers * _expert_elements(recipe)
    return elements * BYTES_OF_DTYPE[recipe.precision.compute]


def _attention_elements(m: ModelConfig) -> int:
    """Elements of a token that attention and the norms of a block keep: inputs and outputs of both norms, projections
    before and after the rotation, the result."""
    a = m.attention
    if a.kind == "gqa":
        projections = 2 * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
        result = a.num_heads * a.head_dim
    else:
        head = a.qk_nope_head_dim + a.qk_rope_head_dim
        latents = 2 * a.kv_lora_rank + a.qk_rope_head_dim + 2 * a.q_lora_rank
        values = a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)
        projections = 2 * a.num_heads * head + latents + values + a.num_heads * head
        result = a.num_heads * a.v_head_dim
    return 4 * m.hidden_size + projections + result


def _expert_elements(recipe: Recipe) -> int:
    """Elements of a layer's rows and hidden states under a balanced load; rows that are not sent are the norm's. In fp8
    rows are copies in any case, and two codes are an element of bf16."""
    loads, p = layer_loads(recipe), recipe.parallel
    is_sent = p.facts.moves_rows or p.etp > 1
    rows = loads.rows if p.facts.sends != "every_row" else p.ep * p.etp * microbatch_tokens(recipe)
    width, hidden = expert_width(recipe.model), 2 * expert_hidden_size(recipe)
    if has_native_experts(recipe):
        copied = rows if is_sent else microbatch_tokens(recipe)
        return round((copied * width + loads.slots * hidden) / 2)
    return round(is_sent * rows * width) + loads.slots * hidden


def _loss_bytes(recipe: Recipe) -> int:
    """Bytes of a chunk of logits."""
    num_tokens = microbatch_tokens(recipe) * recipe.parallel.tp  # ranks of tp have other words
    chunk = min(recipe.perf.loss_chunk_tokens or num_tokens, num_tokens)
    return chunk * recipe.model.vocab_size // recipe.parallel.tp * BYTES_OF_DTYPE[recipe.precision.compute]
