"""What backward computes again instead of keeping it, by name and layer (`memory.recompute`).

An entry is a name, or a name and layers: `"norms"`, `"experts:8"` (the first eight), `"experts:-8"` (the last eight),
`"experts:4-11"`. A pipeline stage is a range of layers, which `titan-moe check` prints. Blocks of multi-token
prediction count as layers behind the others: they are among the last.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from titan_moe.config.recipe import Recipe

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class Recomputable:
    """A part of a block that backward can compute again.

    Of `inside`, the part itself computes again what it does not keep, or is a checkpoint if it cannot. Of `outputs`,
    what the part returns is not kept: backward computes it again from what the part keeps, where its readers need it.
    Of a `checkpoint` nothing is kept but its inputs (arXiv:1604.06174).
    """

    how: Literal["outputs", "checkpoint", "inside"]
    paths: tuple[str, ...]  # in a block, of modules or methods; none for the block itself
    purpose: str
    other_names: tuple[str, ...] = ()  # in Megatron Core


RECOMPUTABLE: Mapping[str, Recomputable] = {
    "norms": Recomputable(
        "outputs", ("attention_norm", "ffn_norm"), "the results of a block's two norms", ("layernorm",)
    ),
    "qkv_rope": Recomputable(
        "outputs", ("attention.qk_norm_rope",), "normed and rotated queries and keys, and values (gqa with qk_norm)"
    ),
    "mla_up": Recomputable(
        "outputs", ("attention.up",), "queries, keys and values, from their latents (mla)", ("mla_up_proj",)
    ),
    "attention": Recomputable(
        "checkpoint", ("attention.core",), "the result of attention, which is computed twice", ("core_attn",)
    ),
    "dense_mlp": Recomputable("outputs", ("feed_forward.gate_up",), "the hidden states of dense layers", ("mlp",)),
    "shared_experts": Recomputable(
        "outputs",
        ("feed_forward.shared_experts.gate_up", "feed_forward.shared_experts.mlp.gate_up"),
        "the hidden states of shared experts",
    ),
    "expert_weights": Recomputable(
        "outputs", ("feed_forward.experts.casts",), "copies of expert weights in compute's dtype, or codes of them"
    ),
    "moe_act": Recomputable("inside", ("feed_forward.experts",), "hidden states of experts, from rows that are kept"),
    "experts": Recomputable("inside", ("feed_forward.experts",), "expert MLPs; no message is repeated"),
    "block": Recomputable("checkpoint", (), "whole blocks, dispatch and combine included", ("full", "moe")),
}
ENTRY = re.compile(r"(?P<name>[a-z_]+)(:(?P<layers>-?\d+|\d+-\d+))?")


@dataclass(frozen=True)
class PartsByLayer:
    """By name, the layers of a model in which a part is one of these."""

    layers: Mapping[str, frozenset[int]]

    def names_of(self, layer: int) -> list[str]:
        """The parts of a layer."""
        return [name for name, layers in self.layers.items() if layer in layers]

    def of(self, *names: str) -> frozenset[int]:
        """The layers that have one of these parts."""
        return frozenset().union(*(self.layers.get(name, frozenset()) for name in names))


@dataclass(frozen=True)
class Recompute(PartsByLayer):
    """By name, the layers of a model in which a part is computed again."""

    @property
    def without_rows(self) -> frozenset[int]:
        """The layers that keep no rows of experts."""
        return self.of("experts", "block")

    @property
    def without_hidden(self) -> frozenset[int]:
        """The layers that keep no hidden states of experts."""
        return self.of("experts", "block", "moe_act")


def recompute_of(recipe: Recipe) -> Recompute:
    """What a recipe computes again; nothing while "auto" is not resolved."""
    return of_entries(recipe.memory.recompute, recipe.model.num_blocks)


def with_entries(recipe: Recipe, entries: tuple[str, ...]) -> Recipe:
    """The recipe with these parts computed again."""
    return replace(recipe, memory=replace(recipe.memory, recompute=entries))


@lru_cache(maxsize=256)
def of_entries(entries: tuple[str, ...], num_layers: int) -> Recompute:
    """What these entries mean for so many layers. Those that break a rule are left out."""
    return Recompute(layers_of(entries, num_layers, RECOMPUTABLE))


def layers_of(entries: Iterable[str], num_layers: int, parts: Mapping[str, Any]) -> Mapping[str, frozenset[int]]:
    """By name, in the order of `parts`, the layers that entries name. Those that break a rule are left out."""
    layers: dict[str, frozenset[int]] = {}
    for entry in entries:
        if entry not in (AUTO, NONE):
            with suppress(ValueError):
                name, of_entry = parse_entry(entry, num_layers, parts)
                layers[name] = layers.get(name, frozenset()) | of_entry
    return MappingProxyType({name: layers[name] for name in parts if layers.get(name)})


def parse_entry(entry: str, num_layers: int, parts: Mapping[str, Any] = RECOMPUTABLE) -> tuple[str, frozenset[int]]:
    """The name of an entry, which is one of `parts`, and its layers.

    Raises: ValueError with what is wrong with it.
    """
    match = ENTRY.fullmatch(entry)
    name = match["name"] if match else entry.partition(":")[0]
    if name not in parts:
        meant = [known for known, part in parts.items() if name in part.other_names]
        raise ValueError(f'"{name}" is no part of a block; ' + (f'"{meant[0]}" is' if meant else _known(parts)))
    if match is None:
        raise ValueError(f'layers are written "{name}:8", the first eight, "{name}:-8", the last, or "{name}:4-11"')
    words, every = match["layers"], range(num_layers)
    if words is None:
        return name, frozenset(every)
    first, is_range, last = words[1:].partition("-")
    first = words[0] + first
    if is_range:
        chosen = range(int(first), int(last) + 1)
        if not chosen or chosen[-1] >= num_layers:
            raise ValueError(f"layers {words} are not in 0-{num_layers - 1}")
        return name, frozenset(chosen)
    number = int(first)
    if not 0 < abs(number) <= num_layers:
        raise ValueError(f"the model has {num_layers} layers, not {abs(number)}")
    return name, frozenset(every[:number] if number > 0 else every[number:])


def _known(parts: Iterable[str]) -> str:
    return "parts are " + ", ".join(parts)


def entries_of(layers: Mapping[str, Iterable[int]], num_layers: int) -> tuple[str, ...]:
    """The shortest entries of these layers by name."""
    entries: list[str] = []
    for name, chosen in layers.items():
        ordered = sorted(own := set(chosen))
        if ordered and len(ordered) == num_layers:
            entries.append(name)
            continue
        starts = [layer for layer in ordered if layer - 1 not in own]
        ends = [layer for layer in ordered if layer + 1 not in own]
        entries += [f"{name}:{first}-{last}" for first, last in zip(starts, ends, strict=True)]
    return tuple(entries)
