"""Runs with adapters: they begin with a base, resume exactly, and end as a file or as merged weights."""

import torch
from support.runs import one_process, tiny

__all__ = ["one_process", "tiny"]
ADAPTER = ("--model.adapter.rank=4", '--model.adapter.targets=["attention","dense","experts"]')
"""8 experts' ranks would be 16 bytes in fp32 too."""


def test_a_run_begins_with_a_base_and_resumes_exactly(tiny) -> None:
    base = tiny("--train.steps=1")
    assert base.train() == 0
    words = *ADAPTER, f"--checkpoint.load_from={base.folder / 'checkpoints' / 'step-1'}", "--train.steps=4"
    whole, part = tiny("--checkpoint.every_steps=2", *words), tiny(*words)
    assert whole.train() == 0
    assert whole.copy(part.folder, last_step=2).again() == 0
    before, after, resumed = base.checkpoint(1), whole.checkpoint(4), part.checkpoint(4)
    moments = {name.split("state.")[1].rpartition(".")[0] for name in after if name.endswith(".exp_avg")}
    assert moments and all(name.endswith(("adapter.A", "adapter.B", "_A", "_B")) for name in moments)
    assert {name for name, value in after.items() if name.endswith(".exp_avg") and not value.any()} == set()
    for name, value in after.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, resumed[name]), name
        if name in before and name.endswith(("weight", "gate_up", "down")):
            assert torch.equal(value, before[name]), name
    assert len(set(whole.column("loss"))) == 4
