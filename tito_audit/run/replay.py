"""Replay: the results of a scan as a journal records them, and as it gives them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from tito_audit.formats import Detection
from tito_audit.record.finding import Result
from tito_audit.record.rollout import Place
from tito_audit.run.encoders import Encoded
from tito_audit.run.kept import Table, read_encoders, read_results, write_result
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.resume import FinishedLogs
from tito_audit.storage.journal import Finished, Journal
from tito_audit.viewer.model import View, observed_of
from tito_audit.viewer.selection import ViewQuota

KeptRow: TypeAlias = tuple[int, Sequence[Result]]
"""How many rows a sample left out before a row, and the results of the row."""
_PART = 256
"""About how many results are recorded at once."""
_Views: TypeAlias = Mapping[tuple[int, int], View]
"""By row and number in the row."""


class Recorder:
    """Records the results of each log as they pass."""

    def __init__(self, finished: FinishedLogs) -> None:
        self._finished = finished
        self._file: Path | None = None
        self._encoders: dict[Encoded, None] = {}
        self._table = Table()
        self._rows: list[Any] = []
        self._held = 0

    def begin(self, file: Path) -> None:
        """Start on a log."""
        self._file, self._encoders = file, {}
        self._finished.journal.begin()

    def add(self, left_out: int, row: Sequence[Result]) -> None:
        """Record the results of the next row, and how many rows were left out before it."""
        self._rows.append([left_out, [write_result(result, self._table) for result in row]])
        self._held += len(row) + 1
        if self._held >= _PART:
            self._write()

    def encoders(self, encoded: Encoded) -> None:
        """Record what encoded a chunk."""
        self._encoders[encoded] = None

    def finish(self, left_out: int) -> None:
        """Record that the log was read to its end, and how many rows were left out after the last one."""
        if self._file is None:
            return
        if self._rows:
            self._write()
        self._finished.finish(self._file, left_out=left_out, encoders=list(self._encoders))
        self._file = None

    def _write(self) -> None:
        self._finished.journal.add({"values": self._table.values, "rows": self._rows})
        self._table, self._rows, self._held = Table(), [], 0


def kept_rows(
    journal: Journal, finished: Finished, flow: RowFlow, file: Path, views: ViewQuota | None
) -> Iterator[KeptRow]:
    """The rows of a log that an earlier run finished.

    Views are not recorded: which rollouts get one depends on the logs before. Their rows are read again.
    """
    group = flow.groups[str(file)]
    if group.join is not None:
        group.join.rows(group.open_quick(file))  # reads the calls of all logs, which the summary tells of
    made = _views(flow, file, _viewed(_rows(journal, finished, file), views)) if views is not None else {}
    for left_out, results in _rows(journal, finished, file):
        yield left_out, [_with_view(one, made.get((one.place.row, at))) for at, one in enumerate(results)]


def kept_totals(journal: Journal, finished: Finished) -> tuple[int, tuple[Encoded, ...]]:
    """How many rows a sample left out after the last row of a finished log, and what encoded the log."""
    with journal.reading(finished):
        return int(finished.said["left_out"]), read_encoders(finished.said["encoders"])


def _rows(journal: Journal, finished: Finished, file: Path) -> Iterator[KeptRow]:
    for part in journal.parts(finished):
        with journal.reading(finished):
            table = Table(part["values"])
            rows = [(int(left_out), read_results(row, table, file)) for left_out, row in part["rows"]]
        yield from rows


def _viewed(rows: Iterator[KeptRow], views: ViewQuota) -> dict[int, set[int]]:
    """By row, the numbers of the results in it that get a view."""
    wanted: dict[int, set[int]] = {}
    for _, results in rows:
        for at, result in enumerate(results):
            if observed_of(result) is not None and views.take(result.findings):
                wanted.setdefault(result.place.row, set()).add(at)
    return wanted


def _views(flow: RowFlow, file: Path, wanted: Mapping[int, set[int]]) -> _Views:
    """The views of some rows of a log, which are read and audited again."""
    made: dict[tuple[int, int], View] = {}
    left, group = set(wanted), flow.groups[str(file)]
    if not left:
        return made
    for raw in group.rows(group.open_quick(file)):
        if raw.index not in left:
            continue
        place = Place(str(file), raw.index)
        for at, result in enumerate(flow.audit(raw, place, Detection(), lambda _: True)):
            observed = observed_of(result)
            if at in wanted[raw.index] and observed is not None and observed.view is not None:
                made[raw.index, at] = observed.view
        left.remove(raw.index)
        if not left:
            break
    return made


def _with_view(result: Result, view: View | None) -> Result:
    observed = observed_of(result)
    if view is None or observed is None:
        return result
    return replace(result, observed=replace(observed, view=view))
