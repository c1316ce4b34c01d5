"""Reads values from recorded text, where a template writes dates, arguments, system prompts or tools."""

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
"""Rendered in place of a value, to find where the template writes it; no template treats it specially."""


def read_between(text: str, mark: str, recorded: str, longest: int) -> Iterator[str]:
    """The texts up to `longest` that a recorded text may have in place of a mark, the likeliest first."""
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


def read_at_mark(marked: str, recorded: str, following: Callable[[str], str]) -> str | None:
    """The recorded text in place of the only MARK of `marked`.

    None unless it follows exactly what is rendered before the mark, and `following(rendered rest)` follows it.
    """
    before, _, after = marked.partition(MARK)
    if marked.count(MARK) != 1 or not recorded.startswith(before):
        return None
    end = recorded.find(following(after), len(before))
    return recorded[len(before) : end] if end > len(before) else None


def parse_plain_value(text: str) -> Sequence[object]:
    """The values that a template may write as this text: a number if it is one, and the string."""
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
def turn_end_ids(vocabulary: Vocabulary) -> frozenset[int]:
    """The control tokens of a vocabulary that end a turn in published templates."""
    return frozenset(i for i in vocabulary.special_ids if vocabulary.piece(i) in _TURN_ENDS)


# Dates that templates write with `strftime_now`

_OPEN, _CLOSE = "\ue0d0", "\ue0d1"
_ASKED = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_FORMAT = re.compile(r"""strftime_now\(\s*(?:"([^"\\]{1,100})"|'([^'\\]{1,100})')\s*\)""")
_DIRECTIVE = re.compile(r"%([-#]?)(.)", re.DOTALL)
_WHOLE = {"F": "%Y-%m-%d", "D": "%m/%d/%y", "T": "%H:%M:%S", "R": "%H:%M", "h": "%b", "e": "%d"}
"""Directives that abbreviate others, or that `strptime` spells otherwise."""
_NUMBER, _NAME = r"[0-9]{1,2}", r"[^\W\d_]{1,20}\.?"
_WRITTEN = {
    **dict.fromkeys("dmHIMSy", _NUMBER),
    **dict.fromkeys("aAbB", _NAME),
    "Y": "[0-9]{4}",
    "j": "[0-9]{1,3}",
    "f": "[0-9]{6}",
    "p": "[AaPp][Mm]",
}
"""What directives write, as regular expressions."""
_SAMPLE = datetime(1987, 11, 28, 17, 43, 21)
"""A date whose text is about as long as any."""


@dataclass(frozen=True, slots=True)
class ProbeClock(Clock):
    """A clock that writes a date format between two marks, to show where a template writes the date."""

    at: datetime = datetime.min

    def __call__(self, format: str) -> str:
        """The format between marks, in place of the date."""
        return f"{_OPEN}{format}{_CLOSE}"


PROBE = ProbeClock()


@lru_cache(maxsize=64)
def strftime_formats(source: str) -> tuple[str, ...]:
    """The formats that a template passes to `strftime_now` as literals."""
    return tuple(dict.fromkeys(call[1] or call[2] for call in _FORMAT.finditer(source)))


def read_date(probed: str, recorded: str) -> datetime | None:
    """The date in a recorded text where `probed`, rendered with PROBE, has marks; None if it has none there.

    Up to the last date, all other text must be equal.
    """
    values: dict[str, str] = {}
    at = before = 0
    for mark in _ASKED.finditer(probed):
        literal = probed[before : mark.start()]
        if not recorded.startswith(literal, at):
            return None
        expression, directives = _compile_date_format(mark[1])
        match = expression.match(recorded, at + len(literal)) if expression is not None else None
        if match is None:
            return None
        for directive, text in zip(directives, match.groups(), strict=True):
            if values.setdefault(directive, text) != text:
                return None
        at, before = match.end(), mark.end()
    return _parse_date(values) if values else None


def read_date_near(probed: str, recorded: str) -> datetime | None:
    """The date in a recorded text that may differ from `probed` elsewhere too; None if it is not found.

    A date without its year is placed by its weekday.
    """
    values: dict[str, str] = {}
    marks = {mark[1]: mark[0] for mark in _ASKED.finditer(probed)}
    for form in sorted(marks, key=lambda form: (-form.count("%"), form)):
        (expression, directives), longest = _compile_date_format(form), 2 * len(_SAMPLE.strftime(form)) + 20
        text = next(read_between(probed, marks[form], recorded, longest), None)
        match = expression.fullmatch(text) if expression is not None and text is not None else None
        if match is not None and not values.keys() & set(directives):
            values |= zip(directives, match.groups(), strict=True)
    moment, weekday = _parse_date(values), values.get("A", values.get("a"))
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


def find_dates(text: str, formats: Sequence[str]) -> Iterator[tuple[int, int]]:
    """`[start, end)` of each date in one of these formats, in characters."""
    for expression, directives in map(_compile_date_format, formats):
        for match in expression.finditer(text) if expression is not None else ():
            if _parse_date(dict(zip(directives, match.groups(), strict=True))) is not None:
                yield match.span()


@lru_cache(maxsize=64)
def _compile_date_format(format: str) -> tuple[re.Pattern[str] | None, tuple[str, ...]]:
    """A regular expression with a group for each directive of a format, and the directives; None if it has others
    than those of date and time."""
    whole = _DIRECTIVE.sub(lambda directive: _WHOLE.get(directive[2], directive[0]), format)
    directives = [directive[2] for directive in _DIRECTIVE.finditer(whole)]
    if not directives or not _WRITTEN.keys() >= set(directives) - {"%"}:
        return None, ()
    first, *literals = _DIRECTIVE.split(whole)[::3]
    text = re.escape(first)
    for directive, literal in zip(directives, literals, strict=True):
        text += ("%" if directive == "%" else f"({_WRITTEN[directive]})") + re.escape(literal)
    return re.compile(text), tuple(directive for directive in directives if directive != "%")


def _parse_date(values: dict[str, str]) -> datetime | None:
    if not values:
        return None
    try:
        return datetime.strptime("\n".join(values.values()), "\n".join(f"%{value}" for value in values))
    except ValueError:
        return None


def has_clock(renderer: Renderer) -> bool:
    """Whether the templates of a renderer may write the date."""
    return any("strftime_now" in template.source for template in renderer.templates.values())


def date_formats(renderer: Renderer) -> tuple[str, ...]:
    """The date formats of the templates of a renderer."""
    return tuple(form for template in renderer.templates.values() for form in strftime_formats(template.source))


_AROUND = 16
"""Characters around a date that both texts must share."""


class TextInContext(Protocol):
    """One side of a difference, with the bytes around it."""

    @property
    def before(self) -> bytes: ...
    @property
    def data(self) -> bytes: ...
    @property
    def after(self) -> bytes: ...


def differing_dates(
    recorded: TextInContext, other: TextInContext, formats: tuple[str, ...]
) -> tuple[str, str] | None:
    """The two dates in which a difference lies, if the text around them is equal; else None."""
    was, now = _date_around(recorded, formats), _date_around(other, formats)
    return None if was is None or now is None or was[0] == now[0] or was[1:] != now[1:] else (was[0], now[0])


def _date_around(side: TextInContext, formats: tuple[str, ...]) -> tuple[str, str, str] | None:
    """The date in which a difference lies, and the text before and after it; None if it lies in none."""
    before, own, after = (data.decode("utf-8", "replace") for data in (side.before, side.data, side.after))
    text, start, end = before + own + after, len(before), len(before) + len(own)
    for first, last in find_dates(text, formats):
        if first <= start and end <= last:
            return text[first:last], text[max(first - _AROUND, 0) : first], text[last : last + _AROUND]
    return None


_DECODER = json.JSONDecoder()


def find_tools(text: str) -> list[ToolSpec]:
    """The tool definitions that a text holds as JSON, in order, up to 256."""
    tools: list[ToolSpec] = []
    at = text.find("{")
    while at >= 0 and len(tools) < 256:
        end = at + 1
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            value = None
        inner = unwrap_tool(value) if isinstance(value, dict) else {}
        named = isinstance(inner.get("name"), str) and "arguments" not in inner
        if named and ("parameters" in inner or "description" in inner or inner is not value):
            tools.append(value)
        else:
            end = at + 1
        at = text.find("{", end)
    return tools


def unwrap_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool definition without its wrapper `{"type": "function", "function": …}`."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool
