"""What chat templates expect besides Jinja itself, for every engine.

These are `raise_exception`, `strftime_now`, `tojson` without HTML escapes, and `{% generation %}`. Nothing here
imports an engine, so each can be used without the other.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tito_audit.render.limits import LimitReached, length

GENERATION = ("\U000f0000", "\U000f0001")
"""Private-use characters around what `{% generation %}` writes."""
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_encode = json.JSONEncoder(ensure_ascii=False).encode


class TemplateRefused(Exception):
    """A template called `raise_exception`."""


def raise_exception(message: object) -> None:
    """Raise TemplateRefused with the template's message."""
    raise TemplateRefused(str(message))


def strftime_now(format: str) -> str:
    """The current time in this format."""
    _check_format(format)
    return datetime.now().strftime(format)


@dataclass(frozen=True, slots=True)
class Clock:
    """A `strftime_now` fixed at one moment, for logs written at another time."""

    at: datetime

    def __call__(self, format: str) -> str:
        """The fixed moment in this format."""
        _check_format(format)
        return self.at.strftime(format)


def _check_format(format: str) -> None:
    if length(format) > 1000:  # `strftime` takes hundreds of bytes for each character
        raise LimitReached(f"the template asks for a date in a format of {length(format):,} characters")


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as chat templates write it: no HTML escapes, keys in their original order."""
    if max(indent if isinstance(indent, int) else 0, *map(length, (indent, *(separators or ())))) > 100:
        raise LimitReached("the template indents JSON by more than 100 characters")
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        return _encode(value)  # `json.dumps` would make an encoder each time
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def has_generation(source: str) -> bool:
    """Whether a template marks with `{% generation %}` what the assistant writes."""
    return _GENERATION.search(source) is not None


def without_generation(source: str) -> str:
    """The template with `{% generation %}` replaced by `{% with %}`, which every engine has."""
    return _GENERATION.sub(lambda tag: f"{{%{tag[1]} {tag[2] or ''}with {tag[3]}%}}", source)
