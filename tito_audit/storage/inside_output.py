"""InsideOutput: nested rows written back into their wrapper, with everything else as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tito_audit.format import Row
from tito_audit.record.edits import Path
from tito_audit.storage.log import Log
from tito_audit.storage.output_contract import Output
from tito_audit.storage.row import RawRow

_Change = tuple[Path, Sequence[Row]]
"""A path, and the rows that replace the row there."""


class InsideOutput:
    """An output that takes nested rows and writes the rows of the file around them.

    A row that forks becomes several entries of the list it is in, or several rows of the file if it is in no list;
    a dropped row takes its entry or its row of the file with it.
    """

    def __init__(self, out: Output, moved: Sequence[str]) -> None:
        self.changed = False
        """Whether any row was changed, forked or dropped."""
        self._out = out
        self._moved = moved
        """New columns, which a table can take only at its top level, so they move to the row of the file."""
        self._outer: RawRow | None = None
        self._changes: list[_Change] = []

    def keep(self, raw: RawRow) -> None:
        """Keep the row as it is."""
        self._go_to(raw)

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write these rows instead of one: none drops it, several are a fork."""
        self._go_to(raw)
        if raw.within is not None:
            self._changes.append((raw.within.path, rows))

    def finish(self, log: Log) -> None:
        """Write the remaining rows."""
        self._write()
        for empty in log.passed:
            self._out.keep(empty)
        self._out.finish(log)

    def _go_to(self, raw: RawRow) -> None:
        if raw.within is None:
            raise ValueError(f"row {raw.index} is in no wrapper")
        if raw.within.outer is self._outer:
            return
        self._write()
        for empty in raw.within.before:
            self._out.keep(empty)
        self._outer = raw.within.outer

    def _write(self) -> None:
        """Write the row of the file whose nested rows were all seen."""
        outer, changes = self._outer, self._changes
        self._outer, self._changes = None, []
        if outer is None:
            return
        if not changes:
            self._out.keep(outer)
            return
        rows = _with_moved(outer.value, changes, self._moved) if outer.value is not None else []
        self._out.replace(outer, rows)
        self.changed = self._out.changed


def _with_moved(outer: Row, changes: Sequence[_Change], moved: Sequence[str]) -> list[Row]:
    """The rows of the file, with the moved columns at their top level: as `{"rows": […]}` for rows from a list."""
    said: list[tuple[Path, dict[str, Any]]] = []
    bare: list[_Change] = []
    for path, rows in changes:
        said += [(path, {name: row[name] for name in moved if name in row}) for row in rows]
        bare.append((path, [{name: row[name] for name in row if name not in moved} for row in rows]))
    whole: list[Row] = _rebuilt(outer, bare if moved else changes, 0)
    for name in moved:
        values = [(path, one[name]) for path, one in said if name in one]
        if not values:
            continue
        before = {"before": outer[name]} if outer.get(name) is not None else {}
        if any(isinstance(step, int) for step in values[0][0]):
            entries = [{"entry": next(s for s in path[::-1] if isinstance(s, int)), **one} for path, one in values]
            whole = [{**row, name: {"rows": entries, **before}} for row in whole]
        else:
            whole = [{**row, name: {**one, **before}} for row, (_, one) in zip(whole, values, strict=True)]
    return whole


def _rebuilt(value: Any, changes: Sequence[_Change], depth: int) -> list[Any]:
    """What replaces a value `depth` steps down, given the changes below it: one value, several or none."""
    here = next((rows for path, rows in changes if len(path) == depth), None)
    if here is not None:
        return list(here)
    below: dict[Any, list[_Change]] = {}
    for change in changes:
        below.setdefault(change[0][depth], []).append(change)
    if isinstance(value, Mapping):
        ((key, inner),) = below.items()
        return [{**value, key: one} for one in _rebuilt(value[key], inner, depth + 1)]
    entries: list[Any] = []
    for index, entry in enumerate(value):
        entries += _rebuilt(entry, below[index], depth + 1) if index in below else [entry]
    return [entries]
