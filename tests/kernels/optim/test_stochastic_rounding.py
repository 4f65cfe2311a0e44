"""Philox against its authors' known answers; stochastic rounding against its expected value."""

import pytest
import torch

from titan_moe.kernels.optim.stochastic_rounding import (
    QUARTER,
    draw_words_reference,
    philox_reference,
    round_to_bf16_reference,
)


@pytest.mark.parametrize(
    ("seed", "counter", "expected"),
    [  # Random123's known answers for philox4x32 with seven rounds
        (0, (0, 0, 0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (2**64 - 1, (2**32 - 1,) * 4, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            0x299F31D0_A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox_gives_the_known_answers(seed: int, counter: tuple[int, ...], expected: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(word.item() for word in philox_reference(seed, (c0, c1, c2, c3))) == expected


def test_random_words_depend_on_index_step_seed_and_stream_alone() -> None:
    numel = 4 * QUARTER + 5

    def draw(seed: int = 3, step: float = 2.0, stream: int = 0, count: int = numel) -> torch.Tensor:
        return draw_words_reference(count, seed, torch.tensor(step), stream)

    words = draw()
    assert words.numel() == numel and 0 <= words.min() and words.max() < 2**32
    assert words.unique().numel() > numel - 3, "4,101 words of 32 bits are almost all different"
    assert torch.equal(draw(), words) and torch.equal(draw(count=7), words[:7])
    for other in (draw(seed=4), draw(step=3.0), draw(stream=1)):
        assert (other == words).sum() < 2
    ones = torch.stack([words >> bit & 1 for bit in range(32)]).double().mean(1)
    assert (ones - 0.5).abs().max() < 5 * 0.5 / numel**0.5, "each bit is 1 in half of the words"


def test_mean_of_stochastic_roundings_is_the_fp32_number() -> None:
    torch.manual_seed(0)
    x = torch.randn(50) * 10.0 ** torch.randint(-20, 20, (50,))
    num_draws = 4096
    bits = draw_words_reference(50 * num_draws, 1, torch.tensor(1.0), 0).view(50, num_draws) & 0xFFFF
    drawn = round_to_bf16_reference(x[:, None].expand(50, num_draws), bits).double()
    low, high = drawn.min(1).values, drawn.max(1).values
    gap = (
        (x.view(torch.int32) & ~0xFFFF)
        .add(1 << 16)
        .view(torch.float32)
        .double()
        .sub((x.view(torch.int32) & ~0xFFFF).view(torch.float32).double())
    )
    assert torch.equal(high - low, gap.abs()), "both neighbouring bf16 numbers are drawn"
    assert ((drawn == low[:, None]) | (drawn == high[:, None])).all()
    deviation = (drawn.mean(1) - x.double()).abs() / gap.abs()
    assert deviation.max() < 5 * 0.5 / num_draws**0.5


def test_bf16_numbers_infinities_and_nan_are_not_rounded() -> None:
    kept = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-130, torch.inf, -torch.inf, torch.finfo(torch.bfloat16).max])
    for bits in (0, 1, 0x8000, 0xFFFF):
        rounded = round_to_bf16_reference(kept, torch.full((8,), bits))
        assert torch.equal(rounded.float(), kept)
        assert torch.equal(rounded.float().signbit(), kept.signbit())
        nan = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
        assert round_to_bf16_reference(nan, torch.full((3,), bits)).isnan().all()
