"""What `help(ModelConfig)` prints: the purpose of a section, and its fields with their docstrings."""

import inspect
import textwrap

from titan_moe.config.schema import docstring_of, keys_of, walk

LINE_WIDTH = 100


class SectionDoc:
    """The `__doc__` of a section, made when it is read: docstrings of fields are only in the source."""

    def __init__(self, purpose: str) -> None:
        self.purpose = purpose

    def __get__(self, instance: object, owner: type) -> str:
        """The purpose, and an entry for each field."""
        entries = []
        for key in keys_of(owner):
            title = f"{key.attribute}: {key.type.__name__}" if key.is_section else f"{key.attribute} = {key.default!r}"
            purpose = inspect.cleandoc(key.type.__doc__ if key.is_section else docstring_of(key)).split("\n\n")[0]
            entries.append(f"{title}\n{textwrap.indent(textwrap.fill(purpose, LINE_WIDTH), '    ')}")
        return "\n\n".join([inspect.cleandoc(self.purpose), "Fields", *entries])


def document_fields(root: type) -> None:
    """Let `help` of a section and of all sections in it list their fields."""
    for section in (root, *(key.type for key in walk(root) if key.is_section)):
        section.__doc__ = SectionDoc(section.__doc__ or "")


def purpose_of(section: type) -> str:
    """The docstring of a section without its fields."""
    doc = vars(section)["__doc__"]
    return inspect.cleandoc(doc.purpose if isinstance(doc, SectionDoc) else doc)
