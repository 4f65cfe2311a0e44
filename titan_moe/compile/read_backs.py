"""Barriers in the kernels of torch.compile that read back what they have stored.

A reduction that loops over its rows twice may store an intermediate result in the first loop and load it in the second.
Triton may give the load another layout than the store (triton issue 10924). Then a thread loads what a thread of
another warp has stored, and Inductor below torch 2.14 does not wait for it (pytorch pull request 190519): results are
silently wrong. tools/results/tests.md, has such a kernel, the backward of a norm behind a dispatch.
"""

import torch

from titan_moe.versions import READS_BACK_WITHOUT_BARRIER

TAG = "barriers before read-backs"
"""Part of the key of compiled kernels on disk: those without barriers must not be found."""


def add_barriers() -> None:
    """Let the kernels that torch.compile generates for GPUs from now on, in this process, wait for all threads of a
    block before they load what it has stored; those of torch 2.14 do so by themselves."""
    if not READS_BACK_WITHOUT_BARRIER.is_here:
        return
    from torch._inductor.codegen.triton import TritonKernel  # slow

    load = TritonKernel.load
    if getattr(load, "has_barriers", False):
        return

    def load_behind_barrier(kernel: TritonKernel, name: str, index: object) -> object:
        if name in kernel.cse.invalidated_stores:  # stored by an earlier loop
            kernel.loads.writeline("tl.debug_barrier()")
        return load(kernel, name, index)

    load_behind_barrier.has_barriers = True  # type: ignore[attr-defined]
    TritonKernel.load = load_behind_barrier
    config = torch.compiler.config
    config.cache_key_tag = f"{config.cache_key_tag} {TAG}".strip()
