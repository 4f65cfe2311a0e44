"""Experts that a batch gives are replayed by a CUDA graph and by launched kernels alike, and others are recorded."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support import load
from torch import Tensor

from titan_moe.compile.cudagraph import NUM_WARM_UPS
from titan_moe.config import Recipe
from titan_moe.config.perf import CompileConfig, MemoryConfig
from titan_moe.run.process import process_group
from titan_moe.training.build import assemble

pytestmark = pytest.mark.gpu

overlap = load("gpu/test_overlap")
RECIPE: Recipe = replace(overlap.RECIPE, compile=CompileConfig(cudagraph="step"))
MODEL = RECIPE.model


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    torch._dynamo.reset()
    with process_group(RECIPE.run) as device:
        yield device


def ids_of(device: torch.device, step: int) -> Tensor:
    """Any experts of some tokens in some layers."""
    generator = torch.Generator(device).manual_seed(step)
    shape = 3, 2, 256, MODEL.num_layers
    scores = torch.rand(*shape, MODEL.moe.num_experts, device=device, generator=generator)
    ids = scores.topk(MODEL.moe.top_k).indices.int()
    ids[torch.rand(*shape, device=device, generator=generator) < 0.3] = -1
    return ids


def steps(recipe: Recipe, device: torch.device) -> list[tuple[float, Tensor]]:
    """Losses and experts of steps on the same tokens, with other experts each."""
    run, seen = assemble(recipe, device).step, []
    for step in range(NUM_WARM_UPS + 3):
        given = ids_of(device, step)
        result = run(overlap.batch(device, 0)._replace(topk_ids_MBNLK=given))
        taken = result.topk_ids_MBNLK.clone()
        is_given = (given >= 0) & (torch.arange(MODEL.num_layers, device=device) > 0)[:, None]  # the first is dense
        assert torch.equal(taken[is_given], given[is_given]) and (taken[..., 1:, :] >= 0).all()
        seen.append((result.loss.item(), taken))
    assert run.num_recordings == (recipe.compile.cudagraph == "step")
    run.release()
    return seen


@pytest.mark.parametrize("recomputed", ["none", "block"])
def test_a_replayed_step_takes_the_experts_of_its_batch(device: torch.device, recomputed: str) -> None:
    recipe = replace(RECIPE, memory=MemoryConfig(recomputed))
    launched = replace(recipe, compile=CompileConfig(cudagraph="off"))
    expected, actual = steps(launched, device), steps(recipe, device)
    for (loss, ids), (expected_loss, expected_ids) in zip(actual, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-3)
        assert (ids == expected_ids).float().mean() > 0.99  # of those that routers choose, near ties may differ
