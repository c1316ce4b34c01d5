"""Output: the interface for writing a log again, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tito_audit.format import Row
from tito_audit.storage.log import Log
from tito_audit.storage.row import RawRow


class Output(Protocol):
    """A log that is being written again: one call per row of the log, in order, then `finish`."""

    changed: bool
    """Whether any row was changed, forked or dropped."""

    def keep(self, raw: RawRow) -> None:
        """Write the row as it was, byte for byte."""

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write these rows instead of one: none drops it, several are a fork.

        They share every unchanged object with `raw.value`.
        """

    def finish(self, log: Log) -> None:
        """Write what follows the last row; if this is not called, the file does not appear."""
