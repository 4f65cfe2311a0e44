"""Let no rank of the group go on before all have come, on the device and without the host.

P ranks of the group

Every ordered pair of ranks has one signal: a word in the memory of the rank that waits, at the place of the rank that
comes. Program p of rank r does two things, one after the other:

    come    turn signal r in the memory of p from 0 into 1, trying until it is 0
    wait    turn signal p in its own memory from 1 into 0, trying until it is 1

*Nobody goes on early*: a rank leaves when each of its P programs has seen its peer's 1. *It resets itself*: who waits
takes the 1 away, so that all signals are 0 again once everyone has left, no number is counted, and a captured barrier
replays as often as one likes. *The next barrier cannot run into this one*: a rank that is ahead finds its signal still
1 at a rank that has not left, and tries until that has taken it. *Nobody waits in a circle*, even where a device runs
the programs one at a time, in ascending order: while r at p waits for p to reach r, p is held at a j < r, and what it
waits for has the smaller sum p + j. Beside other kernels the P programs, one warp each, find room when one of those
ends.

*What was written is seen*: kernels of a stream run in order, so what they wrote lies before the arrival; the arrival
releases it and the wait acquires it at the scope of the system, in which peers are; what the stream launches next reads
after the wait. Signals are P words that are 0 when the memory is made; barriers over the same words must be launched in
the same order on every rank, on one stream.

Physics: latency of the links, a round trip of atomics: 4.6 microseconds between 8 H200s that come at the same time.
"""

import triton
import triton.language as tl

from titan_moe.kernels.symm_mem.arrays import SymmArray, peer_array


@triton.jit(do_not_specialize=["rank"])
def _barrier_kernel(signals_ptr, peer_ptrs_ptr, offset_bytes, rank):
    peer = tl.program_id(0)
    there = peer_array(peer_ptrs_ptr, peer, offset_bytes, signals_ptr) + rank
    while tl.atomic_cas(there, 0, 1, sem="release", scope="sys") != 0:
        pass
    while tl.atomic_cas(signals_ptr + peer, 1, 0, sem="acquire", scope="sys") != 1:
        pass


def symm_barrier(signals: SymmArray, rank: int) -> None:
    """Launch a barrier of all ranks; a rank that never comes makes the others wait for ever."""
    num_ranks = signals.peer_ptrs_P.numel()
    _barrier_kernel[(num_ranks,)](signals.local, signals.peer_ptrs_P, signals.offset_bytes, rank, num_warps=1)
