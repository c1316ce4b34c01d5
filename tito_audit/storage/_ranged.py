"""RangedFile: the bytes of a remote file, fetched range by range; nothing is fetched twice without need."""

from __future__ import annotations

import io
import os
from bisect import bisect_right
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
_HEAD = 1 << 18
_TAIL = 8 << 20
"""How much of a file's beginning and end is kept, once it was fetched."""
_KEPT = 64 << 20
"""How much of all beginnings and ends is kept."""

Read = Callable[[int, int], bytes]
"""Bytes from one place on, at most up to another; fewer if the connection was dropped."""


class RangedFile(io.RawIOBase):
    """The bytes of a remote file, from any place in it.

    A first read at a place fetches exactly what it asks for. Reading on from there fetches ever larger blocks, at
    several places at once. `read` returns as much as it was asked for, `readinto` what is there without waiting.
    """

    def __init__(self, name: str, status: RemoteStatus, read: Read) -> None:
        super().__init__()
        self._name = name
        self._size = status.st_size
        self._read = read
        self._ends = _ends_of((name, status))
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
        if (data := self._ends.get(self._at, wanted, self._size)) or not self._runs:
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
        if run is not None:
            block = max(block if exact else 0, min(2 * run.step, most))
        if (expected := self._expectation(at)) is not None:
            limit = expected[1] if not exact or at + wanted <= expected[1] else limit
            if expected[1] - expected[0] <= most:
                block = max(block, expected[1] - at)
        data = self._fetch(at, min(at + block, limit))
        self._ends.keep(at, data, self._size)
        end = at + len(data)
        self._runs[end] = _Run(at, data if len(data) > wanted else b"", len(data))
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
            parts.append(data)
            start += len(data)
            # Many drops are survived as long as each leaves something behind.
            tried = 0 if len(data) >= min(_LEAST, step) else tried + 1
            if tried == TRIES:
                raise StorageError(f"{self._name}: {lost}")
            if not data:
                wait(tried, lost)
                step = max(step // 4, _LEAST)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class _Run:
    """The last block of bytes that are read one after the other."""

    __slots__ = ("data", "start", "step")

    def __init__(self, start: int, data: bytes, step: int) -> None:
        self.start = start
        self.data = data
        """Empty if all of it was used at once."""
        self.step = step
        """How many bytes were fetched."""


class _Ends:
    """The beginning and the end of a file: every open looks at them."""

    def __init__(self) -> None:
        self.head = self.tail = b""

    def get(self, at: int, wanted: int, size: int) -> bytes:
        """What is kept from a place on."""
        if at < len(self.head):
            return self.head[at : at + wanted]
        start = size - len(self.tail)
        return self.tail[at - start : at - start + wanted] if self.tail and at >= start else b""

    def keep(self, at: int, data: bytes, size: int) -> None:
        """Keep what belongs to the beginning or the end."""
        if at == len(self.head) < _HEAD:
            self.head += data[: _HEAD - at]
        elif at + len(data) == size and len(self.tail) < len(data) <= _TAIL:
            self.tail = data
        elif at + len(data) == size - len(self.tail) and len(self.tail) + len(data) <= _TAIL:
            self.tail = data + self.tail


_kept: OrderedDict[tuple[Any, ...], _Ends] = OrderedDict()


def _ends_of(which: tuple[Any, ...]) -> _Ends:
    found = _kept.pop(which, None) or _Ends()
    _kept[which] = found
    held = sum(len(one.head) + len(one.tail) for one in _kept.values()) if len(_kept) > 16 else 0
    while held > _KEPT and len(_kept) > 1:
        _, old = _kept.popitem(last=False)
        held -= len(old.head) + len(old.tail)
    return found
