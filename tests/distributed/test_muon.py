"""Muon on layouts: owners of matrices that all kinds of axes shard compute what one process does, and resume it."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import load

from titan_moe.config import Recipe
from titan_moe.config.muon import MuonConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.train import CheckpointConfig, OptimConfig

one_loss, states = load("distributed/test_one_loss"), load("distributed/test_tensor_parallel")

OPTIM = OptimConfig(kind="muon", muon=MuonConfig(adjust_lr="original"), lr=2**-6, max_grad_norm=0.5)
STEPS = 4
TP2 = ParallelConfig(tp=2)
LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {
    "tp2-dp2-edp2-ep2": (4, replace(TP2, ep=2, dispatcher="alltoall")),
    "tp4": (4, replace(TP2, tp=4, ep=4, dispatcher="alltoall")),
    "etp2-edp2": (4, ParallelConfig(etp=2)),
    "dp_replicate2-ep2": (4, ParallelConfig(dp_replicate=2, ep=2, dispatcher="alltoall")),
    "pp2-tp2": (4, replace(TP2, pp=2)),
    "cp2": (2, ParallelConfig(cp=2)),
    "unsharded": (2, ParallelConfig(ep=2, dispatcher="alltoall", accumulate_unsharded=True)),
}


def recipe(parallel: ParallelConfig, model: str) -> Recipe:
    base: Recipe = one_loss.split_recipe(parallel, model, optim=OPTIM)
    return replace(base, train=replace(base.train, micro_batch_sequences=2))


@pytest.fixture(scope="module")
def alone(ranks: Any) -> Callable[[str], Any]:
    """One process, by the name of a model."""
    return cache(lambda model: one_loss.run(ranks, 1, recipe(ParallelConfig(), model), -1, STEPS)[0])


@pytest.mark.few("tp2-dp2-edp2-ep2-gqa", "etp2-edp2-gqa")
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("tp2-dp2-edp2-ep2", "gqa"),
        ("tp2-dp2-edp2-ep2", "mla-latent-gate"),
        ("tp4", "gqa-shared"),
        ("etp2-edp2", "gqa"),
        ("dp_replicate2-ep2", "gqa"),
        ("pp2-tp2", "mla"),
        ("cp2", "gqa"),
        ("unsharded", "gqa"),
    ],
)
def test_losses_are_those_of_one_process(ranks: Any, alone: Callable[[str], Any], layout: str, model: str) -> None:
    """In fp64, Newton-Schulz too; the losses after the first step show the updates."""
    num_ranks, parallel = LAYOUTS[layout]
    expected = alone(model)
    assert len(set(expected.losses)) == STEPS
    for trace in one_loss.run(ranks, num_ranks, recipe(parallel, model), -1, STEPS):
        one_loss.assert_same(trace, expected, 1e-8)


@pytest.mark.few("tp2-dp2-edp2-ep2")
@pytest.mark.parametrize("layout", ["tp2-dp2-edp2-ep2", "pp2-tp2"])
def test_momenta_load_bit_for_bit_on_another_layout(ranks: Any, tmp_path: Path, layout: str) -> None:
    """Rows of fused weights that tensor parallelism splits are in order in a checkpoint."""
    (num_ranks, parallel), config = LAYOUTS[layout], CheckpointConfig(is_async=False)
    before, after = (replace(recipe(layout_of, "gqa"), checkpoint=config) for layout_of in (parallel, ParallelConfig()))
    by_rank = ranks(num_ranks, states.save, before, tmp_path)
    saved = {name: value for state in by_rank for name, value in state.items()}
    (loaded,) = ranks(1, states.resume, after, tmp_path)
    momenta = [name for name in loaded if name.endswith("momentum_buffer")]
    assert len(momenta) > 10 and all(loaded[name].abs().max() > 0 for name in momenta)
    assert not any(f"{name.removesuffix('momentum_buffer')}exp_avg" in loaded for name in momenta)
    for name, value in loaded.items():
        assert torch.equal(saved[name], value), name
