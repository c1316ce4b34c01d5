"""Histories: what earlier calls saw and sampled, looked up by the start of a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tito_audit.align.runs import HASH_BASE
from tito_audit.record.arrays import Ids
from tito_audit.record.prefix import common_prefix, starts_with


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """What one call saw and sampled."""

    turn: int
    """The number of the call."""
    prompt: Ids
    seen: Ids
    """Prompt and completion: what a call that continues it starts with."""


class Histories:
    """The histories of the calls so far, in their order."""

    def __init__(self) -> None:
        self._all: list[History] = []
        self._lengths = array("q")
        self._hashes = array("Q")
        """Hashes of the first histories, computed on demand: calls that all continue the last one need none."""
        self._powers: NDArray[np.uint64] = np.empty(0, np.uint64)

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

    def longest_prefix(self, prompt: Ids) -> History | None:
        """The longest history that a prompt starts with, the latest of several equal ones; None if it starts with
        none.

        All prefixes of the prompt are looked up by hash among all histories at once, then compared.
        """
        if not self._all:
            return None
        for history in self._all[len(self._hashes) :]:
            self._lengths.append(len(history.seen))
            self._hashes.append(int(self._hash_at(history.seen)[-1]))
        lengths, hashes = np.frombuffer(self._lengths, np.int64), np.frombuffer(self._hashes, np.uint64)
        fits = lengths <= len(prompt)
        fits &= self._hash_at(prompt)[np.minimum(lengths, len(prompt))] == hashes
        places = fits.nonzero()[0]
        longest_first = places[np.argsort(lengths[places], kind="stable")][::-1]
        candidates = (self._all[at] for at in longest_first.tolist())
        return next((candidate for candidate in candidates if starts_with(prompt, candidate.seen)), None)

    def longest_prefix_or_closest(self, prompt: Ids) -> History:
        """The longest history that a prompt starts with, else the one that it shares the most with.

        Tokens that two branches share after their fork (the next message's header) are not history.
        """
        return self.longest_prefix(prompt) or self.closest(prompt)

    def closest(self, prompt: Ids) -> History:
        """The history that a prompt shares the most with, the latest of several equal ones."""
        best, _ = closest(prompt, reversed(self._all))
        assert best is not None, "no call came before"
        return best

    def _hash_at(self, ids: Ids) -> NDArray[np.uint64]:
        """`[N+1]` uint64: the hash of each prefix."""
        if len(self._powers) < len(ids):
            self._powers = np.cumprod(np.full(2 * len(ids), HASH_BASE), dtype=np.uint64)
        hash_at = np.zeros(len(ids) + 1, np.uint64)
        np.cumsum(ids.astype(np.uint64) * self._powers[: len(ids)], out=hash_at[1:])
        return hash_at


def closest(
    prompt: Ids, histories: Iterable[History], *, longest_first: bool = False
) -> tuple[History | None, int]:
    """The first of the histories that a prompt shares the most with, and how many tokens they share.

    `longest_first` promises that order of the histories, in which most of them can be skipped.
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
