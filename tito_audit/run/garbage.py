"""Garbage: what rows leave behind in cycles, freed before much of it piles up."""

from __future__ import annotations

import gc
from dataclasses import dataclass

EVERY = 8 << 20
"""How many bytes of rows are read between two collections."""


@dataclass(slots=True)
class Garbage:
    """Frees cycles of objects every few megabytes of rows.

    An error caught in a template holds the row that it came from, in a cycle; a row of a table holds all rows read
    with it. Python counts objects, not bytes, so it would collect them far too late.
    """

    _bytes: int = 0

    def passed(self, size: int) -> None:
        """Count the bytes of a row, or of several."""
        self._bytes += size
        if self._bytes >= EVERY:
            self._bytes = 0
            gc.collect(1)
