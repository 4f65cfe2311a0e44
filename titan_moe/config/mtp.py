"""Multi-token prediction: `[model.mtp]`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction (arXiv:2404.19737, in sequence as in arXiv:2412.19437 section 2.2). Depth k is one more
    block, behind those of the model. From the hidden state of depth k - 1 at a token, and the embedding of the token k
    places ahead, it predicts the token behind that one. Embedding and head are those of the model. The hidden state of
    depth 0 is what the head reads, behind the last norm. No depth looks over the end of a document. The last k tokens
    before it have no label at depth k and read token 0; routers send and count them as all others, as in Megatron.
    Validation and generate leave it out."""

    num_depths: int = 0
    """Tokens that are predicted beyond the next one (D); 0 means none. DeepSeek-V3 and GLM-4.5 have 1
    (`num_nextn_predict_layers`). Blocks of MTP are numbered behind the others. They have experts if the model has."""
    loss_weight: float = 0.1
    """Factor on the loss of MTP, a mean over depths, each over all label tokens of the step. DeepSeek-V3 has 0.3
    for 10T tokens, then 0.1. Balancing losses of its routers have their own coefficients."""
    repeats_layer: bool = False
    """Apply one block at all depths, instead of one each."""

    @property
    def num_layers(self) -> int:
        """The number of blocks."""
        return min(self.num_depths, 1) if self.repeats_layer else max(self.num_depths, 0)

    @property
    def num_uses(self) -> int:
        """How often each block is applied."""
        return self.num_depths if self.repeats_layer else min(self.num_depths, 1)

    def layer_of(self, depth: int) -> int:
        """Which of its blocks a depth applies; depths count from 1, blocks from 0."""
        return 0 if self.repeats_layer else depth - 1
