"""Applies edits to JSON text and keeps every byte outside the edited values."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from itertools import chain
from typing import Any, TypeAlias, overload

import numpy as np
import orjson

from tito_audit.record.edits import ABSENT, Edit, Path, apply_edits, edits_between

# A list in JSON text and the list that replaces it are compared in parts, so that long ones take little memory.

Span: TypeAlias = tuple[int, int]
"""`[start, end)` of a value in a text."""
Run: TypeAlias = tuple[int, int | None, int]
"""(start in the new list, start of the equal entries in the old list, count); None and a count of 1 for an entry
that the old list does not have."""

PART_SIZE = 1 << 13
"""Entries of a long list that are objects at one time."""


class PackedSpans(Sequence[Span]):
    """Spans in 16 bytes each, for long lists of numbers."""

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


class EntrySpellings:
    """The entries of a list, each in the one spelling by which it is compared; one part is in memory at a time."""

    __slots__ = ("_part", "_part_number", "_size", "_spell")

    def __init__(self, size: int, spell: Callable[[int, int], Sequence[str]]) -> None:
        """`spell(start, end)` spells a range of entries."""
        self._size = size
        self._spell = spell
        self._part_number = -1
        self._part: Sequence[str] = ()

    def __len__(self) -> int:
        return self._size

    def part(self, number: int) -> Sequence[str]:
        """The spellings of the entries from `number * PART_SIZE` on, up to PART_SIZE."""
        if number != self._part_number:
            start = number * PART_SIZE
            self._part, self._part_number = self._spell(start, min(start + PART_SIZE, self._size)), number
        return self._part

    def __getitem__(self, number: int) -> str:
        return self.part(number // PART_SIZE)[number % PART_SIZE]


def match_entries(was: EntrySpellings, now: EntrySpellings) -> Iterator[Run]:
    """For each new entry an equal old one: at the same place from either end, else the first in the list."""
    head = shortest = min(len(was), len(now))
    for number in range(0, shortest, PART_SIZE):
        old, new = was.part(number // PART_SIZE), now.part(number // PART_SIZE)
        if old != new:
            differ = (at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
            head = number + next(differ, min(len(old), len(new)))
            break
    most = shortest - head
    tail = next((at for at in range(most) if was[len(was) - 1 - at] != now[len(now) - 1 - at]), most)
    if head:
        yield 0, 0, head
    middle = range(head, len(now) - tail)
    others = {key for _, key, same in _compare_in_place(was, now, middle) if not same}
    first: dict[str, int] = {}  # the first old entry with each of these spellings
    for start in range(0, len(was), PART_SIZE):
        if len(first) == len(others):
            break
        part = was.part(start // PART_SIZE)
        for key in others.intersection(part).difference(first):
            first[key] = start + part.index(key)
    for index, key, same in _compare_in_place(was, now, middle):
        yield index, index if same else first.get(key), 1
    if tail:
        yield len(now) - tail, len(was) - tail, tail


def _compare_in_place(was: EntrySpellings, now: EntrySpellings, numbers: range) -> Iterator[tuple[int, str, bool]]:
    """The new entries with these numbers: number, spelling, and whether the old entry there is equal."""
    for start in range(numbers.start // PART_SIZE * PART_SIZE, numbers.stop, PART_SIZE):
        new = now.part(start // PART_SIZE)
        old = was.part(start // PART_SIZE) if start < len(was) else ()
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
    return _edit_value(text, (0, len(text)), edits, _Style(ascii=text.isascii()))


def rewrite_json_string(text: str, old: Any, new: Any) -> str:
    """The JSON text of `old`, rewritten to hold `new`: for columns that keep JSON in a string."""
    return rewrite_json(text, list(edits_between(old, new)))


# What to change


@dataclass(frozen=True, slots=True)
class _Replacement:
    """A leaf of an edit tree: the new value."""

    value: Any


_EditTree = dict[str | int, Any]
"""Edits by the keys and positions of their paths, down to a _Replacement."""


def _edit_value(text: str, span: Span, edits: Iterable[Edit], outer: _Style) -> str:
    """The text of a value with edits applied; `outer` is the style of the container it is in."""
    tree: _Replacement | _EditTree = {}
    for edit in edits:
        tree = _add_edit(tree, edit.path, edit.value)
    changes: list[Change] = []
    if tree != {}:
        _collect_changes(text, _skip_space(text, span[0]), tree, outer, changes)
    parts, position = [], span[0]
    for start, end, new in sorted(changes, key=lambda change: change[:2]):
        parts += [text[position:start], new]
        position = end
    return "".join([*parts, text[position : span[1]]]) if parts else text[slice(*span)]


def _add_edit(node: _Replacement | _EditTree, path: Path, value: Any) -> _Replacement | _EditTree:
    """The tree with one more edit, applied after those that it has."""
    if not path:
        return _Replacement(value)
    if isinstance(node, _Replacement):
        return _Replacement(apply_edits(node.value, [Edit(path, value)]))
    node[path[0]] = _add_edit(node.get(path[0], {}), path[1:], value)
    return node


def _collect_changes(
    text: str, start: int, node: _Replacement | _EditTree, outer: _Style, changes: list[Change]
) -> None:
    """Append the changes to the value at `start`; `outer` is the style of the container it is in."""
    if isinstance(node, _Replacement):
        end = _value_end(text, start)
        changes.append((start, end, _rewrite_value(text, (start, end), node.value, outer)))
    elif text[start] == "{":
        _collect_object_changes(text, start, node, outer, changes)
    elif text[start] == "[":
        spans, _ = _entry_spans(text, start)
        style = _style_of(text, start, spans, outer)
        for index, child in node.items():
            if not isinstance(index, int) or not 0 <= index < len(spans):
                raise ValueError(f"the list has {len(spans)} entries, and none is number {index!r}")
            _collect_changes(text, spans[index][0], child, style, changes)
    else:
        raise ValueError(f"a single value has no part {next(iter(node))!r}")


def _collect_object_changes(text: str, start: int, node: _EditTree, outer: _Style, changes: list[Change]) -> None:
    """Append the changes to the object at `start`: members changed, removed and added after the last one."""
    spans, end = _entry_spans(text, start)
    style = _style_of(text, start, spans, outer)
    members = [_parse_member(text, span) for span in spans]
    last = dict(members)
    gone, added = set(), []
    for key, child in node.items():
        absent = isinstance(child, _Replacement) and child.value is ABSENT
        if key in last and not absent:
            _collect_changes(text, last[str(key)], child, style, changes)
        elif absent:
            gone.add(key)
        elif isinstance(child, _Replacement):
            name = _dump(str(key), style)
            added.append(f"{name}{style.colon}{_dump(child.value, style)}")
        else:
            raise ValueError(f"the object has no key {key!r}")
    left = [span for span, (key, _) in zip(spans, members, strict=True) if key not in gone]
    if left:
        left_spans = set(left)
        for index, span in enumerate(spans):
            # A removed member takes one comma along: before the first member that stays, the one after it.
            if span < left[0]:
                changes.append((span[0], spans[index + 1][0], ""))
            elif span not in left_spans:
                changes.append((spans[index - 1][1], span[1], ""))
        if added:
            gap = _separator(text, spans, style)
            changes.append((left[-1][1], left[-1][1], "".join(gap + new for new in added)))
    elif added or spans:
        # An empty object takes the layout of its container.
        outside = style.margin, outer.margin
        if spans:
            outside = text[start + 1 : spans[0][0]], text[spans[-1][1] : end - 1]
        inside = _separator(text, spans, style).join(added).join(outside) if added else ""
        changes.append((start + 1, end - 1, inside))


# How values are spelled


@dataclass(frozen=True, slots=True)
class _Style:
    """The layout of a container."""

    comma: str = ", "
    """Between entries on one line."""
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
        key_end = _value_end(text, spans[0][0])
        colon = text[key_end : _parse_member(text, spans[0])[1]]
        colon = ": " if "\n" in colon else colon
        comma = ", " if colon.endswith(" ") else ","
    gap = text[spans[0][1] : spans[1][0]] if len(spans) > 1 else "\n"
    if "\n" not in gap:
        comma = ", " if gap.endswith(" ") else ","
    opening = text[start + 1 : spans[0][0]]
    if "\n" not in opening:
        return _Style(comma, colon, "", outer.step, outer.ascii)
    closing_at = spans[-1][1]
    closing = text[closing_at : _skip_space(text, closing_at)]
    step = opening.removeprefix(closing) if "\n" in closing and opening.startswith(closing) else outer.step
    return _Style(comma, colon, opening, step, outer.ascii)


def _separator(text: str, spans: Sequence[Span], style: _Style) -> str:
    """The text between two entries of a container of this style."""
    if len(spans) > 1:
        return text[spans[0][1] : spans[1][0]]
    return f",{style.margin}" if style.margin else style.comma


def _dump(value: Any, style: _Style) -> str:
    """JSON text of a new value in a container of this style."""
    if style.margin:
        # Line breaks in strings are escaped, so every line break here belongs to the layout.
        text = json.dumps(
            value, ensure_ascii=style.ascii, indent=style.step, separators=(",", style.colon), default=_to_jsonable
        ).replace("\n", style.margin)
    else:
        text = json.dumps(
            value, ensure_ascii=style.ascii, separators=(style.comma, style.colon), default=_to_jsonable
        )
    # UTF-8 has no lone surrogates, so they are escaped in any style.
    return text if style.ascii else _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _rewrite_value(text: str, span: Span, new: Any, outer: _Style) -> str:
    """The text of a value replaced by `new`; parts equal in both keep their spelling."""
    start, end = span
    if isinstance(new, np.ndarray):
        new = new.tolist()
    if isinstance(new, list | tuple) and text[start] == "[":
        return _rewrite_list(text, span, new, outer)
    if isinstance(new, Mapping) and text[start] == "{":
        return _edit_value(text, span, edits_between(_parse(text[start:end]), new), outer)
    if text[start] not in "[{" and _spell([_parse(text[start:end])]) == _spell([new]):
        return text[start:end]
    return _dump(new, outer)


def _rewrite_list(text: str, span: Span, new: Sequence[Any], outer: _Style) -> str:
    """The text of a list replaced by `new`; runs of equal entries are copied with the text between them."""
    start, end = span
    spans, _ = _entry_spans(text, start)
    if not spans:
        return _dump(new, outer)
    if not new:
        return "[]"
    style = _style_of(text, start, spans, outer)
    separator = _separator(text, spans, style)
    out = StringIO()
    out.write(text[start : spans[0][0]])
    for index, origin, count in _merge_runs(match_entries(*_entry_spellings(text, span, spans, new))):
        if index:
            out.write(separator)
        if origin is not None:
            out.write(text[spans[origin][0] : spans[origin + count - 1][1]])
        elif index < len(spans) and text[spans[index][0]] in "[{":
            out.write(_rewrite_value(text, spans[index], new[index], style))
        else:
            out.write(_dump(new[index], style))
    out.write(text[spans[-1][1] : end])
    return out.getvalue()


def _merge_runs(runs: Iterable[Run]) -> Iterator[Run]:
    """The runs, with those made one that follow one another in both lists."""
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


def _entry_spellings(
    text: str, span: Span, spans: Sequence[Span], new: Sequence[Any]
) -> tuple[EntrySpellings, EntrySpellings]:
    """The spellings of a list in the text and of the list that replaces it."""
    size = len(spans)
    is_long = isinstance(spans, PackedSpans) and size > PART_SIZE
    whole: Sequence[Any] = () if is_long else _parse(text[slice(*span)])

    def old(first: int, last: int) -> Sequence[Any]:
        if whole:
            return whole[first:last]
        part: Sequence[Any] = _parse(f"[{text[spans[first][0] : spans[last - 1][1]]}]")
        return part

    kinds = {
        type(value) for first in range(0, size, PART_SIZE) for value in old(first, min(first + PART_SIZE, size))
    }
    mixed = int in kinds and float in kinds
    return (
        EntrySpellings(size, lambda first, last: _spell(old(first, last), mixed)),
        EntrySpellings(len(new), lambda first, last: _spell(new[first:last], mixed)),
    )


def _spell(values: Sequence[Any], mixed: bool = False) -> list[str]:
    """Each value in one spelling; with `mixed`, 0 and 0.0 have the same, as some writers omit `.0`."""
    if mixed:
        values = [float(v) if type(v) is int and -_EXACT < v < _EXACT else v for v in values]
    if values and all(value is None or isinstance(value, int | float) for value in values):
        return json.dumps(values, separators=(",", ":"))[1:-1].split(",")
    return [json.dumps(value, default=_to_jsonable) for value in values]


def _to_jsonable(value: Any) -> Any:
    """The plain value of a numpy object or mapping, for json.dumps."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def _parse(text: str) -> Any:
    """The value of JSON text, read as rows are: by orjson, else by Python."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text, strict=False)


# Where values are


def _skip_space(text: str, position: int) -> int:
    """The position of the next character that is not white space."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _value_end(text: str, start: int) -> int:
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


def _entry_spans(text: str, start: int) -> tuple[Sequence[Span], int]:
    """The span of each entry or member of the container at `start`, and the position after the container."""
    if text[start] == "[":
        end = _value_end(text, start)
        if all(text.find(sign, start + 1, end) < 0 for sign in '"[{'):
            return PackedSpans(match.span() for match in _SCALAR.finditer(text, start + 1, end - 1)), end
    spans: list[Span] = []
    close = "}" if text[start] == "{" else "]"
    position = _skip_space(text, start + 1)
    while text[position] != close:
        end = _value_end(text, position)
        if close == "}":
            end = _value_end(text, _skip_space(text, _skip_space(text, end) + 1))
        spans.append((position, end))
        position = _skip_space(text, end)
        if text[position] == ",":
            position = _skip_space(text, position + 1)
    return spans, position + 1


def _parse_member(text: str, span: Span) -> tuple[str, int]:
    """The key of a member and the position of its value."""
    end = _value_end(text, span[0])
    quoted = text[span[0] : end]
    key = json.loads(quoted, strict=False) if "\\" in quoted else quoted[1:-1]
    return key, _skip_space(text, _skip_space(text, end) + 1)
