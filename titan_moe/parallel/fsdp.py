"""Fully sharded data parallelism (FSDP2): dense parameters over the dense mesh, experts over the expert mesh.

Gradients are summed, never averaged: the loss is already divided by the tokens of the whole step. So experts, whose
gradients come from fewer ranks, need no scale of their own. Unsharded experts bypass FSDP (unsharded_experts.py), and
so do frozen parameters that a rank has whole: there is nothing to gather, and FSDP would copy them in every microbatch.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from titan_moe.config.precision import PrecisionConfig
from titan_moe.dispatch.clones.optional import ReplicaSlots
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.mtp import MTPBlock
from titan_moe.parallel.mesh import Meshes
from titan_moe.parallel.unsharded_experts import use_unsharded_experts
from titan_moe.parameters import SCALES, names_of_codes
from titan_moe.plan.pipeline.pieces import ROOT
from titan_moe.plan.resolved import Resolved
from titan_moe.versions import IGNORES_GRAD_DTYPES, KEEPS_SUMS_OF_GRADIENTS_APART

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def apply(
    model: nn.Module,
    resolved: Resolved,
    meshes: Meshes,
    replicas: ReplicaSlots | None = None,
) -> None:
    """Wrap experts, blocks and the root, innermost first.

    Where microbatches are interleaved, experts are gathered in their block's pre-forward hook: hooks of their own would
    run in its pieces (`ManualFSDP`). `replicas` are those of `expert.apply`.
    """
    config, policy = resolved.recipe.parallel, _mixed_precision(resolved.recipe.precision)
    reshards = not config.accumulate_unsharded
    blocks = list(model.get_submodule("layers").children())
    bypassing = set(_frozen_whole_parameters(model, meshes.dense_fsdp, policy, of_experts=False))
    options: dict[str, Any] = {
        "mesh": meshes.dense_fsdp,
        "mp_policy": policy,
        "ignored_params": bypassing,
        "shard_placement_fn": _dense_placement,
    }
    for block in blocks:
        for experts in _all_experts_of(block):
            if resolved.experts_are_unsharded:
                use_unsharded_experts(
                    experts,
                    meshes.expert_fsdp,
                    policy.param_dtype,
                    keeps=config.accumulate_unsharded or config.pp > 1,  # one copy for all microbatches in flight
                    gradients=resolved.kernels.gradients,
                    delay_weight_grads_of_experts=resolved.delays_weight_grads_of_experts,
                    room=replicas,
                )
                bypassing.update(experts.parameters())
            else:
                mesh, reshards_experts = meshes.expert_fsdp, reshards and config.reshard_experts_after_forward
                whole = set(_frozen_whole_parameters(experts, mesh, policy, of_experts=True))
                _shard_experts(experts, mesh, policy, reshards_experts, whole)
                bypassing.update(whole)
        fully_shard(block, reshard_after_forward=reshards and config.reshard_after_forward, **options)
        if config.overlap == "microbatch":
            for experts in _experts_of(block):
                _unshard_in_pre_forward(experts, block)
    fully_shard(model, reshard_after_forward=False, **options)
    _prefetch(blocks)
    _prefetch_mtp(model, blocks)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _sum_gradients(module, meshes.expert_fsdp if isinstance(module, GroupedExperts) else meshes.dense_fsdp)


def _frozen_whole_parameters(
    module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, of_experts: bool
) -> Iterator[nn.Parameter]:
    """Frozen parameters of routed experts, or of all else, that each rank of the mesh has whole, in the dtype that
    computes with them: all that FSDP would shard over one rank, and codes with their scales, which a gather would
    cast."""
    codes = {f"{name}{end}" for name in names_of_codes(module) for end in ("", SCALES)}
    in_experts = {id(weight) for experts in _all_experts_of(module) for weight in experts.parameters()}
    for name, weight in module.named_parameters():
        if weight.requires_grad or (id(weight) in in_experts) != of_experts:
            continue
        is_ready = policy.param_dtype in (None, weight.dtype)
        if name in codes or (is_ready and mesh.size(-1) == 1):
            yield weight


def _mixed_precision(precision: PrecisionConfig) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=None if precision.compute == precision.parameters else DTYPES[precision.compute],
        reduce_dtype=None if precision.reduce == precision.compute else DTYPES[precision.reduce],
        cast_forward_inputs=False,  # routing scores must stay fp32
    )


def _sum_gradients(module: FSDPModule, mesh: DeviceMesh) -> None:
    """Do not average. On a mesh of one rank there is nothing to average, and a factor would cost a division by one."""
    if mesh.size() > 1:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


@torch.no_grad()
def keep_gradients_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep reduced gradients in a dtype other than that of the parameters. Before 2.15, FSDP does not read the
    parameters' `grad_dtype`."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = dtype
    for group in _groups(model) if IGNORES_GRAD_DTYPES.is_here else []:
        group._init_mp_dtypes = partial(_init_dtypes, group, group._init_mp_dtypes, dtype)


def _init_dtypes(group: Any, init: Callable[[], None], dtype: torch.dtype) -> None:
    init()
    group._orig_dtype = dtype


def set_replica_reduction(model: nn.Module, is_last: bool) -> None:
    """Set whether the next backward sums gradients over replicas, as the last of a step does, or this rank's shards
    alone."""
    _fsdp(model).set_requires_all_reduce(is_last)


def set_unsharded_accumulation(model: nn.Module, keeps: bool) -> None:
    """Set whether the next backwards keep parameters unsharded and gradients unreduced, or reshard and reduce them."""
    _fsdp(model).set_requires_gradient_sync(not keeps)
    _fsdp(model).set_reshard_after_backward(not keeps)


@torch.no_grad()
def accumulate_late_grads(model: nn.Module) -> None:
    """Add gradients that arrive after a backward, and so after the hooks of FSDP, to the sums that the hooks keep, in
    the dtype of the reduction. The next gradient would be added in compute's dtype."""
    if not KEEPS_SUMS_OF_GRADIENTS_APART.is_here:
        return
    for group in _groups(model):
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


@torch.no_grad()
def start_reducing(model: nn.Module) -> None:
    """Reshard parameters and start to reduce their gradients, as the hooks of FSDP do in a backward."""
    set_unsharded_accumulation(model, False)
    for group in reversed(_groups(model)):
        group.post_backward()


def finish_reducing(model: nn.Module) -> None:
    """Wait for the reduced gradients."""
    root = _fsdp(fully_shard.state(model))  # ends a backward, as FSDP does, whether or not FSDP has begun it
    root._state_ctx.manual_backward_finalization_active = False  # torch 2.15: whether another call is to reduce
    root._root_post_backward_final_callback()


def _groups(model: nn.Module) -> list[Any]:
    """The parameters that FSDP gathers together, by module; a module without parameters of its own has none."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [_fsdp(fully_shard.state(module))._fsdp_param_group for module in modules]
    return [group for group in groups if group is not None]


class ManualFSDP:
    """Gathers parameters once a step and reduces gradients where blocks run in pieces, past the hooks of FSDP.

    Bit for bit what the hooks do under `set_unsharded_accumulation`. Layers are those of plan/pipeline/pieces.py.
    """

    def __init__(self, model: nn.Module) -> None:
        _fsdp(fully_shard.state(model))._lazy_init()  # shares streams between the groups
        blocks = enumerate(model.get_submodule("layers").children())
        self.modules = {ROOT: [model], **{layer: [block, *_experts_of(block)] for layer, block in blocks}}
        self.handles: dict[int, list[Any]] = {}

    def gather(self, layer: int) -> None:
        """Start the all-gather of a layer's parameters."""
        self.handles[layer] = [_fsdp(module).unshard(async_op=True) for module in self.modules[layer]]

    def wait(self, layer: int) -> None:
        """Wait for the all-gather."""
        for handle in self.handles.pop(layer):
            handle.wait()

    @torch.no_grad()
    def reduce_grads(self, layer: int, *, is_last: bool) -> None:
        """Accumulate a microbatch's gradients of a layer, in the dtype of the reduction. After the last microbatch,
        start the reduction and reshard the parameters."""
        for module in reversed(self.modules[layer]):
            _fsdp(module).set_requires_gradient_sync(is_last, recurse=False)
            _fsdp(module).set_reshard_after_backward(is_last, recurse=False)
            group = _fsdp(fully_shard.state(module))._fsdp_param_group
            if group is not None:  # a stage may have no parameters but those of blocks
                group.post_backward()


def reshard_all(model: nn.Module) -> None:
    """Reshard what is still unsharded after a forward without backward: the root, or all where nothing is resharded.

    The next step would reuse these copies, although a replayed step may have changed the weights since. Until then the
    modules would have unsharded parameters, which take no gradients.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _shard_experts(
    experts: GroupedExperts,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    reshard: bool,
    whole: set[nn.Parameter],
) -> None:
    """Shard the row width L, which ep and etp do not shard; without one, the hidden width F. What each rank has
    `whole` stays as it is.

    Raises: ValueError for a parameter of unknown dimensions.
    """
    placements = {}
    for name, parameter in experts.named_parameters(recurse=False):
        if parameter in whole:
            continue
        dims = experts.parameter_dims.get(name, "")
        if "L" not in dims and "F" not in dims:
            raise ValueError(
                f"{type(experts).__name__}.{name} has no dimension to shard over edp = {mesh.size()}; declare them in "
                "parameter_dims, with L for the row width or F for the hidden width, or raise parallel.ep"
            )
        placements[parameter] = Shard(dims.index("L" if "L" in dims else "F"))
    fully_shard(
        experts,
        mesh=mesh,
        mp_policy=policy,
        reshard_after_forward=reshard,
        shard_placement_fn=placements.__getitem__,
        ignored_params=whole,
    )


def _dense_placement(parameter: nn.Parameter) -> Shard | None:
    """Shard the columns of what tensor parallelism has split by rows, else the first dimension."""
    is_split = isinstance(parameter, DTensor) and parameter.placements == (Shard(0),)
    return Shard(1) if is_split else None


def _unshard_in_pre_forward(experts: GroupedExperts, block: nn.Module) -> None:
    """Move the hooks of an experts' FSDP group to their block, before the block's own: those prefetch the next block,
    and this block's gather must come first."""
    state = fully_shard.state(experts)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = block.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
    state._post_forward_hook_handle = block.register_forward_hook(state._post_forward, prepend=True)


def _prefetch(blocks: list[nn.Module]) -> None:
    """Gather the next block while this one computes; a dispatcher's host read would delay it otherwise."""
    for block, following in zip(blocks, blocks[1:], strict=False):
        if isinstance(following, MTPBlock) and not isinstance(block, MTPBlock):
            continue
        _fsdp(block).set_modules_to_forward_prefetch([_fsdp(following), *_experts_of(following)])
    for block, previous in zip(blocks[1:], blocks, strict=False):
        _fsdp(block).set_modules_to_backward_prefetch([_fsdp(previous), *_experts_of(previous)])


def _prefetch_mtp(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Gather the first block of multi-token prediction while the main loss is computed. Only training runs it: weights
    that validation gathered would still be there after the next update."""
    first = next((block for block in blocks if isinstance(block, MTPBlock)), None)
    if first is None:
        return

    def gather(*_: Any) -> None:
        if torch.is_grad_enabled():
            for module in (_fsdp(first), *_experts_of(first)):
                module.unshard(async_op=True)

    model.get_submodule("norm").register_forward_pre_hook(gather)


def _all_experts_of(block: nn.Module) -> list[GroupedExperts]:
    return [module for module in block.modules() if isinstance(module, GroupedExperts)]


def _experts_of(block: nn.Module) -> list[Any]:
    """The sharded ones."""
    return [experts for experts in _all_experts_of(block) if isinstance(experts, FSDPModule)]


def _fsdp(module: Any) -> Any:
    return module
