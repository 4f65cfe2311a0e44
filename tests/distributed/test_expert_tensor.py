"""Expert tensor parallelism beside the features of a step; checkpoints and initial weights do not depend on it.

test_one_loss.py and test_layouts.py have its layouts, test_expert_biases.py biases and compiled experts,
symm_mem/test_dispatcher.py memory that ranks share.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import load
from torch.distributed.tensor import DTensor

from titan_moe.config import Recipe
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import MemoryConfig
from titan_moe.training.build import assemble

one_loss, tensor_parallel = map(load, ("distributed/test_one_loss", "distributed/test_tensor_parallel"))
STEPS = 2
ETP2 = ParallelConfig(etp=2)
EP2_ETP2 = ParallelConfig(ep=2, etp=2, dispatcher="alltoall")
GATHERED = replace(EP2_ETP2, accumulate_unsharded=True)


@pytest.fixture(scope="module")
def alone(ranks: Any) -> dict[int, Any]:
    """One process, plain and skewed."""
    one = one_loss.recipe(ParallelConfig(), micro_batch_sequences=4)
    return {starved: one_loss.run(ranks, 1, one, starved, STEPS)[0] for starved in (-1, 4)}


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "what", "num_starved"),
    [
        pytest.param(4, replace(EP2_ETP2, dispatcher="allgather"), "none", 4, id="ranks_without_tokens-allgather"),
        pytest.param(4, replace(EP2_ETP2, expert_clones="auto"), "none", 4, id="ranks_without_tokens-clones"),
        pytest.param(2, ETP2, "block", -1, id="recompute_block"),
        pytest.param(4, replace(GATHERED, overlap="microbatch"), "none", 4, id="ranks_without_tokens-interleaved"),
    ],
)
def test_etp_trains_as_one_process(
    ranks, alone: dict[int, Any], num_ranks: int, parallel: ParallelConfig, what: str, num_starved: int
) -> None:
    candidate = one_loss.recipe(parallel, memory=MemoryConfig(what))
    for trace in one_loss.run(ranks, num_ranks, candidate, num_starved, STEPS):
        one_loss.assert_same(trace, alone[num_starved], 1e-9)


@pytest.mark.few("ep2-etp2-to-tp2-etp4", "etp2-to-1")
@pytest.mark.parametrize(
    ("num_ranks", "parallel", "num_later", "later"),
    [
        pytest.param(2, ETP2, 1, ParallelConfig(), id="etp2-to-1"),
        pytest.param(1, ParallelConfig(), 4, ETP2, id="1-to-etp2-edp2"),
        pytest.param(4, replace(EP2_ETP2, ep=4, etp=1), 4, EP2_ETP2, id="ep4-to-ep2-etp2"),
        pytest.param(4, EP2_ETP2, 4, ParallelConfig(tp=2, etp=4), id="ep2-etp2-to-tp2-etp4"),
    ],
)
def test_etp_checkpoints_load_bit_for_bit_on_other_layouts(
    ranks, tmp_path: Path, num_ranks: int, parallel: ParallelConfig, num_later: int, later: ParallelConfig
) -> None:
    before, after = (with_biases(config) for config in (parallel, later))
    saved = ranks(num_ranks, tensor_parallel.save, before, tmp_path)[0]
    assert saved["layers.1.feed_forward.experts.down_bias"].abs().max() > 0
    tensor_parallel.assert_same_state(ranks(num_later, tensor_parallel.resume, after, tmp_path), saved)


def with_biases(parallel: ParallelConfig) -> Recipe:
    plain = one_loss.recipe(parallel, model=one_loss.SPLIT_MODELS["gqa"], micro_batch_sequences=2)
    return replace(plain, model=replace(plain.model, moe=replace(plain.model.moe, expert_mlp_bias=True)))


@pytest.mark.few("fp8_rowwise-16-32", "fp8_blockwise-128-256", "nvfp4-16-32")
@pytest.mark.parametrize(
    ("name", "hidden_size", "ffn_hidden_size"),
    [("fp8_rowwise", 16, 32), ("fp8_blockwise", 128, 256), ("mxfp8", 32, 64), ("nvfp4", 16, 32)],
)
def test_etp_formats_agree_to_their_noise(ranks, name: Any, hidden_size: int, ffn_hidden_size: int) -> None:
    """A rank rounds its part of an expert, and of a hidden state, with scales of its own."""
    plain = replace(one_loss.FP64, compute="fp32", master="fp32", reduce="fp32")
    rounded = replace(plain, experts=name, backend="emulated")
    model = replace(one_loss.MODEL, hidden_size=hidden_size, moe=replace(one_loss.MOE, ffn_hidden_size=ffn_hidden_size))
    (exact,), (alone,), (split, _) = (
        one_loss.run(ranks, num_ranks, one_loss.recipe(parallel, model=model, precision=precision), -1, 1)
        for num_ranks, parallel, precision in (
            (1, ParallelConfig(), plain),
            (1, ParallelConfig(), rounded),
            (2, ETP2, rounded),
        )
    )
    least, most = (0.1, 0.6) if name == "nvfp4" else (1e-3, 0.3)
    for weight in ("layers.1.feed_forward.experts.gate_up", "layers.1.feed_forward.experts.down"):
        noises = [tensor_parallel.distance(grads[weight], exact.grads[weight]) for grads in (alone.grads, split.grads)]
        assert least < noises[0] < most, "rounded"
        assert least < noises[1] < 1.5 * noises[0], weight
    assert split.losses[0] == pytest.approx(exact.losses[0], rel=1e-2)


def initial_state(recipe: Recipe) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, ...]]]:
    """Initial state as full tensors, and local shapes of the experts of a layer."""
    built = assemble(recipe, torch.device("cpu"))
    experts = built.parts[0].get_submodule("layers.1.feed_forward.experts")
    assert all(isinstance(parameter, DTensor) for parameter in experts.parameters())
    return tensor_parallel.state_of(built), {name: tuple(p.to_local().shape) for name, p in experts.named_parameters()}


def test_etp_ranks_keep_parts_of_the_same_initial_weights(ranks) -> None:
    whole, _ = ranks(1, initial_state, one_loss.recipe(ParallelConfig()))[0]
    for state, shapes in ranks(4, initial_state, one_loss.recipe(EP2_ETP2)):
        assert shapes == {"gate_up": (4, 2, 4, 16), "down": (4, 16, 4)}
        assert state.keys() == whole.keys()
        for name, value in whole.items():
            assert torch.equal(state[name], value), name
