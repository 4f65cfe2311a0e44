"""Multi-token prediction: a block of a depth, what it reads of a sequence, and its loss.

Depths are sequential (arXiv:2412.19437, section 2.2, eq. 21 to 25). At token i, depth k reads the hidden state of depth
k - 1 at i and the embedding of token i + k, and predicts token i + k + 1:

    h'_i = M [norm(embedding of token i + k) ; norm(h_i of depth k - 1)]

The order of the two halves is that of the weights that DeepSeek-V3 and GLM-4.5 publish. h of depth 0 is behind the
model's last norm, h of depth k behind a norm of that depth; the head reads either.

B batch · N sequence · D model width · K depths
"""

from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.config.model import ModelConfig
from titan_moe.kernels.loss.cross_entropy import IGNORE_LABEL
from titan_moe.layers.attention import Context
from titan_moe.layers.block import Block
from titan_moe.layers.norm import NORMS
from titan_moe.layers.wide_buffers import WideBuffers

FILLER = 0
"""The token that is read beyond the end of a document, where there is no label."""


class LossSums(WideBuffers):
    """The losses of a step's backwards by depth, summed over their label tokens, and the numbers of these. Both have
    the scale of the main loss."""

    wide_buffers = ("sums_K2",)
    sums_K2: Tensor

    def __init__(self, num_depths: int) -> None:
        super().__init__()
        self.register_buffer("sums_K2", torch.zeros(num_depths, 2, dtype=torch.float64), persistent=False)

    def reset_buffers(self) -> None:
        """Zero the sums."""
        self.sums_K2.zero_()


class MTPBlock(Block):
    """A block behind a projection that joins the hidden state of a token with the embedding of a later one."""

    parts = {**Block.parts, "forward": ("join", "front", "feed_forward", "final_norm")}
    parts["join"] = ("embedding_norm", "hidden_norm", "eh_proj")

    def __init__(self, config: ModelConfig, *, is_dense: bool, kernels: Kernels = DEFAULT_KERNELS) -> None:
        super().__init__(config, is_dense=is_dense, kernels=kernels)
        width, norm = config.hidden_size, NORMS[config.norm]
        self.embedding_norm = norm(width, config.norm_eps)
        self.hidden_norm = norm(width, config.norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.final_norm = norm(width, config.norm_eps)
        self.losses = LossSums(config.mtp.num_uses)

    def join(self, h_BND: Tensor, embedded_BND: Tensor) -> Tensor:
        """The input of the block, [B, N, D]."""
        halves = self.embedding_norm(embedded_BND), self.hidden_norm(h_BND)
        joined_BND: Tensor = self.eh_proj(torch.cat(halves, dim=-1))
        return joined_BND

    def forward(self, h_BND: Tensor, context: Context, embedded_BND: Tensor) -> Tensor:  # type: ignore[override]
        """Hidden states of the depth before, and the embeddings of the tokens ahead: -> what the head reads."""
        normed_BND: Tensor = self.final_norm(super().forward(self.join(h_BND, embedded_BND), context))
        return normed_BND


def loss_sums_of(model: nn.Module) -> list[LossSums]:
    """Those of a model, or of a part of one, by depth."""
    return [module for module in model.modules() if isinstance(module, LossSums)]


def shifted(
    tokens_BN: Tensor, labels_BN: Tensor, document_ids_BN: Tensor | None, num_places: int
) -> tuple[Tensor, Tensor]:
    """The tokens so many places ahead, and their labels. Beyond the end of a sequence, or of a document, there is no
    label. All are of whole sequences."""
    ahead_BN = torch.full_like(tokens_BN, FILLER)
    labels_ahead_BN = torch.full_like(labels_BN, IGNORE_LABEL)
    if num_places < tokens_BN.shape[1]:
        ahead_BN[:, :-num_places] = tokens_BN[:, num_places:]
        labels_ahead_BN[:, :-num_places] = labels_BN[:, num_places:]
    if document_ids_BN is not None and num_places < tokens_BN.shape[1]:
        leaves_BN = document_ids_BN[:, num_places:] != document_ids_BN[:, :-num_places]
        ahead_BN[:, :-num_places].masked_fill_(leaves_BN, FILLER)
        labels_ahead_BN[:, :-num_places].masked_fill_(leaves_BN, IGNORE_LABEL)
    return ahead_BN, labels_ahead_BN


class _AttachLoss(torch.autograd.Function):
    """Identity on the main loss. Its backward starts the gradient of another loss, and adds that loss to the sums of a
    step: exactly once a microbatch, and never in validation."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, loss_ahead: Tensor, num_labels: Tensor, sums_2: Tensor, weight: float
    ) -> Tensor:
        ctx.save_for_backward(loss_ahead.detach(), num_labels)
        ctx.sums_2, ctx.weight = sums_2, weight  # not a saved tensor: each backward changes it in place
        return loss.clone()  # not a view, which FSDP2 warns of

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        loss_ahead, num_labels = ctx.saved_tensors
        both_2 = torch.stack([loss_ahead.double(), num_labels.double()])
        ctx.sums_2.add_(both_2 * grad.double())
        return grad, grad * ctx.weight, None, None, None


def attach(loss: Tensor, loss_ahead: Tensor, labels_BN: Tensor, sums_2: Tensor, weight: float) -> Tensor:
    """Return a main loss unchanged, whose backward computes the gradients of another loss too, times a weight.

    Both are sums over label tokens. `labels_BN` are those of the other one, `sums_2` what its backward adds to.
    """
    num_labels = (labels_BN != IGNORE_LABEL).sum()
    attached: Tensor = _AttachLoss.apply(loss, loss_ahead, num_labels, sums_2, weight)
    return attached
