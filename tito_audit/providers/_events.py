"""Parses server-sent events from bytes that are split anywhere."""

from __future__ import annotations

from collections.abc import Iterator

_EVENT_BYTES = 1 << 24


class Events:
    """The `data` of each event, in order."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The events that are complete with this piece; ValueError for one of more than 16 MiB."""
        searched = len(self._rest)
        self._rest += piece
        begin = 0
        while (end := self._rest.find(b"\n", max(begin, searched))) >= 0:
            line = bytes(self._rest[begin:end]).rstrip(b"\r")
            begin = end + 1
            if line:
                # One line of an event; comments and fields other than `data` are ignored.
                name, _, value = line.partition(b":")
                if name == b"data":
                    self._data.append(value.removeprefix(b" "))
                    self._size += len(value)
                    self._bounded(self._size)
            elif self._data:
                yield b"\n".join(self._data)
                self._data, self._size = [], 0
        del self._rest[:begin]
        self._bounded(len(self._rest))

    def _bounded(self, size: int) -> None:
        """ValueError if an event is too long."""
        if size > _EVENT_BYTES:
            raise ValueError(f"an event is longer than {_EVENT_BYTES >> 20} MiB")
