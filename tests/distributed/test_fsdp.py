"""When FSDP reduces: the experts of a layer before the block below starts its backward."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from titan_moe.config import Recipe
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig, resolve
from titan_moe.config.perf import CompileConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.train import TrainConfig
from titan_moe.dispatch import Routed
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.parallel.mesh import build_meshes
from titan_moe.plan.resolved import Resolved
from titan_moe.training.build import build_on_meta, build_parts

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
