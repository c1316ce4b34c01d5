"""Repair tasks: batches of rows sent out to be repaired, and the answers that come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tito_audit.record.outcome import Outcome
from tito_audit.record.rollout import Place
from tito_audit.run.encoders import Encoded
from tito_audit.run.log_groups import Garbage, RowFlow
from tito_audit.run.once import Once
from tito_audit.run.parallel import bare
from tito_audit.run.row_repair import Again, RepairedRow, RowRepair
from tito_audit.settings.model import RepairSettings
from tito_audit.storage import Log, RawRow
from tito_audit.storage.journal import Finished
from tito_audit.storage.row import parse_row
from tito_audit.storage.streams import ParseRow


@dataclass(frozen=True, slots=True)
class Started:
    """The batches that follow are those of this log."""

    file: Path
    log: Log


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive rows of a log waiting to be written; as text, where they are."""

    file: Path
    rows: Sequence[RawRow]
    position: int
    """Bytes of the log read by then."""

    def __str__(self) -> str:
        return f"{self.file}, rows {self.rows[0].index} to {self.rows[-1].index}"


@dataclass(frozen=True, slots=True)
class Kept:
    """A log that is not repaired again; no batches follow."""

    file: Path
    recorded: Finished
    """What an earlier run recorded of it."""


Part: TypeAlias = Started | Batch | Kept | None
"""A step through the logs; None: the log has no more rows."""


@dataclass(frozen=True, slots=True)
class Task:
    """The rows of a batch as they are sent out."""

    file: Path
    rows: Sequence[RawRow]
    again: Mapping[int, Again]
    """What the run trains more than once, by row."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """The answer for a batch."""

    rows: Sequence[RepairedRow]
    encoders: Encoded


def planned(
    flow: RowFlow,
    size: int | None,
    *,
    once: Once | None = None,
    keep_text: bool,
    kept: Mapping[Path, Finished] | None = None,
) -> Iterator[tuple[Part, Task | None]]:
    """The rows of all logs in batches of about `size` bytes, packed to be sent; None: one by one, as read.

    Logs that are `kept` are not read.
    """
    for file in flow.files:
        if kept is not None and file in kept:
            yield Kept(file, kept[file]), None
            continue
        group = flow.groups[str(file)]
        log = group.open_kept(file) if keep_text or size is not None else group.open(file)
        yield Started(file, log), None
        for rows in _batches(group.rows(log), size or 0):
            again = {} if once is None else once.again(str(file), [raw.index for raw in rows])
            task = Task(file, rows if size is None else [_packed(raw) for raw in rows], again)
            waiting = rows if size is None else [_without_value(raw) for raw in rows]
            yield Batch(file, waiting, log.position), task
        yield None, None


@dataclass(slots=True)
class RepairBatch:
    """The work: repairs batches of rows."""

    flow: RowFlow
    repairs: RepairSettings
    writes: bool
    """Whether rows are written; if not, answers hold only outcomes."""
    bare: bool
    """Whether rollouts of unchanged rows keep only their place and format."""
    _by_group: dict[str, RowRepair] = field(default_factory=dict)
    _garbage: Garbage = field(default_factory=Garbage)

    def __reduce__(self) -> tuple[Any, ...]:
        return RepairBatch, (self.flow, self.repairs, self.writes, self.bare)

    def __call__(self, task: Task) -> Repaired:
        """Every row of the task, repaired."""
        self.flow.check_seen(task.file)
        rows = []
        for raw in task.rows:
            rows.append(self.row(task.file, raw, task.again.get(raw.index, {})))
            self._garbage.passed(_size(raw))
        return Repaired(rows, self.flow.encoders.here())

    def row(self, file: Path, raw: RawRow, again: Again) -> RepairedRow:
        """One row, repaired."""
        repair = self._repair(str(file))
        repaired = repair.repaired(unpacked(raw, repair.parse), Place(str(file), raw.index), again)
        outcome = _bare(repaired.outcome) if self.bare else repaired.outcome
        return replace(repaired, outcome=outcome) if self.writes else RepairedRow(outcome)

    def _repair(self, file: str) -> RowRepair:
        if file not in self._by_group:
            group = self.flow.group(file)
            same = (one for one in self._by_group.values() if one.group is group)
            self._by_group[file] = next(same, None) or RowRepair(group, self.repairs)
        return self._by_group[file]


def _bare(outcome: Outcome) -> Outcome:
    """The outcome with bare rollouts if the row did not change."""
    if outcome.repaired or outcome.quarantined is not None:
        return outcome
    before = tuple(map(bare, outcome.before))
    after = before if outcome.after is outcome.before else tuple(map(bare, outcome.after))
    return replace(outcome, before=before, after=after)


def _batches(rows: Any, size: int) -> Iterator[list[RawRow]]:
    held, bytes_ = [], 0
    for raw in rows:
        held.append(raw)
        bytes_ += _size(raw)
        if bytes_ >= size:
            yield held
            held, bytes_ = [], 0
    if held:
        yield held


def _size(raw: RawRow) -> int:
    return len(raw.text) if raw.text is not None else _weight(raw.value)


def _weight(value: Any) -> int:
    """The rough size of a value in bytes."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(_weight, value.values()))
    if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        return sum(map(_weight, value))
    return 8 * len(value) if isinstance(value, str | bytes | list | tuple) else 8


def _packed(raw: RawRow) -> RawRow:
    """A row as sent out: its text if it has one, else its value, without the surrounding file."""
    if raw.value is not None and raw.text is not None:
        return RawRow(raw.index, None, None, raw.text)
    return RawRow(raw.index, raw.value, raw.error, b"" if raw.of_text else None)


def _without_value(raw: RawRow) -> RawRow:
    """A row as it waits to be written: without its value if the text holds the same."""
    return replace(raw, value=None) if raw.value is not None and raw.text is not None else raw


def unpacked(raw: RawRow, parse: ParseRow = parse_row) -> RawRow:
    """The row with the value that packing or waiting removed."""
    if raw.value is None and raw.error is None:
        read = parse(raw.index, raw.text or b"")
        return replace(raw, value=read.value, spliced=read.spliced)
    return raw
