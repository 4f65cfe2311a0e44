"""Interleaved microbatches: what hides communication, and runs with validation, rounding and tied weights.

tests/distributed/test_one_loss.py compares whole runs on every layout, bit for bit.
"""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe.config import Recipe
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.train import OptimConfig, ProfileConfig, TrainConfig
from titan_moe.data.packing import Batch
from titan_moe.profile.region import PREFIX
from titan_moe.training.build import Assembly, assemble
from titan_moe.training.evaluate import validation_loss

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MICROBATCHES, TOKENS = 3, 8
RECIPE = Recipe(
    model=ModelConfig(
        vocab_size=32,
        num_layers=3,
        num_dense_layers=1,
        hidden_size=16,
        ffn_hidden_size=16,
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
        moe=MoEConfig(
            num_experts=4, top_k=2, ffn_hidden_size=8, shared_ffn_hidden_size=8, latent_size=8, aux_loss_coef=1e-2
        ),
        init_std=0.2,
    ),
    perf=PerfConfig(kernels="reference"),
    compile=CompileConfig("off"),
    train=TrainConfig(steps=3, seq_len_tokens=TOKENS, global_batch_sequences=MICROBATCHES * 2, micro_batch_sequences=1),
    optim=OptimConfig(lr=1e-2, warmup_steps=1),
)
WAYS = ("none", "microbatch")


def recipe(overlap: str, dispatcher: str, precision: PrecisionConfig, *, is_tied: bool = False) -> Recipe:
    parallel = ParallelConfig(ep=2, dispatcher=dispatcher, overlap=overlap, accumulate_unsharded=True)
    model = replace(RECIPE.model, embeddings_are_tied=is_tied)
    return replace(RECIPE, parallel=parallel, precision=precision, model=model)


def batch_of(step: int) -> Batch:
    """Each sequence is two documents."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens, labels = torch.randint(32, (2, MICROBATCHES, 1, TOKENS), generator=generator)
    return Batch(tokens, labels, (torch.arange(TOKENS) > 2).int().expand(MICROBATCHES, 1, TOKENS))


class OverlapRecorder(TorchDispatchMode):
    """Records the operations between start and wait of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.traveling: dict[int, list[str]] = {}
        self.journeys: list[list[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        if name.endswith("wait_tensor"):
            self.journeys.append(self.traveling.pop(args[0].untyped_storage().data_ptr()))
        for under in self.traveling.values():
            under.append(name)
        result = func(*args, **(kwargs or {}))
        if name.startswith("_c10d_functional::all_"):
            self.traveling[result.untyped_storage().data_ptr()] = []
        return result


def watch(dispatcher: str) -> list[bool]:
    """Whether matrix products run during each collective of a step, in order of the waits."""
    built = assemble(recipe("microbatch", dispatcher, PrecisionConfig("fp32", "fp32", "fp32")), CPU)
    step, scale = built.step.step, torch.tensor(0.1)
    with OverlapRecorder() as seen:
        step.forward_backward(batch_of(0), scale)
    assert not seen.traveling
    return ["aten::mm" in under for under in seen.journeys]


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_overlap_hides_every_exchange_of_a_pair(ranks, dispatcher: str) -> None:
    num_layers, num_pairs = 2, MICROBATCHES - 1
    forward, backward = 4 * num_layers, 3 * num_layers  # ids, scores, rows and results; gradients of all but ids
    for is_hidden in ranks(2, watch, dispatcher):
        assert len(is_hidden) == MICROBATCHES * (forward + backward)
        assert all(is_hidden[forward : forward + num_pairs * (forward + backward)])
        assert not all(is_hidden[:forward]), "a microbatch alone hides some"


def learn(run: Recipe) -> tuple[list[float], list[Tensor]]:
    """Training and validation losses of a few steps, and the final weights."""
    built: Assembly = assemble(run, CPU)
    losses = []
    for index in range(run.train.steps):
        losses.append(built.step(batch_of(index)).loss.item())
        assert all(isinstance(parameter, DTensor) for parameter in built.optimizers.parameters), "all is resharded"
        losses.append(validation_loss(built.model, built.parts, [batch_of(99)], CPU, built.meshes).item())
    return losses, [parameter.full_tensor() for parameter in built.optimizers.parameters]


def learn_both_ways(*args: Any, **kwargs: Any) -> list[tuple[list[float], list[Tensor]]]:
    return [learn(recipe(overlap, *args, **kwargs)) for overlap in WAYS]


def test_overlap_sums_rounded_gradients_alike_and_validates_new_weights(ranks) -> None:
    for plain, interleaved in ranks(2, learn_both_ways, "alltoall", PrecisionConfig("bf16", "fp32", "fp32")):
        assert interleaved[0] == plain[0] and len(set(plain[0])) == 2 * RECIPE.train.steps
        assert all(torch.equal(a, b) for a, b in zip(interleaved[1], plain[1], strict=True))


def learn_tied(dispatcher: str) -> list[tuple[list[float], list[Tensor]]]:
    return learn_both_ways(dispatcher, PrecisionConfig("fp64", "fp64", "fp64"), is_tied=True)


def test_overlap_trains_a_tied_embedding(ranks) -> None:
    for plain, interleaved in ranks(4, learn_tied, "allgather"):
        torch.testing.assert_close(interleaved, plain, rtol=1e-11, atol=1e-11)


def trace() -> set[str]:
    """Names of a traced step."""
    plain = recipe("microbatch", "alltoall", PrecisionConfig("fp32", "fp32", "fp32"))
    built = assemble(replace(plain, profile=ProfileConfig(start_step=1)), CPU)
    with profile() as run:
        built.step(batch_of(0))
    return {event.name.removeprefix(PREFIX) for event in run.events() if event.name.startswith(PREFIX)}


def test_overlap_trace_names_the_parts_of_pieces(ranks) -> None:
    inside = {"attention", "dense", "router", "latent", "dispatch", "experts", "combine", "shared"}
    for names in ranks(2, trace):
        assert names == inside | {"embedding", "block", "head", "clip", "optimizer"}


def peaks() -> dict[str, int]:
    """Bytes that forward and backward of a step hold at most, each way."""
    held = {}
    tokens = torch.randint(32, (MICROBATCHES, 1, 128))
    for overlap in WAYS:
        run = recipe(overlap, "alltoall", PrecisionConfig("fp32", "fp32", "fp32"))
        deep = replace(run, parallel=replace(run.parallel, ep=1), model=replace(run.model, num_layers=12))
        built = assemble(deep, CPU)
        args = Batch(tokens, tokens, None), torch.tensor(0.1)
        built.step.step.forward_backward(*args)  # lays out the gradients
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            built.step.step.forward_backward(*args)
        events = seen.profiler.kineto_results.events()
        held[overlap] = max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    return held


def test_overlap_keeps_little_more_than_one_microbatch(ranks) -> None:
    (held,) = ranks(1, peaks)
    assert held["microbatch"] < 1.15 * held["none"]
