"""A Parquet file in chunks: row groups, or batches of those that are large."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tito_audit.storage.choice import Choice
from tito_audit.storage.chunk import Broken, Chunk, Pieces, Reading
from tito_audit.storage.log import Log
from tito_audit.storage.parquet import (
    batches_of,
    chosen_of_group,
    open_parquet,
    rows_of_batch,
    seed_of_group,
    thinned,
)
from tito_audit.storage.row import RawRow
from tito_audit.storage.streams import Damaged

__all__ = ["chunks_of_parquet"]

_GROUPS = 8
"""A row group of up to so many chunks is read where it is audited; of a larger one the batches are handed out."""
_UNLIMITED = 1 << 62


def chunks_of_parquet(log: Log, size: int) -> Iterator[Chunk]:
    """The file in chunks of about `size` bytes."""
    with open_parquet(log.path) as file:
        total, read = max(file.metadata.num_rows, 1), 0
        for group in range(file.num_row_groups):
            about = file.metadata.row_group(group)

            def done(rows: int) -> int:
                return int(log.size * rows / total)

            if about.total_byte_size <= _GROUPS * size:
                first, read = read, read + about.num_rows
                yield _Group(log.path, log.max_row_bytes, done(read), group, first, share=log.share)
                continue
            try:
                for batch in batches_of(file, group):
                    if log.share is None:
                        yield from _of_batch(log, batch, size, read, done)
                    else:
                        taken = Choice(log.share).among(seed_of_group(about), read, batch.num_rows)
                        yield from _of_thinned(log, batch, taken, size, done(read + batch.num_rows))
                    read += batch.num_rows
            except Damaged as damage:
                yield Broken(log.path, log.max_row_bytes, log.size, str(damage))
                return


@dataclass(slots=True)
class _Group(Chunk):
    """A row group of a Parquet file."""

    group: int
    first: int
    """The row of the file that is its first."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """Its rows, batch after batch."""
        with open_parquet(self.path) as file:
            if reading.choice is not None:
                choice = reading.choice
                yield from chosen_of_group(file, self.group, 0, self.first, self.limit, choice, threads=False)
                reading.size = file.metadata.row_group(self.group).num_rows
                return
            for batch in batches_of(file, self.group, threads=False):
                numbers = range(reading.size, reading.size + batch.num_rows)
                yield from rows_of_batch(batch, numbers, self.limit)
                reading.size += batch.num_rows


@dataclass(slots=True)
class _Batch(Chunk):
    """Rows of a Parquet file as an Arrow stream, none of them too long."""

    data: bytes
    size: int
    numbers: list[int] | None = None
    """Of its rows, where others between them were left out; None: one follows the other."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """The rows."""
        import pyarrow as pa

        numbers = range(self.size) if self.numbers is None else self.numbers
        with pa.ipc.open_stream(self.data) as stream:
            passed = 0
            for batch in stream:
                for row in rows_of_batch(batch, numbers[passed : passed + batch.num_rows], _UNLIMITED):
                    if reading.choice is not None:
                        reading.choice.left_out = row.index - passed
                    passed += 1
                    yield row
        reading.size = self.size
        if reading.choice is not None:
            reading.choice.left_out, reading.choice.last = self.size - passed, self.size - 1


def _of_batch(log: Log, batch: Any, size: int, read: int, done: Callable[[int], int]) -> Iterator[Chunk]:
    held = batch.nbytes
    # Which rows are too long is said here: a row that was sent may have lost empty buffers.
    each = 1 if held > log.max_row_bytes else max(batch.num_rows * size // max(held, 1), 1)
    for start in range(0, batch.num_rows, each):
        part = batch.slice(start, each)
        at = done(read + start + part.num_rows)
        if held > log.max_row_bytes and part.nbytes > log.max_row_bytes:
            yield Pieces(log.path, log.max_row_bytes, at, 1, [(0, None, part.nbytes, True, 0)])
            continue
        yield _Batch(log.path, log.max_row_bytes, at, _streamed(part), part.num_rows)


def _streamed(batch: Any) -> bytes:
    """The batch as an Arrow stream."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _of_thinned(log: Log, batch: Any, taken: Any, size: int, done: int) -> Iterator[Chunk]:
    """The rows of a batch that were taken; each chunk goes from one of them to the next chunk's first."""
    limit, share = log.max_row_bytes, log.share
    alone = batch.nbytes > limit
    small = batch.slice(0, 0) if alone else thinned(batch, taken)
    each = 1 if alone else max(len(taken) * size // max(small.nbytes, 1), 1)
    start = before = 0
    for stop in (*range(each, len(taken), each), len(taken)):
        end = int(taken[stop]) if stop < len(taken) else batch.num_rows
        numbers = (taken[start:stop] - before).tolist()
        part = batch.slice(before + numbers[0], 1) if alone and numbers else small.slice(start, stop - start)
        if alone and part.nbytes > limit:
            row = (numbers[0], None, part.nbytes, True, numbers[0])
            left_out, last = end - before - 1, end - before - 1
            yield Pieces(log.path, limit, done, end - before, [row], left_out=left_out, last=last, share=share)
        else:
            yield _Batch(log.path, limit, done, _streamed(part), end - before, numbers, share=share)
        start, before = stop, end
