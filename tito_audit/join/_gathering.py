"""A log of single calls, as a log of conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TypeAlias

from tito_audit.errors import StorageError
from tito_audit.format import Row
from tito_audit.formats import number_columns
from tito_audit.join._call_rows import CallRows, MapBatches, map_in_process
from tito_audit.join._calls import CALLS, CAPTURE, CallsOfRollout
from tito_audit.join._reader import CallReader, CaptureKey, find_conversation_key, is_capture, is_joinable
from tito_audit.join._sessions import joined_notices
from tito_audit.join.traces import Decode
from tito_audit.settings.model import Settings
from tito_audit.storage import Log, Output, RawRow, open_log
from tito_audit.storage.chunks import Chunk, ChunkReader, Ticket, line_at
from tito_audit.storage.log import TABLES
from tito_audit.storage.row import RowSample
from tito_audit.storage.spool import unpack_entry, unpack_row
from tito_audit.storage.streams import ParseRow


class Gathering:
    """The rows of a log: one for each conversation that begins in it, at its first call, and all other rows as
    they are.

    Rows whose conversation began in an earlier log are left out: they are read there.
    """

    def __init__(self, rows: CallRows, log: Log) -> None:
        self._rows = rows
        self._log = log

    def __iter__(self) -> Iterator[RawRow]:
        rows, log = self._rows, self._log
        every = rows.rows_of(log.path)
        for row, left_out in self._wanted_heads():
            log.left_out = left_out
            members = rows.members(row)
            raws = [rows.raw(member, log.parse) for member in members]
            files = [str(rows.paths[rows.place(member)[0]]) for member in members]
            yield _gather_row(raws, files, rows.form(row), log.max_row_bytes, by_key=rows.by_key)
            log.position = log.size * (row - every.start) // len(every)
        log.left_out = self._left_out

    def chunks(self, size: int) -> Iterator[Chunk]:
        """The same rows in chunks of about `size` bytes, if rows are roughly equal in length."""
        log = self._log
        every = self._rows.rows_of(log.path)
        each = max(size * len(every) // max(log.size, 1), 1)
        part: list[_PackedConversation] = []
        left_out: list[int] = []
        gathered_rows = before = 0
        failed: StorageError | None = None
        try:
            for row, passed in self._wanted_heads():
                rows = self._rows
                places = map(rows.place, rows.members(row))
                packed = [(file, ticket, rows.readers[file].spool_entry(ticket)) for file, ticket in places]
                part.append((rows.form(row), packed))
                left_out.append(passed - before)
                gathered_rows += len(packed)
                if gathered_rows >= each:
                    done = log.size * (row - every.start) // len(every)
                    yield self._chunk(part, [*left_out, passed - before], done)
                    part, left_out, gathered_rows, before = [], [], 0, passed
        except StorageError as error:
            failed = error
        if part or self._left_out > before:
            yield self._chunk(part, [*left_out, self._left_out - before], log.size)
        if failed is not None:
            raise failed

    def output(self, out: Output) -> GatheredOutput:
        """An output for these rows."""
        return GatheredOutput(out, self._log, self._rows)

    def _wanted_heads(self) -> Iterator[tuple[int, int]]:
        """The first row of each wanted conversation, by number, and how many were left out before it."""
        rows, log = self._rows, self._log
        sample = RowSample(log.share) if log.share is not None else None
        self._left_out = 0
        for row in rows.rows_of(log.path):
            if rows.root[row] != row:
                continue
            if log.only is not None and log.only not in map(rows.index, rows.members(row)):
                continue
            if sample is not None:
                before, name, first = sample.left_out, rows.name(row), rows.index(row)
                sampled = sample.takes(first, first, name, len(name))
                self._left_out = sample.left_out
                if sampled:
                    yield row, before
            else:
                yield row, 0
        if log.path in rows.failed:
            raise rows.failed[log.path]

    def _chunk(self, part: Sequence[_PackedConversation], left_out: Sequence[int], done: int) -> Chunk:
        log, paths, by_key = self._log, self._rows.paths, self._rows.by_key
        chunk = _GatheredChunk(log.path, log.max_row_bytes, done, paths, part, log.parse, by_key, share=log.share)
        if log.share is not None:
            chunk.left_out = left_out
        return chunk


_PackedConversation: TypeAlias = tuple[str, Sequence[tuple[int, Ticket, bytes | None]]]
"""The format and the rows of a conversation as sent to another process: for each row the number of its file, its
ticket, and its spool entry; None where it is read in place."""


@dataclass(slots=True)
class _GatheredChunk(Chunk):
    """A chunk of conversations, numbered as in the file."""

    files: Sequence[Path]
    groups: Sequence[_PackedConversation]
    parse: ParseRow
    by_key: bool
    left_out: Sequence[int] = field(default=())
    """How many conversations are left out before each, and in total; () if none are."""

    def rows(self, reading: ChunkReader) -> Iterator[RawRow]:
        """One row for each conversation; the size of the reading stays 0: rows are numbered as in the file."""
        with ExitStack() as stack:
            opened: dict[int, BinaryIO] = {}
            for number, (form, members) in enumerate(self.groups):
                if reading.sample is not None:
                    reading.sample.left_out = self.left_out[number]
                raws = []
                for file, ticket, entry in members:
                    if entry is not None:
                        raws.append(unpack_row(unpack_entry(entry), self.parse))
                        continue
                    if file not in opened:
                        opened[file] = stack.enter_context(self.files[file].open("rb"))
                    raws.append(line_at(opened[file], ticket, self.limit, self.parse))
                files = [str(self.files[file]) for file, _, _ in members]
                yield _gather_row(raws, files, form, self.limit, by_key=self.by_key)
        if reading.sample is not None:
            reading.sample.left_out = self.left_out[-1]


def _gather_row(raws: Sequence[RawRow], files: Sequence[str], form: str, limit: int, *, by_key: bool) -> RawRow:
    """The calls of a conversation as one row; a row that is not a call, or cannot be read, as it is."""
    first = raws[0]
    if not form:
        return first
    size = sum(len(raw.text or b"") for raw in raws)
    if len(raws) > 1 and size > limit:
        return RawRow(
            first.index,
            None,
            f"the {len(raws)} calls of this rollout are {size:,} bytes together, over the limit of {limit:,}; "
            "raise --max-row-bytes to read them",
        )
    return RawRow(first.index, CallsOfRollout(raws, form, files, by_key=by_key))


# Conversations written back: each call in its own row, in its own file


class GatheredOutput:
    """An output that takes conversations and writes their calls in their old places.

    What to write is already known for calls whose conversation began in an earlier log; calls in later logs wait
    for it.
    """

    def __init__(self, out: Output, log: Log, rows: CallRows) -> None:
        self.changed = False
        self._out = out
        self._lines = zip(log, rows.rows_of(log.path), strict=False)
        self._waiting: tuple[RawRow, int] | None = None
        self._rows = rows
        self._path = log.path
        self._edits = rows.edits

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
            for member, line, call in zip(members, raw.value.raws, row[CALLS], strict=True):
                if call is line.value:
                    self._edits.keep(member)
                else:
                    self._edits.write(member, line.value or {}, [{**call, **added}])
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
            if not self._edits.is_known(row):
                self._waiting = waiting
                return
            self._waiting = None
            self._edits.write_to(row, line, self._out)
            self.changed = self._out.changed


# A run's logs of single calls, joined when they are first read


_HEAD, _HEADS = 64, 256
"""How many calls of a log, and of all logs, the first pass learns from."""
_WINDOW = 64, 4096
"""With a limit on conversations: how many rows are read for each, and how many more in total."""


class JoinedCalls:
    """Logs of single calls, as logs of conversations.

    All are read once, in this process, when the first is needed; processes forked later share what was found.
    """

    def __init__(
        self, settings: Settings, logs: Sequence[Path], decode: Decode | None, mapped: MapBatches = map_in_process
    ) -> None:
        self._settings = settings
        self._decode = decode
        self._mapped = mapped
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
        stated = self._settings.session
        rows = [row for head in self.heads.values() for row in head]
        self._reader = CallReader(
            settings.format, stated, find_conversation_key(rows) if rows and stated is None else None
        )
        self._cut = 0

    def notices(self) -> Iterator[str]:
        """What was joined, for the summary."""
        for rows in self._joined.values():
            yield from joined_notices(rows, self._reader)
        if self._cut:
            yield f"Only the first {self._cut:,} rows were read, because of --limit."

    def rows(self, log: Log) -> CallRows | None:
        """The rows of a log, with those joined to them; None if it holds no calls."""
        path = log.path
        if path not in self.heads:
            return None
        # A single row is given by its place in one file.
        alone = None if self._settings.row is None else path
        if alone not in self._joined:
            paths = tuple(self.heads) if alone is None else (alone,)
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
            self._joined[alone] = rows
        return self._joined[alone]

    def _head(self, log: Path, wanted: int) -> Sequence[Row] | None:
        """Some of the first rows of a log that are single calls; None if there are none."""
        if not log.is_file():
            return None
        settings = self._settings
        with suppress(StorageError):  # The audit says why.
            rows = open_log(log, max_row_bytes=settings.max_row_bytes, arrays=number_columns(settings.columns))
            rows.skip_binary = True
            if rows.kind not in TABLES:
                return self._calls_in(rows, 2, wanted)
            rows.only = 0
            if self._calls_in(rows, 1, 1) is not None:
                rows.only = None
                return self._calls_in(rows, 1, wanted)
        return None

    def _calls_in(self, rows: Iterable[RawRow], most: int, wanted: int) -> list[Row] | None:
        """The first calls among some rows; None if `most` other rows come before them, or there are none."""
        calls: list[Row] = []
        others = 0
        for raw in islice(rows, 1024):  # a log of events may begin with many other rows
            if raw.value is None:
                continue
            could = is_joinable(raw.value, self._settings.format, stated=self._settings.session is not None)
            if could:
                calls.append(raw.value)
            others += could is False
            if len(calls) == wanted or (others >= most and not calls):
                break
        return calls or None


class Captures:
    """Token captures whose messages are joined from another file: their lines are gathered by rollout."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._joined: dict[Path, CallRows | None] = {}

    def notices(self) -> Iterator[str]:
        """How many lines became how many rollouts."""
        captures = {path: rows for path, rows in self._joined.items() if rows is not None}
        if captures:
            lines = sum(rows.named for rows in captures.values())
            rollouts = sum(rows.conversations_named for rows in captures.values())
            where = f"{len(captures)} token captures" if len(captures) > 1 else str(next(iter(captures)))
            yield f"{where}: {lines} lines were read as the calls of {rollouts} rollouts."

    def rows(self, log: Log) -> CallRows | None:
        """The lines of a capture; None for any other log."""
        if log.path not in self._joined:
            settings, first = self._settings, None
            stated = settings.columns or settings.rows_at or settings.format not in (None, CAPTURE)
            if not stated and log.kind in ("lines", "objects"):
                first = next((raw.value for raw in open_log(log.path) if raw.value is not None), None)
            capture = first is not None and is_capture(first)
            self._joined[log.path] = CallRows([log], CaptureKey()) if capture else None
        return self._joined[log.path]
