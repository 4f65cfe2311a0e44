"""A dispatcher of one's own is one file with its row and its builder; it trains as one process does."""

from typing import Any
from unittest import mock

import pytest
from support import TESTS, load

from titan_moe import register_dispatcher
from titan_moe.config import Recipe, check_rules
from titan_moe.config.dispatchers import ALLTOALL, DISPATCHERS
from titan_moe.config.parallel import ParallelConfig
from titan_moe.parallel.dispatchers import BUILDERS

OWN = "support/summing_dispatcher"


one_loss = load("distributed/test_one_loss")


def train_with_own(run: Recipe) -> tuple[dict[str, Any], int]:
    """The observations of the run, and how many exchanges used this dispatcher."""
    kind = load(OWN).SummingDispatcher
    with mock.patch.object(kind, "prepare", autospec=True, side_effect=kind.prepare) as prepare:
        return one_loss.train(run, num_steps=one_loss.FEW), prepare.call_count


def test_own_dispatcher_trains_as_one_process(ranks) -> None:
    (alone,) = ranks(1, one_loss.train, one_loss.recipe(ParallelConfig()), -1, one_loss.FEW)
    with mock.patch.dict(DISPATCHERS), mock.patch.dict(BUILDERS):
        load(OWN)
        candidate = one_loss.recipe(ParallelConfig(ep=2, dispatcher="summing"))
        assert check_rules(candidate, 2) == []
    num_microbatches = one_loss.FEW * one_loss.SEQUENCES // 2
    for trace, num_exchanges in ranks(2, train_with_own, candidate):
        one_loss.assert_same(one_loss.Trace(**trace), one_loss.Trace(**alone), 1e-9)
        assert num_exchanges == num_microbatches * one_loss.MODEL.num_moe_layers


def test_own_dispatcher_is_one_short_file() -> None:
    assert len((TESTS / f"{OWN}.py").read_text().splitlines()) < 60


def test_own_dispatcher_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match='"alltoall" is registered already; take another name'):
        register_dispatcher(ALLTOALL, BUILDERS["alltoall"])
