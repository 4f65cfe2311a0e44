"""Record and replay the experts of the tokens of a step (layers/replay.py) over microbatches, stages and ranks.

M microbatches · B sequences of a microbatch · N tokens of a sequence · n tokens of this rank's routers · L layers ·
l layers with experts of this rank · K choices a token
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.config.model import ModelConfig
from titan_moe.layers.choice import RecordedChoice, routing_by
from titan_moe.layers.replay import routers_of
from titan_moe.layers.router import TopKRouter
from titan_moe.parallel.mesh import Meshes
from titan_moe.parallel.step_noise import StepNoise

Result = TypeVar("Result")


class StepRouting:
    """The ids of a step on this rank. A rank of tp routes its part of the tokens, and one of pp its layers.

    Everything happens on the device, and nothing is read from it: a step may be captured as a CUDA graph, and replayed
    with the ids of another batch.
    """

    def __init__(
        self, parts: Sequence[nn.Module], model: ModelConfig, meshes: Meshes, noise: StepNoise | None = None
    ) -> None:
        """`noise` is that of the routers' inputs."""
        self.noise = noise
        self.routers = {part: routers_of(part)[0] for part in parts}
        self.layers = [layer for routers in self.routers.values() for layer in routers]
        self.num_layers, self.top_k = model.num_layers, model.moe.top_k
        self.tensor_rank, self.num_tensor_ranks = meshes.dense.get_local_rank("tp"), meshes.sizes.tp
        self.groups = [meshes.dense[axis].get_group() for axis in ("tp", "pp") if meshes.dense[axis].size() > 1]
        self.ids_lMBnK: Tensor | None = None

    def start(self, tokens_MBN: Tensor, ids_MBNLK: Tensor | None) -> None:
        """Begin a step with these ids; -1 is what the routers choose. None neither records nor replays.

        Raises: ValueError for another shape.
        """
        self.ids_lMBnK = None
        if self.noise is not None:
            self.noise.start(tokens_MBN)
        if ids_MBNLK is None:
            return
        if tuple(ids_MBNLK.shape) != (*tokens_MBN.shape, self.num_layers, self.top_k):
            rule = "microbatches, sequences, tokens, model.num_layers and model.moe.top_k"
            expected = [*tokens_MBN.shape, self.num_layers, self.top_k]
            raise ValueError(f"the ids of a batch are {rule}, {expected} here, and got {list(ids_MBNLK.shape)}")
        own = self._own(ids_MBNLK)
        by_layer = [own[..., layer, :] for layer in self.layers]
        self.ids_lMBnK = torch.stack(by_layer).int() if by_layer else own.new_empty((0, *own.shape[:3], self.top_k))

    def of(self, part: nn.Module, microbatch: int) -> AbstractContextManager[Any]:
        """Route a microbatch through this part of the model by its ids, and with its noise."""
        if self.noise is None:
            return self._by_ids(part, microbatch)
        contexts = ExitStack()
        contexts.enter_context(self.noise.of(part, microbatch))
        contexts.enter_context(self._by_ids(part, microbatch))
        return contexts

    def _by_ids(self, part: nn.Module, microbatch: int) -> AbstractContextManager[None]:
        if self.ids_lMBnK is None:
            return nullcontext()
        routers: list[TopKRouter] = list(self.routers[part].values())
        ids = [self.ids_lMBnK[self.layers.index(layer), microbatch] for layer in self.routers[part]]
        return routing_by(routers, map(RecordedChoice, [router.route for router in routers], ids))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the ids of the step afterwards."""
        before = None if self.ids_lMBnK is None else self.ids_lMBnK.clone()
        yield
        if self.ids_lMBnK is not None and before is not None:
            self.ids_lMBnK.copy_(before)

    def finish(self, ids_MBNLK: Tensor | None) -> Tensor | None:
        """The ids of all layers and tokens of this rank's batch, int32 [M, B, N, L, K], -1 in dense layers. Collective
        over tp and pp."""
        if self.ids_lMBnK is None or ids_MBNLK is None:
            return None
        taken_MBNLK = torch.full_like(ids_MBNLK, -1, dtype=torch.int32)
        own = self._own(taken_MBNLK)
        for layer, ids_MBnK in zip(self.layers, self.ids_lMBnK, strict=True):
            own[..., layer, :] = ids_MBnK
        for group in self.groups:
            dist.all_reduce(taken_MBNLK, dist.ReduceOp.MAX, group=group)
        return taken_MBNLK

    def _own(self, ids_MBNLK: Tensor) -> Tensor:
        """Those of this rank's routers, as a view: [M, B, n, L, K]."""
        return ids_MBNLK.chunk(self.num_tensor_ranks, dim=2)[self.tensor_rank]


def within(
    routing: StepRouting, part: nn.Module, microbatch: int, stretches: Generator[None, None, Result]
) -> Generator[None, None, Result]:
    """Route a microbatch by its ids in each stretch of a generator: another one may run in between."""
    while True:
        with routing.of(part, microbatch):
            try:
                next(stretches)
            except StopIteration as ended:
                result: Result = ended.value
                return result
        yield
