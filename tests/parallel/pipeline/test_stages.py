"""Stages of models: what cannot be split is refused, and a weight in two stages has one gradient."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support import load
from torch import nn

from titan_moe.config import Recipe, RecipeError
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.train import DataConfig
from titan_moe.models.transformer import Transformer
from titan_moe.parallel.pipeline.messages import Messages
from titan_moe.parallel.pipeline.stages import split
from titan_moe.parameters import full_tensor
from titan_moe.plan.resolved import Resolved
from titan_moe.training.build import assemble

one_loss = load("distributed/test_one_loss")
PP2 = ParallelConfig(pp=2)
FIRST_RANK: Any = SimpleNamespace(dense=SimpleNamespace(get_local_rank=lambda axis: 0))


class Normed(Transformer):
    """Has a module that no stage has."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        self.embed_norm = nn.RMSNorm(config.hidden_size)


class Listed(Transformer):
    """Has its blocks in a list."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        self.layers = nn.ModuleList(self.layers.values())  # type: ignore[assignment]


class Gained(Transformer):
    """Has a parameter that every stage would have."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        self.gain = nn.Parameter(torch.empty(config.hidden_size))


class Own(Transformer):
    """Has a forward of its own, of the same modules."""

    factor = 1.0

    def forward(self, tokens_BN: Any, labels_BN: Any = None, document_ids_BN: Any = None) -> Any:
        contexts = self.contexts(tokens_BN, document_ids_BN)
        x_BND = self.embed(tokens_BN)
        x_BND = x_BND if self.factor == 1 else x_BND * self.factor
        for name, block in self.layers.items():
            x_BND = block(x_BND, contexts[name])
        return self.head(self.norm(x_BND), labels_BN)


class Scaled(Own):
    """Multiplies its embeddings, which every stage would repeat."""

    factor = 4.0


class Looped(Transformer):
    """Has a loop of its own over its blocks; `between` is what it does before each."""

    def forward(self, tokens_BN: Any, labels_BN: Any = None, document_ids_BN: Any = None) -> Any:
        context = next(iter(self.contexts(tokens_BN, document_ids_BN).values()))
        x_BND = first_BND = self.embed(tokens_BN).to(torch.bfloat16)
        for number, block in enumerate(self.layers.values()):
            x_BND = block(self.between(x_BND, first_BND, number), context)
        return self.head(self.norm(x_BND), labels_BN)

    def between(self, x_BND: Any, first_BND: Any, number: int) -> Any:
        return x_BND


class Skipping(Looped):
    """Adds the embeddings before each block; later stages have none."""

    def between(self, x_BND: Any, first_BND: Any, number: int) -> Any:
        return x_BND + 0.1 * first_BND


class Counting(Looped):
    """Counts its blocks; each stage would begin anew."""

    def between(self, x_BND: Any, first_BND: Any, number: int) -> Any:
        return x_BND * (1 + number)


class Summing(Own):
    """Computes its loss from the logits, which only the last stage has."""

    def forward(self, tokens_BN: Any, labels_BN: Any = None, document_ids_BN: Any = None) -> Any:
        logits_BNV = super().forward(tokens_BN, None, document_ids_BN)
        return F.cross_entropy(logits_BNV.view(-1, self.config.vocab_size), labels_BN.flatten(), reduction="sum")


class Tying(Transformer):
    """Ties its embeddings itself; the recipe does not say so."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        (Normed, "no stage has its embed_norm; .*: move them into one"),
        (Gained, "no stage has its gain; .*: move them into one"),
        (Listed, "its layers are a ModuleList; keep them in an nn.ModuleDict, each with its number as key"),
        (Scaled, "its forward does more than call embed, .*; move that into one of these"),
        (Skipping, "its forward does more than call embed, .*; move that into one of these"),
        (Counting, "its forward does more than call embed, .* or counts its layers, .*; move that into one of these"),
        (Summing, r"its forward fails in the stage of embed, layers\.0, .*: ValueError: Expected"),
    ],
)
def test_a_model_that_stages_would_compute_otherwise_is_refused(model_class: type[Transformer], message: str) -> None:
    recipe = one_loss.recipe(PP2)
    with torch.device("meta"):
        model = model_class(recipe.model)
    with pytest.raises(RecipeError, match=message):
        split(model, Resolved(recipe, 2), FIRST_RANK)


@pytest.mark.parametrize("model_class", [Own, Looped])
def test_a_forward_of_ones_own_is_split_if_stages_compute_the_same(model_class: type[Transformer]) -> None:
    recipe = one_loss.recipe(PP2)
    recipe = replace(recipe, data=DataConfig(document_attention=True))
    with torch.device("meta"):
        model = model_class(recipe.model)
    (stage,) = split(model, Resolved(recipe, 2), FIRST_RANK)
    assert all(parameter.is_meta for parameter in [*stage.parameters(), *model.parameters()])


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
