"""Shortlist: a bounded selection, the most severe first, shared fairly among codes."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Generic, TypeVar

T = TypeVar("T")


class Shortlist(Generic[T]):
    """Keeps up to `limit` of all values offered.

    A value of higher rank replaces one of the lowest rank. Within a rank the kinds share the room, and the first
    of each kind are kept.
    """

    def __init__(self, limit: int) -> None:
        self.offered = 0
        self._limit = limit
        self._size = 0
        self._ranks: dict[int, dict[str, list[tuple[int, T]]]] = {}

    @property
    def left_out(self) -> int:
        """How many of the offered values are not kept."""
        return self.offered - self._size

    def offer(self, rank: int, kind: str, value: T) -> None:
        """Keep the value if there is room, or if it ranks above one that is kept."""
        self.offered += 1
        if self._size == self._limit and not self._made_room(rank, kind):
            return
        self._ranks.setdefault(rank, {}).setdefault(kind, []).append((self.offered, value))
        self._size += 1

    def __iter__(self) -> Iterator[T]:
        """The highest rank first; within a rank in the order offered."""
        for rank in sorted(self._ranks, reverse=True):
            kinds = self._ranks[rank].values()
            yield from (value for _, value in sorted((one for kind in kinds for one in kind), key=itemgetter(0)))

    def __len__(self) -> int:
        return self._size

    def _made_room(self, rank: int, kind: str) -> bool:
        """Whether a value worth less was dropped."""
        if not self._limit:
            return False
        lowest = min(self._ranks)
        if rank < lowest:
            return False
        kinds = self._ranks[lowest]
        fullest = max(kinds, key=lambda one: len(kinds[one]))
        if rank == lowest and len(kinds.get(kind, ())) + 1 >= len(kinds[fullest]):
            return False
        kinds[fullest].pop()
        if not kinds[fullest]:
            del kinds[fullest]
        if not kinds:
            del self._ranks[lowest]
        self._size -= 1
        return True
