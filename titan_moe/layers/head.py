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

    Compile replaces `cross_entropy` by the same function with compiled parts.
    """

    parameter_kinds = {"weight": ParameterKind.HEAD}

    def __init__(self, hidden_size: int, vocab_size: int, loss_chunk_tokens: int, backend: Backend = "torch") -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.loss_chunk_tokens = loss_chunk_tokens
        self.cross_entropy: CrossEntropy = CROSS_ENTROPY[backend]

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """[..., D] -> logits [..., V], or with labels int64 [...] their summed loss: a scalar, fp32 or wider."""
        if labels is None:
            return super().forward(x)
        return self.cross_entropy(x.flatten(0, -2), self.weight, labels.flatten(), self.loss_chunk_tokens)
