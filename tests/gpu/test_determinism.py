"""Deterministic runs on GPUs: two of one recipe have the same bits, launched and captured, alone and on all GPUs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import load
from support.gpus import NUM_GPUS
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.gpu

NUM_RANKS = min(NUM_GPUS, 4)
test_ranks = load("gpu/test_ranks")
SETTINGS = (
    "--run.is_deterministic=true",
    "--train.steps=5",
    "--optim.kind=fused_adamw",
    "--precision.moments=bf16",
)
CAPTURED = ("--compile.cudagraph=step", "--perf.kernels=fused", "--parallel.expert_rank_capacity_factor=1.25")
WHOLE = f"--parallel.ep={NUM_RANKS}"
ALLTOALL = (WHOLE, "--parallel.dispatcher=alltoall")
PIPELINE = ("--parallel.pp=2", "--train.micro_batch_sequences=1", "--model.num_layers=4")
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    # name: the fewest ranks, overrides; runs on several take NUM_RANKS
    "launched": (1, ("--perf.kernels=fused",)),
    "captured": (1, ("--compile.cudagraph=step", "--perf.kernels=fused")),
    "flex": (1, ("--perf.attention=flex", "--data.document_attention=true")),
    "fp8": (
        1,
        ("--perf.kernels=fused", "--precision.experts=fp8_rowwise", "--precision.only_where_faster=false"),
    ),
    "fp8_blockwise": (
        1,
        ("--perf.kernels=fused", "--precision.format=fp8_blockwise", "--precision.only_where_faster=false"),
    ),
    "alltoall": (2, ALLTOALL),
    "fsdp": (2, ("--parallel.ep=1", "--perf.kernels=fused")),
    "tp": (2, ("--parallel.tp=2", *ALLTOALL)),
    "cp": (2, ("--parallel.cp=2", *ALLTOALL)),
    "cp_ring": (2, ("--parallel.cp=2", "--parallel.cp_kind=ring", *ALLTOALL)),
    "etp": (2, ("--parallel.etp=2", "--perf.kernels=fused")),
    "pp": (2, PIPELINE),
    "hsdp": (4, ("--parallel.dp_replicate=2", "--parallel.ep=2", "--parallel.dispatcher=alltoall")),
    "symm_mem, captured": (2, (WHOLE, "--parallel.dispatcher=symm_mem", *CAPTURED)),
    "tiles": (
        2,
        (WHOLE, "--parallel.dispatcher=symm_mem", "--parallel.overlap=tile", "--perf.kernels=fused"),
    ),
}


def train(folder: Path, num_ranks: int, *overrides: str) -> tuple[list[float], list[torch.Tensor]]:
    """The losses and norms of all steps; parameters and optimizer state. The mode is of a process: each run has its
    own."""
    words = test_ranks.words(folder, *SETTINGS, *overrides)
    if num_ranks > 1:
        words.append(f"--nproc={num_ranks}")
    finished = subprocess.run([sys.executable, "-m", "titan_moe", *words], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-3000:]
    records = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    seen = [record[name] for record in records if "loss" in record for name in ("loss", "grad_norm")]
    dcp_to_torch_save(folder / "run" / "checkpoints" / "step-5", folder / "step-5.pt")
    state: Any = torch.load(folder / "step-5.pt", weights_only=False)
    return seen, [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", RUNS)
def test_two_runs_on_gpus_have_the_same_bits(tmp_path: Path, name: str) -> None:
    fewest, overrides = RUNS[name]
    if fewest > 1 and NUM_RANKS < fewest:
        pytest.skip(f"with fewer than {fewest} GPUs an axis has one rank")
    num_ranks = NUM_RANKS if fewest > 1 else 1
    (seen, tensors), (seen_again, tensors_again) = (train(tmp_path / run, num_ranks, *overrides) for run in "ab")
    assert seen == seen_again and len(set(seen)) == len(seen) == 10
    assert len(tensors) == len(tensors_again) > 20
    assert [
        index for index, pair in enumerate(zip(tensors, tensors_again, strict=True)) if not torch.equal(*pair)
    ] == []
