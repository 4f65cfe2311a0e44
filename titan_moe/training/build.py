"""The assembly: the order of the transforms of a model, and the parts of a run around it."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from titan_moe.adapters import frozen, low_rank, stored
from titan_moe.compile import regional
from titan_moe.config import Recipe, RecipeError
from titan_moe.config.clones import cost_slots
from titan_moe.config.context import ring_backend, sequence_shard
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import ModelConfig
from titan_moe.config.trainable import trains_all
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.clones.optional import ReplicaSlots
from titan_moe.kernels.delayed_weight_grads import WeightGradQueue
from titan_moe.layers.forced_routing import force_load
from titan_moe.layers.hash_router import fill_tables
from titan_moe.layers.init import init_weights
from titan_moe.layers.mtp import loss_sums_of
from titan_moe.memory import offload, recompute
from titan_moe.memory.saved_tensors import Scope
from titan_moe.metrics import regions
from titan_moe.metrics.table import measured
from titan_moe.models.part import tied_weight
from titan_moe.optim.build import Optimizers, build_optimizer
from titan_moe.optim.groups import check_groups
from titan_moe.optim.schedule import Schedules, build_schedule
from titan_moe.optim.state import MOMENTS
from titan_moe.parallel import (
    arena,
    context,
    expert,
    fsdp,
    masters,
    qk_clip,
    sequence,
    symm_memory,
    tensor,
    tensor_overlap,
)
from titan_moe.parallel.balance import ExpertBalancer, count_experts
from titan_moe.parallel.batch_counts import BatchCounts, sum_counts_of_batch
from titan_moe.parallel.grads import ReplicatedGrads
from titan_moe.parallel.mesh import Meshes, build_meshes
from titan_moe.parallel.pipeline import stages, weight_grads
from titan_moe.parallel.pipeline.agreement import check_one_schedule
from titan_moe.parallel.pipeline.model import Model, whole_model
from titan_moe.parallel.pipeline.stages import find_tied_embedding
from titan_moe.parallel.routing import StepRouting
from titan_moe.parallel.step_noise import StepNoise
from titan_moe.parameters import TENSOR_AXIS, named_kinds
from titan_moe.plan.cost.memory import bytes_beyond_a_piece, temporary_bytes_per_rank
from titan_moe.plan.cost.peak import graph_bytes
from titan_moe.plan.resolved import Resolved
from titan_moe.precision import policy
from titan_moe.training.capacity_control import CapacityControl, FixedCapacity, LargestNeed, largest_factor, missing_gib
from titan_moe.training.clone_control import CloneControl
from titan_moe.training.controller import Controller
from titan_moe.training.forward_backward import build_forward_backward, counting_ahead
from titan_moe.training.layer_capacity import LayerCapacity, has_room
from titan_moe.training.model_class import check_interface, check_parts, import_model_class
from titan_moe.training.peak_memory import PeakMemory
from titan_moe.training.skips import Skips
from titan_moe.training.spikes import Spikes
from titan_moe.training.step import TrainStep
from titan_moe.training.step_runner import StepRunner


class Assembly(NamedTuple):
    """The training state of this rank."""

    meshes: Meshes
    model: Model  # all of it, without gradients: on this rank, or over the stages of a pipeline
    parts: list[nn.Module]  # this rank's part of it: the model, or some stages
    optimizers: Optimizers
    schedule: Schedules
    step: StepRunner


def assemble(recipe: Recipe, device: torch.device) -> Assembly:
    """Build model, optimizer and step of a recipe; the process group must exist."""
    resolved = Resolved(recipe, dist.get_world_size())
    check_one_schedule(resolved, device)  # before groups are made: ranks with another recipe would wait there
    meshes = build_meshes(resolved.sizes, device)
    factors = recipe.parallel.fixed_capacity_factor, recipe.parallel.expert_layer_capacity_factor
    capacity = ExpertCapacity(factors[0], device, factors[1])
    model = build_on_meta(recipe)
    num_experts, is_tied = count_experts(model), tied_weight(model) is not None or recipe.model.mtp.num_layers > 0
    queue = WeightGradQueue() if resolved.splits_backward else None
    replicas = replica_slots(resolved)
    parts = build_parts(model, resolved, meshes, device, capacity, queue, replicas)
    if recipe.model.moe.hash_table:
        _fill_tables(parts, recipe)
    may_freeze = recipe.model.class_ != ModelConfig.class_ or not trains_all(recipe.model, recipe.optim.trainable)
    if recipe.parallel.pp > 1 and may_freeze:
        check_parts(parts, recipe)
    moments, is_captured = MOMENTS[recipe.precision.moments_dtype], recipe.compile.cudagraph == "step"
    options = {"moments": moments, "seed": recipe.run.seed, "capturable": is_captured, "park": recipe.memory.park}
    optimizers = build_optimizer(parts, recipe.optim, **options)
    if recipe.optim.qk_clip.is_used:
        clip = recipe.optim.qk_clip, recipe.model.attention, meshes.stage_group, device
        optimizers.clip = qk_clip.build_qk_clip(parts, *clip)
    schedule = build_schedule(optimizers, recipe.optim, recipe.train.steps)
    tied = find_tied_embedding(parts, resolved, meshes, is_tied=is_tied)
    spikes = [Spikes(recipe.train.spike_sigmas, device)] if recipe.train.spike_sigmas else []
    step_number = torch.zeros((), dtype=torch.int64, device=device)
    noise = _input_noise(parts, recipe, meshes, step_number)
    routing, whole = StepRouting(parts, recipe.model, meshes, noise), whole_model(parts, resolved, meshes)
    forward_backward = build_forward_backward(parts, resolved, meshes, tied, queue, capacity=capacity, routing=routing)
    if recipe.model.moe.aux_losses.global_batch:
        counts = BatchCounts(parts, meshes, max(recipe.model.mtp.num_uses, 1))
        forward_backward = counting_ahead(forward_backward, whole, parts, counts, capacity=capacity, routing=routing)
    step = TrainStep(
        forward_backward=forward_backward,
        optimizers=optimizers,
        balancer=ExpertBalancer(parts, meshes.world_group, num_experts, meshes.stage_group),
        capacity=capacity,
        replicas=replicas,
        max_grad_norm=recipe.optim.max_grad_norm,
        meshes=meshes,
        controllers=[Skips(device), *spikes],
        metrics=measured(recipe),
        tied=() if tied is None else tuple(tied.weights),
        replicated=list(_replicated_grads(recipe, meshes, optimizers, parts)),
        mtp=[sums for part in parts for sums in loss_sums_of(part)],
        qk_clip=optimizers.clip,
        routing=routing,
    )
    of_bounded = bytes_beyond_a_piece(recipe) if capacity.bounds_each_layer else 0  # more than the first of "auto"
    memory = PeakMemory(capacity, _bytes_of_a_graph(resolved, meshes), of_bounded)
    runner = StepRunner(
        step,
        schedule,
        is_captured,
        controllers=_controllers(resolved, memory),
        step_number=step_number if _force_load(parts, recipe, step_number) or noise else None,
        memory=memory,
    )
    return Assembly(meshes, whole, parts, optimizers, schedule, runner)


def _fill_tables(parts: list[nn.Module], recipe: Recipe) -> None:
    """Raises: RecipeError for tables that do not fit."""
    try:
        fill_tables(parts, recipe.model.moe.hash_layers, recipe.model.moe.hash_table)
    except ValueError as error:
        raise RecipeError([str(error)]) from error


def _force_load(parts: list[nn.Module], recipe: Recipe, step: torch.Tensor) -> bool:
    """Force the load of the recipe, whose step is on the device. Returns whether there is one."""
    model = recipe.model
    for part in parts if recipe.train.forces_load else ():
        force_load(part, recipe.train.forced_load, model.moe, recipe.parallel.ep, step.device, step, model.moe_layers)
    return recipe.train.forces_load


def _input_noise(parts: list[nn.Module], recipe: Recipe, meshes: Meshes, step: torch.Tensor) -> StepNoise | None:
    """The noise on routers' inputs, if the recipe has some."""
    eps, shard = recipe.model.moe.input_jitter, sequence_shard(recipe.parallel, meshes.context_rank)
    return StepNoise(parts, eps, recipe.run.seed, step, meshes, shard) if eps else None


def _replicated_grads(
    recipe: Recipe, meshes: Meshes, optimizers: Optimizers, parts: list[nn.Module]
) -> Iterator[ReplicatedGrads]:
    """What ranks of tp sum, and those of etp, of which each has a part of an expert's adapter."""
    dtype = fsdp.DTYPES[recipe.precision.reduce]
    if recipe.parallel.tp > 1:
        yield ReplicatedGrads(optimizers.parameters, meshes.dense[TENSOR_AXIS].get_group(), dtype)
    if recipe.parallel.etp > 1 and recipe.model.adapter.has("experts"):
        factors = (parameter for part in parts for _, parameter, kind in named_kinds(part) if kind.is_factor)
        yield ReplicatedGrads(factors, meshes.etp.get_group(), dtype, "etp")


def _bytes_of_a_graph(resolved: Resolved, meshes: Meshes) -> int:
    """By how much a CUDA graph raises the peak on this rank, estimated; 0 without one."""
    if resolved.recipe.compile.cudagraph == "off":
        return 0
    return graph_bytes(resolved.parts[meshes.dense.get_local_rank("pp")])


def _controllers(resolved: Resolved, memory: PeakMemory) -> list[Controller]:
    """What the host follows; if it is nothing, the host reads nothing."""
    recipe, capacity = resolved.recipe, memory.capacity
    fixed = FixedCapacity(capacity.capacity_factor) if capacity.bounds_all_layers else None
    of_capacity = _capacity_control(recipe, memory) or fixed
    need = LargestNeed() if of_capacity else None
    temporary_bytes = partial(temporary_bytes_per_rank, recipe)
    layers = LayerCapacity(capacity.layer_factor, partial(has_room, memory, temporary_bytes))
    of_layers = layers if capacity.bounds_each_layer else None
    clones = CloneControl(resolved.clones_pay_from) if recipe.parallel.has_clones else None
    return [controller for controller in (of_capacity, of_layers, need, clones) if controller is not None]


def _capacity_control(recipe: Recipe, memory: PeakMemory) -> CapacityControl | None:
    """What chooses the capacity factor of each step; None where the recipe does, or nothing is kept for backward."""
    follows_load, arena = recipe.parallel.has_auto_capacity and recipe.model.num_moe_layers > 0, memory.capacity.arena
    keeps_nothing = arena is not None and arena.is_checkpointed
    if not follows_load or keeps_nothing:
        return None
    largest, missing = partial(largest_factor, memory), partial(missing_gib, memory)
    return CapacityControl(largest=largest, missing_gib=missing, grows_ahead=arena is not None)


def build_parts(
    model: nn.Module,
    resolved: Resolved,
    meshes: Meshes,
    device: torch.device,
    capacity: ExpertCapacity,
    queue: WeightGradQueue | None = None,
    replicas: ReplicaSlots | None = None,
) -> list[nn.Module]:
    """Shard, compile and initialise this rank's part of the model of a recipe, which is on the meta device.

    `queue` takes the weight gradients of layers that can delay them. `replicas` are those of `replica_slots`.
    """
    recipe, replicas = resolved.recipe, replicas or replica_slots(resolved)
    policy.convert(model, resolved, device)  # first: it swaps modules, and shards must be of the final ones
    stored.apply(model, recipe.model.adapter, recipe.optim.trainable)  # swaps modules too, whose weights are wide yet
    low_rank.apply(model, recipe.model.adapter)  # beside the final modules, and before shards
    of_compute, has_adapters = fsdp.DTYPES[recipe.precision.compute], recipe.model.adapter.is_used
    frozen.freeze(model, recipe.optim.trainable, of_compute, has_adapters=has_adapters)  # by names of the whole model
    check_groups(model, recipe.optim.groups)
    parts = stages.split(model, resolved, meshes)  # before sharding: a rank shards only its own stages
    layers = nn.ModuleList(parts)
    nodes = expert.open_nodes(recipe.parallel, meshes.ep.get_group())
    memory = symm_memory.share_memory(layers, resolved, meshes, device, capacity, nodes)
    tensor_overlap.open_workspace(resolved.workspace_bytes, meshes, device)
    rank = meshes.dense.get_local_rank("pp")
    arena.give_arena(model, parts, resolved, device, capacity, pipeline_rank=rank)
    ring = ring_backend(
        recipe.perf.attention,
        device.type,
        head_dim=recipe.model.attention.head_dim,
        is_deterministic=recipe.run.is_deterministic,
    )
    copies = offload.copies_of(device)
    for part in parts:
        # experts leave the dense mesh before FSDP
        expert.apply(part, recipe.parallel, meshes, capacity, memory, nodes, replicas)
        tensor.apply(part, recipe.parallel, meshes)  # the compiler sees its collectives, and FSDP its shards
        context.apply(part, recipe.parallel, meshes, ring)  # exchanges the heads that tensor parallelism has left
        sequence.apply(part, recipe.parallel, meshes)
        if recipe.optim.qk_clip.is_used:  # of the heads and keys that these have left
            of_heads = resolved.kernels.rotary
            qk_clip.measure_logits(part, recipe.model.attention, recipe.parallel, meshes, of_heads)
        sum_counts_of_batch(part, meshes)
        weight_grads.apply(part, queue, recipe.compile, device)  # delays those of what will not be compiled
        borders = recompute.borders(part, resolved.recompute) | offload.borders(part, resolved.offload)
        regional.apply(part, recipe.compile, device, borders)  # pieces: the hooks of FSDP stay outside the graphs
        if recipe.profile.start_step:
            regions.apply(part)  # names in the trace, around compiled pieces and inside recomputed ones
        scopes = {layer: Scope() for layer, _ in part.get_submodule("layers").named_children()}
        recompute.apply(part, resolved.recompute, scopes)  # around compiled code
        offload.apply(part, resolved.offload, copies, scopes)
        fsdp.apply(part, resolved, meshes, replicas)  # outermost: gathers around compiled code
        part.to_empty(device=device)
        masters.apply(part, recipe.precision)
        seed, stds = recipe.run.seed, {"std": recipe.model.init_std, "embedding_std": recipe.model.embedding_init_std}
        init_weights(part, seed, num_layers=recipe.model.num_layers, **stds)
    return parts


def replica_slots(resolved: Resolved) -> ReplicaSlots:
    """The replica slots of all layers, which are not used at first."""
    return ReplicaSlots(resolved.num_clones, cost=cost_slots(resolved.recipe))


def build_on_meta(recipe: Recipe) -> nn.Module:
    """Build the plain model on the meta device, in the dtype of its parameters.

    Raises: RecipeError if the class cannot be imported or called, or breaks its contract.
    """
    model = build_unchecked(recipe, recipe.perf.chosen_kernels)
    check_interface(model, recipe)
    return model


def build_unchecked(recipe: Recipe, kernels: Kernels) -> nn.Module:
    """The same with these kernels, whatever its class makes.

    Raises: RecipeError if the class cannot be imported or called.
    """
    model_class = import_model_class(recipe.model.class_)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(fsdp.DTYPES[recipe.precision.parameters])
    try:
        with torch.device("meta"):
            return model_class(recipe.model, kernels=kernels, loss_chunk_tokens=recipe.perf.loss_chunk_tokens)
    finally:
        torch.set_default_dtype(previous)
