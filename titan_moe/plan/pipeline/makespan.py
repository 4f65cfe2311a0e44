"""The time of a pipeline's step for many different times of its stages: what simulation.py computes, with the order of
all actions found once for each schedule."""

from functools import lru_cache
from typing import NamedTuple

from titan_moe.config.parallel import ParallelConfig
from titan_moe.plan.pipeline.action import SENT, WAITS_FOR, Action, actions_in
from titan_moe.plan.pipeline.schedules import actions_of
from titan_moe.plan.pipeline.simulation import Times

Message = tuple[str, int, int]
"""The action that receives it."""


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
    """The steps of all ranks. A pair is two steps, of which the first one has the needs of both. Messages take no time:
    one leaves after what its rank did before, and is waited for where it is needed."""
    lists = [map(actions_in, listed) for listed in actions_of(schedule, pp, vpp, number, has_pairs=has_pairs)]
    kinds: dict[tuple[str, int], int] = {}
    steps: list[_Step] = []
    last = [-1] * pp  # steps of the ranks
    expected, sent = set[Message](), dict[Message, int]()  # by the receiver; sent ones with the step before
    heads: list[tuple[Action, ...]] = [()] * pp  # what ranks have come to
    waiting, ready = dict[Message, int](), list(range(pp))  # ranks, by what they wait for, and others
    while ready:
        rank = ready.pop()
        while own := heads[rank] or next(lists[rank], ()):
            heads[rank] = own
            kind, stage, microbatch = own[0]
            if kind in SENT:
                way, step = SENT[kind]
                message = way, stage + step, microbatch
                sent[message] = last[rank]
                if message in waiting:
                    ready.append(waiting.pop(message))
            elif own[0].is_message:
                expected.add(own[0])
            else:
                messages = [it for one in own if (it := (WAITS_FOR.get(one[0], ""), *one[1:])) in expected]
                if missing := [it for it in messages if it not in sent]:
                    waiting[missing[0]] = rank
                    break
                for one in own:
                    needs = tuple(sent[it] for it in messages) if one is own[0] else ()
                    steps.append(_Step(rank, kinds.setdefault((one.kind, one.stage), len(kinds)), needs))
                last[rank] = len(steps) - 1
            heads[rank] = ()
    return _Order(tuple(kinds), tuple(steps))
