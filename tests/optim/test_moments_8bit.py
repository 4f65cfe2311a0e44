"""Moments in 8 bits: a small model against torch's AdamW, which states are quantised, their bytes, checkpoints that
load into any dtype and any number of ranks, and exact resumes over FSDP2 and experts outside of it."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titan_moe.config import RecipeError
from titan_moe.config.precision import BYTES_OF_MOMENT
from titan_moe.config.train import OptimConfig
from titan_moe.optim.build import Optimizers, build_optimizer
from titan_moe.optim.schedule import build_schedule
from titan_moe.optim.state import MOMENTS
from titan_moe.parameters import local

QUANTIZED = "OptimStateFp8"
FUSED = OptimConfig(kind="fused_adamw", lr=0.01, warmup_steps=10, decay_steps=20, max_grad_norm=1.0)


def optimizer(model: nn.Module, moments: str | None) -> Optimizers:
    if moments is None:
        return build_optimizer([model], OptimConfig(kind="adamw", lr=0.01))
    return build_optimizer([model], FUSED, moments=MOMENTS[moments], seed=3)


def train(moments: str | None, num_steps: int = 50) -> float:
    """The held-out loss of a small model that learns from another."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 32))
    optimizers = optimizer(model, moments)
    schedule = build_schedule(optimizers, FUSED, num_steps)
    teacher = torch.randn(64, 32) / 8

    def loss() -> Tensor:
        x = torch.randn(256, 64)
        return (model(x) - torch.tanh(2 * x @ teacher) - 0.1 * torch.randn(256, 32)).square().mean()

    for _ in range(num_steps):
        loss().backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        optimizers.step(found_inf=torch.tensor(0.0), grad_factor=(1 / norm).clamp(max=1))
        optimizers.zero_grad()
        schedule.step()
    with torch.no_grad():
        return sum(loss().item() for _ in range(8)) / 8


def test_8bit_moments_train_as_torchs_adamw() -> None:
    start, expected = train(None, 0), train(None)
    assert expected < 0.5 * start
    assert train("fp8") == pytest.approx(expected, rel=0.01)


def test_large_shards_are_quantized_and_small_or_odd_ones_are_not() -> None:
    model = nn.ParameterList([torch.zeros(*shape) for shape in ((16, 256), (4095,), (64, 100), (3, 5, 512), (0, 256))])
    (own,) = optimizer(model, "fp8")
    for parameter, is_quantized in zip(model, (True, False, True, True, False), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            moment = own.state[parameter][name]
            assert type(moment).__name__ == (QUANTIZED if is_quantized else "Tensor")
            assert moment.dtype == torch.float32 and moment.shape == parameter.shape
            if is_quantized:
                num_bytes = sum(tensor.nbytes for tensor in (moment.codes, moment.scale))
                assert num_bytes == BYTES_OF_MOMENT["fp8"] * parameter.numel()


def test_missing_torchao_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(RecipeError, match='needs torchao, .* pip install "torchao>=.*", or take precision.moments'):
        optimizer(nn.Linear(64, 64), "fp8")


class Model(nn.Module):
    """Dense parameters and experts on their own mesh. The bias is too small for 8 bits; so is the second of two shards
    of `uneven`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(512, 32)
        self.uneven = nn.Parameter(torch.randn(31, 256))
        self.experts = nn.Parameter(torch.randn(4, 2, 24, 128))


def build(num_ranks: int, moments: str) -> tuple[nn.Module, Optimizers]:
    model = Model()
    mesh = init_device_mesh("cpu", (num_ranks,))
    model.experts = nn.Parameter(distribute_tensor(model.experts.data, mesh, [Shard(0)]))
    fully_shard(model, mesh=mesh, ignored_params={model.experts})
    return model, optimizer(model, moments)


def take_steps(model: nn.Module, optimizers: Optimizers, first: int, last: int, **guard: Tensor) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        optimizers.step(**guard)


def everything(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    state = {**dict(model.named_parameters()), **optimizers.state_dict()}
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for name, v in state.items()}


def run(num_ranks: int, moments: str, folder: Path) -> dict[str, Any]:
    """Two steps, a save, one more, and one that is skipped."""
    model, optimizers = build(num_ranks, moments)
    take_steps(model, optimizers, 0, 2)
    saved = everything(model, optimizers)
    dcp.save({"model": model.state_dict(), "optimizer": optimizers}, checkpoint_id=str(folder))
    take_steps(model, optimizers, 2, 3, found_inf=torch.tensor(0.0), grad_factor=torch.tensor(0.5))
    after = everything(model, optimizers)
    take_steps(model, optimizers, 3, 4, found_inf=torch.tensor(1.0), grad_factor=torch.tensor(torch.nan))
    skipped = everything(model, optimizers)
    assert all(torch.equal(skipped[name], after[name]) for name in after)
    kinds = {}
    for name, parameter in model.named_parameters():
        moment = optimizers.optimizers[0].state[parameter]["exp_avg"]
        assert moment.placements == parameter.placements and moment.shape == parameter.shape
        kinds[name] = type(local(moment)).__name__
    for name, value in optimizers.state_dict().items():
        expected = torch.bfloat16 if moments == "bf16" and not name.endswith(".step") else torch.float32
        assert type(local(value)) is Tensor and local(value).dtype == expected
    return {"saved": saved, "after": after, "kinds": kinds}


def resume(num_ranks: int, moments: str, folder: Path) -> dict[str, Any]:
    """Load, and take the third step."""
    model, optimizers = build(num_ranks, moments)
    weights = model.state_dict()
    dcp.load({"model": weights, "optimizer": optimizers}, checkpoint_id=str(folder))
    loaded = everything(model, optimizers)
    take_steps(model, optimizers, 2, 3, found_inf=torch.tensor(0.0), grad_factor=torch.tensor(0.5))
    return {"saved": loaded, "after": everything(model, optimizers)}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], share: float, of_uneven: float = 0) -> None:
    """Each tensor differs by at most this share of its norm; 0 means not at all."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        error = (value.double() - expected[name].double()).norm()
        allowed = max(share, of_uneven if "uneven" in name else 0)
        assert error <= allowed * expected[name].double().norm(), f"{name}: {error}"


def test_8bit_moments_over_ranks_and_checkpoints(ranks: Any, tmp_path: Path) -> None:
    alone = ranks(1, run, 1, "fp8", tmp_path / "1")[0]
    both = ranks(2, run, 2, "fp8", tmp_path / "2")
    kinds = {"dense.weight": QUANTIZED, "dense.bias": "Tensor", "uneven": QUANTIZED, "experts": QUANTIZED}
    assert [rank["kinds"] for rank in both] == [kinds, kinds | {"uneven": "Tensor"}]
    for rank in both:
        assert_close(rank["after"], alone["after"], 0.1)  # another layout draws other bits

    for rank in ranks(2, resume, 2, "fp8", tmp_path / "2"):
        assert_close(rank["saved"], both[0]["saved"], 0)
        assert_close(rank["after"], both[0]["after"], 0)
    for num_ranks, source, expected in ((1, "2", both[0]), (2, "1", alone)):
        for rank in ranks(num_ranks, resume, num_ranks, "fp8", tmp_path / source):
            # what one rank has in fp32 has 8 bits where the shard is larger
            assert_close(rank["saved"], expected["saved"], 0, of_uneven=0.05)
            assert_close(rank["after"], expected["after"], 0.1)


@pytest.mark.parametrize(
    ("saved", "loaded", "share"),
    [("fp8", "fp32", 0), ("fp8", "bf16", 4e-3), ("fp32", "fp8", 0.05), ("bf16", "fp8", 0.05)],
)
def test_8bit_moments_load_from_and_into_others(
    ranks: Any, tmp_path: Path, saved: str, loaded: str, share: float
) -> None:
    first = ranks(2, run, 2, saved, tmp_path)[0]
    for rank in ranks(2, resume, 2, loaded, tmp_path):
        assert_close(rank["saved"], first["saved"], share)
        assert_close(rank["after"], first["after"], 0.1)
