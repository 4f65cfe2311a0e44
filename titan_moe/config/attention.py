"""The shape of attention: `[model.attention]` of a recipe."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention (arXiv:2305.13245) or multi-head latent attention (arXiv:2405.04434)."""

    kind: Literal["gqa", "mla"] = "gqa"
    """The attention of all blocks.
    `gqa`: Grouped-query attention.
    `mla`: Multi-head latent attention."""
    num_heads: int = 8
    """Query heads."""
    num_kv_heads: int = 8
    """Key/value heads of `gqa`; divides `num_heads`. `mla` ignores it."""
    head_dim: int = 64
    """Width of a `gqa` head; even, because RoPE rotates pairs. `mla` has its own three widths."""
    qk_norm: bool = False
    """RMSNorm over queries and keys before RoPE (`gqa`; used by Qwen3)."""
    qk_norm_over: Literal["head", "all_heads"] = "head"
    """The width that `qk_norm` takes the mean square of.
    `head`: Each head alone. The weights are those of one head, shared by all (Qwen3, GLM-4.5).
    `all_heads`: All query heads together, and all key heads, each with its own weights (OLMoE, MiniMax-M2)."""
    qk_norm_is_after_rope: bool = False
    """Norm each head after RoPE, not before (Hunyuan-V1)."""
    qk_norm_has_weights: bool = True
    """False norms without weights (Llama 4, after RoPE)."""
    qk_norm_layers: Literal["all", "rope"] = "all"
    """The layers whose queries and keys `qk_norm` norms.
    `all`: All layers.
    `rope`: Those with rotary embedding, others than every `nope_every`-th (Llama 4)."""
    clip_qkv: float = 0.0
    """Clamp queries, keys and values to this absolute value, before a norm over each head and after one over all heads
    (`gqa`; OLMoE 0824, DBRX); 0 means none."""
    qkv_bias: bool = False
    """Bias on the query, key and value projections (`gqa`)."""
    out_bias: bool = False
    """Bias on the output projection (`gqa`; gpt-oss, Phi-3.5-MoE)."""
    output_gate: Literal["none", "head", "element"] = "none"
    """A learned gate on the result of attention, before the output projection: the sigmoid of a projection of the
    layer's input (`gqa`; arXiv:2505.06708).
    `none`: No gate.
    `head`: One number for each query head.
    `element`: One for each element of each query head (AFMoE)."""
    sinks: bool = False
    """A learned logit of each query head that joins its softmax and has no value, so that a head may attend to nothing
    (`gqa`; gpt-oss, arXiv:2309.17453). With SDPA it is one more key and eight more columns of queries, keys and values,
    which are copied for it; FlexAttention scales its result instead, in layers without a window too."""
    sliding_window: int = 0
    """Number of latest tokens that a token attends to, itself included; 0 means all earlier tokens."""
    full_attention_every: int = 0
    """Every n-th layer ignores `sliding_window` (n = 2 in gpt-oss, 6 in Gemma 3; windowed layers come first); 0 means
    no layer does (Mistral)."""
    window_layers: tuple[int, ...] = ()
    """The layers with `sliding_window` by number, where they follow no such pattern: [4, 5] are the fifth and the sixth
    (`layer_types` in Qwen2-MoE, from `max_window_layers` on in dots1). Empty means that `full_attention_every` says
    it."""
    attention_chunk_size: int = 0
    """Tokens of a chunk of a sequence, in layers with rotary embedding: a token attends to earlier tokens of its chunk
    alone, and in every `nope_every`-th layer to all (Llama 4: 8192); 0 means no chunks."""
    softmax_scale: float = 0.0
    """Factor on the products of queries and keys (`attention_multiplier` in Granite: 1/64); 0 means one over the square
    root of a head's width. YaRN's scale for `mla` multiplies either."""
    rope_theta: float = 10_000.0
    """RoPE base frequency (arXiv:2104.09864)."""
    partial_rotary_factor: float = 1.0
    """Share of a `gqa` head that RoPE rotates, its first elements; the others pass (1/2 in GLM-4.5 and MiniMax-M2)."""
    rope_layers: Literal["all", "windowed"] = "all"
    """The layers with rotary embedding, of those that `nope_every` leaves.
    `all`: All.
    `windowed`: Those with `sliding_window` (AFMoE, EXAONE-MoE, Command R7B)."""
    window_rope_theta: float = 0.0
    """RoPE base frequency of the layers with `sliding_window`, whose context nothing extends: YaRN, LongRoPE and
    `llama3_factor` are for the other layers (Mellum 2, Gemma 3: 10,000); 0 means that all layers have one embedding."""
    nope_every: int = 0
    """Every n-th layer has no rotary embedding (4 in Llama 4 and SmolLM3; arXiv:2501.18795); 0 means no layer lacks
    it."""
    attn_scale: float = 0.0
    """Attention temperature of layers without rotary embedding (`nope_every`): the query of place p in its sequence,
    counted from 0, is multiplied by 1 + attn_scale * log(1 + floor((p + 1) / floor_scale)). 0 means none. Llama 4 has
    0.1 (`attn_temperature_tuning`, arXiv:2501.19399)."""
    floor_scale: int = 8192
    """Places of a sequence that share a factor of `attn_scale`."""
    rope_is_interleaved: bool = False
    """Rotate neighbouring pairs (DeepSeek) instead of halves (Llama, Qwen)."""
    yarn_factor: float = 1.0
    """YaRN context extension factor (arXiv:2309.00071); 1 disables YaRN."""
    yarn_original_tokens: int = 4096
    """Context length before YaRN's extension."""
    yarn_beta_fast: float = 32.0
    """YaRN keeps frequencies with more rotations than this over the original context."""
    yarn_beta_slow: float = 1.0
    """YaRN divides frequencies with fewer rotations than this over the original context by the factor."""
    yarn_truncate: bool = True
    """Round the borders between kept, blended and divided frequencies to whole ones (gpt-oss does not)."""
    yarn_mscale: float = 1.0
    """DeepSeek's YaRN attention scale for the rotary tables; its ratio to `yarn_mscale_all_dim` multiplies cos and
    sin."""
    yarn_mscale_all_dim: float = 0.0
    """DeepSeek's YaRN scale for all head dimensions; its square multiplies the softmax scale of `mla`. 0 means none."""
    llama3_factor: float = 1.0
    """Llama 3.1's context extension factor (arXiv:2407.21783): low frequencies are divided by it; 1 disables it."""
    llama3_original_tokens: int = 8192
    """Context length before this extension."""
    llama3_low_freq_factor: float = 1.0
    """Frequencies with fewer rotations than this over the original context are divided."""
    llama3_high_freq_factor: float = 4.0
    """Frequencies with more rotations than this over the original context are kept; between, both are blended."""
    longrope_short_factor: tuple[float, ...] = ()
    """LongRoPE (arXiv:2402.13753; Phi-3.5-MoE): a divisor of the frequency of each rotated pair, for contexts of up to
    `longrope_original_tokens`. Empty disables LongRoPE."""
    longrope_long_factor: tuple[float, ...] = ()
    """The divisors for longer contexts."""
    longrope_applies: Literal["short", "long"] = "short"
    """The list that training, evaluation and generate take, whatever the length of a sequence, so that cached keys and
    new ones have the same frequencies.
    `short`: `longrope_short_factor`. Sequences of more than `longrope_original_tokens` are refused.
    `long`: `longrope_long_factor`, for shorter sequences too."""
    longrope_original_tokens: int = 4096
    """Context length before LongRoPE's extension."""
    longrope_short_scale: float = 1.0
    """LongRoPE's factor on cos and sin with `longrope_short_factor` (`short_mscale`, or `attention_factor`)."""
    longrope_long_scale: float = 1.0
    """The same with `longrope_long_factor` (`long_mscale`, or `attention_factor`)."""
    q_lora_rank: int = 0
    """Rank of the query compression of `mla`; 0 projects queries directly (DeepSeek-V2-Lite)."""
    kv_lora_rank: int = 512
    """Rank of the joint key/value compression of `mla`."""
    qk_nope_head_dim: int = 128
    """Width of the part of an `mla` query/key head that is not rotated."""
    qk_rope_head_dim: int = 64
    """Width of the rotated part of an `mla` query/key head, shared by all key heads; even."""
    v_head_dim: int = 128
    """Width of an `mla` value head."""
    latent_norm_eps: float = 1e-6
    """Epsilon of the RMSNorms of the query and key/value latents of `mla`. Hugging Face's DeepSeek-V2 and V3, Moonlight
    and GLM-4.7-Flash have 1e-6 whatever their `rms_norm_eps`; Megatron has `model.norm_eps`. A run of a release without
    this field had `model.norm_eps`, and goes on with it."""

    @property
    def output_gate_width(self) -> int:
        """The number of gates of a token."""
        return {"none": 0, "head": self.num_heads, "element": self.num_heads * self.head_dim}[self.output_gate]

    @property
    def rotated_head_dim(self) -> int:
        """Number of elements of a `gqa` head that RoPE rotates."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def scale(self) -> float:
        """The factor on the products of queries and keys, without YaRN's."""
        width = self.head_dim if self.kind == "gqa" else self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.softmax_scale or width**-0.5

    @property
    def share_of_logits(self) -> float:
        """Of the multiply-adds of attention, those of queries and keys; the others are of values."""
        if self.kind == "gqa":
            return 0.5
        width = self.qk_nope_head_dim + self.qk_rope_head_dim
        return width / (width + self.v_head_dim)

    @property
    def longrope(self) -> tuple[tuple[float, ...], float]:
        """The divisors of frequencies that apply, and the factor on cos and sin. Empty and one without LongRoPE."""
        if not self.longrope_short_factor:
            return (), 1.0
        if self.longrope_applies == "long":
            return self.longrope_long_factor, self.longrope_long_scale
        return self.longrope_short_factor, self.longrope_short_scale

    def has_rope(self, layer: int) -> bool:
        """Whether a layer has a rotary embedding. The first layer is 0."""
        has_one = self.nope_every == 0 or (layer + 1) % self.nope_every > 0
        return has_one and (self.rope_layers == "all" or self.has_window(layer))

    @property
    def of_windows(self) -> "AttentionConfig":
        """That of the rotary embedding of layers with windows."""
        if not self.window_rope_theta:
            return self
        plain = replace(self, yarn_factor=1.0, llama3_factor=1.0, longrope_short_factor=(), longrope_long_factor=())
        return replace(plain, rope_theta=self.window_rope_theta, window_rope_theta=0.0)

    def chunk(self, layer: int, seq_len_tokens: int) -> int:
        """Number of tokens of a chunk that a layer's tokens attend in, the sequence if it has none."""
        has_chunks = self.attention_chunk_size > 0 and self.has_rope(layer)
        return min(self.attention_chunk_size, seq_len_tokens) if has_chunks else seq_len_tokens

    def doubled_pairs(self, layer: int, seq_len_tokens: int) -> int:
        """Twice the number of pairs of a token and one that it attends to, of which those of a token with itself count
        half. With a window W they are 2 N W - W², the same for W = N."""
        chunk = self.chunk(layer, seq_len_tokens)
        if chunk < seq_len_tokens:
            number, rest = divmod(seq_len_tokens, chunk)
            return number * chunk**2 + rest**2
        window = self.window(layer, seq_len_tokens)
        return window * (2 * seq_len_tokens - window)

    def has_window(self, layer: int) -> bool:
        """Whether a layer has the sliding window. The first layer is 0."""
        if self.window_layers:
            return self.sliding_window > 0 and layer in self.window_layers
        is_full = self.full_attention_every > 0 and (layer + 1) % self.full_attention_every == 0
        return self.sliding_window > 0 and not is_full

    def window(self, layer: int, seq_len_tokens: int) -> int:
        """Number of latest tokens that a token attends to in a layer, itself included. The first layer is 0."""
        return min(self.sliding_window, seq_len_tokens) if self.has_window(layer) else seq_len_tokens

    def with_windows(self, has_window: Sequence[bool]) -> "AttentionConfig":
        """The same with `sliding_window` in these layers. The fewest fields say it, so two that are of the same layers
        are equal."""
        num_layers, plain = len(has_window), replace(self, full_attention_every=0, window_layers=())
        if not any(has_window):
            return replace(plain, sliding_window=0)
        every = list(has_window).index(False) + 1 if not all(has_window) else 0
        regular = replace(plain, full_attention_every=every)
        if [regular.has_window(layer) for layer in range(num_layers)] == list(has_window):
            return regular
        return replace(plain, window_layers=tuple(layer for layer in range(num_layers) if has_window[layer]))
