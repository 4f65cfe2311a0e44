"""Packing: labels are the next token; with document attention the last token of a document has none."""

import numpy as np
import pytest
import torch

from titan_moe.data.packing import IGNORE_LABEL, pack
from titan_moe.data.sample import Sample


def _sample(first: int, document_ids: list[int]) -> Sample:
    return Sample(np.arange(first, first + 5, dtype=np.int64), np.array(document_ids, dtype=np.int32))


def test_pack_labels_are_the_next_token() -> None:
    batch = pack([_sample(10 * i, [0, 0, 1, 1, 2]) for i in range(4)], 2, has_document_attention=False)
    assert batch.tokens_MBN.shape == (2, 2, 4)
    assert batch.tokens_MBN[1, 0].tolist() == [20, 21, 22, 23]
    assert torch.equal(batch.labels_MBN, batch.tokens_MBN + 1)
    assert batch.document_ids_MBN is None
    assert batch.tokens_MBN.dtype == batch.labels_MBN.dtype == torch.int64


def test_pack_document_attention_has_no_label_across_documents() -> None:
    batch = pack([_sample(0, [0, 0, 1, 1, 2]), _sample(7, [0] * 5)], 2, has_document_attention=True)
    assert batch.labels_MBN[0].tolist() == [[1, IGNORE_LABEL, 3, IGNORE_LABEL], [8, 9, 10, 11]]
    assert batch.document_ids_MBN is not None
    assert batch.document_ids_MBN[0].tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    assert batch.document_ids_MBN.dtype == torch.int32


@pytest.mark.parametrize("has_document_attention", [True, False])
def test_batch_moves_to_a_device_and_iterates_over_microbatches(has_document_attention: bool) -> None:
    batch = pack([_sample(10 * i, [0, 0, 1, 1, 2]) for i in range(4)], 2, has_document_attention)
    moved = batch.to(torch.device("meta"))
    assert {x.device.type for x in moved if x is not None} == {"meta"}
    assert (moved.document_ids_MBN is not None) == has_document_attention
    parts = list(batch.to(torch.device("cpu")).microbatches())
    assert len(parts) == 2
    for number, (tokens_BN, labels_BN, document_ids_BN) in enumerate(parts):
        assert tokens_BN.equal(batch.tokens_MBN[number])
        assert labels_BN.equal(batch.labels_MBN[number])
        if batch.document_ids_MBN is None:
            assert document_ids_BN is None
        else:
            assert document_ids_BN is not None
            assert document_ids_BN.equal(batch.document_ids_MBN[number])
