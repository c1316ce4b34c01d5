"""The contract of an output: a log that is being written again, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tito_audit.format import Row
from tito_audit.storage.log import Log
from tito_audit.storage.row import RawRow


class Output(Protocol):
    """A log that is being written again: one call a row of the log, in order, then `finish`."""

    changed: bool
    """Whether any row was replaced by something that is not the same single row."""

    def keep(self, raw: RawRow) -> None:
        """Write the row as it was, byte for byte."""

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write rows in place of one: none leaves it out, several are a fork.

        They share with `raw.value` every object that did not change.
        """

    def finish(self, log: Log) -> None:
        """Write what followed the last row; without it the file does not appear."""
