"""Tables of the report."""

from collections.abc import Iterable
from html import escape


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in HTML."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
