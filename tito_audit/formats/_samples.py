"""Training rows written back: for rows that are one sample, and for rows that hold several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._update import at_most_one_each, with_values
from tito_audit.formats._values import as_logged
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout, TrainingRow
from tito_audit.record.sources import CallSource, Source, Sources

ReadSample = Callable[[Row, Place], Rollout]
UpdateSample = Callable[[Row, Rollout, RepairedRollout], Row]


@dataclass(frozen=True, slots=True)
class Samples:
    """A row that holds several samples, split into them."""

    rows: tuple[Row, ...]
    """Each sample as a row of its own."""
    source: Callable[[int, str], Source | None]
    """Where the whole row stores a column of a sample; None if all samples share it."""


def row_written(
    read: Callable[[Row, Place], Sequence[Rollout]],
    written: Callable[[Row, TrainingRow, TrainingRow], Row],
    what: str = "this format's row",
) -> Callable[[Row, Sequence[RepairedRollout]], Sequence[Row]]:
    """The `update` of a format with at most one training row per row; `written` gets the row, before and after."""

    def update(row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
        if not repaired:
            return ()
        before = read(row, repaired[0].rollout.place)
        (one,) = at_most_one_each(before, repaired)
        old, new = before[0].training_row, one.rollout.training_row
        if old is None or new is None:
            if old is not new:
                raise RecordError(f"a training row can neither be added to {what} nor removed")
            return (row,)
        return (written(row, old, new),)

    return update


def sources_in(samples: Samples, rollouts: Sequence[Rollout]) -> list[Sources]:
    """Where a row stores the columns of its samples."""
    found = []
    for number, rollout in enumerate(rollouts):
        names = [column.name for one in (rollout.training_row, *rollout.turns) if one for column in one.columns]
        there = {name: source for name in names if (source := samples.source(number, name)) is not None}
        columns = {name: (source,) for name, source in there.items()}
        found.append(Sources(columns, tuple(CallSource(columns=columns) for _ in rollout.turns)))
    return found


def samples_read(samples: Iterable[Row], place: Place, read: ReadSample) -> tuple[Rollout, ...]:
    """One rollout for each sample; RecordError naming the one that cannot be read."""
    found = []
    for item, sample in enumerate(samples):
        try:
            found.append(read(sample, replace(place, item=item)))
        except RecordError as error:
            raise RecordError(f"sample {item}: {error}") from None
    return tuple(found)


def updated_samples(
    samples: Samples, repaired: Sequence[RepairedRollout], read: ReadSample, update: UpdateSample
) -> list[Row]:
    """The samples with their repaired rollouts."""
    before = samples_read(samples.rows, replace(repaired[0].rollout.place, item=0), read)
    chosen = at_most_one_each(before, repaired)
    return [update(*each) for each in zip(samples.rows, before, chosen, strict=True)]


def put_back(row: Row, samples: Samples, new: Sequence[Row], ids: str) -> Row:
    """The row with its samples' changed columns put back; the same object if none changed.

    A column that a sample lost becomes null for each of its `ids`.
    """
    values: dict[str, Any] = {}
    parts: dict[str, list[tuple[int, int, list[Any]]]] = {}
    for number, (old, sample) in enumerate(zip(samples.rows, new, strict=True)):
        for name, value in sample.items():
            if name in old and value is old[name]:
                continue
            source = samples.source(number, name)
            if source is None:
                raise RecordError(f"column {name!r} is shared by all samples and cannot change for one of them")
            column, *place = source.path
            if source.part is not None:
                own = [None] * len(sample[ids]) if value is None else _plain(value)
                parts.setdefault(str(column), []).append((*source.part, own))
            elif place:
                values.setdefault(str(column), list(row[str(column)]))[int(place[0])] = value
            else:
                values[str(column)] = value
    made = {name: _in_kind(value, row.get(name)) for name, value in values.items()}
    made |= {name: _spliced(row[name], changed) for name, changed in parts.items()}
    return with_values(row, made)


def _spliced(original: Any, parts: Sequence[tuple[int, int, list[Any]]]) -> Any:
    """A list with some ranges of entries replaced."""
    entries = _plain(original)
    for start, end, own in reversed(parts):
        entries[start:end] = own
    return as_logged([entry.item() if isinstance(entry, np.generic) else entry for entry in entries], original)


def _in_kind(values: Any, original: Any) -> Any:
    return np.array(values, original.dtype) if isinstance(original, np.ndarray) else values


def _plain(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)
