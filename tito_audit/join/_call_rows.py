"""CallRows: the single calls of several logs, gathered into conversations and written back as calls."""

from __future__ import annotations

import pickle
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import StorageError
from tito_audit.format import Row
from tito_audit.formats import format_named, number_columns
from tito_audit.join._calls import CALLS, CAPTURE, CallsOfRollout
from tito_audit.join._reader import (
    NO_CALL,
    CallReader,
    CaptureKey,
    ReadCall,
    find_conversation_key,
    is_capture,
    is_joinable,
)
from tito_audit.join.history import HistoryIndex, JoinedBy, JoinedConversations
from tito_audit.join.traces import CallTraits, Decode, Trace, Tracer
from tito_audit.settings.model import Settings
from tito_audit.storage import Log, Output, RawRow, open_log
from tito_audit.storage.chunks import Chunk, ChunkReader, RandomAccess, RowBatch, Ticket, line_at
from tito_audit.storage.log import TABLES
from tito_audit.storage.row import RowSample
from tito_audit.storage.spool import Spool, unpack_entry, unpack_row
from tito_audit.storage.streams import ParseRow
from tito_audit.terminal.words import listed, many

Rows = NDArray[np.uint32]


BATCH_BYTES = 1 << 20
"""Rows read at once, about."""


@dataclass(slots=True)
class BatchRead:
    """What the rows of a batch say about their conversations."""

    lines: int = 0
    """Lines of the batch; 0 if its rows are numbered already."""
    rows: list[tuple[int, int | bytes, str, int | None, int, Trace | None]] = field(default_factory=list)
    """(index, byte offset of the line or an entry for the spool, format, key, name, trace) of each row."""
    unnamed: int = 0
    """Rows without the key that reliably names a conversation."""
    others: int = 0
    """Rows with the key that are no single call."""
    several: int = 0
    """Rows without the key that hold several calls or choices."""


ReadBatch: TypeAlias = Callable[[RowBatch], BatchRead]
BatchAnswers: TypeAlias = Generator[tuple[int, BatchRead | None], None, None]
MapBatches: TypeAlias = Callable[[ReadBatch, Iterable[tuple[int, RowBatch]]], BatchAnswers]
"""Reads the batches, each with its file's number, in one process or several; yields the answers in order."""


def map_in_process(work: ReadBatch, batches: Iterable[tuple[int, RowBatch]]) -> BatchAnswers:
    """Reads the batches in this process."""
    for number, batch in batches:
        yield number, work(batch)


def read_batch(read: ReadCall, tracer: Tracer, parse: ParseRow, batch: RowBatch) -> BatchRead:
    """Read the rows of a batch as calls, and hash their histories."""
    answer = BatchRead()
    for place, raw in batch.rows(parse):
        answer.lines += isinstance(place, int)
        if raw is None:
            continue
        row = NO_CALL if raw.value is None else read(raw.value)
        if raw.value is not None:
            answer.unnamed += not row.named
            answer.others += row.named and not row.form
            answer.several += row.several and not row.named
        trace = None if row.traits is None else tracer.trace(row.traits)
        answer.rows.append((raw.index, place, row.form, row.key, row.name, trace))
    return answer


_OPEN, _KEEP, _DROP, _CHANGED = 0, 1, 2, 3
"""What to do with a row; a value from `_CHANGED` on is the place of its new rows in the spool, plus `_CHANGED`."""


class CallEdits:
    """What to write for each row of some logs, once that is known; changed rows wait in a temporary file."""

    def __init__(self, rows: int) -> None:
        self._done = array("q", bytes(8 * rows))
        self._spool = Spool()

    def keep(self, row: int) -> None:
        """Have a row written as it is."""
        self._done[row] = _KEEP

    def write(self, row: int, old: Row, new: Sequence[Row]) -> None:
        """Have `new` written in place of a row; [] leaves it out."""
        # Pickled together, so that what they share stays the same object.
        packed = pickle.dumps((old, new), pickle.HIGHEST_PROTOCOL) if new else b""
        self._done[row] = _CHANGED + self._spool.add(packed) if new else _DROP

    def is_known(self, row: int) -> bool:
        """Whether it is known what to write for a row."""
        return self._done[row] != _OPEN

    def write_to(self, row: int, line: RawRow, out: Output) -> None:
        """Write a row for which this is known to an output."""
        edits = self._done[row]
        if edits == _KEEP:
            out.keep(line)
        elif edits == _DROP:
            out.replace(line, [])
        else:
            old, new = pickle.loads(unpack_entry(self._spool.entry_at(edits - _CHANGED)))  # written by this run
            out.replace(replace(line, value=old), new)


class CallRows:
    """All rows of some logs by number, each with its conversation.

    One pass over the logs keeps some 20 bytes a row besides its `HistoryIndex`, however long rows are; rows of
    files that cannot be read in place go into a temporary file. Processes forked afterwards share both.
    """

    def __init__(
        self,
        logs: Sequence[Log],
        read: ReadCall,
        decode: Decode | None = None,
        most: int | None = None,
        heads: Iterable[Row] = (),
        mapped: MapBatches = map_in_process,
    ) -> None:
        self.paths = [log.path for log in logs]
        self._files = {log.path: number for number, log in enumerate(logs)}
        self._spool = Spool()
        self._read = read
        self.readers = [
            RandomAccess(log.path, max_row_bytes=log.max_row_bytes, spool=self._spool, parse=log.parse)
            for log in logs
        ]
        self._index, self._at, self._form = array("I"), array("Q"), array("B")
        """By row: index, place in its file, number of its format; 0 for rows that are no call."""
        self.forms: list[str] = [""]
        self._named, self._names = array("I"), array("Q")
        """Rows with a reliable name, and the `CallOfRow.name` of each."""
        self.keys = array("Q")
        """The `CallOfRow.key` of each of them."""
        self.traced = array("I")
        """Rows that are joined by their history."""
        self.unnamed = self.others = self.several = 0
        """As in `BatchRead`."""
        self.cut = False
        """Whether rows beyond the first `most` were not read."""
        self.failed: dict[Path, StorageError] = {}
        """Why files could not be read to their end."""
        self._starts = [0]
        history = HistoryIndex()
        history.tracer.learn(traits for row in heads if (traits := read(row).traits) is not None)
        self._read_all(history, most, mapped)
        self._spool.flush()
        self.root = np.arange(len(self._index), dtype=np.uint32)
        """`[R]` the first row of each row's conversation, by names where rows have them, else by history; the row
        itself if it is alone."""
        named = np.frombuffer(self._named, np.uint32)
        self.named = len(named)
        """Rows joined by a reliable name."""
        self.conversations_named = 0
        if len(named):
            names = np.frombuffer(self._names, np.uint64)
            _, first, which = np.unique(names, return_index=True, return_inverse=True)
            self.root[named] = named[first[which]]
            self.conversations_named = len(first)
        self.joined: JoinedConversations | None = None
        """What is joined by history; None if no row has one."""
        if len(history):
            self.joined = history.join_conversations(self._reread, decode)
            traced = np.frombuffer(self.traced, np.uint32)
            self.root[traced] = traced[self.joined.of]
        self._sizes: Rows = np.bincount(self.root, minlength=len(self.root)).astype(np.uint32)
        joined = np.flatnonzero(self._sizes[self.root] > 1).astype(np.uint32)
        self._members: Rows = joined[np.argsort(self.root[joined], kind="stable")]
        self._heads: Rows = self.root[self._members]

    def _read_all(self, history: HistoryIndex, most: int | None, mapped: MapBatches) -> None:
        """Read all files once, and keep what their rows say about their conversations."""

        def batches() -> Iterator[tuple[int, RowBatch]]:
            for number, reader in enumerate(self.readers):
                try:
                    for batch in reader.batches(BATCH_BYTES):
                        yield number, batch
                except StorageError as error:
                    self.failed[reader.path] = error

        lines = 0
        work = partial(read_batch, self._read, history.tracer, self.readers[0].parse)
        with closing(mapped(work, batches())) as answers:
            for number, batch in answers:
                assert batch is not None, "every batch has an answer"
                if len(self._starts) <= number:
                    self._starts += [len(self._index)] * (number + 1 - len(self._starts))
                    lines = 0
                room = None if most is None else most - len(self._index)
                # Keep what the rows of a batch say, as far as there is room; the batch's lines are numbered from
                # `lines`.
                reader = self.readers[number]
                self.unnamed += batch.unnamed
                self.others += batch.others
                self.several += batch.several
                for index, place, form, key, name, trace in islice(batch.rows, room):
                    row = len(self._index)
                    self._index.append(index + lines)
                    self._at.append(place if isinstance(place, int) else reader.add_entry(place))
                    if form not in self.forms:
                        self.forms.append(form)
                    self._form.append(self.forms.index(form))
                    if key is not None:
                        self._named.append(row)
                        self._names.append(name)
                        self.keys.append(key)
                    elif trace is not None:
                        self.traced.append(row)
                        history.add(trace)
                lines += batch.lines
                if room is not None and room < len(batch.rows):
                    self.cut = True
                    break
        self._starts += [len(self._index)] * (len(self.readers) + 1 - len(self._starts))

    def _reread(self, calls: Sequence[int]) -> Iterator[tuple[int, CallTraits]]:
        """Read calls again, given by their numbers in the history index."""
        for number in calls:
            raw = self.raw(self.traced[number])
            traits = self._read(raw.value).traits if raw.value is not None else None
            if traits is not None:
                yield number, traits

    @property
    def by_key(self) -> bool:
        """False for a token capture, whose lines are gathered even if a rollout has only one."""
        return self._read.by_key

    @cached_property
    def edits(self) -> CallEdits:
        """What to write for each row."""
        return CallEdits(len(self))

    def __len__(self) -> int:
        return len(self._index)

    def rows_of(self, path: Path) -> range:
        """The numbers of the rows of a file."""
        number = self._files[path]
        return range(self._starts[number], self._starts[number + 1])

    def number(self, path: Path, index: int) -> int:
        """The number of the row with this index in a file."""
        rows = self.rows_of(path)
        return bisect_left(self._index, index, rows.start, rows.stop)

    def index(self, row: int) -> int:
        """The index of a row in its file."""
        return self._index[row]

    def place(self, row: int) -> tuple[int, Ticket]:
        """The number of a row's file, and its ticket there."""
        return bisect_right(self._starts, row) - 1, (self._index[row], self._at[row])

    def members(self, row: int) -> Sequence[int]:
        """The rows of the conversation that begins with this one, in order."""
        if self._sizes[row] == 1:
            return (row,)
        start, end = np.searchsorted(self._heads, np.array((row, row + 1), np.uint32))
        rows: list[int] = self._members[start:end].tolist()
        return rows

    def form(self, row: int) -> str:
        """The format of the conversation that begins with this row; "" for a row that stays as it is."""
        form = self.forms[self._form[row]]
        return form if self._sizes[row] > 1 or not self._read.by_key else ""

    def name(self, row: int) -> bytes:
        """The name of a row's conversation, hashed to 8 bytes; b"" if it has none."""
        place = bisect_left(self._named, row)
        if place < len(self._named) and self._named[place] == row:
            return self._names[place].to_bytes(8, "little")
        return b""

    def raw(self, row: int, parse: ParseRow | None = None) -> RawRow:
        """A row, read again; `parse` None: parsed as in the first pass."""
        file, ticket = self.place(row)
        return self.readers[file].row(ticket, parse)


class Gathering:
    """The rows of a log: each conversation that begins in it, in place of its first call, and all other rows.

    Calls whose conversation began in an earlier log are left out: they are read there.
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
        """The rows in chunks of about `size` bytes, if they are roughly of one length."""
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
        """An output that writes these rows back as calls."""
        return GatheredOutput(out, self._log, self._rows)

    def _wanted_heads(self) -> Iterator[tuple[int, int]]:
        """(first row, conversations left out before it) of each conversation that `--row` and sampling leave."""
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
"""A conversation as sent to another process: its format, and (file number, ticket, spool entry) of each row; no
entry where the row is read in place."""


@dataclass(slots=True)
class _GatheredChunk(Chunk):
    """A chunk of conversations; their rows keep their numbers in the file."""

    files: Sequence[Path]
    groups: Sequence[_PackedConversation]
    parse: ParseRow
    by_key: bool
    left_out: Sequence[int] = field(default=())
    """Conversations left out before each, and in total; () if none are."""

    def rows(self, reading: ChunkReader) -> Iterator[RawRow]:
        """A row for each conversation. The size of the reading stays 0, as rows have their numbers already."""
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
    """The calls of a conversation as one row; the row itself if it has no `form`, as it is no call."""
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


class GatheredOutput:
    """An output for conversations that writes their calls in their old places.

    Calls of conversations that began in an earlier log are already known; those in later logs wait in `CallEdits`.
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
        """Write the calls of a conversation as they were."""
        for row in self._members(raw):
            self._edits.keep(row)
        self._write()

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write other calls for a conversation; [] leaves all its calls out."""
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
        """Write the rows after the last conversation."""
        self._write()
        self._out.finish(log)

    def _members(self, raw: RawRow) -> Sequence[int]:
        return self._rows.members(self._rows.number(self._path, raw.index))

    def _write(self) -> None:
        """Write the next rows of the log, as far as it is known what to write."""
        while (waiting := self._waiting or next(self._lines, None)) is not None:
            line, row = waiting
            if not self._edits.is_known(row):
                self._waiting = waiting
                return
            self._waiting = None
            self._edits.write_to(row, line, self._out)
            self.changed = self._out.changed


_HEAD, _HEADS = 64, 256
"""Calls of a log, and of all logs, from which the tracer learns turn ends."""
_WINDOW = 64, 4096
"""With a limit on conversations: rows read for each of them, and rows more in total."""


class JoinedCalls:
    """The logs of single calls of a run, joined to conversations.

    All are read when the first of them is needed; processes forked later share the result.
    """

    def __init__(
        self, settings: Settings, logs: Sequence[Path], decode: Decode | None, mapped: MapBatches = map_in_process
    ) -> None:
        self._settings = settings
        self._decode = decode
        self._mapped = mapped
        self.heads: dict[Path, Sequence[Row]] = {}
        """The logs that hold calls, each with some of its first calls."""
        room = _HEADS
        for log in logs:
            head = self._head(log, max(min(room, _HEAD), 1))
            if head is not None:
                self.heads[log] = head[:room]
                room -= len(self.heads[log])
        self._joined: dict[Path | None, CallRows] = {}
        """By log if each is joined by itself; None: all together."""
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
        """The rows of all logs joined with this one; None if it holds no calls."""
        path = log.path
        if path not in self.heads:
            return None
        # With `--row`, rows are numbered in one file.
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
        """Some of the first single calls of a log; None if it is no log of calls."""
        if not log.is_file():
            return None
        settings = self._settings
        with suppress(StorageError):  # reported when the log is read
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
        """The first calls among rows; None if there are none, or `most` other rows come first."""
        calls: list[Row] = []
        others = 0
        for raw in islice(rows, 1024):  # logs of events may begin with many other rows
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
    """Token captures of a run: their lines are gathered by rollout, if messages are joined from another file."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._joined: dict[Path, CallRows | None] = {}

    def notices(self) -> Iterator[str]:
        """How many lines became how many rollouts, for the summary."""
        captures = {path: rows for path, rows in self._joined.items() if rows is not None}
        if captures:
            lines = sum(rows.named for rows in captures.values())
            rollouts = sum(rows.conversations_named for rows in captures.values())
            where = f"{len(captures)} token captures" if len(captures) > 1 else str(next(iter(captures)))
            yield f"{where}: {lines} lines were read as the calls of {rollouts} rollouts."

    def rows(self, log: Log) -> CallRows | None:
        """The lines of a token capture; None for any other log."""
        if log.path not in self._joined:
            settings, first = self._settings, None
            stated = settings.columns or settings.rows_at or settings.format not in (None, CAPTURE)
            if not stated and log.kind in ("lines", "objects"):
                first = next((raw.value for raw in open_log(log.path) if raw.value is not None), None)
            capture = first is not None and is_capture(first)
            self._joined[log.path] = CallRows([log], CaptureKey()) if capture else None
        return self._joined[log.path]


def joined_notices(rows: CallRows, read: CallReader) -> list[str]:
    """How many rows became how many conversations, by what, and what stayed as it was."""
    where = f"{rows.paths[0]}" if len(rows.paths) == 1 else f"{len(rows.paths)} logs"
    path = read.stated or key_of_format(rows)
    by_name: list[str] = []
    if path is not None:
        conversations = rows.conversations_named
        by_name.append(
            f"{_rows(rows.named)} read as the calls of {many(conversations, 'conversation')}, by `{path}`"
        )
        if conversations > len(np.unique(np.frombuffer(rows.keys, np.uint64))):
            by_name.append(
                f"calls with the same `{path}` but another format, model, tools or template arguments are "
                "separate conversations"
            )
        if read.stated is not None and rows.unnamed and rows.joined is None:
            by_name.append(f"{many(rows.unnamed, 'row')} without it stay{_s(rows.unnamed)} separate")
        if read.stated is not None and rows.others:
            by_name.append(
                f"{many(rows.others, 'row')} with it {'is' if rows.others == 1 else 'are'} not a "
                f"single call and stay{_s(rows.others)} as {'it is' if rows.others == 1 else 'they are'}"
            )
    by_history: list[str] = []
    if rows.joined is not None:
        joined, conversations = count_joined(rows.joined.of)
        alone, unsure = len(rows.joined.of) - joined, rows.joined.unsure
        if not joined and read.stated is not None:
            by_history.append(
                f"{_rows(alone, 'has', 'have')} no `{read.stated}` and continue{_s(alone)} no other call"
            )
        elif not joined and alone > 1 and (len(unsure) or rows.forms[1:] != ["generic"]):
            # Not said of rows of plain columns, which may just as well be whole rollouts of one call.
            by_history.append(f"{_rows(alone, 'is', 'are')} a single call each; none continues another")
        elif joined:
            ways = {JoinedBy.KEY: f"`{read.found_key}`"}
            if not rows.joined.keys_believed:
                ways |= {JoinedBy.IDS: "token ids", JoinedBy.MESSAGES: "messages", JoinedBy.TEXT: "text"}
                ways = {by: words for by, words in ways.items() if by in rows.joined.by}
            of, by = many(conversations, "conversation"), listed([*ways.values()])
            by_history.append(f"{_rows(joined)} read as the calls of {of}, by {by}")
            if alone:
                by_history.append(f"{many(alone, 'call')} {'is' if alone == 1 else 'are'} joined to no other")
            if len(unsure):
                file, (index, _) = rows.place(rows.traced[int(unsure[0])])
                first = f"{rows.paths[file]}:{index}"
                by_history.append(f"{len(unsure):,} could continue more than one call (first {first})")
    stay = "stays as it is" if rows.several == 1 else "stay as they are"
    several = f"{_rows(rows.several, 'holds', 'hold')} several calls or choices and {stay}"
    notices = [by_name, [*by_history, *([several] if rows.several else [])]]
    return [f"{where}: {'; '.join(each)}." for each in notices if each]


def key_of_format(rows: CallRows) -> str | None:
    """The key by which rows were joined because their format names it; None if there are no such rows."""
    if not rows.named:
        return None
    own = (format_named(form).conversation for form in rows.forms[1:])
    return next((key for key in own if key), None)


def _rows(count: int, singular: str = "was", plural: str = "were") -> str:
    """`1 row was`, `3 rows were`."""
    return f"{many(count, 'row')} {singular if count == 1 else plural}"


def _s(count: int) -> str:
    """The end of a verb: `1 row stays`, `3 rows stay`."""
    return "s" * (count == 1)


def count_joined(of: NDArray[np.integer]) -> tuple[int, int]:
    """How many calls are joined to others, and into how many conversations; `of` `[N]`: each one's first call."""
    sizes = np.bincount(of, minlength=1)
    return int(sizes[sizes > 1].sum()), int((sizes > 1).sum())
