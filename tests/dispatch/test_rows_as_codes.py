"""Rows that travel as fp8 codes arrive as rounded rows, in both directions; sums travel as they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import load
from support.reference_rows import BLOCKWISE_ROWS, ROWWISE_ROWS
from torch import Tensor

from titan_moe.dispatch.async_collectives import ASYNC
from titan_moe.dispatch.collectives import SYNC
from titan_moe.dispatch.symm_mem.dispatcher import SymmMemDispatcher
from titan_moe.kernels.choose import PERMUTE
from titan_moe.kernels.experts.format import ExpertFormat
from titan_moe.kernels.experts.fp8.format import FP8_ROWWISE
from titan_moe.kernels.experts.fused_mlp import FusedMLP
from titan_moe.kernels.experts.plain import PLAIN
from titan_moe.kernels.formats.casts import round_to

equal_local, symm_mem, fused = (
    load(f"dispatch/{name}") for name in ("test_equal_local", "symm_mem/test_dispatcher", "symm_mem/test_fused")
)
ROUTINGS = ("random", "skewed", "one_rank_empty", "all_to_one_rank")
TOKENS = [12, 5, 0, 7]


def rounded(x_TD: Tensor) -> Tensor:
    return round_to(x_TD.float(), "fp8_rowwise", "activation", -1, power_of_two_scales=True).to(x_TD.dtype)


def send_both_ways(kind: str, routing: str) -> list[tuple[list[Tensor], list[Tensor]]]:
    """By collectives, the results of rows that travel as codes, and of rounded rows that travel as they are."""
    rank, num_ranks, answers = dist.get_rank(), dist.get_world_size(), []
    per_rank = equal_local.NUM_EXPERTS // 4  # 3 ranks do not divide 8 experts
    mine = equal_local.inputs(routing, num_ranks, TOKENS)[rank]
    mine = (mine[0], torch.where(mine[1] < per_rank * num_ranks, mine[1], -1), *mine[2:])
    as_rounded = (rounded(mine[0]), *mine[1:3], rounded(mine[3]))
    for collectives in (SYNC, ASYNC):
        ways = []
        for format, drawn in ((ROWWISE_ROWS, mine), (PLAIN, as_rounded)):
            module = equal_local.experts(rank * per_rank, (rank + 1) * per_rank)
            of_all = per_rank * num_ranks
            dispatcher = equal_local.KINDS[kind](
                of_all, dist.group.WORLD, collectives=collectives, row_format=format.name
            )
            ways.append(equal_local.serve(dispatcher, module, drawn))
        answers.append(tuple(ways))
    return answers


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", ["alltoall", "hierarchical"])
def test_rows_are_sent_as_codes(ranks: Any, kind: str, routing: str) -> None:
    for answers in ranks(3 if kind == "alltoall" else 4, send_both_ways, kind, routing):
        for as_codes, as_rounded in answers:
            assert all(map(torch.equal, as_codes, as_rounded))


def run_symm_mem(folder: str | None, routings: tuple[str, ...] = ROUTINGS) -> list[list[list[Tensor]]]:
    """Of each routing, the results of experts in fp8 whose rows travel as they are, and as codes."""
    memory, device = symm_mem.share(folder)
    module, answers = fused.my_experts(device, FusedMLP(FP8_ROWWISE)), []
    for routing in routings:
        ways = []
        for format in (PLAIN, FP8_ROWWISE):
            dispatcher = SymmMemDispatcher(equal_local.NUM_EXPERTS, memory, PERMUTE["triton"], row_format=format.name)
            module.zero_grad()
            symm_mem.poison(memory)
            home = equal_local.serve(dispatcher, module, fused.my_inputs(routing, device))
            ways.append([tensor.cpu() for tensor in home])
        answers.append(ways)
    return answers


def check_symm_mem(ranks: list[Any]) -> None:
    for answers in ranks:
        for plain, as_codes in answers:
            assert all(map(torch.equal, plain[:3], as_codes[:3]))
            # a rounded row may get half its scale and twice its codes: the scale moves to another factor, and rounds it
            fused.assert_near(as_codes, plain, 2e-2)


@pytest.mark.interpreted
def test_experts_in_fp8_do_not_see_how_rows_travelled(ranks: Any, tmp_path: Path) -> None:
    check_symm_mem(ranks(2, run_symm_mem, str(tmp_path), ("skewed", "one_rank_empty")))


@fused.with_gpus
def test_experts_in_fp8_do_not_see_how_rows_travelled_on_gpus(ranks_of_a_size: Any, num_ranks: int) -> None:
    check_symm_mem(ranks_of_a_size(num_ranks, run_symm_mem, None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("format", "name", "width"), [(ROWWISE_ROWS, "fp8_rowwise", 48), (BLOCKWISE_ROWS, "fp8_blockwise", 640)]
)
def test_packed_rows_have_their_width_and_come_back_rounded(
    dtype: torch.dtype, format: ExpertFormat, name: Any, width: int
) -> None:
    torch.manual_seed(0)
    x_SD = torch.randn(7, width).to(dtype) * torch.randn(7, width).mul(4).exp2().to(dtype)
    packed = format.pack(x_SD)
    assert packed.dtype == dtype and packed.shape == (7, format.row_width(width, dtype))
    expected = round_to(x_SD.float(), name, "activation", -1, power_of_two_scales=True).to(dtype)
    assert torch.equal(format.unpack(packed), expected)
    assert PLAIN.pack(x_SD) is PLAIN.unpack(x_SD) is x_SD and PLAIN.row_width(width, dtype) == width
