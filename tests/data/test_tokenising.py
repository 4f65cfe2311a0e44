"""The progress of a corpus that is tokenised."""

import numpy as np
import pytest

from titan_moe.data import tokenising
from titan_moe.data.tokenising import in_words, reported


def test_progress_is_logged_now_and_then(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 4.0, 12.0, 13.0, 30.0, 30.0])
    monkeypatch.setattr(tokenising.time, "monotonic", lambda: next(times))
    documents = [np.arange(number) for number in range(4)]
    with caplog.at_level("INFO"):
        assert list(reported(iter(documents), lambda: 0.25)) == documents
    assert caplog.messages == [
        "tokenising: 25% of the data, 2 documents, 1 tokens, 0 tokens/s, 0.6 min left",
        "tokenising: 25% of the data, 4 documents, 6 tokens, 0 tokens/s, 1.5 min left",
        "tokenised 4 documents: 6 tokens in 30 s",
    ]
    assert in_words(3, 5000, 2.0, 0.0) == "tokenising: 3 documents, 5,000 tokens, 2,500 tokens/s"
