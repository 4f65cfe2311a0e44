"""Training with the symmetric-memory dispatcher, assembled as a recipe does it, trains as one process does.

Ranks are processes that map each other's files, and Triton's interpreter runs the kernels; only how the memory is
opened differs from a run on GPUs.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import load
from torch.distributed.tensor import DTensor

from titan_moe.config import Recipe
from titan_moe.config.kernels import KernelOverrides
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import MemoryConfig, PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.symm_mem import dispatcher as symm_mem
from titan_moe.parallel import symm_memory
from titan_moe.training import capacity_control
from titan_moe.training.build import assemble
from titan_moe.training.capacity_control import CapacityControl
from titan_moe.training.controller import Changes
from titan_moe.training.step import TrainStep
from titan_moe.training.step_runner import StepRunner

pytestmark = pytest.mark.interpreted
STEPS = 2


one_loss, clones, step_runner, mapped_files = map(
    load,
    ("distributed/test_one_loss", "distributed/test_clones", "training/test_step_runner", "support/mapped_files"),
)


def on_files(folder: str, module: str, name: str, *args: Any) -> Any:
    """Call a function of a test module where memory is shared through files."""
    with mock.patch.object(
        symm_memory, "open_symm_memory", side_effect=partial(mapped_files.map_files, folder)
    ) as opened:
        answer = getattr(globals()[module], name)(*args)
    assert opened.call_count == 1, "all layers share one buffer"
    return answer


EP2 = ParallelConfig(ep=2, dispatcher="symm_mem", expert_rank_capacity_factor=0.0)
TWO_NODES = replace(EP2, ep=4, dispatcher="hierarchical_symm_mem", ep_ranks_per_node=2)
NODES_OF_ONE = replace(TWO_NODES, ep=2, ep_ranks_per_node=1)


def train_and_count(candidate: Recipe, num_steps: int) -> tuple[dict[str, Any], int]:
    """A trace, and the number of delayed weight gradients."""
    from titan_moe.kernels.experts.delayed_weight_grads import DelayedWeightGrads

    compute = DelayedWeightGrads.compute
    with mock.patch.object(DelayedWeightGrads, "compute", autospec=True, side_effect=compute) as late:
        fields = one_loss.train(candidate, -1, num_steps)
    return fields, late.call_count


def miss_a_step(candidate: Recipe) -> tuple[str, bool, list[bool]]:
    """The last rank skips the barriers of the second step: what the run says, whether that step counts, and which
    parameters, moments and biases have changed."""
    run = assemble(candidate, torch.device("cpu"))
    run.step(one_loss.batch_of(0, candidate.train.micro_batch_sequences))
    before = [tensor.clone() for tensor in all_tensors(run)]
    is_last = dist.get_rank() == dist.get_world_size() - 1
    results, said, take = [], "", TrainStep.__call__
    run.step.step.capacity.check.__self__.set_limit(0.1)
    with (
        mock.patch.object(TrainStep, "__call__", lambda *args: results.append(take(*args)) or results[-1]),
        mock.patch.object(symm_mem, "symm_barrier", lambda *_: None) if is_last else nullcontext(),
    ):
        try:
            run.step(one_loss.batch_of(1, candidate.train.micro_batch_sequences))
        except RuntimeError as error:
            said = str(error)
    after = all_tensors(run)
    changed = [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    return said, not results[0].metrics["has_overflowed"], changed


def all_tensors(run: Any) -> list[torch.Tensor]:
    """Parameters, buffers and moments of this rank; counters of tokens and steps are none of them."""
    moments = [state[name] for o in run.optimizers for state in o.state.values() for name in ("exp_avg", "exp_avg_sq")]
    buffers = [named for part in run.parts for named in part.named_buffers()]
    biases = [buffer for name, buffer in buffers if name.endswith("expert_bias_E")]
    tensors = [*(parameter for part in run.parts for parameter in part.parameters()), *moments, *biases]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def follow_load(candidate: Recipe, num_steps: int) -> tuple[dict[str, Any], int, list[float], int]:
    """A trace, the number of clones, the capacity factor after each step (the first is chosen after one step), and the
    number of arenas."""
    factors, follow = [], CapacityControl.follow

    def noted(control: CapacityControl, metrics: Mapping[str, float]) -> Changes:
        changes = follow(control, metrics)
        factors.append(changes.capacity_factor)
        return changes

    with (
        mock.patch.object(capacity_control, "CALIBRATION_STEPS", 1),
        mock.patch.object(CapacityControl, "follow", noted),
        mock.patch.object(ExpertCapacity, "use_arena", autospec=True, side_effect=ExpertCapacity.use_arena) as arenas,
    ):
        fields, num_clones = clones.train_with_clones(candidate, -1, num_steps)
    return fields, num_clones, factors, arenas.call_count


def count_reruns(candidate: Recipe, num_steps: int) -> tuple[dict[str, Any], int]:
    """A trace, and the number of steps that were taken again."""
    with mock.patch.object(StepRunner, "_take_again", autospec=True, side_effect=StepRunner._take_again) as again:
        fields = one_loss.train(candidate, -1, num_steps)
    return fields, again.call_count


again = SimpleNamespace(count_reruns=count_reruns)
following = SimpleNamespace(follow_load=follow_load)
late = SimpleNamespace(train_and_count=train_and_count)
missing = SimpleNamespace(miss_a_step=miss_a_step)


def in_one_microbatch(candidate: Recipe, num_ranks: int) -> Recipe:
    """The same steps in as few exchanges as there can be: the interpreter takes its time for each."""
    return replace(candidate, train=replace(candidate.train, micro_batch_sequences=one_loss.SEQUENCES // num_ranks))


@pytest.fixture(scope="module")
def alone(ranks: Any) -> Any:
    return one_loss.Trace(**ranks(1, one_loss.train, one_loss.recipe(ParallelConfig()), -1, STEPS)[0])


@pytest.mark.few(
    "dp4-ep2-etp2-clones-recompute_experts",
    "tp2-ep2",
    "hsdp2x2-ep2-recompute_experts",
    "dp2-ep2-clones-recompute_block",
    "tp2-dp2-ep4-2x2-clones-recompute_block",
)
@pytest.mark.parametrize(
    ("num_ranks", "parallel", "what"),
    [
        pytest.param(4, EP2, "none", id="dp4-ep2-edp2"),
        pytest.param(
            4, replace(EP2, etp=2, expert_clones="auto"), "experts", id="dp4-ep2-etp2-clones-recompute_experts"
        ),
        pytest.param(2, replace(EP2, tp=2), "none", id="tp2-ep2"),
        pytest.param(4, replace(EP2, dp_replicate=2), "experts", id="hsdp2x2-ep2-recompute_experts"),
        pytest.param(2, replace(EP2, expert_clones="auto"), "block", id="dp2-ep2-clones-recompute_block"),
        pytest.param(2, replace(EP2, cp=2), "none", id="cp2-ep2"),
        pytest.param(
            4, replace(TWO_NODES, tp=2, expert_clones="auto"), "block", id="tp2-dp2-ep4-2x2-clones-recompute_block"
        ),
    ],
)
def test_symm_mem_trains_as_one_process(
    ranks: Any, alone: Any, tmp_path: Path, num_ranks: int, parallel: ParallelConfig, what: str
) -> None:
    candidate = in_one_microbatch(one_loss.recipe(parallel, memory=MemoryConfig(what)), num_ranks)
    for fields in ranks(num_ranks, on_files, str(tmp_path), "one_loss", "train", candidate, -1, STEPS):
        one_loss.assert_same(one_loss.Trace(**fields), alone, 1e-9)


def test_symm_mem_clones_behind_own_weights_train_as_apart(ranks: Any, tmp_path: Path) -> None:
    """Two microbatches, whose clones differ, share the copies of own weights."""
    mixed = PrecisionConfig(compute="fp32", master="fp64", reduce="fp64")
    candidate = one_loss.recipe(replace(EP2, expert_clones="auto", accumulate_unsharded=True), precision=mixed)
    candidate = replace(candidate, train=replace(candidate.train, micro_batch_sequences=one_loss.SEQUENCES // 4))
    answers = []
    for has_room in (False, True):
        folder = tmp_path / str(has_room)
        folder.mkdir()
        answers.append(ranks(2, on_files, str(folder), "clones", "train_with_room", candidate, has_room, 1))
    for (expected, num_clones, lengths), (fields, _, lengths_of_roomy) in zip(*answers, strict=True):
        assert num_clones > 0 and len(lengths | lengths_of_roomy) == 2
        one_loss.assert_same(one_loss.Trace(**fields), one_loss.Trace(**expected), 0.0)


@pytest.mark.few("tile")
@pytest.mark.parametrize(
    ("overlap", "cost"), [("none", 0), ("tile", 0), ("none", clones.DEAR)], ids=["none", "tile", "dear"]
)
def test_symm_mem_clones_are_used_while_ranks_are_imbalanced(
    ranks: Any, tmp_path: Path, overlap: str, cost: int
) -> None:
    phases = ["even", "hot", "hot", "even", "even", "even"]
    auto = replace(EP2, overlap=overlap, expert_rank_capacity_factor=2.0, expert_clones="auto")
    answers = []
    for number in ("off", "auto"):
        folder = tmp_path / str(number)
        folder.mkdir()
        candidate = in_one_microbatch(with_fused_experts(replace(auto, expert_clones=number)), num_ranks=2)
        answers.append(ranks(2, on_files, str(folder), "clones", "train_in_phases", candidate, phases, cost))
    for expected, trace in zip(*answers, strict=True):
        clones.assert_used_while_imbalanced(trace, phases, pays=not cost)
        assert (trace.losses[:2], trace.norms[:2]) == (expected.losses[:2], expected.norms[:2])
        torch.testing.assert_close(trace.losses, expected.losses, rtol=2e-5, atol=2e-5)


def with_fused_experts(parallel: ParallelConfig, **others: Any) -> Recipe:
    """In fp32, as the interpreter has it."""
    return one_loss.recipe(
        parallel,
        precision=PrecisionConfig("fp32", "fp32", "fp32"),
        perf=PerfConfig(kernels="grouped_mm", override=KernelOverrides(experts="fused"), loss_chunk_tokens=5),
        train=replace(one_loss.recipe(EP2).train, micro_batch_sequences=2),
        model=replace(one_loss.MODEL, num_layers=2),
        **others,
    )


def in_plain_torch() -> Recipe:
    """The same in one process without kernels of ours, which take the interpreter its time."""
    return replace(with_fused_experts(ParallelConfig()), perf=one_loss.recipe(EP2).perf)


@pytest.mark.parametrize("parallel", [EP2, replace(EP2, tp=2, etp=2)], ids=["dp2-ep2", "tp2-dp2-ep2-etp2"])
def test_symm_mem_tile_overlap_trains_as_one_process(ranks: Any, tmp_path: Path, parallel: ParallelConfig) -> None:
    """The experts' exchanges run again in backward."""
    alone = one_loss.Trace(**ranks(1, one_loss.train, in_plain_torch(), -1, 1)[0])
    num_ranks = parallel.ep * parallel.etp
    candidate = in_one_microbatch(
        with_fused_experts(replace(parallel, overlap="tile"), memory=MemoryConfig("block")),
        num_ranks=num_ranks // parallel.tp,
    )
    for fields in ranks(num_ranks, on_files, str(tmp_path), "one_loss", "train", candidate, -1, 1):
        one_loss.assert_same(one_loss.Trace(**fields), alone, 2e-5)


@pytest.mark.parametrize(
    "parallel", [replace(EP2, etp=2), replace(EP2, expert_clones="auto")], ids=["dp4-ep2-etp2", "dp2-ep2-clones"]
)
def test_symm_mem_arena_follows_the_load_and_trains_as_one_process(
    ranks: Any, tmp_path: Path, parallel: ParallelConfig
) -> None:
    """One step without a bound, then one with rows in the arena."""
    alone = one_loss.Trace(**ranks(1, one_loss.train, in_plain_torch(), -1, 2)[0])
    parallel, num_ranks = replace(parallel, expert_rank_capacity_factor="auto"), parallel.ep * parallel.etp
    candidate, of_folder = in_one_microbatch(with_fused_experts(parallel), num_ranks), (str(tmp_path), "following")
    for fields, num_clones, factors, num_arenas in ranks(num_ranks, on_files, *of_folder, "follow_load", candidate, 2):
        one_loss.assert_same(one_loss.Trace(**fields), alone, 2e-5)
        assert min(factors) >= 1.0 and num_arenas == 1 and (num_clones > 0) == (parallel.has_clones)


def test_symm_mem_arena_overflow_takes_the_step_again(ranks: Any, tmp_path: Path) -> None:
    """A bound that no step fits: each is taken again, and the loss and norm are those of one process."""

    def deeper(candidate: Recipe) -> Recipe:
        return replace(candidate, model=replace(one_loss.MODEL, num_layers=one_loss.MODEL.num_dense_layers + 2))

    alone = ranks(1, one_loss.train, deeper(in_plain_torch()), -1, 1)[0] | {"grads": {}}
    bounded = replace(EP2, overlap="tile", expert_rank_capacity_factor=1.0)
    candidate = deeper(in_one_microbatch(with_fused_experts(bounded), num_ranks=2))
    for fields, reruns in ranks(2, on_files, str(tmp_path), "again", "count_reruns", candidate, 1):
        one_loss.assert_same(one_loss.Trace(**(fields | {"grads": {}})), one_loss.Trace(**alone), 2e-5)
        assert reruns == 1


def test_symm_mem_delayed_weight_grads_are_equal(ranks: Any, tmp_path: Path) -> None:
    plain = with_fused_experts(replace(EP2, accumulate_unsharded=True))
    answers = []
    for overlap in ("none", "microbatch"):
        candidate = replace(plain, parallel=replace(plain.parallel, overlap=overlap))
        folder = tmp_path / overlap
        folder.mkdir()
        answers.append(ranks(2, on_files, str(folder), "late", "train_and_count", candidate, 1))
    for (fields, num_late), *others in zip(*answers, strict=True):
        assert num_late == 0
        for late_fields, num_late_there in others:
            one_loss.assert_same(one_loss.Trace(**late_fields), one_loss.Trace(**fields), 0.0)
            assert num_late_there > 0


@pytest.mark.few("dp4-ep4-2x2")
@pytest.mark.parametrize("parallel", [EP2, TWO_NODES], ids=["dp2-ep2", "dp4-ep4-2x2"])
def test_symm_mem_interleaved_microbatches_train_as_one_process(
    ranks: Any, alone: Any, tmp_path: Path, parallel: ParallelConfig
) -> None:
    parallel = replace(parallel, overlap="microbatch", accumulate_unsharded=True)
    of_folder = str(tmp_path), "one_loss", "train"
    for fields in ranks(parallel.ep, on_files, *of_folder, one_loss.recipe(parallel), -1, STEPS):
        one_loss.assert_same(one_loss.Trace(**fields), alone, 1e-9)


@pytest.mark.few("dp2-ep2")
@pytest.mark.parametrize("parallel", [EP2, NODES_OF_ONE], ids=["dp2-ep2", "dp2-ep2-2x1"])
def test_symm_mem_overflow_takes_the_step_again(ranks: Any, tmp_path: Path, parallel: ParallelConfig) -> None:
    """Rows and slots are bounded, and the steps repeated as a graph would repeat them."""
    bounded = replace(parallel, expert_rank_capacity_factor=1.4)
    exact = ranks(1, step_runner.train, step_runner.RECIPE)[0]
    candidate = replace(step_runner.RECIPE, parallel=bounded)
    runs = ranks(parallel.ep, on_files, str(tmp_path), "step_runner", "train", candidate, True)
    for other in runs:
        step_runner.assert_equal(exact, other, 1e-9)
        assert other["reruns"] == runs[0]["reruns"] and other["skipped"] == 0
    assert 0 < runs[0]["reruns"][-1] < step_runner.STEPS, "some steps fit and some do not"


def test_a_step_that_a_rank_has_missed_changes_nothing(ranks: Any, tmp_path: Path) -> None:
    candidate = in_one_microbatch(one_loss.recipe(EP2), 2)
    answers = ranks(2, on_files, str(tmp_path), "missing", "miss_a_step", candidate)
    assert answers[0][0].startswith("rank 1 did not come to an exchange over symmetric memory")
    for _, counts, changed in answers:
        assert not counts and changed and not any(changed)
