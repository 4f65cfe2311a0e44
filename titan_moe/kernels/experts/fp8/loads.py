"""Gluon's loads into shared memory that do not wait, by their names in the installed triton."""

from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

from titan_moe.versions import NAMES_LOADS_COPIES

if NAMES_LOADS_COPIES.is_here:
    load_box, load_each = tma.async_copy_global_to_shared, async_copy.async_copy_global_to_shared
else:
    load_box, load_each = tma.async_load, async_copy.async_load
"""By the TMA (descriptor, coordinates, barrier, destination); by each thread (destination, pointers)."""
