"""Dates that differ on the two sides of a difference, for templates that write one."""

from __future__ import annotations

from typing import NamedTuple

from tito_audit.evidence.model import TextSide
from tito_audit.render.dates import dates_in, formats_of
from tito_audit.render.renderer import Renderer

_AROUND = 16
"""Characters on either side of a date that both texts have to share."""


def date_formats(renderer: Renderer) -> tuple[str, ...]:
    """The formats in which its templates ask for the date."""
    return tuple(form for template in renderer.templates.values() for form in formats_of(template.source))


def other_date(one: TextSide, other: TextSide, formats: tuple[str, ...]) -> tuple[str, str] | None:
    """The two dates that the sides of a difference lie in, with the same text around them; None without them."""
    was, now = _date_at(one, formats), _date_at(other, formats)
    if was is None or now is None or was.text == now.text or was.around != now.around:
        return None
    return was.text, now.text


class _Date(NamedTuple):
    """A date in a text."""

    text: str
    around: tuple[str, str]
    """What stands next to it."""


def _date_at(side: TextSide, formats: tuple[str, ...]) -> _Date | None:
    """The date that a difference lies in; None where it lies in none."""
    before, own, after = (data.decode("utf-8", "replace") for data in (side.before, side.data, side.after))
    text, start, end = before + own + after, len(before), len(before) + len(own)
    for first, last in dates_in(text, formats):
        if first <= start and end <= last:
            return _Date(text[first:last], (text[max(first - _AROUND, 0) : first], text[last : last + _AROUND]))
    return None
