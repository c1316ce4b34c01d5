"""Lists in JSON text and the lists that replace them, compared in parts so that long ones take little memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias, overload

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


class EntryKeys(Sequence[str]):
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

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[str]: ...
    def __getitem__(self, number: int | slice) -> str | Sequence[str]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(self._size))]
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
    first = _first(was, others)
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


def _first(was: EntryKeys, wanted: set[str]) -> dict[str, int]:
    """For each of these keys that the list has, its first entry."""
    positions: dict[str, int] = {}
    for start in range(0, len(was), AT_ONCE):
        if len(positions) == len(wanted):
            break
        part = was.part(start // AT_ONCE)
        for key in wanted.intersection(part).difference(positions):
            positions[key] = start + part.index(key)
    return positions
