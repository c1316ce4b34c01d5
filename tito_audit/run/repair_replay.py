"""Repair replay: what a repair did with each log, as a journal records it and gives it back."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

from tito_audit.errors import SetupError
from tito_audit.record.finding import Finding, Result
from tito_audit.record.outcome import Outcome
from tito_audit.run.encoders import Encoded
from tito_audit.run.kept import (
    Table,
    read_encoders,
    read_outcome,
    read_results,
    write_outcome,
    write_result,
)
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.once import Once
from tito_audit.run.resume import REPAIR, FinishedLogs, States, logs_hash
from tito_audit.settings.model import RepairSettings
from tito_audit.storage.journal import Finished, Journal

KeptOutcome: TypeAlias = tuple[Outcome, Sequence[bytes]]
"""An outcome, and the lines that it put into the quarantine."""
_PART = 128
"""How many outcomes are recorded at once."""
_NOT_DECIDING = {"force", "quarantine", "choices"}


class RepairRecorder:
    """The logs that an earlier repair finished, and a record of those that this one finishes."""

    def __init__(
        self,
        journal: Journal,
        flow: RowFlow,
        states: States,
        repairs: RepairSettings,
        targets: Mapping[Path, Path],
        once: Once | None,
    ) -> None:
        more: dict[str, object] = {
            "repairs": [
                *(
                    (one.name, getattr(repairs, one.name))
                    for one in fields(repairs)
                    if one.name not in _NOT_DECIDING
                ),
                repairs.quarantine is not None,
                repairs.choices,
            ]
        }
        if once is not None:
            more["logs"] = logs_hash(states)
        self.finished = FinishedLogs(journal, REPAIR, flow, states, more)
        self.journal = journal
        self.kept = _kept(self.finished, flow, targets)
        """The logs that are not repaired again: what was written for them is there."""
        self._targets = targets
        self._file = Path()
        self._encoders: dict[Encoded, None] = {}
        self._told: Sequence[Finding] = ()
        self._table = Table()
        self._rows: list[Any] = []

    def begin(self, file: Path, told: Sequence[Finding]) -> None:
        """Start on a log; `told` are the findings about all of it."""
        self._file, self._told, self._encoders = file, told, {}
        self.journal.begin()

    def encoders(self, encoded: Encoded) -> None:
        """Record what encoded a batch."""
        self._encoders[encoded] = None

    def add(self, outcome: Outcome, moved: Sequence[bytes]) -> None:
        """Record an outcome, and the lines that it put into the quarantine."""
        row: list[Any] = [write_outcome(outcome, self._table)]
        if moved:
            row.append([b64encode(line).decode() for line in moved])
        self._rows.append(row)
        if len(self._rows) >= _PART:
            self._write()

    def finish(self, changed: Sequence[Mapping[str, Any]], notices: Sequence[str]) -> None:
        """Record that the log is repaired, with its changed rows; its file is complete and gets its name next."""
        if self._rows:
            self._write()
        table, told = Table(), None
        if self._told:
            told = write_result(Result(self._told[0].place, None, tuple(self._told), of_log=True), table)
        target = self._targets.get(self._file)
        self.finished.finish(
            self._file,
            target=None if target is None else str(target),
            encoders=list(self._encoders),
            told=told,
            values=table.values,
            changed=changed,
            notices=list(notices),
        )

    def _write(self) -> None:
        self.journal.add({"values": self._table.values, "rows": self._rows})
        self._table, self._rows = Table(), []


def told_by(journal: Journal, finished: Finished, file: Path) -> tuple[Finding, ...]:
    """The findings about the whole of a log that is kept."""
    with journal.reading(finished):
        told, table = finished.said["told"], Table(finished.said["values"])
        results = () if told is None else read_results([told], table, file)
    return tuple(finding for result in results for finding in result.findings)


def encoders_of(journal: Journal, finished: Finished) -> tuple[Encoded, ...]:
    """What encoded the batches of a log that is kept."""
    with journal.reading(finished):
        return read_encoders(finished.said["encoders"])


def kept_outcomes(journal: Journal, finished: Finished, file: Path) -> Iterator[KeptOutcome]:
    """The outcomes of a log that is kept, in order."""
    for part in journal.parts(finished):
        with journal.reading(finished):
            table = Table(part["values"])
            rows = [
                (read_outcome(outcome, table, file), [b64decode(line) for lines in moved for line in lines])
                for outcome, *moved in part["rows"]
            ]
        yield from rows


def changed_in(journal: Journal, finished: Finished) -> tuple[list[dict[str, Any]], list[str]]:
    """The changed rows of a log that is kept, as the JSON report has them, and the notices about its new form."""
    with journal.reading(finished):
        changed = [
            {
                "columns": [str(name) for name in one["columns"]],
                "into": int(one["into"]),
                "rows": [[int(start), int(stop)] for start, stop in one["rows"]],
            }
            for one in finished.said["changed"]
        ]
        return changed, [str(notice) for notice in finished.said["notices"]]


def refuse_model(repairs: RepairSettings) -> None:
    """SetupError if a model takes part in the repair: a journal does not keep what it said."""
    if repairs.choices.rescored is not None:
        raise SetupError(
            "--resume: the scores of a model are not kept with a repair.\n"
            "Leave out --with rescore, or fill the logprobs first: tito-audit rescore -o OUT --resume"
        )


def _kept(finished: FinishedLogs, flow: RowFlow, targets: Mapping[Path, Path]) -> dict[Path, Finished]:
    """The finished logs whose files are there, unchanged.

    Logs with calls of one conversation are written together: all of them are kept, or none.
    """
    kept = {}
    for file, one in finished.found.items():
        target, was = targets.get(file), one.said.get("target")
        if (target is None and was is None) or (
            target is not None and str(target) == was and finished.journal.holds(target, one)
        ):
            kept[file] = one
    joins = {file: join for file in flow.files if (join := flow.groups[str(file)].join) is not None}
    joined = {file: join for file, join in joins.items() if join.joins_logs(file)}
    broken = {id(join) for file, join in joined.items() if file not in kept}
    return {file: one for file, one in kept.items() if file not in joined or id(joined[file]) not in broken}
