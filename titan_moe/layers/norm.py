"""The norms of the residual stream, by their names in `model.norm`."""

from torch import nn

NORMS: dict[str, type[nn.RMSNorm] | type[nn.LayerNorm]] = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
"""Name -> class, which takes a width and an epsilon."""
