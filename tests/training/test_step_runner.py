"""Steps that are replayed, skipped or taken again leave the same weights as plain steps."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import dropout

from titan_moe.compile.cudagraph import NUM_WARM_UPS
from titan_moe.config import Recipe
from titan_moe.config.clones import PAYS_FROM
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.train import OptimConfig, TrainConfig
from titan_moe.data.packing import Batch
from titan_moe.dispatch import capacity
from titan_moe.dispatch.clones.optional import ReplicaSlots
from titan_moe.layers.attention import Context
from titan_moe.layers.block import Block
from titan_moe.models.transformer import Transformer
from titan_moe.parameters import local
from titan_moe.training import clone_control, spikes, step_runner
from titan_moe.training.build import assemble
from titan_moe.training.capacity_control import CALIBRATION_STEPS, CapacityControl, FixedCapacity, LargestNeed
from titan_moe.training.clone_control import CloneControl
from titan_moe.training.progress import Progress
from titan_moe.training.step import StepResult

pytestmark = pytest.mark.slow

SEQUENCES, TOKENS, STEPS = 4, 8, 7
RECIPE = Recipe(
    model=ModelConfig(
        vocab_size=32,
        num_layers=2,
        hidden_size=16,
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
        moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=8, score_fn="sigmoid", bias_update_speed=1e-2),
        init_std=0.2,
        embedding_init_std=0.2,  # so that some steps overflow
    ),
    perf=PerfConfig(kernels="reference", loss_chunk_tokens=5),
    precision=PrecisionConfig("fp64", "fp64", "fp64"),
    compile=CompileConfig("off"),
    train=TrainConfig(steps=STEPS, seq_len_tokens=TOKENS, global_batch_sequences=SEQUENCES, micro_batch_sequences=1),
    optim=OptimConfig(lr=1e-2, max_grad_norm=0.5, warmup_steps=3, decay_steps=2),
)
FACTOR = 1.75
SPREAD = ParallelConfig(ep=4, dispatcher="allgather", expert_rank_capacity_factor=0.0)


class Repeater:
    """Stands for a CUDA graph: nothing runs during capture, a replay runs the function."""

    def run(self, function: Callable[[], Any]) -> Any:
        return function()

    def record(self, function: Callable[[], Any]) -> Any:
        recording = SimpleNamespace(outputs=None, release=lambda: None)

        def replay() -> None:
            recording.outputs = function()

        recording.replay = replay
        return recording


def batch_of(step: int, tp: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(32, (SEQUENCES, TOKENS + 1), generator=generator)
    mine = tokens.chunk(dist.get_world_size() // tp)[dist.get_rank() // tp]
    return Batch(mine[:, None, :-1].contiguous(), mine[:, None, 1:].contiguous(), None)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def train(
    recipe: Recipe, is_captured: bool = False, poisoned_step: int = -1, poison: float = math.inf
) -> dict[str, Any]:
    """Losses, norms, weights, moments and counters after all steps; slots are bounded to the slot."""
    capacity.SLOTS_ALIGNMENT, spikes.WINDOW_STEPS = 1, 4
    run = assemble(recipe, torch.device("cpu"))
    is_poisoned = False

    def run_batch(*args: Any) -> Tensor:
        loss = run.step.step.forward_backward(*args)
        if is_poisoned:
            run.optimizers.parameters[0].grad.mul_(poison)
        return loss

    step = run.step.step if poisoned_step < 0 else replace(run.step.step, forward_backward=run_batch)
    controllers, memory = run.step.controllers, run.step.memory
    for control in (each for each in controllers if isinstance(each, CapacityControl)):
        assert control.largest.args == (memory,), "what the runner notes is what the control reads"
    take = step_runner.StepRunner(step, run.schedule, is_captured, Repeater, controllers, memory=memory)
    losses, norms, reruns, factors, in_row = [], [], [], [], []
    for index in range(STEPS):
        is_poisoned = index == poisoned_step
        result = take(batch_of(index, recipe.parallel.tp))
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
        reruns.append(take.num_reruns)
        factors.append(take.capacity_factor)
        in_row.append(int(result.metrics["skipped_in_row"]))
    moments = [whole(state["exp_avg"]) for optimizer in run.optimizers for state in optimizer.state.values()]
    return {
        "losses": losses,
        "norms": norms,
        "reruns": reruns,
        "factors": factors,
        "recordings": take.num_recordings,
        "need": max((each.factor for each in controllers if isinstance(each, LargestNeed)), default=0.0),
        "skipped": int(result.metrics["skipped_steps"]),
        "skipped_in_row": in_row,
        "spikes": int(result.metrics.get("spikes", 0)),
        "weights": {name: whole(p).detach() for part in run.parts for name, p in part.named_parameters()},
        "biases": [router.expert_bias_E for router in run.step.step.balancer.routers.values()],
        "moments": moments,
        "lr": run.schedule.lr,
    }


def result_of(**metrics: float) -> StepResult:
    return StepResult({name: torch.tensor(value) for name, value in metrics.items()}, {})


class DroppingBlock(Block):
    """Draws random numbers in forward, as the models of others do."""

    def forward(self, x_BND: Tensor, context: Context) -> Tensor:
        return dropout(super().forward(x_BND, context), 0.2, self.training)


class Dropping(Transformer):
    block_class = DroppingBlock


def train_dropping(recipe: Recipe, is_captured: bool) -> dict[str, Any]:
    """The same of a model with dropout, whose ranks draw different numbers."""
    module = ModuleType("dropping")
    module.Dropping = Dropping
    torch.manual_seed(dist.get_rank())
    with mock.patch.dict(sys.modules, dropping=module):
        return train(replace(recipe, model=replace(recipe.model, class_="dropping:Dropping")), is_captured)


def assert_equal(one: dict[str, Any], other: dict[str, Any], tolerance: float = 0.0) -> None:
    for name in ("losses", "norms", "weights", "biases", "moments", "lr"):
        torch.testing.assert_close(one[name], other[name], rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def exact(ranks: Any) -> dict[int, list[dict[str, Any]]]:
    """By number of ranks, and by rank: plain steps without a bound."""
    return {1: ranks(1, train, RECIPE), 4: ranks(4, train, replace(RECIPE, parallel=SPREAD))}


@pytest.fixture(scope="module")
def exact_with_dropout(ranks: Any) -> dict[str, Any]:
    return ranks(4, train_dropping, replace(RECIPE, parallel=SPREAD), False)[0]


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_step_runner_replayed_steps_equal_launched_ones(ranks: Any, exact: Any, num_ranks: int) -> None:
    recipe = replace(RECIPE, parallel=SPREAD if num_ranks == 4 else ParallelConfig())
    for one, other in zip(exact[num_ranks], ranks(num_ranks, train, recipe, True), strict=True):
        assert_equal(one, other)
        assert other["skipped"] == 0 and other["reruns"][-1] == 0 and other["recordings"] == 1


def train_growing(is_captured: bool) -> tuple[list[float], list[str], int]:
    """Losses and kinds of steps of which the first have two microbatches, and the others four; and the recordings."""
    run = assemble(RECIPE, torch.device("cpu"))
    take = step_runner.StepRunner(run.step.step, run.schedule, is_captured, Repeater)
    losses, kinds = [], []
    for step in range(2 * NUM_WARM_UPS + 4):
        number = 2 if step < NUM_WARM_UPS + 2 else SEQUENCES
        losses.append(take(Batch(*(x if x is None else x[:number] for x in batch_of(step)))).loss.item())
        kinds.append(take.kind)
    return losses, kinds, take.num_recordings


def test_step_runner_records_each_number_of_microbatches(ranks: Any) -> None:
    ((launched, *_),), ((captured, kinds, num_recordings),) = (ranks(1, train_growing, each) for each in (False, True))
    assert captured == launched and num_recordings == 2
    assert kinds == 2 * [*["launched"] * NUM_WARM_UPS, "recorded", "replayed"]


def test_step_runner_sums_over_tensor_ranks_in_a_replayed_step(ranks: Any, exact: Any) -> None:
    recipe = replace(RECIPE, parallel=ParallelConfig(tp=2, ep=2, dispatcher="allgather"))
    for launched, replayed in zip(ranks(2, train, recipe), ranks(2, train, recipe, True), strict=True):
        assert_equal(launched, replayed)
        for name in ("losses", "norms"):
            assert replayed[name] == pytest.approx(exact[1][0][name], rel=1e-9)


@pytest.mark.parametrize("is_captured", [False, True], ids=["launched", "captured"])
def test_step_runner_takes_a_step_again_after_an_overflow(ranks: Any, exact: Any, is_captured: bool) -> None:
    bounded = replace(SPREAD, expert_rank_capacity_factor=FACTOR)
    runs = ranks(4, train, replace(RECIPE, parallel=bounded), is_captured)
    for other in runs:
        assert_equal(exact[4][0], other, 1e-12)
        assert other["reruns"] == runs[0]["reruns"] and other["skipped"] == 0 and not any(other["skipped_in_row"])
    assert 0 < runs[0]["reruns"][-1] < STEPS, "some steps fit and some do not"
    reruns = runs[0]["reruns"]
    after_a_rerun = sum(reruns[step - 1] > reruns[step - 2] for step in range(NUM_WARM_UPS + 1, STEPS))
    assert runs[0]["recordings"] == is_captured * (1 + after_a_rerun)


@pytest.mark.few("captured")
@pytest.mark.parametrize("is_captured", [False, True], ids=["launched", "captured"])
def test_step_runner_follows_the_load(ranks: Any, exact: Any, is_captured: bool) -> None:
    """Without a bound at first, then with one that holds; the numbers are those of no bound."""
    runs = ranks(4, train, replace(RECIPE, parallel=replace(SPREAD, expert_rank_capacity_factor="auto")), is_captured)
    for other in runs:
        assert_equal(exact[4][0], other, 1e-12)
        assert other["factors"] == runs[0]["factors"] and other["reruns"] == runs[0]["reruns"]
    factors = runs[0]["factors"]
    assert factors[:3] == [0.0] * 3 and 1.0 <= runs[0]["need"] and factors[-1] >= 1.0


@pytest.mark.few("captured")
@pytest.mark.parametrize("is_captured", [False, True], ids=["launched", "captured"])
def test_a_step_taken_again_draws_the_same_random_numbers(
    ranks: Any, exact: Any, exact_with_dropout: dict[str, Any], is_captured: bool
) -> None:
    bounded = replace(SPREAD, expert_rank_capacity_factor=FACTOR)
    losses = zip(exact[4][0]["losses"], exact_with_dropout["losses"], strict=True)
    assert all(abs(one - other) > 1e-3 for one, other in losses)
    for other in ranks(4, train_dropping, replace(RECIPE, parallel=bounded), is_captured):
        assert_equal(exact_with_dropout, other, 1e-12)
        assert 0 < other["reruns"][-2] < STEPS, "some steps fit, and some before the last do not"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_states_of_host_and_device_are_restored(device: str) -> None:
    def draw() -> list[Tensor]:
        return [torch.rand(8).cpu(), torch.rand(8, device=device).cpu()]

    states = step_runner._random_states(torch.device(device))
    first, other = draw(), draw()
    step_runner._restore(states, torch.device(device))
    assert all(map(torch.equal, first, draw())) and not any(map(torch.equal, first, other))


@pytest.mark.parametrize("is_captured", [False, True], ids=["launched", "captured"])
def test_step_runner_skips_a_step_without_finite_gradients(ranks: Any, is_captured: bool) -> None:
    sick, other = ranks(2, train, RECIPE, is_captured, 3)
    assert sick["skipped_in_row"] == other["skipped_in_row"] == [0, 0, 0, 1, 0, 0, 0]
    assert sick["skipped"] == 1 and not math.isfinite(sick["norms"][3])
    assert all(torch.isfinite(weight).all() for weight in sick["weights"].values())
    assert torch.isfinite(torch.tensor(sick["losses"])).all()
    well = ranks(2, train, RECIPE, is_captured)[0]
    assert sick["losses"][:4] == well["losses"][:4] and sick["losses"][4] != well["losses"][4]


def factors_with_nan(recipe: Recipe, void_step: int) -> tuple[list[float], int]:
    """The factors and the skipped steps, where the embeddings of one step are NaN."""
    capacity.SLOTS_ALIGNMENT = 1
    run = assemble(recipe, torch.device("cpu"))
    take, step, embeddings = run.step, run.step.step, local(run.optimizers.parameters[0])

    def run_batch(*args: Any) -> Tensor:
        kept = embeddings.detach().clone()
        embeddings.data.mul_(math.nan if take.num_steps == void_step else 1.0)
        loss = forward_backward(*args)
        embeddings.data.copy_(kept)
        return loss

    forward_backward, step.forward_backward = step.forward_backward, run_batch
    factors = []
    for _ in range(STEPS):
        result = take(batch_of(0))
        factors.append(take.capacity_factor)
    return factors, int(result.metrics["skipped_steps"])


def test_a_step_without_finite_activations_is_no_load_to_prepare_for(ranks: Any) -> None:
    """Its routers choose the same expert for all tokens."""
    model = replace(RECIPE.model, moe=replace(RECIPE.model.moe, top_k=1, normalize_topk=False))
    recipe = replace(RECIPE, model=model, parallel=replace(SPREAD, expert_rank_capacity_factor="auto"))
    for factors, num_skipped in ranks(4, factors_with_nan, recipe, CALIBRATION_STEPS + 2):
        assert num_skipped == 1 and len(set(factors[CALIBRATION_STEPS - 1 :])) == 1


@pytest.mark.few("captured")
@pytest.mark.parametrize("is_captured", [False, True], ids=["launched", "captured"])
def test_step_runner_skips_a_spike_like_a_step_without_finite_gradients(ranks: Any, is_captured: bool) -> None:
    recipe = replace(RECIPE, train=replace(RECIPE.train, spike_sigmas=50.0))
    void = ranks(2, train, recipe, is_captured, 3)[0]
    for spiked in ranks(2, train, recipe, is_captured, 3, 1e6):
        assert spiked["spikes"] == 1 and spiked["skipped"] == 0 and not any(spiked["skipped_in_row"])
        for name in ("losses", "weights", "biases", "moments"):
            torch.testing.assert_close(spiked[name], void[name], rtol=0, atol=0)


def test_step_runner_does_not_take_an_overflow_for_a_spike(ranks: Any, exact: Any) -> None:
    watchful = replace(RECIPE, train=replace(RECIPE.train, spike_sigmas=50.0))
    bounded = replace(watchful, parallel=replace(SPREAD, expert_rank_capacity_factor=FACTOR))
    for other in ranks(4, train, bounded):
        assert_equal(exact[4][0], other, 1e-12)
        assert other["reruns"][-1] > 0 and other["spikes"] == 0


def test_step_runner_goes_on_with_the_factor_of_an_earlier_run() -> None:
    step: Any = SimpleNamespace(capacity=capacity.ExpertCapacity())
    before, control = CapacityControl(), CapacityControl()
    before.factor = 1.625
    take = step_runner.StepRunner(step, SimpleNamespace(), controllers=[control])  # type: ignore[arg-type]
    assert take.capacity_factor == 0.0, "calibrates"
    Progress([control]).load_state_dict(Progress([before]).state_dict())
    take.resume(7)
    assert take.capacity_factor == 0.0, "one step shows the memory that is left"
    assert control.follow({"needed_factor": 1.2, "has_overflowed": 0.0}).capacity_factor == 1.625


def test_step_runner_warns_once_of_many_reruns(caplog: pytest.LogCaptureFixture) -> None:
    class Void(SimpleNamespace):
        def __call__(self, batch: Batch) -> Any:
            return result_of(has_overflowed=1.0, grad_norm=1.0, needed_factor=1.5)

    step: Any = Void(capacity=capacity.ExpertCapacity(1.25))
    take = step_runner.StepRunner(step, Void(step=lambda: None), controllers=[FixedCapacity(1.25)])  # type: ignore[arg-type]
    batch = Batch(torch.zeros(1, 1, 4, dtype=torch.int64), torch.zeros(1, 1, 4, dtype=torch.int64), None)
    with caplog.at_level("WARNING", logger="titan_moe"):
        for _ in range(30):
            take(batch)
    (record,) = caplog.records
    assert "10 of 10 steps were repeated" in record.message and "a number above 1.25" in record.message


def test_step_runner_raises_for_a_rank_that_misses_a_step_taken_again() -> None:
    """That step is void too, and would count as taken."""
    limits = capacity.ExpertCapacity(1.25)

    class Void(SimpleNamespace):
        def __call__(self, batch: Batch) -> Any:
            if limits.is_unbounded:
                limits.check = mock.Mock(side_effect=RuntimeError("rank 1 did not come"))
            return result_of(has_overflowed=1.0, grad_norm=1.0, needed_factor=1.5)

    take = step_runner.StepRunner(Void(capacity=limits), Void(step=lambda: None))  # type: ignore[arg-type]
    batch = Batch(torch.zeros(1, 1, 4, dtype=torch.int64), torch.zeros(1, 1, 4, dtype=torch.int64), None)
    with pytest.raises(RuntimeError, match="rank 1 did not come"):
        take(batch)


class CountingRecorder(Repeater):
    """Notes in which order it records, warms up and releases."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def run(self, function: Callable[[], Any]) -> Any:
        self.events.append("warm-up")
        return function()

    def record(self, function: Callable[[], Any]) -> Any:
        recording = super().record(function)
        recording.release = lambda: self.events.append("release")
        self.events.append("record")
        return recording


@pytest.mark.parametrize("is_captured", [False, True], ids=["launched", "captured"])
def test_step_runner_records_anew_when_clones_come_into_use(
    is_captured: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clone_control, "WINDOW_STEPS", 4)
    monkeypatch.setattr(clone_control, "STEPS_BETWEEN_CHANGES", 8)
    replicas, recorder = ReplicaSlots(2, are_used=False), CountingRecorder()
    imbalances, in_use = [1.0] * 5 + [1.4] * 8 + [1.0] * 12, []

    class Step(SimpleNamespace):
        def __call__(self, batch: Batch) -> Any:
            in_use.append(replicas.number_in_use)
            imbalance = imbalances[len(in_use) - 1]
            return result_of(has_overflowed=0.0, grad_norm=1.0, needed_factor=1.0, imbalance=imbalance)

    step: Any = Step(capacity=capacity.ExpertCapacity(1.25), replicas=replicas)
    schedule: Any = SimpleNamespace(step=lambda: None)
    take = step_runner.StepRunner(step, schedule, is_captured, lambda: recorder, [CloneControl(1.2)])
    batch = Batch(torch.zeros(1, 1, 4, dtype=torch.int64), torch.zeros(1, 1, 4, dtype=torch.int64), None)
    with caplog.at_level("INFO", logger="titan_moe"):
        for _ in imbalances:
            take(batch)
    on, off = 8, 16
    assert in_use == [0] * on + [2] * (off - on) + [0] * (len(imbalances) - off)
    assert [record.message for record in caplog.records] == [
        f"up to 2 clones of experts a rank from step {on + 1} on; the busiest rank had 1.3 times the mean load in "
        "recent steps",
        f"no clones of experts from step {off + 1} on; the busiest rank had 1.1 times the mean load in recent steps",
    ]
    once = ["warm-up"] * NUM_WARM_UPS + ["record"]
    assert recorder.events == ([*once, "release", *once, "release", *once] if is_captured else [])


def test_step_runner_goes_on_with_the_clones_of_an_earlier_run() -> None:
    earlier, control = CloneControl(PAYS_FROM), CloneControl(PAYS_FROM)
    earlier.are_used = True
    step: Any = SimpleNamespace(capacity=capacity.ExpertCapacity(), replicas=ReplicaSlots(2, are_used=False))
    take = step_runner.StepRunner(step, SimpleNamespace(), controllers=[control])  # type: ignore[arg-type]
    assert not step.replicas.are_used
    Progress([control]).load_state_dict(Progress([earlier]).state_dict())
    take.resume(7)
    assert step.replicas.number_in_use == 2
