"""Histories: what earlier calls saw and sampled, found by the start of a prompt."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypeAlias, TypeVar

from tito_audit.record.arrays import Ids
from tito_audit.record.prefix import common_prefix, starts_with

T = TypeVar("T")
Key: TypeAlias = tuple[int, bytes]
"""The length and the digest of a byte string: equal where the strings are."""


def new_digest(data: bytes = b"") -> blake2b:
    """A digest of these bytes that can be updated with more."""
    return blake2b(data, digest_size=16)


def key_of_bytes(data: bytes) -> Key:
    """The key of a byte string."""
    return len(data), new_digest(data).digest()


class Prefixes(Generic[T]):
    """Values under byte strings; finds the strings that are prefixes of another, by their digests alone."""

    def __init__(self) -> None:
        self._by_length: dict[int, dict[bytes, list[T]]] = {}
        self._lengths: list[int] = []

    def add(self, key: Key, value: T) -> None:
        """Add a value under the string with this key."""
        length, digest = key
        if length not in self._by_length:
            insort(self._lengths, length)
        self._by_length.setdefault(length, {}).setdefault(digest, []).append(value)

    def remove(self, key: Key, value: T) -> None:
        """Remove a value from the string with this key."""
        length, digest = key
        of_length = self._by_length[length]
        of_length[digest].remove(value)
        if not of_length[digest]:
            del of_length[digest]
        if not of_length:
            del self._by_length[length]
            self._lengths.remove(length)

    def matches(self, data: bytes) -> Iterator[tuple[int, Sequence[T]]]:
        """(length, values) of each string that `data` starts with, the longest first."""
        state, at, matching = new_digest(), 0, []
        for length in self._lengths[: bisect_right(self._lengths, len(data))]:
            state.update(data[at:length])
            at = length
            values = self._by_length[length].get(state.digest())
            if values:
                matching.append((length, values))
        yield from reversed(matching)


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """What one call saw and sampled."""

    turn: int
    """The number of the call."""
    prompt: Ids
    seen: Ids
    """Prompt and completion, with which the prompt of a call that continues it starts."""


class Histories:
    """The histories of the calls so far, in their order."""

    def __init__(self) -> None:
        self._all: list[History] = []
        self._longest: History | None = None
        self._by_start: Prefixes[History] = Prefixes()
        self._indexed_count = 0
        """Histories in `_by_start`; indexed on demand, as calls that all continue the longest need none."""

    def __len__(self) -> int:
        return len(self._all)

    def __reversed__(self) -> Iterator[History]:
        return reversed(self._all)

    @property
    def last(self) -> History:
        """The history of the latest call."""
        return self._all[-1]

    def add(self, history: History) -> None:
        """Add the history of the next call."""
        self._all.append(history)
        if self._longest is None or len(history.seen) >= len(self._longest.seen):
            self._longest = history

    def longest_prefix(self, prompt: Ids) -> History | None:
        """The longest history that a prompt starts with, the latest of equal ones; None if there is none."""
        if self._longest is not None and starts_with(prompt, self._longest.seen):
            return self._longest
        for history in self._all[self._indexed_count :]:
            self._by_start.add(key_of_bytes(history.seen.tobytes()), history)
        self._indexed_count = len(self._all)
        match = next(self._by_start.matches(prompt.tobytes()), None)
        return None if match is None else match[1][-1]

    def longest_prefix_or_closest(self, prompt: Ids) -> History:
        """The longest history that a prompt starts with, else the one it shares the longest start with.

        The first wins although another may share more: branches share the next message's header after their fork.
        """
        return self.longest_prefix(prompt) or self.closest(prompt)

    def closest(self, prompt: Ids) -> History:
        """The history that a prompt shares the longest start with, the latest of equal ones."""
        best, _ = closest(prompt, reversed(self._all))
        assert best is not None, "no call came before"
        return best


def closest(
    prompt: Ids, histories: Iterable[History], *, longest_first: bool = False
) -> tuple[History | None, int]:
    """The first history that a prompt shares the longest start with, and its length in tokens.

    `longest_first` promises that order, in which the search ends early.
    """
    best, most = None, -1
    for history in histories:
        if len(history.seen) > most:
            shared = common_prefix(prompt, history.seen)
            if shared > most:
                best, most = history, shared
        elif longest_first:
            break
    return best, max(most, 0)
