"""The output head and its loss.

D model width · V vocabulary
"""

from torch import Tensor, nn

from titan_moe.config.kernels import Backend
from titan_moe.kernels.choose import CROSS_ENTROPY
from titan_moe.kernels.loss.cross_entropy import CrossEntropy
from titan_moe.parameters import ParameterKind


class LanguageModelHead(nn.Linear):
    """Logits or, with labels, their summed cross entropy without ever holding all logits.

    Logits are divided by `logits_scaling`. Compile replaces `cross_entropy` by the same function with compiled parts.
    """

    parameter_kinds = {"weight": ParameterKind.HEAD}

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        loss_chunk_tokens: int,
        backend: Backend = "torch",
        *,
        logits_scaling: float = 1.0,
    ) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.loss_chunk_tokens, self.logits_scaling = loss_chunk_tokens, logits_scaling
        self.cross_entropy: CrossEntropy = CROSS_ENTROPY[backend]

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """[..., D] -> logits [..., V], or with labels int64 [...] their summed loss: a scalar, fp32 or wider."""
        x = self.scaled(x)
        if labels is None:
            return super().forward(x)
        return self.cross_entropy(x.flatten(0, -2), self.weight, labels.flatten(), self.loss_chunk_tokens)

    def scaled(self, x: Tensor) -> Tensor:
        """What is multiplied with the weight; it has fewer numbers than the logits, and no loss knows of the scale."""
        return x if self.logits_scaling == 1.0 else x / self.logits_scaling
