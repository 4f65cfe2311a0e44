"""The output head and its loss.

T tokens · D model width · V vocabulary
"""

from torch import Tensor, nn

from titan_moe.kernels.cross_entropy import LossAndGradient, linear_cross_entropy, loss_and_dlogits


class LanguageModelHead(nn.Linear):
    """Logits, or the summed cross entropy without ever holding all logits.

    `softmax` is the part between the head's GEMMs; a compiled one may sit there.
    """

    def __init__(self, hidden_size: int, vocab_size: int, loss_chunk_tokens: int) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.loss_chunk_tokens = loss_chunk_tokens
        self.softmax: LossAndGradient = loss_and_dlogits

    def loss(self, x_TD: Tensor, labels_T: Tensor) -> Tensor:
        """Loss summed over labelled tokens: [T, D], int64 [T] -> scalar, fp32 or wider."""
        return linear_cross_entropy(x_TD, self.weight, labels_T, self.loss_chunk_tokens, self.softmax)
