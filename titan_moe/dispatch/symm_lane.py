"""Exchanges over symmetric memory on a stream of their own: they travel under what is computed beside them.

P ranks of the group · T tokens on each of them · K choices · S rows received · D width

As the split wire's messages (split_wire.py), each comes in two halves that autograd turns round: the backward of the
wait starts the exchange home, and the backward of the start waits for that one. Gradients have the shape of rows that
arrived, so what is sent home lies in the trip, and the gradient flows past it unread.

All exchanges of a memory run on the one stream, plans too, in the order in which the host launches them, which is the
same on every rank: its barriers need no more. Nobody waits in a circle beside other streams' messages either: what a
rank has launched waits for what it launched before and for the same exchange or message of its peers, all launch these
in one order, and what spins meanwhile, a warp for each rank or NCCL's few programs, leaves the device room.

Each exchange begins after all that was computed before it was launched, so memory that the stream lets go is used again
only after whoever read it; what an exchange reads of others' memory is held until somebody has waited for it. The
stream goes before others, and few programs move the rows: those that compute give up a fifth of the device at most
while rows travel. But kernels of as many programs as there are multiprocessors, PyTorch's GEMMs among them, hold an
exchange up until they end: measured on 4 H200s, hiding costs more than it hides, also where GEMMs are told to leave 24
multiprocessors free (tools/RESULTS.md).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.dispatch.split_wire import must_be_reached

NUM_PROGRAMS = 24
"""That move rows beside others that compute: on an H200 309 GB/s each way."""

Exchange = Callable[..., Any]
"""One of the operations of symm_mem.py."""


class Lane:
    """The stream of a memory's exchanges; on the CPU they take place where they start."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def __deepcopy__(self, memo: Any) -> "Lane":
        """A copied model goes on in the same memory, and so on the same stream."""
        return self

    def run(self, exchange: Exchange, *args: Any) -> tuple[Any, "Arrival"]:
        """Launch an exchange: its results, on their way, and what says that they are there."""
        if self.stream is None:
            return exchange(*args), Arrival(None, ())
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            return exchange(*args), Arrival(self.stream.record_event(), (exchange, *args))


class Arrival(NamedTuple):
    """When the results of an exchange are there."""

    event: torch.cuda.Event | None
    held: tuple[Any, ...]
    """What the exchange reads, itself and what it knows among it, which must not be used for something else before:
    autograd lets go of it as soon as the backward of a piece has been launched."""

    def wait(self) -> None:
        """Let the current stream go on when they are."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class Trip:
    """An exchange and the one home."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.arrival: Arrival | None = None
        self.home: Any = None
        """Gradients, from the backward of the wait to that of the start."""

    def start(self, exchange: Exchange, *args: Any) -> Any:
        """Launch: -> what travels."""
        travelling, self.arrival = self.lane.run(exchange, *args)
        return travelling

    def wait(self) -> None:
        """For what was launched last."""
        assert self.arrival is not None, "an exchange is started before it is waited for"
        self.arrival.wait()
        self.arrival = None

    def start_home(self, exchange: Exchange, *args: Any) -> None:
        """Launch the exchange of the gradients."""
        self.home = self.start(exchange, *args)

    def take_home(self) -> Any:
        """Wait for them: they are then gone from here."""
        self.wait()
        home, self.home = self.home, None
        return home


class Way(NamedTuple):
    """An exchange and the one that brings gradients home, with what they know beside rows and scores."""

    there: Exchange
    back: Exchange


class _StartFetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, scores_TK: Tensor, trip: Trip, way: Way) -> tuple[Tensor, Tensor, Tensor]:
        ctx.trip = trip
        ctx.set_materialize_grads(False)  # nobody reads them, and ids would get zeros
        x_SD, scores_SK, ids_SK = trip.start(way.there, x_TD, scores_TK)
        ctx.mark_non_differentiable(ids_SK)
        return x_SD, scores_SK, ids_SK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
        dx_TD, dscores_TK = ctx.trip.take_home()
        return dx_TD, dscores_TK, None, None


class _WaitFetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, scores_SK: Tensor, trip: Trip, way: Way) -> tuple[Tensor, Tensor]:
        must_be_reached(ctx, x_SD)
        ctx.trip, ctx.way = trip, way
        trip.wait()
        return x_SD.detach(), scores_SK.detach()

    @staticmethod
    def backward(ctx: Any, dx_SD: Tensor, dscores_SK: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.trip.start_home(ctx.way.back, dx_SD, dscores_SK)
        return dx_SD, dscores_SK, None, None


class _StartDeliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, trip: Trip, way: Way) -> Tensor:
        ctx.trip = trip
        return trip.start(way.there, y_SD)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.trip.take_home(), None, None


class _WaitDeliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, trip: Trip, way: Way) -> Tensor:
        must_be_reached(ctx, y_TD)
        ctx.trip, ctx.way = trip, way
        trip.wait()
        return y_TD.detach()

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None, None]:
        ctx.trip.start_home(ctx.way.back, dy_TD)
        return dy_TD, None, None


class FetchUnderway(NamedTuple):
    """Rows and choices on their way: only `wait_fetch` may touch them."""

    x_SD: Tensor
    scores_SK: Tensor
    ids_SK: Tensor
    trip: Trip
    way: Way


class DeliveryUnderway(NamedTuple):
    """Sums of results on their way: only `wait_delivery` may touch them."""

    y_TD: Tensor
    trip: Trip
    way: Way


def start_fetch(lane: Lane, x_TD: Tensor, scores_TK: Tensor, way: Way) -> FetchUnderway:
    """Launch `way.there`, (x_TD, scores_TK) -> x_SD, scores_SK and ids_SK; `way.back` takes gradients of the first two
    and gives those of its arguments."""
    trip = Trip(lane)
    x_SD, scores_SK, ids_SK = _StartFetch.apply(x_TD, scores_TK, trip, way)
    return FetchUnderway(x_SD, scores_SK, ids_SK, trip, way)


def wait_fetch(sent: FetchUnderway) -> tuple[Tensor, Tensor, Tensor]:
    """x_SD, scores_SK and ids_SK, which have arrived."""
    x_SD, scores_SK = _WaitFetch.apply(sent.x_SD, sent.scores_SK, sent.trip, sent.way)
    return x_SD, scores_SK, sent.ids_SK


def start_delivery(lane: Lane, y_SD: Tensor, way: Way) -> DeliveryUnderway:
    """Launch `way.there`, y_SD -> y_TD; `way.back` takes the gradient of the one and gives that of the other."""
    trip = Trip(lane)
    return DeliveryUnderway(_StartDeliver.apply(y_SD, trip, way), trip, way)


def wait_delivery(sent: DeliveryUnderway) -> Tensor:
    """y_TD, which has arrived."""
    return _WaitDeliver.apply(*sent)
