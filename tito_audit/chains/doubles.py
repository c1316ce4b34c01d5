"""Doubles: sequences that train tokens already trained by another sequence, in a few arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from tito_audit.chains.ledger import Numbers

Runs = tuple[tuple[int, int], ...]


class Cause(StrEnum):
    """How tokens come to be trained more than once."""

    HISTORY = "history trained again"
    PREFIX = "shared prefix"
    ROW = "duplicated row"
    CALL = "duplicated call"


_CAUSES = tuple(Cause)


@dataclass(frozen=True, slots=True)
class Double:
    """A sequence that trains tokens already trained by another sequence."""

    sequence: int
    runs: Runs
    first: int
    """The sequence that trains the last of these tokens first."""
    others: int
    """How many other sequences train some of them first."""
    cause: Cause

    @property
    def tokens(self) -> int:
        """How many tokens are trained again."""
        return sum(end - start for start, end in self.runs)


@dataclass(slots=True)
class Doubles:
    """Doubles in a few arrays; iterated in the order of their sequences."""

    tokens: int = 0
    calls: int = 0
    """How many of them are calls, which have no mask."""
    _fixed: array[int] = field(default_factory=lambda: array("q"))
    """For each: sequence, first, others, cause, and where its runs start."""
    _runs: array[int] = field(default_factory=lambda: array("I"))
    _order: Numbers | None = None

    def __len__(self) -> int:
        return len(self._fixed) // 5

    def add(self, double: Double) -> None:
        """Keep one more."""
        cause = _CAUSES.index(double.cause)
        self._fixed.extend((double.sequence, double.first, double.others, cause, len(self._runs)))
        for run in double.runs:
            self._runs.extend(run)
        self.tokens += double.tokens
        self.calls += double.cause is Cause.CALL

    def __iter__(self) -> Iterator[Double]:
        return map(self._at, self._in_order().tolist())

    def of(self, sequence: int) -> Double | None:
        """The double of a sequence; None if it trains nothing again."""
        if self._order is None:
            self._order = self._in_order()
        at = int(np.searchsorted(self._sequences(), sequence, sorter=self._order))
        double = None if at == len(self) else self._at(int(self._order[at]))
        return double if double is not None and double.sequence == sequence else None

    def _at(self, number: int) -> Double:
        sequence, first, others, cause, at = self._fixed[5 * number : 5 * number + 5]
        end = self._fixed[5 * number + 9] if number + 1 < len(self) else len(self._runs)
        bounds = self._runs[at:end]
        runs = tuple(zip(bounds[::2], bounds[1::2], strict=True))
        return Double(sequence, runs, first, others, _CAUSES[cause])

    def _sequences(self) -> Numbers:
        return np.frombuffer(self._fixed, np.int64)[::5]

    def _in_order(self) -> Numbers:
        return np.argsort(self._sequences(), kind="stable")


def merged(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of half-open runs, in order."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(runs):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((start, end))
    return out
