"""Compiled blocks on one GPU: they train as eager ones, with few graphs, and the host waits for nothing."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from titan_moe.config import Recipe
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, MemoryConfig, PerfConfig
from titan_moe.config.train import RunConfig, TrainConfig
from titan_moe.data.packing import Batch
from titan_moe.run.process import process_group
from titan_moe.training.build import assemble

pytestmark = pytest.mark.gpu

STEPS_OF_WARM_UP, STEPS = 2, 7
RECIPE = Recipe(
    run=RunConfig(device="cuda"),
    model=ModelConfig(
        vocab_size=512,
        num_layers=12,
        num_dense_layers=1,
        hidden_size=256,
        ffn_hidden_size=512,
        attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True),
        moe=MoEConfig(
            num_experts=8,
            top_k=2,
            ffn_hidden_size=128,
            shared_ffn_hidden_size=128,
            score_fn="sigmoid",
            aux_loss_coef=1e-3,
            bias_update_speed=1e-3,
        ),
    ),
    train=TrainConfig(steps=20, seq_len_tokens=256, global_batch_sequences=4, micro_batch_sequences=2),
)


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    torch._dynamo.reset()
    counters.clear()
    with process_group(RECIPE.run) as device:
        yield device


def batch(device: torch.device, seed: int) -> Batch:
    """Another one each step, so that the routing changes."""
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.randint(512, (2, 2, 257), device=device, generator=generator)
    return Batch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), None)


def train(recipe: Recipe, device: torch.device) -> tuple[list[float], list[int], list[dict[str, list[int]]]]:
    """Losses, graphs and expert counts of every step; the host may wait for nothing in the last one."""
    step = assemble(recipe, device).step
    losses, num_graphs, loads = [], [], []
    for index in range(STEPS):
        data = batch(device, index)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if index == STEPS - 1 else "default")
        try:
            result = step(data)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses.append(result.loss.item())
        num_graphs.append(counters["stats"]["unique_graphs"])
        loads.append({name: counts.tolist() for name, counts in result.tokens_per_expert.items()})
    return losses, num_graphs, loads


@pytest.mark.parametrize("recompute", ["none", "experts", "block"])
@pytest.mark.parametrize("dispatcher", ["local", "allgather"])
@pytest.mark.parametrize("kernels", ["grouped_mm", "fused"])
def test_compiled_blocks_train_as_eager_ones(
    kernels: str, dispatcher: str, recompute: str, device: torch.device
) -> None:
    parallel = ParallelConfig(dispatcher=dispatcher, expert_rank_capacity_factor=0.0)  # the host reads no sizes
    compiled = replace(RECIPE, perf=PerfConfig(kernels=kernels), parallel=parallel, memory=MemoryConfig(recompute))
    expected, _, _ = train(replace(compiled, compile=CompileConfig("off")), device)
    torch._dynamo.reset()
    counters.clear()
    losses, num_graphs, loads = train(compiled, device)
    torch.testing.assert_close(losses, expected, rtol=5e-3, atol=5e-3)
    assert num_graphs[0] <= 6, "a dense block, four pieces of one with experts, the loss's softmax"
    assert num_graphs[STEPS_OF_WARM_UP:] == num_graphs[STEPS_OF_WARM_UP:][:1] * (STEPS - STEPS_OF_WARM_UP)
    assert not counters["graph_break"]
    assert len({str(load) for load in loads}) == STEPS, "the routing changes"
