"""Data inside a page: JSON that no browser reads as markup, compressed if it is long."""

from __future__ import annotations

import base64
import re
import zlib
from typing import Any

from tito_audit.report_objects import as_json

PLAIN = 1 << 16
"""Maximum characters of a block of plain JSON; longer blocks are compressed."""
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_ACTING = re.compile("[<>&\u2028\u2029]")


def block(kind: str, value: Any) -> str:
    """A `<script>` element that holds a value as data and runs nothing; the value may contain model output."""
    text = escaped(as_json(value))
    if len(text) <= PLAIN:
        return f'<script type="application/json" data-kind="{kind}">{text}</script>\n'
    data = base64.b64encode(zlib.compress(text.encode("utf-8"), 6)).decode("ascii")
    return f'<script type="text/plain" data-kind="{kind}" data-packed="deflate">{data}</script>\n'


def escaped(text: str) -> str:
    """The same JSON value, escaped so that nothing can end a `<script>` or begin a comment."""
    return _ACTING.sub(lambda match: _ESCAPES[match[0]], text)
