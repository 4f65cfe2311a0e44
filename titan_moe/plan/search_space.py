"""The layouts that a search tries: all that could pass the rules on a number of ranks, by the arithmetic of meshes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from titan_moe.config.dispatchers import DISPATCHERS
from titan_moe.config.parallel import ParallelConfig, ranks_of_a_node
from titan_moe.config.pipeline_schedules import SCHEDULES
from titan_moe.config.recipe import Recipe

LONG_SEQUENCE = 16_384
"""Tokens from which sequences are divided over cp."""
MOST_SEQUENCES = 8
"""Of a microbatch."""
MOST_STAGES = 4
"""Of a pipeline rank."""

FIXABLE = (
    *(f"parallel.{name}" for name in ("pp", "tp", "cp", "ep", "etp", "dp_replicate", "pp_schedule", "vpp")),
    *(f"parallel.{name}" for name in ("accumulate_unsharded", "dispatcher", "overlap")),
    "train.micro_batch_sequences",
)
"""Fields that a search sets, unless they are given."""


class Layout(NamedTuple):
    """What divides a model; a table shows each once, with its best options."""

    pp: int
    tp: int
    cp: int
    ep: int
    etp: int
    dp_replicate: int


class Candidate(NamedTuple):
    """A layout with its options."""

    layout: Layout
    pp_schedule: str
    vpp: int
    micro_batch_sequences: int
    num_microbatches: int
    accumulate_unsharded: bool
    dispatcher: str
    overlap: str

    @property
    def family(self) -> "Candidate":
        """Candidates that differ in the size of microbatches alone: a larger one needs no less memory."""
        return self._replace(micro_batch_sequences=0, num_microbatches=0)

    def value_of(self, name: str) -> object:
        """The value of a field by its last word; None for one that a search does not set."""
        return getattr(self, name, getattr(self.layout, name, None))

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe in this layout. It is captured where its dispatcher lets it."""
        options: dict[str, Any] = self.layout._asdict()
        options |= {"pp_schedule": self.pp_schedule, "vpp": self.vpp, "pp_layout": "", "dp_shard": -1}
        options |= {"dispatcher": self.dispatcher, "overlap": self.overlap, "ep_ranks_per_node": 0}
        options["accumulate_unsharded"] = self.accumulate_unsharded
        if self.layout.tp == 1:
            options["tp_comm_overlap"] = False
        if self.layout.cp == 1:
            options["cp_kind"] = ParallelConfig.cp_kind
        parallel = replace(recipe.parallel, **options)
        if not parallel.facts.can_be_bounded:
            parallel = replace(parallel, expert_rank_capacity_factor="auto")
        graph: Any = "off" if parallel.facts.reads_host or recipe.run.device == "cpu" else "step"
        return replace(
            recipe,
            parallel=parallel,
            compile=replace(recipe.compile, cudagraph=graph),
            train=replace(recipe.train, micro_batch_sequences=self.micro_batch_sequences),
        )


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """In order."""
    return tuple(part for part in range(1, number + 1) if number % part == 0)


def candidates_of(recipe: Recipe, world_size: int) -> Iterator[Candidate]:
    """All candidates for a recipe's model and batch."""
    batch = recipe.train.global_batch_sequences
    for layout in layouts_of(recipe, world_size):
        dp = world_size // (layout.pp * layout.tp * layout.cp)
        if batch % dp:
            continue
        for sequences in divisors(batch // dp):
            if sequences > max(MOST_SEQUENCES, recipe.train.micro_batch_sequences):
                break
            number = batch // dp // sequences
            for schedule, vpp in _schedules(recipe, layout.pp, number):
                for dispatcher, overlap in _dispatchers(recipe, layout, world_size):
                    interleaves = overlap == "microbatch"
                    is_split = SCHEDULES[schedule].splits_backward and layout.pp > 1
                    if interleaves and (number < 2 or (layout.pp > 1 and not SCHEDULES[schedule].has_pairs)):
                        continue
                    once = [True] if interleaves or is_split else [False] if number == 1 else [False, True]
                    for is_once in once:
                        yield Candidate(layout, schedule, vpp, sequences, number, is_once, dispatcher, overlap)


def layouts_of(recipe: Recipe, world_size: int) -> Iterator[Layout]:
    """The sizes of meshes that divide ranks, layers, heads and experts."""
    model, of_node = recipe.model, ranks_of_a_node(world_size)
    num_experts, heads = model.moe.num_experts if model.num_moe_layers else 1, model.attention.num_heads
    is_long = recipe.train.seq_len_tokens >= LONG_SEQUENCE or recipe.parallel.cp > 1
    for pp in divisors(world_size):
        if pp > max(model.num_layers, 1):
            break
        of_stage = world_size // pp
        for tp in (size for size in divisors(of_stage) if size <= of_node and heads % size == 0):
            for cp in divisors(of_stage // tp) if is_long else (1,):
                if (tp * cp > heads and recipe.parallel.cp_kind == "ulysses") or cp > of_node:
                    continue
                for replicas in _replicas(of_stage // (tp * cp), of_node // tp):
                    of_replica = of_stage // replicas
                    for ep in (size for size in divisors(of_replica) if num_experts % size == 0):
                        if of_replica % ep == 0:
                            yield from (
                                Layout(pp, tp, cp, ep, etp, replicas)
                                for etp in _widths(num_experts, ep, of_replica // ep, model.moe.ffn_hidden_size)
                            )


def _widths(num_experts: int, ep: int, num_others: int, hidden: int) -> tuple[int, ...]:
    """Parts of an expert: several only where ep cannot be larger, which is cheaper."""
    is_most = num_experts % (2 * ep) != 0 and num_others % 2 == 0
    return (1, 2) if is_most and num_experts > 1 and hidden % 2 == 0 else (1,)


def _replicas(num_ranks: int, of_node: int) -> tuple[int, ...]:
    """One replica, or one a node."""
    number = num_ranks // max(of_node, 1)
    return (1, number) if number > 1 and num_ranks % number == 0 else (1,)


def _schedules(recipe: Recipe, pp: int, number: int) -> Iterator[tuple[str, int]]:
    """Schedules that so many microbatches fit, with stages of a rank."""
    if pp == 1:
        yield ParallelConfig.pp_schedule, 1
        return
    for name, facts in SCHEDULES.items():
        for vpp in range(facts.min_vpp, min(facts.max_vpp, MOST_STAGES) + 1):
            is_round = not facts.rounds or number % pp == 0
            fits = number >= max(pp, facts.fewest_microbatches(pp)) and is_round
            if fits and pp * vpp <= recipe.model.num_layers and vpp != 3:
                yield name, vpp


def _dispatchers(recipe: Recipe, layout: Layout, world_size: int) -> Iterator[tuple[str, str]]:
    """Dispatchers, each with the overlaps that it supports, the fastest first."""
    if layout.ep == 1:
        yield "local", "none"
        return
    of_node = ranks_of_a_node(world_size)
    is_one_node = of_node % (layout.ep * layout.etp) == 0
    name = "alltoall" if recipe.run.device == "cpu" else "symm_mem" if is_one_node else "hierarchical_symm_mem"
    for overlap in (*DISPATCHERS[name].overlaps, "none"):
        yield name, overlap
