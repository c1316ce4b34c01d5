"""Finds the dates that templates write by `strftime_now` in recorded text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from tito_audit.render.globals import Clock

_OPEN, _CLOSE = "\ue0d0", "\ue0d1"
_ASKED = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_FORMAT = re.compile(r"""strftime_now\(\s*(?:"([^"\\]{1,100})"|'([^'\\]{1,100})')\s*\)""")
_DIRECTIVE = re.compile(r"%([-#]?)(.)", re.DOTALL)
_WHOLE = {"F": "%Y-%m-%d", "D": "%m/%d/%y", "T": "%H:%M:%S", "R": "%H:%M", "h": "%b", "e": "%d"}
"""Directives that abbreviate others, or that `strptime` knows by another name."""
_NUMBER, _NAME = r"[0-9]{1,2}", r"[^\W\d_]{1,20}\.?"
_WRITTEN = {
    **dict.fromkeys("dmHIMSy", _NUMBER),
    **dict.fromkeys("aAbB", _NAME),
    "Y": "[0-9]{4}",
    "j": "[0-9]{1,3}",
    "f": "[0-9]{6}",
    "p": "[AaPp][Mm]",
}
"""What directives write, in the locale that templates run in."""


@dataclass(frozen=True, slots=True)
class ClockProbe(Clock):
    """A clock that shows where a template writes the date: it returns the format between two marks."""

    at: datetime = datetime.min

    def __call__(self, format: str) -> str:
        """The format, marked."""
        return f"{_OPEN}{format}{_CLOSE}"


def reads_clock(source: str) -> bool:
    """Whether a template may ask for the date."""
    return "strftime_now" in source


@lru_cache(maxsize=64)
def formats_of(source: str) -> tuple[str, ...]:
    """The formats in which a template asks for the date, if it names them."""
    return tuple(dict.fromkeys(call[1] or call[2] for call in _FORMAT.finditer(source)))


def date_in(probed: str, recorded: str) -> datetime | None:
    """The date on which a template wrote a recorded text; None if the text has no date in these places.

    `probed` is what the template writes with a `ClockProbe`. The texts may differ after the last date.
    """
    values: dict[str, str] = {}
    at = before = 0
    for mark in _ASKED.finditer(probed):
        literal = probed[before : mark.start()]
        if not recorded.startswith(literal, at):
            return None
        pattern = _pattern(mark[1])
        match = pattern.expression.match(recorded, at + len(literal)) if pattern is not None else None
        if pattern is None or match is None:
            return None
        for directive, text in zip(pattern.directives, match.groups(), strict=True):
            if values.setdefault(directive, text) != text:
                return None
        at, before = match.end(), mark.end()
    return _parsed(values) if values else None


def dates_in(text: str, formats: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Where a text holds dates in these formats, by its characters."""
    for pattern in filter(None, map(_pattern, formats)):
        for match in pattern.expression.finditer(text):
            if _parsed(dict(zip(pattern.directives, match.groups(), strict=True))) is not None:
                yield match.span()


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A date format as a regular expression, with a group for each directive."""

    expression: re.Pattern[str]
    directives: tuple[str, ...]


@lru_cache(maxsize=64)
def _pattern(format: str) -> _Pattern | None:
    """The expression for a format; None if it has directives other than those for date and time."""
    whole = _DIRECTIVE.sub(lambda directive: _WHOLE.get(directive[2], directive[0]), format)
    directives = [directive[2] for directive in _DIRECTIVE.finditer(whole)]
    if not directives or not _WRITTEN.keys() >= set(directives) - {"%"}:
        return None
    literals = _DIRECTIVE.split(whole)[::3]
    written: Callable[[str], str] = lambda directive: "%" if directive == "%" else f"({_WRITTEN[directive]})"  # noqa: E731
    parts = [
        part for pair in zip(map(re.escape, literals), map(written, directives), strict=False) for part in pair
    ]
    text = "".join((*parts, re.escape(literals[-1])))
    return _Pattern(re.compile(text), tuple(directive for directive in directives if directive != "%"))


def _parsed(values: dict[str, str]) -> datetime | None:
    """The moment that values of directives name; None if they name none."""
    if not values:
        return None
    try:
        return datetime.strptime("\n".join(values.values()), "\n".join(f"%{value}" for value in values))
    except ValueError:
        return None
