"""Bounds of the speed of candidates: times of layers, which all share that compute and send alike, without what a
schedule, memory and messages of sharding add."""

from collections.abc import Sequence

from titan_moe.config.parallel import ranks_of_a_node
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import Recipe
from titan_moe.config.recompute import with_entries
from titan_moe.config.trainable import trains_all
from titan_moe.plan.cost.block_time import Times, head_times, layer_times
from titan_moe.plan.cost.count import count_parameters
from titan_moe.plan.cost.messages import sharding_exposed
from titan_moe.plan.cost.rates import Rates
from titan_moe.plan.cost.step_time import COPIES, GAPS_OF_A_GRAPH, SPREAD, largest_of, usual_load
from titan_moe.plan.search_space import Candidate, Layout

FILL = {"1f1b": 1.0, "interleaved_1f1b": 1.0, "zbv": 0.1, "dualpipev": 0.3}
"""By schedule, of the waits of a pipeline that fills and drains, what its best case leaves."""


class Bounds:
    """Of a recipe on so many ranks, each with so many GiB for a step."""

    def __init__(self, recipe: Recipe, world_size: int, rates: Rates, limit_gib: float) -> None:
        self.recipe, self.world_size, self.rates, self.limit = recipe, world_size, rates, limit_gib
        self.tokens = recipe.train.global_batch_sequences * recipe.train.seq_len_tokens / world_size
        parameters = count_parameters(recipe.model)
        self.num_experts = parameters["experts"]
        self.num_dense = parameters.total - self.num_experts
        precision = recipe.precision
        kept = (BYTES_OF_DTYPE[precision.master], BYTES_OF_DTYPE[precision.gradients_dtype])
        self.state = sum(kept) + (precision.bytes_of_moments if recipe.memory.park == "none" else 0.0)
        self.update = 2 * kept[0] + 2 * kept[1] + 2 * precision.bytes_of_moments
        self.trains_all = trains_all(recipe.model, recipe.optim.trainable)
        self.microbatches: dict[tuple[object, ...], float] = {}
        self.times: dict[tuple[object, ...], Sequence[Times]] = {}
        self.of_node = ranks_of_a_node(world_size)

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether what is held for a whole step may fit; stages are taken as equal."""
        layout = candidate.layout
        if not self.trains_all:
            return True
        held = self._parameters(layout) * self.state
        if candidate.accumulate_unsharded:
            dense = self.num_dense / layout.tp / layout.pp
            held += dense * 2.0 + dense * (4.0 if candidate.num_microbatches > 1 else 0.0)
            of_replica = self.world_size // (layout.pp * layout.ep * layout.etp)
            if of_replica > 1:
                held += self.num_experts / (layout.pp * layout.ep * layout.etp) * 6.0
        return held / 2**30 < 1.05 * self.limit

    def _parameters(self, layout: Layout) -> float:
        return (self.num_dense + self.num_experts) * layout.dp_replicate / self.world_size

    def speed(self, candidate: Candidate, entries: tuple[str, ...] = ()) -> float:
        """Tokens a second that a candidate does not exceed, up to what the mean over stages hides."""
        layout, number = candidate.layout, candidate.num_microbatches
        of_one = self._microbatch(candidate, entries)
        fill = FILL[candidate.pp_schedule] * (layout.pp - 1) / candidate.vpp
        times = 1 if candidate.accumulate_unsharded else number
        gathered = self.num_dense / layout.tp / layout.pp * COPIES * times
        seconds = of_one * (number + fill)
        if self.trains_all:
            seconds += (self._parameters(layout) * self.update + gathered) / self.rates.memory
            messages, in_node = self._sharding(layout)
            seconds += sharding_exposed(messages * times, seconds, in_node * times)
        return self.tokens / (seconds * (1 + GAPS_OF_A_GRAPH))

    def _sharding(self, layout: Layout) -> tuple[float, float]:
        """Seconds of gathering and reducing all parameters once, and over links of a node: as in `step_time`, with one
        gather."""
        of_stage = self.world_size // layout.pp
        of_experts, of_dense = layout.ep * layout.etp, layout.tp
        seconds = received = 0.0
        for number, group in ((self.num_experts, of_experts), (self.num_dense, of_dense)):
            shards = of_stage // group // layout.dp_replicate
            rate = self.rates.link
            if of_stage > self.of_node:
                rate = min(rate, max(self.of_node // group, 1) * self.rates.node_link)
            size = number / layout.pp / group * (1 - 1 / max(shards, 1)) * 6
            seconds, received = seconds + size / rate, received + size
        return seconds, received / self.rates.link

    def _microbatch(self, candidate: Candidate, entries: tuple[str, ...]) -> float:
        """Seconds of a microbatch on a pipeline rank, with these parts computed again."""
        layout = candidate.layout
        key = (*self._key(candidate, entries), layout.pp)
        if key not in self.microbatches:
            layers, head = self.layers(candidate, entries), head_times(candidate.of(self.recipe), self.rates)
            of_layers = [sum(part.total for part in of_layer.values()) for of_layer in layers]
            mean = (sum(of_layers) + sum(part.total for part in head.values())) / layout.pp
            most = -(-len(of_layers) // layout.pp) * min(of_layers, default=0.0)  # of a rank that has most layers
            self.microbatches[key] = max(mean, most) * (1 + SPREAD * largest_of(layout.ep * layout.etp))
        return self.microbatches[key]

    def layers(self, candidate: Candidate, entries: tuple[str, ...]) -> Sequence[Times]:
        """The times of layers, which candidates share that compute and send alike."""
        key = self._key(candidate, entries)
        if key not in self.times:
            recipe = with_entries(candidate.of(self.recipe), entries)
            self.times[key] = layer_times(recipe, self.world_size, self.rates, usual_load(recipe))
        return self.times[key]

    def _key(self, candidate: Candidate, entries: tuple[str, ...]) -> tuple[object, ...]:
        of_layout = candidate.layout[1:5]
        return (of_layout, candidate.micro_batch_sequences, candidate.dispatcher, candidate.overlap, entries)
