"""Deterministic mode: two runs in processes of their own have equal bits; what cannot repeat is named."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import titan_moe
from titan_moe.config import Recipe
from titan_moe.config.context import sequence_shard
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.train import OptimConfig, RunConfig, TrainConfig
from titan_moe.data.packing import Batch
from titan_moe.run.determinism import determinism
from titan_moe.training.build import assemble

STEPS, MICROBATCHES, TOKENS = 5, 2, 32
RECIPE = Recipe(
    run=RunConfig(device="cpu", is_deterministic=True),
    model=ModelConfig(
        vocab_size=64,
        num_layers=3,
        num_dense_layers=1,
        hidden_size=32,
        ffn_hidden_size=64,
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=16),
        moe=MoEConfig(
            num_experts=4,
            top_k=2,
            ffn_hidden_size=32,
            score_fn="sigmoid",
            aux_loss_coef=1e-2,
            bias_update_speed=1e-3,
        ),
        init_std=0.2,
    ),
    perf=PerfConfig(kernels="grouped_mm", loss_chunk_tokens=16),
    precision=PrecisionConfig("bf16", "fp32", "fp32", moments="bf16"),
    compile=CompileConfig("off"),
    train=TrainConfig(steps=STEPS, seq_len_tokens=TOKENS, global_batch_sequences=8, micro_batch_sequences=2),
    optim=OptimConfig(kind="fused_adamw", lr=1e-2, warmup_steps=1),
)
ALL_AXES = ParallelConfig(cp=2, cp_kind="allgather", tp=2, ep=2, etp=2, dispatcher="alltoall")
"""FSDP is over cp here."""


def train(recipe: Recipe) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Losses and norms of all steps, this rank's parameters, and its optimizer state. Data has a seed of its own."""
    with determinism(recipe.run.is_deterministic):
        built = assemble(recipe, torch.device("cpu"))
        losses, shard = [], sequence_shard(recipe.parallel, built.meshes.dense.get_local_rank("cp"))
        own = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in shard.slices(TOKENS)])
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * step + built.meshes.data_rank)
            shape = (8 // built.meshes.sizes.dp // 2, 2, TOKENS)
            tokens, labels = torch.randint(64, (2, *shape), generator=generator)[..., own]
            result = built.step(Batch(tokens, labels, None))
            losses += [result.loss.clone(), result.grad_norm.clone()]
        state = [leaf for leaf in tree_leaves(built.optimizers.state_dict()) if isinstance(leaf, Tensor)]
        return losses, *([_local(x) for x in tensors] for tensors in (built.optimizers.parameters, state))


def _local(x: Tensor) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach().clone()


def bits_differ(one: Any, other: Any) -> list[int]:
    """By kind, how many tensors of two runs differ in a bit."""
    assert [len(tensors) for tensors in one] == [len(tensors) for tensors in other]
    return [sum(not torch.equal(a, b) for a, b in zip(*kind, strict=True)) for kind in zip(one, other, strict=True)]


@pytest.mark.few("1 rank")
@pytest.mark.parametrize(
    ("num_ranks", "recipe"),
    [
        pytest.param(1, RECIPE, id="1 rank"),
        pytest.param(4, replace(RECIPE, parallel=ALL_AXES), id="4 ranks"),
    ],
)
def test_two_runs_have_the_same_bits(ranks, new_ranks, num_ranks: int, recipe: Recipe) -> None:
    first, again = ranks(num_ranks, train, recipe), new_ranks()(num_ranks, train, recipe)
    for one, other in zip(first, again, strict=True):
        losses, parameters, state = one
        assert len(losses) == 2 * STEPS and all(loss.isfinite() for loss in losses) and len(parameters) > 10
        assert len(state) >= 2 * len(parameters) and sum(tensor.any() for tensor in state) > len(parameters)
        assert bits_differ(one, other) == [0, 0, 0]
    if num_ranks == 1:
        (other_seed,) = ranks(1, train, replace(recipe, run=replace(recipe.run, seed=1)))
        assert bits_differ(first[0], other_seed)[:2] != [0, 0], "or the comparison sees nothing"


def test_an_operation_without_a_fixed_order_is_named() -> None:
    with determinism(True), pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2), accumulate=False)


ATOMICS = {
    # file -> operations whose result does not depend on their order
    "symm_mem/barrier.py": {"cas"},
    "experts/fp8/weights.py": {"max"},
    "experts/copy_blocks.py": {"add"},  # an int32 counter of finished thread blocks
    "formats/fused_rounding.py": {"max"},
}


def test_kernels_have_no_atomics_that_depend_on_order() -> None:
    """A kernel with a new one must find a deterministic way, or be refused by a rule."""
    kernels, found = Path(titan_moe.__file__).parent / "kernels", {}
    for file in sorted(kernels.rglob("*.py")):
        if operations := set(re.findall(r"\btl\.atomic_(\w+)", file.read_text())):
            found[file.relative_to(kernels).as_posix()] = operations
    assert found == ATOMICS
