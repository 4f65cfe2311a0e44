"""Time the Triton GEMMs of the fused expert MLP, cut in every way that fits an H200, at the shapes of its benchmarks.

    python tools/sweep_expert_gemms.py [--shapes qwen3_ep8 ...] [--kernels up down_grad ...] [--only group=8,]

Each candidate is compared with the first, which is what runs today; one that differs or fails says so and is left
behind. Medians on random bf16 data and routing, the fastest first; each table ends with grouped_mm on rows that were
gathered before, gather not counted: what the matrix units give.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from kernel_benchmarks import EXPERT_SHAPES
from torch import Tensor

from titan_moe.kernels.experts.gather_mm import GatherTiles, gather_mm
from titan_moe.kernels.experts.tiles import plan_tiles
from titan_moe.kernels.experts.up import TILE_ROWS, UpTiles, expert_up
from titan_moe.kernels.experts.weight_grad import DOWN_CUT, UP_CUT, WeightGradTiles, expert_weight_grad
from titan_moe.kernels.permute.rows import full_size_plan
from titan_moe.kernels.timing import median_ms

UP_TILES = [
    UpTiles(),
    *(UpTiles(group=group) for group in (1, 4, 8, 32)),
    UpTiles(num_stages=3),
]
GATHER_TILES = [
    GatherTiles(),
    *(GatherTiles(group=group) for group in (1, 4, 8, 32)),
    GatherTiles(outputs=128),
    GatherTiles(num_stages=3),
]
WEIGHT_GRAD_TILES = [
    *(WeightGradTiles(num_stages=stages, group=group) for stages, group in product((3, 4), (1, 2, 4, 8, 16))),
    *(WeightGradTiles(256, 128, num_stages=stages, group=group) for stages, group in product((3, 4), (4, 8))),
]


KERNELS = ["up", "down_grad", "weight_grad"]


class Problem(NamedTuple):
    """A GEMM with its inputs: what to call with a cut, what grouped_mm needs, and its work."""

    name: str
    run: Callable[[Any], Tensor]
    cuts: list[Any]
    rival: Callable[[], Tensor]
    flops: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=EXPERT_SHAPES, default=list(EXPERT_SHAPES))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--seconds", type=float, default=240.0, help="no candidate begins later")
    parser.add_argument("--only", nargs="+", default=[""], help="time the first cut and those that have one of these")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure")
    stop_at = time.monotonic() + args.seconds
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for shape in args.shapes:
        for problem in problems(shape, torch.device("cuda"), args.kernels):
            for line in sweep(narrowed(problem, args.only), stop_at):
                print(f"{shape:17} {line}", flush=True)


def problems(shape: str, device: torch.device, kernels: list[str]) -> Iterator[Problem]:
    """The GEMMs of a shape, one after the other, so that only one's inputs are held."""
    size = EXPERT_SHAPES[shape]
    num_rows, num_experts, width, hidden = (size[name] for name in ("rows", "experts", "width", "hidden"))
    rows_R, _, offsets_e = full_size_plan(num_rows, num_experts, size["choices"], device, size["slots"])
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
            lambda cut: expert_up(x_SD, rows_R, scores_R, weight, tiles, cut)[0],
            UP_TILES,
            lambda: F.grouped_mm(x_RD, flat, offs=offsets_e),
            4.0 * num_slots * width * hidden,
        )
    if "down_grad" in kernels:
        weight = draw(num_experts, width, hidden) / width**0.5
        tiles, x_RD = plan_tiles(offsets_e, num_slots, TILE_ROWS), x_SD[rows_R]
        yield Problem(
            "dA",
            lambda cut: gather_mm(x_SD, rows_R, weight, tiles, cut),
            GATHER_TILES,
            lambda: F.grouped_mm(x_RD, weight, offs=offsets_e),
            2.0 * num_slots * width * hidden,
        )
    if "weight_grad" in kernels:
        for name, features, is_transposed in (("dW1", 2 * hidden, False), ("dW2", hidden, True)):
            yield _weight_grad(name, draw(num_slots, features), x_SD, rows_R, offsets_e, is_transposed)


def _weight_grad(
    name: str, factor_RA: Tensor, x_SD: Tensor, rows_R: Tensor, offsets_e: Tensor, is_transposed: bool
) -> Problem:
    gathered_RD = x_SD[rows_R]
    left, right = (gathered_RD, factor_RA) if is_transposed else (factor_RA, gathered_RD)
    return Problem(
        name,
        lambda cut: expert_weight_grad(factor_RA, x_SD, rows_R, offsets_e, is_transposed=is_transposed, cut=cut),
        [DOWN_CUT if is_transposed else UP_CUT, *WEIGHT_GRAD_TILES],
        lambda: F.grouped_mm(left.T, right, offs=offsets_e),
        2.0 * rows_R.numel() * factor_RA.shape[1] * x_SD.shape[1],
    )


def narrowed(problem: Problem, only: list[str]) -> Problem:
    """With the first cut, to compare with, and those whose name has one of these in it."""
    first, *others = problem.cuts
    return problem._replace(cuts=[first, *(cut for cut in others if any(part in str(cut) for part in only))])


def sweep(problem: Problem, stop_at: float, stopwatch: Callable[[Callable[[], Any]], float] = median_ms) -> list[str]:
    """A line for each cut, the fastest first."""
    expected = problem.run(problem.cuts[0]).float()
    timed, broken = [], []
    for cut in problem.cuts:
        if time.monotonic() > stop_at:
            broken.append(f"{problem.name:4} {cut}: no time left")
            continue
        try:
            error = float((problem.run(cut).float() - expected).norm() / expected.norm())
            if not error < 1e-2:
                raise ValueError(f"differs by {error:.1e}")
            timed.append((stopwatch(lambda cut=cut: problem.run(cut)), str(cut)))
        except Exception as problem_here:
            broken.append(f"{problem.name:4} {cut}: {str(problem_here).splitlines()[0][:80]}")
    ranked = [*sorted(timed), (stopwatch(problem.rival), "grouped_mm on gathered rows")]
    lines = [f"{problem.name:4} {ms:8.3f} ms {problem.flops / ms / 1e9:5.0f} TFLOP/s  {what}" for ms, what in ranked]
    return lines + broken


if __name__ == "__main__":
    main()
