"""Calls by a value."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.chains.links import AT_ONCE

Array = NDArray[Any]
Calls = NDArray[np.int64]


class Holders:
    """Calls by their value in a column; calls with 0 are left out."""

    def __init__(self, column: Array) -> None:
        order = np.argsort(column, kind="stable")
        zeros = int(np.searchsorted(column, 0, side="right", sorter=order))
        self._calls = order[zeros:].astype(np.uint32)
        self.values = column[self._calls]
        """The value of each of them, ascending."""

    def of(self, value: int) -> Calls:
        """The calls with a value, ascending."""
        wanted = self.values.dtype.type(value)
        start, stop = np.searchsorted(self.values, wanted), np.searchsorted(self.values, wanted, side="right")
        return self._calls[start:stop].astype(np.int64)

    def have(self, values: Array) -> NDArray[np.bool_]:
        """`[N]` Whether any call has each value."""
        if not len(self.values):
            return np.zeros(len(values), np.bool_)
        at = np.minimum(np.searchsorted(self.values, values), len(self.values) - 1)
        have: NDArray[np.bool_] = self.values[at] == values
        return have

    def counts(self, values: Array) -> tuple[Array, Calls]:
        """`[N]` How many calls have each value, and the first of them; 0 and -1 if none has."""
        if not len(self.values):
            return np.zeros(len(values), np.int64), np.full(len(values), -1, np.int64)
        wanted = values.astype(self.values.dtype, copy=False)
        start = np.searchsorted(self.values, wanted)
        count = np.searchsorted(self.values, wanted, side="right") - start
        first = self._calls[np.minimum(start, len(self._calls) - 1)].astype(np.int64)
        return count, np.where(count > 0, first, -1)


def nearest(parents: Array, marked: NDArray[np.bool_]) -> Array:
    """`[N]` For each prefix, itself if it is marked, else its longest marked prefix; 0 if there is none.

    `parents[n] < n`, and 0 is its own parent.
    """
    top = parents.copy()
    top[marked] = np.flatnonzero(marked)
    changed = True
    while changed:
        changed = False
        for start in range(0, len(top), AT_ONCE):
            part = top[start : start + AT_ONCE]
            further = np.where(marked[part], part, top[part])
            changed |= not np.array_equal(further, part)
            part[:] = further
    return top
