"""Repair output: which files a repair may replace, and what it writes for each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tito_audit.errors import SetupError
from tito_audit.join import lines_of
from tito_audit.record.finding import Severity
from tito_audit.record.outcome import COLUMN
from tito_audit.run.repair_tasks import unpacked
from tito_audit.run.row_repair import RepairedRow
from tito_audit.storage import (
    Name,
    Output,
    Quarantine,
    RawRow,
    RowsInMemory,
    allow_open_files,
    dataset_metadata,
    memory_targets,
    output_path,
    refuse_taken,
    same_place,
    target_paths,
)
from tito_audit.storage.atomic import Sealed
from tito_audit.storage.journal import Journal


@dataclass(frozen=True, slots=True)
class Writes:
    """Which files a run may replace, and a record of those that it writes."""

    force: bool
    journal: Journal | None

    def replaces(self, target: Path) -> bool:
        """Whether a file may be replaced: any if forced, else one that this journal's runs wrote."""
        return self.force or (self.journal is not None and self.journal.is_ours(target))

    def refuse_taken(self, targets: Mapping[Path, Path]) -> None:
        """StorageError if one of the files to write exists and may not be replaced."""
        ours = {file: target for file, target in targets.items() if self.replaces(target)}
        others = {file: target for file, target in targets.items() if file not in ours}
        for mine, overwrite in ((ours, True), (others, False)):
            refuse_taken(mine, overwrite=overwrite)

    @property
    def sealed(self) -> Sealed | None:
        """What is called for each file that is complete, before it gets its name."""
        return None if self.journal is None else self.journal.wrote


def targets_of(
    logs: Sequence[Name], files: Sequence[Path], out: Path | None, writes: Writes
) -> Mapping[Path, Path]:
    """The file to write for each log; rows in memory without an `out` are their own target.

    {} in a dry run. SetupError or StorageError if a file may not be written.
    """
    rows = [file for file in files if isinstance(file, RowsInMemory)]
    if out is None:
        return {file: file for file in rows}
    if rows:
        targets, metadata = memory_targets(rows, out), dict[Path, Path]()
    else:
        names = list(map(str, logs))
        targets = target_paths(names, files, out)
        metadata = dataset_metadata(names, targets)
    writes.refuse_taken({**targets, **metadata})
    return targets


@contextmanager
def opened_quarantine(name: str, targets: Mapping[Path, Path], writes: Writes) -> Iterator[Quarantine]:
    """The quarantine of a run; SetupError if the run reads or writes that file."""
    place = output_path(name)
    if any(same_place(place, one) for one in (*targets, *targets.values())):
        raise SetupError(f"--quarantine: this run already reads or writes {place}; name another file.")
    with Quarantine.opened(place, overwrite=writes.replaces(place), sealed=writes.sealed) as quarantine:
        allow_open_files(len(targets))
        yield quarantine


def write_row(raw: RawRow, repaired: RepairedRow, out: Output, quarantine: Quarantine | None) -> list[bytes]:
    """Write a row as repaired; the lines that went to the quarantine instead."""
    moved: list[bytes] = []
    outcome = repaired.outcome
    if outcome.quarantined is not None:
        if quarantine is None:
            raise SetupError(f"{outcome.place}: `drop` removes rows and needs --quarantine FILE to keep them.")
        codes = sorted({f.code for r in outcome.before for f in r.findings if f.severity > Severity.NOTE})
        for line in lines_of(unpacked(raw)):
            said = {COLUMN: {"quarantined": outcome.quarantined, "codes": codes}}
            moved.append(quarantine.add(line, outcome.place, said))
        out.replace(raw, [])
    elif repaired.rows is None:
        out.keep(raw)
    else:
        out.replace(replace(raw, value=repaired.logged), repaired.rows)
    return moved
