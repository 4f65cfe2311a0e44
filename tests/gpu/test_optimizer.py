"""A captured optimizer step is the step: it reads rate, guard, factor and gradients anew and waits for nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titan_moe.config.train import OptimConfig
from titan_moe.optim.build import Optimizers, build_optimizer
from titan_moe.optim.schedule import Schedules, build_schedule

pytestmark = pytest.mark.gpu
TORCH, FUSED = (OptimConfig(kind=kind, lr=0.01, warmup_steps=3) for kind in ("adamw", "fused_adamw"))
OPTIONS: dict[str, tuple[OptimConfig, dict[str, Any]]] = {
    "torch": (TORCH, {"capturable": True}),
    "fused": (FUSED, {}),
    "fused_bf16": (FUSED, {"moments": torch.bfloat16, "seed": 1}),
    "muon": (replace(FUSED, kind="muon"), {}),
    "muon_bf16": (replace(FUSED, kind="muon"), {"moments": torch.bfloat16}),
    "fused_fp8": (FUSED, {"moments": torch.float8_e4m3fn, "seed": 1}),
}


def build(name: str) -> tuple[nn.Module, Optimizers, Schedules]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 40), nn.LayerNorm(40), nn.Linear(40, 7)).to("cuda")
    config, options = OPTIONS[name]
    optimizers = build_optimizer([model], config, **options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, optimizers, build_schedule(optimizers, config, 10)


def fill(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.normal_()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_replay_is_the_step(name: str) -> None:
    guards = [0.0, 1.0, 0.0, 0.0]
    results = []
    for is_captured in (False, True):
        model, optimizers, schedules = build(name)
        found_inf, factor = torch.ones((), device="cuda"), torch.full((), 0.5, device="cuda")

        def step(optimizers: Optimizers = optimizers, guard: Tensor = found_inf, factor: Tensor = factor) -> None:
            optimizers.step(found_inf=guard, grad_factor=factor)

        step()  # compiles, and changes nothing
        torch.cuda.synchronize()
        if is_captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for number, guard in enumerate(guards):
                fill(model, number)
                found_inf.fill_(guard)
                factor.fill_(1.0 / (number + 1))
                graph.replay() if is_captured else step()
                schedules.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        state = optimizers.state_dict()
        assert all(value == 3 for key, value in state.items() if key.endswith(".step"))
        results.append([*(parameter.detach() for parameter in model.parameters()), *state.values()])
    assert all(torch.equal(own, wanted) for own, wanted in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["fused", "fused_bf16", "fused_fp8"])
def test_a_gpu_steps_as_a_cpu(name: str) -> None:
    """The same draws in Triton and in the reference; a last digit of fp32 may tip a few of them."""
    model, optimizers, _ = build(name)
    twin = nn.Sequential(nn.Linear(256, 40), nn.LayerNorm(40), nn.Linear(40, 7))
    twin.load_state_dict({key: value.cpu() for key, value in model.state_dict().items()})
    config, options = OPTIONS[name]
    theirs = build_optimizer([twin], config, **options)
    for number in range(3):
        fill(model, number)
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert parameter.grad is not None
            other.grad = parameter.grad.cpu()
        for each in (optimizers, theirs):
            for group in each.optimizers[0].param_groups:
                group["lr"].fill_(1e-3)
            each.step()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), other.detach(), rtol=1e-3, atol=1e-4)
