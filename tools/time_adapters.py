"""Time the parts of low-rank factors beside routed experts: a microbatch of Qwen3's layer, with a rank of 16.

    python tools/time_adapters.py [--parts gate_up_A ...] [--seconds 240]

A line for each implementation of a part: ours, with cuts of its work, and PyTorch's grouped GEMMs on rows gathered
before, whose results are added in a pass. Each result is compared with PyTorch's. Medians on random bf16 data and
routing, with a cold L2 cache; GB/s are of what a part reads and writes, rows that are gathered by slot.
`tools/bench_kernels.py adapted_expert_mlp` times the whole MLP.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from adapter_benchmarks import CHOICES, EXPERTS, HIDDEN, RANK, ROWS, SCALE, SLOTS, WIDTH, half
from random_routing import draw_plan
from torch import Tensor

from titan_moe.kernels.experts.gather_mm import gather_mm
from titan_moe.kernels.experts.low_rank import GRADIENT_CUT, PRODUCT_CUT, low_products, low_weight_grads
from titan_moe.kernels.experts.low_rank_backward import CUT, swiglu_backward_with_factors
from titan_moe.kernels.experts.slot_mm import slot_mm
from titan_moe.kernels.experts.slot_sum import slot_rows
from titan_moe.kernels.experts.swiglu_backward import swiglu_backward
from titan_moe.kernels.experts.tiles import plan_tiles
from titan_moe.kernels.experts.up import TILE_ROWS, expert_up
from titan_moe.kernels.timing import median_ms

PRODUCT_CUTS = [
    PRODUCT_CUT,
    *(PRODUCT_CUT._replace(num_stages=stages) for stages in (2, 4)),
    PRODUCT_CUT._replace(width=64),
    PRODUCT_CUT._replace(width=64, num_stages=2),
    PRODUCT_CUT._replace(num_warps=8),
]
GRADIENT_CUTS = [
    GRADIENT_CUT,
    *(GRADIENT_CUT._replace(num_stages=stages) for stages in (2, 4)),
    *(GRADIENT_CUT._replace(width=128, num_stages=stages) for stages in (3, 5)),
    GRADIENT_CUT._replace(num_warps=8),
    GRADIENT_CUT._replace(slots=128, width=128),
]
SWIGLU_CUTS = [
    CUT,
    *(CUT._replace(num_stages=stages) for stages in (1, 2)),
    CUT._replace(slots=32),
    CUT._replace(slots=64, num_warps=8),
    CUT._replace(width=128, num_warps=8),
]
Make = Callable[[], Tensor]


class Part(NamedTuple):
    """Ours by cut, and PyTorch's."""

    name: str
    ours: dict[str, Make]
    theirs: Make
    num_bytes: float


class Draw(NamedTuple):
    """Where rows and slots are."""

    rows_R: Tensor
    offsets_e: Tensor
    device: torch.device

    def half(self, *sizes: int) -> Tensor:
        return half(self.device, *sizes)

    def rows(self, x: Tensor, gathers: bool) -> Tensor:
        return slot_rows(x, self.rows_R, self.offsets_e) if gathers else x

    def tiles(self) -> Any:
        return plan_tiles(self.offsets_e, SLOTS, TILE_ROWS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", help="only these; default all")
    parser.add_argument("--seconds", type=float, default=240.0, help="no part starts later")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    deadline = time.monotonic() + args.seconds
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, make in parts(torch.device("cuda")).items():
        if args.parts is None or name in args.parts:
            for line in times(make(), deadline):
                print(line, flush=True)


def parts(device: torch.device) -> dict[str, Callable[[], Part]]:
    """The parts by name, each with its inputs when it is called."""
    torch.manual_seed(0)
    rows_R, _, offsets_e = draw_plan(ROWS, EXPERTS, CHOICES, device)
    draw = Draw(rows_R, offsets_e, device)
    narrow = {
        "gate_up_A": (WIDTH, 2 * RANK, 1, True),
        "down_A": (HIDDEN, RANK, 1, False),
        "down_B": (WIDTH, RANK, 1, True),
        "gate_up_B": (HIDDEN, RANK, 2, False),
    }
    found: dict[str, Callable[[], Part]] = {}
    for name, sizes in narrow.items():
        found[name] = lambda name=name, sizes=sizes: products(draw, name, *sizes)
        found[f"d_{name}"] = lambda name=name, sizes=sizes: gradients(draw, f"d_{name}", *sizes)
    found["swiglu"] = lambda: back_through_swiglu(draw)
    found["up"] = lambda: up(draw)
    found["down"] = lambda: slots(draw, "down", HIDDEN, RANK)
    found["d_up"] = lambda: slots(draw, "d_up", 2 * HIDDEN, 2 * RANK)
    found["d_down"] = lambda: rows(draw)
    return found


def products(draw: Draw, name: str, width: int, rank: int, num_parts: int, gathers: bool) -> Part:
    """Rows times the first factors of forward, or of backward."""
    x, factor = draw.half(ROWS if gathers else SLOTS, num_parts * width), _factor(draw, name, width, rank, num_parts)
    rows_R = draw.rows_R if gathers else None

    def theirs() -> Tensor:
        whole = factor[:, 0] if num_parts == 1 else _two_blocks(factor)
        return F.grouped_mm(draw.rows(x, gathers), whole, offs=draw.offsets_e).mul_(SCALE)

    ours = {
        str(cut): lambda cut=cut: low_products(x, factor, draw.tiles(), SCALE, rows_R=rows_R, cut=cut)
        for cut in PRODUCT_CUTS
    }
    return Part(name, ours, theirs, 2.0 * (SLOTS * num_parts * (width + rank) + factor.numel()))


def _factor(draw: Draw, name: str, width: int, rank: int, num_parts: int) -> Tensor:
    """As it is stored, which of A is by rank and width."""
    if name.endswith("A"):
        return draw.half(EXPERTS, num_parts, rank, width).mT
    return draw.half(EXPERTS, num_parts, width, rank)


def gradients(draw: Draw, name: str, width: int, rank: int, num_parts: int, gathers: bool) -> Part:
    """The gradient of a factor, by width and rank."""
    x, low = draw.half(ROWS if gathers else SLOTS, num_parts * width), draw.half(SLOTS, num_parts * rank)
    like, rows_R = _factor(draw, name, width, rank, num_parts), draw.rows_R if gathers else None

    def theirs() -> Tensor:
        whole = F.grouped_mm(draw.rows(x, gathers).T, low, offs=draw.offsets_e)
        pairs = whole.unflatten(1, (num_parts, width)).unflatten(3, (num_parts, rank))
        return torch.stack([pairs[:, index, :, index] for index in range(num_parts)], dim=1)

    ours = {
        str(cut): lambda cut=cut: low_weight_grads(low, x, like, draw.offsets_e, rows_R=rows_R, cut=cut)
        for cut in GRADIENT_CUTS
    }
    return Part(name, ours, theirs, 2.0 * (SLOTS * num_parts * (width + rank) + like.numel()))


def _two_blocks(factor: Tensor) -> Tensor:
    """[e, 2, I, r] -> [e, 2 I, 2 r]."""
    blocks = factor.new_zeros(len(factor), 2, factor.shape[2], 2, factor.shape[3])
    for index in range(2):
        blocks[:, index, :, index] = factor[:, index]
    return blocks.flatten(3, 4).flatten(1, 2)


def back_through_swiglu(draw: Draw) -> Part:
    """The gradient of the pre-activation, with those of A of down and of B of gate and up."""
    dactive, hidden, scores_R = (
        draw.half(SLOTS, HIDDEN),
        draw.half(SLOTS, 2 * HIDDEN),
        torch.rand_like(draw.rows_R * 1.0),
    )
    dlow, low = draw.half(SLOTS, RANK), draw.half(SLOTS, 2 * RANK)
    a_down, b_up = draw.half(EXPERTS, 1, RANK, HIDDEN).mT, draw.half(EXPERTS, 2, HIDDEN, RANK)
    of_slots = dactive, hidden, scores_R, draw.offsets_e

    def apart() -> Tensor:
        dhidden, active, dscores_R = swiglu_backward(*of_slots)
        da = low_weight_grads(dlow, active, a_down, draw.offsets_e)
        return _joined(dhidden, dscores_R, da.mT, low_weight_grads(low, dhidden, b_up, draw.offsets_e))

    def theirs() -> Tensor:
        dhidden, active, dscores_R = swiglu_backward(*of_slots)
        da = F.grouped_mm(dlow.T, active, offs=draw.offsets_e)
        whole = F.grouped_mm(dhidden.T, low, offs=draw.offsets_e).unflatten(1, (2, HIDDEN)).unflatten(3, (2, RANK))
        db = torch.stack([whole[:, index, :, index] for index in range(2)], dim=1)
        return _joined(dhidden, dscores_R, da, db)

    ours = {
        str(cut): lambda cut=cut: _joined(*swiglu_backward_with_factors(*of_slots, dlow, low, cut=cut))
        for cut in SWIGLU_CUTS
    }
    return Part("swiglu", ours | {"apart": apart}, theirs, 10.0 * SLOTS * HIDDEN)


def _joined(dhidden: Tensor, *others: Any) -> Tensor:
    """A small tensor of all results, so that a check sees each."""
    return torch.cat([dhidden[::97].flatten().float(), *(other.flatten().float() for other in others)])


def up(draw: Draw) -> Part:
    """Gate and up with their second factors, beside the same GEMM without factors."""
    x, weight = draw.half(ROWS, WIDTH), draw.half(EXPERTS, 2, HIDDEN, WIDTH) / WIDTH**0.5
    low, factor = draw.half(SLOTS, 2 * RANK), draw.half(EXPERTS, 2, HIDDEN, RANK)
    scores_R = torch.rand(SLOTS, device=draw.device)
    of_rows = x, draw.rows_R, scores_R, weight

    def theirs() -> Tensor:
        hidden = expert_up(*of_rows, draw.tiles())[0]
        return hidden.add_(F.grouped_mm(low, _two_blocks(factor).mT, offs=draw.offsets_e))

    ours = {"in the sums": lambda: expert_up(*of_rows, draw.tiles(), low=(low, factor))[0]}
    plain = {"without factors": lambda: expert_up(*of_rows, draw.tiles())[0]}
    return Part("up", ours | plain, theirs, 2.0 * (SLOTS * (WIDTH + 3 * HIDDEN) + weight.numel()))


def slots(draw: Draw, name: str, inputs: int, rank: int) -> Part:
    """Slots times weights and second factors, back to the width of rows."""
    x, low = draw.half(SLOTS, inputs), draw.half(SLOTS, rank)
    weight, factor = draw.half(EXPERTS, inputs, WIDTH) / inputs**0.5, draw.half(EXPERTS, rank, WIDTH)
    if name == "down":  # whose matrices are [e, D, F] and [e, D, r]
        weight, factor = weight.mT.contiguous().mT, factor.mT.contiguous().mT

    def theirs() -> Tensor:
        y_RO = F.grouped_mm(x, weight, offs=draw.offsets_e)
        return y_RO.add_(F.grouped_mm(low, factor, offs=draw.offsets_e))

    ours = {
        "in the sums": lambda: slot_mm(x, weight, draw.tiles(), low=(low, factor)),
        "without factors": lambda: slot_mm(x, weight, draw.tiles()),
        "without factors, torch": lambda: F.grouped_mm(x, weight, offs=draw.offsets_e),
    }
    return Part(name, ours, theirs, 2.0 * (SLOTS * (inputs + WIDTH) + weight.numel()))


def rows(draw: Draw) -> Part:
    """Gradients of rows, gathered, times down and its first factor."""
    x, low = draw.half(ROWS, WIDTH), draw.half(SLOTS, RANK)
    weight, factor = draw.half(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5, draw.half(EXPERTS, RANK, HIDDEN)

    def theirs() -> Tensor:
        y_RO = gather_mm(x, draw.rows_R, weight, draw.tiles())
        return y_RO.add_(F.grouped_mm(low, factor, offs=draw.offsets_e))

    ours = {
        "in the sums": lambda: gather_mm(x, draw.rows_R, weight, draw.tiles(), low=(low, factor)),
        "without factors": lambda: gather_mm(x, draw.rows_R, weight, draw.tiles()),
    }
    return Part("d_down", ours, theirs, 2.0 * (SLOTS * (WIDTH + HIDDEN) + weight.numel()))


def times(part: Part, deadline: float, stopwatch: Callable[[Make], float] = median_ms) -> Iterator[str]:
    """A line for each implementation, PyTorch's first."""
    right = part.theirs().float()
    for name, make in {"torch": part.theirs, **part.ours}.items():
        if time.monotonic() > deadline:
            yield f"{part.name:12} no time left for {name}"
            return
        try:
            difference = ((make().float() - right).norm() / right.norm()).item()
            ms = stopwatch(make)
        except RuntimeError as error:
            yield f"{part.name:12} failed: {str(error).splitlines()[0][:80]}: {name}"
            continue
        yield f"{part.name:12} {ms:8.3f} ms {part.num_bytes / ms / 1e6:6.0f} GB/s, differs by {difference:.1e}: {name}"


if __name__ == "__main__":
    main()
