"""A rehearsal: a warm-up step without messages, in which all stages of a pipeline compile at the same time.

A graph or kernel is compiled at its first call. In a normal step that is when the first activations arrive, and the
previous stage sends these after it has compiled; in backward likewise. So the compile times of all stages would add up.
In a rehearsal each rank runs the actions of the first microbatches in its schedule, with random numbers in place of
received tensors. The ranks of one stage do so together, because their exchanges are collectives. Two microbatches are
needed: the first may leave a rank without rows, and at a second size a graph for one size becomes one for any size.

Everything that the rehearsal changes on a rank is restored, so all later steps are bit for bit those without it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.parallel.pipeline.messages import Received, check_activation
from titan_moe.plan.pipeline.action import Action, Pair, flat
from titan_moe.plan.resolved import Resolved

NUM_MICROBATCHES = 2


class StandIns:
    """Replaces `Messages`: sent tensors are dropped, and received tensors are random."""

    def __init__(self, like: Tensor) -> None:
        """Tensors have the shape, dtype and device of `like`."""
        self.like, self.generator = like, torch.Generator(like.device).manual_seed(0)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Drop a tensor.

        Raises: RuntimeError for another shape or dtype than the receiver has room for.
        """
        check_activation(tensor, self.like)

    def receive(self, rank: int) -> Received:
        """Return random numbers. Equal numbers would route all tokens to the same experts, and leave ranks without
        rows."""
        return Received(torch.empty_like(self.like).normal_(generator=self.generator), None)

    def free(self, buffer: Tensor) -> None:
        """Drop a received tensor."""

    def finish(self) -> None:
        """Nothing was sent."""


class Rehearsals:
    """Decides when a rehearsal is needed: before a step for whose sizes there are no graphs yet."""

    def __init__(self, resolved: Resolved, capacity: ExpertCapacity) -> None:
        self.resolved, self.capacity = resolved, capacity
        self.done: set[tuple[int, bool, bool]] = set()
        """`ExpertCapacity.sizes` of the graphs that there are, and whether experts delayed weight gradients in the
        arena, where other kernels write."""

    def is_due(self, device: torch.device) -> bool:
        """Whether the next step on a device needs a rehearsal. After this call the step counts as rehearsed. All ranks
        get the same answer."""
        resolved, is_gpu = self.resolved, device.type == "cuda"
        compiles = resolved.recipe.compile.compiles(device.type) or (is_gpu and resolved.kernels.are_compiled)
        if resolved.sizes.pp == 1 or not compiles:
            return False
        arena = self.capacity.arena
        # of the schedule: a rank without experts has no delayed slabs
        sizes = *self.capacity.sizes, resolved.splits_backward and arena is not None and arena.keeps
        self.done = {rehearsed for rehearsed in self.done if rehearsed[0] == sizes[0]}  # to set the factor drops graphs
        is_new = sizes not in self.done
        self.done.add(sizes)
        return is_new


def first_microbatches(actions: Iterable[Action | Pair]) -> list[Action | Pair]:
    """Return the entries of a rank's list for the first microbatches. If only one half of a pair belongs to them, that
    half runs alone."""
    return [action for action in flat(actions) if action.microbatch < NUM_MICROBATCHES]


@contextmanager
def unchanged(parts: Iterable[nn.Module], capacity: ExpertCapacity, device: torch.device) -> Iterator[None]:
    """Restore, bit for bit, what forwards and backwards within the `with` block change: gradients, buffers (expert
    counts, balancing losses), loads and overflow flags, and the state of the random generators.

    The report of a failed exchange is not reset. Sharded parameters must be sharded again at the end of the block.
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
