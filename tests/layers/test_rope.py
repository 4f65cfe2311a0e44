"""Rotary position embedding, compared with complex numbers for one position and one pair at a time."""

import cmath
import math

import pytest
import torch
from torch import Tensor

from titan_moe.config.model import AttentionConfig
from titan_moe.kernels.rope.rotation import rotate_halves, rotate_pairs
from titan_moe.layers.rope import rope_tables, rotation, yarn_scale

CPU = torch.device("cpu")
WIDTH, TOKENS = 8, 5


def config(**changes: object) -> AttentionConfig:
    return AttentionConfig(head_dim=WIDTH, rope_theta=100.0, **changes)


def rotate_by_loops(x_BNHR: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    """Multiply pair i at position n by exp(1j · n · theta^(-i / number of pairs)), in Python."""
    out = x_BNHR.clone()
    for n in range(x_BNHR.shape[1]):
        for i, (a, b) in enumerate(pairs):
            factor = cmath.exp(1j * n * 100.0 ** (-i / len(pairs)))
            out[:, n, :, a] = x_BNHR[:, n, :, a] * factor.real - x_BNHR[:, n, :, b] * factor.imag
            out[:, n, :, b] = x_BNHR[:, n, :, a] * factor.imag + x_BNHR[:, n, :, b] * factor.real
    return out


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rope_equals_complex_rotation(is_interleaved: bool) -> None:
    half = WIDTH // 2
    pairs = [(2 * i, 2 * i + 1) if is_interleaved else (i, i + half) for i in range(half)]
    attention = config(rope_is_interleaved=is_interleaved)
    x_BNHR = torch.randn(2, TOKENS, 3, WIDTH, dtype=torch.float64)
    actual = rotation(attention)(x_BNHR, *rope_tables(attention, TOKENS, CPU))
    torch.testing.assert_close(actual, rotate_by_loops(x_BNHR, pairs), atol=1e-6, rtol=0)


@pytest.mark.parametrize("rotate", [rotate_halves, rotate_pairs])
def test_rope_scores_depend_only_on_distance(rotate: object) -> None:
    cos, sin = rope_tables(config(), 40, CPU)
    q, k = torch.randn(2, WIDTH).expand(40, 2, WIDTH).unbind(1)
    q, k = (rotate(x[None, :, None], cos, sin)[0, :, 0] for x in (q, k))
    scores_NN = q @ k.T
    for distance in (0, 3, 17):
        diagonal = scores_NN.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=0)
    assert not torch.isclose(scores_NN[5, 0], scores_NN[0, 5], atol=1e-3), "past and future differ"


@pytest.mark.parametrize("rotate", [rotate_halves, rotate_pairs])
def test_rope_rotates_in_fp32_and_returns_the_input_dtype(rotate: object) -> None:
    cos, sin = rope_tables(config(), TOKENS, CPU)
    x_BNHR = torch.randn(1, TOKENS, 2, WIDTH).bfloat16()
    assert torch.equal(rotate(x_BNHR, cos, sin), rotate(x_BNHR.float(), cos, sin).bfloat16())


def test_rope_width_of_mla_is_the_rotated_part() -> None:
    mla = AttentionConfig(kind="mla", head_dim=64, qk_rope_head_dim=16)
    assert rope_tables(mla, TOKENS, CPU)[0].shape == (TOKENS, 8)


@pytest.mark.parametrize(("applies", "num_tokens"), [("short", 8), ("long", 20)])
def test_longrope_is_that_of_transformers(applies: str, num_tokens: int) -> None:
    transformers = pytest.importorskip("transformers")
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    short, long = [1.0, 1.3, 1.7, 2.5], [1.0, 3.0, 9.0, 40.0]
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}
    rope |= {"short_factor": short, "long_factor": long}
    theirs = transformers.Phi3Config(
        hidden_size=2 * WIDTH,
        num_attention_heads=2,
        max_position_embeddings=32,
        original_max_position_embeddings=8,
        rope_parameters=rope,
        pad_token_id=0,
    )
    frequencies, scale = utils.ROPE_INIT_FUNCTIONS["longrope"](theirs, CPU, seq_len=num_tokens)
    assert scale == pytest.approx(math.sqrt(1 + math.log(4) / math.log(8)))
    ours = config(
        longrope_short_factor=tuple(short),
        longrope_long_factor=tuple(long),
        longrope_applies=applies,
        longrope_original_tokens=8,
        longrope_short_scale=scale,
        longrope_long_scale=scale,
    )
    angles = torch.arange(num_tokens)[:, None] * frequencies
    cos, sin = rope_tables(ours, num_tokens, CPU)
    torch.testing.assert_close(cos, angles.cos() * scale, rtol=0, atol=1e-5)
    torch.testing.assert_close(sin, angles.sin() * scale, rtol=0, atol=1e-5)


def test_short_longrope_refuses_longer_sequences() -> None:
    short = config(longrope_short_factor=(1.0,) * 4, longrope_long_factor=(2.0,) * 4, longrope_original_tokens=TOKENS)
    assert len(rope_tables(short, TOKENS, CPU)[0]) == TOKENS
    with pytest.raises(ValueError, match='has 6 tokens, and model.attention.longrope_applies = "short" is for at most'):
        rope_tables(short, TOKENS + 1, CPU)


def test_yarn_keeps_high_frequencies_and_divides_low_ones() -> None:
    """The rotations of a pair over the original context decide. DeepSeek rounds the limits outward to whole pairs."""
    width, theta, factor, original, fast, slow = 64, 10_000.0, 40.0, 4096, 32.0, 1.0
    yarn = AttentionConfig(
        head_dim=width, rope_theta=theta, yarn_factor=factor, yarn_original_tokens=original, yarn_mscale_all_dim=1.0
    )
    cos, sin = rope_tables(yarn, 2, CPU)
    frequencies = torch.atan2(sin[1], cos[1]).tolist()  # the angle at position 1 is the frequency
    plain = [theta ** (-2 * i / width) for i in range(width // 2)]
    rotations = [original * frequency / (2 * math.pi) for frequency in plain]
    low = max(i for i in range(width // 2) if rotations[i] >= fast)
    high = min(i for i in range(width // 2) if rotations[i] <= slow)
    for i, (frequency, before) in enumerate(zip(frequencies, plain, strict=True)):
        unchanged = 1 - min(max((i - low) / (high - low), 0), 1)
        assert frequency == pytest.approx(before * unchanged + before / factor * (1 - unchanged), rel=1e-4), i
    assert 0 < low < high < width // 2 - 1, "the test covers unchanged, interpolated and divided frequencies"


def test_yarn_scales_the_tables() -> None:
    def length(**changes: float) -> float:
        cos, sin = rope_tables(config(yarn_factor=40.0, yarn_original_tokens=64, **changes), TOKENS, CPU)
        return (cos.square() + sin.square()).sqrt().mean().item()

    assert length() == pytest.approx(0.1 * math.log(40) + 1), "the paper's temperature by default"
    assert length(yarn_mscale=0.7, yarn_mscale_all_dim=0.7) == pytest.approx(1)
    ratio = (0.07 * math.log(40) + 1) / (0.09 * math.log(40) + 1)
    assert length(yarn_mscale=0.7, yarn_mscale_all_dim=0.9) == pytest.approx(ratio)
    assert yarn_scale(1.0, 0.7) == 1.0


def test_llama3_divides_low_frequencies_keeps_high_ones_and_blends_between() -> None:
    attention = config(llama3_factor=8.0, llama3_original_tokens=100, llama3_high_freq_factor=4.0)
    cos, sin = rope_tables(attention, 2, CPU)
    expected = []
    for i in range(WIDTH // 2):
        frequency = 100.0 ** (-2 * i / WIDTH)
        rotations = 100 * frequency / (2 * math.pi)
        share = min(max((rotations - 1) / (4 - 1), 0), 1)
        expected.append(frequency * share + frequency / 8 * (1 - share))
    assert {frequency > 4 for frequency in (100 * f / (2 * math.pi) for f in expected)} == {True, False}
    torch.testing.assert_close(torch.atan2(sin, cos)[1], torch.tensor(expected), atol=1e-6, rtol=1e-5)


def test_windowed_layers_have_a_base_of_their_own() -> None:
    attention = config(llama3_factor=8.0, yarn_factor=1.0, sliding_window=4, window_rope_theta=300.0)
    plain = AttentionConfig(head_dim=WIDTH, rope_theta=300.0)
    assert torch.equal(rope_tables(attention.of_windows, TOKENS, CPU)[0], rope_tables(plain, TOKENS, CPU)[0])
    assert config().of_windows == config()
