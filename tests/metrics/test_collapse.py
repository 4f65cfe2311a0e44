"""The warning of collapsed layers: once for each collapse."""

import pytest

from titan_moe.config.model import MoEConfig
from titan_moe.metrics.collapse import NUM_LOGGED_STEPS, CollapseWarning


@pytest.fixture
def warning() -> CollapseWarning:
    return CollapseWarning(MoEConfig(num_experts=8, top_k=2))


def see(warning: CollapseWarning, loads: list[float]) -> None:
    for step, load in enumerate(loads, start=1):
        warning.see(10 * step, {"layers.0": 1.0, "layers.1": load})


def test_collapse_is_named_once(warning: CollapseWarning, caplog: pytest.LogCaptureFixture) -> None:
    see(warning, [3.7] * (3 * NUM_LOGGED_STEPS))
    (message,) = caplog.messages
    assert message.startswith("layers.1 has collapsed: at step 50 and in the 4 logged steps before")
    assert "3.7 times the mean load (4.0 is every token)" in message
    assert all(key in message for key in ("model.moe.aux_loss_coef", "optim.lr", "model.embedding_init_std"))


def test_a_layer_that_collapses_again_is_not_named_again(
    warning: CollapseWarning, caplog: pytest.LogCaptureFixture
) -> None:
    see(warning, [4.0] * NUM_LOGGED_STEPS + [1.5] + [4.0] * NUM_LOGGED_STEPS)
    assert len(caplog.messages) == 1


def test_no_collapse_for_a_few_steps(warning: CollapseWarning, caplog: pytest.LogCaptureFixture) -> None:
    see(warning, [4.0, 4.0, 4.0, 4.0, 1.5] * 4 + [3.5] * 20)
    assert not caplog.messages


@pytest.mark.parametrize("moe", [MoEConfig(num_experts=4, top_k=3), MoEConfig(num_experts=4, top_k=4), MoEConfig()])
def test_no_collapse_where_tokens_choose_most_experts(moe: MoEConfig, caplog: pytest.LogCaptureFixture) -> None:
    see(CollapseWarning(moe), [1.33] * 20)
    assert not caplog.messages
