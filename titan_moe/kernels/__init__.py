"""Tensors in, tensors out: one file an operation, each with its physics, a plain reference and a registry entry.

Nothing here knows of ranks, modules or recipes. `titan_moe.kernels.registry` lists every operation for tests and
benchmarks.
"""
