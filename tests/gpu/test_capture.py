"""CUDA graphs on a GPU: replayed steps are the launched steps, bit for bit, and the host waits for nothing."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor

from titan_moe.config import Recipe
from titan_moe.config.balance import AuxLosses
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.mtp import MTPConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, MemoryConfig, PerfConfig
from titan_moe.config.qk_clip import QKClipConfig
from titan_moe.config.train import OptimConfig, RunConfig, TrainConfig
from titan_moe.data.packing import Batch
from titan_moe.plan.cost.offload import sent_bytes
from titan_moe.run.process import process_group
from titan_moe.training.build import Assembly, assemble
from titan_moe.training.evaluate import validation_loss
from titan_moe.training.step_runner import StepRunner

pytestmark = pytest.mark.gpu

STEPS = 8
PARTS = ("norms", "qkv_rope", "attention", "dense_mlp", "expert_weights", "moe_act")
RECIPE = Recipe(
    run=RunConfig(device="cuda"),
    model=ModelConfig(
        vocab_size=512,
        num_layers=4,
        num_dense_layers=1,
        hidden_size=256,
        ffn_hidden_size=512,
        attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True),
        moe=MoEConfig(
            num_experts=8, top_k=2, ffn_hidden_size=128, score_fn="sigmoid", aux_loss_coef=1e-3, bias_update_speed=1e-3
        ),
    ),
    perf=PerfConfig(attention="cudnn", loss_chunk_tokens=256),
    train=TrainConfig(steps=STEPS, seq_len_tokens=256, global_batch_sequences=4, micro_batch_sequences=2),
)


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    torch._dynamo.reset()
    # no kernel may be chosen by the clock: beside other work it would be another for the run to compare with
    with torch._inductor.config.patch(deterministic=True), process_group(RECIPE.run) as device:
        yield device


def batch(device: torch.device, step: int, num_sequences: int = 2) -> Batch:
    """Two microbatches. Sequences are short: with longer ones cuDNN's backward adds up in another order each time."""
    generator = torch.Generator(device).manual_seed(step)
    tokens = torch.randint(512, (2, num_sequences, 257), device=device, generator=generator)
    return Batch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), None)


def captured(recipe: Recipe) -> Recipe:
    return replace(recipe, compile=replace(recipe.compile, cudagraph="step"))


def launched(recipe: Recipe, device: torch.device) -> Assembly:
    """A captured recipe, launched kernel by kernel. It is not quite the one without capture: torch's AdamW takes a rate
    on the device in fp32, and one on the host in fp64."""
    run = assemble(recipe, device)
    step = StepRunner(
        run.step.step,
        run.schedule,
        controllers=run.step.controllers,
        step_number=run.step.step_number,
        memory=run.step.memory,
    )
    return run._replace(step=step)


def compile_once(recipe: Recipe, device: torch.device) -> None:
    """Take a step with a model that is not looked at. Beside other work, what a process compiles anew can differ in a
    last place from what it and every later run then take from the compiler's cache (seen in four processes of four;
    eager runs agree)."""
    launched(recipe, device).step(batch(device, 0, recipe.train.micro_batch_sequences))


def train(run: Assembly, recipe: Recipe, device: torch.device) -> tuple[list[float], list[Tensor]]:
    num_sequences = recipe.train.micro_batch_sequences
    losses = [run.step(batch(device, step, num_sequences)).loss.item() for step in range(STEPS)]
    return losses, [parameter.to_local().clone() for parameter in run.optimizers.parameters]


CASES: dict[str, dict[str, Any]] = {
    "local": {},
    # a bound that follows the load changes shapes, and so the sums of compiled kernels, in the midst of the comparison
    "allgather": {"parallel": ParallelConfig(dispatcher="allgather", expert_rank_capacity_factor=1.25)},
    "fused": {"perf": PerfConfig(kernels="fused", attention="cudnn", loss_chunk_tokens=256)},
    "eager": {"compile": CompileConfig("off")},
    # more than 3072 tokens: the gradient of the embedding is another algorithm then
    "many tokens": {"train": replace(RECIPE.train, global_batch_sequences=32, micro_batch_sequences=16)},
    "gathered once": {"parallel": ParallelConfig(accumulate_unsharded=True)},
    # routers keep their choices in tensors of the recording
    "recomputed": {
        "perf": PerfConfig(kernels="fused", attention="cudnn", loss_chunk_tokens=256),
        "memory": MemoryConfig(("block",)),
    },
    "parts recomputed": {
        "perf": PerfConfig(kernels="fused", attention="cudnn", loss_chunk_tokens=256),
        "memory": MemoryConfig(PARTS),
    },
    "experts recomputed": {
        "perf": PerfConfig(kernels="fused", attention="cudnn", loss_chunk_tokens=256),
        "memory": MemoryConfig(("norms:2", "experts:-2")),
    },
    "quantiles": {
        "model": replace(
            RECIPE.model, moe=replace(RECIPE.model.moe, bias_update_speed=0.0, bias_update="quantile", bias_ema=0.25)
        )
    },
    "clipped logits": {
        "model": replace(RECIPE.model, attention=replace(RECIPE.model.attention, qk_norm=False)),
        "optim": OptimConfig(qk_clip=QKClipConfig(threshold=0.01)),
    },
    "counted ahead": {
        "model": replace(RECIPE.model, moe=replace(RECIPE.model.moe, aux_losses=AuxLosses(global_batch=1e-2)))
    },
    "hash layers": {"model": replace(RECIPE.model, moe=replace(RECIPE.model.moe, hash_layers=(1, 2)))},
    "jitter": {"model": replace(RECIPE.model, moe=replace(RECIPE.model.moe, input_jitter=1e-2))},
    "multi-token prediction": {"model": replace(RECIPE.model, mtp=MTPConfig(2, 0.3))},
    "repeated prediction": {
        "model": replace(RECIPE.model, mtp=MTPConfig(2, 0.3, repeats_layer=True)),
        "memory": MemoryConfig(("block",)),
    },
    # copies to the host and back, in places that the launched steps have left
    "offloaded": {
        "perf": PerfConfig(kernels="fused", attention="cudnn", loss_chunk_tokens=256),
        "memory": MemoryConfig(("none",), ("block", "attention", "ffn_norm")),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_are_the_launched_steps(name: str, device: torch.device) -> None:
    recipe = captured(replace(RECIPE, **CASES[name]))
    compile_once(recipe, device)
    losses, weights = train(launched(recipe, device), recipe, device)
    replayed_losses, replayed_weights = train(assemble(recipe, device), recipe, device)
    assert replayed_losses == losses
    for one, other in zip(weights, replayed_weights, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("parts", [PARTS, ("norms", "experts"), ("block",)])
def test_recomputed_parts_need_less_memory_and_change_nothing_else(
    parts: tuple[str, ...], device: torch.device
) -> None:
    many = replace(RECIPE, **CASES["many tokens"], perf=CASES["fused"]["perf"])
    losses, peaks = [], []
    for recompute in ((), parts):
        recipe = captured(replace(many, memory=MemoryConfig(recompute)))
        compile_once(recipe, device)
        gc.collect()
        before = torch.cuda.memory_allocated(device)
        run = launched(recipe, device)
        torch.cuda.reset_peak_memory_stats(device)
        losses.append(train(run, recipe, device)[0])
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
        del run
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert peaks[1] < peaks[0], peaks


@pytest.mark.parametrize("take", [launched, assemble])
def test_offloaded_steps_are_the_same_in_less_memory(take: Callable[..., Assembly], device: torch.device) -> None:
    """Without a compiler, whose graphs end elsewhere and so add up in another order."""
    model = replace(RECIPE.model, num_layers=12)
    train_16 = replace(RECIPE.train, global_batch_sequences=32, micro_batch_sequences=16)
    plain = captured(replace(RECIPE, model=model, train=train_16, compile=CompileConfig("off")))
    offloaded = replace(plain, memory=MemoryConfig(("none",), ("block", "attention", "ffn_norm")))
    losses: list[list[float]] = []
    peaks: list[int] = []
    for recipe in (plain, offloaded):
        gc.collect()  # what tests before have left would be freed in one of them
        run = take(recipe, device)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        of_steps = []  # a recording begins to count anew
        losses.append([])
        for step in range(STEPS):
            torch.cuda.reset_peak_memory_stats()
            losses[-1].append(run.step(batch(device, step, recipe.train.micro_batch_sequences)).loss.item())
            of_steps.append(torch.cuda.max_memory_allocated() - before)
        peaks.append(max(of_steps))
        run.step.release()
        del run
    assert losses[0] == losses[1]
    assert peaks[0] - peaks[1] > 0.7 * sum(sent_bytes(offloaded)), peaks


def test_steps_that_are_recorded_anew_are_the_same(device: torch.device) -> None:
    recipe = captured(RECIPE)
    compile_once(recipe, device)
    losses, _ = train(launched(recipe, device), recipe, device)
    run = assemble(recipe, device)
    for step in range(STEPS):
        if step in (5, 6):  # after replays, and at once after a recording
            run.step.release()
        assert run.step(batch(device, step)).loss.item() == losses[step]


def test_a_replayed_step_waits_for_nothing(device: torch.device) -> None:
    run = assemble(captured(RECIPE), device)
    data = batch(device, 0)
    for _ in range(5):
        run.step(data)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = run.step(data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.loss.isfinite()


def test_a_validation_between_replays_sees_their_weights(device: torch.device) -> None:
    """As one between launched steps does; and it changes nothing."""

    def validated(run: Assembly) -> list[tuple[float, float]]:
        losses = []
        for step in range(STEPS):
            loss = run.step(batch(device, step)).loss.item()
            held_out = validation_loss(run.model, run.parts, [batch(device, 100)], device, run.meshes)
            losses.append((loss, held_out.item()))
        return losses

    recipe = captured(RECIPE)
    compile_once(recipe, device)
    assert validated(assemble(recipe, device)) == validated(launched(recipe, device))
