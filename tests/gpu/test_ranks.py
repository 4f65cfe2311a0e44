"""Several GPUs over NCCL: every dispatcher trains as one GPU does, through the command line's door."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from support.gpus import NUM_GPUS, SHARED, needs_gpus

pytestmark = [pytest.mark.gpu, needs_gpus]

NUM_RANKS = 4 if NUM_GPUS >= 4 else 2
BY_COMMAND = ("alltoall", "edp2")
"""Layouts, a compiled and a plain one, that start as users start them, with `--nproc`; all others share processes."""
FP8_TOLERANCE = 3e-2
"""Of losses in fp8 beside those of bf16 on one GPU."""
RECIPE = """
[run]
device = "cuda"
[model]
vocab_size = 512
num_layers = 3
num_dense_layers = 1
hidden_size = 256
ffn_hidden_size = 512
[model.attention]
num_heads = 4
num_kv_heads = 2
head_dim = 64
[model.moe]
num_experts = 16
top_k = 4
ffn_hidden_size = 128
aux_loss_coef = 1e-2
[train]
steps = 20
seq_len_tokens = 256
global_batch_sequences = 8
micro_batch_sequences = 2
[optim]
lr = 1e-3
[metrics]
every_steps = 1
tensorboard = false
[checkpoint]
every_steps = 10
"""


def words(folder: Path, *overrides: str) -> list[str]:
    """The command that trains in a folder of its own."""
    folder.mkdir()
    (folder / "recipe.toml").write_text(RECIPE)
    return ["train", str(folder / "recipe.toml"), f"--run.folder={folder / 'run'}", *SHARED, *overrides]


def read(folder: Path) -> list[float]:
    """The losses of all steps."""
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def losses(train_on_ranks: Callable[..., list[int]]) -> Callable[..., list[float]]:
    """Trains in a folder of its own on so many ranks, and reads the losses."""

    def train(folder: Path, num_ranks: int, *overrides: str) -> list[float]:
        assert train_on_ranks(num_ranks, words(folder, *overrides)) == [0] * num_ranks
        return read(folder)

    return train


def losses_by_command(folder: Path, num_ranks: int, *overrides: str) -> list[float]:
    """The same as a user starts it."""
    command = [sys.executable, "-m", "titan_moe", *words(folder, *overrides), f"--nproc={num_ranks}"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return read(folder)


def layouts(num_ranks: int) -> dict[str, tuple[str, ...]]:
    """One that compiles, the others plain: they start faster."""
    plain, alltoall, allgather = (
        "--compile.regional=off",
        "--parallel.dispatcher=alltoall",
        "--parallel.dispatcher=allgather",
    )
    whole, half = f"--parallel.ep={num_ranks}", f"--parallel.ep={num_ranks // 2}"
    spread = f"--parallel.ep={max(num_ranks // 2, 2)}"
    of_node = f"--parallel.ep_ranks_per_node={num_ranks // 2}"
    two_nodes = (whole, "--parallel.dispatcher=hierarchical", of_node)
    two_nodes_symm_mem = (whole, "--parallel.dispatcher=hierarchical_symm_mem", of_node)
    symm_mem, bounded = "--parallel.dispatcher=symm_mem", "--parallel.expert_rank_capacity_factor=1.25"
    worst = "--parallel.expert_rank_capacity_factor=0"
    validated = ("--validation.every_steps=4", "--validation.num_sequences=8")
    gated = ("--model.moe.shared_ffn_hidden_size=128", "--model.moe.shared_expert_gate=true")
    tiled = (whole, symm_mem, "--parallel.overlap=tile", "--perf.kernels=fused")
    ungated = ("--precision.only_where_faster=false", "--perf.kernels=fused")
    fp8 = ("--precision.format=fp8_rowwise", *ungated)
    blockwise = ("--precision.format=fp8_blockwise", *ungated)
    split = ("--parallel.tp=2",)
    ring, overlapped = "--parallel.cp_kind=ring", "--parallel.tp_comm_overlap=true"
    interleaved = (
        "--parallel.overlap=microbatch",
        "--parallel.accumulate_unsharded=true",
        "--train.micro_batch_sequences=1",
    )
    return {
        "dp": (plain,),
        "allgather": (whole, allgather, plain),
        "blocks": (whole, allgather, "--compile.extent=block"),
        "alltoall": (whole, alltoall),
        "edp2": (half, alltoall, plain),
        "two_nodes": two_nodes,
        "two_nodes_interleaved": (*two_nodes, *interleaved, "--perf.kernels=fused", plain),
        "two_nodes_symm_mem": (*two_nodes_symm_mem, "--perf.kernels=fused"),
        "two_nodes_symm_mem_captured": (*two_nodes_symm_mem, bounded, "--compile.cudagraph=step", *validated),
        "two_nodes_symm_mem_worst_case": (*two_nodes_symm_mem, worst),
        "two_nodes_symm_mem_clones": (*two_nodes_symm_mem, *interleaved, "--parallel.expert_clones=1", plain),
        "two_nodes_symm_mem_blocks": (*two_nodes_symm_mem, bounded, "--compile.extent=block", "--perf.kernels=fused"),
        "two_nodes_fp8": (*two_nodes, *fp8, "--memory.recompute=block", plain),
        "hsdp": ("--parallel.dp_replicate=2", half, alltoall, plain),
        "recompute": (whole, alltoall, "--memory.recompute=block"),
        "fused": (whole, alltoall, "--perf.kernels=fused"),
        "gated": (whole, alltoall, *gated, plain),
        "bounded": (whole, allgather, bounded, plain),
        "captured": (whole, allgather, "--compile.cudagraph=step", bounded),
        "captured_microbatch": (whole, allgather, "--compile.cudagraph=microbatch"),
        "symm_mem": (whole, symm_mem),
        "symm_mem_edp2": (spread, symm_mem, plain),
        "symm_mem_fused": (whole, symm_mem, "--perf.kernels=fused"),
        "symm_mem_worst_case": (whole, symm_mem, worst, plain),
        "symm_mem_recompute": (whole, symm_mem, "--memory.recompute=block", bounded, plain),
        "symm_mem_blocks": (whole, symm_mem, "--compile.extent=block", bounded),
        "symm_mem_captured": (whole, symm_mem, "--compile.cudagraph=step", bounded, *validated),
        "symm_mem_captured_blocks": (whole, symm_mem, "--compile.cudagraph=step", "--compile.extent=block"),
        "symm_mem_captured_microbatch": (whole, symm_mem, "--compile.cudagraph=microbatch", plain),
        "tiles": (*tiled, *gated),
        "tiles_auto_captured": (*tiled, "--compile.cudagraph=step", *validated),
        "tiles_worst_case": (*tiled, worst, plain),
        "tiles_edp2": (spread, *tiled[1:], "--memory.recompute=block", plain),
        "tiles_captured": (*tiled, "--compile.cudagraph=step", bounded, *validated, plain),
        "tiles_captured_blocks": (*tiled, "--compile.cudagraph=step", "--compile.extent=block", bounded),
        "tiles_clones": (*tiled, "--parallel.expert_clones=1", "--compile.cudagraph=step", bounded, plain),
        "interleaved": (half, alltoall, *interleaved, *gated),
        "interleaved_hsdp": ("--parallel.dp_replicate=2", half, alltoall, *interleaved, plain),
        "interleaved_recompute": (whole, allgather, *interleaved, "--memory.recompute=experts", plain),
        "interleaved_fused": (whole, alltoall, *interleaved, "--perf.kernels=fused"),
        "interleaved_captured": (whole, allgather, *interleaved, "--compile.cudagraph=step", plain),
        "clones": (whole, alltoall, "--parallel.expert_clones=2", "--perf.kernels=fused"),
        "clones_edp2": (spread, alltoall, "--parallel.expert_clones=1", "--memory.recompute=experts", plain),
        "clones_blocks": (whole, allgather, "--parallel.expert_clones=1", "--compile.extent=block"),
        "clones_captured": (whole, allgather, "--parallel.expert_clones=1", bounded, "--compile.cudagraph=step", plain),
        "clones_symm_mem": (whole, symm_mem, "--parallel.expert_clones=1", "--compile.cudagraph=step", bounded, plain),
        "clones_symm_mem_blocks": (whole, symm_mem, worst, "--parallel.expert_clones=1", "--compile.extent=block"),
        "clones_tiles_blocks": (*tiled, "--parallel.expert_clones=1", "--compile.extent=block", bounded, plain),
        "clones_kept": (
            *tiled,
            "--parallel.expert_clones=2",
            "--parallel.accumulate_unsharded=true",
            "--train.micro_batch_sequences=1",
        ),
        "clones_symm_mem_edp2": (spread, symm_mem, "--parallel.expert_clones=2", "--memory.recompute=experts", plain),
        "clones_interleaved": (spread, alltoall, "--parallel.expert_clones=1", *interleaved, plain),
        "fp8": (whole, alltoall, *fp8, plain),
        "fp8_blockwise": (whole, alltoall, *blockwise, plain),
        "fp8_blockwise_tiles_captured": (*tiled, *blockwise, "--compile.cudagraph=step", *validated),
        "fp8_edp2": (half, alltoall, *fp8, "--parallel.accumulate_unsharded=true", "--train.micro_batch_sequences=1"),
        "fp8_symm_mem_blocks": (whole, symm_mem, *fp8, "--compile.extent=block", bounded),
        "fp8_tiles_captured": (*tiled, *fp8, "--compile.cudagraph=step", *validated),
        "fp8_tiles_recompute": (*tiled, *fp8, "--memory.recompute=block", "--precision.linears=compute", plain),
        "tp": (*split, plain),
        "tp_ep": (*split, whole, alltoall),
        "tp_fp8_blockwise": (*split, whole, alltoall, *blockwise, plain),
        "tp_ep_blocks": (*split, whole, allgather, "--compile.extent=block"),
        "tp_symm_mem_captured": (*split, whole, symm_mem, "--compile.cudagraph=step", bounded, *validated),
        "tp_captured_microbatch": (*split, whole, allgather, "--compile.cudagraph=microbatch"),
        "tp_head": (*split, "--perf.override.head=triton", *validated, plain),
        "tp_head_torch": (*split, "--perf.override.head=torch", *validated, plain),
        "tp_head_tied_unsharded": (
            *split,
            whole,
            alltoall,
            "--perf.override.head=triton",
            "--model.embeddings_are_tied=true",
            "--parallel.accumulate_unsharded=true",
            "--train.micro_batch_sequences=1",
        ),
        "tp_tiles": (*split, *tiled, *gated),
        "tp_tiles_fp8_captured": (*split, *tiled, *fp8, "--compile.cudagraph=step"),
        "tp_async": (*split, overlapped, plain),
        "tp_async_ep": (*split, overlapped, whole, alltoall, *gated),
        "tp_async_blocks": (*split, overlapped, whole, allgather, "--compile.extent=block", "--memory.recompute=block"),
        "tp_async_symm_mem_captured": (*split, overlapped, whole, symm_mem, "--compile.cudagraph=step", bounded),
        "tp_documents": (*split, whole, alltoall, "--data.document_attention=true", "--perf.attention=flex"),
        "cp": ("--parallel.cp=2", plain),
        "cp_ep_tiles_captured": ("--parallel.cp=2", *tiled, "--compile.cudagraph=step", *validated),
        "cp_ep_blocks": ("--parallel.cp=2", whole, allgather, "--compile.extent=block"),
        "cp_gathered": ("--parallel.cp=2", "--parallel.cp_kind=allgather", "--perf.attention=flex", whole, alltoall),
        "cp_ring": ("--parallel.cp=2", ring, plain),
        "cp_ring_flash": (f"--parallel.cp={num_ranks}", ring, "--perf.attention=flash", plain),
        "cp_ring_ep": (f"--parallel.cp={num_ranks}", ring, whole, alltoall, "--memory.recompute=block"),
        "cp_ring_blocks": ("--parallel.cp=2", ring, whole, symm_mem, "--compile.extent=block", bounded),
        "cp_tp": (f"--parallel.cp={num_ranks // 2}", *split, whole, symm_mem, plain),
        "tp_edp2": (*split, half, allgather, "--memory.recompute=block", *gated, plain),
        "etp": ("--parallel.etp=2", "--perf.kernels=fused"),
        "etp_tiles_captured": (  # with two GPUs etp is 1
            spread,
            f"--parallel.etp={num_ranks // 2}",
            *tiled[1:],
            "--compile.cudagraph=step",
            bounded,
        ),
        "gathered_once": (half, alltoall, "--parallel.accumulate_unsharded=true", plain),
    }


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory: pytest.TempPathFactory, losses: Callable[..., list[float]]) -> Callable[..., list[float]]:
    """The losses of one GPU, for each change to the model once."""
    return cache(lambda *changes: losses(tmp_path_factory.mktemp("one") / "gpu", 1, *changes))


@pytest.mark.parametrize("layout", layouts(4))
def test_every_layout_trains_as_one_gpu(
    tmp_path: Path, losses: Callable[..., list[float]], one_gpu: Callable[..., list[float]], layout: str
) -> None:
    if layout.startswith("two_nodes") and NUM_RANKS < 4:
        pytest.skip("two nodes of two ranks")
    overrides = layouts(NUM_RANKS)[layout]
    expected = one_gpu(*(word for word in overrides if word.startswith("--model")))
    assert expected[-1] < expected[0] - 0.3
    train = losses_by_command if layout in BY_COMMAND else losses
    actual = train(tmp_path / "spread", NUM_RANKS, *overrides)
    tolerance = FP8_TOLERANCE if "fp8" in layout else 5e-3
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_a_run_resumes_on_another_number_of_gpus(
    tmp_path: Path, losses: Callable[..., list[float]], train_on_ranks: Callable[..., list[int]]
) -> None:
    ep = (f"--parallel.ep={NUM_RANKS}", "--parallel.dispatcher=alltoall")
    expected = losses(tmp_path / "whole", NUM_RANKS, *ep)
    half = tmp_path / "half"
    losses(half, NUM_RANKS, *ep, "--checkpoint.is_async=true", "--train.steps=10")
    assert train_on_ranks(1, ["train", str(half / "recipe.toml"), f"--run.folder={half / 'run'}"]) == [0]
    torch.testing.assert_close(read(half), expected, rtol=5e-3, atol=5e-3)
