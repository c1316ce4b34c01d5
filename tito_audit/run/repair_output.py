"""Repair output: which files a repair may replace, and what it writes for each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tito_audit.errors import SetupError
from tito_audit.join import lines_of
from tito_audit.record.finding import Severity
from tito_audit.run.repair_tasks import unpacked
from tito_audit.run.row_repair import COLUMN, RepairedRow
from tito_audit.storage import Output, Quarantine, RawRow, refuse_taken
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
