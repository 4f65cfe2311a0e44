"""max_logits_reference against logits that are written out."""

import torch
from support.kernel_samples import SAMPLES

from titan_moe.kernels.attention import max_logits
from titan_moe.kernels.attention.max_logits import Pairs, max_logits_reference


def by_hand(q: torch.Tensor, k: torch.Tensor, scale: float, pairs: Pairs) -> torch.Tensor:
    """Pair by pair."""
    largest = torch.full((q.shape[2],), -torch.inf, dtype=q.dtype)
    places = range(q.shape[1]) if pairs.positions_Q is None else pairs.positions_Q.tolist()
    ids, shared = pairs.document_ids_BN, q.shape[2] // k.shape[2]
    for batch in range(len(q)):
        for row, place in enumerate(places):
            keys = list(range(k.shape[1]))
            if pairs.is_causal:
                keys = keys[: place + 1][-(pairs.window or k.shape[1]) :]
                keys = [key for key in keys if pairs.chunk is None or key // pairs.chunk == place // pairs.chunk]
                keys = [key for key in keys if ids is None or ids[batch, key] == ids[batch, place]]
            own_HD, seen_KHD = q[batch, row], k[batch, keys].repeat_interleave(shared, 1)
            largest = torch.maximum(largest, torch.einsum("hd,khd->kh", own_HD, seen_KHD).amax(0) * scale)
    return largest


def test_reference_equals_logits_by_hand(monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(max_logits, "CHUNK_ELEMENTS", 1000)  # several chunks of queries
    for sample in SAMPLES["max_logits"].draw(torch.device("cpu"), torch.float64):
        torch.testing.assert_close(max_logits_reference(*sample.args), by_hand(*sample.args), msg=sample.name)
