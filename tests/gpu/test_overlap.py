"""Two microbatches at a time on one GPU: the losses of one after the other, replayed too, and no wait of the host.

On one rank messages go no further than NCCL, but streams, graphs and FSDP's events are those of many.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from titan_moe.config import Recipe
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, MemoryConfig, PerfConfig
from titan_moe.config.train import RunConfig, TrainConfig
from titan_moe.data.packing import Batch
from titan_moe.run.process import process_group
from titan_moe.training.build import assemble
from titan_moe.training.evaluate import validation_loss

pytestmark = pytest.mark.gpu

STEPS = 8
RECIPE = Recipe(
    run=RunConfig(device="cuda"),
    model=ModelConfig(
        vocab_size=512,
        num_layers=6,
        num_dense_layers=1,
        hidden_size=256,
        ffn_hidden_size=512,
        attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True),
        moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=128, shared_ffn_hidden_size=128, aux_loss_coef=1e-3),
    ),
    perf=PerfConfig(attention="cudnn", loss_chunk_tokens=256),
    train=TrainConfig(steps=STEPS, seq_len_tokens=256, global_batch_sequences=6, micro_batch_sequences=2),
)


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    torch._dynamo.reset()
    with process_group(RECIPE.run) as device:
        yield device


def recipe(overlap: str, dispatcher: str) -> Recipe:
    return replace(
        RECIPE, parallel=ParallelConfig(overlap=overlap, dispatcher=dispatcher, accumulate_unsharded=overlap != "none")
    )


def batch(device: torch.device, step: int) -> Batch:
    generator = torch.Generator(device).manual_seed(step)
    tokens = torch.randint(512, (3, 2, 257), device=device, generator=generator)
    return Batch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), None)


def losses(run: Recipe, device: torch.device) -> list[float]:
    """Of a few steps on the same tokens, with a validation in between."""
    built = assemble(run, device)
    values = []
    for index in range(STEPS):
        values.append(built.step(batch(device, 0)).loss.item())
        if index == STEPS // 2:
            values.append(validation_loss(built.model, built.parts, [batch(device, 1)], device, built.meshes).item())
    built.step.release()
    return values


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("how", ["compiled", "eager", "recomputed"])
def test_interleaved_microbatches_learn_as_one_after_the_other(device: torch.device, dispatcher: str, how: str) -> None:
    changes = {
        "compiled": {},
        "eager": {"compile": CompileConfig("off")},
        "recomputed": {"memory": MemoryConfig("experts")},
    }[how]
    expected, actual = (
        losses(replace(recipe(overlap, dispatcher), **changes), device) for overlap in ("none", "microbatch")
    )
    assert expected[-1] < expected[0] - 0.05
    torch.testing.assert_close(actual, expected, rtol=5e-3, atol=5e-3)


def test_interleaved_microbatches_are_replayed(device: torch.device) -> None:
    launched = recipe("microbatch", "allgather")
    replayed = replace(launched, compile=CompileConfig(cudagraph="step"))
    torch.testing.assert_close(losses(replayed, device), losses(launched, device), rtol=5e-3, atol=5e-3)


def test_the_host_waits_for_nothing(device: torch.device) -> None:
    run = recipe("microbatch", "allgather")
    run = replace(run, parallel=replace(run.parallel, expert_rank_capacity_factor=0.0))  # the host reads no sizes
    step, data = assemble(run, device).step, batch(device, 0)
    for _ in range(3):
        step(data)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = step(data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.loss.isfinite()


def test_little_more_than_one_microbatch_is_kept(device: torch.device) -> None:
    peaks = {}
    for overlap in ("none", "microbatch"):
        step = assemble(recipe(overlap, "allgather"), device).step.step
        args = batch(device, 0), torch.tensor(1e-3, device=device)
        step.forward_backward(*args)
        step.optimizers.zero_grad()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step.forward_backward(*args)
        peaks[overlap] = torch.cuda.max_memory_allocated(device) - before
    assert peaks["microbatch"] < 1.5 * peaks["none"], peaks
