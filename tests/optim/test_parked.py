"""Parked states: the bits of states on the device, in chunks of any size."""

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from titan_moe.config.train import OptimConfig
from titan_moe.kernels.optim.split_master import split_reference
from titan_moe.optim import parked
from titan_moe.optim.build import build_optimizer
from titan_moe.parameters import give_remainder, remainder_of

CONFIG = OptimConfig(kind="fused_adamw", lr=1e-2)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def build(device: str) -> nn.Module:
    """bf16 parameters with split masters, of which some fit moments in 8 bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64)).to(device)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model.bfloat16()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        weight, remainder = split_reference(master)
        parameter.data.copy_(weight)
        give_remainder(parameter, remainder)
        parameter.grad_dtype = torch.float32
    return model


def run(device: str, park: str, moments: torch.dtype, num_steps: int = 3) -> tuple[nn.Module, Any]:
    model = build(device)
    optimizers = build_optimizer([model], CONFIG, moments=moments, park=park)
    for number in range(num_steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, device=device)
        optimizers.step(found_inf=torch.tensor(float(number == 1), device=device))
    return model, optimizers


def values(model: nn.Module, optimizers: Any) -> dict[str, Tensor]:
    state = {name: value.cpu() for name, value in optimizers.state_dict().items()}
    for name, parameter in model.named_parameters():
        state |= {name: parameter.detach().cpu(), f"{name}.remainder": remainder_of(parameter).cpu()}
    return state


@pytest.mark.parametrize("chunk_bytes", [1, 20_000])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("park", ["moments", "states"])
@pytest.mark.parametrize("device", DEVICES)
def test_parked_states_have_the_bits_of_others(device: str, park: str, moments: torch.dtype, chunk_bytes: int) -> None:
    expected = values(*run(device, "none", moments))
    with mock.patch.object(parked, "PARKED_CHUNK_BYTES", chunk_bytes):
        model, optimizers = run(device, park, moments)
    found = values(model, optimizers)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    resumed = build_optimizer([model], CONFIG, moments=moments, park=park)
    resumed.load_state_dict(optimizers.state_dict())
    assert all(torch.equal(value.cpu(), expected[name]) for name, value in resumed.state_dict().items())


@pytest.mark.parametrize("device", DEVICES)
def test_two_chunks_are_on_the_device_at_a_time(device: str) -> None:
    model, optimizers = run(device, "states", torch.float32, num_steps=1)
    (optimizer,) = optimizers
    state = [value for own in optimizer.state.values() for name, value in own.items() if name != "step"]
    remainders = [remainder_of(parameter) for parameter in model.parameters()]
    assert {it.device.type for it in [*state, *remainders]} == {"cpu"}
    if device == "cuda":
        assert all(it.is_pinned() for it in [*state, *remainders])
    alive, number = weakref.WeakSet[Tensor](), []
    bring = optimizer.window._bring

    def watch(shards: Any) -> Any:
        chunk = bring(shards)
        alive.update(optimizer.window._parked(chunk.copies[0]))
        number.append(len(alive))
        return chunk

    with mock.patch.object(parked, "PARKED_CHUNK_BYTES", 1), mock.patch.object(optimizer.window, "_bring", watch):
        optimizers.step()
    assert number[1:] and max(number) == 2 * 3 and not alive, "two moments and a remainder of each of two"


@pytest.mark.gpu
def test_a_captured_step_moves_parked_states() -> None:
    """Three replays have the bits of three launched steps."""

    def gradients(model: nn.Module, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, device="cuda", generator=generator)
            if parameter.grad is None:
                parameter.grad = drawn
            else:
                parameter.grad.copy_(drawn)

    found = []
    for is_captured in (False, True):
        model = build("cuda")
        optimizers = build_optimizer([model], CONFIG, moments=torch.bfloat16, park="states")
        gradients(model, 0)
        optimizers.step()  # warms up
        step = optimizers.step
        if is_captured:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizers.step()
            step = graph.replay
        for seed in (1, 2, 3):
            gradients(model, seed)
            step()
        found.append(values(model, optimizers))
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())
