"""CallRows: the rows of several logs that are single calls, and the conversations that they belong to."""

from __future__ import annotations

import pickle
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import StorageError
from tito_audit.format import Row
from tito_audit.join._reader import NO_CALL, ReadCall
from tito_audit.join.history import HistoryIndex, JoinedConversations
from tito_audit.join.traces import CallTraits, Decode, Trace, Tracer
from tito_audit.storage import Log, Output, RawRow
from tito_audit.storage.chunks import RandomAccess, RowBatch, Ticket
from tito_audit.storage.spool import Spool, unpack_entry
from tito_audit.storage.streams import ParseRow

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
