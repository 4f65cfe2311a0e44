"""A barrier of all ranks of the group, on the device and without the host.

P ranks of the group

Every ordered pair of ranks has one signal: a word in the memory of the waiting rank, indexed by the arriving rank.
Program p of rank r spins on two compare-and-swaps in turn:

    arrive  signal r in the memory of p: 0 -> 1
    wait    signal p in its own memory: 1 -> 0

*Correct*: a rank leaves when each of its P programs has seen its peer's 1. *Self-resetting*: the wait clears the
signal, so all are 0 once every rank has left, and a captured barrier can be replayed. *Barriers do not mix*: a rank
that is ahead finds its signal still 1 at a rank that has not left, and spins. *No deadlock*, even where a device runs
the programs one at a time, in ascending order: while r at p waits for p to reach r, p is held at a j < r, and waits for
a smaller sum p + j. Beside other kernels the P programs, one warp each, start when a thread block of those ends.

*Memory order*: kernels of a stream run in order, so earlier writes precede the arrival, which releases them; the wait
acquires them, both at system scope, which includes peers; later kernels read after the wait. Signals must be 0 at
first. Barriers over the same words must be launched in the same order on every rank, on one stream.

*Timeout*: after the limit in its header, or SPIN_LIMIT_SECONDS without one, a program gives up on its peer, writes that
rank into the header of every rank's memory and to its host (dispatch/missing_rank.py), and leaves. From then on a
barrier waits for a missing peer at most a millisecond, plans hold no rows (row_plan.py), and exchanged data are stale:
the step is skipped.

Physics: a round trip of atomics over the links, 4.6 microseconds between 8 H200s. Clock and header are read once in
POLLS_PER_LOOK polls, so that a barrier without late ranks pays nothing.
"""

import triton
import triton.language as tl
from triton import knobs

from titan_moe.kernels.symm_mem.arrays import HEADER_WORDS, SymmArray, peer_array

SPIN_LIMIT_SECONDS = 300.0
"""Default limit: half of NCCL's default timeout, whose watchdog ends the process and names no rank."""
POLLS_PER_LOOK = 256


@triton.jit
def _nanoseconds(num_polls, IS_INTERPRETED: tl.constexpr):
    """A clock, equal for all threads of a warp; in the interpreter, 0.1 ms a poll."""
    if IS_INTERPRETED:
        return num_polls.to(tl.int64) * 100_000
    else:
        return tl.extra.cuda.globaltimer()


@triton.jit
def _turn(
    signal_ptr, old, new, header_ptr, limit_ns,
    SEM: tl.constexpr, POLLS_PER_LOOK: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Spin until a signal is swapped from `old` to `new`; returns whether it was in time."""
    is_turned = tl.atomic_cas(signal_ptr, old, new, sem=SEM, scope="sys") == old
    num_polls = tl.zeros((), dtype=tl.int32)
    gives_up = num_polls < 0
    begin_ns = tl.zeros((), dtype=tl.int64)
    while (is_turned | gives_up) == 0:
        is_turned = tl.atomic_cas(signal_ptr, old, new, sem=SEM, scope="sys") == old
        num_polls += 1
        if num_polls % POLLS_PER_LOOK == 0:
            now_ns = _nanoseconds(num_polls, IS_INTERPRETED)
            begin_ns = tl.where(begin_ns == 0, now_ns, begin_ns)
            gives_up = (now_ns - begin_ns > limit_ns) | (tl.load(header_ptr, volatile=True) != 0)
    return is_turned


@triton.jit(do_not_specialize=["rank"])
def _barrier_kernel(
    header_ptr, peer_ptrs_ptr, offset_bytes, rank,
    HEADER_WORDS: tl.constexpr, DEFAULT_LIMIT_NS: tl.constexpr, POLLS_PER_LOOK: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    peer = tl.program_id(0)
    has_failed = tl.load(header_ptr) != 0  # an earlier barrier, on any rank
    limit_ns = tl.load(header_ptr.to(tl.pointer_type(tl.int64)) + 2)  # read at run time, for recorded graphs too
    limit_ns = tl.where(limit_ns == 0, DEFAULT_LIMIT_NS, limit_ns)
    there = peer_array(peer_ptrs_ptr, peer, offset_bytes, header_ptr) + HEADER_WORDS + rank
    has_come = _turn(there, 0, 1, header_ptr, limit_ns, "release", POLLS_PER_LOOK, IS_INTERPRETED)
    if has_come:
        here = header_ptr + HEADER_WORDS + peer
        has_come = _turn(here, 1, 0, header_ptr, limit_ns, "acquire", POLLS_PER_LOOK, IS_INTERPRETED)
    if has_failed | (has_come == 0):
        missing = tl.atomic_cas(header_ptr, 0, peer + 1)
        if missing == 0:  # all ranks report the first missing rank
            missing = peer + 1
            for other in range(tl.num_programs(0)):
                tl.atomic_cas(peer_array(peer_ptrs_ptr, other, offset_bytes, header_ptr), 0, missing, scope="sys")
        address = tl.load(header_ptr.to(tl.pointer_type(tl.int64)) + 1)
        if address != 0:
            tl.store(address.to(tl.pointer_type(tl.int32)), missing, cache_modifier=".wt")  # past the caches


def symm_barrier(signals: SymmArray, rank: int) -> None:
    """Launch a barrier of all ranks."""
    num_ranks = signals.peer_ptrs_P.numel()
    _barrier_kernel[(num_ranks,)](
        signals.local, signals.peer_ptrs_P, signals.offset_bytes, rank,
        HEADER_WORDS=HEADER_WORDS, DEFAULT_LIMIT_NS=int(SPIN_LIMIT_SECONDS * 1e9), POLLS_PER_LOOK=POLLS_PER_LOOK,
        IS_INTERPRETED=knobs.runtime.interpret, num_warps=1,
    )  # fmt: skip
