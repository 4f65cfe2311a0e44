"""What a recipe means on a number of ranks, derived once: `titan-moe check` shows it, and a run carries it out.

Transforms of a model take a `Resolved` or numbers from it, so that a run cannot derive other values than `check` shows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from titan_moe.config import clones
from titan_moe.config import recipe as of_recipe
from titan_moe.config.arena import experts_of, has_arena
from titan_moe.config.formats import GemmFormats
from titan_moe.config.kernels import Kernels
from titan_moe.config.optimizers import OPTIMIZERS
from titan_moe.config.parallel import ParallelSizes, resolve
from titan_moe.config.recipe import Recipe
from titan_moe.config.recompute import recompute_of
from titan_moe.plan.choice.formats import IN_COMPUTE, choose_formats
from titan_moe.plan.cost import memory, muon
from titan_moe.plan.cost.loads import layer_loads
from titan_moe.plan.cost.peak import peak_bytes
from titan_moe.plan.pipeline import weight_grads
from titan_moe.plan.pipeline.action import Action, Pair
from titan_moe.plan.pipeline.parts import RankPart, offload_of_stages, parts_of
from titan_moe.plan.pipeline.schedules import actions_of_recipe
from titan_moe.plan.pipeline.slabs import ArenaSlabs, arena_slabs
from titan_moe.plan.pipeline.stages import rank_of_stage, stages_of

T = TypeVar("T")


def _derived(derive: Callable[[Recipe], T]) -> cached_property[T]:
    """What follows from the recipe alone; `derive` says what it is."""
    return cached_property(lambda resolved: derive(resolved.recipe))


BALANCED_FACTOR = 1.125
"""The capacity factor that "auto" takes for a balanced load."""


@dataclass(frozen=True)
class Resolved:
    """A recipe, a number of ranks, and what follows from both. A value is derived when it is first read, and kept.

    What the machine decides ("auto" of formats, kernels and clones) must be in the recipe already.
    """

    recipe: Recipe
    world_size: int

    max_batch_tokens = _derived(of_recipe.max_batch_tokens)
    experts = _derived(experts_of)
    num_clones = _derived(clones.num_clones)
    clones_pay_from = _derived(clones.clones_pay_from)
    loads = _derived(layer_loads)
    recompute = _derived(recompute_of)
    offload = _derived(offload_of_stages)
    shared_bytes = _derived(memory.shared_bytes_per_rank)
    workspace_bytes = _derived(memory.workspace_bytes)
    splits_backward = _derived(weight_grads.splits_backward)
    stages = _derived(stages_of)

    @cached_property
    def outside_bytes(self) -> float:
        """GPU memory of a rank outside PyTorch's allocator: what ranks share, and what NCCL needs for Muon."""
        sends = OPTIMIZERS[self.recipe.optim.kind].orthogonalises  # parts of pipelines take time to derive
        return self.shared_bytes + (max(map(muon.connection_bytes, self.parts)) if sends else 0.0)

    @property
    def kernels(self) -> Kernels:
        """The implementation of each operation."""
        return self.recipe.perf.chosen_kernels

    @cached_property
    def sizes(self) -> ParallelSizes:
        """The sizes of all mesh axes."""
        return resolve(self.recipe.parallel, self.world_size)

    @cached_property
    def num_microbatches(self) -> int:
        """Microbatches of a rank in one optimizer step."""
        return of_recipe.num_microbatches(self.recipe, self.world_size)

    @cached_property
    def formats(self) -> dict[str, GemmFormats]:
        """The formats of the GEMMs of each module that has any, by name, `layers.0.feed_forward.experts` among them.

        The gate for speed is not asked: training/resolve_auto.py has written its answer into the recipe.
        """
        choices = choose_formats(self.recipe)
        return {choice.module.name: choice.formats for choice in choices if choice.formats != IN_COMPUTE}

    @cached_property
    def experts_are_unsharded(self) -> bool:
        """Whether experts bypass FSDP."""
        return self.sizes.experts_are_unsharded(self.recipe.precision)

    @cached_property
    def fused_experts_have_arena(self) -> bool:
        """Whether an arena keeps the rows of layers, if all of their experts are fused."""
        return has_arena(self.recipe, "fused")

    @property
    def has_arena(self) -> bool:
        """The same with the implementation of the experts."""
        return self.experts == "fused" and self.fused_experts_have_arena

    @cached_property
    def delays_weight_grads_of_experts(self) -> bool:
        """Whether weight gradients of experts are computed while gradients of rows are sent: not with recompute, which
        fixes another order."""
        is_interleaved = self.recipe.parallel.overlap == "microbatch"
        return is_interleaved and self.kernels.experts == "fused" and not self.recompute.without_hidden

    @cached_property
    def ranks(self) -> list[int]:
        """The pipeline rank of each stage."""
        p = self.recipe.parallel
        return [rank_of_stage(stage, p.pp, p.pp_schedule) for stage in range(p.pp * p.vpp)]

    def stages_of_rank(self, rank: int) -> list[int]:
        """The stages of a pipeline rank, in the order of the model."""
        return [stage for stage, of_stage in enumerate(self.ranks) if of_stage == rank]

    @cached_property
    def actions(self) -> list[list[Action | Pair]]:
        """The lists of actions of all pipeline ranks."""
        return actions_of_recipe(self.recipe.parallel, self.num_microbatches)

    @cached_property
    def parts(self) -> tuple[RankPart, ...]:
        """The parts of all pipeline ranks."""
        return tuple(parts_of(self.recipe, self.world_size))

    @cached_property
    def state_bytes(self) -> int:
        """Parameters, gradients and moments of a rank; in a pipeline those of the rank that has most."""
        return max(map(memory.state_bytes, self.parts))

    @cached_property
    def parked_bytes(self) -> int:
        """States of a rank that rest on the host, likewise."""
        return max(map(memory.parked_bytes, self.parts))

    @cached_property
    def gathered_bytes(self) -> int:
        """Unsharded parameters and gradients of a rank during a step, in the same way."""
        return max(map(memory.gathered_bytes, self.parts))

    @property
    def usual_factor(self) -> float:
        """The capacity factor that a peak is estimated at: the fixed one, or that of a balanced load."""
        return self.recipe.parallel.fixed_capacity_factor or BALANCED_FACTOR

    def peak_bytes(self, capacity_factor: float) -> int:
        """The peak of a rank at a capacity factor, in the same way."""
        return max(peak_bytes(part, capacity_factor, self.experts) for part in self.parts)

    def slabs(self, pipeline_rank: int, moe_layers: Mapping[int, int], hidden_layers: Mapping[int, int]) -> ArenaSlabs:
        """The slabs of the arena of a pipeline rank whose stages have so many MoE layers."""
        return arena_slabs(self.recipe, pipeline_rank, self.world_size, moe_layers, hidden_layers)
