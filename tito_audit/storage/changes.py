"""Changes: which rows of a log were written with changes, and in which places."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from tito_audit.format import Row
from tito_audit.record.edits import Path, edits_between

_Kind: TypeAlias = tuple[tuple[str, ...], int]
"""The places that change, and how many rows are written for one."""


class Changes:
    """The changed rows of one log, grouped by what changed in them; in little memory, whatever their number."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        """What of the log's form could not be kept."""
        self._rows: dict[_Kind, array[int]] = {}

    def add(self, number: int, old: Row | None, rows: Sequence[Row]) -> None:
        """Note that a row is written as these rows: none if it is left out, several if it is forked."""
        edits = [edit for row in rows for edit in edits_between(old, row)] if old is not None else []
        kind = tuple(dict.fromkeys(place_of(edit.path) for edit in edits)), len(rows)
        spans = self._rows.setdefault(kind, array("q"))
        if spans and spans[-1] == number:
            spans[-1] = number + 1
        else:
            spans.extend((number, number + 1))

    def objects(self) -> Iterator[dict[str, Any]]:
        """Each kind of change for the JSON report: `{"columns", "into", "rows": [[start, stop], …]}`."""
        for (columns, into), spans in self._rows.items():
            pairs = [list(pair) for pair in zip(spans[::2], spans[1::2], strict=True)]
            yield {"columns": list(columns), "into": into, "rows": pairs}


def place_of(path: Path) -> str:
    """`messages[].ids`: a path in a row as one name, the same for all entries of a list."""
    steps = ("[]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")
