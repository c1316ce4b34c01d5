"""Values read from recorded text: what stands there where a template writes the date, a system prompt or tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Protocol

from tito_audit.record.memo import memoized
from tito_audit.record.message import ToolSpec
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer
from tito_audit.tokens.vocab import Vocabulary

MARK = "qzvargumentzvq"
"""A placeholder for a value to be read; no template treats it specially."""


def between(text: str, mark: str, recorded: str, longest: int) -> Iterator[str]:
    """The possible values in a recorded text where the rendered one has a mark, the likeliest first."""
    pieces = text.split(mark)
    if len(pieces) < 2:
        return
    first, last = pieces[0], pieces[-1]
    if len(pieces) == 2 and recorded.startswith(first) and recorded.endswith(last):
        value = recorded[len(first) : len(recorded) - len(last)]
        if len(first) + len(last) <= len(recorded) and len(value) <= longest:
            yield value
    yielded = set()
    following = pieces[1]
    around = [(first[-size:], following[:size]) for size in (400, 64, 24)]
    line_end = following[: following.find("\n") + 1] or following[:24]
    around += [(first[first.rfind("\n") + 1 :], line_end), (first[-24:], following[:1])]
    for before, after in around:
        at = recorded.find(before) if before or after else -1
        end = recorded.find(after, at + len(before)) if after else len(recorded)
        value = recorded[at + len(before) : end]
        if at >= 0 and end >= 0 and len(value) <= longest and value not in yielded:
            yielded.add(value)
            yield value


def at_mark(marked: str, recorded: str, following: Callable[[str], str]) -> str | None:
    """The text at the only mark; None unless all before it is as rendered, and `following` of the rest follows."""
    before, _, after = marked.partition(MARK)
    if marked.count(MARK) != 1 or not recorded.startswith(before):
        return None
    end = recorded.find(following(after), len(before))
    return recorded[len(before) : end] if end > len(before) else None


def plain_value(text: str) -> Sequence[object]:
    """The value that a template writes as this text: a number if it is one, else a string."""
    try:
        number = json.loads(text)
    except ValueError:
        return (text,)
    return (number, text) if isinstance(number, int | float) and str(number) == text else (text,)


_MARKER = re.compile(r"<[|｜][^<>|｜\s]{1,40}[|｜]>|<start_of_turn>|\[INST\]|<\|?turn\|?>")


def holds_marker(text: str) -> bool:
    """Whether a text holds a marker that published templates use to open or close messages."""
    return _MARKER.search(text) is not None


_TURN_ENDS = frozenset(
    (
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>"),
        *("<eos>", "</s>", "<｜end▁of▁sentence｜>", "<|end|>", "<|return|>", "<|call|>", "<turn|>"),
    )
)
"""Control tokens that end a turn in published chat templates; those in the vocabulary count."""


@memoized
def named_ends(vocabulary: Vocabulary) -> frozenset[int]:
    """The control tokens of a vocabulary that end a turn in published templates."""
    return frozenset(i for i in vocabulary.special_ids if vocabulary.piece(i) in _TURN_ENDS)


# Dates that templates write by `strftime_now`


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
_SAMPLE = datetime(1987, 11, 28, 17, 43, 21)
"""A date whose text is about as long as any."""


@dataclass(frozen=True, slots=True)
class Probe(Clock):
    """A clock that shows where a template writes the date: it returns the format between two marks."""

    at: datetime = datetime.min

    def __call__(self, format: str) -> str:
        """The format, marked."""
        return f"{_OPEN}{format}{_CLOSE}"


PROBE = Probe()


@lru_cache(maxsize=64)
def formats_of(source: str) -> tuple[str, ...]:
    """The formats in which a template asks for the date, if it names them."""
    return tuple(dict.fromkeys(call[1] or call[2] for call in _FORMAT.finditer(source)))


def date_in(probed: str, recorded: str) -> datetime | None:
    """The date on which a template wrote a recorded text; None if the text has no date in these places.

    `probed` is what the template writes with a `Probe`. The texts may differ after the last date.
    """
    values: dict[str, str] = {}
    at = before = 0
    for mark in _ASKED.finditer(probed):
        literal = probed[before : mark.start()]
        if not recorded.startswith(literal, at):
            return None
        expression, directives = _pattern(mark[1])
        match = expression.match(recorded, at + len(literal)) if expression is not None else None
        if match is None:
            return None
        for directive, text in zip(directives, match.groups(), strict=True):
            if values.setdefault(directive, text) != text:
                return None
        at, before = match.end(), mark.end()
    return _parsed(values) if values else None


def date_near(probed: str, recorded: str) -> datetime | None:
    """The same where other text differs too: each part of the date is read between what stands around it."""
    values: dict[str, str] = {}
    marks = {mark[1]: mark[0] for mark in _ASKED.finditer(probed)}
    for form in sorted(marks, key=lambda form: (-form.count("%"), form)):
        (expression, directives), longest = _pattern(form), 2 * len(_SAMPLE.strftime(form)) + 20
        text = next(between(probed, marks[form], recorded, longest), None)
        match = expression.fullmatch(text) if expression is not None and text is not None else None
        if match is not None and not values.keys() & set(directives):
            values |= zip(directives, match.groups(), strict=True)
    moment, weekday = _parsed(values), values.get("A", values.get("a"))
    if moment is None or weekday is None:
        return moment
    for year in (moment.year, *range(2015, 2040)):
        try:
            moved = moment.replace(year=year)
        except ValueError:  # the 29th of February
            continue
        if weekday in (moved.strftime("%A"), moved.strftime("%a")):
            return moved
    return None


def dates_in(text: str, formats: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Where a text holds dates in these formats, by its characters."""
    for expression, directives in map(_pattern, formats):
        for match in expression.finditer(text) if expression is not None else ():
            if _parsed(dict(zip(directives, match.groups(), strict=True))) is not None:
                yield match.span()


@lru_cache(maxsize=64)
def _pattern(format: str) -> tuple[re.Pattern[str] | None, tuple[str, ...]]:
    """A date format as a regular expression with a group for each directive, and these; None if it has directives
    other than those for date and time."""
    whole = _DIRECTIVE.sub(lambda directive: _WHOLE.get(directive[2], directive[0]), format)
    directives = [directive[2] for directive in _DIRECTIVE.finditer(whole)]
    if not directives or not _WRITTEN.keys() >= set(directives) - {"%"}:
        return None, ()
    first, *literals = _DIRECTIVE.split(whole)[::3]
    text = re.escape(first)
    for directive, literal in zip(directives, literals, strict=True):
        text += ("%" if directive == "%" else f"({_WRITTEN[directive]})") + re.escape(literal)
    return re.compile(text), tuple(directive for directive in directives if directive != "%")


def _parsed(values: dict[str, str]) -> datetime | None:
    """The moment that values of directives name; None if they name none."""
    if not values:
        return None
    try:
        return datetime.strptime("\n".join(values.values()), "\n".join(f"%{value}" for value in values))
    except ValueError:
        return None


def has_clock(renderer: Renderer) -> bool:
    """Whether its templates may write the date."""
    return any("strftime_now" in template.source for template in renderer.templates.values())


def date_formats(renderer: Renderer) -> tuple[str, ...]:
    """The formats in which its templates ask for the date."""
    return tuple(form for template in renderer.templates.values() for form in formats_of(template.source))


_AROUND = 16
"""Characters on either side of a date that both texts have to share."""


class TextInContext(Protocol):
    """One side of a difference, with the text around it."""

    @property
    def before(self) -> bytes:
        """What precedes it."""

    @property
    def data(self) -> bytes:
        """The difference itself."""

    @property
    def after(self) -> bytes:
        """What follows it."""


def other_date(recorded: TextInContext, other: TextInContext, formats: tuple[str, ...]) -> tuple[str, str] | None:
    """The two dates that the sides of a difference lie in, with the same text around them; None without them."""
    was, now = _date_at(recorded, formats), _date_at(other, formats)
    return None if was is None or now is None or was[0] == now[0] or was[1:] != now[1:] else (was[0], now[0])


def _date_at(side: TextInContext, formats: tuple[str, ...]) -> tuple[str, str, str] | None:
    """The date that a difference lies in, and what stands next to it; None where it lies in none."""
    before, own, after = (data.decode("utf-8", "replace") for data in (side.before, side.data, side.after))
    text, start, end = before + own + after, len(before), len(before) + len(own)
    for first, last in dates_in(text, formats):
        if first <= start and end <= last:
            return text[first:last], text[max(first - _AROUND, 0) : first], text[last : last + _AROUND]
    return None


# Tools that prompts hold


_DECODER = json.JSONDecoder()


def tools_in(text: str) -> list[ToolSpec]:
    """Every tool definition that a text holds as JSON, in order."""
    tools: list[ToolSpec] = []
    at = text.find("{")
    while at >= 0 and len(tools) < 256:
        end = at + 1
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            value = None
        inner = inner_tool(value) if isinstance(value, dict) else {}
        named = isinstance(inner.get("name"), str) and "arguments" not in inner
        if named and ("parameters" in inner or "description" in inner or inner is not value):
            tools.append(value)
        else:
            end = at + 1
        at = text.find("{", end)
    return tools


def inner_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The definition itself, without what wraps it."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool
