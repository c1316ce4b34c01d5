"""The first pass over logs of calls, in any process: what is kept of each row."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from tito_audit.join._reader import ReadCall
from tito_audit.join.history import Trace, Tracer
from tito_audit.storage.random_access import Batch
from tito_audit.storage.streams import ParseRow

__all__ = ["BATCH_BYTES", "Answers", "Batch", "BatchSaid", "Mapped", "ReadBatch", "Work", "one_by_one"]

BATCH_BYTES = 1 << 20
"""About how many bytes of rows are read at once."""


@dataclass(slots=True)
class BatchSaid:
    """What the rows of a batch say about themselves."""

    lines: int = 0
    """How many lines it has; 0 if its rows are already numbered."""
    index: array[int] = field(default_factory=lambda: array("I"))
    places: list[int | bytes] = field(default_factory=list)
    """Where each row is: the byte offset of its line, or an entry for the spool."""
    calls: list[tuple[str, int | None, int, Trace | None] | None] = field(default_factory=list)
    """Format, key, name and trace of each row that is a call; None for any other."""
    unnamed: int = 0
    """Rows without the key that reliably names a conversation."""
    others: int = 0
    """Rows with it that are not a single call."""
    several: int = 0
    """Rows without it that hold several calls or choices."""


Work: TypeAlias = Callable[[Batch], BatchSaid]
Answers: TypeAlias = Generator[tuple[int, BatchSaid | None], None, None]
Mapped: TypeAlias = Callable[[Work, Iterable[tuple[int, Batch]]], Answers]
"""Runs work on batches of files, given by number, in one process or several; answers come in order."""


def one_by_one(work: Work, batches: Iterable[tuple[int, Batch]]) -> Answers:
    """The work done in this process."""
    for number, batch in batches:
        yield number, work(batch)


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Reads the rows of a batch and keeps what they say about themselves."""

    read: ReadCall
    tracer: Tracer
    parse: ParseRow

    def __call__(self, batch: Batch) -> BatchSaid:
        """What its rows say."""
        said = BatchSaid()
        for place, raw in batch.rows(self.parse):
            said.lines += isinstance(place, int)
            if raw is None:
                continue
            said.index.append(raw.index)
            said.places.append(place)
            if raw.value is None:
                said.calls.append(None)
                continue
            row = self.read(raw.value)
            call = row.call
            said.unnamed += not row.named
            said.others += row.named and call is None
            said.several += row.several and not row.named
            if call is None:
                said.calls.append(None)
                continue
            trace = None if call.traits is None else self.tracer.trace(call.traits)
            said.calls.append((call.form, call.key, call.name, trace))
        return said
