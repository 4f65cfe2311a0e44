"""The average of the weights against a loop in fp64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.train import OptimConfig
from titan_moe.kernels.optim.split_master import merge_reference
from titan_moe.optim.build import Optimizers, build_optimizer
from titan_moe.optim.schedule import build_schedule
from titan_moe.parallel import masters
from titan_moe.parameters import remainder_of

STEPS, SKIPPED = 9, (0, 4)
CONFIG = OptimConfig(lr=0.1, ema_decay=0.7)


def averages(optimizers: Optimizers) -> list[Tensor]:
    found = optimizers.state_dict()
    names = [name for part in optimizers.model_parts for name, _ in part.named_parameters()]
    return [found[f"state.{name}.ema"] for name in names]


def master(parameter: Tensor) -> Tensor:
    remainder = remainder_of(parameter)
    return (parameter if remainder is None else merge_reference(parameter, remainder)).detach().double().clone()


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("adamw", PrecisionConfig("fp32", "fp32", "fp32")),
        ("fused_adamw", PrecisionConfig("bf16", "bf16", "bf16")),
        ("fused_adamw", PrecisionConfig("bf16", "fp32_split", "fp32")),
        ("muon", PrecisionConfig("fp64", "fp64", "fp64")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.master,
)
def test_averages_are_those_of_a_loop(kind: str, precision: PrecisionConfig) -> None:
    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp32_split": torch.bfloat16, "fp64": torch.float64}.get(precision.master)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)).to(dtype or torch.float32)
    if precision.has_split_masters:
        masters.apply(model, precision)
    config = replace(CONFIG, kind=kind)
    optimizers = build_optimizer([model], config)
    schedule = build_schedule(optimizers, config, STEPS)
    parameters = list(model.parameters())
    expected = [master(parameter) for parameter in parameters]
    for step in range(STEPS):
        for parameter in parameters:
            wide = torch.float32 if precision.has_split_masters else parameter.dtype
            parameter.grad = torch.randn(parameter.shape, dtype=wide)
        optimizers.step(found_inf=torch.tensor(float(step in SKIPPED)))
        decay = min(0.7, step / (step + 1))
        if step not in SKIPPED:
            expected = [decay * old + (1 - decay) * master(new) for old, new in zip(expected, parameters, strict=True)]
        schedule.step()
        if step == 5:  # what a resume does
            schedule.load_state_dict(schedule.state_dict())
            optimizers.load_state_dict({name: value.clone() for name, value in optimizers.state_dict().items()})
    for average, wanted, parameter in zip(averages(optimizers), expected, parameters, strict=True):
        assert average.dtype == torch.promote_types(parameter.dtype, torch.float32)
        torch.testing.assert_close(average.double(), wanted, atol=1e-6, rtol=1e-6)
        assert not torch.allclose(average.double(), master(parameter), atol=1e-3)


def test_an_average_begins_anew_with_weights_that_are_loaded() -> None:
    model = nn.Linear(3, 3)
    optimizers = build_optimizer([model], CONFIG)
    with torch.no_grad():
        model.weight.fill_(2.0)
    assert optimizers.average is not None and not torch.equal(averages(optimizers)[0], model.weight)
    optimizers.average.restart()
    assert torch.equal(averages(optimizers)[0], model.weight)


def test_without_a_decay_there_is_no_average() -> None:
    optimizers = build_optimizer([nn.Linear(3, 3)], OptimConfig())
    assert optimizers.average is None and not any(name.endswith(".ema") for name in optimizers.state_dict())
