"""A router that takes the experts of a token from a table of the vocabulary (hash layers, arXiv:2106.04426).

B batch · N sequence · V vocabulary · E experts · K choices a token
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from titan_moe.config.kernels import DEFAULT_KERNELS, Kernels
from titan_moe.config.model import ModelConfig
from titan_moe.layers.router import TopKRouter
from titan_moe.parameters import seed_of


class HashRouter(TopKRouter):
    """Take the experts of a token by its id; weigh them by the learned scores, as DeepSeek-V4 does.

    The table is a buffer that training does not change, and a part of checkpoints. No balancing loss and no bias
    applies. A forced load comes before the table.
    """

    token_experts_VK: Tensor
    """int32, K different experts of each token id."""

    def __init__(self, config: ModelConfig, kernels: Kernels = DEFAULT_KERNELS) -> None:
        super().__init__(config.of_hash_layers, kernels)
        size = config.vocab_size, config.moe.top_k
        self.register_buffer("token_experts_VK", torch.zeros(size, dtype=torch.int32))
        self.reset_buffers()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, by token id"

    def reset_buffers(self) -> None:
        super().reset_buffers()
        self.draw_buffers("0")

    def draw_buffers(self, key: str) -> None:
        """Draw the table from a seed of its own, so that it does not depend on the layout."""
        if not self.token_experts_VK.is_meta:
            num_tokens, top_k = self.token_experts_VK.shape
            self.token_experts_VK.copy_(balanced_table(num_tokens, top_k, len(self.expert_bias_E), key))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Raises: ValueError for a table that names experts which the layer has not."""
        given = state_dict.get(f"{prefix}token_experts_VK")
        if given is not None and not given.is_meta and given.shape == self.token_experts_VK.shape:
            check_table(given, len(self.expert_bias_E), f"{prefix}token_experts_VK")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _given_ids(self, logits_BNE: Tensor, tokens_BN: Tensor | None) -> Tensor:
        """The experts of these tokens, int64 [B, N, K]. Padding needs an id of the vocabulary as well: an id below 0 is
        not refused, which would read it on the host, and counts from the end of the table.

        Raises: ValueError without tokens, or for others than int32 or int64 ids of the hidden states.
        """
        shape, dtypes = logits_BNE.shape[:2], (torch.int32, torch.int64)
        if tokens_BN is None or tokens_BN.dtype not in dtypes or tokens_BN.shape != shape:
            got = "none" if tokens_BN is None else f"{tokens_BN.dtype} {list(tokens_BN.shape)}"
            raise ValueError(
                f"a layer of model.moe.hash_layers routes by token ids {list(shape)}, int32 or int64, and got {got}; "
                "pass them as tokens_BN, and to a part of a model without the embedding as read_BN"
            )
        return self.token_experts_VK[tokens_BN].long()


def balanced_table(num_tokens: int, top_k: int, num_experts: int, key: str) -> Tensor:
    """int32 [V, K]: each expert has as many token ids as any other, up to the last ring.

    A token takes K neighbours of a shuffled ring of experts, which are different ones; so many tokens share a ring that
    each expert of it is taken equally often.
    """
    rounds = math.lcm(num_experts, top_k) // num_experts
    per_ring = rounds * num_experts // top_k
    generator = torch.Generator("cpu").manual_seed(seed_of(f"{key}/token_experts"))
    num_rings = -(-num_tokens // per_ring)
    rings_RE = torch.rand(num_rings, num_experts, generator=generator, device="cpu").argsort(dim=-1)
    rows_VK = rings_RE.repeat(1, rounds).view(-1, top_k)[:num_tokens]
    order_V = torch.randperm(num_tokens, generator=generator, device="cpu")
    return rows_VK[order_V].int()


def check_table(table_VK: Tensor, num_experts: int, name: str) -> None:
    """Raises: ValueError for anything but K different experts of each token id."""
    if table_VK.is_floating_point():
        raise ValueError(f"{name} has the experts of token ids, which are integers, and got {table_VK.dtype}")
    sorted_VK = table_VK.long().sort(dim=-1).values
    is_good_V = (sorted_VK[:, 0] >= 0) & (sorted_VK[:, -1] < num_experts)
    is_good_V &= (sorted_VK[:, 1:] != sorted_VK[:, :-1]).all(-1)
    if not bool(is_good_V.all()):
        token = int((~is_good_V).nonzero()[0, 0])
        raise ValueError(
            f"{name} needs {table_VK.shape[1]} different experts below {num_experts} for each token id, and has "
            f"{table_VK[token].tolist()} for token {token}"
        )


def fill_tables(parts: Iterable[nn.Module], layers: Sequence[int], path: str) -> None:
    """Give these layers of a model, or of this rank's stages of one, the tables of a .npy file: integers [V, K] for
    all, or [layers, V, K].

    Raises: ValueError for a file that cannot be read, or is of other tables.
    """
    for _, router, table_VK in _tables_in(parts, layers, path):
        router.token_experts_VK.copy_(table_VK)


def loaded_otherwise(parts: Iterable[nn.Module], layers: Sequence[int], path: str) -> str:
    """What is wrong if a checkpoint has given these layers other tables than those of the file; empty if it has not.

    Raises: ValueError as `fill_tables`.
    """
    for name, router, table_VK in _tables_in(parts, layers, path):
        if not torch.equal(router.token_experts_VK.cpu(), table_VK.int()):
            return (
                f"model.moe.hash_table = {path!r} has another table for {name} than the checkpoint, whose weights were "
                'trained with its own; set it to "", which keeps that of the checkpoint'
            )
    return ""


def _tables_in(
    parts: Iterable[nn.Module], layers: Sequence[int], path: str
) -> Iterator[tuple[str, HashRouter, Tensor]]:
    """Names, routers and the tables that a file has for them."""
    try:
        array = np.load(Path(path).expanduser(), mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it is an archive of arrays, and a single one is needed")
    except (OSError, ValueError) as error:
        raise ValueError(
            f'model.moe.hash_table = {path!r} cannot be read: {error}; write it with numpy.save, or set it to "", '
            "which draws tables, or keeps those of a checkpoint"
        ) from error
    for part in parts:
        for name, router in part.named_modules():
            if not isinstance(router, HashRouter):
                continue
            shape = tuple(router.token_experts_VK.shape)
            if array.shape not in (shape, (len(layers), *shape)):
                shapes = f"{list(shape)} or {[len(layers), *shape]}"
                raise ValueError(f"model.moe.hash_table = {path!r} has {list(array.shape)}; it must be {shapes}")
            place = layers.index(int(name.split(".")[1])) if array.ndim == 3 else ...
            table_VK = torch.from_numpy(np.array(array[place]))
            check_table(table_VK, len(router.expert_bias_E), f"model.moe.hash_table = {path!r}")
            yield name, router, table_VK


def routes_by_token(model: nn.Module) -> bool:
    """Whether a model, or a part of one, has layers that read the ids of tokens."""
    return any(isinstance(module, HashRouter) for module in model.modules())
