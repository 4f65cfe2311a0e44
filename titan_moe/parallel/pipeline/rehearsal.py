"""A rehearsal of a step, without messages: all stages compile at the same time.

A graph or kernel is compiled at its first call. In a step that is when the first activations arrive, which the stage
before sends once it has compiled; backward goes the other way round. So the compile times of all stages would add up.
Each rank therefore first runs, alone, what its schedule has for the first microbatches, with random numbers where a
message would arrive. Ranks of a stage do so together, as their exchanges are collectives. Microbatches are two: the
first may leave a rank without rows, and a graph for one size becomes one for any size at its second.

What a step changes on a rank is put back, so the steps after it have the bits that they have without a rehearsal.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from titan_moe.config import Recipe
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.parallel.pipeline.messages import Received, check_activation
from titan_moe.plan.pipeline.action import Entry, flat

NUM_MICROBATCHES = 2


class StandIns:
    """In place of `Messages`: what is sent is dropped, and what is received is random."""

    def __init__(self, like: Tensor) -> None:
        """Tensors have the shape, dtype and device of `like`."""
        self.like, self.generator = like, torch.Generator(like.device).manual_seed(0)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Drop a tensor.

        Raises: RuntimeError for another shape or dtype than the receiver has room for.
        """
        check_activation(tensor, self.like)

    def receive(self, rank: int) -> Received:
        """Random numbers. Equal ones would send all tokens to the same experts, and leave ranks without rows."""
        return Received(torch.empty_like(self.like).normal_(generator=self.generator), None)

    def finish(self) -> None:
        """Nothing was sent."""


class Rehearsals:
    """When a step needs a rehearsal: before the first one that has its graphs."""

    def __init__(self, recipe: Recipe, capacity: ExpertCapacity) -> None:
        self.config, self.kernels, self.capacity = recipe.compile, recipe.perf.chosen_kernels, capacity
        self.done: set[tuple[int, bool]] = set()
        """`ExpertCapacity.sizes` of the graphs that there are."""

    def is_due(self, device: torch.device) -> bool:
        """Whether the next step on a device compiles; it is then taken as rehearsed. All ranks have one answer."""
        if not self.config.compiles(device.type) and not (device.type == "cuda" and self.kernels.are_compiled):
            return False
        sizes = self.capacity.sizes
        self.done = {rehearsed for rehearsed in self.done if rehearsed[0] == sizes[0]}  # to set the factor drops graphs
        is_new = sizes not in self.done
        self.done.add(sizes)
        return is_new


def first_microbatches(entries: Iterable[Entry]) -> list[Entry]:
    """What a rank's list has for the first microbatches; halves of a pair, which is with a later one, run alone."""
    return [action for action in flat(entries) if action.microbatch < NUM_MICROBATCHES]


@contextmanager
def unchanged(parts: Iterable[nn.Module], capacity: ExpertCapacity, device: torch.device) -> Iterator[None]:
    """Put back what forwards and backwards within the `with` block change, bit for bit: gradients, buffers (counts of
    experts, balancing losses), loads and overflows, and the state of the random generators.

    A failed exchange stays known. Parameters in shards must be in shards again at the end.
    """
    modules = [module for part in parts for module in part.modules()]
    parameters = [parameter for module in modules for parameter in module.parameters(recurse=False)]
    buffers = [(module, name, own) for module in modules for name, own in module.named_buffers(recurse=False)]
    states = [own for _, _, own in buffers] + capacity.state()
    with torch.no_grad():
        grads, values = [parameter.grad for parameter in parameters], [state.clone() for state in states]
    for parameter in parameters:
        parameter.grad = None
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    for module, name, own in buffers:
        setattr(module, name, own)
    with torch.no_grad():
        for state, value in zip(states, values, strict=True):
            state.copy_(value)
