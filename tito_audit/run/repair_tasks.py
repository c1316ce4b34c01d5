"""Repair tasks: batches of rows that go out to be repaired, and what comes back for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tito_audit.record.outcome import Outcome
from tito_audit.record.rollout import Place
from tito_audit.run.encoders import Encoded
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.parallel import bare
from tito_audit.run.row_repair import Proven, RepairedRow, RowRepair
from tito_audit.settings.model import RepairSettings
from tito_audit.storage import Log, RawRow
from tito_audit.storage.row import parse_json

__all__ = ["Batch", "Ended", "RepairBatch", "Started", "Task", "planned", "unpacked"]


@dataclass(frozen=True, slots=True)
class Started:
    """The rows from here on are those of this log."""

    file: Path
    log: Log


@dataclass(frozen=True, slots=True)
class Ended:
    """All rows of the log were given."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of a log that follow one another, as they wait to be written; as text it says where they lie."""

    file: Path
    rows: Sequence[RawRow]
    position: int
    """Bytes of the log that were read by then."""

    def __str__(self) -> str:
        return f"{self.file}, rows {self.rows[0].index} to {self.rows[-1].index}"


@dataclass(frozen=True, slots=True)
class Task:
    """The same rows as they go out."""

    file: Path
    rows: Sequence[RawRow]
    known: Proven | None
    """What their log proves; None while nobody has asked it."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """What comes back for a batch."""

    rows: Sequence[RepairedRow | None]
    """None for a row that waits for what its log proves."""
    encoders: Encoded


Part: TypeAlias = Started | Batch | Ended | Exception


def planned(
    flow: RowFlow, proven: Mapping[Path, Proven], size: int | None, *, keep_text: bool
) -> Iterator[tuple[Part, Task | None]]:
    """The rows of all logs in batches of about `size` bytes, packed to go out; None: row by row, as they are.

    An error while a log is read ends them with it, so that it is raised behind the rows before it.
    """
    for file in flow.files:
        group = flow.groups[str(file)]
        try:
            log = group.open(file, keep_text=keep_text or size is not None)
            yield Started(file, log), None
            for rows in _batches(group.rows(log), size or 0):
                task = Task(file, rows if size is None else [_packed(raw) for raw in rows], proven.get(file))
                kept = rows if size is None else [_light(raw) for raw in rows]
                yield Batch(file, kept, log.position), task
            yield Ended(), None
        except Exception as error:
            yield error, None
            return


@dataclass(slots=True)
class RepairBatch:
    """The repair of batches of rows."""

    flow: RowFlow
    repairs: RepairSettings
    writes: bool
    """Whether rows are written; else only what becomes of them is said."""
    bare: bool
    """Whether rollouts of rows that stay as they are hold their place and format only."""
    _by_group: dict[str, RowRepair] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return RepairBatch, (self.flow, self.repairs, self.writes, self.bare)

    def __call__(self, task: Task) -> Repaired:
        """What becomes of each row."""
        rows = [self.row(task.file, raw, task.known) for raw in task.rows]
        return Repaired(rows, self.flow.encoders.here())

    def row(self, file: Path, raw: RawRow, known: Proven | None) -> RepairedRow | None:
        """What becomes of one row; None when what its log proves has to be known first."""
        raw = unpacked(raw)
        found = self._repair(str(file)).repaired(raw, Place(str(file), raw.index), known)
        if found is None:
            return None
        outcome = _bare(found.outcome) if self.bare else found.outcome
        return replace(found, outcome=outcome) if self.writes else RepairedRow(outcome)

    def _repair(self, file: str) -> RowRepair:
        if file not in self._by_group:
            group = self.flow.group(file)
            same = (one for one in self._by_group.values() if one.group is group)
            self._by_group[file] = next(same, None) or RowRepair(group, self.repairs)
        return self._by_group[file]


def _bare(outcome: Outcome) -> Outcome:
    """The outcome with bare rollouts where nothing changed in them."""
    if outcome.repaired or outcome.quarantined is not None:
        return outcome
    return replace(outcome, before=tuple(map(bare, outcome.before)), after=tuple(map(bare, outcome.after)))


def _batches(rows: Any, size: int) -> Iterator[list[RawRow]]:
    held, bytes_ = [], 0
    for raw in rows:
        held.append(raw)
        bytes_ += len(raw.text) if raw.text is not None else _weight(raw.value)
        if bytes_ >= size:
            yield held
            held, bytes_ = [], 0
    if held:
        yield held


def _weight(value: Any) -> int:
    """How many bytes a value is, about."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(_weight, value.values()))
    if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        return sum(map(_weight, value))
    return 8 * len(value) if isinstance(value, str | bytes | list | tuple) else 8


def _packed(raw: RawRow) -> RawRow:
    """A row as it goes out: its text where it has one, else its value, and nothing of the file around it."""
    if raw.value is not None and raw.text is not None:
        return RawRow(raw.index, None, None, raw.text)
    return RawRow(raw.index, raw.value, raw.error, b"" if raw.of_text else None)


def unpacked(raw: RawRow) -> RawRow:
    """The row that was packed, or that is light."""
    if raw.value is None and raw.error is None:
        return replace(raw, value=parse_json(raw.text or b""))
    return raw


def _light(raw: RawRow) -> RawRow:
    """A row as it waits: without the value that its text says as well."""
    return replace(raw, value=None) if raw.value is not None and raw.text is not None else raw
