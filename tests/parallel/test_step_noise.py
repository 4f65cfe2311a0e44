"""The noise of a step is that of places in the batch, whatever the ranks and the microbatches."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from titan_moe.config.context import WHOLE_SEQUENCES, SequenceShard
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.layers.input_noise import InputNoise
from titan_moe.layers.router import TopKRouter
from titan_moe.parallel.step_noise import StepNoise

SEQUENCES, TOKENS = 8, 16


class Layers(nn.Module):
    def __init__(self, *numbers: int) -> None:
        super().__init__()
        config = ModelConfig(hidden_size=6, moe=MoEConfig(num_experts=5, top_k=2, ffn_hidden_size=8))
        self.layers = nn.ModuleDict({str(n): nn.ModuleDict({"router": TopKRouter(config)}) for n in numbers})


def keys(
    numbers: tuple[int, ...] = (1, 2),
    dp: tuple[int, int] = (0, 1),
    tp: tuple[int, int] = (0, 1),
    shard: SequenceShard = WHOLE_SEQUENCES,
    micro_batch_sequences: int = 2,
    step: int = 3,
    seed: int = 0,
) -> torch.Tensor:
    dense: Any = SimpleNamespace(get_local_rank=lambda axis: tp[0])
    meshes: Any = SimpleNamespace(data_rank=dp[0], dense=dense, sizes=SimpleNamespace(tp=tp[1]))
    noise = StepNoise([Layers(*numbers)], 0.1, seed, torch.tensor(step), meshes, shard)
    own = SEQUENCES // dp[1]
    noise.start(torch.zeros(own // micro_batch_sequences, micro_batch_sequences, TOKENS // shard.num_ranks))
    return noise.keys_lMBn.flatten(1, 2)


WHOLE = keys()


@pytest.mark.parametrize("micro_batch_sequences", [1, 4])
def test_keys_do_not_depend_on_the_layout(micro_batch_sequences: int) -> None:
    assert keys(micro_batch_sequences=micro_batch_sequences).equal(WHOLE)
    over_dp = [keys(dp=(rank, 2), micro_batch_sequences=micro_batch_sequences) for rank in range(2)]
    assert torch.cat(over_dp, 1).equal(WHOLE)
    assert torch.cat([keys(tp=(rank, 4)) for rank in range(4)], 2).equal(WHOLE)
    assert torch.cat([keys((1,)), keys((2,))]).equal(WHOLE), "of stages"


@pytest.mark.parametrize("is_head_and_tail", [False, True])
def test_keys_of_ranks_of_cp_are_those_of_their_tokens(is_head_and_tail: bool) -> None:
    for rank in range(2):
        shard = SequenceShard(rank, 2, is_head_and_tail)
        own = [WHOLE[..., chunk] for chunk in shard.slices(TOKENS)]
        assert keys(shard=shard).equal(torch.cat(own, -1))


def test_keys_differ_by_token_layer_step_and_seed() -> None:
    assert WHOLE.unique().numel() == WHOLE.numel()
    for other in (keys(step=4), keys(seed=1)):
        assert (other == WHOLE).sum() == 0


def test_routers_have_the_noise_of_a_microbatch_within_it() -> None:
    part = Layers(1, 2)
    dense: Any = SimpleNamespace(get_local_rank=lambda axis: 0)
    meshes: Any = SimpleNamespace(data_rank=0, dense=dense, sizes=SimpleNamespace(tp=1))
    noise = StepNoise([part], 0.1, 0, torch.tensor(3), meshes, WHOLE_SEQUENCES)
    noise.start(torch.zeros(4, 2, TOKENS))
    router, x_BND = cast(TopKRouter, part.get_submodule("layers.2.router")), torch.randn(2, TOKENS, 6)
    with noise.of(part, 1):
        assert cast(InputNoise, router.noise).keys_BN.equal(WHOLE.unflatten(1, (4, 2))[1, 1])
    assert router.noise(x_BND) is x_BND
