"""The mixture-of-experts layer (arXiv:1701.06538), dropless but for `capacity_factor`.

B batch · N sequence · T tokens (B·N) · D model width · L latent width · K choices a token
"""

from typing import overload

import torch
from torch import Tensor, nn

from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.rules.layers import check_moe
from titan_moe.dispatch.base import Padding, TokenDispatcher
from titan_moe.dispatch.local import LocalDispatcher
from titan_moe.kernels.choose import PERMUTE, choose_expert_mlp
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.hash_router import HashRouter
from titan_moe.layers.init import init_weights
from titan_moe.layers.mlp import MLP, GatedMLP, NoMLP, add_shared
from titan_moe.layers.router import TopKRouter


class MoE(nn.Module):
    """Send each token to its top-k experts and add their weighted results, and those of shared experts.

    An absent part is an object without effect: `nn.Identity` for no latent, `NoMLP` for no shared experts,
    `LocalDispatcher` for no expert parallelism. With experts on other ranks, `dispatcher` is another one.

    The balancing losses of the config act through the gradient of the scores: no loss is returned. They suit a main
    loss that is a mean over tokens; `titan_moe.scale_balancing_losses` is for any other scale.

    Example:
        >>> import torch
        >>> from titan_moe.config.model import MoEConfig
        >>> layer = MoE(64, MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=32))
        >>> layer(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
    """

    residual_ends = ("latent_up.weight",)

    @overload
    def __init__(self, config: int, moe: MoEConfig, *, kernels: Kernels = ..., routes_by_token: bool = ...) -> None: ...

    @overload
    def __init__(self, config: ModelConfig, *, kernels: Kernels = ..., routes_by_token: bool = ...) -> None: ...

    def __init__(
        self,
        config: ModelConfig | int,
        moe: MoEConfig | None = None,
        *,
        kernels: Kernels = DEFAULT_KERNELS,
        routes_by_token: bool = False,
    ) -> None:
        """Of a width and the config of a layer, or of the config of a model. With `routes_by_token` it is one of
        `hash_layers`.

        Raises: TypeError for anything else, and ValueError for a config that no recipe could have.
        """
        super().__init__()
        config = _config_of(config, moe)
        check_moe(config, kernels)
        self.config = config
        moe, width = config.moe, config.expert_width
        self.router = (HashRouter if routes_by_token else TopKRouter)(config, kernels)
        self.dispatcher: TokenDispatcher = LocalDispatcher(moe.num_experts, PERMUTE[kernels.permute])
        if moe.pad_to_capacity:
            self.dispatcher.padding = Padding(moe.num_experts, moe.top_k, moe.capacity_factor)
        mlp = choose_expert_mlp(kernels.experts, moe.score_on, moe.expert_mlp_bias, moe.swiglu)
        self.experts = GroupedExperts(moe.num_experts, width, moe.ffn_hidden_size, mlp, has_bias=moe.expert_mlp_bias)
        self.shared_experts = _shared_experts(config, kernels)
        self.latent_down = nn.Linear(config.hidden_size, width, bias=False) if moe.latent_size else nn.Identity()
        self.latent_up = nn.Linear(width, config.hidden_size, bias=False) if moe.latent_size else nn.Identity()
        self.reset_parameters()

    def extra_repr(self) -> str:
        return f"{self.config.hidden_size} wide, dispatcher={type(self.dispatcher).__name__}"

    def reset_parameters(self) -> None:
        """Draw initial weights (`init_weights`, with `init_std` and `num_layers` of the config) and reset all buffers.

        The seed comes from torch's default generator. Sharded parameters become parts of the same matrices if all ranks
        have the same seed. On the meta device nothing is drawn: call this again after `to_empty`.
        """
        if not any(parameter.is_meta for parameter in self.parameters()):
            seed = int(torch.randint(2**62, (), device="cpu"))
            init_weights(self, seed, self.config.init_std, self.config.num_layers)

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None, tokens_BN: Tensor | None = None) -> Tensor:
        """[B, N, D] -> [B, N, D]. Tokens that are not valid (bool, false for padding) have no routed experts, and are
        in no count and no balancing loss. `tokens_BN` are their ids, for a layer that routes by them: int32 or int64,
        below the size of the vocabulary also for padding."""
        given = valid_BN, tokens_BN
        num_given = 2 if tokens_BN is not None else int(valid_BN is not None)
        topk_scores_TK, topk_ids_TK = self.router(x_BND, *given[:num_given])  # [B, N]: for balance per sequence
        x_TD = x_BND.flatten(0, 1)
        routed = self.dispatcher.dispatch(self.latent_down(x_TD), topk_ids_TK, topk_scores_TK)
        y_TL = self.dispatcher.combine(self.experts(routed), routed)
        return add_shared(self.latent_up(y_TL), self.shared_experts(x_TD)).unflatten(0, x_BND.shape[:2])


def _config_of(config: ModelConfig | int, moe: MoEConfig | None) -> ModelConfig:
    if isinstance(config, int) and not isinstance(config, bool) and isinstance(moe, MoEConfig):
        return ModelConfig(hidden_size=config, moe=moe)
    if isinstance(config, ModelConfig) and moe is None:
        return config
    given = ", ".join(type(value).__name__ for value in (config, moe) if value is not None)
    raise TypeError(
        "MoE takes a width and a MoEConfig, as in MoE(64, MoEConfig(num_experts=8)), or a ModelConfig, "
        f"and got {given}; kernels are given by name, as in MoE(config, kernels=Kernels())"
    )


def _shared_experts(config: ModelConfig, kernels: Kernels) -> nn.Module:
    moe = config.moe
    if not moe.shared_ffn_hidden_size:
        return NoMLP()
    shared = GatedMLP if moe.shared_expert_gate else MLP
    return shared(config.hidden_size, moe.shared_ffn_hidden_size, kernels)
