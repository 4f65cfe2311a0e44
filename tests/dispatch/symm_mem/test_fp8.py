"""Rows that travel in fp8 give what they give where they arrive in compute's dtype and are rounded there.

Ranks and kernels are those of symm_mem/test_fused.py; every expert multiplies in fp8.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from support import load

from titan_moe.kernels.experts.fp8.format import (
    FP8_BLOCKWISE,
    FP8_BLOCKWISE_PLAIN_WGRAD,
    FP8_ROWWISE,
    FP8_ROWWISE_PLAIN_WGRAD,
)
from titan_moe.kernels.experts.fp8.packed import BLOCK
from titan_moe.kernels.experts.fused_mlp import FusedMLP

fused, in_arena = load("dispatch/symm_mem/test_fused"), load("dispatch/symm_mem/test_mlp")
equal_local = fused.equal_local
ROUTINGS = ("random", "skewed", "all_to_one_rank")
TOLERANCE = 0.12
"""Of a whole MLP, three products one after the other: about 19 dB."""


@contextmanager
def widened(module: ModuleType) -> Iterator[None]:
    """Within the `with` block a module of tests, and those that it has loaded, have widths of one block, with room for
    its scale."""
    with ExitStack() as stack:
        for value in list(vars(module).values()):
            if isinstance(value, ModuleType) and value.__name__.startswith("dispatch_"):
                stack.enter_context(widened(value))
        widths = {name: BLOCK for name in {"WIDTH", "HIDDEN", "D", "F"} & vars(module).keys()}
        if "SIZES" in vars(module):
            num_tokens, _, *rest = module.SIZES
            widths["SIZES"] = (num_tokens, BLOCK, *rest)
        stack.enter_context(mock.patch.multiple(module, **widths) if widths else nullcontext())
        yield


def both_in_blocks(folder: str | None, *args: Any) -> Any:
    """`run_both` with widths of one block."""
    with widened(fused):
        return fused.run_both(folder, *args)


def ways_in_blocks(folder: str | None, *args: Any) -> Any:
    """`run_ways` in the same way."""
    with widened(in_arena):
        return in_arena.run_ways(folder, *args)


def check_both(answers: list[Any], routings: tuple[str, ...] = ROUTINGS) -> None:
    """Results and gradients of rows have the same bits; gradients of weights add their tiles in another order."""
    num_ranks = len(answers)
    for index, routing in enumerate(routings):
        drawn = equal_local.inputs(routing, num_ranks, [equal_local.NUM_TOKENS] * num_ranks)
        oracle = equal_local.join([equal_local.dense_oracle(inputs) for inputs in drawn], experts_add_up=True)
        arrived, *travelled = (
            equal_local.join(list(parts), experts_add_up=False)
            for parts in zip(*(answer[index] for answer in answers), strict=True)
        )
        fused.assert_near(arrived, oracle, TOLERANCE)
        for results in travelled:
            assert all(map(torch.equal, results[:3], arrived[:3])), routing
            fused.assert_near(results, arrived, 1e-2 if torch.cuda.is_available() else 1e-6)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("routings", "num_replicas", "most_slots"), [(ROUTINGS[1:2], 1, 0.0), (ROUTINGS, 0, 8.0)], ids=["clones", "8.0"]
)
def test_files_carry_rows_in_fp8(
    ranks: Any, tmp_path: Path, routings: tuple[str, ...], num_replicas: int, most_slots: float
) -> None:
    """Sums that leave early, and those that do not, of a skewed routing alone, as in symm_mem/test_fused.py; these with
    clones."""
    args = num_replicas, most_slots, FusedMLP(FP8_ROWWISE)
    check_both(ranks(2, fused.run_both, str(tmp_path), routings, *args), routings)


@pytest.mark.few("rounded_weight_gradients")
@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("ways", "mlp"),
    [
        (("kept", "delayed", "rows", "nothing"), FusedMLP(FP8_ROWWISE)),
        (("lifted", "delayed", "rows", "nothing"), FusedMLP(FP8_ROWWISE_PLAIN_WGRAD)),
    ],
    ids=["rounded_weight_gradients", "plain_weight_gradients"],
)
def test_files_of_an_arena_keep_rows_in_fp8(ranks: Any, tmp_path: Path, ways: tuple[str, ...], mlp: FusedMLP) -> None:
    in_arena.check_ways(ranks(2, in_arena.run_ways, str(tmp_path), ways, True, 0, mlp))


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle has widths of one block."""
    for name in ("WIDTH", "HIDDEN"):
        monkeypatch.setattr(equal_local, name, BLOCK)


@pytest.mark.few()
@pytest.mark.interpreted
def test_files_carry_rows_with_scales_of_blocks(ranks: Any, tmp_path: Path, wide: None) -> None:
    check_both(ranks(2, both_in_blocks, str(tmp_path), ROUTINGS, 0, 8.0, FusedMLP(FP8_BLOCKWISE)))


@pytest.mark.few()
@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("ways", "mlp"),
    [
        (("kept", "checkpointed", "rows", "nothing"), FusedMLP(FP8_BLOCKWISE)),
        (("lifted", "delayed", "rows", "nothing"), FusedMLP(FP8_BLOCKWISE_PLAIN_WGRAD)),
    ],
    ids=["rounded_weight_gradients", "plain_weight_gradients"],
)
def test_files_of_an_arena_keep_scales_of_blocks(
    ranks: Any, tmp_path: Path, ways: tuple[str, ...], mlp: FusedMLP
) -> None:
    in_arena.check_ways(ranks(2, ways_in_blocks, str(tmp_path), ways, True, 0, mlp))


@fused.with_gpus
def test_gpus_carry_rows_with_scales_of_blocks(ranks_of_a_size: Any, num_ranks: int, wide: None) -> None:
    check_both(ranks_of_a_size(num_ranks, both_in_blocks, None, ROUTINGS, 0, 8.0, FusedMLP(FP8_BLOCKWISE)))


@fused.with_gpus
@pytest.mark.parametrize("num_replicas", [0, 1])
def test_gpus_carry_rows_in_fp8(ranks_of_a_size: Any, num_ranks: int, num_replicas: int) -> None:
    check_both(ranks_of_a_size(num_ranks, fused.run_both, None, ROUTINGS, num_replicas, 8.0, FusedMLP(FP8_ROWWISE)))


@fused.with_gpus
@pytest.mark.parametrize("overlaps", [True, False])
def test_gpus_of_an_arena_keep_rows_in_fp8(ranks_of_a_size: Any, num_ranks: int, overlaps: bool) -> None:
    ways = tuple(in_arena.WAYS)
    for format in (FP8_ROWWISE, FP8_ROWWISE_PLAIN_WGRAD):
        in_arena.check_ways(ranks_of_a_size(num_ranks, in_arena.run_ways, None, ways, overlaps, 0, FusedMLP(format)))


@fused.with_gpus
def test_gpus_of_an_arena_keep_scales_of_blocks(ranks_of_a_size: Any, num_ranks: int) -> None:
    ways = tuple(in_arena.WAYS)
    answers = ranks_of_a_size(num_ranks, ways_in_blocks, None, ways, True, 0, FusedMLP(FP8_BLOCKWISE))
    in_arena.check_ways(answers, again=1e-2)
