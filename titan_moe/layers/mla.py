"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values are rebuilt from a narrow latent.

B batch · N sequence · H heads · D model width
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.config.model import ModelConfig
from titan_moe.kernels.choose import LATENT_HEADS
from titan_moe.layers.attention import Context, causal_attention, keys_of_own_tokens
from titan_moe.layers.rope import rotation, scaled, yarn_scale


class MultiHeadLatentAttention(nn.Module):
    """Attention with low-rank keys and values; all heads share one small rotated part of the key.

    The width of the projections gives the number of heads: a tensor-parallel rank has fewer. `gather_keys` takes
    latents and the rotated part of keys to those of whole sequences, where a rank has queries of some tokens.
    """

    residual_ends = ("out.weight",)
    parts = {"forward": ("down", "up", "core"), "core": ("out",)}

    def __init__(self, config: ModelConfig, kernels: Kernels = DEFAULT_KERNELS) -> None:
        super().__init__()
        a, width = config.attention, config.hidden_size
        self.nope_dim, self.rope_dim, self.v_dim = a.qk_nope_head_dim, a.qk_rope_head_dim, a.v_head_dim
        self.kv_lora_rank, self.qk_dim = a.kv_lora_rank, a.qk_nope_head_dim + a.qk_rope_head_dim
        self.scale = a.scale * yarn_scale(a.yarn_factor, a.yarn_mscale_all_dim) ** 2
        self.rotate, self.is_interleaved = rotation(a), a.rope_is_interleaved
        self.latent_heads = LATENT_HEADS[kernels.rotary]
        if a.q_lora_rank:
            self.q_down = nn.Linear(width, a.q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(a.q_lora_rank, a.latent_norm_eps)
        else:
            self.q_down, self.q_norm = nn.Identity(), nn.Identity()
        self.q_up = nn.Linear(a.q_lora_rank or width, a.num_heads * self.qk_dim, bias=False)
        self.kv_down = nn.Linear(width, a.kv_lora_rank + a.qk_rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(a.kv_lora_rank, a.latent_norm_eps)
        self.kv_up = nn.Linear(a.kv_lora_rank, a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), bias=False)
        self.out = nn.Linear(a.num_heads * a.v_head_dim, width, bias=False)
        self.gather_keys: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = keys_of_own_tokens
        self.attend: Callable[[Tensor, Tensor, Tensor, Context, float], Tensor] = causal_attention

    def forward(self, x_BND: Tensor, context: Context) -> Tensor:
        """[B, N, D] -> [B, N, D]."""
        from_BND, latent, k_rope = self.down(x_BND, context)
        heads = self.up(from_BND, latent, k_rope, context)
        if context.cache is None:
            return self.core(*heads, context)
        return self.out(self.attend_to_cache(heads[0], latent, k_rope, context).flatten(2))

    def down(self, x_BND: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """What queries are projected from, the normed latent of keys and values, and the rotated part of keys."""
        latent, k_rope = self.kv_down(x_BND).split([self.kv_lora_rank, self.rope_dim], dim=-1)
        k_rope = self.rotate(k_rope[:, :, None], context.cos_NR, context.sin_NR)
        latent = self.kv_norm(latent)
        if context.cache is None:  # which has those of all tokens
            latent, k_rope = self.gather_keys(latent, k_rope)
        return self.q_norm(self.q_down(x_BND)), latent, k_rope

    def up(self, from_BND: Tensor, latent: Tensor, k_rope: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, N, H, D] each."""
        projected, tables = (self.q_up(from_BND), self.kv_up(latent)), (context.cos_NR, context.sin_NR)
        q_BNHD, k_BNHD, v_BNHD = self.latent_heads(
            *projected, k_rope, *tables, self.nope_dim, self.v_dim, self.is_interleaved
        )
        return scaled(q_BNHD, context.query_factors_N), k_BNHD, v_BNHD

    def core(self, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, context: Context) -> Tensor:
        """Attention itself and the output projection: -> [B, N, D]."""
        return self.out(self.attend(q_BNHD, k_BNHD, v_BNHD, context, self.scale).flatten(2))

    def attend_to_cache(self, q_1THD: Tensor, latent_1TR: Tensor, k_rope_1T1D: Tensor, context: Context) -> Tensor:
        """Attention of new tokens to the latents of all: -> [1, T, H, D].

        Keys and values are projected again from latents, for many new tokens. For few, queries are projected to the
        width of latents, and their results back (DeepSeek-V2, section 2.1.2): the projection is that of an identity.
        """
        cache, plain = context.cache, context._replace(cache=None)
        assert cache is not None
        q_BnHD, (latent_BSR, k_rope_BS1D) = cache.rows_of(q_1THD), cache.extend(latent_1TR, k_rope_1T1D)
        rank, width, (num_new, num_heads) = self.kv_lora_rank, self.nope_dim + self.v_dim, q_BnHD.shape[1:3]
        if num_new * (2 * rank - width) >= rank * width:
            k_nope, v_BSHD = self._project(latent_BSR)
            k_BSHD = torch.cat([k_nope, k_rope_BS1D.expand(*k_nope.shape[:3], -1)], -1)
            attended_BnHD = causal_attention(q_BnHD, k_BSHD, v_BSHD, plain, self.scale)
            return cache.as_one_sequence(attended_BnHD, q_1THD.shape[1])
        if not cache.of_weights:
            identity_RR = torch.eye(rank, dtype=latent_BSR.dtype, device=latent_BSR.device)
            cache.of_weights = tuple(x[0] for x in self._project(identity_RR[None]))
        keys_RHC, values_RHV = cache.of_weights
        q_nope, q_rope = q_BnHD.split([self.nope_dim, self.rope_dim], -1)
        q_BnHR = torch.cat([torch.einsum("bnhc,rhc->bnhr", q_nope, keys_RHC), q_rope], -1)
        # one head of keys: so queries of all heads are queries of one, which no kernel repeats keys for
        queries_BQ1R, mask = q_BnHR.flatten(1, 2)[:, :, None], plain.mask
        assert isinstance(mask, Tensor)
        plain = plain._replace(mask=mask.repeat_interleave(num_heads, dim=2))
        k_BS1R, latent_BS1R = torch.cat([latent_BSR[:, :, None], k_rope_BS1D], -1), latent_BSR[:, :, None]
        attended_BQ1R = causal_attention(queries_BQ1R, k_BS1R, latent_BS1R, plain, self.scale)
        attended_BnHR = attended_BQ1R.unflatten(1, (num_new, num_heads))[:, :, :, 0]
        attended_BnHD = torch.einsum("bnhr,rhv->bnhv", attended_BnHR, values_RHV)
        return cache.as_one_sequence(attended_BnHD, q_1THD.shape[1])

    def _project(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys without their rotated part and values, [B, N, H, D] each."""
        keys, values = (
            self.kv_up(latent).unflatten(-1, (-1, self.nope_dim + self.v_dim)).split([self.nope_dim, self.v_dim], -1)
        )
        return keys, values
