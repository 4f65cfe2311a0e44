"""What a shape says of its layers."""

import pytest

from titan_moe.config.model import AttentionConfig


@pytest.mark.parametrize(
    ("window", "full_every", "expected"),
    [
        (0, 0, [100] * 7),
        (8, 0, [8] * 7),  # Mistral
        (8, 2, [8, 100, 8, 100, 8, 100, 8]),  # gpt-oss
        (8, 6, [8, 8, 8, 8, 8, 100, 8]),  # Gemma 3
        (1000, 2, [100] * 7),
    ],
)
def test_attention_window_of_each_layer(window: int, full_every: int, expected: list[int]) -> None:
    attention = AttentionConfig(sliding_window=window, full_attention_every=full_every)
    assert [attention.window(layer, 100) for layer in range(7)] == expected
