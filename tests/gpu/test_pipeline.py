"""Pipelines on several GPUs: they train as one GPU does, launched and replayed, and messages between stages pass beside
exchanges over symmetric memory."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import load
from support.gpus import NUM_GPUS, RANKS_PER_GPU, needs_gpus, take_gpu

from titan_moe.compile.cudagraph import NUM_WARM_UPS
from titan_moe.config import Recipe, check_rules
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.data.packing import Batch
from titan_moe.dispatch.symm_mem import backward as symm_mem_backward
from titan_moe.dispatch.symm_mem.dispatcher import SymmMemDispatcher
from titan_moe.dispatch.symm_mem.memory import close_symm_memory, open_symm_memory
from titan_moe.kernels.experts.fused_mlp import FusedMLP
from titan_moe.kernels.experts.weights import ExpertWeights
from titan_moe.kernels.symm_mem.arrays import symm_bytes
from titan_moe.layers.experts import GroupedExperts
from titan_moe.parallel.pipeline.messages import Messages
from titan_moe.run.process import process_group
from titan_moe.training.build import Assembly

pytestmark = [pytest.mark.gpu, needs_gpus]
conftest, capture, commands, symm_mem = map(
    load, ("gpu/conftest", "gpu/test_capture", "gpu/test_ranks", "gpu/test_symm_mem")
)

MODEL = ("--model.num_layers=5", "--train.micro_batch_sequences=1")
ONE_F_ONE_B = ("--parallel.pp=2",)
V = ("--parallel.pp=2", "--parallel.vpp=2", "--parallel.pp_schedule=zbv", "--parallel.accumulate_unsharded=true")
EP2 = ("--parallel.ep=2", "--parallel.dispatcher=symm_mem", "--perf.kernels=fused")
MTP = ("--model.mtp.num_depths=2", "--model.mtp.loss_weight=0.3")
TILE = (*EP2, "--parallel.overlap=tile")
PAIRS = (*V, "--parallel.pp_schedule=dualpipev", "--parallel.ep=2", "--parallel.overlap=microbatch")
INTERLEAVED_PAIRS = (*PAIRS, "--parallel.pp_schedule=interleaved_1f1b")
CAPTURED, PLAIN = "--compile.cudagraph=step", "--compile.regional=off"
VALIDATED = ("--validation.every_steps=4", "--validation.num_sequences=8")
LAYOUTS = {
    # name: GPUs, overrides
    "1f1b": (2, (*ONE_F_ONE_B, PLAIN)),
    "1f1b_captured": (2, (*ONE_F_ONE_B, CAPTURED, *VALIDATED)),
    "1f1b_recompute": (2, (*ONE_F_ONE_B, "--memory.recompute=block", PLAIN)),
    "interleaved": (2, (*ONE_F_ONE_B, "--parallel.vpp=2", "--parallel.pp_schedule=interleaved_1f1b", PLAIN)),
    # at 1e-3 its norms spike
    "tied": (2, (*ONE_F_ONE_B, "--model.embeddings_are_tied=true", "--optim.lr=3e-4", PLAIN)),
    "mtp_captured": (2, (*ONE_F_ONE_B, *MTP, CAPTURED, *VALIDATED)),
    "mtp_own_stage": (2, (*ONE_F_ONE_B, *MTP, "--parallel.pp_layout=Et*5|mmL", PLAIN)),
    "tiles_mtp_captured": (4, (*ONE_F_ONE_B, *MTP, *TILE, CAPTURED)),
    "zbv_mtp": (2, (*V, *MTP, PLAIN)),
    "zbv": (2, (*V, PLAIN)),
    "zbv_captured": (2, (*V, CAPTURED, *VALIDATED)),
    "pairs": (4, (*PAIRS, "--parallel.dispatcher=alltoall", PLAIN)),
    "pairs_captured": (4, (*PAIRS, "--parallel.dispatcher=allgather", CAPTURED, *VALIDATED)),
    "interleaved_pairs": (4, (*INTERLEAVED_PAIRS, "--parallel.dispatcher=alltoall", PLAIN)),
    "interleaved_pairs_captured": (4, (*INTERLEAVED_PAIRS, "--parallel.dispatcher=allgather", CAPTURED)),
    "alltoall": (4, (*ONE_F_ONE_B, "--parallel.ep=2", "--parallel.dispatcher=alltoall", PLAIN)),
    "tiles": (4, (*ONE_F_ONE_B, *TILE, "--parallel.expert_rank_capacity_factor=1.5", PLAIN)),
    "tiles_auto_captured": (4, (*ONE_F_ONE_B, *TILE, CAPTURED, *VALIDATED)),
    "tiles_worst_case": (4, (*V, *TILE, "--parallel.expert_rank_capacity_factor=0", PLAIN)),
    "tiles_zbv_auto_captured": (4, (*V, *TILE, CAPTURED, *VALIDATED)),
    "tiles_zbv_captured": (4, (*V, *TILE, "--parallel.expert_rank_capacity_factor=1.5", CAPTURED, *VALIDATED)),
    "arena_without_overlap": (4, (*V, *EP2, "--parallel.expert_rank_capacity_factor=1.5", PLAIN)),
}


def skip_without_gpus(num_gpus: int) -> None:
    if NUM_GPUS < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")


@pytest.fixture(scope="module")
def curve(train_on_ranks: Callable[..., list[int]]) -> Callable[..., Any]:
    """Trains in a folder of its own on so many ranks, and reads losses and gradient norms."""

    def train(folder: Path, num_ranks: int, *overrides: str) -> Any:
        assert train_on_ranks(num_ranks, commands.words(folder, *MODEL, *overrides)) == [0] * num_ranks
        return commands.read(folder)

    return train


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory: pytest.TempPathFactory, curve: Callable[..., Any]) -> Callable[..., Any]:
    """The curve of one GPU, for each change to the results once."""
    return cache(lambda *changes: curve(tmp_path_factory.mktemp("one") / "gpu", 1, *changes))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pipelines_train_as_one_gpu(
    tmp_path: Path, curve: Callable[..., Any], one_gpu: Callable[..., Any], layout: str
) -> None:
    num_gpus, overrides = LAYOUTS[layout]
    skip_without_gpus(num_gpus)
    expected = one_gpu(*commands.words_of_reference(overrides))
    assert expected.losses[-1] < expected.losses[0] - 0.3
    actual = curve(tmp_path / "spread", num_gpus, *overrides)
    actual.assert_close(expected, commands.LOSS_TOLERANCE, commands.NORM_TOLERANCE)


REPLAYED = {
    "1f1b": ParallelConfig(pp=2),
    "zbv": ParallelConfig(pp=2, vpp=2, pp_schedule="zbv", accumulate_unsharded=True),
}
TILES: dict[str, Any] = {
    "ep": 2, "dispatcher": "symm_mem", "overlap": "tile", "expert_rank_capacity_factor": 2.0,
}  # fmt: skip
FUSED = PerfConfig(kernels="fused", attention="cudnn", loss_chunk_tokens=256)


def tokens_of(step: int, recipe: Recipe, run: Assembly, device: torch.device) -> Batch:
    """This rank's sequences of a step."""
    generator = torch.Generator(device).manual_seed(step)
    shape = 8, recipe.train.micro_batch_sequences, 257
    tokens, num_mine = torch.randint(512, shape, device=device, generator=generator), 8 // run.meshes.sizes.dp
    tokens = tokens[run.meshes.data_rank * num_mine :][:num_mine]
    return Batch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), None)


def launch_and_replay(recipe: Recipe, port: int) -> tuple[list[float], list[float], bool, int]:
    """Losses of a captured recipe that is launched, and of its replays; whether all weights are equal; and by how many
    bytes the memory in use grows from replay to replay."""
    with conftest.as_rank(port), process_group(recipe.run) as device:
        ways: list[Any] = []
        for assemble in (capture.launched, capture.assemble):
            run = assemble(recipe, device)
            losses = []
            for step in range(capture.STEPS):
                losses.append(run.step(tokens_of(step, recipe, run, device)).loss.item())
                if step == NUM_WARM_UPS + 1:  # the second replay
                    before = torch.cuda.memory_allocated(device)
            grown = torch.cuda.memory_allocated(device) - before
            ways.append((losses, [parameter.to_local().clone() for parameter in run.optimizers.parameters]))
            run.step.release()  # NCCL's groups cannot end before the graphs that hold their operations
        (losses, weights), (replayed, others) = ways
        return losses, replayed, all(map(torch.equal, weights, others)), grown


def recipe_of(parallel: ParallelConfig, **changes: Any) -> Recipe:
    """Bit for bit reproducible, so without torch.compile: two launched runs of ranks differ in last digits with it."""
    train = replace(capture.RECIPE.train, global_batch_sequences=8, micro_batch_sequences=1)
    recipe = capture.captured(replace(capture.RECIPE, parallel=parallel, train=train, **changes))
    return replace(
        recipe,
        model=replace(recipe.model, num_layers=6),
        run=replace(recipe.run, ranks_per_gpu=RANKS_PER_GPU),
        compile=replace(recipe.compile, regional="off"),
    )


def check_replayed(ranks: Any, num_gpus: int, parallel: ParallelConfig, **changes: Any) -> None:
    skip_without_gpus(num_gpus)
    recipe, store = recipe_of(parallel, **changes), conftest.open_store()
    assert check_rules(recipe, num_gpus) == []
    for losses, replayed, are_equal, grown in ranks(num_gpus, launch_and_replay, recipe, store.port):
        assert replayed == losses and are_equal and grown == 0


@pytest.mark.parametrize("name", REPLAYED)
def test_replayed_steps_are_the_launched_steps(ranks: Any, name: str) -> None:
    check_replayed(ranks, 2, REPLAYED[name])


@pytest.mark.parametrize("name", REPLAYED)
def test_replayed_steps_over_symmetric_memory_are_the_launched_steps(ranks: Any, name: str) -> None:
    check_replayed(ranks, 4, replace(REPLAYED[name], **TILES), perf=FUSED)


def train_with_and_without_delay(recipe: Recipe, port: int) -> tuple[list[float], list[float], bool, int]:
    """Losses of launched runs whose experts delay their weight gradients, and whose do not; whether all weights are
    equal; and how many weight gradients of layers are delayed."""

    def at_once(mlp: FusedMLP, weights: ExpertWeights) -> tuple[ExpertWeights, None]:
        return weights, None

    with conftest.as_rank(port), process_group(recipe.run) as device:
        ways: list[Any] = []
        backward_weight = symm_mem_backward.backward_weight
        for delay in (FusedMLP.delay, at_once):
            with (
                mock.patch.object(FusedMLP, "delay", delay),
                mock.patch.object(symm_mem_backward, "backward_weight", side_effect=backward_weight) as late,
            ):
                run = capture.launched(recipe, device)
                losses = [run.step(tokens_of(step, recipe, run, device)).loss.item() for step in range(capture.STEPS)]
                weights = [parameter.to_local().clone() for parameter in run.optimizers.parameters]
                ways.append((losses, weights, late.call_count))
        (losses, weights, num_late), (losses_at_once, others, num_at_once) = ways
        assert num_at_once == 0
        return losses, losses_at_once, all(map(torch.equal, weights, others)), num_late


DELAYED = {
    "tile": {},
    "arena_without_overlap": {"overlap": "none"},
    "tile_worst_case": {"expert_rank_capacity_factor": 0.0},
    "fp8_rowwise": {},
    "fp8_blockwise": {"overlap": "none"},
}


@pytest.mark.parametrize("name", DELAYED)
def test_delayed_weight_gradients_over_symmetric_memory_are_those_at_once(ranks: Any, name: str) -> None:
    skip_without_gpus(4)
    parallel = replace(REPLAYED["zbv"], **{**TILES, **DELAYED[name]})
    precision = PrecisionConfig(experts=name) if name.startswith("fp8") else capture.RECIPE.precision
    recipe, store = recipe_of(parallel, perf=FUSED, precision=precision), conftest.open_store()
    assert check_rules(recipe, 4) == []
    for losses, at_once, are_equal, num_late in ranks(4, train_with_and_without_delay, recipe, store.port):
        assert losses == at_once and are_equal and num_late > 0


def exchange_beside_messages(num_exchanges: int) -> tuple[int, int]:
    """Tensors that are not those of the same plan before, and messages that are not what was sent. Ranks 0 and 1 are an
    ep group and a stage, 2 and 3 the next; each exchange is between a message to the other stage and one back. The host
    reads nothing before the end."""
    rank, device = dist.get_rank(), take_gpu()
    stages = [dist.new_group(ranks, backend="nccl") for ranks in ([0, 1], [2, 3])]
    pipelines = [dist.new_group(ranks, backend="nccl") for ranks in ([0, 2], [1, 3])]
    stage, pipeline = stages[rank // 2], pipelines[rank % 2]
    sizes = symm_mem.NUM_TOKENS, symm_mem.WIDTH, symm_mem.TOP_K, torch.bfloat16
    dispatcher = SymmMemDispatcher(symm_mem.NUM_EXPERTS, open_symm_memory(symm_bytes(2, *sizes), stage, device))
    module = GroupedExperts(symm_mem.NUM_EXPERTS // 2, symm_mem.WIDTH, symm_mem.HIDDEN).to(device)
    for parameter in module.parameters():
        parameter.data = (torch.randn(parameter.shape, device=device) / 16).bfloat16()
    plans = [symm_mem.draw(number, 2, device) for number in range(len(symm_mem.ROUTINGS))]
    first = [symm_mem.serve(dispatcher, module, plan) for plan in plans]
    like = torch.empty(symm_mem.NUM_TOKENS, symm_mem.WIDTH, device=device)
    messages, peer = Messages(pipeline, like), 1 - rank // 2
    wrong = torch.zeros(2, dtype=torch.int64, device=device)
    for number in range(num_exchanges):
        if rank < 2:
            messages.send(torch.full_like(like, number), peer)
            arrived, expected = messages.receive(peer), -number
        else:
            arrived, expected = messages.receive(peer), number
            messages.send(torch.full_like(like, -number), peer)
        results = symm_mem.serve(dispatcher, module, plans[number % len(plans)])
        for result, before in zip(results, first[number % len(plans)], strict=True):
            wrong[0] += (result != before).any()
        wrong[1] += (arrived.wait() != expected).any()
        messages.free(arrived.tensor)
    messages.finish()
    num_wrong = tuple(wrong.tolist())
    close_symm_memory(stage)
    return num_wrong


def test_2000_exchanges_beside_messages(ranks: Any) -> None:
    skip_without_gpus(4)
    assert ranks(4, exchange_beside_messages, 2000) == [(0, 0)] * 4
