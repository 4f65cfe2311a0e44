"""Ranks of GPU tests: they train run after run in the same processes, through the command line's door."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import clones
from support.rank_worker import release_groups

from titan_moe import cli

HOST = "127.0.0.1"


@pytest.fixture(scope="session")
def ranks(ranks_of_a_size: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return ranks_of_a_size


@pytest.fixture(scope="session")
def train_on_ranks(ranks: Callable[..., list[Any]]) -> Callable[[int, Sequence[str]], list[int]]:
    """Runs the words of a command on so many ranks, as its `--nproc` would, and returns their exit codes: one rank is
    this process, several are processes that stay for the next run. What they print is among what the test has printed.
    """

    def train(num_ranks: int, words: Sequence[str]) -> list[int]:
        if num_ranks == 1:
            return [run_here(list(words))]
        store = open_store()
        return ranks(num_ranks, run_as_rank, list(words), store.port)

    return train


def open_store() -> dist.TCPStore:
    """A store that outlives the ranks, as torchrun's does: none can leave too early for another."""
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def run_as_rank(words: list[str], port: int) -> int:
    """A command's exit code on one of torchrun's ranks."""
    with as_rank(port), clones.always_used():
        return cli.main(words)


@contextmanager
def as_rank(port: int) -> Iterator[None]:
    """Leave the pool's process group and be one of torchrun's ranks, whose store is at `port`, for as long as a run
    takes."""
    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with mock.patch.dict(os.environ, variables), nothing_left():
        yield


def run_here(words: list[str]) -> int:
    """A command's exit code in this process."""
    with mock.patch.dict(os.environ), nothing_left():
        return cli.main(words)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Begin without the graphs that were compiled before, and leave neither those nor a model's memory."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
        release_groups()
        torch.cuda.empty_cache()
