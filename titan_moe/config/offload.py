"""What the memory of the host keeps for backward, by name and layer (`memory.offload`), which are counted as those of
`memory.recompute`, with the blocks of multi-token prediction."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from titan_moe.config.recipe import Recipe
from titan_moe.config.recompute import PartsByLayer, layers_of


@dataclass(frozen=True)
class Offloadable:
    """A part of a block whose inputs the host can keep.

    Of `inputs` it is the first one, for whatever saves it, of `saved` all that the part saves, which has no weights.
    """

    what: Literal["inputs", "saved"]
    paths: tuple[str, ...]  # in a block, of modules or methods; none for the block itself
    recomputed: tuple[str, ...]  # parts of memory.recompute that make some of it again, or keep it themselves
    other_names: tuple[str, ...]  # in Megatron Core


OFFLOADABLE: Mapping[str, Offloadable] = {
    "block": Offloadable("inputs", (), ("block",), ("attn_norm",)),
    "attention": Offloadable(
        "saved", ("attention.attend",), ("attention", "qkv_rope", "mla_up", "block"), ("core_attn", "attn_proj")
    ),
    "ffn_norm": Offloadable("inputs", ("ffn_norm",), ("block",), ("mlp_norm",)),
}
RECOMPUTED_INSTEAD: Mapping[str, str] = {
    "qkv_linear": "norms",
    "expert_fc1": "experts",
    "moe_act": "moe_act",
    "fused_group_mlp": "moe_act",
}
"""Other names of Megatron Core, and the part of memory.recompute that frees what they offload."""


def offload_of(recipe: Recipe) -> PartsByLayer:
    """What the host keeps of a recipe. Entries that break a rule are left out."""
    return _parse(recipe.memory.offload, recipe.model.num_blocks)


@lru_cache(maxsize=256)
def _parse(entries: tuple[str, ...], num_layers: int) -> PartsByLayer:
    return PartsByLayer(layers_of(entries, num_layers, OFFLOADABLE))
