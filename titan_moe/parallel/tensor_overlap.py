"""Tensor-parallel linear layers that hide their messages behind their own GEMMs (arXiv:2305.06942).

P ranks of tp · T tokens of a rank · K input width · M output width

A layer whose weight is split by rows gathers its tokens and multiplies them: the GEMM of own tokens runs while the
tokens of the next rank arrive, and so on. A layer whose weight is split by columns multiplies and sums over ranks: the
part of one rank is sent while the part of the next rank is computed. The two are the backward of each other. The weight
gradient needs the gathered tensor in both cases. So a layer has as many messages as a layer without overlap.

On GPUs these are `fused_all_gather_matmul` and `fused_matmul_reduce_scatter` of PyTorch's symmetric memory: copy
engines move parts of a node's ranks on a second stream. They are called with `return_A`, since backward needs the
gathered tokens, and then never use NVLink multicast. Partial results are in the dtype of the GEMM and summed in fp32.
On CPUs they are the plain collective and GEMM, one after the other.

Inductor's pass for this finds functional collectives in a graph. Ours are custom operations, and attention is outside
of graphs where nothing is compiled, so the layers call the operations themselves.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

from titan_moe.config import RecipeError
from titan_moe.dispatch.collectives import all_gather_rows, sum_of_parts
from titan_moe.kernels.experts.swiglu import swiglu
from titan_moe.layers.mlp import SwiGLUDown
from titan_moe.parallel.mesh import Meshes
from titan_moe.parameters import TENSOR_AXIS


def open_workspace(num_bytes: int, meshes: Meshes, device: torch.device) -> None:
    """Open what the layers' operations share between the GPUs of a tp group, if that is any; a collective call.

    It fits the run's largest batch: a workspace that grows is another one, and CUDA graphs keep the address of theirs.

    Raises: RecipeError if these GPUs cannot reach each other's memory, or this process has a workspace of other ranks.
    """
    if not num_bytes or device.type != "cuda":
        return
    import torch.distributed._symmetric_memory as symmetric

    group = meshes.dense[TENSOR_AXIS].get_group()
    _refuse_workspace_of_other_ranks(group, symmetric)
    try:
        if symmetric.get_backend(device) != "CUDA":
            symmetric.set_backend("CUDA")
        symmetric.rendezvous(symmetric.empty(1, dtype=torch.uint8, device=device), group)
        symmetric.get_symm_mem_workspace(group.group_name, min_size=num_bytes)
    except (RuntimeError, ValueError) as error:
        setting = "parallel.tp_comm_overlap = true"
        raise RecipeError([f"{setting} cannot share memory between tp ranks: {error}; take false"]) from error


def _refuse_workspace_of_other_ranks(group: dist.ProcessGroup, symmetric: Any) -> None:
    """PyTorch keeps workspaces by the names of groups, which begin anew when the process groups of a run are destroyed.
    A later run of the process would send to the ranks of the earlier one."""
    kept = symmetric._group_name_to_workspace_tensor.get(group.group_name)
    if kept is None:
        return
    workspace = symmetric._SymmetricMemory.rendezvous(kept)  # the one of the earlier run: nothing is exchanged
    if (workspace.rank, workspace.world_size) != (group.rank(), group.size()):
        problem = (
            f"PyTorch keeps what this process shared as one of {workspace.world_size} other tp ranks in an earlier run"
        )
        raise RecipeError([f"parallel.tp_comm_overlap = true: {problem}; start another process, or take false"])


def gather_then_multiply(linear: nn.Linear, group: dist.ProcessGroup, *, is_sequence: bool) -> None:
    """Let a layer take own tokens and return own columns for the tokens of all ranks, in place.

    With `is_sequence` these are in the order of the sequence, [B, n, K] -> [B, P·n, M], else in that of the ranks,
    [T, ...] -> [P·T, ...].
    """
    _become(linear, _gather_sequence if is_sequence else _gather, group)


def multiply_then_scatter(linear: nn.Linear, group: dist.ProcessGroup, *, is_sequence: bool) -> None:
    """Let a layer take own columns of the tokens of all ranks and return the sums of own tokens, in place."""
    _become(linear, _scatter_sequence if is_sequence else _scatter, group)


def _become(linear: Any, forward: Callable[..., Tensor], group: dist.ProcessGroup) -> None:
    module_class: Any = type(linear)
    linear.tp_group = group
    linear.__class__ = _overlapping(module_class, forward)


@cache
def _overlapping(module_class: type[nn.Module], forward: Callable[..., Tensor]) -> type[nn.Module]:
    """One class for all layers, or each would be compiled apart."""
    return type(module_class.__name__, (module_class,), {"forward": forward})


def _gather(linear: Any, x: Tensor) -> Tensor:
    group: dist.ProcessGroup = linear.tp_group
    _, y = _gather_matmul(x.flatten(0, -2), linear.weight.t(), group.group_name, group.size())
    y = y.unflatten(0, (-1, *x.shape[1:-1]))
    return y if linear.bias is None else y + linear.bias


def _gather_sequence(linear: Any, x_BnK: Tensor) -> Tensor:
    y_PBnM = _gather(linear, x_BnK).unflatten(0, (linear.tp_group.size(), -1))
    return y_PBnM.transpose(0, 1).flatten(1, 2)


def _scatter(linear: Any, x: Tensor) -> Tensor:
    group: dist.ProcessGroup = linear.tp_group
    if isinstance(linear, SwiGLUDown):
        x = swiglu(x)
    y = _matmul_scatter(x.flatten(0, -2), linear.weight.t(), group.group_name, group.size())
    y = y.unflatten(0, (-1, *x.shape[1:-1]))
    return y if linear.bias is None else y + linear.bias


def _scatter_sequence(linear: Any, x_BNK: Tensor) -> Tensor:
    x_PBnK = x_BNK.unflatten(1, (linear.tp_group.size(), -1)).transpose(0, 1)
    return _scatter(linear, x_PBnK.flatten(0, 1))


@torch.library.custom_op("titan_moe::gather_matmul", mutates_args=())
def _gather_matmul(x_TK: Tensor, weight_KM: Tensor, group: str, num_ranks: int) -> tuple[Tensor, Tensor]:
    """-> gathered rows, in the order of the ranks, and their product: [P·T, K], [P·T, M]."""
    x_TK = x_TK.contiguous()
    if x_TK.is_cuda and num_ranks > 1:
        gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(x_TK, [weight_KM], 0, group, return_A=True)
        return gathered, product
    gathered = x_TK.new_empty(num_ranks * len(x_TK), x_TK.shape[1])
    all_gather_rows(gathered, x_TK, group=_resolve_process_group(group))
    return gathered, gathered @ weight_KM


@_gather_matmul.register_fake
def _(x_TK: Tensor, weight_KM: Tensor, group: str, num_ranks: int) -> tuple[Tensor, Tensor]:
    num_rows = num_ranks * x_TK.shape[0]
    return x_TK.new_empty(num_rows, x_TK.shape[1]), x_TK.new_empty(num_rows, weight_KM.shape[1])


@torch.library.custom_op("titan_moe::matmul_scatter", mutates_args=())
def _matmul_scatter(x_RK: Tensor, weight_KM: Tensor, group: str, num_ranks: int) -> Tensor:
    """Multiply the rows of all ranks and sum over ranks: [P·T, K] -> [T, M]."""
    if x_RK.is_cuda and num_ranks > 1:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x_RK.contiguous(), weight_KM, "sum", 0, group)
    product_RM = x_RK @ weight_KM
    parts_RM = torch.empty_like(product_RM)
    dist.all_to_all_single(parts_RM, product_RM, group=_resolve_process_group(group))
    return sum_of_parts(parts_RM, num_ranks)


@_matmul_scatter.register_fake
def _(x_RK: Tensor, weight_KM: Tensor, group: str, num_ranks: int) -> Tensor:
    return x_RK.new_empty(x_RK.shape[0] // num_ranks, weight_KM.shape[1])


def _save_gathered(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, weight_KM, ctx.group, ctx.num_ranks = inputs
    ctx.save_for_backward(output[0], weight_KM)
    ctx.set_materialize_grads(False)  # gathered rows have none


def _scatter_gradient(ctx: Any, _: Any, dy_RM: Tensor) -> tuple[Tensor | None, ...]:
    gathered_RK, weight_KM = ctx.saved_tensors
    dx_TK = _matmul_scatter(dy_RM, weight_KM.t(), ctx.group, ctx.num_ranks)
    return dx_TK, (dy_RM.t() @ gathered_RK).t(), None, None


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_RK, weight_KM, ctx.group, ctx.num_ranks = inputs
    ctx.save_for_backward(x_RK, weight_KM)


def _gather_gradient(ctx: Any, dy_TM: Tensor) -> tuple[Tensor | None, ...]:
    x_RK, weight_KM = ctx.saved_tensors
    gathered_RM, dx_RK = _gather_matmul(dy_TM, weight_KM.t(), ctx.group, ctx.num_ranks)
    return dx_RK, (gathered_RM.t() @ x_RK).t(), None, None


_gather_matmul.register_autograd(_scatter_gradient, setup_context=_save_gathered)
_matmul_scatter.register_autograd(_gather_gradient, setup_context=_save_rows)
