"""The output head and its loss.

T tokens · D model width · V vocabulary
"""

from torch import Tensor, nn

from titan_moe.config.kernels import Backend
from titan_moe.kernels.loss.cross_entropy import CrossEntropy, choose_cross_entropy


class LanguageModelHead(nn.Linear):
    """Logits, or the summed cross entropy without ever holding all logits.

    `cross_entropy` is the loss as `backend` makes it; the same with compiled parts may sit there.
    """

    def __init__(self, hidden_size: int, vocab_size: int, loss_chunk_tokens: int, backend: Backend = "torch") -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.loss_chunk_tokens = loss_chunk_tokens
        self.cross_entropy: CrossEntropy = choose_cross_entropy(backend)

    def loss(self, x_TD: Tensor, labels_T: Tensor) -> Tensor:
        """Loss summed over labelled tokens: [T, D], int64 [T] -> scalar, fp32 or wider."""
        return self.cross_entropy(x_TD, self.weight, labels_T, self.loss_chunk_tokens)
