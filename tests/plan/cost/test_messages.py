"""What gathers and reductions add to a step: a share by link, what NCCL takes in a node, or all that nothing hides."""

import pytest

from titan_moe.plan.cost.messages import EXPOSED_SHARDING, HIDING, TAKEN_BY_NCCL, sharding_exposed


def test_links_of_a_node_slow_what_computes_and_slower_ones_less() -> None:
    in_node, between = sharding_exposed(1.0, 10.0, 1.0), sharding_exposed(8.0, 80.0, 1.0)
    assert in_node == pytest.approx(EXPOSED_SHARDING + TAKEN_BY_NCCL)
    assert between == pytest.approx(8 * EXPOSED_SHARDING + TAKEN_BY_NCCL)
    assert sharding_exposed(0.0, 1.0, 0.0) == 0


def test_what_is_longer_than_the_step_computes_is_exposed() -> None:
    assert sharding_exposed(10.0, 2.0, 1.0) == pytest.approx(10 - 2 * HIDING)
    assert sharding_exposed(10.0, 0.0, 10.0) == pytest.approx(10)
