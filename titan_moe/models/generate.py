"""Generate text with a model, token by token.

B batch · N tokens so far · V vocabulary
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def generate(
    next_logits: Callable[[Tensor], Tensor],
    tokens_BN: Tensor,
    num_tokens: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue each row: [B, N] -> [B, N + num_tokens], with `next_logits` of all tokens so far for every token.

    Tokens are sampled from the logits [B, V] divided by `temperature`, with a `generator` on the model's device; at 0
    the likeliest is taken.
    """
    for _ in range(num_tokens):
        next_B1 = _choose(next_logits(tokens_BN), temperature, generator)
        tokens_BN = torch.cat([tokens_BN, next_B1], dim=1)
    return tokens_BN


def next_logits(model: Callable[[Tensor], Tensor], tokens_BN: Tensor, length_multiple: int) -> Tensor:
    """Logits [B, V] of the tokens that continue each row, of a model that takes multiples of a length."""
    length = tokens_BN.shape[1]
    padded_BN = F.pad(tokens_BN, (0, -length % length_multiple))  # no token attends to a later one
    return model(padded_BN)[:, length - 1]


def _choose(logits_BV: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0.0:
        return logits_BV.argmax(-1, keepdim=True)
    wide = torch.promote_types(logits_BV.dtype, torch.float32)
    return torch.multinomial((logits_BV.to(wide) / temperature).softmax(-1), 1, generator=generator)
