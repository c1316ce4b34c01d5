"""Rows in memory in chunks, which carry the rows to other processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tito_audit.storage.chunk import Chunk, Reading
from tito_audit.storage.held import Part
from tito_audit.storage.in_memory import RowsInMemory, seed_of_rows, spans
from tito_audit.storage.log import Log
from tito_audit.storage.row import RawRow
from tito_audit.storage.sampling import Sample


def chunks_in_memory(log: Log, path: RowsInMemory, size: int) -> Iterator[Chunk]:
    """The rows in chunks of about `size` bytes."""
    content, limit = path.content, log.max_row_bytes
    seed = seed_of_rows(content) if log.share is not None else 0
    for start, stop in spans(content, size):
        done = log.size * stop // len(content)
        if log.share is None:
            yield _Part(path, limit, done, content.part(start, stop), stop - start)
            continue
        taken = Sample(log.share).among(seed, start, stop - start)
        part, numbers = content.part(start, stop, taken), taken.tolist()
        yield _Part(path, limit, done, part, stop - start, numbers, share=log.share)


@dataclass(slots=True)
class _Part(Chunk):
    """Consecutive rows, or those of them that a sample takes."""

    part: Part
    size: int
    numbers: list[int] | None = None
    """The numbers of the sampled rows; None: all rows."""

    def rows(self, reading: Reading) -> Iterator[RawRow]:
        """The rows."""
        numbers = range(self.size) if self.numbers is None else self.numbers
        for passed, row in enumerate(self.part.rows(numbers, self.limit)):
            if reading.sample is not None:
                reading.sample.left_out = row.index - passed
            yield row
        reading.size = self.size
        if reading.sample is not None:
            reading.sample.left_out, reading.sample.last = self.size - len(numbers), self.size - 1
