"""Operations on tensors, a folder for each: physics, a plain PyTorch reference, Triton kernels, a registry entry.

Nothing here depends on process groups, modules or recipes. `titan_moe.kernels.registry` lists the operations for tests
and benchmarks, except those of `symm_mem`, which need peers. See README.md.
"""
