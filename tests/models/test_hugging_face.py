"""Our MoE layer in a Llama of transformers: the balancing loss beside a mean loss is the published one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titan_moe import ModelConfig, MoE, MoEConfig, scale_balancing_losses, update_expert_biases
from titan_moe.config.kernels import Kernels

transformers = pytest.importorskip("transformers", minversion="5.0")
mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")

VOCAB, WIDTH, LAYERS, SEQUENCES, TOKENS = 64, 32, 2, 4, 24
EXPERTS, CHOICES, AUX_COEF, Z_COEF = 8, 2, 1e-2, 1e-3


def llama(dtype: torch.dtype = torch.float64, init_std: float = 0.3, **moe: Any) -> nn.Module:
    """A Llama with the layer in place of its MLPs, the same one at every call but for `moe`."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        attn_implementation="eager",
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    shape = MoEConfig(num_experts=EXPERTS, top_k=CHOICES, ffn_hidden_size=16, **moe)
    for layer in model.model.layers:
        config = ModelConfig(hidden_size=WIDTH, num_layers=LAYERS, init_std=init_std, moe=shape)
        layer.mlp = MoE(config, kernels=Kernels(experts="reference"))
    return model.to(dtype).train()


def batch() -> Tensor:
    """Tokens, a few of which are frequent."""
    frequencies = 1 / torch.arange(1, VOCAB + 1)
    generator = torch.Generator().manual_seed(1)
    return torch.multinomial(frequencies.expand(SEQUENCES, -1), TOKENS, replacement=True, generator=generator)


def loss_of(model: nn.Module, tokens_BN: Tensor) -> Tensor:
    return model(input_ids=tokens_BN, labels=tokens_BN).loss


def megatron_losses(logits_BNE: Tensor) -> Tensor:
    """`seq_aux_loss` (a mean over sequences) and `z_loss` of Megatron Core, in fp64 and of softmax scores.

    `switch_load_balancing_loss_func` is E · coef / (K · N²) · Σ_i (Σ_t P_ti) · count_i.
    """
    total = logits_BNE.new_zeros((), dtype=torch.float64)
    for logits_NE in logits_BNE.double():
        probs_NE = logits_NE.softmax(dim=-1)
        chosen_NE = torch.zeros_like(probs_NE).scatter(1, probs_NE.topk(CHOICES).indices, 1.0)
        sums = (probs_NE.sum(0) * chosen_NE.sum(0)).sum()
        total = total + AUX_COEF * EXPERTS / (CHOICES * TOKENS**2) * sums / SEQUENCES
    return total + Z_COEF * logits_BNE.double().logsumexp(dim=-1).square().mean()


def recording(model: nn.Module) -> list[Tensor]:
    """The routers' logits, once the model has run, with their gradient graph."""
    logits: list[Tensor] = []

    def record(router: nn.Module, inputs: tuple[Tensor], output: Any) -> None:
        logits.append(inputs[0] @ router.weight.T)

    for layer in model.model.layers:
        layer.mlp.router.register_forward_hook(record)
    return logits


def expected_gradients() -> dict[str, Tensor]:
    """The definition, added to the loss of a model that does not balance."""
    model = llama()
    logits = recording(model)
    loss = loss_of(model, batch())
    balance = sum(megatron_losses(logits_BNE) for logits_BNE in logits)
    (loss + balance).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def plainly(model: nn.Module) -> None:
    loss_of(model, batch()).backward()


def accumulated(model: nn.Module) -> None:
    scale_balancing_losses(model, 1 / 2)
    for tokens_BN in batch().chunk(2):
        (loss_of(model, tokens_BN) / 2).backward()


def as_a_sum(model: nn.Module) -> None:
    """A loss that is divided by a count that only the whole step knows, here a tensor."""
    count = torch.tensor(SEQUENCES * (TOKENS - 1), dtype=torch.float64)
    # a label less than a token: the balancing losses are means over tokens
    scale_balancing_losses(model, torch.tensor(1 / (SEQUENCES * TOKENS), dtype=torch.float64), "sum")
    for tokens_BN in batch().split(1):
        (loss_of(model, tokens_BN) * (TOKENS - 1) / count).backward()


def recomputed(model: nn.Module) -> None:
    model.gradient_checkpointing_enable()
    plainly(model)


def compiled(model: nn.Module) -> None:
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.mlp.compile(backend="aot_eager", fullgraph=True)
    plainly(model)


BACKWARDS: dict[str, Callable[[nn.Module], None]] = {
    "plain": plainly,
    "accumulated": accumulated,
    "a sum": as_a_sum,
    "recomputed": recomputed,
    "compiled": compiled,
}


@pytest.mark.parametrize("way", [*list(BACKWARDS)[:-1], pytest.param("compiled", marks=pytest.mark.slow)])
def test_gradients_beside_a_mean_loss_are_those_of_megatron(way: str) -> None:
    model, expected = llama(aux_loss_coef=AUX_COEF, z_loss_coef=Z_COEF), expected_gradients()
    BACKWARDS[way](model)
    plain = llama()
    loss_of(plain, batch()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12)
        if name.endswith("router.weight"):
            added = parameter.grad - plain.get_parameter(name).grad
            assert added.norm() > 1e-3 * parameter.grad.norm(), "there is something to compare"


def test_loss_is_that_of_mixtral_over_the_number_of_choices() -> None:
    """Of one layer and one sequence: transformers pools layers and sequences, and does not divide by K."""
    moe = llama(aux_loss_coef=AUX_COEF).model.layers[0].mlp
    x_BND = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
    moe(x_BND).sum().backward()
    published = mixtral.load_balancing_loss_func((x_BND[0] @ moe.router.weight.T,), EXPERTS, CHOICES)
    assert moe.router.balance.aux_loss.item() == pytest.approx(AUX_COEF * published.item() / CHOICES)


def trained(num_steps: int = 200, **moe: Any) -> tuple[nn.Module, dict[str, Tensor], list[float]]:
    """A model after some steps, its counts by router and step, and its losses. Its tokens have much in common, so that
    without balance routers prefer the same experts for all."""
    model = llama(torch.float32, init_std=0.1, **moe)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(3)
    counts, losses = [], []
    for _ in range(num_steps):
        first_B1 = torch.randint(VOCAB, (SEQUENCES, 1), generator=generator)
        loss = loss_of(model, (first_B1 + 3 * torch.arange(TOKENS)) % VOCAB)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(update_expert_biases(model))
        losses.append(loss.item())
    return model, {name: torch.stack([step[name] for step in counts]) for name in counts[0]}, losses


def loads(counts: dict[str, Tensor], steps: slice) -> list[float]:
    """Busiest expert over the mean in some steps, by router."""
    sums = [counts_SE[steps].sum(0).float() for counts_SE in counts.values()]
    return [(sum_E.max() / sum_E.mean()).item() for sum_E in sums]


@pytest.mark.few()
@pytest.mark.slow
def test_loads_stay_even_beside_a_mean_loss() -> None:
    _, unbalanced, _ = trained()
    model, counts, losses = trained(aux_loss_coef=AUX_COEF)
    whole, end = slice(None), slice(150, None)
    assert max(loads(counts, whole)) < min(2.0, 0.85 * max(loads(unbalanced, whole)))
    assert max(loads(counts, end)) < min(1.75, 0.85 * max(loads(unbalanced, end)))
    assert losses[-1] < 0.2, "and the model learns"
    assert not any(layer.mlp.router.expert_bias_E.any() for layer in model.model.layers)


@pytest.mark.slow
def test_expert_bias_moves_by_the_public_call() -> None:
    _, unbalanced, _ = trained(score_fn="sigmoid")
    model, counts, losses = trained(score_fn="sigmoid", bias_update_speed=1e-2)
    assert max(loads(unbalanced, slice(100, None))) > 1.6
    assert max(loads(counts, slice(100, None))) < 1.3
    assert losses[-1] < 0.2
    for layer, counts_SE in zip(model.model.layers, counts.values(), strict=True):
        missing_SE = counts_SE.float().mean(1, keepdim=True) - counts_SE
        expected_E = 1e-2 * missing_SE.sign().sum(0)
        torch.testing.assert_close(layer.mlp.router.expert_bias_E, expected_E, rtol=0, atol=1e-5)
        assert expected_E.abs().max() > 0.05
