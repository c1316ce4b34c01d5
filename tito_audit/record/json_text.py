"""Applies edits to JSON text; every byte outside the edited values is kept."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias, overload

import numpy as np
import orjson

from tito_audit.record.edits import ABSENT, Edit, Path, edits_between, with_edits

# Lists in JSON text and the lists that replace them, compared in parts so that long ones take little memory.

Span: TypeAlias = tuple[int, int]
"""Where a value starts and ends in a text."""
Run: TypeAlias = tuple[int, int | None, int]
"""The first of some entries of a new list, the first of those that they equal in the old one, and how many there
are; None: no entry of the old list equals it, and it is only one."""

AT_ONCE = 1 << 13
"""How many entries of a long list are held as objects at a time."""


class FlatSpans(Sequence[Span]):
    """The spans of the entries of a list of numbers, in 16 bytes each."""

    __slots__ = ("_ends",)

    def __init__(self, spans: Iterable[Span]) -> None:
        self._ends = array("q", chain.from_iterable(spans))

    def __len__(self) -> int:
        return len(self._ends) // 2

    @overload
    def __getitem__(self, number: int) -> Span: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Span]: ...
    def __getitem__(self, number: int | slice) -> Span | Sequence[Span]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        at = 2 * (number if number >= 0 else number + len(self))
        if at < 0:
            raise IndexError(number)
        return self._ends[at], self._ends[at + 1]


class EntryKeys:
    """One spelling of each entry of a list, to compare entries by, made for a part of the list at a time."""

    __slots__ = ("_at", "_held", "_make", "_size")

    def __init__(self, size: int, make: Callable[[int, int], Sequence[str]]) -> None:
        """`make` gives the spellings from one number to another."""
        self._size = size
        self._make = make
        self._at = -1
        self._held: Sequence[str] = ()

    def __len__(self) -> int:
        return self._size

    def part(self, number: int) -> Sequence[str]:
        """The part of the list with this number."""
        if number != self._at:
            start = number * AT_ONCE
            self._held, self._at = self._make(start, min(start + AT_ONCE, self._size)), number
        return self._held

    def __getitem__(self, number: int) -> str:
        return self.part(number // AT_ONCE)[number % AT_ONCE]


def runs(was: EntryKeys, now: EntryKeys) -> Iterator[Run]:
    """For each new entry the old one whose spelling it takes: an equal one at the same place, from either end,
    else the first equal one. Entries that follow one another in both lists may come as one run.
    """
    head = _head(was, now)
    # How many entries are equal from the end, at most so many.
    most = min(len(was), len(now)) - head
    tail = next((at for at in range(most) if was[len(was) - 1 - at] != now[len(now) - 1 - at]), most)
    if head:
        yield 0, 0, head
    middle = range(head, len(now) - tail)
    others = {key for _, key, same in _compared(was, now, middle) if not same}
    # For each of these keys that the list has, its first entry.
    first: dict[str, int] = {}
    for start in range(0, len(was), AT_ONCE):
        if len(first) == len(others):
            break
        part = was.part(start // AT_ONCE)
        for key in others.intersection(part).difference(first):
            first[key] = start + part.index(key)
    for index, key, same in _compared(was, now, middle):
        yield index, index if same else first.get(key), 1
    if tail:
        yield len(now) - tail, len(was) - tail, tail


def _head(was: EntryKeys, now: EntryKeys) -> int:
    """How many entries are equal from the start."""
    most = min(len(was), len(now))
    for number in range(0, most, AT_ONCE):
        old, new = was.part(number // AT_ONCE), now.part(number // AT_ONCE)
        if old != new:
            differ = (at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
            return number + next(differ, min(len(old), len(new)))
    return most


def _compared(was: EntryKeys, now: EntryKeys, numbers: range) -> Iterator[tuple[int, str, bool]]:
    """The new entries with these numbers, and whether the old one of that number is equal."""
    for start in range(numbers.start // AT_ONCE * AT_ONCE, numbers.stop, AT_ONCE):
        new = now.part(start // AT_ONCE)
        old = was.part(start // AT_ONCE) if start < len(was) else ()
        for at in range(max(numbers.start - start, 0), min(numbers.stop - start, len(new))):
            yield start + at, new[at], at < len(old) and old[at] == new[at]


_SPACE = re.compile(r"[ \t\n\r]*+")
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(r'[^ \t\n\r,:"\[\]{}]++')
_TO_BRACKET = re.compile(r'[^"\[\]{}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"\[\]{}]*+)*+', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_EXACT = 2**53
"""Whole numbers below this are exact as floats."""

Change = tuple[int, int, str]
"""Text that replaces what is between two positions."""


def rewrite_json(text: str, edits: Sequence[Edit]) -> str:
    """The text with edits applied to the value it holds; `text` itself when there are none.

    `text` must be JSON that Python or orjson can read. White space, key order, escapes, the spelling of numbers
    and repeated keys (of which the last counts, as for parsers) are kept; new values are written in the style of
    those they replace. ValueError when a path leads nowhere.
    """
    tree: _New | _Tree = {}
    for edit in edits:
        tree = _planted(tree, edit.path, edit.value)
    changes: list[Change] = []
    if tree != {}:
        _change(text, _space(text, 0), tree, _Style(ascii=text.isascii()), changes)
    return _spliced(text, (0, len(text)), changes)


def rewritten_string(text: str, old: Any, new: Any) -> str:
    """JSON text of `old` rewritten to hold `new`; for columns that keep JSON in a string."""
    return rewrite_json(text, list(edits_between(old, new)))


# What to change


@dataclass(frozen=True, slots=True)
class _New:
    """A value that replaces another."""

    value: Any


_Tree = dict[str | int, Any]
"""Edits by the first step of their path, down to a _New."""


def _planted(node: _New | _Tree, path: Path, value: Any) -> _New | _Tree:
    """The tree with one more edit; later edits apply to what earlier ones left."""
    if not path:
        return _New(value)
    if isinstance(node, _New):
        return _New(with_edits(node.value, [Edit(path, value)]))
    node[path[0]] = _planted(node.get(path[0], {}), path[1:], value)
    return node


def _change(text: str, start: int, node: _New | _Tree, outer: _Style, changes: list[Change]) -> None:
    """Collect the changes to the value at `start`, whose container has the style `outer`."""
    if isinstance(node, _New):
        end = _after(text, start)
        changes.append((start, end, _respelled(text, (start, end), node.value, outer)))
    elif text[start] == "{":
        _change_object(text, start, node, outer, changes)
    elif text[start] == "[":
        spans, _ = _spans(text, start)
        style = _style_of(text, start, spans, outer)
        for index, child in node.items():
            if not isinstance(index, int) or not 0 <= index < len(spans):
                raise ValueError(f"the list has {len(spans)} entries, and none is number {index!r}")
            _change(text, spans[index][0], child, style, changes)
    else:
        raise ValueError(f"a single value has no part {next(iter(node))!r}")


def _change_object(text: str, start: int, node: _Tree, outer: _Style, changes: list[Change]) -> None:
    spans, end = _spans(text, start)
    style = _style_of(text, start, spans, outer)
    members = [_member(text, span) for span in spans]
    last = dict(members)
    gone, added = set(), []
    for key, child in node.items():
        absent = isinstance(child, _New) and child.value is ABSENT
        if key in last and not absent:
            _change(text, last[str(key)], child, style, changes)
        elif absent:
            gone.add(key)
        elif isinstance(child, _New):
            name = _written(str(key), style)
            added.append(f"{name}{style.colon}{_written(child.value, style)}")
        else:
            raise ValueError(f"the object has no key {key!r}")
    left = [span for span, (key, _) in zip(spans, members, strict=True) if key not in gone]
    if left:
        # Changes that remove members from an object, each with one comma.
        left_spans = set(left)
        cuts: list[Change] = []
        for index, span in enumerate(spans):
            if span not in left_spans:
                # Before the first member that stays, remove the comma after; later, the comma before.
                leading = span < left[0]
                cuts.append((span[0], spans[index + 1][0], "") if leading else (spans[index - 1][1], span[1], ""))
        changes += cuts
        if added:
            gap = _gap(text, spans, style)
            changes.append((left[-1][1], left[-1][1], "".join(gap + new for new in added)))
    elif added or spans:
        # An empty object takes the layout of its container.
        outside = style.margin, outer.margin
        if spans:
            outside = text[start + 1 : spans[0][0]], text[spans[-1][1] : end - 1]
        inside = _gap(text, spans, style).join(added).join(outside) if added else ""
        changes.append((start + 1, end - 1, inside))


def _spliced(text: str, span: Span, changes: Sequence[Change]) -> str:
    parts, position = [], span[0]
    for start, end, new in sorted(changes, key=lambda change: change[:2]):
        parts += [text[position:start], new]
        position = end
    return "".join([*parts, text[position : span[1]]]) if parts else text[slice(*span)]


# How values are spelled


@dataclass(frozen=True, slots=True)
class _Style:
    """How the entries of a container are written."""

    comma: str = ", "
    """What separates entries on one line."""
    colon: str = ": "
    margin: str = ""
    """The line break and indentation before each entry; empty on one line."""
    step: str = ""
    """The indentation of one level."""
    ascii: bool = True


def _style_of(text: str, start: int, spans: Sequence[Span], outer: _Style) -> _Style:
    """The style of the container at `start`; where it shows none, that of its own container."""
    colon = outer.colon
    if not spans:
        margin = outer.margin and outer.margin + outer.step
        return replace(outer, margin=margin)
    comma = outer.comma
    if text[start] == "{":
        key_end = _after(text, spans[0][0])
        colon = text[key_end : _member(text, spans[0])[1]]
        colon = ": " if "\n" in colon else colon
        comma = ", " if colon.endswith(" ") else ","
    gap = text[spans[0][1] : spans[1][0]] if len(spans) > 1 else "\n"
    if "\n" not in gap:
        comma = ", " if gap.endswith(" ") else ","
    opening = text[start + 1 : spans[0][0]]
    if "\n" not in opening:
        return _Style(comma, colon, "", outer.step, outer.ascii)
    closing_at = spans[-1][1]
    closing = text[closing_at : _space(text, closing_at)]
    step = opening.removeprefix(closing) if "\n" in closing and opening.startswith(closing) else outer.step
    return _Style(comma, colon, opening, step, outer.ascii)


def _gap(text: str, spans: Sequence[Span], style: _Style) -> str:
    """The text between two entries of a container."""
    if len(spans) > 1:
        return text[spans[0][1] : spans[1][0]]
    return f",{style.margin}" if style.margin else style.comma


def _written(value: Any, style: _Style) -> str:
    """A new value, as an entry of a container of this style."""
    if style.margin:
        # Line breaks in strings are escaped, so every line break here belongs to the layout.
        text = json.dumps(
            value, ensure_ascii=style.ascii, indent=style.step, separators=(",", style.colon), default=_plain
        ).replace("\n", style.margin)
    else:
        text = json.dumps(value, ensure_ascii=style.ascii, separators=(style.comma, style.colon), default=_plain)
    # Half of a surrogate pair cannot be written as UTF-8, so it is escaped in any style.
    return text if style.ascii else _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _respelled(text: str, span: Span, new: Any, outer: _Style) -> str:
    """A value that replaces another; parts equal in both keep their spelling."""
    start, end = span
    if isinstance(new, np.ndarray):
        new = new.tolist()
    if isinstance(new, list | tuple) and text[start] == "[":
        return _relisted(text, span, new, outer)
    if isinstance(new, Mapping) and text[start] == "{":
        changes: list[Change] = []
        tree: _New | _Tree = {}
        for edit in edits_between(_parsed(text[start:end]), new):
            tree = _planted(tree, edit.path, edit.value)
        _change(text, start, tree, outer, changes)
        return _spliced(text, span, changes)
    if text[start] not in "[{" and _keys([_parsed(text[start:end])]) == _keys([new]):
        return text[start:end]
    return _written(new, outer)


def _relisted(text: str, span: Span, new: Sequence[Any], outer: _Style) -> str:
    """A list that replaces another; entries of both are copied with the text between them."""
    start, end = span
    spans, _ = _spans(text, start)
    if not spans:
        return _written(new, outer)
    if not new:
        return "[]"
    style = _style_of(text, start, spans, outer)
    out = _Pieces(text[start : spans[0][0]])
    usual = _gap(text, spans, style)
    for index, origin, count in _joined(runs(*_all_keys(text, span, spans, new))):
        if index:
            out.add(usual)
        if origin is not None:
            out.add(text[spans[origin][0] : spans[origin + count - 1][1]])
        elif index < len(spans) and text[spans[index][0]] in "[{":
            out.add(_respelled(text, spans[index], new[index], style))
        else:
            out.add(_written(new[index], style))
    out.add(text[spans[-1][1] : end])
    return out.whole()


class _Pieces:
    """Text put together from very many pieces."""

    def __init__(self, text: str) -> None:
        self._parts, self._pieces = list[str](), [text]

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        if len(self._pieces) > AT_ONCE:
            self._parts.append("".join(self._pieces))
            self._pieces.clear()

    def whole(self) -> str:
        return "".join([*self._parts, *self._pieces])


def _joined(runs: Iterable[Run]) -> Iterator[Run]:
    """The same runs, those joined that follow one another in both lists: the text between them is copied too."""
    index, origin, count = 0, None, 0
    for at, source, more in runs:
        if origin is not None and source == origin + count:
            count += more
            continue
        if count:
            yield index, origin, count
        index, origin, count = at, source, more
    if count:
        yield index, origin, count


def _all_keys(text: str, span: Span, spans: Sequence[Span], new: Sequence[Any]) -> tuple[EntryKeys, EntryKeys]:
    """What the entries of a list in the text and of the one that replaces it are compared by."""
    size = len(spans)
    whole: Sequence[Any] = () if isinstance(spans, FlatSpans) and size > AT_ONCE else _parsed(text[slice(*span)])

    def old(first: int, last: int) -> Sequence[Any]:
        if whole:
            return whole[first:last]
        part: Sequence[Any] = _parsed(f"[{text[spans[first][0] : spans[last - 1][1]]}]")
        return part

    kinds = {type(value) for first in range(0, size, AT_ONCE) for value in old(first, min(first + AT_ONCE, size))}
    mixed = int in kinds and float in kinds
    return (
        EntryKeys(size, lambda first, last: _keys(old(first, last), mixed)),
        EntryKeys(len(new), lambda first, last: _keys(new[first:last], mixed)),
    )


def _keys(values: Sequence[Any], mixed: bool = False) -> list[str]:
    """Each value in one spelling, for comparison.

    In a list that mixes whole numbers and floats, as some writers omit `.0`, 0 and 0.0 are equal.
    """
    if mixed:
        values = [float(v) if type(v) is int and -_EXACT < v < _EXACT else v for v in values]
    if values and all(value is None or isinstance(value, int | float) for value in values):
        return json.dumps(values, separators=(",", ":"))[1:-1].split(",")
    return [json.dumps(value, default=_plain) for value in values]


def _plain(value: Any) -> Any:
    """The plain value of numpy objects and other mappings, for json.dumps."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def _parsed(text: str) -> Any:
    """The value of a text, parsed as rows are: by orjson, or by Python if that fails."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text, strict=False)


# Where values are


def _space(text: str, position: int) -> int:
    """The position of the next character that is not white space."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _after(text: str, start: int) -> int:
    """The position after the value at `start`."""
    if text[start] not in "[{":
        match = (_STRING if text[start] == '"' else _SCALAR).match(text, start)
        if match is None:
            raise ValueError(f"no JSON value at character {start:,}")
        return match.end()
    depth, position = 0, start
    while True:
        match = _TO_BRACKET.match(text, position)
        position = match.end() if match else position
        if position >= len(text):
            raise ValueError(f"the JSON value at character {start:,} does not end")
        depth += 1 if text[position] in "[{" else -1
        position += 1
        if not depth:
            return position


def _spans(text: str, start: int) -> tuple[Sequence[Span], int]:
    """The range of each entry or member of the container at `start`, and where the container ends."""
    if text[start] == "[":
        end = _after(text, start)
        if all(text.find(sign, start + 1, end) < 0 for sign in '"[{'):
            return FlatSpans(match.span() for match in _SCALAR.finditer(text, start + 1, end - 1)), end
    spans: list[Span] = []
    close = "}" if text[start] == "{" else "]"
    position = _space(text, start + 1)
    while text[position] != close:
        end = _after(text, position)
        if close == "}":
            end = _after(text, _space(text, _space(text, end) + 1))
        spans.append((position, end))
        position = _space(text, end)
        if text[position] == ",":
            position = _space(text, position + 1)
    return spans, position + 1


def _member(text: str, span: Span) -> tuple[str, int]:
    """The key of a member and the position of its value."""
    end = _after(text, span[0])
    quoted = text[span[0] : end]
    key = json.loads(quoted, strict=False) if "\\" in quoted else quoted[1:-1]
    return key, _space(text, _space(text, end) + 1)
