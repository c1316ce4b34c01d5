"""Logged text in Markdown: as code, where GitHub recognizes no link, mention, image, issue number or HTML.

Escaping single characters is not enough: GitHub looks for `@names`, `#1` and addresses in the rendered page, and
leaves only code alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tito_audit.terminal.cut import cut
from tito_audit.terminal.escape import inert, visible

_TICKS = re.compile("`+")
_LINE = 400


def code(text: str, limit: int = 120) -> str:
    """The text as inline code for a line or a table cell, on one line and cut to `limit` characters."""
    shown = cut(visible(text), limit).replace("|", "\\x7c")  # a bar ends a cell even in code
    ticks = "`" * (_longest(shown) + 1)
    blank = " " if not shown or shown[0] in "` " or shown[-1] in "` " else ""
    return f"{ticks}{blank}{shown or '∅'}{blank}{ticks}"


def fenced(lines: Iterable[str]) -> str:
    """The lines as a code block; each is made visible and cut."""
    shown = [cut(inert(visible(line)), _LINE) for line in lines]
    fence = "`" * max(3, max(map(_longest, shown), default=0) + 1)
    return "\n".join([f"{fence}text", *shown, fence])


def folded(title: str, body: str, *, open: bool = False) -> str:
    """A foldable section; `title` is our own text, not a log's."""
    return f"<details{' open' if open else ''}><summary>{title}</summary>\n\n{body}\n\n</details>\n"


def _longest(text: str) -> int:
    return max((len(run) for run in _TICKS.findall(text)), default=0)
