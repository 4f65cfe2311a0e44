"""Answer "what does this key mean": `titan-moe check --explain model.moe.top_k`."""

import inspect
import textwrap

from titan_moe.config.parse import RecipeError, unknown_key
from titan_moe.config.recipe import Recipe
from titan_moe.config.schema import Key, all_keys, docstring_of, in_toml, keys_of, type_in_words

PAGE_WIDTH = 100


def explain(dotted_key: str) -> str:
    """Describe a field (type, default, purpose) or a section (its purpose and its fields).

    Raises: RecipeError, with the nearest known key, if there is no such key.
    """
    key = all_keys(Recipe).get(dotted_key)
    if key is None:
        raise RecipeError([unknown_key(dotted_key)])
    return _explain_section(key) if key.is_section else _explain_field(key)


def _explain_field(key: Key) -> str:
    return f"{key.dotted}: {type_in_words(key)}, {in_toml(key.default)} by default\n{_purpose(key)}"


def _explain_section(key: Key) -> str:
    purpose = textwrap.dedent(inspect.getdoc(key.type) or "")
    lines = [f"[{key.dotted}]", textwrap.indent(purpose, "    "), ""]
    for inner in keys_of(key.type, f"{key.dotted}."):
        title = f"[{inner.dotted}]" if inner.is_section else f"{inner.name} = {in_toml(inner.default)}"
        lines.append(f"{title}\n{_purpose(inner)}")
    return "\n".join(lines)


def _purpose(key: Key) -> str:
    """The docstring of a field, and a line for each value whose table explains it."""
    explained = {in_toml(value): purpose for value, purpose in key.choices.items() if purpose}
    width = max(map(len, explained), default=0) + 1
    values = [_wrapped(f"{value:<{width}}{purpose}", hanging=width) for value, purpose in explained.items()]
    return "\n".join([_wrapped(" ".join(docstring_of(key).split())), *values])


def _wrapped(text: str, hanging: int = 0) -> str:
    indent = " " * 4
    return textwrap.fill(
        text, PAGE_WIDTH, initial_indent=indent, subsequent_indent=indent + " " * hanging, break_long_words=False
    )
