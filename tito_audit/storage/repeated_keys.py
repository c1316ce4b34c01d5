"""Whether an object of a JSON text names a key twice: parsers keep the last value and say nothing."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

_NAMED = b'":'
"""The end of a key. Inside a string the quote is escaped, so the pair is there however the string is spelled."""
_APART = re.compile(rb'"[ \t\n\r]+:')
_ESCAPES = b"\\u00"
_OTHER_SPELLING = re.compile(rb"\\u00(?:22|3[aA])")
"""A quote or a colon by its number."""


def may_repeat_keys(text: bytes, value: Any) -> bool:
    """Whether a key may be there twice in the text of a value; False is certain.

    `text` is JSON and `value` what orjson makes of it. Written again, the value has as many ends of keys as the
    text, unless one was dropped.
    """
    return (
        text.count(_NAMED) != orjson.dumps(value).count(_NAMED)
        or _APART.search(text) is not None
        or (_ESCAPES in text and _OTHER_SPELLING.search(text) is not None)
    )


def repeated_key(text: bytes, value: Any) -> str | None:
    """A key that is there twice in one object of the text, the innermost first; None if there is none."""
    try:
        if not may_repeat_keys(text, value):
            return None
    except TypeError:
        pass  # orjson did not read it
    try:
        json.loads(text, object_pairs_hook=_once)
    except _Repeated as error:
        return error.key
    return None


class _Repeated(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _once(pairs: list[tuple[str, Any]]) -> None:
    """Raises _Repeated for an object with a key that is there twice."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _Repeated(key)
        seen.add(key)
