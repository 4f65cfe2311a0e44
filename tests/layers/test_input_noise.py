"""Noise on the input of routers: its spread, its gradients, and the same numbers from the same keys."""

import torch
from torch import nn

from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.layers.input_noise import InputNoise, factors, mixed
from titan_moe.layers.router import TopKRouter

WIDTH, EPS = 37, 0.2
KEYS_BN = mixed(torch.arange(6 * 50, dtype=torch.int32).view(6, 50))


def by_hand(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) % 2**32
    return x ^ (x >> 16)


def test_hash_is_that_of_whole_numbers() -> None:
    numbers = [0, 1, -1, 2**31 - 1, -(2**31), 123456789]
    expected = [by_hand(number % 2**32) for number in numbers]
    assert [number % 2**32 for number in mixed(torch.tensor(numbers, dtype=torch.int32)).tolist()] == expected


def test_factors_are_even_and_independent() -> None:
    noise = (factors(KEYS_BN, WIDTH, EPS) - 1) / EPS
    assert noise.abs().max() <= 1 and abs(noise.mean()) < 0.02
    assert abs(noise.square().mean() - 1 / 3) < 0.02, "of an even draw"
    for one, other in ((noise[:, 1:], noise[:, :-1]), (noise[..., 1:], noise[..., :-1]), (noise[1:], noise[:-1])):
        assert abs((one * other).mean()) < 0.02
    assert factors(KEYS_BN, WIDTH, EPS)[1:2].equal(factors(KEYS_BN[1:2], WIDTH, EPS)), "of the key alone"


def test_noise_multiplies_input_and_gradient() -> None:
    x_BND = torch.randn(6, 50, WIDTH, dtype=torch.float64, requires_grad=True)
    noisy_BND = InputNoise(KEYS_BN, EPS)(x_BND)
    factors_BND = factors(KEYS_BN, WIDTH, EPS).double()
    torch.testing.assert_close(noisy_BND, x_BND * factors_BND)
    (grad_BND,) = torch.autograd.grad(noisy_BND.sum(), x_BND)
    torch.testing.assert_close(grad_BND, factors_BND)
    assert InputNoise(KEYS_BN, EPS)(x_BND.bfloat16()).dtype == torch.bfloat16


def test_router_scores_what_the_noise_makes() -> None:
    router = TopKRouter(ModelConfig(hidden_size=WIDTH, moe=MoEConfig(num_experts=5, top_k=3, ffn_hidden_size=8)))
    nn.init.normal_(router.weight)
    x_BND = torch.randn(6, 50, WIDTH)
    expected = router(x_BND * factors(KEYS_BN, WIDTH, EPS))
    router.noise = InputNoise(KEYS_BN, EPS)
    for actual, wanted in zip(router(x_BND), expected, strict=True):
        assert torch.equal(actual, wanted)
