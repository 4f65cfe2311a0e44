"""Rotary position embedding (arXiv:2104.09864), with DeepSeek's variant of YaRN (arXiv:2309.00071) or with LongRoPE
(arXiv:2402.13753).

N sequence · R rotated width of a head
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from titan_moe.config.attention import AttentionConfig
from titan_moe.kernels.rope.rotation import rotate_halves, rotate_pairs

Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]


def rotated_width(config: AttentionConfig) -> int:
    """The number of rotated dimensions of a head."""
    return config.rotated_head_dim if config.kind == "gqa" else config.qk_rope_head_dim


def rope_tables(config: AttentionConfig, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position: two fp32 tensors [N, R/2], with the scale of YaRN or LongRoPE.

    Raises: ValueError for more tokens than the divisors of LongRoPE are for.
    """
    if (
        config.longrope_short_factor
        and config.longrope_applies == "short"
        and num_tokens > config.longrope_original_tokens
    ):
        raise ValueError(
            f'a sequence has {num_tokens} tokens, and model.attention.longrope_applies = "short" is for at most '
            f'longrope_original_tokens = {config.longrope_original_tokens}; take "long" or shorter sequences'
        )
    width = rotated_width(config)
    frequencies = config.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    if config.yarn_factor > 1:
        frequencies = _yarn_frequencies(frequencies, config, width)
    if config.llama3_factor > 1:
        frequencies = _llama3_frequencies(frequencies, config)
    divisors, longrope_scale = config.longrope
    if divisors:
        frequencies = frequencies / torch.tensor(divisors, dtype=torch.float32, device=device)
    angles_NR = torch.arange(num_tokens, dtype=torch.float32, device=device)[:, None] * frequencies
    mscale, mscale_all_dim = config.yarn_mscale, config.yarn_mscale_all_dim
    scale = yarn_scale(config.yarn_factor, mscale) / yarn_scale(config.yarn_factor, mscale_all_dim) * longrope_scale
    return angles_NR.cos() * scale, angles_NR.sin() * scale


def no_rotation(tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The tables of layers without rotary embedding, with which rotations change nothing."""
    cos, sin = tables
    return torch.ones_like(cos), torch.zeros_like(sin)


def query_factors(config: AttentionConfig, num_tokens: int, device: torch.device) -> Tensor | None:
    """The factor on the query of each place in layers without rotary embedding, fp32 [N]; None for one."""
    if not config.attn_scale:
        return None
    places_N = torch.arange(num_tokens, dtype=torch.float32, device=device)
    return ((places_N + 1) / config.floor_scale).floor().log1p() * config.attn_scale + 1


def scaled(q_BNHD: Tensor, factors_N: Tensor | None) -> Tensor:
    """Queries times a factor for each place, in their dtype."""
    return q_BNHD if factors_N is None else (q_BNHD * factors_N[:, None, None]).to(q_BNHD.dtype)


def yarn_scale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature for a context extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_frequencies(frequencies: Tensor, config: AttentionConfig, width: int) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, interpolate linearly between."""

    def pair_with(rotations: float) -> float:
        """The index of the pair that makes so many rotations over the original context."""
        inverse_frequency = config.yarn_original_tokens / (rotations * 2 * math.pi)
        return width * math.log(inverse_frequency) / (2 * math.log(config.rope_theta))

    low, high = pair_with(config.yarn_beta_fast), pair_with(config.yarn_beta_slow)
    if config.yarn_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32, device=frequencies.device) - low) / max(high - low, 1e-3)
    interpolated = ramp.clamp(0, 1)
    return frequencies / config.yarn_factor * interpolated + frequencies * (1 - interpolated)


def _llama3_frequencies(frequencies: Tensor, config: AttentionConfig) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and blend between by their rotations."""
    rotations = config.llama3_original_tokens * frequencies / (2 * math.pi)
    low, high = config.llama3_low_freq_factor, config.llama3_high_freq_factor
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return frequencies * kept + frequencies / config.llama3_factor * (1 - kept)


def rotation(config: AttentionConfig) -> Rotate:
    """The rotation of `rope_is_interleaved`: of neighbouring elements, or of the two halves of a head."""
    return rotate_pairs if config.rope_is_interleaved else rotate_halves
