"""Data inside a page: JSON that no browser takes for markup, compressed where it is long."""

from __future__ import annotations

import base64
import re
import zlib
from typing import Any

from tito_audit.report_objects import as_json

PLAIN = 1 << 16
"""Characters of JSON that still stand in the page as they are; longer blocks are compressed."""
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_ACTING = re.compile("[<>&\u2028\u2029]")


def block(kind: str, value: Any) -> str:
    """A `<script>` that holds a value as data and runs nothing; `kind` is ours, the value may be a model's."""
    text = escaped(as_json(value))
    if len(text) <= PLAIN:
        return f'<script type="application/json" data-kind="{kind}">{text}</script>\n'
    data = base64.b64encode(zlib.compress(text.encode("utf-8"), 6)).decode("ascii")
    return f'<script type="text/plain" data-kind="{kind}" data-packed="deflate">{data}</script>\n'


def escaped(text: str) -> str:
    """JSON in which nothing can end a `<script>` or begin a comment; its value stays the same."""
    return _ACTING.sub(lambda match: _ESCAPES[match[0]], text)
