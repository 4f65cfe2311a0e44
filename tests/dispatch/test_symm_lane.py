"""Exchanges that travel: in which order they start, who waits for them, and what is held meanwhile.

There is no stream on the CPU, so a lane stands in whose results nobody can read before he has waited.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.dispatch import symm_mem
from titan_moe.dispatch.symm_lane import Lane, Way, start_delivery, start_fetch, wait_delivery, wait_fetch
from titan_moe.dispatch.symm_mem import SymmMemDispatcher, SymmMemory
from titan_moe.kernels.symm_dispatch import symm_bytes
from titan_moe.layers.moe import MoE
from titan_moe.memory.recompute import _recomputed
from titan_moe.parallel.pieces import Piece

CONFIG = ModelConfig(hidden_size=16, moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8, shared_ffn_hidden_size=8))
EXCHANGES = ("plan", "fetch", "deliver", "deliver_gradients", "fetch_gradients")


class Stream:
    """Of a device that is slow: what was launched is done when somebody waits for it."""

    def __init__(self) -> None:
        self.read: list[StorageWeakRef] = []
        """What it has yet to read."""

    def wait_stream(self, other: Any) -> None:
        """All that was launched before is done: nothing here computes late."""

    def record_event(self) -> list[StorageWeakRef]:
        return list(self.read)

    def wait_event(self, event: list[StorageWeakRef]) -> None:
        assert not any(storage.expired() for storage in event), "memory was let go before it was read"

    def reads(self, exchange: Callable[..., Any], *beside: Tensor) -> Callable[..., Any]:
        """An exchange, which reads more than its arguments."""

        def launched(*args: Tensor) -> Any:
            self.read = [StorageWeakRef(tensor.untyped_storage()) for tensor in (*args, *beside)]
            return exchange(*args)

        return launched


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Stands for every stream of CUDA."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    return stream


def test_what_an_exchange_reads_is_held_until_somebody_waits(stream: Stream) -> None:
    """Also where the pieces that knew it are gone, as between two microbatches that interleave."""
    lane = Lane(torch.device("cpu"))
    lane.stream = stream

    def front(x: Tensor, scores: Tensor) -> Any:
        ids = torch.arange(len(x))
        there = stream.reads(lambda x, scores: (2 * x, 3 * scores, ids.int()), ids)
        back = stream.reads(lambda dx, dscores: (2 * dx, 3 * dscores), ids)
        return (start_fetch(lane, x + 1, scores + 1, Way(there, back)),)

    def experts(sent: Any) -> Any:
        x, scores, _ = wait_fetch(sent)
        plan = torch.ones(3)
        way = Way(stream.reads(lambda y: 5 * y, plan), stream.reads(lambda dy: 5 * dy, plan))
        return (start_delivery(lane, x * scores, way),)

    pieces = [Piece(front), Piece(experts), Piece(lambda sent: (wait_delivery(sent) * 1,))]
    flow: Any = (torch.full((2,), 2.0, requires_grad=True), torch.full((2,), 4.0, requires_grad=True))
    for piece in pieces:
        flow = piece(*flow)
    assert flow[0].tolist() == [5 * 2 * 3 * 3 * 5.0] * 2
    flow, grads = None, [torch.ones(2)]
    while pieces:
        del piece
        piece = pieces.pop()
        grads = piece.backward(grads)
    assert [grad.tolist() for grad in grads] == [[5 * 2 * 3 * 5.0] * 2, [5 * 2 * 3 * 3.0] * 2]


class LateLane(Lane):
    """Results are there for later exchanges, which take turns, and for others once they have waited."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self.log = log
        self.results: list[tuple[Tensor, Tensor]] = []
        """Of all exchanges: what others see, and what it will be."""
        self.num_arrived = 0

    def run(self, exchange: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        self.show(len(self.results))
        results = exchange(*args)
        self.results += [(tensor, tensor.clone()) for tensor in pytree.tree_leaves(results)]
        for tensor, _ in self.results[self.num_arrived :]:
            tensor.data.view(-1).view(torch.uint8).fill_(255)  # NaN and -1
        return results, LateArrival(self, len(self.results))

    def show(self, number: int) -> None:
        for tensor, real in self.results[self.num_arrived : number]:
            tensor.data.copy_(real)


class LateArrival:
    """As `Arrival`."""

    def __init__(self, lane: LateLane, number: int) -> None:
        self.lane, self.number = lane, number

    def wait(self) -> None:
        self.lane.log.append("wait")
        self.lane.show(self.number)
        self.lane.num_arrived = max(self.number, self.lane.num_arrived)


def layer_of(log: list[str], num_chunks: int, lane: Lane | None, experts: str = "reference") -> MoE:
    """A layer whose dispatcher exchanges rows with itself, and what it does in order."""
    torch.manual_seed(0)
    layer = MoE(CONFIG, kernels=Kernels(experts=experts)).to(torch.float32 if experts == "fused" else torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    memory = torch.zeros(symm_bytes(1, 8, 16, 2, torch.float64, torch.float64), dtype=torch.uint8)
    layer.dispatcher = SymmMemDispatcher(4, SymmMemory(memory, torch.tensor([memory.data_ptr()]), 0), lane=lane)
    layer.num_chunks = num_chunks
    for module, name in ((layer.experts, "experts"), (layer.shared_experts, "shared")):
        module.forward = told(log, name, module.forward)
    return layer


def told(log: list[str], name: str, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A forward that says when it runs, and when its backward begins."""

    def telling(*args: Any) -> Tensor:
        log.append(name)
        y = forward(*args)
        y.register_hook(lambda _: log.append(name))
        return y

    return telling


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, exchanges among it."""
    log: list[str] = []
    for name in EXCHANGES:
        exchange = getattr(symm_mem, f"_{name}")

        def telling(*args: Any, name: str = name, exchange: Callable[..., Any] = exchange) -> Any:
            log.append(name)
            return exchange(*args)

        monkeypatch.setattr(symm_mem, f"_{name}", telling)
    return log


def gradients(layer: MoE, x_BND: Tensor) -> list[Tensor]:
    y_BND = layer(x_BND)
    return [y_BND.detach(), *torch.autograd.grad(y_BND, (x_BND, *layer.parameters()), y_BND.detach().cos())]


@pytest.mark.interpreted
def test_chunks_travel_under_each_others_experts(log: list[str]) -> None:
    """And all is there that is read."""
    x_BND = torch.randn(2, 4, 16, dtype=torch.float64, requires_grad=True)
    expected = gradients(layer_of(log, 1, None), x_BND)
    log.clear()
    actual = gradients(layer_of(log, 2, LateLane(log)), x_BND)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    sent, served = ["plan", "fetch"] * 2, ["wait", "experts", "deliver"] * 2
    home, served_home = ["fetch_gradients"] * 2, ["wait", "experts", "deliver_gradients"] * 2
    there = [*sent, *served, "shared", "wait", "wait"]
    assert log == [*there, *home, "shared", *served_home, "wait", "wait"]


@pytest.mark.interpreted
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_weight_gradients_are_computed_while_those_of_rows_travel(
    log: list[str], num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from titan_moe.kernels import late_weight_grads

    compute = late_weight_grads.expert_mlp_weight_grads
    monkeypatch.setattr(
        late_weight_grads, "expert_mlp_weight_grads", lambda *args: (log.append("weights"), compute(*args))[1]
    )
    x_BND = torch.randn(2, 4, 16, requires_grad=True)
    layer = layer_of(log, num_chunks, LateLane(log), "fused")
    expected = gradients(layer, x_BND)
    experts = layer.experts
    experts.ready_early = lambda: late_weight_grads.ready_weights(experts.gate_up, experts.down)
    log.clear()
    layer.dispatcher.lane = LateLane(log)
    torch.testing.assert_close(gradients(layer, x_BND), expected, rtol=0, atol=0)
    backward = log[log.index("fetch_gradients") :]
    assert backward == [
        *["fetch_gradients"] * num_chunks,
        "shared",
        *["wait", "experts", "deliver_gradients", "weights"] * num_chunks,
        *["wait"] * num_chunks,
    ]


@pytest.mark.interpreted
def test_a_layer_that_is_repeated_waits_for_all_that_it_started(log: list[str]) -> None:
    x_BND = torch.randn(2, 4, 16, dtype=torch.float64, requires_grad=True)
    expected = gradients(layer_of(log, 1, None), x_BND)
    lane = LateLane(log)
    layer = layer_of(log, 2, lane)
    layer.forward = _recomputed(layer.forward, keeps_rng=False)
    log.clear()
    torch.testing.assert_close(gradients(layer, x_BND), expected, rtol=1e-11, atol=1e-11)
    starts = [name for name in log if name in ("fetch", "deliver", "fetch_gradients", "deliver_gradients")]
    assert starts == [
        *("fetch", "fetch", "deliver", "deliver"),
        *("fetch_gradients", "fetch_gradients"),
        *("fetch", "fetch", "deliver", "deliver"),
        *("deliver_gradients", "deliver_gradients"),
    ]
    assert log.count("wait") == len(starts)
