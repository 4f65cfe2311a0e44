"""An HTML page without external resources."""

from collections.abc import Iterable
from html import escape

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.5em;margin-bottom:.2em} h2{font-size:1.1em;margin:2em 0 .5em} p{max-width:75ch} .note{color:#666}
.bar{display:flex;height:34px;border-radius:4px;overflow:hidden} .bar span{display:block;height:100%}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2em 1.2em}
i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
table{border-collapse:collapse;width:100%} th,td{padding:.25em .6em;text-align:right;border-bottom:1px solid #e4e4e4}
td{white-space:nowrap}
th:first-child,td:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere} th{font-weight:600;color:#555}
.facts{display:flex;flex-wrap:wrap;gap:.6em 2em;padding:0;list-style:none} .facts b{display:block;font-size:1.35em}
svg{width:100%;font:11px system-ui} svg path{fill:#4e79a7;fill-opacity:.55} svg line{stroke:#ddd} svg text{fill:#555}
"""


def page(title: str, sections: Iterable[str], style: str = "") -> str:
    """A page of sections in HTML, with what a page adds to the style of all."""
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}{style}</style></head><body>{''.join(sections)}</body></html>\n"
    )
