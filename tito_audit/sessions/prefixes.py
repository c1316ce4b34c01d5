"""Texts and ids recognized by a digest of their beginning."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")
Key: TypeAlias = tuple[int, bytes]
"""The length and the digest of a byte string."""
_SIZE = 16


def text_bytes(text: str) -> bytes:
    """The bytes of a text; lone surrogates too."""
    return text.encode("utf-8", "surrogatepass")


def running(data: bytes = b"") -> blake2b:
    """A digest of these bytes, to be updated with what follows."""
    return blake2b(data, digest_size=_SIZE)


def digest(text: str) -> bytes:
    """The digest of a text."""
    return running(text_bytes(text)).digest()


def key_of(data: bytes) -> Key:
    """The key of a byte string."""
    return len(data), running(data).digest()


class Beginnings:
    """The digests of the beginnings of a text, computed incrementally."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lengths = [0]
        self._states = [running()]

    def digest(self, length: int | None = None) -> bytes:
        """The digest of `text[:length]`; None: of all of it."""
        length = len(self.text) if length is None else min(length, len(self.text))
        place = bisect_right(self._lengths, length)
        at, state = self._lengths[place - 1], self._states[place - 1]
        if at < length:
            state = state.copy()
            state.update(text_bytes(self.text[at:length]))
            self._lengths.insert(place, length)
            self._states.insert(place, state)
        return state.digest()


class Prefixes(Generic[T]):
    """Values by byte string; finds those whose string is a prefix of a given one."""

    def __init__(self) -> None:
        self._held: dict[int, dict[bytes, list[T]]] = {}
        self._lengths: list[int] = []

    def add(self, key: Key, value: T) -> None:
        """Hold a value by the key of its string; with both it can be removed."""
        length, found = key
        if length not in self._held:
            insort(self._lengths, length)
        self._held.setdefault(length, {}).setdefault(found, []).append(value)

    def remove(self, key: Key, value: T) -> None:
        """Remove a value."""
        length, wanted = key
        held = self._held[length]
        held[wanted].remove(value)
        if not held[wanted]:
            del held[wanted]
        if not held:
            del self._held[length]
            self._lengths.remove(length)

    def matches(self, data: bytes) -> Iterator[tuple[int, Sequence[T]]]:
        """The values whose string this one starts with, with its length: the longest first."""
        state, at, found = running(), 0, []
        for length in self._lengths[: bisect_right(self._lengths, len(data))]:
            state.update(data[at:length])
            at = length
            values = self._held[length].get(state.digest())
            if values:
                found.append((length, values))
        yield from reversed(found)
