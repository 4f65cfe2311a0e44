"""The time of a pipeline's step for many different times of its stages: what simulation.py computes, with the order of
all actions found once for each schedule."""

from functools import lru_cache
from typing import NamedTuple

from titan_moe.config.parallel import ParallelConfig
from titan_moe.plan.pipeline.action import Action, actions_in, needs_of
from titan_moe.plan.pipeline.schedules import actions_of
from titan_moe.plan.pipeline.simulation import Times


class _Step(NamedTuple):
    """An action or a pair, in an order in which all that it needs comes before."""

    rank: int
    kind: int  # a row of `_Order.kinds`
    needs: tuple[int, ...]  # steps of other ranks


class _Order(NamedTuple):
    kinds: tuple[tuple[str, int], ...]
    """By number, what an action does and its stage; the parts of a pair."""
    steps: tuple[_Step, ...]


def makespan_of(parallel: ParallelConfig, num_microbatches: int, times: Times) -> float:
    """The makespan of a recipe's pipeline. Pairs take as long as both of their parts."""
    p = parallel
    order = _order_of(p.pp_schedule, p.pp, p.vpp, num_microbatches, p.overlap == "microbatch")
    durations = [_duration(times, kind, stage) for kind, stage in order.kinds]
    free, ends = [0.0] * p.pp, list[float]()
    for rank, kind, needs in order.steps:
        end = free[rank]
        for need in needs:
            if ends[need] > end:
                end = ends[need]
        end += durations[kind]
        free[rank] = end
        ends.append(end)
    return max(free)


def _duration(times: Times, kind: str, stage: int) -> float:
    if kind == "backward":
        return times.backward_input[stage] + times.backward_weight[stage]
    of_kind: dict[str, float] = {
        "forward": times.forward[stage],
        "backward_input": times.backward_input[stage],
        "backward_weight": times.backward_weight[stage],
    }
    return of_kind.get(kind, 0.0)


@lru_cache(maxsize=64)
def _order_of(schedule: str, pp: int, vpp: int, number: int, has_pairs: bool) -> _Order:
    """The steps of all ranks, without messages. A pair is two steps, of which the first one has the needs of both."""
    listed = actions_of(schedule, pp, vpp, number, has_pairs=has_pairs)
    actions = {action for of_rank in listed for each in of_rank for action in actions_in(each)}
    last_stage = max(action.stage for action in actions)
    kinds: dict[tuple[str, int], int] = {}
    at: dict[object, int] = {}
    steps: list[_Step] = []
    last = [-1] * len(listed)  # steps of the ranks
    heads = [0] * len(listed)
    waited: list[tuple[Action, ...]] = [()] * len(listed)  # what the heads need that is not there yet
    progressed = True
    while progressed:
        progressed = False
        for rank, of_rank in enumerate(listed):
            while heads[rank] < len(of_rank):
                if not all(need in at for need in waited[rank]):
                    break
                own = actions_in(of_rank[heads[rank]])
                if own[0].is_message:  # waits for nothing but what its rank did before, and takes no time
                    at[own[0]] = last[rank]
                    heads[rank] += 1
                    progressed = True
                    continue
                needed = waited[rank] or tuple(need for one in own for need in needs_of(one, actions, last_stage))
                if not all(need in at for need in needed):
                    waited[rank] = needed
                    break
                needs = tuple(at[need] for need in needed)
                for number_of, one in enumerate(own):
                    kind = kinds.setdefault((one.kind, one.stage), len(kinds))
                    steps.append(_Step(rank, kind, () if number_of else needs))
                last[rank] = len(steps) - 1
                at |= dict.fromkeys(own, last[rank])  # both results of a pair are there at its end
                heads[rank] += 1
                waited[rank] = ()
                progressed = True
    return _Order(tuple(kinds), tuple(steps))
