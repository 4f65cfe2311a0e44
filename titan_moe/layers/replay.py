"""Record the experts of every MoE layer, and replay given ones: what reinforcement learning needs of a router.

B batch · N sequence · n tokens of this rank · L layers · K choices a token
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from titan_moe.config.model import ModelConfig
from titan_moe.layers.choice import RecordedChoice, routing_by
from titan_moe.layers.router import TopKRouter

GivenIds: TypeAlias = Tensor | np.ndarray | str | Path | Sequence[Any] | Callable[[int], Any]
"""Experts of a batch, as `RoutingReplay.set` takes them."""


class RoutingReplay:
    """The experts of each token of a batch in every layer: recorded in a forward, or given and replayed.

    A policy that is trained on the tokens of a rollout engine gets other experts for some tokens than the engine chose,
    because its scores differ in their last bits. Replaying the engine's ids removes this difference (rollout routing
    replay, arXiv:2510.11370): they replace the selection, and weights, losses and gradients are those of the router's
    own scores of these experts. Recorded ids of one forward may be replayed in the next (arXiv:2507.18071).

    Ids are [B, N, L, K] with L the layers of the model, -1 in dense ones, as vLLM and SGLang return them for a sequence
    (`routed_experts`, [N - 1, L, K]). A token with -1 in a layer takes what its router chooses, and this is recorded.

    The buffers never move, so a CUDA graph of the forward may be replayed with other ids. A forward that is repeated
    for backward routes as the first did. Each rank has the tokens of its own forward: of its part of the sequences
    with context parallelism; with tensor parallelism `set` takes the ids of all tokens of the forward, and `topk_ids`
    are those of this rank's routers. `Batch.topk_ids_MBNLK` does the same for the steps of a run.

    Example:
        >>> import torch
        >>> from titan_moe import ModelConfig, MoEConfig, RoutingReplay, Transformer
        >>> moe = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=32)
        >>> model = Transformer(ModelConfig(vocab_size=100, hidden_size=32, num_layers=2, moe=moe))
        >>> tokens, labels = torch.randint(100, (2, 4, 16)).unbind()
        >>> replay = RoutingReplay(model, num_sequences=4, num_tokens=16)
        >>> with replay:
        ...     loss = model(tokens, labels)  # records
        >>> ids = replay.topk_ids.clone()  # [4, 16, 2, 2]
        >>> replay.set(list(ids[:, :15]))  # as of an engine, a sequence each: none for the last token
        >>> with replay:
        ...     again = model(tokens, labels)
        >>> bool(loss == again)
        True
    """

    def __init__(self, model: nn.Module, num_sequences: int, num_tokens: int) -> None:
        """For forwards of `num_tokens` tokens of each of `num_sequences`. The model may be sharded or compiled.

        Raises: ValueError for a model without routers, or tokens that ranks cannot share.
        """
        self.routers, self.num_layers = routers_of(model)
        if not self.routers:
            raise ValueError(f"{type(model).__name__} has no TopKRouter; RoutingReplay is for models with MoE layers")
        first = next(iter(self.routers.values()))
        num_ranks = getattr(model, "num_sequence_ranks", 1) // getattr(model, "num_context_ranks", 1)
        if num_tokens % num_ranks:
            raise ValueError(f"num_tokens = {num_tokens} is no multiple of parallel.tp = {num_ranks}")
        begin = getattr(model, "tensor_rank", 0) * num_tokens // num_ranks
        self.own = slice(begin, begin + num_tokens // num_ranks)
        self.num_experts, self.shape = len(first.expert_bias_E), (num_sequences, num_tokens, first.rule.top_k)
        size = len(self.routers), num_sequences, num_tokens // num_ranks, first.rule.top_k
        self.ids_LBnK = torch.full(size, -1, dtype=torch.int32, device=first.weight.device)
        self.contexts: list[AbstractContextManager[None]] = []

    @property
    def topk_ids(self) -> Tensor:
        """int32 [B, n, L, K], of the last forward; -1 in layers without experts."""
        layers, (sequences, tokens, top_k) = list(self.routers), self.ids_LBnK.shape[1:]
        ids_BnLK = self.ids_LBnK.new_full((sequences, tokens, self.num_layers, top_k), -1)
        ids_BnLK[:, :, layers] = self.ids_LBnK.movedim(0, 2)
        return ids_BnLK

    def clear(self) -> None:
        """Let the routers choose in the next forward, which is recorded."""
        self.ids_LBnK.fill_(-1)

    def set(self, ids: GivenIds) -> None:
        """Give the experts of the next forwards.

        `ids` are [B, N, L, K] of any integers, in host memory or on the device; or a list of [tokens, L, K], one for
        each sequence, of which shorter ones leave their last tokens to the routers; or the path of a .npy file with
        such an array; or a function of a layer's number that returns its [B, N, K]. L may also count the layers with
        experts alone.

        Raises: ValueError for other shapes, and for ids that are no K different experts.
        """
        if callable(ids):
            self._write([_tensor(ids(layer)) for layer in self.routers])
            return
        if isinstance(ids, str | Path):
            ids = np.load(Path(ids).expanduser(), mmap_mode="r", allow_pickle=False)
        ids_BNLK = self._padded(ids) if isinstance(ids, list | tuple) else _tensor(ids)
        layers = list(range(len(self.routers)) if ids_BNLK.shape[-2:-1] == (len(self.routers),) else self.routers)
        if ids_BNLK.ndim != 4 or ids_BNLK.shape[2] not in (len(self.routers), self.num_layers):
            expected = [*self.shape[:2], self.num_layers, self.shape[2]]
            raise ValueError(f"the experts of a batch are {expected}, and got {list(ids_BNLK.shape)}")
        self._write([ids_BNLK[:, :, layer] for layer in layers])

    def __enter__(self) -> "RoutingReplay":
        routers = list(self.routers.values())
        choices = [RecordedChoice(router.route, ids) for router, ids in zip(routers, self.ids_LBnK, strict=True)]
        self.contexts.append(routing_by(routers, choices))
        self.contexts[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.contexts.pop().__exit__(*error)

    def _padded(self, ids: Sequence[Any]) -> Tensor:
        """[tokens, L, K] of each sequence -> [B, N, L, K]."""
        parts = [_tensor(part) for part in ids]
        num_tokens, shapes = self.shape[1], {tuple(part.shape[1:]) for part in parts}
        if len(shapes) != 1 or any(part.ndim != 3 or len(part) > num_tokens for part in parts):
            found = ", ".join(str(list(part.shape)) for part in parts)
            raise ValueError(f"a sequence has up to {num_tokens} tokens, [tokens, layers, K], and got {found}")
        ids_BNLK = torch.full((len(parts), num_tokens, *shapes.pop()), -1, dtype=torch.int32, device=parts[0].device)
        for own, part in zip(ids_BNLK, parts, strict=True):
            own[: len(part)] = part
        return ids_BNLK

    def _write(self, ids: Sequence[Tensor]) -> None:
        for layer, ids_BNK in zip(self.routers, ids, strict=True):
            if tuple(ids_BNK.shape) != self.shape:
                raise ValueError(f"layer {layer} takes experts {list(self.shape)}, and got {list(ids_BNK.shape)}")
            if problem := misfit(ids_BNK, self.num_experts):
                raise ValueError(f"layer {layer}: {problem}")
        for own_BnK, ids_BNK in zip(self.ids_LBnK, ids, strict=True):
            own_BnK.copy_(ids_BNK[:, self.own])


def routers_of(model: nn.Module) -> tuple[dict[int, TopKRouter], int]:
    """The routers by layer, and how many layers there are, dense ones included.

    Those of a model with `layers` have their numbers there, and others of it choose for themselves, as those of
    multi-token prediction do. Without `layers`
    they are numbered in their order.
    """
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, TopKRouter)]
    numbers = [re.search(r"(?:^|\.)layers\.(\d+)\.", name) for name, _ in named]
    if not any(numbers):
        return dict(enumerate(router for _, router in named)), len(named)
    routers = {int(number[1]): router for number, (_, router) in zip(numbers, named, strict=True) if number}
    config = getattr(model, "config", None)
    num_layers: int = getattr(config, "num_layers", max(routers) + 1)
    if isinstance(config, ModelConfig) and config.mtp.num_layers:
        routers = {layer: router for layer, router in routers.items() if layer < num_layers}
    return routers, num_layers


def misfit(ids_K: Tensor, num_experts: int) -> str:
    """Why these cannot be the experts of tokens; empty if they can. Reads from the device."""
    if ids_K.is_floating_point() or ids_K.is_complex():
        return f"experts are integers, and got {ids_K.dtype}"
    ordered_K = ids_K.long().sort(-1).values
    is_open = (ordered_K == -1).all(-1)
    is_good = (ordered_K[..., 0] >= 0) & (ordered_K[..., -1] < num_experts)
    is_good &= (ordered_K[..., 1:] != ordered_K[..., :-1]).all(-1)
    if bad := int((~(is_open | is_good)).sum()):
        example = ids_K[~(is_open | is_good)][0].tolist()
        return f"{bad} tokens have no different experts below {num_experts}, or -1 for all, such as {example}"
    return ""


def _tensor(ids: Any) -> Tensor:
    if isinstance(ids, Tensor):
        return ids
    array = np.asarray(ids)
    return torch.from_numpy(np.array(array, dtype=np.int32 if array.dtype.kind in "iu" else None))
