"""When FSDP reduces, and what it gathers: the experts of a layer before the block below starts its backward; nothing
that a rank has whole."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config import Recipe
from titan_moe.config.adapter import AdapterConfig
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig, resolve
from titan_moe.config.perf import CompileConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.train import TrainConfig
from titan_moe.data.packing import Batch
from titan_moe.dispatch import Routed
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.parallel import fsdp
from titan_moe.parallel.mesh import build_meshes
from titan_moe.plan.resolved import Resolved
from titan_moe.training.build import assemble, build_on_meta, build_parts

RECIPE = Recipe(
    model=ModelConfig(
        num_layers=3,
        hidden_size=32,
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=16),
        moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16),
    ),
    precision=PrecisionConfig("bf16", "fp32", "fp32"),
    compile=CompileConfig("off"),
    train=TrainConfig(seq_len_tokens=16),
)


def watch(parallel: ParallelConfig) -> dict[str, Any]:
    """Which experts have their gradient before the block below starts its backward, and the dtypes of their inputs."""
    meshes = build_meshes(resolve(parallel, torch.distributed.get_world_size()), torch.device("cpu"))
    resolved = Resolved(replace(RECIPE, parallel=parallel), meshes.sizes.world)
    (model,) = build_parts(build_on_meta(resolved.recipe), resolved, meshes, torch.device("cpu"), ExpertCapacity())
    blocks = list(model.layers.values())
    reduced: dict[int, bool] = {}
    dtypes: set[tuple[torch.dtype, torch.dtype]] = set()

    def look(module: torch.nn.Module, args: tuple[Routed]) -> None:
        dtypes.add((args[0].x_SD.dtype, args[0].scores_R.dtype))

    def attach(index: int):
        def on_output(module: torch.nn.Module, args: Any, output: Tensor) -> None:
            # this gradient exists once block index + 1 has finished its backward
            output.register_hook(lambda grad: reduced.update({index + 1: experts_have_gradients(blocks[index + 1])}))

        return on_output

    for index, block in enumerate(blocks):
        block.feed_forward.experts.register_forward_pre_hook(look)
        if index + 1 < len(blocks):
            block.register_forward_hook(attach(index))
    tokens = torch.randint(256, (2, 16))
    (model(tokens, tokens) / 32).backward()
    return {"reduced": reduced, "dtypes": dtypes}


def experts_have_gradients(block: torch.nn.Module) -> bool:
    return all(parameter.grad is not None for parameter in block.feed_forward.experts.parameters())


def test_fsdp_experts_reduce_before_the_next_backward_and_get_fp32_scores(ranks) -> None:
    for parallel, num_ranks in ((ParallelConfig(), 2), (ParallelConfig(ep=2, dispatcher="alltoall"), 4)):
        for seen in ranks(num_ranks, watch, parallel):
            assert seen["reduced"] == {1: True, 2: True}
            assert seen["dtypes"] == {(torch.bfloat16, torch.float32)}


HSDP = ParallelConfig(dp_replicate=2, ep=2, dispatcher="alltoall")
ADAPTER = AdapterConfig(rank=8, targets=("attention", "experts"))


def count_messages(recipe: Recipe, num_microbatches: int) -> tuple[int, set[str], set[str]]:
    """How many gradients a step sums over replicas, and the names of the parameters that FSDP has, and that train."""
    assembly = assemble(recipe, torch.device("cpu"))
    (model,) = assembly.parts
    sent: list[int] = []
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if options.get("group") is not None and tensor.numel() > 512:
            sent.append(tensor.numel())
        return all_reduce(tensor, *args, **options)

    tokens = torch.randint(256, (num_microbatches, 1, 16))
    dist.all_reduce = counting
    try:
        assembly.step(Batch(tokens, tokens, None))
    finally:
        dist.all_reduce = all_reduce
    managed = {id(it.sharded_param) for group in fsdp._groups(model) for it in group.fsdp_params}
    named = list(model.named_parameters())
    return (
        len(sent),
        {name for name, weight in named if id(weight) in managed},
        {name for name, weight in named if weight.requires_grad},
    )


@pytest.mark.parametrize("adapter", [AdapterConfig(), ADAPTER], ids=["whole", "adapters"])
def test_replicas_sum_once_a_step(ranks, adapter: AdapterConfig) -> None:
    """Frozen experts bypass FSDP where a replica has them once, and all that is frozen where a rank is a replica."""
    recipe = replace(RECIPE, parallel=HSDP, model=replace(RECIPE.model, adapter=adapter))
    counts = []
    for number in (1, 3):
        train = replace(RECIPE.train, micro_batch_sequences=1, global_batch_sequences=4 * number)
        ((count, managed, trained), *_) = ranks(4, count_messages, replace(recipe, train=train), number)
        counts.append(count)
        assert trained <= managed
        assert any(name.endswith("experts.down") for name in managed) != adapter.is_used
    assert counts[0] == counts[1] > 0
    coarse = replace(recipe, train=train, precision=PrecisionConfig("bf16", "fp32", "bf16"))
    ((each_time, *_), *_) = ranks(4, count_messages, coarse, 3)
    assert each_time == 3 * counts[0], "sums in bf16 would lose digits"
    alone = replace(recipe, parallel=replace(HSDP, dp_replicate=4, ep=1, dispatcher="local"), train=train)
    ((_, managed, trained), *_) = ranks(4, count_messages, alone, 3)
    assert managed == trained
