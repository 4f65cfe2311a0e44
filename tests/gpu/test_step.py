"""The optimizer step on a GPU: no host wait, fp32 scores, early reductions, the same loss as the reference."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config import Recipe
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.train import RunConfig, TrainConfig
from titan_moe.data.packing import Batch
from titan_moe.dispatch import Routed
from titan_moe.run.process import process_group
from titan_moe.training.build import Assembly, assemble

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(
    vocab_size=512,
    num_layers=12,
    num_dense_layers=1,
    hidden_size=256,
    ffn_hidden_size=512,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True),
    moe=MoEConfig(
        num_experts=8, top_k=2, ffn_hidden_size=128, score_fn="sigmoid", aux_loss_coef=1e-3, bias_update_speed=1e-3
    ),
)
RECIPE = Recipe(
    run=RunConfig(device="cuda"),
    model=MODEL,
    perf=PerfConfig(attention="cudnn", loss_chunk_tokens=256),
    train=TrainConfig(steps=20, seq_len_tokens=256, global_batch_sequences=4, micro_batch_sequences=2),
)


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    torch._dynamo.reset()
    with process_group(RECIPE.run) as device:
        yield device


def batch(device: torch.device) -> Batch:
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    tokens = torch.randint(512, (2, 2, 257), device=device, generator=generator)
    return Batch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), None)


def losses(recipe: Recipe, device: torch.device, steps: int) -> list[float]:
    step, data = assemble(recipe, device).step, batch(device)
    return [step(data).loss.item() for _ in range(steps)]


@pytest.mark.parametrize("dispatcher", ["local", "allgather"])
def test_the_host_waits_for_nothing(dispatcher: str, device: torch.device) -> None:
    parallel = ParallelConfig(dispatcher=dispatcher, expert_rank_capacity_factor=0.0)
    step, data = assemble(replace(RECIPE, parallel=parallel), device).step, batch(device)
    for _ in range(3):
        step(data)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = step(data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.loss.isfinite()


def test_alltoall_waits_in_one_method_only(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_moe.dispatch import AllToAllDispatcher

    read = AllToAllDispatcher._read_counts

    def allowed(self: AllToAllDispatcher, sent: Tensor) -> tuple[list[int], list[int], int]:
        torch.cuda.set_sync_debug_mode("default")
        counts = read(self, sent)
        torch.cuda.set_sync_debug_mode("error")
        return counts

    step, data = assemble(replace(RECIPE, parallel=ParallelConfig(dispatcher="alltoall")), device).step, batch(device)
    for _ in range(3):
        step(data)
    monkeypatch.setattr(AllToAllDispatcher, "_read_counts", allowed)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = step(data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.loss.isfinite()


def test_scores_arrive_in_fp32(device: torch.device) -> None:
    run: Assembly = assemble(replace(RECIPE, compile=CompileConfig("off")), device)
    seen = []

    def look(module: torch.nn.Module, args: tuple[Routed]) -> None:
        seen.append((args[0].scores_R.dtype, args[0].x_SD.dtype))

    for block in list(run.parts[0].layers.values())[1:]:
        block.feed_forward.experts.register_forward_pre_hook(look)
    run.step(batch(device))
    assert set(seen) == {(torch.float32, torch.bfloat16)}


def test_compiled_bf16_follows_the_fp32_reference(device: torch.device) -> None:
    fp32 = PrecisionConfig("fp32", "fp32", "fp32")
    reference = replace(
        RECIPE, perf=PerfConfig(kernels="reference", loss_chunk_tokens=0), precision=fp32, compile=CompileConfig("off")
    )
    expected = losses(reference, device, 8)
    assert expected[-1] < expected[0] - 0.05
    torch.testing.assert_close(losses(RECIPE, device, 8), expected, rtol=5e-3, atol=5e-3)


def test_blocks_compile_once(device: torch.device) -> None:
    """Eleven equal blocks are one graph for each piece; nothing recompiles after the first steps."""
    torch._dynamo.utils.counters.clear()
    step, data = assemble(RECIPE, device).step, batch(device)
    step(data)
    step(data)
    first = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert first <= 8
    step(data)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == first
