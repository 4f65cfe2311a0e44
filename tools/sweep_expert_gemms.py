"""Time the Triton GEMMs of the fused expert MLP with various tile sizes, at the shapes of its benchmarks.

    python tools/sweep_expert_gemms.py [--shapes qwen3_ep8 ...] [--kernels up down_grad ...] [--only group=8,]

The result of each candidate is compared with that of the first one, which is the current default; candidates that
differ or fail are reported and not timed. Medians on random bf16 data and routing, fastest first. The last line of a
table is grouped_mm on rows gathered before, without the time of the gather.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from kernel_benchmarks import EXPERT_SHAPES
from random_routing import draw_plan
from torch import Tensor

from titan_moe.kernels.experts.fp8.packed import BLOCK
from titan_moe.kernels.experts.fp8.passes import BLOCK_CUT
from titan_moe.kernels.experts.fp8.requantized import requantized_rows, requantized_slots
from titan_moe.kernels.experts.fp8.rows import quantize_rows, unpack
from titan_moe.kernels.experts.fp8.weight_grad import BLOCK_CUT as BLOCK_WEIGHT_GRAD_CUT
from titan_moe.kernels.experts.fp8.weight_grad import weight_grad
from titan_moe.kernels.experts.fp8.weights import quantize_one_way
from titan_moe.kernels.experts.gather_mm import gather_mm
from titan_moe.kernels.experts.tiles import GemmTiles, plan_tiles
from titan_moe.kernels.experts.up import TILE_ROWS, expert_up
from titan_moe.kernels.experts.weight_grad import DOWN_CUT, UP_CUT, WeightGradTiles, expert_weight_grad
from titan_moe.kernels.timing import median_ms

UP_TILES = [
    GemmTiles(outputs=128),
    *(GemmTiles(outputs=128, group=group) for group in (1, 4, 8, 32)),
    GemmTiles(outputs=128, num_stages=3),
]
GATHER_TILES = [
    GemmTiles(),
    *(GemmTiles(group=group) for group in (1, 4, 8, 32)),
    GemmTiles(outputs=128),
    GemmTiles(num_stages=3),
]
WEIGHT_GRAD_TILES = [
    *(WeightGradTiles(num_stages=stages, group=group) for stages, group in product((3, 4), (1, 2, 4, 8, 16))),
    *(WeightGradTiles(256, 128, num_stages=stages, group=group) for stages, group in product((3, 4), (4, 8))),
]


BLOCK_TILES = [
    BLOCK_CUT,
    BLOCK_CUT._replace(outputs=BLOCK),
    BLOCK_CUT._replace(outputs=BLOCK, num_stages=3),
    BLOCK_CUT._replace(num_stages=3),
    *(BLOCK_CUT._replace(group=group) for group in (4, 8)),
]
BLOCK_WEIGHT_GRAD_TILES = [
    BLOCK_WEIGHT_GRAD_CUT,
    *(BLOCK_WEIGHT_GRAD_CUT._replace(num_stages=stages) for stages in (3, 5)),
    *(BLOCK_WEIGHT_GRAD_CUT._replace(group=group) for group in (4, 16)),
]
KERNELS = ["up", "down_grad", "weight_grad", "blockwise"]


class Problem(NamedTuple):
    """A GEMM with its inputs: the kernel as a function of tile sizes, candidates for these, and the baseline."""

    name: str
    run: Callable[[Any], Tensor]
    candidates: list[Any]
    baseline: Callable[[], Tensor]
    flops: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=EXPERT_SHAPES, default=list(EXPERT_SHAPES))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--seconds", type=float, default=240.0, help="no candidate starts later")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="time the default and candidates whose text contains one"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    deadline = time.monotonic() + args.seconds
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for shape in args.shapes:
        for problem in problems(shape, torch.device("cuda"), args.kernels):
            for line in sweep(select_tiles(problem, args.only), deadline):
                print(f"{shape:17} {line}", flush=True)


def problems(shape: str, device: torch.device, kernels: list[str]) -> Iterator[Problem]:
    """Yield the GEMMs of a shape one by one, so that only the inputs of one are in memory."""
    size = EXPERT_SHAPES[shape]
    num_rows, num_experts, width, hidden = (size[name] for name in ("rows", "experts", "width", "hidden"))
    rows_R, _, offsets_e = draw_plan(num_rows, num_experts, size["choices"], device)
    num_slots = rows_R.numel()

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

    x_SD = draw(num_rows, width)
    if "up" in kernels:
        weight = draw(num_experts, 2, hidden, width) / width**0.5
        scores_R, tiles = torch.rand(num_slots, device=device), plan_tiles(offsets_e, num_slots, TILE_ROWS)
        x_RD, flat = x_SD[rows_R], weight.flatten(1, 2).transpose(1, 2)
        yield Problem(
            "up",
            lambda candidate: expert_up(x_SD, rows_R, scores_R, weight, tiles, candidate)[0],
            UP_TILES,
            lambda: F.grouped_mm(x_RD, flat, offs=offsets_e),
            4.0 * num_slots * width * hidden,
        )
    if "down_grad" in kernels:
        weight = draw(num_experts, width, hidden) / width**0.5
        tiles, x_RD = plan_tiles(offsets_e, num_slots, TILE_ROWS), x_SD[rows_R]
        yield Problem(
            "dA",
            lambda candidate: gather_mm(x_SD, rows_R, weight, tiles, candidate),
            GATHER_TILES,
            lambda: F.grouped_mm(x_RD, weight, offs=offsets_e),
            2.0 * num_slots * width * hidden,
        )
    if "weight_grad" in kernels:
        for name, features, is_transposed in (("dW1", 2 * hidden, False), ("dW2", hidden, True)):
            yield _weight_grad(name, draw(num_slots, features), x_SD, rows_R, offsets_e, is_transposed)
    if "blockwise" in kernels:
        yield from _blockwise(x_SD, draw(num_experts, 2 * hidden, width) / width**0.5, rows_R, offsets_e)


def _blockwise(x_SD: Tensor, weight_eOI: Tensor, rows_R: Tensor, offsets_e: Tensor) -> Iterator[Problem]:
    """The first GEMM of experts in fp8 with scales of blocks, and its weight gradient, beside those in bf16."""
    num_slots, (_, both, width) = rows_R.numel(), weight_eOI.shape
    tiles, x_RD, flops = plan_tiles(offsets_e, num_slots, TILE_ROWS), x_SD[rows_R], 2.0 * num_slots * both * width
    x, (codes, scales) = quantize_rows(x_SD, BLOCK), quantize_one_way(weight_eOI, BLOCK, transposed=False)
    yield Problem(
        "up8",
        lambda candidate: gather_mm(
            x, rows_R, codes.mT, tiles, candidate, scales=scales, columns=BLOCK, dtype=torch.bfloat16
        ),
        BLOCK_TILES,
        lambda: F.grouped_mm(x_RD, weight_eOI.mT, offs=offsets_e),
        flops,
    )
    hidden_RO = torch.randn(num_slots, both, device=x_SD.device, dtype=torch.bfloat16)
    of_slots = (tensor.contiguous() for tensor in unpack(quantize_rows(hidden_RO, BLOCK), BLOCK))
    a, b = requantized_slots(*of_slots, tiles), requantized_rows(x, rows_R, tiles)
    yield Problem(
        "dW8",
        lambda candidate: weight_grad(a[0], b[0], offsets_e, a[1], tiles.rows, b_scales=b[1], cut=candidate),
        BLOCK_WEIGHT_GRAD_TILES,
        lambda: F.grouped_mm(hidden_RO.T, x_RD, offs=offsets_e),
        flops,
    )


def _weight_grad(
    name: str, factor_RA: Tensor, x_SD: Tensor, rows_R: Tensor, offsets_e: Tensor, is_transposed: bool
) -> Problem:
    gathered_RD = x_SD[rows_R]
    left, right = (gathered_RD, factor_RA) if is_transposed else (factor_RA, gathered_RD)
    return Problem(
        name,
        lambda candidate: expert_weight_grad(
            factor_RA, x_SD, rows_R, offsets_e, is_transposed=is_transposed, cut=candidate
        ),
        [DOWN_CUT if is_transposed else UP_CUT, *WEIGHT_GRAD_TILES],
        lambda: F.grouped_mm(left.T, right, offs=offsets_e),
        2.0 * rows_R.numel() * factor_RA.shape[1] * x_SD.shape[1],
    )


def select_tiles(problem: Problem, only: list[str]) -> Problem:
    """Keep the default and the candidates whose text contains one of the strings."""
    default, *others = problem.candidates
    selected = [candidate for candidate in others if any(text in str(candidate) for text in only)]
    return problem._replace(candidates=[default, *selected])


def sweep(problem: Problem, deadline: float, stopwatch: Callable[[Callable[[], Any]], float] = median_ms) -> list[str]:
    """A line for each candidate, fastest first, then failures."""
    expected = problem.run(problem.candidates[0]).float()
    timed, failed = [], []
    for candidate in problem.candidates:
        if time.monotonic() > deadline:
            failed.append(f"{problem.name:4} {candidate}: no time left")
            continue
        try:
            error = float((problem.run(candidate).float() - expected).norm() / expected.norm())
            if not error < 1e-2:
                raise ValueError(f"differs by {error:.1e}")
            timed.append((stopwatch(lambda candidate=candidate: problem.run(candidate)), str(candidate)))
        except Exception as failure:
            failed.append(f"{problem.name:4} {candidate}: {str(failure).splitlines()[0][:80]}")
    ranked = [*sorted(timed), (stopwatch(problem.baseline), "grouped_mm on gathered rows")]
    lines = [f"{problem.name:4} {ms:8.3f} ms {problem.flops / ms / 1e9:5.0f} TFLOP/s  {name}" for ms, name in ranked]
    return lines + failed


if __name__ == "__main__":
    main()
