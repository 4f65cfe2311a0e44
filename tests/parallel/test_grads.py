"""The norm of all gradients: as exact as fp32 in any dtype; the clipping factor; messages of summed gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_moe.config.parallel import ParallelConfig, resolve
from titan_moe.parallel import grads
from titan_moe.parallel.grads import clip_factor, grad_norm
from titan_moe.parallel.mesh import Meshes, build_meshes


def meshes_of(parallel: ParallelConfig) -> Meshes:
    return build_meshes(resolve(parallel, dist.get_world_size()), torch.device("cpu"))


def clip(dtype: torch.dtype, max_norm: float) -> dict[str, Any]:
    """Clip the same gradients on every rank, one of them empty, as an uneven shard may be."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (1000, 0, 37, 513)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    exact = torch.cat([parameter.grad.double() for parameter in parameters]).norm()
    frozen = nn.Parameter(torch.zeros(3))
    norm = grad_norm([*parameters, frozen], meshes_of(ParallelConfig()))
    factor = clip_factor(norm, max_norm)
    after = torch.cat([(parameter.grad * factor).to(dtype).double() for parameter in parameters]).norm()
    return {"norm": norm.item(), "exact": exact.item(), "after": after.item()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_grad_norm_counts_every_gradient_once(ranks, num_ranks: int, dtype: torch.dtype) -> None:
    for seen in ranks(num_ranks, clip, dtype, 1.0):
        assert seen["norm"] == pytest.approx(seen["exact"], rel=1e-6)
        assert seen["after"] == pytest.approx(1.0, rel=5e-3 if dtype == torch.bfloat16 else 1e-5)


def spread(value: Tensor, mesh: DeviceMesh, placements: list[Any]) -> nn.Parameter:
    """A parameter whose gradient is this rank's shard of `value`, which is equal on all ranks of the mesh."""
    part = value
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            part = part.chunk(mesh.shape[axis], placement.dim)[mesh.get_local_rank(axis)]
    parameter = nn.Parameter(DTensor.from_local(torch.zeros_like(part), mesh, placements, run_check=False))
    parameter.grad = DTensor.from_local(part, mesh, placements, run_check=False)
    return parameter


def norm_on_meshes(parallel: ParallelConfig) -> tuple[float, float]:
    """The norm of gradients on dense and expert meshes, and on none; and that of the full gradients."""
    meshes = meshes_of(parallel)
    generator = torch.Generator().manual_seed(meshes.dense.get_local_rank("pp"))
    dense, expert, copied = torch.randn(3, 8, 4, generator=generator, dtype=torch.float64)
    replicated = [Replicate()] * (meshes.dense_fsdp.ndim - 1)
    plain = nn.Parameter(torch.zeros_like(copied))
    plain.grad = copied
    experts = meshes.expert["edp", "ep"]
    parameters = [
        spread(dense, meshes.dense_fsdp, [*replicated, Shard(0)]),
        spread(expert, experts, [Shard(1), Shard(0)]),
        plain,
    ]
    square = torch.stack([dense, expert, copied]).square().sum()
    every_stage = [torch.zeros_like(square) for _ in range(dist.get_world_size())]
    dist.all_gather(every_stage, square)
    exact = (torch.stack(every_stage).sum() / meshes.stage_group.size()).sqrt()
    return grad_norm(parameters, meshes).item(), exact.item()


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(ParallelConfig(ep=2), id="dp4-ep2"),
        pytest.param(ParallelConfig(dp_replicate=2, ep=2), id="hsdp2x2-ep2"),
        pytest.param(ParallelConfig(tp=2, ep=4), id="dp2-tp2-ep4"),
        pytest.param(ParallelConfig(cp=2, ep=2), id="dp2-cp2-ep2"),
        pytest.param(ParallelConfig(pp=2, ep=2), id="pp2-dp2-ep2"),
    ],
)
def test_grad_norm_counts_shards_once_on_every_layout(ranks: Any, parallel: ParallelConfig) -> None:
    seen = ranks(4, norm_on_meshes, parallel)
    assert seen == [(pytest.approx(seen[0][1], rel=1e-12),) * 2] * 4


@pytest.mark.parametrize("max_norm", [0.0, 1e6])
def test_clip_factor_leaves_small_gradients(ranks, max_norm: float) -> None:
    (seen,) = ranks(1, clip, torch.float32, max_norm)
    assert seen["after"] == seen["exact"]


def test_clip_factor_is_finite_for_any_norm() -> None:
    norms = torch.tensor([0.0, 0.5, 2.0, torch.inf, torch.nan])
    torch.testing.assert_close(clip_factor(norms, 1.0), torch.tensor([1.0, 1.0, 0.5, 1.0, 1.0]))
    assert torch.equal(clip_factor(norms, 0.0), torch.ones(5))


def test_sums_over_tensor_ranks_are_in_messages_of_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, none empty, and a gradient that is larger than a message alone."""
    monkeypatch.setattr(grads, "MESSAGE_ELEMENTS", 10)
    sizes = (4, 6, 1, 30, 0, 9, 2)
    messages = list(grads._messages([torch.zeros(size) for size in sizes]))
    assert [[len(grad) for grad in message] for message in messages] == [[4, 6], [1], [30], [0, 9], [2]]
    assert not list(grads._messages([]))
