"""The shape of a model, as data: what `[model]`, `[model.attention]` and `[model.moe]` of a recipe may say."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention (arXiv:2305.13245) or multi-head latent attention (arXiv:2405.04434)."""

    kind: Literal["gqa", "mla"] = "gqa"
    """Which attention the blocks use: grouped-query (`gqa`) or multi-head latent (`mla`)."""
    num_heads: int = 8
    """Query heads."""
    num_kv_heads: int = 8
    """Key/value heads of `gqa`; divides `num_heads`. `mla` ignores it."""
    head_dim: int = 64
    """Width of one `gqa` head; even, because RoPE rotates pairs. `mla` has its own three widths."""
    qk_norm: bool = False
    """RMSNorm over each head's query and key before RoPE (`gqa`; Qwen3 does this)."""
    qkv_bias: bool = False
    """Bias on the query, key and value projections (`gqa`)."""
    sliding_window: int = 0
    """Tokens that a token sees at most, itself included: its nearest past; 0 means all of its past."""
    full_attention_every: int = 0
    """Each so-many-th layer sees the whole past in spite of `sliding_window` (2 in gpt-oss, 6 in Gemma 3: windows come
    first); 0 means none (Mistral)."""
    rope_theta: float = 10_000.0
    """RoPE base frequency (arXiv:2104.09864)."""
    rope_is_interleaved: bool = False
    """Rotate neighbouring pairs (DeepSeek) instead of halves (Llama, Qwen)."""
    yarn_factor: float = 1.0
    """YaRN context extension factor (arXiv:2309.00071); 1 switches YaRN off."""
    yarn_original_tokens: int = 4096
    """Context length that the model was first trained at, before YaRN stretches it."""
    yarn_beta_fast: float = 32.0
    """Rotations in the original context above which YaRN leaves a frequency alone."""
    yarn_beta_slow: float = 1.0
    """Rotations in the original context below which YaRN divides a frequency by the factor."""
    yarn_mscale: float = 1.0
    """DeepSeek's YaRN attention scale for the rotary tables; its ratio to `yarn_mscale_all_dim` multiplies cos and
    sin."""
    yarn_mscale_all_dim: float = 0.0
    """DeepSeek's YaRN scale for all head dimensions; its square multiplies the softmax scale of `mla`. 0 means none."""
    q_lora_rank: int = 0
    """Rank of `mla`'s query compression; 0 projects queries directly (DeepSeek-V2-Lite)."""
    kv_lora_rank: int = 512
    """Rank of `mla`'s joint key/value compression."""
    qk_nope_head_dim: int = 128
    """Width of the part of an `mla` query/key head that is not rotated."""
    qk_rope_head_dim: int = 64
    """Width of the rotated part of an `mla` query/key head, shared by all key heads; even."""
    v_head_dim: int = 128
    """Width of an `mla` value head."""

    def window(self, layer: int, seq_len_tokens: int) -> int:
        """How many tokens a token of a layer sees at most, itself included; layers count from 0."""
        is_full = self.full_attention_every > 0 and (layer + 1) % self.full_attention_every == 0
        return seq_len_tokens if is_full or not self.sliding_window else min(self.sliding_window, seq_len_tokens)


@dataclass(frozen=True)
class MoEConfig:
    """The mixture-of-experts layer: router, routed experts, shared experts, load balance."""

    num_experts: int = 0
    """Routed experts a layer (E); 0 makes every layer dense."""
    top_k: int = 2
    """Experts that each token is sent to (K)."""
    ffn_hidden_size: int = 0
    """Hidden width of one routed expert (F)."""
    shared_ffn_hidden_size: int = 0
    """Total hidden width of the shared experts, which every token visits; 0 means none."""
    shared_expert_gate: bool = False
    """Multiply the shared experts' output by a learned sigmoid gate a token (Qwen2-MoE)."""
    latent_size: int = 0
    """Width that tokens are projected to before dispatch and back from after combine (latent MoE); 0 means the
    model's own width."""
    score_fn: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores: softmax over all experts, or sigmoid of each (arXiv:2408.15664)."""
    normalize_topk: bool = True
    """Divide the K chosen scores of a token by their sum."""
    route_scale: float = 1.0
    """Factor on the chosen scores, after normalising (2.5 in DeepSeek-V3)."""
    num_groups: int = 1
    """Groups that the experts are divided into for group-limited routing; 1 means no groups."""
    top_k_groups: int = 1
    """Groups that a token may choose its experts from; at most `num_groups`."""
    group_score: Literal["max", "top2_sum"] = "top2_sum"
    """What a group is ranked by: its best score (DeepSeek-V2) or the sum of its two best (DeepSeek-V3)."""
    score_on: Literal["activation", "input"] = "activation"
    """Where the routing score multiplies: the activation before the down projection (exact, saves memory), or the
    expert's input (Llama 4)."""
    expert_mlp_bias: bool = False
    """Biases on the gate, up and down projections of the routed experts (gpt-oss)."""
    aux_loss_coef: float = 0.0
    """Weight of the per-sequence load-balancing loss (arXiv:2101.03961, arXiv:2412.19437 section 2.1.2); 0 switches
    it off. Start with 1e-2 to 1e-4."""
    z_loss_coef: float = 0.0
    """Weight of the router z-loss, the mean squared logsumexp of the logits (arXiv:2202.08906); 0 switches it off.
    Start with 1e-3."""
    bias_update_speed: float = 0.0
    """Step of the auxiliary-loss-free balancing bias (arXiv:2408.15664), applied once an optimizer step; 0 switches
    it off. Start with 1e-3; needs `score_fn = "sigmoid"`."""

    @property
    def unmet_needs_of_fused(self) -> list[str]:
        """Settings that fused experts need and that these are not: rows are gathered inside a GEMM, where no score is
        applied, and no GEMM adds a bias."""
        needs = {
            'model.moe.score_on = "activation"': self.score_on == "activation",
            "model.moe.expert_mlp_bias = false": not self.expert_mlp_bias,
        }
        return [need for need, is_met in needs.items() if not is_met]


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer whose feed-forward layers are mixtures of experts."""

    class_: str = "titan_moe.models.transformer:Transformer"
    """`package.module:Class` of the model, `class` in a recipe. It is called as `Class(model_config, kernels=...,
    loss_chunk_tokens=...)` and is most easily a subclass of the default; the module may lie in the working folder. Its
    matrices start normal with `init_std`, its vectors at one, what is named `bias` at zero, unless the class that owns
    them says in `parameter_kinds` what they are."""
    name: str = "custom"
    """What the logs call this shape."""
    vocab_size: int = 256
    """Rows of the embedding and of the output head; at least the tokenizer's vocabulary."""
    num_layers: int = 2
    """Transformer blocks."""
    num_dense_layers: int = 0
    """Leading blocks with a dense feed-forward instead of experts (1 in DeepSeek-V2-Lite, 3 in DeepSeek-V3)."""
    hidden_size: int = 128
    """Width of the residual stream (D)."""
    ffn_hidden_size: int = 0
    """Hidden width of the dense feed-forward layers."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    embeddings_are_tied: bool = False
    """Use the embedding matrix as the output head too."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; projections that end a residual branch are divided by sqrt(2 *
    num_layers)."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """The attention layer."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """The mixture-of-experts layer."""

    @property
    def num_moe_layers(self) -> int:
        """Blocks whose feed-forward is a mixture of experts; they come last."""
        return self.num_layers - self.num_dense_layers if self.moe.num_experts else 0
