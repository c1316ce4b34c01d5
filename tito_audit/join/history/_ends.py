"""Which token ids end a turn, learned from completions that end themselves."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tito_audit.record.arrays import Ids, Offsets

_MOST = 8
_WATCHED = 16
_OFTEN = 0.05
"""The least share of an end token among the last ids."""
_INSIDE = 0.02
"""Up to this share of uses inside completions, an id may still be an end token."""


class TurnEnds:
    """Ids that end a turn: last ids of ended completions that do not occur earlier in completions."""

    def __init__(self) -> None:
        self.ids: tuple[int, ...] = ()
        """The most frequent ones."""
        self._ended = 0
        self._last: Counter[int] = Counter()
        self._inside: Counter[int] = Counter()

    def learn(self, completion: Ids, *, ended: bool) -> None:
        """Count the last id of a completion, and the known ends within it."""
        changed = False
        self._ended += ended
        for id_ in self._last:
            if (inside := int(np.count_nonzero(completion[:-1] == id_))) != 0:
                self._inside[id_] += inside
                changed = True
        if ended and len(completion):
            last = int(completion[-1])
            if last not in self._last and len(self._last) == _WATCHED:
                rarest = min(self._last, key=self._last.__getitem__)
                if self._last[rarest] == 1:
                    del self._last[rarest], self._inside[rarest]
            if last in self._last or len(self._last) < _WATCHED:
                self._last[last] += 1
                changed |= last not in self.ids
        if changed or self._ended & (self._ended - 1) == 0:
            self._choose()

    def _choose(self) -> None:
        surest = sorted(self._last.items(), key=lambda each: (-each[1], each[0]))
        often = _OFTEN * self._ended
        self.ids = tuple(
            id_
            for id_, count in surest
            if count >= often and self._inside[id_] <= _INSIDE * (count + self._inside[id_])
        )[:_MOST]

    def after(self, ids: Ids) -> Offsets:
        """The positions after each turn end in a sequence, ascending; `[E]` int64."""
        if not self.ids or not len(ids):
            return np.empty(0, np.int64)
        if len(self.ids) == 1:
            return np.flatnonzero(ids == self.ids[0]) + 1
        at = ids == self.ids[0]
        for id_ in self.ids[1:]:
            at |= ids == id_
        return np.flatnonzero(at) + 1

    def without(self, ids: Ids) -> Ids:
        """A sequence without trailing turn ends."""
        end = len(ids)
        while end and int(ids[end - 1]) in self.ids:
            end -= 1
        return ids[:end]
