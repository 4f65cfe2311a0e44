"""Recompute: the modules of the recipe, in blocks of any class, with equal gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.recompute import of_entries
from titan_moe.kernels.experts.weights import EachWeight
from titan_moe.layers.block import Block
from titan_moe.layers.init import init_weights
from titan_moe.layers.moe import MoE
from titan_moe.memory import recompute
from titan_moe.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=16,
    num_layers=3,
    hidden_size=16,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, output_gate="head"),
    moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16, aux_loss_coef=1e-2),
)


class OwnBlock(nn.Module):
    """A user's block, not derived from Block."""

    def __init__(self, config: ModelConfig, *, is_dense: bool, kernels: Kernels) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size)
        self.moe = MoE(config, kernels=kernels)

    def forward(self, x_BND: Tensor, context: Any) -> Tensor:
        return x_BND + self.moe(self.norm(x_BND))


def build(block_class: type[nn.Module], recomputed: str) -> Transformer:
    model = type("Model", (Transformer,), {"block_class": block_class})(CONFIG)
    recompute.apply(model, of_entries((recomputed,), len(model.layers)))
    init_weights(model, seed=0, std=0.2, num_layers=CONFIG.num_layers)
    return model


@pytest.mark.parametrize("block_class", [Block, OwnBlock])
@pytest.mark.parametrize(("recomputed", "passes"), [("none", 1), ("experts", 1), ("block", 2)])
def test_recompute_runs_blocks_as_often_as_the_recipe_says(
    block_class: type[nn.Module], recomputed: str, passes: int
) -> None:
    torch.manual_seed(0)
    tokens, labels = torch.randint(16, (2, 2, 8)).unbind()
    plain, model = build(block_class, "none"), build(block_class, recomputed)
    calls = []
    for block in model.layers.values():
        norm = block.norm if block_class is OwnBlock else block.ffn_norm
        norm.register_forward_hook(lambda *_: calls.append(1))
    for each in (plain, model):
        each(tokens, labels).backward()
    assert len(calls) == passes * CONFIG.num_layers
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


def test_recompute_repeats_dropout_in_a_users_block() -> None:
    class Dropping(OwnBlock):
        def forward(self, x_BND: Tensor, context: Any) -> Tensor:
            return nn.functional.dropout(super().forward(x_BND, context), 0.5)

    tokens, labels = torch.randint(16, (2, 2, 8)).unbind()
    grads = []
    for recomputed in ("none", "block"):
        model = build(Dropping, recomputed)
        torch.manual_seed(0)
        model(tokens, labels).backward()
        grads.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.equal(*grads)


class Layers(nn.Module):
    """Two MoE layers in blocks of a user; `noise` is added to the logits of both, by call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [OwnBlock(CONFIG, is_dense=False, kernels=Kernels(experts="reference")) for _ in range(2)]
        self.layers = nn.ModuleList(blocks).double()
        self.noise, self.ids = list[Tensor](), list[Tensor]()
        for block in self.layers:
            torch.nn.init.normal_(block.moe.router.weight, std=0.2)
            block.moe.router.logits = self._noisy
            block.moe.router.register_forward_hook(lambda _, __, output: self.ids.append(output[1]))

    def _noisy(self, x_BND: Tensor, weight_ED: Tensor) -> Tensor:
        return x_BND @ weight_ED.T + self.noise.pop(0)


def noises(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [1e-3 * torch.randn(4, 256, 4, dtype=torch.float64, generator=generator) for _ in range(number)]


def test_recompute_takes_the_first_choice_with_the_scores_of_other_logits() -> None:
    """The gradient of each block is that of a forward with the second logits and the first ids."""
    x_BND = torch.randn(4, 256, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    model, twice, noise = Layers(), Layers(), noises(4)  # of layers 0 and 1, then in backward of 1 and 0
    recompute.apply(model, of_entries(("block",), len(model.layers)))
    model.noise, inputs = list(noise), [x_BND.clone().requires_grad_()]
    for block in model.layers:
        inputs.append(block(inputs[-1], None))
    inputs[-1].square().sum().backward()
    first, again = model.ids[:2], model.ids[2:]
    assert all(torch.equal(*pair) for pair in zip(first, reversed(again), strict=True))

    grad_BND, num_moved = 2 * inputs[-1].detach(), 0
    for index in (1, 0):
        router = twice.layers[index].moe.router
        twice.noise, x = [noise[3 - index]] * 2, inputs[index].detach().requires_grad_()
        with torch.no_grad():
            twice.layers[index](x, None)
        num_moved += int((twice.ids[-1] != first[index]).any(-1).sum())
        router.force = lambda _, ids_TK=first[index]: ids_TK.unflatten(0, (4, 256))
        twice.layers[index](x, None).backward(grad_BND)
        grad_BND = x.grad
        counts_E = model.layers[index].moe.router.balance.tokens_per_expert_E
        assert torch.equal(counts_E, first[index].flatten().bincount(minlength=4)), "counted once"
    assert num_moved > 0, "some tokens would go elsewhere"
    assert torch.equal(inputs[0].grad, grad_BND)
    for parameter, expected in zip(model.parameters(), twice.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


@pytest.mark.parametrize(
    "mode", ["eager", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("block", "router"))]
)
def test_recompute_keeps_the_choices_of_microbatches_in_flight(mode: str) -> None:
    """Between their forwards and backwards a bias moves, which changes the selection and nothing else. A compiler makes
    one graph of both forwards."""
    x_MBND = torch.randn(3, 2, 64, 16, generator=torch.Generator().manual_seed(2))
    torch._dynamo.reset()
    grads, counts, num_graphs = [], [], set()
    for recomputed in ("none", "block"):
        torch.manual_seed(0)
        model = nn.Module()
        model.layers = nn.ModuleList([OwnBlock(CONFIG, is_dense=False, kernels=Kernels())])
        (block,) = model.layers
        router = block.moe.router
        torch.nn.init.normal_(router.weight, std=0.2)
        if mode != "eager" and recomputed == "block":
            module = block if mode == "block" else router
            module.forward = torch.compile(module.forward, fullgraph=True, backend="aot_eager")
        recompute.apply(model, of_entries((recomputed,), len(model.layers)))
        losses = []
        for x_BND in x_MBND:
            losses.append(block(x_BND, None).square().sum())
            num_graphs.add(counters["stats"]["unique_graphs"])
        router.expert_bias_E.normal_()
        for loss in losses:
            loss.backward()
        grads.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        counts.append(router.balance.tokens_per_expert_E)
    torch.testing.assert_close(*grads)
    assert torch.equal(*counts)
    num_graphs.add(counters["stats"]["unique_graphs"])
    assert len(num_graphs) == (1 if mode == "eager" else 2), "before, and with that of the first forward"


def test_recompute_names_a_block_whose_router_does_not_fit() -> None:
    class Twice(OwnBlock):
        def forward(self, x_BND: Tensor, context: Any) -> Tensor:
            return super().forward(super().forward(x_BND, context), context)

    with pytest.raises(ValueError, match=r'once, .* this one is called twice; memory.recompute = "block" .* "experts"'):
        build(Twice, "block")(*torch.randint(16, (2, 2, 8)).unbind())


def test_recompute_experts_repeats_only_experts() -> None:
    model = build(Block, "experts")
    reads = []
    for block in model.layers.values():
        block.feed_forward.experts.transforms["local"] = EachWeight(lambda weight: reads.append(1) or weight)
    tokens, labels = torch.randint(16, (2, 2, 8)).unbind()
    model(tokens, labels).backward()
    assert len(reads) == 2 * 2 * CONFIG.num_layers, "two weights, in forward and in backward"


def test_recompute_block_of_a_dense_model() -> None:
    dense = replace(CONFIG, ffn_hidden_size=16, moe=MoEConfig())
    model = Transformer(dense)
    recompute.apply(model, of_entries(("block",), len(model.layers)))
    init_weights(model, seed=0, std=0.2, num_layers=dense.num_layers)
    calls = []
    model.layers["0"].ffn_norm.register_forward_hook(lambda *_: calls.append(1))
    model(*torch.randint(16, (2, 2, 8)).unbind()).backward()
    assert len(calls) == 2
