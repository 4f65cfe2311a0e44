"""The timing of clones: its loads, and a tiny run over gloo."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from titan_moe.config.model import MoEConfig

TOOLS = str(Path(__file__).parents[2] / "tools")
TINY = Path(__file__).parents[1] / "training" / "tiny.toml"


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported from its folder."""
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module("time_clones")


@pytest.mark.parametrize("num_hot", range(5))
def test_hot_experts_are_in_every_choice_and_others_balanced(timing: ModuleType, num_hot: int) -> None:
    table_TK = timing.hot_table(MoEConfig(num_experts=16, top_k=4), num_hot, torch.device("cpu"))
    assert all(len(set(row)) == 4 for row in table_TK.tolist())
    counts_E = table_TK.flatten().bincount(minlength=16)
    assert (counts_E[:num_hot] == len(table_TK)).all()
    others_E = counts_E[num_hot:] / max(len(table_TK) * (4 - num_hot), 1) * (16 - num_hot)
    assert num_hot == 4 or (others_E - 1).abs().max() < 0.5


def test_a_fraction_of_tokens_has_one_hot_expert_more(timing: ModuleType) -> None:
    config, cpu = MoEConfig(num_experts=16, top_k=4), torch.device("cpu")
    table_TK = timing.hot_table(config, 1.25, cpu)
    assert torch.equal(table_TK[3::4], timing.hot_table(config, 2, cpu)[3::4])
    for first in range(3):
        assert torch.equal(table_TK[first::4], timing.hot_table(config, 1, cpu)[first::4])


@pytest.mark.few()
@pytest.mark.slow
def test_clones_are_timed_on_the_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    layout = ["--parallel.ep=2", "--parallel.dispatcher=allgather", "--train.global_batch_sequences=4"]
    options = ["--hot", "0", "1", "--steps=2", f"--out={tmp_path / 'lines.json'}", *layout]
    subprocess.run(
        [*command, f"{TOOLS}/time_clones.py", str(TINY), *options],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    lines = [json.loads(line) for line in (tmp_path / "lines.json").read_text().splitlines()]
    results = [(line["jobs"], line["result"]) for line in lines]
    assert [jobs for jobs, _ in results] == [["off"]] * 2 + [["auto"]] * 2
    for (_, without), (_, auto) in zip(results[:2], results[2:], strict=True):
        assert without["replica_slots_in_use"] == auto["replica_slots_in_use"] == 0, (
            "so few slots are not worth a clone"
        )
        assert auto["loss"] == without["loss"]
