"""Experts from a dense checkpoint: `[checkpoint.upcycle]`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class UpcycleConfig:
    """Begin a MoE model with the weights of a dense one (sparse upcycling, arXiv:2212.05055). `checkpoint.load_from` is
    its Hugging Face checkpoint, of Qwen3, Llama or Mistral. Routers are drawn; all else, and layers that `[model]`
    keeps dense, is as it was. Before the first update the logits are those of the dense model, but for what
    `noise_std` changes and `model.moe.capacity_factor` drops. `titan-moe recipe FOLDER --upcycle 8` writes such a
    recipe."""

    granularity: int = 0
    """Pieces of equal hidden width that each dense MLP is cut into (G; Megatron's `moe_upcycling_granularity`,
    arXiv:2410.07524). Expert e is a copy of piece `e % G`. 1 copies whole MLPs; 0 loads no dense checkpoint. The
    hidden width of the dense MLP is G times `model.moe.ffn_hidden_size`, and `model.moe.shared_ffn_hidden_size` more,
    whose units become the shared experts. The G experts from a multiple of G on are a virtual group: their rows of the
    router are equal at first, so the K experts of a token, a multiple of G, are every piece equally often. With
    weights that sum to `model.moe.route_scale`, down projections are multiplied by `G / route_scale`."""
    noise_std: float = 0.0
    """Standard deviation of normal noise on the weights of routed experts, so that copies differ from the start; 0 adds
    none, and routers alone tell copies apart."""


NO_UPCYCLING = UpcycleConfig()
