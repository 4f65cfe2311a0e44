"""The pieces of a model: their order, and where an exchange is pending."""

import pytest

from titan_moe.plan.pipeline.pieces import ROOT, START_LAYER, Piece, pieces, stretches

MODELS = {
    "experts": [False, False],
    "dense_first": [True, False, False, False],
    "dense_between": [False, True, True, False],
    "dense_last": [False, True],
    "no_experts": [True, True],
}


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def is_dense(request: pytest.FixtureRequest) -> list[bool]:
    return request.param


def test_pieces_are_a_whole_forward(is_dense: list[bool]) -> None:
    named = pieces(is_dense)
    assert named[0] == Piece(ROOT, "embed") and named[-1] == Piece(ROOT, "head")
    assert [layer for layer, name in named[1:-1] if name in START_LAYER] == list(range(len(is_dense)))


def test_stretches_alternate_between_attention_and_experts(is_dense: list[bool]) -> None:
    cut = stretches(is_dense)
    assert [piece for stretch in cut for piece in stretch] == pieces(is_dense)
    assert len(cut) == 1 + 2 * is_dense.count(False)
    assert all([name for _, name in stretch] == ["experts"] for stretch in cut[1::2])
