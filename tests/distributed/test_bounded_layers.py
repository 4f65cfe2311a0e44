"""Training with a bound on each layer of an arena: a step in which a layer does not fit is taken again in pieces.

Ranks are those of test_symm_mem.py.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support import load

from titan_moe.config import Recipe
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import MemoryConfig
from titan_moe.dispatch import capacity as capacity_module
from titan_moe.dispatch.symm_mem.fused import PeerPieces, PeerTokens
from titan_moe.plan.cost import loads
from titan_moe.training import build, capacity_control, layer_capacity
from titan_moe.training.step_runner import StepRunner

pytestmark = pytest.mark.interpreted

one_loss, over_memory = load("distributed/test_one_loss"), load("distributed/test_symm_mem")


def bound_layers(
    candidate: Recipe, num_steps: int, is_lifted: bool = False, many: int = 9, *, has_room: bool = True
) -> tuple[dict[str, Any], int, list[bool]]:
    """A trace, the number of steps that were taken again, and whether layers were in pieces, one by one; with
    `is_lifted` no step is bounded. After `many` overflows a layer gets more room, if memory has some."""
    pieces, whole, split = PeerPieces.run_mlp, PeerTokens.run_mlp, []

    def note(inputs: Any, *args: Any) -> Any:
        split.append(isinstance(inputs, PeerPieces))
        return (pieces if split[-1] else whole)(inputs, *args)

    with ExitStack() as stack:
        for of in (capacity_module, loads):
            stack.enter_context(mock.patch.object(of, "SLOTS_ALIGNMENT", 1))
        for of in (PeerPieces, PeerTokens):
            stack.enter_context(mock.patch.object(of, "run_mlp", note))
        stack.enter_context(mock.patch.object(layer_capacity, "MANY_OVERFLOWS", many))
        stack.enter_context(mock.patch.object(build, "has_room", lambda *_: has_room))
        stack.enter_context(mock.patch.object(capacity_control, "CALIBRATION_STEPS", 1))
        if is_lifted:
            stack.enter_context(mock.patch.object(StepRunner, "_take", lift))
        return *over_memory.count_reruns(candidate, num_steps), split


def lift(runner: StepRunner, batch: Any) -> Any:
    """A step without a bound."""
    with runner.step.capacity.unbounded():
        return runner.step(batch)


over_memory.bounded = SimpleNamespace(
    bound_layers=bound_layers,
    bound_layers_once=partial(bound_layers, many=1),
    bound_layers_without_room=partial(bound_layers, many=1, has_room=False),
)


def run_on_files(folder: str, function: str, *args: Any) -> Any:
    """With the namespace above, which a rank has only here."""
    return over_memory.on_files(folder, "bounded", function, *args)


BOUNDED = replace(over_memory.EP2, overlap="tile", expert_rank_capacity_factor=9.0, expert_layer_capacity_factor=1.0)
"""All layers together fit, and one does not."""


@pytest.mark.few("none")
@pytest.mark.parametrize(
    ("parallel", "what", "num_reruns"),
    [
        pytest.param(BOUNDED, "none", 2, id="none"),
        pytest.param(BOUNDED, "experts", 2, id="recompute_experts"),
        pytest.param(BOUNDED, "block", 2, id="recompute_block"),
        pytest.param(replace(BOUNDED, expert_rank_capacity_factor="auto"), "none", 1, id="auto"),
        pytest.param(replace(BOUNDED, ep=4), "none", 2, id="four_ranks"),
    ],
)
def test_symm_mem_layer_overflow_takes_the_step_again_in_pieces(
    ranks: Any, tmp_path: Path, parallel: ParallelConfig, what: str, num_reruns: int
) -> None:
    """Bit for bit as steps without a bound are taken; the losses and norms are those of one process."""
    num_ranks = parallel.ep
    alone = ranks(1, one_loss.train, over_memory.in_plain_torch(), -1, 2)[0] | {"grads": {}}
    candidate = over_memory.with_fused_experts(parallel, memory=MemoryConfig(what))
    candidate = over_memory.in_one_microbatch(candidate, num_ranks)
    answers = []
    for is_lifted in (False, True):
        folder = tmp_path / str(is_lifted)
        folder.mkdir()
        answers.append(ranks(num_ranks, run_on_files, str(folder), "bound_layers", candidate, 2, is_lifted))
    for (fields, reruns, split), (lifted, none, split_there) in zip(*answers, strict=True):
        assert (reruns, none) == (num_reruns, 0) and all(split_there[-2:]) and set(split) == {False, True}
        trace, of_lifted = (one_loss.Trace(**(it | {"grads": {}})) for it in (fields, lifted))
        assert (trace.losses, trace.grad_norms) == (of_lifted.losses, of_lifted.grad_norms)
        one_loss.assert_same(trace, one_loss.Trace(**alone), 2e-5)


@pytest.mark.few()
@pytest.mark.parametrize("has_room", [True, False], ids=["room", "no_room"])
def test_symm_mem_layers_that_overflow_again_and_again_get_room_or_no_bound(
    ranks: Any, tmp_path: Path, has_room: bool
) -> None:
    """After one overflow here: with twice the room the next step fits, and without a bound it is in pieces at once."""
    alone = ranks(1, one_loss.train, over_memory.in_plain_torch(), -1, 2)[0] | {"grads": {}}
    candidate = over_memory.in_one_microbatch(over_memory.with_fused_experts(BOUNDED), num_ranks=2)
    function = "bound_layers_once" if has_room else "bound_layers_without_room"
    for fields, reruns, split in ranks(2, run_on_files, str(tmp_path), function, candidate, 2):
        num_layers = len(split) // 3
        assert reruns == 1 and split == [step for step in (False, True, not has_room) for _ in range(num_layers)]
        one_loss.assert_same(one_loss.Trace(**(fields | {"grads": {}})), one_loss.Trace(**alone), 2e-5)
