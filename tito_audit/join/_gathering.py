"""A log of single calls, as a log of conversations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from tito_audit.errors import StorageError
from tito_audit.join._call_rows import CallRows
from tito_audit.join._calls import CallsOfRollout
from tito_audit.storage import Log, RawRow
from tito_audit.storage.chunk import Chunk, Reading
from tito_audit.storage.lines import ParseRow
from tito_audit.storage.random_access import Ticket, line_at
from tito_audit.storage.sampling import Sample
from tito_audit.storage.spool import row_of, unpacked


class Gathering:
    """The rows of a log: one for each conversation that begins in it, at its first call, and all other rows as
    they are.

    Rows whose conversation began in an earlier log are left out: they are read there.
    """

    def __init__(self, rows: CallRows, log: Log, *, by_key: bool) -> None:
        self._rows = rows
        self._log = log
        self._by_key = by_key

    def __iter__(self) -> Iterator[RawRow]:
        rows, log = self._rows, self._log
        every = rows.rows_of(log.path)
        for row, left_out in self._wanted():
            log.left_out = left_out
            members = rows.members(row)
            raws = [rows.raw(one, log.parse) for one in members]
            files = [str(rows.paths[rows.of_call(one).file]) for one in members]
            yield _gathered_row(raws, files, rows.form(row), log.max_row_bytes, by_key=self._by_key)
            log.position = log.size * (row - every.start) // len(every)
        log.left_out = self._left_out

    def chunks(self, size: int) -> Iterator[Chunk]:
        """The same rows in chunks of about `size` bytes, if rows are roughly equal in length."""
        log = self._log
        every = self._rows.rows_of(log.path)
        each = max(size * len(every) // max(log.size, 1), 1)
        part: list[_Packed] = []
        left_out: list[int] = []
        held = before = 0
        failed: StorageError | None = None
        try:
            for row, passed in self._wanted():
                part.append(self._packed(row))
                left_out.append(passed - before)
                held += len(part[-1].rows)
                if held >= each:
                    done = log.size * (row - every.start) // len(every)
                    yield self._chunk(part, [*left_out, passed - before], done)
                    part, left_out, held, before = [], [], 0, passed
        except StorageError as error:
            failed = error
        if part or self._left_out > before:
            yield self._chunk(part, [*left_out, self._left_out - before], log.size)
        if failed is not None:
            raise failed

    def _wanted(self) -> Iterator[tuple[int, int]]:
        """The first row of each wanted conversation, by number, and how many were left out before it."""
        rows, log = self._rows, self._log
        sample = Sample(log.share) if log.share is not None else None
        self._left_out = 0
        for row in rows.rows_of(log.path):
            if rows.root[row] != row:
                continue
            if log.only is not None and log.only not in map(rows.index, rows.members(row)):
                continue
            if sample is not None:
                before, name, first = sample.left_out, rows.name(row), rows.index(row)
                taken = sample.takes(first, first, name, len(name))
                self._left_out = sample.left_out
                if taken:
                    yield row, before
            else:
                yield row, 0
        if log.path in rows.failed:
            raise rows.failed[log.path]

    def _chunk(self, part: Sequence[_Packed], left_out: Sequence[int], done: int) -> Chunk:
        log = self._log
        chunk = _Gathered(
            log.path, log.max_row_bytes, done, self._rows.paths, part, log.parse, self._by_key, share=log.share
        )
        if log.share is not None:
            chunk.left_out = left_out
        return chunk

    def _packed(self, row: int) -> _Packed:
        rows = self._rows
        places = [rows.of_call(one) for one in rows.members(row)]
        return _Packed(
            rows.form(row),
            [(place.file, place.ticket, rows.readers[place.file].packed(place.ticket)) for place in places],
        )


@dataclass(frozen=True, slots=True)
class _Packed:
    """The rows of a conversation as sent to another process."""

    form: str
    rows: Sequence[tuple[int, Ticket, bytes | None]]
    """For each, the number of its file, its ticket, and its spool entry; None where it is read in place."""


@dataclass(slots=True)
class _Gathered(Chunk):
    """A chunk of conversations, numbered as in the file."""

    files: Sequence[Path]
    groups: Sequence[_Packed]
    parse: ParseRow
    by_key: bool
    left_out: Sequence[int] = field(default=())
    """How many conversations are left out before each, and in total; () if none are."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """One row for each conversation; the size of the reading stays 0: rows are numbered as in the file."""
        with ExitStack() as stack:
            opened: dict[int, BinaryIO] = {}
            for number, group in enumerate(self.groups):
                if reading.sample is not None:
                    reading.sample.left_out = self.left_out[number]
                raws = [self._raw(one, opened, stack) for one in group.rows]
                files = [str(self.files[file]) for file, _, _ in group.rows]
                yield _gathered_row(raws, files, group.form, self.limit, by_key=self.by_key)
        if reading.sample is not None:
            reading.sample.left_out = self.left_out[-1]

    def _raw(self, row: tuple[int, Ticket, bytes | None], opened: dict[int, BinaryIO], stack: ExitStack) -> RawRow:
        file, ticket, entry = row
        if entry is not None:
            return row_of(unpacked(entry), self.parse)
        if file not in opened:
            opened[file] = stack.enter_context(self.files[file].open("rb"))
        return line_at(opened[file], ticket, self.limit, self.parse)


def _gathered_row(raws: Sequence[RawRow], files: Sequence[str], form: str, limit: int, *, by_key: bool) -> RawRow:
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
