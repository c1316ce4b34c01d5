"""RangedFile: the bytes of a remote file, fetched range by range; nothing is fetched twice without need."""

from __future__ import annotations

import io
import os
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from tito_audit.errors import StorageError
from tito_audit.storage._store import TRIES, Passing, RemoteStatus, dropped, wait

FIRST = 1 << 16
"""How many bytes a sequential read fetches first; each further fetch doubles."""
_MOST = 8 << 20
"""How many bytes one request asks for at most."""
_LEAST = 1 << 16
"""How few bytes a request asks for after connections were dropped."""
_RUNS = 256
"""How many places of a file are read on from at the same time."""
_HELD = 64 << 20
"""How many bytes read ahead of them are held, all together."""
_OF_ONE = 16 << 20
"""How much of a file is kept for as long as it is read: what was fetched first."""
_OF_ALL = 64 << 20
"""How much of all files is kept."""

Read = Callable[[int, int], bytes]
"""Bytes from one place on, at most up to another; fewer if the connection was dropped."""


class RangedFile(io.RawIOBase):
    """The bytes of a remote file, from any place in it.

    A first read at a place fetches exactly what it asks for. Reading on from there fetches ever larger blocks, at
    several places at once. `read` returns as much as it was asked for, `readinto` what is there without waiting.
    """

    name: str
    """The file's URL, as it is shown."""

    def __init__(self, name: str, status: RemoteStatus, read: Read) -> None:
        super().__init__()
        self.name = name
        self._size = status.st_size
        self._read = read
        self._kept = _kept_of((name, status))
        self._at = 0
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        """By the end of what was fetched."""
        self._expected: list[tuple[int, int]] = []

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The place of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place; nothing is fetched."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def size(self) -> int:
        """Bytes of the file, as pyarrow asks for it."""
        return self._size

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Ranges `[start, stop)`, each of which will be read from its start to its end; replaces earlier ones.

        No read within one fetches bytes past its end, and one that is small is fetched at once.
        """
        self._expected = sorted(ranges)

    def readinto(self, buffer: Any) -> int:
        """Fetch the next bytes; 0 at the end."""
        view = memoryview(buffer).cast("B")
        data = self._next(len(view), exact=False)
        view[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        """So many bytes; fewer only at the end. -1: all that are left."""
        stop = self._size if size is None or size < 0 else min(self._at + size, self._size)
        parts = []
        while self._at < stop:
            parts.append(self._next(stop - self._at, exact=True))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readall(self) -> bytes:
        """All that is left."""
        return self.read()

    def _next(self, wanted: int, *, exact: bool) -> bytes:
        """At least one byte and at most `wanted` from here on; b"" at the end of the file."""
        wanted = min(wanted, self._size - self._at)
        if wanted <= 0:
            return b""
        data = self._held(wanted) or self._fetched(wanted, exact)
        self._at += len(data)
        return data

    def _held(self, wanted: int) -> bytes:
        """What was fetched already from here on."""
        if (data := self._kept.get(self._at, wanted)) or not self._runs:
            return data
        for run in reversed(self._runs.values()):
            if run.start <= self._at < run.start + len(run.data):
                return run.data[self._at - run.start : self._at - run.start + wanted]
        return b""

    def _fetched(self, wanted: int, exact: bool) -> bytes:
        """Fetch a block that begins here; what is more than wanted is held."""
        at, limit = self._at, self._size
        run = self._runs.pop(at, None)
        most = min(_MOST, max(_HELD // max(len(self._runs), 1), FIRST))
        block = min(wanted, _MOST) if exact else FIRST
        expected = self._expectation(at)
        if run is not None and run.expected == expected:
            block = max(block if exact else 0, min(2 * run.step, most))
        if expected is not None:
            limit = expected[1] if not exact or at + wanted <= expected[1] else limit
            if expected[1] - expected[0] <= most:
                block = max(block, expected[1] - at)
        data = self._fetch(at, min(at + block, limit))
        self._kept.keep(at, data)
        end = at + len(data)
        self._runs[end] = _Run(at, data if len(data) > wanted else b"", len(data), expected)
        if run is None and len(self._runs) > _RUNS:
            self._runs.popitem(last=False)
        return data[:wanted]

    def _expectation(self, at: int) -> tuple[int, int] | None:
        number = bisect_right(self._expected, (at, self._size + 1)) - 1
        found = self._expected[number] if number >= 0 else None
        return found if found is not None and at < found[1] else None

    def _fetch(self, start: int, stop: int) -> bytes:
        """Exactly this range, resumed where a connection was dropped."""
        parts: list[bytes] = []
        step, tried, lost = stop - start, 0, dropped()
        while start < stop:
            try:
                data = self._read(start, min(start + step, stop))
            except Passing as failure:
                data, lost = b"", failure
            if len(data) > min(step, stop - start):
                raise StorageError(f"{self.name}: the store sends more than it was asked for. Download the file.")
            parts.append(data)
            start += len(data)
            # Many drops are survived as long as each leaves something behind.
            tried = 0 if len(data) >= min(_LEAST, step) else tried + 1
            if tried == TRIES:
                raise StorageError(f"{self.name}: {lost}")
            if not data:
                wait(tried, lost)
                step = max(step // 4, _LEAST)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class _Run:
    """The last block of bytes that are read one after the other."""

    __slots__ = ("data", "expected", "start", "step")

    def __init__(self, start: int, data: bytes, step: int, expected: tuple[int, int] | None) -> None:
        self.start = start
        self.data = data
        """Empty if all of it was used at once."""
        self.step = step
        """How many bytes were fetched."""
        self.expected = expected
        """The expected range that they were in; past its end reading starts anew."""


class _Kept:
    """What was fetched of a file first: its beginning and end, which every open reads again, and first rows."""

    def __init__(self) -> None:
        self.size = 0
        self._blocks: list[tuple[int, bytes]] = []

    def get(self, at: int, wanted: int) -> bytes:
        """What is kept from a place on."""
        number = bisect_right(self._blocks, at, key=lambda block: block[0]) - 1
        if number < 0:
            return b""
        start, data = self._blocks[number]
        return data[at - start : at - start + wanted]

    def keep(self, at: int, data: bytes) -> None:
        """Keep a block, if there is room."""
        if self.size + len(data) <= _OF_ONE:
            insort(self._blocks, (at, data))
            self.size += len(data)


_kept: OrderedDict[tuple[str, RemoteStatus], _Kept] = OrderedDict()


def _kept_of(which: tuple[str, RemoteStatus]) -> _Kept:
    """What is kept of a file; of files that were not opened for long, nothing."""
    if which[1].etag is None:  # it may be another file by now
        return _Kept()
    found = _kept.pop(which, None) or _Kept()
    _kept[which] = found
    held = sum(one.size for one in _kept.values())
    while held > _OF_ALL and len(_kept) > 1:
        held -= _kept.popitem(last=False)[1].size
    return found
