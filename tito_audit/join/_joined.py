"""A run's logs of single calls, joined when they are first read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from tito_audit.errors import StorageError
from tito_audit.format import Row
from tito_audit.formats import format_named, number_columns
from tito_audit.join._call_rows import CallRows, Decode
from tito_audit.join._calls import CAPTURE
from tito_audit.join._first_pass import Mapped, one_by_one
from tito_audit.join._gathering import Gathering
from tito_audit.join._reader import CallReader, CaptureKey, is_capture, key_in, may_join
from tito_audit.join._sessions import joined_notices
from tito_audit.join._writing import CallEdits, GatheredOutput
from tito_audit.settings.model import Settings
from tito_audit.storage import Log, Output, RawRow, open_log
from tito_audit.storage.log import TABLES

_OTHERS = 2
"""A log without a call before this many rows of other formats holds no calls; for a table, one such row is
enough."""
_ASKED = 1024
"""How many rows are searched for calls: a log of events may begin with many other rows."""
_HEAD, _HEADS = 64, 256
"""How many calls of a log, and of all logs, the first pass learns from."""
_WINDOW = 64, 4096
"""With a limit on conversations: how many rows are read for each, and how many more in total."""


class JoinedCalls:
    """Logs of single calls, as logs of conversations.

    All are read once, in this process, when the first is needed; processes forked later share what was found.
    """

    def __init__(
        self, settings: Settings, logs: Sequence[Path], decode: Decode | None, mapped: Mapped = one_by_one
    ) -> None:
        self._settings = settings
        self._decode = decode
        self._mapped = mapped
        self._named = None if settings.format is None else format_named(settings.format)
        self.heads: dict[Path, Sequence[Row]] = {}
        """The logs that hold calls, each with some calls from its first rows."""
        room = _HEADS
        for log in logs:
            head = self._head(log, max(min(room, _HEAD), 1))
            if head is not None:
                self.heads[log] = head[:room]
                room -= len(self.heads[log])
        self._joined: dict[Path | None, CallRows] = {}
        """By file if each is joined by itself; None: all together."""
        self._edits: dict[int, CallEdits] = {}
        self._reader = self._new_reader()
        self._cut = 0

    def gathering(self, log: Log) -> Gathering | None:
        """A log as conversations; None if it holds no calls."""
        rows = self._rows(log.path)
        return None if rows is None else Gathering(rows, log, by_key=True)

    def output(self, out: Output, log: Log) -> Output:
        """An output for the rows of `gathering`."""
        rows = self._rows(log.path)
        if rows is None:
            return out
        edits = self._edits.setdefault(id(rows), CallEdits(rows))
        return GatheredOutput(out, log, rows, edits)

    def notices(self) -> Iterator[str]:
        """What was joined, for the summary."""
        for rows in self._joined.values():
            yield from joined_notices(rows, self._reader)
        if self._cut:
            yield f"Only the first {self._cut:,} rows were read, because of --limit."

    def _rows(self, path: Path) -> CallRows | None:
        if path not in self.heads:
            return None
        # A single row is given by its place in one file.
        alone = None if self._settings.row is None else path
        if alone not in self._joined:
            self._joined[alone] = self._read(tuple(self.heads) if alone is None else (alone,))
        return self._joined[alone]

    def _read(self, paths: Sequence[Path]) -> CallRows:
        settings = self._settings
        arrays = number_columns(settings.columns)
        logs = [open_log(path, max_row_bytes=settings.max_row_bytes, arrays=arrays) for path in paths]
        most = None
        if settings.limit is not None and settings.session is None:
            most = settings.limit * _WINDOW[0] + _WINDOW[1]
        heads = [row for path in paths for row in self.heads[path]]
        rows = CallRows(logs, self._reader, self._decode, most, heads, self._mapped)
        if rows.cut:
            self._cut = len(rows)
        return rows

    def _new_reader(self) -> CallReader:
        stated = self._settings.session
        rows = [row for head in self.heads.values() for row in head]
        return CallReader(self._named, stated, key_in(rows) if rows and stated is None else None)

    def _head(self, log: Path, wanted: int) -> Sequence[Row] | None:
        """Some of the first rows of a log that are single calls; None if there are none."""
        if not log.is_file():
            return None
        settings = self._settings
        with suppress(StorageError):  # The audit says why.
            rows = open_log(log, max_row_bytes=settings.max_row_bytes, arrays=number_columns(settings.columns))
            rows.quick = True
            if rows.kind not in TABLES:
                return self._calls_in(rows, _OTHERS, wanted)
            rows.only = 0
            if self._calls_in(rows, 1, 1) is not None:
                rows.only = None
                return self._calls_in(rows, 1, wanted)
        return None

    def _calls_in(self, rows: Iterable[RawRow], most: int, wanted: int) -> list[Row] | None:
        """The first calls among some rows; None if `most` other rows come before them, or there are none."""
        found: list[Row] = []
        others = 0
        for raw in islice(rows, _ASKED):
            if raw.value is None:
                continue
            could = may_join(raw.value, self._named, stated=self._settings.session is not None)
            if could:
                found.append(raw.value)
            others += could is False
            if len(found) == wanted or (others >= most and not found):
                break
        return found or None


class Captures:
    """Token captures whose messages are joined from another file: their lines are gathered by rollout."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._held: dict[Path, CallRows | None] = {}
        self._edits: dict[Path, CallEdits] = {}

    def gathering(self, log: Log) -> Gathering | None:
        """A capture as rollouts; None for any other log."""
        rows = self._rows(log)
        return None if rows is None else Gathering(rows, log, by_key=False)

    def output(self, out: Output, log: Log) -> Output:
        """An output for the rows of `gathering`."""
        rows = self._rows(log)
        if rows is None:
            return out
        return GatheredOutput(out, log, rows, self._edits.setdefault(log.path, CallEdits(rows)))

    def notices(self) -> Iterator[str]:
        """How many lines became how many rollouts."""
        held = {path: rows for path, rows in self._held.items() if rows is not None}
        if held:
            lines = sum(rows.named for rows in held.values())
            rollouts = sum(rows.conversations_named for rows in held.values())
            where = f"{len(held)} token captures" if len(held) > 1 else str(next(iter(held)))
            yield f"{where}: {lines} lines were read as the calls of {rollouts} rollouts."

    def _rows(self, log: Log) -> CallRows | None:
        if log.path not in self._held:
            self._held[log.path] = CallRows([log], CaptureKey()) if self._is_capture(log) else None
        return self._held[log.path]

    def _is_capture(self, log: Log) -> bool:
        settings = self._settings
        if (
            settings.columns
            or settings.rows_at
            or settings.format not in (None, CAPTURE)
            or log.kind not in ("lines", "objects")
        ):
            return False
        first = next((raw.value for raw in open_log(log.path) if raw.value is not None), None)
        return first is not None and is_capture(first)
