"""One persistent buffer for what backward needs of the rows and slots of all layers.

A rows and B slots of the arena, C and G of its delayed slabs · S rows and R slots of a layer · W elements of a row and
H of a slot, both as they are kept (format.py) · F hidden width

The routing decides how many rows and slots a layer has, and a static tensor has room for the worst case. In the arena
each layer takes what it needs, behind the layer before: its first row and slot are known on the device alone. So the
arena is sized by the sum over layers, which varies much less than one layer's need. A microbatch's forward starts at
the beginning; its backward reads each layer where forward wrote it. Addresses stay, so CUDA graphs replay.

In a pipeline several microbatches are between forward and backward. Then the arena has as many equal slabs, one behind
the other, and the forward of a stage starts at the beginning of one. The host chooses the slab, by the schedule alone:
every step chooses the same.

Where weight gradients are delayed, a microbatch stays in its slab until they are computed. They need gradients of
results and of activations too, which lie in a *delayed slab* of as many rows and slots, from the first part of the
backward to the second. A layer begins in it where it begins in its slab. These slabs have a number of their own,
because fewer microbatches are between the two parts than in flight.

Where a layer does not fit into its slab, a flag is set and the layer is written at the slab's beginning. Its own
forward is right, so the need of all layers is known, but a backward would read other rows: the step is void.

To the compiler an arena is a number, its handle: an operation that takes the handle is a function of its other
arguments, as with symmetric memory. So an arena may be resized without a new graph of the compiler. (A recorded CUDA
graph has its addresses, and must be recorded again.)

Physics: `take`, `verify` and `delay` are a launch each of a few integers a layer.
"""

from itertools import count
from weakref import WeakValueDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.experts.format import ExpertFormat
from titan_moe.kernels.experts.plain import PLAIN

_ARENAS: "WeakValueDictionary[int, Arena]" = WeakValueDictionary()
_HANDLES = count(1)
NONE = 0
"""The handle of no arena. Operations take tensors and numbers alone, so arenas are found by number."""


def take_reference(
    sizes: list[tuple[int, int]], room: tuple[int, int], keeps: bool = True, slab: int = 0, keeps_slots: bool = True
) -> tuple[list[tuple[int, int]], tuple[int, int], bool]:
    """The layers of a microbatch by their rows and slots, and the room of a slab: first rows and slots, need, whether
    one did not fit. Without `keeps_slots`, slots are in memory of their own."""
    if not keeps_slots:
        bases, (num_rows, _), overflowed = take_reference([(rows, 0) for rows, _ in sizes], room, keeps, slab)
        return [(row, 0) for row, _ in bases], (num_rows, 0), overflowed
    bases, head, overflowed = [], (0, 0), False
    first = (slab * room[0], slab * room[1]) if keeps else (0, 0)
    for size in sizes:
        begin = head if keeps else (0, 0)
        fits = all(begun + number <= limit for begun, number, limit in zip(begin, size, room, strict=True))
        bases.append((first[0] + begin[0], first[1] + begin[1]) if fits else first)
        overflowed |= not fits
        head = (head[0] + size[0], head[1] + size[1])
    return bases, head, overflowed


@triton.jit(do_not_specialize=["slab", "num_slab_rows", "num_slab_slots"])
def _take_kernel(
    rows_ptr, slots_ptr, base_ptr, head_ptr, need_ptr, overflowed_ptr, slab, num_slab_rows, num_slab_slots,
    KEEPS: tl.constexpr, KEEPS_SLOTS: tl.constexpr,
):  # fmt: skip
    num_rows, num_slots = tl.load(rows_ptr).to(tl.int64), tl.load(slots_ptr).to(tl.int64)
    if not KEEPS_SLOTS:
        num_slots *= 0
    row, slot = tl.load(head_ptr), tl.load(head_ptr + 1)
    tl.store(head_ptr, row + num_rows)
    tl.store(head_ptr + 1, slot + num_slots)
    tl.store(need_ptr, tl.maximum(tl.load(need_ptr), row + num_rows))
    tl.store(need_ptr + 1, tl.maximum(tl.load(need_ptr + 1), slot + num_slots))
    number = tl.load(head_ptr + 2)
    if not KEEPS:
        row, slot = row * 0, slot * 0
    fits = (row + num_rows <= num_slab_rows) & (slot + num_slots <= num_slab_slots)
    first = slab.to(tl.int64)  # its product with the room of a slab may be large
    tl.store(base_ptr, first * num_slab_rows + tl.where(fits, row, 0))
    tl.store(base_ptr + 1, first * num_slab_slots + tl.where(fits, slot, 0) if KEEPS_SLOTS else num_slots)
    tl.store(base_ptr + 2, number)
    tl.store(base_ptr + 3, first)
    tl.store(overflowed_ptr, (tl.load(overflowed_ptr) != 0).to(tl.int8) | (~fits).to(tl.int8))


@triton.jit
def _verify_kernel(base_ptr, heads_ptr, overflowed_ptr):
    if tl.load(base_ptr + 2) != tl.load(heads_ptr + tl.load(base_ptr + 3) * 3 + 2):
        tl.store(overflowed_ptr, 1)


@triton.jit(do_not_specialize=["delayed_slab", "num_slab_rows", "num_slab_slots"])
def _delay_kernel(base_ptr, delayed_ptr, delayed_slab, num_slab_rows, num_slab_slots):
    distance = delayed_slab - tl.load(base_ptr + 3)
    tl.store(delayed_ptr, tl.load(base_ptr) + distance * num_slab_rows)
    tl.store(delayed_ptr + 1, tl.load(base_ptr + 1) + distance * num_slab_slots)


class Arena:
    """The buffer, and what the layers of the microbatches in flight have taken of it.

    While `keeps` is true, layers lie one behind the other, for their backward. While it is false, every layer is
    written at the beginning, and its backward computes it again; or, where `is_checkpointed`, a recomputed forward
    precedes each backward. While `is_in_pieces`, layers are taken in pieces: each is written at the beginning, so that
    its backward computes it again in any case.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        is_checkpointed: bool = False,
        format: ExpertFormat = PLAIN,
        num_slabs: int = 1,
        num_delayed_slabs: int = 0,
    ) -> None:
        """`hidden` is F; rows and slots are kept in `format`; `num_slabs` microbatches are kept at a time, and
        `num_delayed_slabs` of them wait for their weight gradients. The arena has no room yet."""
        self.rows_AW = torch.empty(0, format.row_width(width, dtype), dtype=dtype, device=device)
        self.hidden_BH = format.new_hidden(self.rows_AW, 0, hidden)
        self.dy_CW = torch.empty_like(self.rows_AW)
        self.dactive_GF = torch.empty(0, hidden, dtype=format.result_dtype(dtype), device=device)
        self.num_delayed_slabs = num_delayed_slabs
        self.delayed_slab = 0
        """That of the backward under way, if its weight gradients are delayed."""
        self.heads_P3 = torch.zeros(num_slabs, 3, dtype=torch.int64, device=device)
        """By slab, rows and slots that the layers of its forward have taken so far, or would have; its number."""
        self.slab = 0
        """That of the forward under way."""
        self.room = (0, 0)
        """Rows and slots of a slab."""
        self.need = torch.zeros(2, dtype=torch.int64, device=device)
        """The largest head since `reset`."""
        self.overflowed = torch.zeros((), dtype=torch.bool, device=device)
        """Whether a layer did not fit, or was overwritten, since `reset`."""
        self.keeps, self.is_checkpointed, self.is_in_pieces = not is_checkpointed, is_checkpointed, False
        self.handle = next(_HANDLES)
        _ARENAS[self.handle] = self

    @staticmethod
    def of(handle: int) -> "Arena | None":
        """The arena of a handle; None for `NONE`.

        Raises: KeyError for the handle of an arena that is gone.
        """
        return None if handle == NONE else _ARENAS[handle]

    def __deepcopy__(self, memo: object) -> "Arena":
        """A copied model uses the same arena."""
        return self

    @property
    def num_slabs(self) -> int:
        """Microbatches that are kept at a time."""
        return len(self.heads_P3)

    @property
    def backward_recomputes(self) -> bool:
        """Whether a backward must compute its layer's rows and hidden states again."""
        return not self.keeps and (self.is_in_pieces or not self.is_checkpointed)

    @property
    def can_delay(self) -> bool:
        """Whether weight gradients of a layer may be computed after the rest of its backward."""
        return self.keeps and self.num_delayed_slabs > 0

    @property
    def buffers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of rows, pre-activations, gradients of results and gradients of activations."""
        return self.rows_AW, self.hidden_BH, self.dy_CW, self.dactive_GF

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.buffers)

    @property
    def room_bytes(self) -> tuple[int, int]:
        """Bytes of one row and of one slot of room: in every slab."""
        row, slot, delayed_row, delayed_slot = (tensor.shape[1] * tensor.element_size() for tensor in self.buffers)
        number, delayed = self.num_slabs, self.num_delayed_slabs
        return number * row + delayed * delayed_row, number * slot + delayed * delayed_slot

    def resize(self, num_rows: int, num_slots: int) -> None:
        """Allocate slabs for so many rows and slots of all layers together; one slab, and no delayed one, while
        nothing is kept. The old contents are lost."""
        self.room = num_rows, num_slots
        number, delayed = (self.num_slabs, self.num_delayed_slabs) if self.keeps else (1, 0)
        lengths = number * num_rows, number * num_slots, delayed * num_rows, delayed * num_slots
        if lengths == tuple(map(len, self.buffers)):
            return
        empty = [buffer[:0].clone() for buffer in self.buffers]
        self.rows_AW, self.hidden_BH, self.dy_CW, self.dactive_GF = empty  # the old buffers are freed first
        if self.rows_AW.is_cuda:
            torch.cuda.empty_cache()
        self.rows_AW, self.hidden_BH, self.dy_CW, self.dactive_GF = (
            buffer.new_empty(length, buffer.shape[1]) for buffer, length in zip(empty, lengths, strict=True)
        )

    def start_forward(self, slab: int = 0) -> None:
        """Take from the beginning of a slab: before the forward of a microbatch. Its last forward is overwritten.

        Raises: IndexError for a slab that the arena does not have.
        """
        head = self.heads_P3[slab]
        head[:2].zero_()
        head[2:].add_(1)
        self.slab = slab

    def reset(self) -> None:
        """Forget need and overflow."""
        self.need.zero_()
        self.overflowed.zero_()

    def take(self, num_rows: Tensor, num_slots: Tensor, *, keeps_slots: bool = True) -> Tensor:
        """Take room for a layer: -> int64 [4], its first row and slot, the number of the forward, and its slab. Without
        `keeps_slots` the slots are in memory of their own, from 0 on.

        Shapes: int32 scalars on the device, the layer's rows and slots; views of longer arrays are allowed.
        """
        head = self.heads_P3[self.slab]
        base = head.new_empty(4)
        _take_kernel[(1,)](
            num_rows, num_slots, base, head, self.need, self.overflowed.view(torch.int8),
            self.slab if self.keeps else 0, *self.room, KEEPS=self.keeps, KEEPS_SLOTS=keeps_slots,
        )  # fmt: skip
        return base

    def verify(self, base: Tensor) -> None:
        """Before a layer's backward: if another forward has begun in its slab since, its rows are overwritten, and the
        step is void."""
        if self.keeps:
            _verify_kernel[(1,)](base, self.heads_P3, self.overflowed.view(torch.int8))

    def delay(self, base: Tensor) -> Tensor:
        """Where the layer of a `base` begins in the delayed slab: int64 [2], its first row and slot."""
        delayed = base.new_empty(2)
        _delay_kernel[(1,)](base, delayed, self.delayed_slab, *self.room)
        return delayed
