"""The shape of a model: `[model]` and `[model.moe]` of a recipe; attention.py has `[model.attention]`."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from titan_moe.config.adapter import AdapterConfig
from titan_moe.config.attention import AttentionConfig
from titan_moe.config.balance import AuxLosses
from titan_moe.config.hashed import hashed_once
from titan_moe.config.layer_kinds import Layers as Layers
from titan_moe.config.layer_kinds import consecutive, layers_by_kind
from titan_moe.config.mtp import MTPConfig
from titan_moe.config.swiglu import SwiGLU


@dataclass(frozen=True)
class MoEConfig:
    """The mixture-of-experts layer: router, routed experts, shared experts, load balance."""

    num_experts: int = 0
    """Routed experts per layer (E); 0 makes every layer dense."""
    top_k: int = 2
    """Number of experts per token (K)."""
    ffn_hidden_size: int = 0
    """Hidden width of a routed expert (F)."""
    shared_ffn_hidden_size: int = 0
    """Total hidden width of the shared experts, which process every token; 0 means none."""
    shared_expert_gate: bool = False
    """Multiply the output of the shared experts by a learned sigmoid gate per token (Qwen2-MoE)."""
    latent_size: int = 0
    """Width of tokens between dispatch and combine, with a projection before and after (latent MoE); 0 means
    `hidden_size`, without projections."""
    score_fn: Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"] = "softmax"
    """The function of router logits that gives scores.
    `softmax`: Softmax over all experts.
    `sigmoid`: Sigmoid of each logit (arXiv:2408.15664).
    `sqrtsoftplus`: Square root of the softplus of each logit (DeepSeek-V4).
    `sparsemixer`: Two experts a token, one after the other: the best, and the best of the others. The score of each is
    a softmax over those left whose logits are within `sparsemixer_jitter` of its own (Phi-3.5-MoE, arXiv:2409.12136).
    Experts are not drawn at random in training, so a run is that of evaluation, with its gradients."""
    sparsemixer_jitter: float = 0.01
    """Half of the relative distance to the best logit up to which others join the softmax of `sparsemixer`
    (`router_jitter_noise`)."""
    normalize_topk: bool = True
    """Divide the K selected scores of a token by their sum. Of softmax scores this makes the softmax of the K selected
    logits, "after top-k" in Megatron, and `false` keeps that of all, `moe_router_pre_softmax`. With `top_k = 1` it must
    be `false`: the score of the one expert then weighs its output, and the router learns by it (Switch)."""
    router_dtype: Literal["fp32", "fp64"] = "fp32"
    """Dtype of the router's logits, scores and selection.
    `fp32`: At least fp32, from rows and weights in compute's dtype.
    `fp64`: Their products too; Megatron's `moe_router_dtype`. It needs the router in PyTorch. Weights and optimizer
    stay as they are, and experts get their scores in fp32."""
    route_scale: float = 1.0
    """Factor on the selected scores, after normalisation (2.5 in DeepSeek-V3)."""
    input_jitter: float = 0.0
    """Multiply the input of routers in the steps of a run by noise drawn evenly from 1 - this number to 1 + it (Switch
    Transformer, `moe_input_jitter_eps` of Megatron); 0 is none. It is that of a token's place in the batch, the layer
    and the step, whatever the ranks and the microbatches. A typical value is 1e-2."""
    num_groups: int = 1
    """Number of groups of experts in group-limited routing; 1 means no groups."""
    top_k_groups: int = 1
    """Number of groups from which the experts of a token are selected; at most `num_groups`."""
    group_score: Literal["max", "top2_sum", "top_share_sum"] = "top2_sum"
    """The score by which groups are selected.
    `max`: The highest score in the group (DeepSeek-V2).
    `top2_sum`: The sum of the two highest (DeepSeek-V3).
    `top_share_sum`: The sum of the `top_k / top_k_groups` highest, a selected group's share of a token's experts
    (Megatron Core). With 8 experts of 4 groups, as in DeepSeek-V3, these are two."""
    score_on: Literal["activation", "input"] = "activation"
    """The tensor that is multiplied by the routing score.
    `activation`: The activation before the down projection. Equal to multiplying the output, with less memory.
    `input`: The input of the expert (Llama 4)."""
    router_bias: bool = False
    """A learned bias on the router's logits (gpt-oss); not that of `bias_update_speed`, which selects alone."""
    expert_mlp_bias: bool = False
    """Biases on the gate, up and down projections of the routed experts (gpt-oss)."""
    swiglu_limit: float = 0.0
    """Clamp of the pre-activations of routed experts: gates from above, up projections from both sides (7 in gpt-oss);
    0 means none."""
    swiglu_alpha: float = 1.0
    """Factor on the gate inside the sigmoid of routed experts: gate * sigmoid(alpha * gate) (1.702 in gpt-oss)."""
    swiglu_up_offset: float = 0.0
    """Added to the clamped up projection of routed experts (1 in gpt-oss)."""
    aux_loss_coef: float = 0.0
    """Coefficient of the per-sequence load-balancing loss (arXiv:2101.03961, arXiv:2412.19437 section 2.1.2); 0
    disables it. It counts the K best scores of a token, whatever the bias and the groups select, also a bias that
    stays. Typical values are 1e-2 to 1e-4."""
    aux_losses: AuxLosses = field(default_factory=AuxLosses)
    """The coefficients of load-balancing losses, by kind."""
    z_loss_coef: float = 0.0
    """Coefficient of the router z-loss, the mean squared logsumexp of the logits (arXiv:2202.08906); 0 disables it. A
    typical value is 1e-3."""
    bias_update_speed: float = 0.0
    """Step size of the auxiliary-loss-free balancing bias (arXiv:2408.15664), applied once per optimizer step. With 0
    the bias stays: zero, or that of a checkpoint. The bias selects and the scores alone weigh. A typical value is 1e-3
    with sigmoid scores. Those of softmax (Ernie 4.5) are about 1 / num_experts, so smaller steps balance as finely."""
    bias_update: Literal["sign", "quantile"] = "sign"
    """How an optimizer step moves that bias.
    `sign`: By `bias_update_speed`, up for experts with fewer tokens than the mean, down for others.
    `quantile`: To the value with which each expert would have had its share of the tokens of this step, had the others
    stayed (quantile balancing): no speed to tune, nothing to wait for after a change of the scores."""
    bias_ema: float = 0.0
    """Share of the old bias that `quantile` keeps in a step; 0 takes the new one alone."""

    hash_layers: tuple[int, ...] = ()
    """Layers that take the experts of a token from a fixed table by its id, by number: [0, 1, 2] are the first three
    (hash layers, arXiv:2106.04426; `num_hash_layers` of DeepSeek-V4). The learned scores of these experts weigh them.
    The table is drawn from the seed, with equally many token ids for each expert, and saved with the weights. Balancing
    losses, the z-loss and biases leave these layers alone."""
    hash_table: str = ""
    """A .npy file with the table, which a run reads instead of drawing it: integers [vocab_size, top_k] for all of
    `hash_layers`, or [layers, vocab_size, top_k] in their order. Checkpoints have it: a run that loads
    one is refused if the file has another, and "" keeps that of the checkpoint."""

    capacity_factor: float = 0.0
    """Capacity of an expert for tokens of one forward of a rank, over its balanced share: `ceil(tokens * top_k /
    num_experts * capacity_factor)`, as in Megatron (`moe_expert_capacity_factor`). Assignments beyond it are dropped,
    in validation too. 0 drops none, and so do generated texts, which would depend on other prompts and on what is
    cached. What is dropped depends on the tokens that a rank has together, and so on `train.micro_batch_sequences`, cp
    and tp (`drop_over`). It is no bound of memory: `parallel.expert_rank_capacity_factor` is, and drops nothing."""
    drop_policy: Literal["probs", "position"] = "probs"
    """The assignments of an expert that stay within `capacity_factor`.
    `probs`: Those with the highest scores.
    `position`: Those of the first tokens."""
    drop_over: Literal["microbatch", "sequence"] = "microbatch"
    """The tokens that share the capacity of an expert.
    `microbatch`: All tokens that a rank routes together: its part of a microbatch. Megatron's.
    `sequence`: Those of each sequence, so that a run drops the same for any microbatches, dp, ep and pp."""
    pad_to_capacity: bool = False
    """Allocate the slots of `capacity_factor` for each expert, not those of the worst case, so that sizes are static
    without a bound that a step may exceed (Megatron's `moe_pad_expert_input_to_capacity`)."""

    @property
    def aux_coefs(self) -> AuxLosses:
        """The coefficients by kind, with that of `aux_loss_coef`."""
        return replace(self.aux_losses, sequence=self.aux_losses.sequence or self.aux_loss_coef)

    @property
    def moves_bias(self) -> bool:
        """Whether training moves the bias that selects experts."""
        return self.bias_update_speed > 0 or self.bias_update == "quantile"

    @property
    def swiglu(self) -> SwiGLU:
        """The activation of routed experts."""
        return SwiGLU(self.swiglu_limit, self.swiglu_alpha, self.swiglu_up_offset)

    @property
    def unmet_needs_of_fused(self) -> list[str]:
        """Settings that fused experts need in any format and that these are not: rows are gathered inside a GEMM, where
        no score is applied."""
        return [] if self.score_on == "activation" else ['model.moe.score_on = "activation"']


@hashed_once
@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with MoE feed-forward layers."""

    class_: str = "titan_moe.models.transformer:Transformer"
    """The class of the model as `package.module:Class`; a module in the working folder is found too. It is called as
    `Class(model_config, kernels=..., loss_chunk_tokens=...)`; the easiest way is a subclass of the default. Its blocks
    are in `layers`. Its forward takes tokens, labels and document ids (or None), all [B, N], and returns the
    cross entropy summed over the label tokens, those whose label is not -100; a mean is refused, because the trainer
    divides by the label tokens of the whole step. So is a class whose documents see each other although it is given
    document ids. In a pipeline its modules are `embed`, `layers` (an nn.ModuleDict),
    `norm` and `head`, and its forward calls them alone. Routers of its `MoE` layers derive from `TopKRouter`, or
    balance themselves. A dispatcher that it sets is kept with `parallel.dispatcher = "local"` and refused with any
    other. Matrices are initialised from a normal distribution with `init_std`, weights of an `nn.Embedding` with
    `embedding_init_std`, vectors with one, parameters named `bias` with zero, unless the module that owns them defines
    `parameter_kinds`. A run counts its parameters and, by a step without numbers on the meta device, its FLOPs; a
    method `training_flops_per_token(seq_len_tokens)` replaces that step. Where FLOPs are unknown, as of kernels or
    masks of its own, the metrics have neither TFLOP/s nor MFU. Parameters with `requires_grad = False` are frozen. The
    class is code: a run imports and executes it. Nothing else that a run reads is executed but `model.table`, neither
    checkpoints nor data."""
    table: str = ""
    """A function that describes the modules of `model.class`, as `package.module:function`; empty means that
    `titan-moe check` plans for the default class. It takes a `ModelConfig` and a `ParallelConfig`, and returns rows
    (`titan_moe.config.modules.Module`); the easiest way is to add rows to those of
    `titan_moe.config.modules.default_modules`. `titan-moe check` imports and executes it, so its module should import
    no torch."""
    name: str = "custom"
    """The name of the model in logs and reports."""
    vocab_size: int = 256
    """Rows of the embedding and of the output head; at least the tokenizer's vocabulary."""
    num_layers: int = 2
    """Transformer blocks."""
    num_dense_layers: int = 0
    """Leading blocks with a dense feed-forward layer instead of experts (1 in DeepSeek-V2-Lite, 3 in DeepSeek-V3)."""
    dense_layers: tuple[int, ...] = ()
    """More blocks with a dense feed-forward layer, by number: [0, 5] are the first and the sixth (`mlp_only_layers` in
    Qwen3-MoE)."""
    moe_every: int = 1
    """Of the blocks after the leading dense ones, those with a number that n divides, counted from 1, have experts, and
    the others a dense feed-forward layer (`decoder_sparse_step` in Qwen3-MoE, `interleave_moe_layer_step` in Llama 4,
    `moe_layer_interval` in Ernie 4.5); 1 means all."""
    hidden_size: int = 128
    """Width of the residual stream (D)."""
    ffn_hidden_size: int = 0
    """Hidden width of the dense feed-forward layers."""
    norm: Literal["rms", "layer"] = "rms"
    """The norms before attention, feed-forward layers and the head. Those of queries, keys and latents are RMSNorms in
    any case.
    `rms`: RMSNorm (arXiv:1910.07467).
    `layer`: LayerNorm with bias (arXiv:1607.06450; used by Phi-3.5-MoE)."""
    norm_placement: Literal["before", "both", "after_moe"] = "before"
    """The places of norms in a block, besides that before the head.
    `before`: Before attention and feed-forward layers.
    `both`: Also on their results, before these are added to the residual stream (AFMoE, Gemma 3).
    `after_moe`: Before both, and on the results of MoE layers (A.X-K1)."""
    norm_eps: float = 1e-6
    """Epsilon of every norm but those of `model.attention.latent_norm_eps`."""
    embeddings_are_tied: bool = False
    """Share the weight of embedding and output head."""
    embedding_multiplier: float = 1.0
    """Factor on the output of the embedding; sqrt(hidden_size) in Gemma, "Scaled Embed" in arXiv:2312.16903. It gives
    tied embeddings the size that `embedding_init_std` gives untied ones."""
    residual_multiplier: float = 1.0
    """Factor on the outputs of attention and feed-forward layers before they are added to the residual stream (Granite:
    0.22)."""
    head_bias: bool = False
    """A learned bias on the logits, one number a word (`lm_head_bias`; Phi-3.5-MoE)."""
    logits_scaling: float = 1.0
    """Divisor of the logits (Granite: 6), before `head_bias` is added. Inputs of the head are divided, which are fewer
    numbers."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; divided by sqrt(2 * num_layers) for the output projections of residual
    branches."""
    embedding_init_std: float = 1.0
    """Standard deviation of the initial embeddings (arXiv:2312.16903). The first attention outputs are averages, nearly
    equal for all tokens; beside small embeddings they dominate the residual stream, and routers send all tokens to the
    same experts. Tied embeddings are initialised with `init_std`, because they are the weight of the head too; another
    value is refused."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """The attention layer."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """The mixture-of-experts layer."""
    mtp: MTPConfig = field(default_factory=MTPConfig)
    """Multi-token prediction."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    """Low-rank adapters beside frozen weights."""

    @property
    def unmet_needs_of_triton(self) -> dict[str, str]:
        """Operation of `[perf.override]` -> the setting that its Triton kernel needs and that is not this model's."""
        needs = {"head": "model.head_bias = false"} if self.head_bias else {}
        if self.moe.num_experts and self.moe.router_dtype != "fp32":
            needs["router"] = 'model.moe.router_dtype = "fp32"'
        if self.moe.score_fn == "sparsemixer":
            needs["router"] = 'another model.moe.score_fn than "sparsemixer"'
        return needs

    @property
    def expert_width(self) -> int:
        """Width of the rows that routed experts read and write."""
        return self.moe.latent_size or self.hidden_size

    @property
    def of_hash_layers(self) -> "ModelConfig":
        """The config of the routers that take experts by token: nothing balances them."""
        off: Any = {"aux_loss_coef": 0.0, "aux_losses": AuxLosses(), "z_loss_coef": 0.0}
        off |= {"bias_update_speed": 0.0, "bias_update": "sign", "bias_ema": 0.0}
        return replace(self, moe=replace(self.moe, **off))

    @cached_property
    def num_blocks(self) -> int:
        """All blocks: the layers, and behind them those of multi-token prediction."""
        return self.num_layers + self.mtp.num_layers

    @property
    def mtp_layers(self) -> range:
        """The blocks of multi-token prediction."""
        return range(self.num_layers, self.num_blocks)

    @cached_property
    def layers_by_kind(self) -> tuple[Layers, Layers]:
        """The blocks with a dense feed-forward layer, and those with experts. All that asks for a layer's kind reads
        it. Blocks of multi-token prediction have experts if the model has."""
        num_dense = self.num_dense_layers if self.moe.num_experts else self.num_layers
        dense, moe = layers_by_kind(self.num_layers, num_dense, tuple(self.dense_layers), self.moe_every)
        if not self.mtp.num_layers:
            return dense, moe
        if self.moe.num_experts:
            return dense, consecutive([*moe, *self.mtp_layers])
        return consecutive([*dense, *self.mtp_layers]), moe

    @property
    def moe_layers(self) -> Layers:
        """The MoE blocks."""
        return self.layers_by_kind[1]

    @property
    def num_moe_layers(self) -> int:
        """The number of MoE blocks."""
        return len(self.moe_layers)

    def with_layers(self, layers: Layers | list[int]) -> "ModelConfig":
        """The model with these of its layers, in this order. Each has the kind that it had. The fewest fields say
        it, so two models with all of their layers are equal if the kinds of these are. Blocks of multi-token
        prediction are last, and all or none."""
        moe_layers, of_model = set(self.moe_layers), [layer for layer in layers if layer < self.num_layers]
        dense = [i for i, layer in enumerate(of_model) if layer not in moe_layers]
        num_leading = next((i for i, layer in enumerate(dense) if i != layer), len(dense))
        others = tuple(dense[num_leading:])
        mtp = self.mtp if len(of_model) < len(layers) else replace(self.mtp, num_depths=0)
        own: Any = {"num_layers": len(of_model), "dense_layers": others, "mtp": mtp}
        if self.moe.hash_layers:
            by_token = tuple(i for i, layer in enumerate(of_model) if layer in self.moe.hash_layers)
            own["moe"] = replace(self.moe, hash_layers=by_token)
        kinds = replace(self, num_dense_layers=num_leading, moe_every=1, **own)
        with_experts = [layer for layer in kinds.moe_layers if layer < kinds.num_layers]
        if others and len(with_experts) > 1:
            step = with_experts[1] - with_experts[0]
            for leading in (0, num_leading):
                regular = replace(kinds, num_dense_layers=leading, dense_layers=(), moe_every=step)
                if regular.layers_by_kind == kinds.layers_by_kind:
                    return regular
        return kinds
