"""Count parameters and model FLOPs of a shape, without building it.

FLOPs follow Megatron's convention, so that TFLOP/s and MFU compare with published ones: forward and backward (factor
3), two FLOPs a multiply-add, causal attention counted half, no recompute; router, norms, softmax and permutation are
not counted. With a sliding window only the tokens inside it are counted. Document masks are ignored, because document
boundaries differ by batch.
"""

from dataclasses import dataclass

from titan_moe.config.model import ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model by component; buffers such as the balancing bias are not parameters."""

    embedding: int
    head: int  # 0 if it is the embedding
    attention: int  # projections, their biases, and the norms inside attention
    norms: int  # two a block and the last one
    router: int
    dense_ffn: int  # feed-forward of the dense layers
    routed_experts: int  # of all layers
    shared_experts: int  # with their gates
    latent: int  # projections into and out of the latent width
    active_experts: int  # the part of `routed_experts` that one token uses
    unsplit: int  # the part of attention and shared experts on every tensor-parallel rank
    query_key_value: int  # the part of `attention` in fused projections, on every one of more ranks than `num_kv_heads`
    num_kv_heads: int

    @property
    def total(self) -> int:
        """All parameters."""
        dense = self.embedding + self.head + self.attention + self.norms + self.router + self.dense_ffn
        return dense + self.routed_experts + self.shared_experts + self.latent

    @property
    def active(self) -> int:
        """The parameters that one token uses, embedding and head included."""
        return self.total - self.routed_experts + self.active_experts

    def dense_per_tp_rank(self, tp: int) -> float:
        """The parameters of a tensor-parallel rank, without routed experts."""
        whole = self.replicated_over_tp(tp)
        return whole + (self.total - self.routed_experts - whole) / tp

    def replicated_over_tp(self, tp: int) -> int:
        """The parameters that every tensor-parallel rank has: norms, routers, latent projections, biases, compressions
        of mla, gates of shared experts; and the projections to query, key and value where ranks share a key/value head.
        """
        whole = self.norms + self.router + self.latent + self.unsplit
        return whole + (self.query_key_value if self.num_kv_heads < tp else 0)


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Count the parameters of a model by component."""
    width, moe, num_moe_layers = model.hidden_size, model.moe, model.num_moe_layers
    one_expert = parameters_of_an_expert(model)
    one_gate = width if moe.shared_expert_gate else 0
    one_shared = 3 * width * moe.shared_ffn_hidden_size + one_gate
    attention = attention_projection_weights(model) + _attention_biases_and_norms(model)
    return ParameterCount(
        embedding=model.vocab_size * width,
        head=0 if model.embeddings_are_tied else model.vocab_size * width,
        attention=model.num_layers * attention,
        norms=(2 * model.num_layers + 1) * width,
        router=num_moe_layers * moe.num_experts * width,
        dense_ffn=(model.num_layers - num_moe_layers) * 3 * width * model.ffn_hidden_size,
        routed_experts=num_moe_layers * moe.num_experts * one_expert,
        shared_experts=num_moe_layers * one_shared,
        latent=num_moe_layers * 2 * width * moe.latent_size,
        active_experts=num_moe_layers * moe.top_k * one_expert,
        unsplit=model.num_layers * _unsplit_attention(model) + num_moe_layers * one_gate,
        query_key_value=model.num_layers * count_query_key_value(model),
        num_kv_heads=model.attention.num_kv_heads,
    )


def training_flops_per_token(model: ModelConfig, seq_len_tokens: int) -> int:
    """Count the FLOPs of training on one token of a sequence: the numerator of TFLOP/s and MFU."""
    layers = sum(layer_matrix_weights(model, layer) for layer in range(model.num_layers))
    multiply_adds = layers + model.vocab_size * model.hidden_size
    return 6 * multiply_adds + attention_core_flops_per_token(model, seq_len_tokens)


def layer_matrix_weights(model: ModelConfig, layer: int) -> int:
    """Count the matrix weights of a layer that one token uses: each costs one multiply-add in forward."""
    width, moe = model.hidden_size, model.moe
    if layer < model.num_layers - model.num_moe_layers:
        return attention_projection_weights(model) + 3 * width * model.ffn_hidden_size
    experts = 3 * model.expert_width * moe.ffn_hidden_size * moe.top_k
    shared = 3 * width * moe.shared_ffn_hidden_size
    return attention_projection_weights(model) + experts + shared + 2 * width * moe.latent_size


def attention_projection_weights(model: ModelConfig) -> int:
    """Count the matrix weights of one attention layer: each costs one multiply-add a token."""
    width, a = model.hidden_size, model.attention
    if a.kind == "gqa":
        return 2 * width * a.head_dim * (a.num_heads + a.num_kv_heads)
    query_width = a.num_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim)
    query = a.q_lora_rank * (width + query_width) if a.q_lora_rank else width * query_width
    kv_down = width * (a.kv_lora_rank + a.qk_rope_head_dim)
    kv_up = a.kv_lora_rank * a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)
    return query + kv_down + kv_up + a.num_heads * a.v_head_dim * width


def count_query_key_value(model: ModelConfig) -> int:
    """Count the weights of one fused projection to query, key and value; 0 for mla, which has none."""
    a = model.attention
    return model.hidden_size * a.head_dim * (a.num_heads + 2 * a.num_kv_heads) if a.kind == "gqa" else 0


def _unsplit_attention(model: ModelConfig) -> int:
    """Count what every tensor-parallel rank has of one attention layer: biases, norms, compressions of mla."""
    a, compressions = model.attention, 0
    if a.kind == "mla":
        compressions = model.hidden_size * (a.q_lora_rank + a.kv_lora_rank + a.qk_rope_head_dim)
    return compressions + _attention_biases_and_norms(model)


def _attention_biases_and_norms(model: ModelConfig) -> int:
    a = model.attention
    if a.kind == "mla":
        return a.q_lora_rank + a.kv_lora_rank
    biases = a.head_dim * (a.num_heads + 2 * a.num_kv_heads) if a.qkv_bias else 0
    return biases + (2 * a.head_dim if a.qk_norm else 0)


def attention_core_flops_per_token(model: ModelConfig, seq_len_tokens: int) -> int:
    """Count the FLOPs of QK^T and PV in all layers, training, on one token of a sequence.

    A token attends to N / 2 of N tokens on average; with a window W to W - W² / 2N, the same for W = N.
    """
    twice_the_pairs = sum(_twice_the_pairs(model, layer, seq_len_tokens) for layer in range(model.num_layers))
    return 3 * attention_core_width(model) * twice_the_pairs // seq_len_tokens


def attention_core_flops_of_layer(model: ModelConfig, layer: int, seq_len_tokens: int) -> int:
    """The same in one layer."""
    return 3 * attention_core_width(model) * _twice_the_pairs(model, layer, seq_len_tokens) // seq_len_tokens


def _twice_the_pairs(model: ModelConfig, layer: int, seq_len_tokens: int) -> int:
    window = model.attention.window(layer, seq_len_tokens)
    return window * (2 * seq_len_tokens - window)


def attention_core_width(model: ModelConfig) -> int:
    """Widths of queries and values over all heads: multiply-adds of a pair of tokens in QK^T and PV."""
    a = model.attention
    if a.kind == "gqa":
        return 2 * a.num_heads * a.head_dim
    return a.num_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim + a.v_head_dim)


def parameters_of_an_expert(model: ModelConfig, etp: int = 1) -> int:
    """Count the weights of one routed expert, and its biases; or of the part that each of `etp` ranks has."""
    width, hidden = model.expert_width, model.moe.ffn_hidden_size // etp
    return 3 * width * hidden + (2 * hidden + width if model.moe.expert_mlp_bias else 0)
