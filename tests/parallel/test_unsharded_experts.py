"""Weights without FSDP: copies in compute's dtype, gradients in the master's."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from titan_moe.config.parallel import ParallelConfig, resolve
from titan_moe.config.precision import PrecisionConfig
from titan_moe.dispatch.clones.optional import ReplicaSlots
from titan_moe.kernels.choose import ACCUMULATE
from titan_moe.kernels.experts.fp8.format import FP8_ROWWISE
from titan_moe.kernels.optim.accumulate import accumulate, accumulate_reference
from titan_moe.layers.experts import GroupedExperts
from titan_moe.parallel.unsharded_experts import UnshardedWeights, caching_casts, use_unsharded_experts
from titan_moe.training.forward_backward import run_microbatch


@pytest.fixture
def mesh(tmp_path: Path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def built(mesh, dtype: torch.dtype | None, *, keeps: bool) -> GroupedExperts:
    experts = GroupedExperts(2, 4, 3)
    torch.manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    use_unsharded_experts(experts, mesh, dtype, keeps=keeps)
    return experts


def cast(experts: GroupedExperts) -> Tensor:
    return experts.transforms["local"].cast(experts.down)


def serve(experts: GroupedExperts, seed: int) -> Tensor:
    """A microbatch whose gradient of `down` is drawn; the copy that it read."""
    generator = torch.Generator().manual_seed(seed)
    weight = cast(experts)
    weight.backward(torch.randn(weight.shape, generator=generator).to(weight.dtype))
    return weight.detach()


def drawn(*seeds: int, dtype: torch.dtype) -> Tensor:
    """The sum of those gradients, in fp32 and in order."""
    total = torch.zeros(2, 4, 3)
    for seed in seeds:
        total += torch.randn(total.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return total


@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_add_up_in_the_masters_dtype(mesh, keeps: bool) -> None:
    experts = built(mesh, torch.bfloat16, keeps=keeps)
    for seed in range(40):  # enough for a sum in bf16 to be wrong
        serve(experts, seed)
    grad = experts.down.grad
    assert isinstance(grad, DTensor) and grad.dtype == torch.float32 and grad.placements == experts.down.placements
    assert torch.equal(grad.to_local(), drawn(*range(40), dtype=torch.bfloat16))
    assert experts.gate_up.grad is None, "who served nothing has no gradient"


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_add_up_to_pytorchs_bits(mesh, device: str, is_flat: bool, backend: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(2, 96, 64, device=device)
    master = torch.nn.Parameter(DTensor.from_local(weight, init_device_mesh(device, (1,)), [Shard(0)]))
    transform = UnshardedWeights(torch.bfloat16, keeps=True, accumulate=ACCUMULATE[backend])
    total = torch.zeros_like(weight)
    for _ in range(3):
        grad = torch.randn(2, 64, 96, device=device).bfloat16()
        grad = grad.view(2, 96, 64) if is_flat else grad.transpose(1, 2)
        transform.cast(master).backward(grad)
        total += grad
    assert master.grad is not None and master.grad.to_local().is_contiguous()
    assert torch.equal(master.grad.to_local(), total)


def test_the_measured_way_is_the_default_and_the_other_is_chosen_by_name(mesh) -> None:
    assert built(mesh, torch.bfloat16, keeps=False).transforms["local"].accumulate is accumulate_reference
    experts = GroupedExperts(2, 4, 3)
    use_unsharded_experts(experts, mesh, torch.bfloat16, keeps=False, gradients="triton")
    assert experts.transforms["local"].accumulate is accumulate


def test_biases_are_cast_and_their_gradients_added_too(mesh) -> None:
    experts = GroupedExperts(2, 4, 3, has_bias=True)
    use_unsharded_experts(experts, mesh, torch.bfloat16, keeps=False)
    weights = experts.use().weights
    assert weights.names() == ("gate_up", "down", "gate_up_bias", "down_bias")
    for tensor in weights.tensors():
        assert tensor.dtype == torch.bfloat16 and not isinstance(tensor, DTensor)
        tensor.backward(torch.full_like(tensor, 0.5))
    for parameter in experts.parameters():
        assert parameter.grad.dtype == torch.float32 and (parameter.grad.to_local() == 0.5).all()


def test_a_gradient_in_another_layout_lies_like_its_master(mesh) -> None:
    experts = built(mesh, torch.bfloat16, keeps=False)
    cast(experts).backward(torch.randn(2, 3, 4).bfloat16().transpose(1, 2))
    assert experts.down.grad.to_local().is_contiguous()


def test_copies_serve_for_a_step_or_for_one_use(mesh) -> None:
    for keeps in (False, True):
        experts = built(mesh, torch.bfloat16, keeps=keeps)
        with caching_casts(experts):
            first = serve(experts, 0)
            assert torch.equal(first, experts.down.to_local().detach().bfloat16())
            with torch.no_grad():
                experts.down.to_local().mul_(2)
            assert torch.equal(serve(experts, 1), first if keeps else 2 * first)
            with torch.no_grad():
                assert torch.equal(cast(experts), 2 * first), "a validation sees the weights of now"
        with caching_casts(experts):
            assert torch.equal(serve(experts, 2), 2 * first)


def test_codes_leave_copies_unread_but_where_clones_follow_them(mesh) -> None:
    slots = ReplicaSlots(1)
    transform = UnshardedWeights(torch.bfloat16, FP8_ROWWISE, keeps=True, accumulate=accumulate_reference, room=slots)
    master = built(mesh, torch.bfloat16, keeps=True).down
    assert transform.has_codes and transform.cast(master).untyped_storage().nbytes() == 2
    slots.are_used = True
    copy = transform.cast(master)
    assert not transform.has_codes and len(copy) == 3 and torch.equal(copy[:2], master.to_local().bfloat16())


def test_a_microbatch_alone_keeps_its_copies(mesh) -> None:
    """Also where it is what a graph records."""

    class Chunks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = built(mesh, torch.bfloat16, keeps=True)
            self.copies: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.copies = [cast(self.experts) for _ in range(2)]
            return sum((x * copy).sum() for copy in self.copies)

    model = Chunks()
    run_microbatch(model, (torch.ones(()),), torch.tensor(2.0))
    assert model.copies[0].data_ptr() == model.copies[1].data_ptr()
    assert torch.equal(model.experts.down.grad.to_local(), torch.full((2, 4, 3), 4.0))
    assert not model.experts.transforms["local"].copies


def test_no_copy_outlives_its_step(mesh) -> None:
    """Not one that a failure has left, nor one that somebody read between steps, with gradients."""
    experts = built(mesh, torch.bfloat16, keeps=True)
    with pytest.raises(ArithmeticError), caching_casts(experts):
        first = serve(experts, 0)
        raise ArithmeticError
    serve(experts, 1)
    with torch.no_grad():
        experts.down.to_local().mul_(2)
    with caching_casts(experts):
        assert torch.equal(serve(experts, 2), 2 * first)


def test_one_graph_holds_the_cast(mesh) -> None:
    experts = built(mesh, torch.bfloat16, keeps=True)
    compiled = torch.compile(lambda: cast(experts).sum(), fullgraph=True, backend="aot_eager")
    with caching_casts(experts):
        compiled().backward()
        assert not experts.transforms["local"].copies
    assert torch.equal(experts.down.grad.to_local(), torch.ones(2, 4, 3))


def test_without_a_cast_the_master_itself_is_served(mesh) -> None:
    experts = built(mesh, None, keeps=True)
    weight = cast(experts)
    assert weight.dtype == torch.float32 and weight.data_ptr() == experts.down.to_local().data_ptr()
    weight.backward(torch.ones(2, 4, 3))
    assert torch.equal(experts.down.grad.to_local(), torch.ones(2, 4, 3)) and not isinstance(experts, FSDPModule)


@pytest.mark.parametrize(
    ("master", "reduce", "expected"),
    [("fp32", "fp32", True), ("fp32", "bf16", True), ("bf16", "bf16", True), ("bf16", "fp32", False)],
)
def test_sums_are_never_coarser_than_the_recipe_says(master: str, reduce: str, expected: bool) -> None:
    precision = PrecisionConfig(master=master, reduce=reduce)
    assert resolve(ParallelConfig(), 1).experts_are_unsharded(precision) is expected


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (ParallelConfig(ep=4), True),
        (ParallelConfig(ep=2), False),
        (ParallelConfig(ep=2, dp_replicate=2), False),
        (ParallelConfig(), False),
    ],
)
def test_experts_are_unsharded_where_no_other_rank_holds_them(parallel: ParallelConfig, expected: bool) -> None:
    assert resolve(parallel, 4).experts_are_unsharded(PrecisionConfig()) is expected
