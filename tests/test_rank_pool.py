"""The pool of ranks: a failure ends the wait for all of them, and the next call has new ones."""

import os
import sys
import time

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.slow


def fail(how: str) -> int:
    """Let the second rank fail, while the first one waits for ever."""
    if how == "not" or dist.get_rank() == 0:
        time.sleep(0 if how == "not" else 3600)
        return dist.get_rank()
    if how == "ends":
        os._exit(1)
    raise RuntimeError("alone")


def test_nobody_waits_long_after_a_failure(new_ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = new_ranks()
    monkeypatch.setattr(sys.modules[type(pool).__module__], "SECONDS_AFTER_A_FAILURE", 1)
    for how, said in (("raises", "RuntimeError: alone"), ("ends", "its process has ended")):
        assert pool(2, fail, "not") == [0, 1]
        start = time.monotonic()
        with pytest.raises(pytest.fail.Exception, match="rank 0:\nno answer in time(.|\n)*" + said):
            pool(2, fail, how)
        assert time.monotonic() - start < 30
    assert pool(2, fail, "not") == [0, 1]
