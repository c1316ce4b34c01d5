"""Conversations written back: each call in its own row, in its own file."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import replace

from tito_audit.format import Row
from tito_audit.join._call_rows import CallRows
from tito_audit.join._calls import CALLS, CallsOfRollout
from tito_audit.storage import Log, Output, RawRow
from tito_audit.storage.spool import Spool, unpacked

_OPEN, _KEEP, _DROP, _CHANGED = 0, 1, 2, 3
"""What to do with a row; values from `_CHANGED` on say where its new rows begin in the spool."""


class CallEdits:
    """What to write for each row of some logs, as far as known; changed rows wait in a temporary file."""

    def __init__(self, rows: CallRows) -> None:
        self._rows = rows
        self._said = array("q", bytes(8 * len(rows)))
        self._spool = Spool()

    def keep(self, row: int) -> None:
        """Write a row as it is."""
        self._said[row] = _KEEP

    def write(self, row: int, old: Row, new: Sequence[Row]) -> None:
        """Write `new` instead of a row; [] leaves it out."""
        # Pickled together, so shared objects stay the same objects.
        packed = pickle.dumps((old, new), pickle.HIGHEST_PROTOCOL) if new else b""
        self._said[row] = _CHANGED + self._spool.add(packed) if new else _DROP

    def known(self, row: int) -> bool:
        """Whether what to write for a row is known."""
        return self._said[row] != _OPEN

    def dropped(self, row: int) -> bool:
        """Whether a row is left out."""
        return self._said[row] == _DROP

    def put(self, row: int, line: RawRow, out: Output) -> None:
        """Write a row for which this is known."""
        said = self._said[row]
        if said == _KEEP:
            out.keep(line)
        elif said == _DROP:
            out.replace(line, [])
        else:
            old, new = pickle.loads(unpacked(self._spool.packed(said - _CHANGED)))  # written by this run
            out.replace(replace(line, value=old), new)


class GatheredOutput:
    """An output that takes conversations and writes their calls in their old places.

    What to write is already known for calls whose conversation began in an earlier log; calls in later logs wait
    for it.
    """

    def __init__(self, out: Output, log: Log, rows: CallRows, edits: CallEdits) -> None:
        self.changed = False
        self._out = out
        self._lines = zip(log, rows.rows_of(log.path), strict=False)
        self._waiting: tuple[RawRow, int] | None = None
        self._rows = rows
        self._path = log.path
        self._edits = edits

    def keep(self, raw: RawRow) -> None:
        """Write the rows of a conversation as they were."""
        for row in self._members(raw):
            self._edits.keep(row)
        self._write()

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write other rows for a conversation; [] leaves them out."""
        members = self._members(raw)
        if not isinstance(raw.value, CallsOfRollout):
            self._edits.write(members[0], raw.value or {}, rows)
        elif not rows:
            for member in members:
                self._edits.write(member, {}, ())
        else:
            (row,) = rows
            added = {name: value for name, value in row.items() if name != CALLS}
            for member, one, call in zip(members, raw.value.raws, row[CALLS], strict=True):
                if call is one.value:
                    self._edits.keep(member)
                else:
                    self._edits.write(member, one.value or {}, [{**call, **added}])
        self._write()

    def finish(self, log: Log) -> None:
        """Write what followed the last row."""
        self._write()
        self._out.finish(log)

    def _members(self, raw: RawRow) -> Sequence[int]:
        return self._rows.members(self._rows.number(self._path, raw.index))

    def _write(self) -> None:
        """Write the rows for which it is known what to write."""
        while (waiting := self._waiting or next(self._lines, None)) is not None:
            line, row = waiting
            if not self._edits.known(row):
                self._waiting = waiting
                return
            self._waiting = None
            self._edits.put(row, line, self._out)
            self.changed = self._out.changed
