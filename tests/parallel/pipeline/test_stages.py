"""Stages of models: what cannot be split is refused, and a weight in two stages has one gradient."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support import load
from torch import nn

from titan_moe.config import Recipe, RecipeError
from titan_moe.config.parallel import ParallelConfig
from titan_moe.models.transformer import Transformer
from titan_moe.parallel.pipeline.messages import Messages
from titan_moe.parallel.pipeline.stages import split
from titan_moe.parameters import full_tensor
from titan_moe.train.build import assemble

one_loss = load("distributed/test_one_loss")
PP2 = ParallelConfig(pp=2)
FIRST_RANK: Any = SimpleNamespace(dense=SimpleNamespace(get_local_rank=lambda axis: 0))


class Normed(Transformer):
    """Has a module that no stage has."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        self.embed_norm = nn.RMSNorm(config.hidden_size)


class Tying(Transformer):
    """Ties its embeddings itself; the recipe does not say so."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        self.head.weight = self.embed.weight


def test_a_module_without_a_stage_is_refused() -> None:
    recipe = one_loss.recipe(PP2)
    with torch.device("meta"), pytest.raises(RecipeError, match="no stage has its embed_norm; .*: move them into one"):
        split(Normed(recipe.model), recipe, FIRST_RANK)


def train_tying(recipe: Recipe) -> list[Any]:
    """Losses, and the weight of this rank's stages after some steps."""
    module = ModuleType("tying")
    module.Tying = Tying
    with mock.patch.dict(sys.modules, tying=module):
        built = assemble(replace(recipe, model=replace(recipe.model, class_="tying:Tying")), torch.device("cpu"))
    losses = [built.step(one_loss.batch_of(step, 1, built.meshes)).loss.item() for step in range(3)]
    return [losses, *(full_tensor(part.get_parameter("embed.weight").detach()).clone() for part in built.parts)]


def test_a_tie_of_ones_own_class_has_one_gradient(ranks: Any) -> None:
    ((losses, weight),) = ranks(1, train_tying, one_loss.recipe(ParallelConfig()))
    for stage_losses, of_stage in ranks(2, train_tying, one_loss.recipe(PP2)):
        assert stage_losses == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(of_stage, weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sent", [torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.float64)], ids=["shape", "dtype"])
def test_another_tensor_than_the_receiver_expects_is_not_sent(sent: torch.Tensor) -> None:
    messages = Messages(None, torch.zeros(2, 3))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"between stages are torch.float32 \[2, 3\]"):
        messages.send(sent, 0)
