"""Context parallelism: checkpoints, initial weights, validation and generated text do not depend on it.

test_one_loss.py has its gradients and losses.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import load

from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.train import CheckpointConfig

one_loss = load("distributed/test_one_loss")
state = load("distributed/test_tensor_parallel")
CP2 = ParallelConfig(cp=2)
CP2_EP2 = ParallelConfig(cp=2, ep=2, dispatcher="alltoall")
TP2 = ParallelConfig(tp=2)
CP2_TP2 = ParallelConfig(cp=2, tp=2, cp_kind="allgather")


@pytest.mark.few("cp2-ep2-to-1")
@pytest.mark.parametrize(
    ("num_ranks", "parallel", "num_later", "later", "name"),
    [
        pytest.param(2, CP2_EP2, 1, ParallelConfig(), "gqa", id="cp2-ep2-to-1"),
        pytest.param(2, TP2, 2, CP2, "mla", id="tp2-to-cp2-mla"),
        pytest.param(4, replace(CP2_EP2, ep=4), 4, CP2_TP2, "gqa", id="cp2-dp2-ep4-to-cp2-tp2-allgather"),
    ],
)
def test_context_parallel_checkpoints_load_bit_for_bit_on_other_layouts(
    ranks, tmp_path: Path, num_ranks: int, parallel: ParallelConfig, num_later: int, later: ParallelConfig, name: str
) -> None:
    config = CheckpointConfig(is_async=False)
    before, after = (one_loss.split_recipe(layout, name, checkpoint=config) for layout in (parallel, later))
    saved = ranks(num_ranks, state.save, before, tmp_path)[0]
    state.assert_same_state(ranks(num_later, state.resume, after, tmp_path), saved)


@pytest.mark.few("cp2-mla", "cp4-allgather-gqa", "cp2-tp2-gqa-window")
@pytest.mark.parametrize(
    ("num_ranks", "parallel", "name"),
    [
        pytest.param(2, CP2, "mla", id="cp2-mla"),
        pytest.param(4, replace(CP2, cp=4, cp_kind="allgather"), "gqa", id="cp4-allgather-gqa"),
        pytest.param(4, replace(CP2_TP2, cp_kind="ulysses"), "gqa-window", id="cp2-tp2-gqa-window"),
        pytest.param(2, replace(CP2, cp_kind="ring"), "gqa", id="cp2-ring-gqa"),
        pytest.param(4, CP2_TP2, "mla", id="cp2-tp2-allgather-mla"),
    ],
)
def test_context_parallel_ranks_start_alike_and_generate_the_same(
    ranks, num_ranks: int, parallel: ParallelConfig, name: str
) -> None:
    """Texts have lengths that do not divide by the ranks, too."""
    whole, _, loss, tokens = ranks(1, state.describe, one_loss.split_recipe(ParallelConfig(), name))[0]
    for initial, _, split_loss, split_tokens in ranks(num_ranks, state.describe, one_loss.split_recipe(parallel, name)):
        assert initial.keys() == whole.keys()
        for key, value in whole.items():
            assert torch.equal(initial[key], value), key
        assert torch.equal(split_tokens, tokens)
        assert split_loss == pytest.approx(loss, rel=1e-12)
