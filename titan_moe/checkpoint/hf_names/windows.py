"""Which layers have a sliding window, as config.json of several families says it: a list of types, or a number."""

from collections.abc import Callable, Sequence

from titan_moe.checkpoint.hf_names.family import Part, Settings, Values
from titan_moe.config.attention import AttentionConfig
from titan_moe.config.model import ModelConfig

WINDOWED, FULL = "sliding_attention", "full_attention"


def read_types(types: Sequence[str], window: int | None) -> Values:
    """Windows in the layers of the type `sliding_attention`."""
    if others := set(types) - {WINDOWED, FULL}:
        raise ValueError(f"layer_types in config.json: {', '.join(sorted(others))} are not built here")
    if WINDOWED in types and not window:
        raise ValueError(f"sliding_window = {window!r} in config.json, but layers are of type {WINDOWED}")
    a = AttentionConfig(sliding_window=window or 0).with_windows([kind == WINDOWED for kind in types])
    return {f"attention.{key}": getattr(a, key) for key in ("sliding_window", "full_attention_every", "window_layers")}


def types_of(model: ModelConfig) -> list[str]:
    """The type of each layer."""
    return [(FULL, WINDOWED)[model.attention.has_window(layer)] for layer in range(model.num_layers)]


def by_types(without_list: Callable[[Settings, int], list[str]], is_optional: bool = False) -> Part:
    """A list `layer_types`; `without_list` gives it where a config.json has none, for a number of layers. With
    `is_optional`, `use_sliding_window` says whether there are windows at all."""

    def read(settings: Settings) -> Values:
        window = settings["sliding_window"]
        if is_optional and not settings["use_sliding_window"]:
            return {"attention.sliding_window": 0}
        num_layers = settings["num_hidden_layers"]
        types = settings["layer_types"] or without_list(settings, num_layers)
        if len(types) != num_layers:
            raise ValueError(
                f"layer_types in config.json has {len(types)} entries, and num_hidden_layers = {num_layers}"
            )
        return read_types(types, window)

    def write(model: ModelConfig) -> Values:
        window = model.attention.sliding_window
        if is_optional and not window:
            return {"use_sliding_window": False}
        used: Values = {"use_sliding_window": True} if is_optional else {}
        return used | {"sliding_window": window or None, "layer_types": types_of(model)}

    return Part(read, write)


def _every_second(settings: Settings, num_layers: int) -> list[str]:
    return [(WINDOWED, FULL)[i % 2] for i in range(num_layers)]


def _before_layer(settings: Settings, num_layers: int) -> list[str]:
    last = settings["max_window_layers"]
    return [(WINDOWED, FULL)[i % 2 or i >= last] for i in range(num_layers)]


def _from_layer(settings: Settings, num_layers: int) -> list[str]:
    window, first = settings["sliding_window"], settings["max_window_layers"]
    return [(FULL, WINDOWED)[bool(window) and i >= first] for i in range(num_layers)]


EVERY_SECOND = by_types(_every_second)
"""gpt-oss: full attention in every second layer where no list says otherwise."""
BEFORE_LAYER = by_types(_before_layer, is_optional=True)
"""Qwen2-MoE: windows in every second layer before the `max_window_layers`-th."""
FROM_LAYER = by_types(_from_layer)
"""dots1: windows from the `max_window_layers`-th layer on."""
FROM_LAYER_IF_USED = by_types(_from_layer, is_optional=True)
"""Qwen3 without experts: the same, where `use_sliding_window` is true."""
