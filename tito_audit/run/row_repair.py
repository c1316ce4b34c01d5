"""Row repair: one row of a log audited, repaired and audited again, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tito_audit.errors import RecordError, SetupError
from tito_audit.evidence.gather import gather
from tito_audit.evidence.judgement import witness
from tito_audit.evidence.model import Evidence
from tito_audit.format import Row
from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.record.outcome import Outcome
from tito_audit.record.rollout import Place
from tito_audit.record.testimony import Reading
from tito_audit.repair import Repair, Safety
from tito_audit.repairs import all_repairs, repair_named
from tito_audit.rules import all_rules
from tito_audit.run.apply_repairs import Audited, Cure, Terms, Written, cure_row
from tito_audit.run.auditor import Auditor, counts_of, unreadable
from tito_audit.run.check import check
from tito_audit.run.rows import LogGroup, ReadRow
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage.row import RawRow
from tito_audit.version import VERSION

__all__ = ["COLUMN", "Proven", "RepairedRow", "RowRepair", "fails", "strategies"]

COLUMN = "tito_audit"
"""The column of a written row that says what was cured in it by what."""


@dataclass(frozen=True, slots=True)
class Proven:
    """What all rows of a log prove together of how it was written."""

    reading: Reading | None
    """None where they prove nothing."""


@dataclass(frozen=True, slots=True)
class RepairedRow:
    """What becomes of a row."""

    outcome: Outcome
    rows: tuple[Row, ...] | None = None
    """What to write in its place; None: the row as it was."""
    logged: Row | None = None
    """The row that they were made of, of which they share what did not change."""


class RowRepair:
    """The repair of the rows of a log group, one after the other."""

    def __init__(self, group: LogGroup, repairs: RepairSettings) -> None:
        self.group = group
        self.settings = group.settings
        self.repairs = repairs
        self.rules = all_rules()
        self.codes = group.auditor.codes
        self.every = frozenset(rule.code for rule in self.rules)
        self.terms = Terms(
            strategies(repairs),
            self.rules,
            _threshold(group.settings, repairs),
            self.codes,
            repairs.unsafe,
            repairs.choices,
        )
        self._judge: Auditor | None = None

    def repaired(self, raw: RawRow, place: Place, known: Proven | None) -> RepairedRow | None:
        """What becomes of a row; None when what its log proves has to be known first."""
        try:
            read = self.group.read(raw, place)
            audited = self._audit(read, self.group.auditor)
            settled = not any(_open(one.evidence) for one in audited)
            if not settled and known is None:
                return None
            reading = known.reading if known is not None and not settled else None
            if reading is not None:
                audited = self._audit(read, self.group.auditor, reading)
        except RecordError as error:
            return RepairedRow(self._left(place, (unreadable(place, str(error), self.codes),)))
        before = tuple(self._shown(one.result) for one in audited)
        if not self._to_do(before):
            return RepairedRow(self._left(place, before))
        assert raw.value is not None
        return self._cured(raw, raw.value, place, read, audited, reading)

    def _cured(
        self,
        raw: RawRow,
        logged: Row,
        place: Place,
        read: ReadRow,
        audited: Sequence[Audited],
        reading: Reading | None,
    ) -> RepairedRow:
        # What the log proves of its rows as they were, a repaired row has to have behind it.
        proven = None if reading is None else Reading()

        def again(row: Row) -> list[Audited]:
            rollouts = self.group.again(read.format, row, place, logged)
            return self._audit(replace(read, row=row, rollouts=rollouts), self._by_reference(), proven)

        cure = cure_row(read.row, read.format, audited, again, self.terms)
        outcome = self._outcome(place, tuple(self._shown(one.result) for one in audited), cure)
        if outcome.quarantined is not None or not cure.cured:
            return RepairedRow(outcome)
        # A table has columns of a fixed kind, and nothing reads its rows as strictly as a document.
        inside = read.format.open_object if raw.of_text else ""
        rows = tuple(self._row(logged, one, number, outcome, inside) for number, one in enumerate(cure.rows))
        return RepairedRow(outcome, rows, logged)

    def _by_reference(self) -> Auditor:
        """What judges a repair: no row is proven by an encoder that may be wrong."""
        if self._judge is None:
            self._judge = self.group.auditor.by_reference()
        return self._judge

    def _outcome(self, place: Place, before: tuple[Result, ...], cure: Cure) -> Outcome:
        after = tuple(self._shown(one.result) for written in cure.rows for one in written.audited)
        open_ = self._failing(after)
        because = cure.left_out
        if because is None and open_ and self.repairs.quarantine is not None:
            because = f"no repair cured {', '.join(sorted({finding.code for finding in open_}))}"
        return Outcome(
            place,
            before,
            after if because is None else (),
            cured=dict(cure.cured),
            declined=dict(cure.declined) if open_ else {},
            needs_unsafe=frozenset(cure.needs_unsafe) if open_ else frozenset(),
            notes=tuple(cure.notes),
            costs=tuple(cure.costs),
            more_tokens=cure.more_tokens if because is None else 0,
            rows=len(cure.rows) if because is None else 0,
            quarantined=because,
        )

    def _row(self, original: Row, written: Written, number: int, outcome: Outcome, inside: str) -> Row:
        """One row as it goes into the file, with its provenance in itself or in the object `inside` it."""
        row = self.group.as_logged(original, written.row)
        if not self.repairs.provenance:
            return row
        said: dict[str, object] = {
            "version": VERSION,
            "cured": {name: list(codes) for name, codes in outcome.cured.items()},
        }
        if outcome.rows > 1:
            said["part"] = {"number": number, "of": outcome.rows}
        if outcome.notes:
            said["notes"] = list(outcome.notes)
        was = original.get(inside) or {} if inside else original
        if was.get(COLUMN) is not None:
            said["before"] = was[COLUMN]
        return {**row, inside: {**was, COLUMN: said}} if inside else {**row, COLUMN: said}

    def _audit(self, read: ReadRow, auditor: Auditor, log_reading: Reading | None = None) -> list[Audited]:
        """The rollouts of a row with everything that every rule finds in them."""
        audited = []
        for rollout in read.rollouts:
            evidence = gather(rollout, auditor.tokenizer, auditor.renderer, auditor.speakers, log_reading)
            findings, skips = check(evidence, self.rules, self.every, all_repairs)
            result = Result(rollout.place, evidence.rollout, findings, skips, counts_of(evidence))
            audited.append(Audited(evidence, result))
        return audited

    def _left(self, place: Place, results: tuple[Result, ...]) -> Outcome:
        """A row that no repair is asked about."""
        fails = self._failing(results)
        because = None
        if fails and self.repairs.quarantine is not None:
            because = f"no repair cures {', '.join(sorted({finding.code for finding in fails}))}"
        kept = results if because is None else ()
        return Outcome(place, results, kept, rows=1 if because is None else 0, quarantined=because)

    def _shown(self, result: Result) -> Result:
        """A result with the selected codes only."""
        return Result(
            result.place,
            result.rollout,
            tuple(finding for finding in result.findings if finding.code in self.codes),
            tuple(skip for skip in result.skips if skip.code in self.codes),
            result.counts,
        )

    def _to_do(self, results: Sequence[Result]) -> bool:
        if any(repair.chosen(self.terms.choices) for repair in self.terms.repairs):
            return True
        return any(f.severity >= self.terms.threshold for result in results for f in result.findings)

    def _failing(self, results: Sequence[Result]) -> list[Finding]:
        return [finding for result in results for finding in fails(self.settings, result)]


def fails(settings: Settings, result: Result) -> Iterator[Finding]:
    """The findings of a result that fail a run with these settings."""
    bar = Severity.bar(settings.fail_on)
    return (finding for finding in result.findings if bar is not None and finding.severity >= bar)


def _open(evidence: Evidence) -> bool:
    """Whether the row leaves several readings open, of which its log may prove one."""
    said = witness(evidence)
    return said is not None and len(said.possible) > 1


def strategies(repairs: RepairSettings) -> tuple[Repair, ...]:
    """The repairs of a run in their order; SetupError for one that may not run."""
    if not repairs.strategies:
        safe = (repair for repair in all_repairs() if repairs.unsafe or repair.safety is not Safety.UNSAFE)
        return tuple(repair for repair in safe if not repair.removes_rows or repairs.quarantine is not None)
    chosen = tuple(repair_named(name) for name in dict.fromkeys(repairs.strategies))
    for repair in chosen:
        if repair.safety is Safety.UNSAFE and not repairs.unsafe:
            raise SetupError(
                f"--with {repair.name}: {repair.title[0].lower()}{repair.title[1:]}, which is unsafe.\n"
                "It changes or leaves out what was recorded, not only where it stands.\n"
                f"Add --unsafe to let it run; `tito-audit explain {repair.name}` says what it costs."
            )
        if repair.removes_rows and repairs.quarantine is None:
            raise SetupError(
                f"--with {repair.name}: there is no place for the rows that it leaves out.\n"
                "Nothing recorded may be lost.\nAdd --quarantine FILE."
            )
    return chosen


def _threshold(settings: Settings, repairs: RepairSettings) -> Severity:
    """How bad a finding has to be to be acted on: what fails the gate; warnings too for named repairs."""
    fails = {"warning": Severity.WARNING, "note": Severity.WARNING}.get(settings.fail_on, Severity.ERROR)
    return Severity.WARNING if repairs.strategies else fails
