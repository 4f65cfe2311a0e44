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
    return f"{key.dotted}: {type_in_words(key.type)}, {in_toml(key.default)} by default\n{_wrapped(docstring_of(key))}"


def _explain_section(key: Key) -> str:
    purpose = textwrap.dedent(inspect.getdoc(key.type) or "")
    lines = [f"[{key.dotted}]", textwrap.indent(purpose, "    "), ""]
    for inner in keys_of(key.type, f"{key.dotted}."):
        if inner.is_section:
            lines.append(f"[{inner.dotted}]\n{_wrapped(docstring_of(inner))}")
        else:
            lines.append(f"{inner.name} = {in_toml(inner.default)}\n{_wrapped(docstring_of(inner))}")
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(
        " ".join(text.split()), PAGE_WIDTH, initial_indent="    ", subsequent_indent="    ", break_long_words=False
    )
