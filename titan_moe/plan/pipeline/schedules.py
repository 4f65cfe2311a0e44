"""The schedule of a pipeline: the list of actions of every rank, with its messages.

The lists come from a simulation in which a forward, a `backward_input` and a `backward_weight` take one unit of time
each. A rank runs its order (orders.py). It computes weight gradients of split backwards where it would wait, before a
forward if it has as many activations as the pipeline stages (those of 1f1b), and the rest at the end.

When an action ends and another rank needs its result, the send is appended to the rank's list and the receive to the
list of the other rank, at that moment. So all lists are parts of one order of all actions: two ranks have their
messages in the same order, ranks do not deadlock, and a result is received before it is needed.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import lru_cache

from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.pipeline_schedules import SCHEDULES
from titan_moe.plan.pipeline.action import Action, Pair, flat
from titan_moe.plan.pipeline.orders import Order, order_of
from titan_moe.plan.pipeline.stages import rank_of_stage

Measure = Callable[[list[Action | Pair], Mapping[int, float]], float]
"""Of the list of a rank and the sizes of its stages."""
DURATION = {"backward": 2}
"""Units of time; all others take 1."""


def actions_of(
    schedule: str, pp: int, vpp: int, num_microbatches: int, *, has_pairs: bool = False
) -> list[list[Action | Pair]]:
    """The actions of a step, by pipeline rank, in the order in which the rank begins them. With `has_pairs`, of a
    schedule that has pairs, a forward and a backward that its order runs as one are a pair.

    Raises: ValueError for stages and microbatches that the schedule does not fit; `config.rules` refuses them first;
    KeyError for a schedule without pairs.
    """
    return [list(actions) for actions in _actions_of(schedule, pp, vpp, num_microbatches, has_pairs)]


def actions_of_recipe(parallel: ParallelConfig, num_microbatches: int) -> list[list[Action | Pair]]:
    """The same of a recipe's pipeline: with pairs if it interleaves microbatches."""
    p = parallel
    return actions_of(p.pp_schedule, p.pp, p.vpp, num_microbatches, has_pairs=p.overlap == "microbatch")


def measure_rank(
    measure: Measure,
    parallel: ParallelConfig,
    num_microbatches: int,
    rank: int,
    sizes: Mapping[int, float],
) -> float:
    """Apply a measure to a rank's list and the sizes of its stages. Recipes that differ in other fields share it."""
    p = parallel
    pipeline = (p.pp_schedule, p.pp, p.vpp, num_microbatches, p.overlap == "microbatch")
    return _measure_rank(measure, pipeline, rank, tuple(sizes.items()))


@lru_cache(maxsize=4096)
def _measure_rank(
    measure: Measure, pipeline: tuple[str, int, int, int, bool], rank: int, sizes: tuple[tuple[int, float], ...]
) -> float:
    return measure(list(_actions_of(*pipeline)[rank]), dict(sizes))


@lru_cache(maxsize=64)
def _actions_of(
    schedule: str, pp: int, vpp: int, num_microbatches: int, has_pairs: bool
) -> Sequence[Iterable[Action | Pair]]:
    """Every step asks for the same lists."""
    facts = SCHEDULES[schedule]
    if (
        not facts.fits_vpp(vpp)
        or num_microbatches < facts.fewest_microbatches(pp)
        or (facts.rounds and num_microbatches % pp)
    ):
        raise ValueError(f"{schedule} does not fit pp = {pp}, vpp = {vpp} and {num_microbatches} microbatches")
    orders = [order_of(schedule, rank, pp, vpp, num_microbatches, has_pairs=has_pairs) for rank in range(pp)]
    listed = lay_out(orders, [rank_of_stage(stage, pp, schedule) for stage in range(pp * vpp)])
    return listed if has_pairs else [list(flat(of_rank)) for of_rank in listed]


def lay_out(orders: Sequence[Order], rank_of: Sequence[int]) -> list[list[Action | Pair]]:
    """Simulate the orders of the ranks, given the rank of each stage; write down what begins and what is sent.

    Raises: ValueError if ranks wait for each other.
    """
    ranks = [_Rank(order, len(rank_of)) for order in orders]
    ended: set[Action] = set()
    now = 0
    while not all(rank.is_done for rank in ranks):
        for rank in ranks:
            for action in rank.end(now):
                ended.add(action)
                _exchange(action, ranks, rank_of)
        for rank in ranks:
            rank.begin(now, ended)
        if not any(rank.running for rank in ranks) and any(rank.order for rank in ranks):
            waiting = {number: rank.order[0] for number, rank in enumerate(ranks) if rank.order}
            raise ValueError(f"pipeline ranks wait for each other; by rank: {waiting}")
        now += 1
    return [rank.actions for rank in ranks]


def _exchange(action: Action, ranks: Sequence["_Rank"], rank_of: Sequence[int]) -> None:
    """Append the message of a result, if the stage that needs it is on another rank."""
    kind, stage, microbatch = action
    to = stage + 1 if kind == "forward" else stage - 1
    if kind == "backward_weight" or not 0 <= to < len(rank_of) or rank_of[to] == rank_of[stage]:
        return
    sender, receiver = ranks[rank_of[stage]].actions, ranks[rank_of[to]].actions
    if kind == "forward":
        sender.append(Action("send_activation", stage, microbatch))
        receiver.append(Action("receive_activation", to, microbatch))
    else:
        sender.append(Action("send_gradient", stage, microbatch))
        receiver.append(Action("receive_gradient", to, microbatch))


def _can_begin(action: Action, ended: Set[Action], last_stage: int) -> bool:
    """Whether all has ended that an action of an order waits for: what `needs_of` says, where messages take no time."""
    kind, stage, microbatch = action
    if kind == "forward":
        return stage == 0 or ("forward", stage - 1, microbatch) in ended
    if ("forward", stage, microbatch) not in ended:
        return False
    after = stage + 1
    return stage == last_stage or not ended.isdisjoint(
        (("backward", after, microbatch), ("backward_input", after, microbatch))
    )


class _Rank:
    """A rank in the simulation."""

    def __init__(self, order: Order, num_stages: int) -> None:
        self.order = deque(order)
        self.num_stages = num_stages
        self.weight_grads: deque[Action] = deque()  # that can be computed
        self.num_in_flight = 0  # activations of microbatches and stages
        self.running: tuple[Action, ...] = ()
        self.end_time = 0
        self.actions: list[Action | Pair] = []

    @property
    def is_done(self) -> bool:
        return not (self.order or self.weight_grads or self.running)

    def end(self, now: int) -> tuple[Action, ...]:
        """The actions that end now."""
        if now < self.end_time:
            return ()
        ended, self.running = self.running, ()
        for kind, stage, microbatch in ended:
            if kind == "backward_input":
                self.weight_grads.append(Action("backward_weight", stage, microbatch))
        return ended

    def begin(self, now: int, ended: set[Action]) -> None:
        """Begin what is next, if the rank is free and something can run."""
        if self.running:
            return
        self.running, self.end_time = self._next(ended), now
        self.actions += [Pair(*self.running)] if len(self.running) == 2 else self.running
        for action in self.running:
            self.end_time += DURATION.get(action.kind, 1)
            self.num_in_flight += (action.kind == "forward") - action.frees

    def _next(self, ended: set[Action]) -> tuple[Action, ...]:
        if self.order and all(_can_begin(action, ended, self.num_stages - 1) for action in self.order[0]):
            is_full = self.num_in_flight >= self.num_stages and self.order[0][0].kind == "forward"
            if not (is_full and self.weight_grads):
                return self.order.popleft()
        return (self.weight_grads.popleft(),) if self.weight_grads else ()
