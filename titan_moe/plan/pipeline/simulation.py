"""The time that a pipeline's schedule takes, from its lists of actions and the times of its stages."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from titan_moe.plan.pipeline.action import KEPT_SENDS, Action, Kind, Pair, actions_in, flat, needs_of

HELD: dict[Kind, int] = {"forward": 1, "backward": -1, "backward_weight": -1}
BEFORE_BACKWARD: dict[Kind, int] = {"forward": 1, "backward": -1, "backward_input": -1}
DELAYED: dict[Kind, int] = {"backward_input": 1, "backward_weight": -1}
"""What an action changes in the number of microbatches."""


class Times(NamedTuple):
    """The times of each stage, in any unit; a whole backward takes both parts."""

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    pairs: Mapping[tuple[int, int], float] = {}  # by the stages of forward and backward; else as long as both

    @classmethod
    def unit(cls, num_stages: int) -> "Times":
        """All parts of all stages take 1."""
        ones = [1.0] * num_stages
        return cls(ones, ones, ones)

    def of(self, action: Action | Pair) -> float:
        """The time of an action or a pair; messages take none."""
        if isinstance(action, Pair):
            both = self.of(action.forward) + self.of(action.backward)
            return self.pairs.get((action.forward.stage, action.backward.stage), both)
        if action.is_message:
            return 0.0
        if action.kind == "backward":
            return self.backward_input[action.stage] + self.backward_weight[action.stage]
        by_stage: Sequence[float] = getattr(self, action.kind)
        return by_stage[action.stage]


class Run(NamedTuple):
    """When an action or a pair ran."""

    rank: int
    action: Action | Pair
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What happens when each rank runs its list."""

    runs: list[list[Run]]  # by rank, in order; messages too

    @cached_property
    def max_in_flight(self) -> list[int]:
        """By stage, the most microbatches whose activations it keeps, from a forward to the end of its backward."""
        held, most = Counter[int](), Counter[int]()
        for action in flat(run.action for runs in self.runs for run in runs):
            held[action.stage] += HELD.get(action.kind, 0)
            most[action.stage] = max(most[action.stage], held[action.stage])
        return [most[stage] for stage in range(1 + max(most, default=-1))]

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return max((runs[-1].end for runs in self.runs if runs), default=0.0)

    @property
    def bubble_share(self) -> float:
        """The share of the ranks' time in which they wait."""
        busy = sum(run.end - run.start for runs in self.runs for run in runs)
        return 1 - busy / (self.makespan * len(self.runs)) if busy else 0.0


def simulate(actions: Sequence[Sequence[Action | Pair]], times: Times) -> Simulation:
    """Run the list of each rank in order, as early as possible.

    A message takes no time: it is sent when the sender comes to it, and the receiver waits for it where it needs it.
    Lists may lack messages; then an action waits for the end of the one before it in the model.

    Raises: ValueError if ranks wait for each other.
    """
    listed = {action for of_rank in actions for action in flat(of_rank)}
    last_stage = max((action.stage for action in listed), default=0)
    runs: list[list[Run]] = [[] for _ in actions]
    ends: dict[Action, float] = {}
    progressed = True
    while progressed:
        progressed = False
        for rank, of_rank in enumerate(actions):
            while len(runs[rank]) < len(of_rank):
                action = of_rank[len(runs[rank])]
                needed = [need for one in actions_in(action) for need in needs_of(one, listed, last_stage)]
                if not all(need in ends for need in needed):
                    break
                start = max([ends[need] for need in needed] + [run.end for run in runs[rank][-1:]], default=0.0)
                end = start + times.of(action)
                ends |= dict.fromkeys(actions_in(action), end)
                runs[rank].append(Run(rank, action, start, end))
                progressed = True
    waiting = {rank: of_rank[len(runs[rank])] for rank, of_rank in enumerate(actions) if len(runs[rank]) < len(of_rank)}
    if waiting:
        raise ValueError(f"pipeline ranks wait for each other; by rank: {waiting}")
    return Simulation(runs)


def max_held(
    actions: Iterable[Action | Pair], size_of: Mapping[int, float], changes: Mapping[Kind, int] = HELD
) -> float:
    """The most that a rank keeps at once, if a microbatch of a stage has this size; stages without one have none. A
    pair keeps both of its microbatches."""
    held = most = 0.0
    for kind, stage, _ in flat(actions):
        if kind in changes:
            held += size_of.get(stage, 0.0) * changes[kind]
            most = max(most, held)
    return most


def max_before_backward(actions: Iterable[Action | Pair], size_of: Mapping[int, float]) -> float:
    """The same of microbatches whose gradients of activations are not computed yet."""
    return max_held(actions, size_of, BEFORE_BACKWARD)


def max_delayed(actions: Iterable[Action | Pair], size_of: Mapping[int, float]) -> float:
    """The same of microbatches between `backward_input` and `backward_weight`."""
    return max_held(actions, size_of, DELAYED)


def max_messages(actions: Iterable[Action | Pair], keeping: Collection[int]) -> int:
    """The most buffers of messages that a rank has at once (parallel/pipeline/messages.py), but for received
    activations that these stages keep for their backward anyhow."""
    received = dict[tuple[int, int], int]()  # by stage and microbatch, without what the stage keeps
    activations = set[tuple[int, int]]()
    num_sent = most = 0
    for action in flat(actions):
        key = action[1:]
        if action.kind.startswith("send"):
            num_sent = min(num_sent + 1, KEPT_SENDS)
        elif action.kind.startswith("receive"):
            received[key] = received.get(key, 0) + 1
            activations |= {key} if action.kind == "receive_activation" and action.stage in keeping else set()
        elif action.frees:
            received.pop(key, None)
        elif key in activations:  # the forward keeps it, and backward_input leaves it to delayed weight gradients
            received[key] += -1 if action.kind == "forward" else 1
        most = max(most, num_sent + sum(received.values()))
    return most
