"""Tables in chunks: row groups of Parquet, or batches of large ones; record batches of Arrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tito_audit.storage.arrow import open_arrow, parts_of_batch, seed_of_batch
from tito_audit.storage.chunk import Broken, Chunk, Pieces, Reading
from tito_audit.storage.log import Log
from tito_audit.storage.parquet import batches_of, open_parquet, sampled_of_group, seed_of_group
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.row import RawRow
from tito_audit.storage.sampling import Sample
from tito_audit.storage.streams import Damaged
from tito_audit.storage.table_rows import rows_of_batch, take_rows

_GROUPS = 8
"""A row group of up to this many chunks is read by the process that audits it; larger ones are sent in batches."""
_MANY = 8
"""Of a remote file with so many row groups each is fetched by the process that audits it."""
_UNLIMITED = 1 << 62


def chunks_of_parquet(log: Log, size: int) -> Iterator[Chunk]:
    """The file in chunks of about `size` bytes."""
    remote = isinstance(log.path, RemoteFile)
    small = _SmallGroups(log)
    with open_parquet(log.path, quick=log.quick) as file:
        total, read = max(file.metadata.num_rows, 1), 0
        for group in range(file.num_row_groups):
            about = file.metadata.row_group(group)

            def done(rows: int) -> int:
                return int(log.size * rows / total)

            if about.total_byte_size <= _GROUPS * size or (remote and file.num_row_groups >= _MANY):
                first, read = read, read + about.num_rows
                small.add(group, first, about, done(read))
                if small.bytes >= size or remote:
                    yield from small.chunk()
                continue
            yield from small.chunk()
            try:
                for batch in batches_of(file, group):
                    if log.share is None:
                        yield from _chunks_of_batch(log, batch, size, read, done)
                    else:
                        chosen = Sample(log.share).among(seed_of_group(about), read, batch.num_rows)
                        yield from _chunks_of_sample(log, batch, chosen, size, done(read + batch.num_rows))
                    read += batch.num_rows
            except Damaged as damage:
                yield Broken(log.path, log.max_row_bytes, log.size, str(damage))
                return
    yield from small.chunk()


class _SmallGroups:
    """Row groups that go into one chunk."""

    def __init__(self, log: Log) -> None:
        self.bytes = 0
        self._log = log
        self._first: tuple[int, int] | None = None
        """The first row group, and its first row."""
        self._next = self._done = 0

    def add(self, group: int, first: int, about: Any, done: int) -> None:
        """Add the next row group."""
        self._first = self._first or (group, first)
        self._next, self._done = group + 1, done
        self.bytes += about.total_byte_size

    def chunk(self) -> Iterator[Chunk]:
        """All of them as a chunk, if there are any; starts the next one empty."""
        log = self._log
        if self._first is not None:
            group, first = self._first
            groups = range(group, self._next)
            yield _Groups(log.path, log.max_row_bytes, self._done, groups, first, log.quick, share=log.share)
        self.bytes, self._first = 0, None


def chunks_of_arrow(log: Log, size: int) -> Iterator[Chunk]:
    """The file in chunks of about `size` bytes: small record batches together, large ones in slices."""
    read = 0
    small = _SmallBatches(log)
    with open_arrow(log.path) as file:
        try:
            for batch, _, share in file.batches():
                done = int(log.size * share)
                chosen = None
                if log.share is not None:
                    chosen = Sample(log.share).among(seed_of_batch(batch), read, batch.num_rows)
                read += batch.num_rows
                if batch.nbytes <= min(size // 2, log.max_row_bytes):
                    small.add(batch, chosen, done)
                    if small.bytes >= size:
                        yield from small.chunk()
                    continue
                yield from small.chunk()
                yield from _chunks_of_large_batch(log, batch, chosen, size, done)
                del batch  # the next is read into its place
        except Damaged as damage:
            yield from small.chunk()
            yield Broken(log.path, log.max_row_bytes, log.size, str(damage))
            return
        yield from small.chunk()


class _SmallBatches:
    """Small record batches that go into one chunk."""

    def __init__(self, log: Log) -> None:
        self.bytes = 0
        self._log = log
        self._batches: list[Any] = []
        self._numbers: list[int] | None = None if log.share is None else []
        self._rows = self._done = 0

    def add(self, batch: Any, chosen: Any, done: int) -> None:
        """Add a record batch, of which these rows are sampled; None: all."""
        if self._numbers is not None:
            self._numbers += (self._rows + chosen).tolist()
        self._batches.append(batch if chosen is None else take_rows(batch, chosen))
        self._rows += batch.num_rows
        self._done = done
        self.bytes += batch.nbytes

    def chunk(self) -> Iterator[Chunk]:
        """All of them as a chunk, if they have rows; starts the next one empty."""
        log = self._log
        if self._rows:
            data = _streamed(*self._batches)
            yield _Batch(log.path, log.max_row_bytes, self._done, data, self._rows, self._numbers, share=log.share)
        self.bytes = self._rows = 0
        self._batches = []
        self._numbers = None if log.share is None else []


def _chunks_of_large_batch(log: Log, batch: Any, chosen: Any, size: int, done: int) -> Iterator[Chunk]:
    start = 0
    for part in parts_of_batch(batch):
        if chosen is None:
            yield from _chunks_of_batch(log, part, size, 0, lambda _: done)
        else:
            here = chosen[(chosen >= start) & (chosen < start + part.num_rows)] - start
            yield from _chunks_of_sample(log, part, here, size, done)
        start += part.num_rows


@dataclass(slots=True)
class _Groups(Chunk):
    """Consecutive row groups of a Parquet file."""

    groups: range
    first: int
    """Their first row, counted in the file."""
    quick: bool

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """Their rows, batch by batch."""
        with open_parquet(self.path, quick=self.quick) as file:
            for group in self.groups:
                if reading.sample is not None:
                    at, sample = self.first + reading.size, reading.sample
                    yield from sampled_of_group(file, group, reading.size, at, self.limit, sample, threads=False)
                    reading.size += file.metadata.row_group(group).num_rows
                    continue
                for batch in batches_of(file, group, threads=False):
                    numbers = range(reading.size, reading.size + batch.num_rows)
                    yield from rows_of_batch(batch, numbers, self.limit)
                    reading.size += batch.num_rows


@dataclass(slots=True)
class _Batch(Chunk):
    """Rows of a table as an Arrow stream, none of them over the limit."""

    data: bytes
    size: int
    numbers: list[int] | None = None
    """The numbers of its rows, if a sample left out others between them; None: consecutive."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """The rows."""
        import pyarrow as pa

        numbers = range(self.size) if self.numbers is None else self.numbers
        with pa.ipc.open_stream(self.data) as stream:
            passed = 0
            for batch in stream:
                for row in rows_of_batch(batch, numbers[passed : passed + batch.num_rows], _UNLIMITED):
                    if reading.sample is not None:
                        reading.sample.left_out = row.index - passed
                    passed += 1
                    yield row
        reading.size = self.size
        if reading.sample is not None:
            reading.sample.left_out, reading.sample.last = self.size - passed, self.size - 1


def _chunks_of_batch(log: Log, batch: Any, size: int, read: int, done: Callable[[int], int]) -> Iterator[Chunk]:
    stored = batch.nbytes
    # Check here which rows are too long: a row that was sent may have lost empty buffers.
    each = 1 if stored > log.max_row_bytes else max(batch.num_rows * size // max(stored, 1), 1)
    for start in range(0, batch.num_rows, each):
        part = batch.slice(start, each)
        at = done(read + start + part.num_rows)
        if stored > log.max_row_bytes and part.nbytes > log.max_row_bytes:
            yield Pieces(log.path, log.max_row_bytes, at, 1, [(0, None, part.nbytes, True, 0)])
            continue
        yield _Batch(log.path, log.max_row_bytes, at, _streamed(part), part.num_rows)


def _streamed(*batches: Any) -> bytes:
    """Batches with the same schema as an Arrow stream."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _chunks_of_sample(log: Log, batch: Any, chosen: Any, size: int, done: int) -> Iterator[Chunk]:
    """Chunks of the sampled rows of a batch; each chunk reaches up to the first row of the next."""
    limit, share = log.max_row_bytes, log.share
    alone = batch.nbytes > limit
    small = batch.slice(0, 0) if alone else take_rows(batch, chosen)
    each = 1 if alone else max(len(chosen) * size // max(small.nbytes, 1), 1)
    start = before = 0
    for stop in (*range(each, len(chosen), each), len(chosen)):
        end = int(chosen[stop]) if stop < len(chosen) else batch.num_rows
        numbers = (chosen[start:stop] - before).tolist()
        part = batch.slice(before + numbers[0], 1) if alone and numbers else small.slice(start, stop - start)
        if alone and part.nbytes > limit:
            row = (numbers[0], None, part.nbytes, True, numbers[0])
            left_out, last = end - before - 1, end - before - 1
            yield Pieces(log.path, limit, done, end - before, [row], left_out=left_out, last=last, share=share)
        else:
            yield _Batch(log.path, limit, done, _streamed(part), end - before, numbers, share=share)
        start, before = stop, end
