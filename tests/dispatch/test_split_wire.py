"""Messages in two halves: the same numbers as messages that block, and work between the halves in both directions."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _get_work_registry_size
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig, resolve
from titan_moe.dispatch.bound import SlotBound
from titan_moe.dispatch.split_wire import SPLIT
from titan_moe.dispatch.wire import BLOCKING, Wire
from titan_moe.layers.moe import MoE
from titan_moe.parallel import expert
from titan_moe.parallel.mesh import build_meshes

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
SPLITS = {
    "balanced": [[2] * 4 for _ in range(4)],
    "uneven": [[source + target for target in range(4)] for source in range(4)],
    "one_rank_sends_nothing": [[0 if source == 2 else 3 for _ in range(4)] for source in range(4)],
    "one_rank_gets_nothing": [[0 if target == 1 else source for target in range(4)] for source in range(4)],
    "nothing_at_all": [[0] * 4 for _ in range(4)],
}
"""Rows that each rank (first index) sends to each rank."""


def there_and_home(
    wire: Wire, kind: str, x: Tensor, args: tuple[Any, ...], *, is_repeated: bool = False
) -> list[Tensor]:
    """A message with some work before, between and after, and its gradient."""
    start, wait = getattr(wire, kind)

    def work(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        message = start(x * 2, *args)
        aside = (x * weight).sin()
        return wait(message, *args) * 3, aside

    x = x.clone().requires_grad_(x.is_floating_point())
    weight = torch.full((), 0.5, dtype=x.dtype, requires_grad=x.is_floating_point())
    y, aside = checkpoint(work, x, weight, use_reentrant=False) if is_repeated else work(x, weight)
    if not x.is_floating_point():
        return [y]
    torch.autograd.backward([y, aside], [torch.randn_like(y), torch.randn_like(aside)])
    assert x.grad.dtype == x.dtype
    return [y.detach(), aside.detach(), x.grad, weight.grad]


def both_wires(kind: str, x: Tensor, args: tuple[Any, ...], **how: bool) -> bool:
    results = []
    for wire in (BLOCKING, SPLIT):
        torch.manual_seed(dist.get_rank())
        results.append(there_and_home(wire, kind, x, args, **how))
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*results, strict=True))


def send_both_ways(is_repeated: bool) -> tuple[dict[str, bool], int]:
    """Whether the wires agree, by case, and how many messages nobody has waited for."""
    group, rank, num_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    same = {}
    for dtype in (*DTYPES, torch.int32):
        generator = torch.Generator().manual_seed(rank)
        for name, splits in SPLITS.items():
            sent, received = splits[rank], [row[rank] for row in splits]
            x = (torch.randn(sum(sent), 3, generator=generator) * 9).to(dtype)
            same[f"all_to_all {dtype} {name}"] = both_wires(
                "all_to_all", x, (received, sent, group), is_repeated=is_repeated
            )
        x = (torch.randn(5, num_ranks * 5, generator=generator) * 9).to(dtype).T  # strided
        for kind in ("all_gather", "reduce_scatter") if dtype.is_floating_point else ("all_gather",):
            same[f"{kind} {dtype}"] = both_wires(kind, x, (group,), is_repeated=is_repeated)
    return same, _get_work_registry_size()


@pytest.mark.parametrize("is_repeated", [False, True], ids=["once", "recomputed"])
def test_the_split_wire_gives_the_same_bits_and_leaves_nothing_open(ranks, is_repeated: bool) -> None:
    for same, num_open in ranks(4, send_both_ways, is_repeated):
        assert same and all(same.values()), [name for name, is_same in same.items() if not is_same]
        assert num_open == 0


LAYER = ModelConfig(
    hidden_size=16, moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=12, shared_ffn_hidden_size=10)
)
NAMES = {
    "_c10d_functional.all_gather_into_tensor": "start",
    "_c10d_functional.all_to_all_single": "start",
    "_c10d_functional.wait_tensor": "wait",
    "titan_moe.all_gather": "message",
    "titan_moe.all_to_all": "message",
    "titan_moe.reduce_scatter": "message",
    "titan_moe.grouped_mm": "experts",
    "titan_moe.grouped_mm_dw": "experts",
    "aten.cumsum": "plan",
    "aten.mm": "mm",
}


class Recorder(TorchDispatchMode):
    """Writes down what runs, in order; repetitions count once."""

    def __init__(self, known: dict[str, str] = NAMES) -> None:
        super().__init__()
        self.known, self.names = known, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self.known.get(func.overloadpacket._qualified_op_name.replace("::", "."))
        if name and [name] != self.names[-1:]:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def gather() -> list[str]:
    """The collectives that a hidden gather is made of."""
    start, wait = SPLIT.all_gather
    names = ("all_gather_into_tensor", "all_to_all_single")
    with Recorder({"_c10d_functional." + name: name for name in names}) as ran:
        rows = wait(start(torch.full((2, 3), dist.get_rank()), dist.group.WORLD), dist.group.WORLD)
    assert rows[:, 0].tolist() == [0, 0, 1, 1]
    return ran.names


def test_gloo_gathers_point_to_point(ranks) -> None:
    """Three of its functional gathers under way end in a double free, within some 20,000 of them (torch 2.11, 2.13)."""
    assert ranks(2, gather) == [["all_to_all_single"]] * 2


def built(kind: str, overlap: str) -> MoE:
    parallel = ParallelConfig(ep=dist.get_world_size(), dispatcher=kind, overlap=overlap)
    moe = MoE(LAYER, Kernels(experts="reference"))
    generator = torch.Generator().manual_seed(3)
    for parameter in moe.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 3
    meshes = build_meshes(resolve(parallel, dist.get_world_size()), torch.device("cpu"))
    expert.apply(nn.ModuleList([moe]), parallel, meshes, SlotBound())
    return moe


def record(kind: str, overlap: str) -> tuple[list[str], list[str], list[Tensor]]:
    """What runs in forward and in backward, and the results."""
    moe = built(kind, overlap)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_BND = torch.randn(2, 6, 16, generator=generator, requires_grad=True)
    with Recorder() as forward:
        y_BND = moe(x_BND)
    with Recorder() as backward:
        y_BND.backward(torch.randn(y_BND.shape, generator=generator))
    grads = [moe.experts.local(p.grad) if p is moe.experts.gate_up else p.grad for p in moe.parameters()]
    whole = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
    return forward.names, backward.names, [y_BND.detach(), x_BND.grad, *whole]


PLAN = {"allgather": [], "alltoall": ["message", "plan"]}
"""What is exchanged before anything is sent: alltoall's counts, which the host reads."""


@pytest.mark.parametrize("kind", PLAN)
def test_compute_lies_between_start_and_wait_both_ways(ranks, kind: str) -> None:
    for forward, backward, _ in ranks(2, record, kind, "layer"):
        assert forward == [
            *("mm", *PLAN[kind]),  # the router
            *("start", "wait", "plan", "wait"),  # slots are laid out while rows travel
            *("experts", "start", "mm", "wait"),  # the shared experts run while results do
        ]
        assert backward == [
            *("start", "mm", "wait", "experts"),  # the shared experts' gradients under those of the results
            *("start", "wait", "mm"),  # gradients of rows and scores start before anyone waits; the router
        ]


@pytest.mark.parametrize("kind", PLAN)
def test_nothing_is_split_unless_asked_for(ranks, kind: str) -> None:
    for forward, backward, _ in ranks(2, record, kind, "none"):
        assert not {"start", "wait"} & {*forward, *backward}


@pytest.mark.parametrize("kind", PLAN)
def test_a_layer_computes_the_same_bits(ranks, kind: str) -> None:
    split, blocking = (ranks(4, record, kind, overlap) for overlap in ("layer", "none"))
    for (*_, actual), (*_, expected) in zip(split, blocking, strict=True):
        assert len(actual) == 7 and all(a.any() for a in actual)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
