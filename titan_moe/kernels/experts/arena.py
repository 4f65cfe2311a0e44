"""One persistent buffer for what backward needs of the rows and slots of all layers.

A rows and B slots of the arena · S rows and R slots of a layer · W elements of a row and H of a slot, both as
they are kept (stage_sets.py)

The routing decides how many rows and slots a layer has, and a static tensor has room for the worst case. In the arena
each layer takes what it needs, behind the layer before: its first row and slot are known on the device alone. So the
arena is sized by the sum over layers, which varies much less than one layer's need. A microbatch's forward starts at
the beginning; its backward reads each layer where forward wrote it. Addresses stay, so CUDA graphs replay.

Where a layer does not fit, a flag is set and the layer is written at the beginning. Its own forward is right, so the
need of all layers is known, but a backward would read other rows: the step is void.

To the compiler an arena is a number, its handle: an operation that takes the handle is a function of its other
arguments, as with symmetric memory. So an arena may be resized without a new graph of the compiler. (A recorded CUDA
graph has its addresses, and must be recorded again.)

Physics: `take` and `verify` are a launch each of a few integers a layer.
"""

from itertools import count
from weakref import WeakValueDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_moe.kernels.experts.fp8.rows import CODES, TAIL_BYTES

_ARENAS: "WeakValueDictionary[int, Arena]" = WeakValueDictionary()
_HANDLES = count(1)
NONE = 0
"""The handle of no arena. Operations take tensors and numbers alone, so arenas are found by number."""


def take_reference(
    sizes: list[tuple[int, int]], room: tuple[int, int], keeps: bool = True
) -> tuple[list[tuple[int, int]], tuple[int, int], bool]:
    """The layers of a microbatch by their rows and slots: first rows and slots, need, whether one did not fit."""
    bases, head, overflowed = [], (0, 0), False
    for size in sizes:
        begin = head if keeps else (0, 0)
        fits = all(first + number <= limit for first, number, limit in zip(begin, size, room, strict=True))
        bases.append(begin if fits else (0, 0))
        overflowed |= not fits
        head = (head[0] + size[0], head[1] + size[1])
    return bases, head, overflowed


@triton.jit(do_not_specialize=["num_arena_rows", "num_arena_slots"])
def _take_kernel(
    rows_ptr, slots_ptr, base_ptr, head_ptr, need_ptr, overflowed_ptr, num_arena_rows, num_arena_slots,
    KEEPS: tl.constexpr,
):  # fmt: skip
    num_rows, num_slots = tl.load(rows_ptr).to(tl.int64), tl.load(slots_ptr).to(tl.int64)
    row, slot = tl.load(head_ptr), tl.load(head_ptr + 1)
    tl.store(head_ptr, row + num_rows)
    tl.store(head_ptr + 1, slot + num_slots)
    tl.store(need_ptr, tl.maximum(tl.load(need_ptr), row + num_rows))
    tl.store(need_ptr + 1, tl.maximum(tl.load(need_ptr + 1), slot + num_slots))
    if not KEEPS:
        row, slot = row * 0, slot * 0
    fits = (row + num_rows <= num_arena_rows) & (slot + num_slots <= num_arena_slots)
    tl.store(base_ptr, tl.where(fits, row, 0))
    tl.store(base_ptr + 1, tl.where(fits, slot, 0))
    tl.store(base_ptr + 2, tl.load(head_ptr + 2))
    tl.store(overflowed_ptr, (tl.load(overflowed_ptr) != 0).to(tl.int8) | (~fits).to(tl.int8))


@triton.jit
def _verify_kernel(base_ptr, head_ptr, overflowed_ptr):
    if tl.load(base_ptr + 2) != tl.load(head_ptr + 2):
        tl.store(overflowed_ptr, 1)


class Arena:
    """The buffer, and what the layers of a microbatch have taken of it.

    While `keeps` is true, layers lie one behind the other, for their backward. While it is false, every layer is
    written at the beginning, and its backward computes it again; or, where `is_checkpointed`, a recomputed forward
    precedes each backward.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        is_checkpointed: bool = False,
        is_fp8: bool = False,
    ) -> None:
        """`hidden` is F; `is_fp8` as in stage_sets.py. The arena has no room yet."""
        row = (width + TAIL_BYTES) // dtype.itemsize if is_fp8 else width
        slot, of_slots = (2 * hidden + TAIL_BYTES, CODES) if is_fp8 else (2 * hidden, dtype)
        self.rows_AW = torch.empty(0, row, dtype=dtype, device=device)
        self.hidden_BH = torch.empty(0, slot, dtype=of_slots, device=device)
        self.head = torch.zeros(3, dtype=torch.int64, device=device)
        """Rows and slots that the layers of this forward have taken so far, or would have; its number."""
        self.need = torch.zeros(2, dtype=torch.int64, device=device)
        """The largest head since `reset`."""
        self.overflowed = torch.zeros((), dtype=torch.bool, device=device)
        """Whether a layer did not fit, or was overwritten, since `reset`."""
        self.keeps, self.is_checkpointed = not is_checkpointed, is_checkpointed
        self.peak_bytes_beside = 0
        """The peak of a GPU's memory without the arena, under the sizes that it had before."""
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
    def backward_recomputes(self) -> bool:
        """Whether a backward must compute its layer's rows and hidden states again."""
        return not self.keeps and not self.is_checkpointed

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.rows_AW, self.hidden_BH))

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a row and of a slot."""
        both = self.rows_AW, self.hidden_BH
        row, slot = (tensor.shape[1] * tensor.element_size() for tensor in both)
        return row, slot

    def resize(self, num_rows: int, num_slots: int) -> None:
        """Allocate room for so many rows and slots of all layers together; the old contents are lost."""
        if (num_rows, num_slots) == (len(self.rows_AW), len(self.hidden_BH)):
            return
        rows, hidden = self.rows_AW[:0].clone(), self.hidden_BH[:0].clone()
        self.peak_bytes_beside = self.peak_beside()
        self.rows_AW, self.hidden_BH = rows, hidden  # the old buffers are freed first
        if rows.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(rows.device)
        self.rows_AW = rows.new_empty(num_rows, rows.shape[1])
        self.hidden_BH = hidden.new_empty(num_slots, hidden.shape[1])

    def peak_beside(self) -> int:
        """The peak of a GPU's memory so far, in bytes, without the arena; 0 on a CPU."""
        if not self.rows_AW.is_cuda:
            return 0
        return max(self.peak_bytes_beside, torch.cuda.max_memory_allocated(self.rows_AW.device) - self.num_bytes)

    def start_forward(self) -> None:
        """Take from the beginning again: before the forward of a microbatch."""
        self.head[:2].zero_()
        self.head[2:].add_(1)

    def reset(self) -> None:
        """Forget need and overflow."""
        self.need.zero_()
        self.overflowed.zero_()

    def take(self, num_rows: Tensor, num_slots: Tensor) -> Tensor:
        """Take room for a layer: -> int64 [3], its first row and slot, and the number of the forward.

        Shapes: int32 scalars on the device, the layer's rows and slots; views of longer arrays are allowed.
        """
        base = torch.empty_like(self.head)
        _take_kernel[(1,)](
            num_rows, num_slots, base, self.head, self.need, self.overflowed.view(torch.int8),
            len(self.rows_AW), len(self.hidden_BH), KEEPS=self.keeps,
        )  # fmt: skip
        return base

    def verify(self, base: Tensor) -> None:
        """Before a layer's backward: if another forward has begun since, its rows are overwritten, and the step is
        void."""
        if self.keeps:
            _verify_kernel[(1,)](base, self.head, self.overflowed.view(torch.int8))
