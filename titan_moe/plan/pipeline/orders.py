"""The order of forwards and backwards of each schedule, without messages.

An order is a list of numbers of repeats with what is repeated. F is a forward, B a backward, I a `backward_input`. A
digit behind a letter selects one of the rank's stages; without a digit the stages take turns. Two that are joined by +
run as a pair.

For a split backward an order has only the gradients of inputs: the generator (schedules.py) places those of weights.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from titan_moe.plan.pipeline.action import Action, Kind
from titan_moe.plan.pipeline.stages import stages_on_rank

KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward_input"}

Repeats = Sequence[tuple[int, str]]
Order = list[tuple[Action, ...]]
"""Actions, alone and in pairs. Those of a pair begin when the inputs of both are there."""


def order_of(schedule: str, rank: int, pp: int, vpp: int, num_microbatches: int, *, has_pairs: bool) -> Order:
    """The order of a rank; with `has_pairs` that of a schedule that has pairs."""
    repeats = (ORDERS_WITH_PAIRS if has_pairs else ORDERS)[schedule](rank, pp, vpp, num_microbatches)
    return _write_out(repeats, stages_on_rank(rank, pp, vpp, schedule), pp, num_microbatches)


def _one_forward_one_backward(rank: int, pp: int, vpp: int, num_microbatches: int) -> Repeats:
    """As many forwards first as ranks follow (arXiv:2104.04473)."""
    return _alternate(pp - rank - 1, num_microbatches)


def _interleaved(rank: int, pp: int, vpp: int, num_microbatches: int) -> Repeats:
    """A stage takes pp microbatches, then the next stage does; in between gradients take the way back."""
    return _alternate((vpp - 1) * pp + 2 * (pp - rank - 1), vpp * num_microbatches)


def _with_pairs(rank: int, pp: int, vpp: int, num_microbatches: int) -> Repeats:
    """Every forward after the warm-up is beside a backward, with one stage a rank or several.

    What a pair sends leaves at its end. So a rank is 2 forwards ahead of the next one: an activation takes one pair to
    it, a gradient one pair back. One more forward on every rank, or a pair of the last one would need its own forward
    (Megatron's warm-up for combined 1F1B, arXiv:2603.07685).
    """
    return _alternate((vpp - 1) * pp + 2 * (pp - rank - 1) + 1, vpp * num_microbatches, "+")


def _alternate(warm_up: int, num_forwards: int, between: str = " ") -> Repeats:
    warm_up = min(warm_up, num_forwards)
    return [(warm_up, "F"), (num_forwards - warm_up, f"F{between}B"), (warm_up, "B")]


def _zbv(rank: int, pp: int, vpp: int, num_microbatches: int) -> Repeats:
    """Forwards down the V until the first has come up again, then all four in turn (ZB-V, arXiv:2401.10241)."""
    steady = max(num_microbatches - pp, pp)  # of fewer microbatches, the last are left out
    return [
        (2 * (pp - rank) - 1, "F0"),
        (rank, "F1 F0"),
        (pp - rank, "F1 I1"),
        (steady, "F0 I0 F1 I1"),
        (rank, "I0 I1"),
        (pp - rank, "I0"),
    ]


def _dualpipev(rank: int, pp: int, vpp: int, num_microbatches: int) -> Repeats:
    """In the middle each forward is beside a backward (github.com/deepseek-ai/DualPipe). Backwards are split where the
    next rank waits for a gradient: before the middle, and in the last half of those after it."""
    after, whole = pp - rank - 1, rank // 2 + 1
    return [
        (2 * after, "F0"),
        (rank + 1, "F0 F1"),
        (after, "I1 F1"),
        (1, "F0+B1 F1+B0" if after else "F0 B1 F1+B0"),  # the bottom of the V has the gradient F0 leads to
        (num_microbatches - 2 * pp + rank, "F0+B1 F1+B0"),
        (after, "B1 F1+B0"),
        (whole, "B1 B0"),
        (rank + 1 - whole, "I1 I0"),
        (after, "I0"),
    ]


ORDERS: dict[str, Callable[[int, int, int, int], Repeats]] = {
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _interleaved,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
"""By schedule: the order of a rank, from its number, pp, vpp and the number of microbatches."""

ORDERS_WITH_PAIRS: dict[str, Callable[[int, int, int, int], Repeats]] = {
    "1f1b": _with_pairs,
    "interleaved_1f1b": _with_pairs,
    "dualpipev": _dualpipev,
}
"""The same with pairs, by schedule that has them (`SCHEDULES`)."""


def _write_out(repeats: Repeats, stages: Sequence[int], pp: int, num_microbatches: int) -> Order:
    """Number the microbatches, in order for each stage and way. Those past the last are left out."""
    turns: Counter[bool] = Counter()  # by whether forward
    microbatches: Counter[tuple[bool, int]] = Counter()
    order = []
    for word in (word for number, words in repeats for word in number * words.split()):
        actions = []
        for letter in word.split("+"):
            is_forward = letter[0] == "F"
            turn = turns[is_forward] // pp % len(stages)
            stage = stages[int(letter[1:] or (turn if is_forward else -1 - turn))]
            actions.append(Action(KINDS[letter[0]], stage, microbatches[is_forward, stage]))
            turns[is_forward] += 1
            microbatches[is_forward, stage] += 1
        order.append(tuple(action for action in actions if action.microbatch < num_microbatches))
    return [actions for actions in order if actions]
