"""Every kind of optimizer has its facts, and is built."""

from typing import get_args, get_type_hints

from titan_moe.config.optimizers import OPTIMIZERS
from titan_moe.config.train import OptimConfig
from titan_moe.optim.build import BUILDERS


def test_optimizer_kinds_have_facts_and_builders() -> None:
    kinds = get_args(get_type_hints(OptimConfig)["kind"])
    assert set(kinds) == OPTIMIZERS.keys() == BUILDERS.keys()
