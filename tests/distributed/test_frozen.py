"""A model of which some parameters train does so on every layout as on one process."""

from dataclasses import replace
from typing import Any

import pytest
from support import load

from titan_moe.config import Recipe
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import MemoryConfig
from titan_moe.config.train import OptimConfig

one_loss = load("distributed/test_one_loss")
STEPS = 2
PATTERNS = ("embed.weight", "layers.1.feed_forward.experts.down", "layers.2.attention.qkv.*", "*.router.weight")
EP2 = ParallelConfig(ep=2, dispatcher="alltoall")
PP2 = ParallelConfig(pp=2)


def frozen(parallel: ParallelConfig, patterns: tuple[str, ...] = PATTERNS, **changes: Any) -> Recipe:
    optim = OptimConfig(lr=1e-2, max_grad_norm=0.5, trainable=patterns)
    return one_loss.recipe(parallel, **({"optim": optim} | changes))


@pytest.fixture(scope="module")
def alone(ranks: Any) -> Any:
    return one_loss.Trace(**ranks(1, one_loss.train, frozen(ParallelConfig(), micro_batch_sequences=4), -1, STEPS)[0])


def test_only_what_is_named_has_gradients(alone: Any) -> None:
    assert set(alone.grads) == {
        "embed.weight",
        "layers.1.feed_forward.experts.down",
        "layers.1.feed_forward.router.weight",
        "layers.2.attention.qkv.weight",
        "layers.2.feed_forward.router.weight",
    }
    assert all(grad.any() for grad in alone.grads.values())


@pytest.mark.parametrize(
    ("parallel", "what"),
    [
        pytest.param(EP2, "block", id="ep2-edp2-recompute_block"),
        pytest.param(replace(EP2, accumulate_unsharded=True, overlap="microbatch"), "none", id="interleaved"),
        pytest.param(ParallelConfig(tp=2, ep=2, etp=2, dispatcher="alltoall"), "none", id="tp2-ep2-etp2"),
        pytest.param(replace(PP2, ep=2, dispatcher="allgather"), "none", id="pp2-ep2"),
        pytest.param(
            replace(PP2, pp_schedule="zbv", vpp=2, pp_layout="Et||t|tL", accumulate_unsharded=True), "none", id="zbv"
        ),
    ],
)
def test_layouts_train_as_one_process(ranks, alone: Any, parallel: ParallelConfig, what: str) -> None:
    one = frozen(parallel, memory=MemoryConfig(what))
    for trace in one_loss.run(ranks, 4, one, -1, STEPS):
        one_loss.assert_same(trace, alone, 1e-9)
