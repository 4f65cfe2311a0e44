"""Which blocks of a model are dense, and which have experts."""

from functools import lru_cache

Layers = range | tuple[int, ...]
"""Numbers of layers in ascending order, from 0."""


@lru_cache(maxsize=256)
def layers_by_kind(
    num_layers: int, num_dense: int, dense_layers: tuple[int, ...], moe_every: int
) -> tuple[Layers, Layers]:
    """Ranges where layers are consecutive. Values that break a rule are taken as the next best ones."""
    if not dense_layers and moe_every <= 1:
        first = min(max(num_dense, 0), num_layers)
        return range(first), range(first, num_layers)
    moe = [i for i in range(num_dense, num_layers) if (i + 1) % max(moe_every, 1) == 0 and i not in dense_layers]
    return consecutive([i for i in range(num_layers) if i not in moe]), consecutive(moe)


def consecutive(layers: list[int]) -> Layers:
    """Layers in ascending order, as a range if they are one."""
    is_range = bool(layers) and layers[-1] - layers[0] == len(layers) - 1
    return range(layers[0], layers[-1] + 1) if is_range else tuple(layers)
