"""The keys of the noise on routers' inputs (layers/input_noise.py) over microbatches, stages and ranks.

M microbatches · B sequences of a microbatch · N tokens of a sequence · n tokens of this rank's routers ·
l layers with experts of this rank
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from titan_moe.config.context import SequenceShard
from titan_moe.layers.input_noise import InputNoise, mixed
from titan_moe.layers.replay import routers_of
from titan_moe.parallel.mesh import Meshes
from titan_moe.parameters import seed_of


class StepNoise:
    """The noise of a step: a key is a hash of seed, step, layer, and the token's place in the batch of all ranks.

    So a run has the same noise on any ranks and with any microbatches, and so has a step that is taken again, or after
    a resume.
    """

    def __init__(
        self, parts: Sequence[nn.Module], eps: float, seed: int, step: Tensor, meshes: Meshes, shard: SequenceShard
    ) -> None:
        """`step`, int64 on the device, is filled with the number of each step; `shard` is that of sequences over cp."""
        self.routers = {part: routers_of(part)[0] for part in parts}
        self.layers = [layer for routers in self.routers.values() for layer in routers]
        self.layers_l = torch.tensor(self.layers, dtype=torch.int32, device=step.device)
        self.eps, self.seed, self.step, self.shard = eps, seed_of(f"{seed}/noise") & 0x7FFFFFFF, step, shard
        self.data_rank, self.tensor_rank = meshes.data_rank, meshes.dense.get_local_rank("tp")
        self.num_tensor_ranks = meshes.sizes.tp
        self.keys_lMBn = torch.zeros(0, dtype=torch.int32, device=step.device)

    def start(self, tokens_MBN: Tensor) -> None:
        """Begin a step with these tokens, of which only the shape is read."""
        num_microbatches, num_sequences, num_tokens = tokens_MBN.shape
        num_own, whole = num_microbatches * num_sequences, num_tokens * self.shard.num_ranks
        device = self.step.device
        chunks = [torch.arange(own.start, own.stop, device=device) for own in self.shard.slices(whole)]
        places_n = torch.cat(chunks).chunk(self.num_tensor_ranks)[self.tensor_rank]
        sequences_MB = torch.arange(num_own, device=device).view(num_microbatches, num_sequences)
        numbers_MBn = (sequences_MB + self.data_rank * num_own)[..., None] * whole + places_n
        keys_MBn = mixed(mixed((self.step + self.seed).int()) ^ numbers_MBn.int())
        self.keys_lMBn = mixed(keys_MBn ^ mixed(self.layers_l + 1)[:, None, None, None])

    @contextmanager
    def of(self, part: nn.Module, microbatch: int) -> Iterator[None]:
        """Let the routers of this part have the noise of a microbatch."""
        routers = list(self.routers[part].items())
        before = [router.noise for _, router in routers]
        try:
            for layer, router in routers:
                router.noise = InputNoise(self.keys_lMBn[self.layers.index(layer), microbatch], self.eps)
            yield
        finally:
            for (_, router), noise in zip(routers, before, strict=True):
                router.noise = noise
