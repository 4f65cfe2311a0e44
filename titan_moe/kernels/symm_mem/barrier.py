"""Let no rank of the group go on before all have come, on the device and without the host.

P ranks of the group

Every ordered pair of ranks has one signal: a word in the memory of the rank that waits, at the place of the rank that
comes. Program p of rank r does two things, one after the other:

    come    turn signal r in the memory of p from 0 into 1, trying until it is 0
    wait    turn signal p in its own memory from 1 into 0, trying until it is 1

*No rank goes on early*: a rank leaves when each of its P programs has seen its peer's 1. *It resets itself*: the rank
that waits takes the 1 away, so that all signals are 0 again once every rank has left, no number is counted, and a
captured barrier replays as often as one likes. *The next barrier cannot run into this one*: a rank that is ahead finds
its signal still 1 at a rank that has not left, and tries until that has taken it. *No circle of ranks waits*, even
where a device runs the programs one at a time, in ascending order: while r at p waits for p to reach r, p is held at a
j < r, and what it waits for has the smaller sum p + j. Beside other kernels the P programs, one warp each, find room
when one of those ends.

*What was written is seen*: kernels of a stream run in order, so what they wrote lies before the arrival; the arrival
releases it and the wait acquires it at the scope of the system, in which peers are; what the stream launches next reads
after the wait. Signals are P words that are 0 when the memory is made; barriers over the same words must be launched in
the same order on every rank, on one stream.

*No rank waits for ever*: a program that has tried for SPIN_LIMIT_SECONDS gives its peer up. It writes which one that is
into the header of every rank's memory and where its host reads it (dispatch/missing_rank.py), and leaves. From then on
a barrier waits for a missing peer a millisecond and no more, plans hold no rows (row_plan.py), and what exchanges bring
is stale: the step is void.

Physics: latency of the links, a round trip of atomics: 4.6 microseconds between 8 H200s that come at the same time. The
clock and the header are looked at after POLLS_PER_LOOK tries alone, so that a barrier at which all come pays nothing.
"""

import triton
import triton.language as tl
from triton import knobs

from titan_moe.kernels.symm_mem.arrays import HEADER_WORDS, SymmArray, peer_array

SPIN_LIMIT_SECONDS = 300.0
"""How long a rank may be late: half of NCCL's default, whose watchdog ends the process and names no rank."""
POLLS_PER_LOOK = 256


@triton.jit
def _nanoseconds(num_polls, IS_INTERPRETED: tl.constexpr):
    """A clock, the same for all threads of a warp; the interpreter has none and counts a tenth of a millisecond a
    poll."""
    if IS_INTERPRETED:
        return num_polls.to(tl.int64) * 100_000
    else:
        return tl.extra.cuda.globaltimer()


@triton.jit
def _turn(
    signal_ptr, old, new, header_ptr,
    SEM: tl.constexpr, LIMIT_NS: tl.constexpr, POLLS_PER_LOOK: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Turn a signal from one value into another, trying until it is; returns whether it was in time."""
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
            gives_up = (now_ns - begin_ns > LIMIT_NS) | (tl.load(header_ptr, volatile=True) != 0)
    return is_turned


@triton.jit(do_not_specialize=["rank"])
def _barrier_kernel(
    header_ptr, peer_ptrs_ptr, offset_bytes, rank,
    HEADER_WORDS: tl.constexpr, LIMIT_NS: tl.constexpr, POLLS_PER_LOOK: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    peer = tl.program_id(0)
    has_failed = tl.load(header_ptr) != 0  # a barrier before, at whichever rank; read while the signals are turned
    there = peer_array(peer_ptrs_ptr, peer, offset_bytes, header_ptr) + HEADER_WORDS + rank
    has_come = _turn(there, 0, 1, header_ptr, "release", LIMIT_NS, POLLS_PER_LOOK, IS_INTERPRETED)
    if has_come:
        here = header_ptr + HEADER_WORDS + peer
        has_come = _turn(here, 1, 0, header_ptr, "acquire", LIMIT_NS, POLLS_PER_LOOK, IS_INTERPRETED)
    if has_failed | (has_come == 0):
        missing = tl.atomic_cas(header_ptr, 0, peer + 1)
        if missing == 0:  # the first to be given up is the one that all ranks name
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
        HEADER_WORDS=HEADER_WORDS, LIMIT_NS=int(SPIN_LIMIT_SECONDS * 1e9), POLLS_PER_LOOK=POLLS_PER_LOOK,
        IS_INTERPRETED=knobs.runtime.interpret, num_warps=1,
    )  # fmt: skip
