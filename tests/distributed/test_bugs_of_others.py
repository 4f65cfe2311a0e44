"""Layouts in which other frameworks have silently trained something else, by the numbers of their issues and
pull requests.

    python -m pytest tests/distributed/test_bugs_of_others.py --layouts 0

Without the option most rows take few of the 20 steps. Numbers are of NVIDIA/Megatron-LM, verl-project/verl and
pytorch/pytorch; #7452 lists several bugs, of which 01 to 11 are its own numbers. Models and comparison are those of
test_one_loss.py: balancing losses, expert bias, shared experts, documents, several microbatches, and labels that some
ranks lack.

Without a row of its own:

* Megatron 7452, 02 (logits of all words taken for those of a part: the loss is too large by log(tp)) cannot occur here
  because the loss of a tp rank has only the logits of its own words. The row of 01 compares it.
* Megatron 7452, 10 (counts of a rank replaced by those of all, under a padding mask) cannot occur here because there is
  no padding mask. Balancing losses over tp are in most rows.
* Megatron 7452, 06, 07 and 09, and NVIDIA-NeMo/Automodel 3507: their texts were not at hand when this was written, so
  whether they could occur here is not known. Layouts at random are in test_layouts.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support import load

from titan_moe.config import Recipe
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import MemoryConfig

one_loss = load("distributed/test_one_loss")
STEPS, SOME, FEW = one_loss.STEPS, one_loss.SOME, one_loss.FEW
IN_SOME_STEPS = "Megatron_2217-cp2", "verl_6609-cp2-ep2-documents", "Megatron_7452_11-tp2"
"""Rows that go beyond the warm-up: of two ranks, which share the cores of a host."""
EP2 = ParallelConfig(ep=2, dispatcher="alltoall")
CP2 = ParallelConfig(cp=2)
GATHERED_KEYS = replace(CP2, cp_kind="allgather")


def recipe(parallel: ParallelConfig, name: str) -> Recipe:
    return one_loss.split_recipe(parallel, name)


@pytest.fixture(scope="module")
def alone(ranks: Any) -> Callable[[str, int], Any]:
    """One process, by the name of a model and the number of steps."""
    return cache(lambda name, num_steps: one_loss.run(ranks, 1, recipe(ParallelConfig(), name), -1, num_steps)[0])


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "name"),
    [
        # the scale of balancing losses: it must not depend on cp, tp, dp, or the tokens of a rank
        pytest.param(2, CP2, "gqa", id="Megatron_2217-cp2"),
        pytest.param(2, GATHERED_KEYS, "gqa-tied", id="Megatron_2217-cp2-allgather"),
        pytest.param(4, replace(CP2, tp=2), "gqa-shared", id="Megatron_5047-cp2-tp2"),
        pytest.param(4, replace(EP2, cp=2, ep=4), "gqa", id="Megatron_3768-cp2-dp2-ep4"),
        # the scale of a loss with cp: 3959 has that of multi-token prediction, here it is that of the one loss there is
        pytest.param(2, replace(EP2, cp=2), "mla-latent-gate", id="verl_6609-cp2-ep2-documents"),
        pytest.param(4, replace(GATHERED_KEYS, cp=4), "gqa-shared", id="Megatron_3959-cp4"),
        # gradients of experts came out ep times too large
        pytest.param(4, replace(EP2, tp=2), "gqa", id="pytorch_160285-dp2-tp2-ep2-edp2"),
        # the loss over own words only (theirs with smoothed labels)
        pytest.param(4, replace(EP2, tp=4, ep=4), "gqa-tied", id="Megatron_7452_01-tp4-ep4"),
        # divided by own labels instead of all, theirs in multi-token prediction: here ranks of dp, too, have different
        # numbers of labels
        pytest.param(4, ParallelConfig(dp_replicate=2, tp=2), "gqa", id="Megatron_7452_03-hsdp2-tp2"),
        # the tensor axis of experts taken for that of attention
        pytest.param(4, ParallelConfig(tp=2, etp=4), "mla", id="Megatron_7452_05-dp2-tp2-etp4"),
        # a weight of heads counted wrongly in the gradient norm, which clips
        pytest.param(4, ParallelConfig(tp=4, ep=2, dispatcher="alltoall"), "gqa-shared", id="Megatron_7452_08-tp4-ep2"),
        # a norm of heads is on every tensor rank: its gradient is a sum over them
        pytest.param(2, ParallelConfig(tp=2), "gqa-window", id="Megatron_7452_11-tp2"),
    ],
)
def test_no_layout_has_the_bug(
    ranks: Any,
    alone: Callable[[str, int], Any],
    takes_all_steps: bool,
    request: pytest.FixtureRequest,
    num_ranks: int,
    parallel: ParallelConfig,
    name: str,
) -> None:
    ids = {mark.id for mark in next(request.node.iter_markers("parametrize")).args[1]}
    assert ids.issuperset(IN_SOME_STEPS)
    num_steps = STEPS if takes_all_steps else SOME if request.node.callspec.id in IN_SOME_STEPS else FEW
    for trace in one_loss.run(ranks, num_ranks, recipe(parallel, name), -1, num_steps):
        assert len(trace.losses) == num_steps
        one_loss.assert_same(trace, alone(name, num_steps), 1e-9)


def test_no_recomputed_layer_has_the_bug_of_megatron_7452_04(ranks: Any, alone: Callable[[str, int], Any]) -> None:
    """Recomputed activations were those of another tp group (theirs in multi-token prediction): here there are two."""
    parallel = replace(EP2, tp=2, ep=4)
    recomputed = one_loss.split_recipe(parallel, "mla", memory=MemoryConfig("block"))
    for trace in one_loss.run(ranks, 4, recomputed, -1, FEW):
        one_loss.assert_same(trace, alone("mla", FEW), 1e-9)
