"""The schedule as data: the order of pieces, what hides communication, and the order of gradient sums."""

from itertools import pairwise

import pytest

from titan_moe.plan.schedule import ROOT, Action, Piece, interleaved, pieces, stretches

MODELS = {
    "experts": [False, False],
    "dense_first": [True, False, False, False],
    "dense_between": [False, True, True, False],
    "dense_last": [False, True],
    "no_experts": [True, True],
}
COMPUTE = {"front", "experts", "block", "head"}
"""Pieces that take long enough to hide something."""


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def is_dense(request: pytest.FixtureRequest) -> list[bool]:
    return request.param


def of(actions: list[Action], kind: str, microbatch: int) -> list[Piece]:
    return [Piece(a.layer, a.piece) for a in actions if (a.kind, a.microbatch) == (kind, microbatch)]


def runs(actions: list[Action]) -> list[Action]:
    return [action for action in actions if action.kind in ("forward", "backward")]


def test_schedule_of_a_pair_of_microbatches() -> None:
    actions = runs(interleaved(2, [False]))
    lines = [f"{action.kind} {action.microbatch} {action.piece}" for action in actions]
    alone = 5
    assert lines[alone:-alone] == [
        *("backward 0 head", "backward 0 back"),
        *("forward 1 embed", "forward 1 front"),
        "backward 0 experts",
        "forward 1 experts",
        *("backward 0 front", "backward 0 embed"),
        *("forward 1 back", "forward 1 head"),
    ]


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_schedule_runs_all_pieces_forward_and_backward(is_dense: list[bool], num_microbatches: int) -> None:
    actions = interleaved(num_microbatches, is_dense)
    forward = pieces(is_dense)
    assert [name for _, name in forward][:: len(forward) - 1] == ["embed", "head"]
    for microbatch in range(num_microbatches):
        assert of(actions, "forward", microbatch) == forward
        assert of(actions, "backward", microbatch) == forward[::-1]
        loss, first = Action("forward", microbatch, ROOT, "head"), Action("backward", microbatch, ROOT, "head")
        assert actions.index(loss) < actions.index(first)
    assert len(runs(actions)) == 2 * num_microbatches * len(forward)


def test_schedule_keeps_the_order_of_backwards(is_dense: list[bool]) -> None:
    backwards = [action.microbatch for action in interleaved(3, is_dense) if action.kind == "backward"]
    assert backwards == sorted(backwards)


def test_schedule_hides_every_exchange_of_a_pair(is_dense: list[bool]) -> None:
    actions = runs(interleaved(3, is_dense))
    first, last = actions.index(Action("backward", 0, ROOT, "head")), actions.index(Action("forward", 2, ROOT, "head"))
    paired = actions[first : last + 1]
    num_messages = 0
    for microbatch in range(3):
        for kind in ("forward", "backward"):
            mine = [i for i, a in enumerate(paired) if (a.kind, a.microbatch) == (kind, microbatch)]
            for start, wait in pairwise(mine):
                # a piece that starts an exchange in forward waits for its gradient in backward
                sender = paired[start if kind == "forward" else wait].piece
                if sender in ("front", "experts"):
                    between = {a.piece for a in paired[start + 1 : wait] if a.microbatch != microbatch}
                    assert between & COMPUTE, (paired[start], paired[wait])
                    num_messages += 1
    assert num_messages == 8 * is_dense.count(False), "two a layer, both ways, in two pairs"


def test_schedule_alternates_stretches_of_attention_and_experts(is_dense: list[bool]) -> None:
    cut = stretches(is_dense)
    assert [piece for stretch in cut for piece in stretch] == pieces(is_dense)
    assert len(cut) == 1 + 2 * is_dense.count(False)
    assert all([name for _, name in stretch] == ["experts"] for stretch in cut[1::2])


def test_schedule_gathers_a_layer_ahead_and_reduces_after_backward(is_dense: list[bool]) -> None:
    actions = interleaved(2, is_dense)
    for layer in [ROOT, *range(len(is_dense))]:
        gather, wait = actions.index(Action("gather", 0, layer)), actions.index(Action("await", 0, layer))
        mine = [i for i, action in enumerate(actions) if action.layer == layer]
        assert [i for i in mine if i <= wait] == [gather, wait] and wait < min(mine[2:])
        if layer > ROOT:
            assert any(action.kind == "forward" for action in actions[gather:wait]), "something hides it"
        for microbatch in range(2):
            backwards = [i for i in mine if actions[i][:2] == ("backward", microbatch)]
            assert actions[max(backwards) + 1] == Action("reduce_grads", microbatch, layer)
        assert [a.kind for a in actions if a.layer == layer].count("reduce_grads") == 2
