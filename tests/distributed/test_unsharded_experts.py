"""Experts that lie whole on a rank train as FSDP's would, and a checkpoint of either goes on with the other."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titan_moe.config import Recipe
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig, ParallelSizes
from titan_moe.config.perf import CompileConfig
from titan_moe.data.packing import Batch
from titan_moe.training.build import Assembly, assemble

MODEL = ModelConfig(num_layers=2, hidden_size=64, vocab_size=256, moe=MoEConfig(num_experts=8, ffn_hidden_size=32))


def assembled(by_fsdp: bool, *, seed: int) -> Assembly:
    """Two ranks share the experts; with two ranks, they lie whole."""
    recipe = Recipe(model=MODEL, parallel=ParallelConfig(ep=2, dispatcher="alltoall"), compile=CompileConfig("off"))
    recipe = replace(recipe, run=replace(recipe.run, device="cpu", seed=seed))
    are_unsharded = (lambda *_: False) if by_fsdp else ParallelSizes.experts_are_unsharded
    with mock.patch.object(ParallelSizes, "experts_are_unsharded", are_unsharded):
        assembly = assemble(recipe, torch.device("cpu"))
    experts = assembly.parts[0].get_submodule("layers.1.feed_forward.experts")
    assert isinstance(experts, FSDPModule) is (by_fsdp or dist.get_world_size() > 2)
    return assembly


def take_step(assembly: Assembly) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens_MBN = torch.randint(256, (2, 2, 16), generator=generator)
    result = assembly.step(Batch(tokens_MBN, tokens_MBN.roll(-1, -1), None))
    return result.loss.item(), result.grad_norm.item()


def state(assembly: Assembly) -> dict[str, dict[str, Tensor]]:
    return {"model": assembly.parts[0].state_dict(), "optimizer": assembly.optimizers.state_dict()}


def whole_state(assembly: Assembly) -> dict[str, Tensor]:
    tensors = {name: value for part in state(assembly).values() for name, value in part.items()}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in tensors.items()}


def save(folder: str, by_fsdp: bool) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """What is saved after a step, and what the two steps after it give."""
    assembly = assembled(by_fsdp, seed=1)
    take_step(assembly)
    dcp.save(state(assembly), checkpoint_id=folder)
    saved = whole_state(assembly)
    return [take_step(assembly), take_step(assembly)], saved


def load(folder: str, by_fsdp: bool) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    assembly = assembled(by_fsdp, seed=2)
    loaded = state(assembly)
    dcp.load(loaded, checkpoint_id=folder)
    assembly.parts[0].load_state_dict(loaded["model"])
    assembly.optimizers.load_state_dict(loaded["optimizer"])
    found = whole_state(assembly)
    return [take_step(assembly), take_step(assembly)], found


@pytest.mark.few("True")
@pytest.mark.parametrize("saved_by_fsdp", [True, False])
def test_unsharded_and_sharded_experts_load_each_others_checkpoints(ranks, tmp_path, saved_by_fsdp: bool) -> None:
    (expected_steps, expected), *_ = ranks(2, save, str(tmp_path), saved_by_fsdp)
    for num_ranks in (2, 4):  # on four ranks FSDP shards an expert over two
        (steps, found), *_ = ranks(num_ranks, load, str(tmp_path), not saved_by_fsdp)
        assert found.keys() == expected.keys()
        assert not [name for name in expected if not torch.equal(found[name], expected[name])]
        assert steps == expected_steps or num_ranks == 4, "the same bits on as many ranks"
