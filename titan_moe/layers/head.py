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

    Logits are divided by `logits_scaling`, and a bias is added then. Compile replaces `cross_entropy` by the same
    function with compiled parts.
    """

    parameter_kinds = {"weight": ParameterKind.HEAD, "bias": ParameterKind.BIAS}

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        loss_chunk_tokens: int,
        backend: Backend = "torch",
        *,
        logits_scaling: float = 1.0,
        bias: bool = False,
    ) -> None:
        super().__init__(hidden_size, vocab_size, bias=bias)
        self.loss_chunk_tokens, self.logits_scaling = loss_chunk_tokens, logits_scaling
        self.cross_entropy: CrossEntropy = CROSS_ENTROPY[backend]

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """[..., D] -> logits [..., V], or with labels int64 [...] their summed loss: a scalar, fp32 or wider."""
        x = self.scaled(x)
        if labels is None:
            return super().forward(x)
        operands = x.flatten(0, -2), self.weight, labels.flatten(), self.loss_chunk_tokens
        return self.cross_entropy(*operands, **self.added)

    @property
    def added(self) -> dict[str, Tensor]:
        """The bias, as losses take it; nothing without one."""
        return {} if self.bias is None else {"bias_V": self.bias}

    def scaled(self, x: Tensor) -> Tensor:
        """What is multiplied with the weight; it has fewer numbers than the logits, and no loss knows of the scale."""
        return x if self.logits_scaling == 1.0 else x / self.logits_scaling
