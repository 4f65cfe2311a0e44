"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values are rebuilt from a narrow latent.

B batch · N sequence · H heads · D model width
"""

from collections.abc import Callable

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
        return self.core(*self.up(*self.down(x_BND, context), context), context)

    def down(self, x_BND: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """What queries are projected from, the normed latent of keys and values, and the rotated part of keys."""
        latent, k_rope = self.kv_down(x_BND).split([self.kv_lora_rank, self.rope_dim], dim=-1)
        k_rope = self.rotate(k_rope[:, :, None], context.cos_NR, context.sin_NR)
        latent, k_rope = self.gather_keys(self.kv_norm(latent), k_rope)
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
