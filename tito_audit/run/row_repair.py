"""Row repair: one row of a log audited, repaired and audited again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from tito_audit.errors import EncodeError, RecordError, SetupError
from tito_audit.evidence.gather import gather
from tito_audit.evidence.trainings import trainings_of
from tito_audit.evidence.witness import witness
from tito_audit.format import Row
from tito_audit.formats import number_columns
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.record.outcome import COLUMN, Outcome
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.trainings import TrainedAgain
from tito_audit.repair import Repair, Safety
from tito_audit.repairs import all_repairs, repair_named
from tito_audit.rules import all_rules
from tito_audit.run.apply_repairs import Applied, AppliedRow, Audited, RepairTerms, apply_repairs
from tito_audit.run.auditor import TRAINED_ONCE, Auditor, counts_of, uncompared, unencoded, unreadable
from tito_audit.run.check import SINGLE, check
from tito_audit.run.guard import LEAVE_OUT, guarded
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.rows import LogGroup, ReadRow
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage.number_arrays import Splicer
from tito_audit.storage.row import RawRow, parse_row
from tito_audit.version import VERSION

Again: TypeAlias = Mapping[int, tuple[TrainedAgain, ...]]
"""What the run trains more than once, by item of a row."""


@dataclass(frozen=True, slots=True)
class _OfRun:
    """What the run shows about the rollouts of one row, as long as their training rows hold the same tokens."""

    again: Again
    ids: Mapping[int, Ids]
    """By item, the tokens of the training row as logged."""

    @classmethod
    def read(cls, again: Again, rollouts: Sequence[Rollout]) -> _OfRun:
        """What is known about these rollouts."""
        rows = ((rollout.place.item, rollout.training_row) for rollout in rollouts if rollout.place.item in again)
        return cls(again, {item: row.token_ids for item, row in rows if row is not None})

    def of(self, rollout: Rollout) -> tuple[TrainedAgain, ...]:
        """What the run shows about a rollout, as logged or as repaired."""
        again = self.again.get(rollout.place.item, ())
        row, ids = rollout.training_row, self.ids.get(rollout.place.item)
        return again if not again or row is None or ids is None or np.array_equal(row.token_ids, ids) else ()


@dataclass(frozen=True, slots=True)
class RepairedRow:
    """A row after its repair."""

    outcome: Outcome
    rows: tuple[Row, ...] | None = None
    """The rows to write instead; None: the unchanged row."""
    logged: Row | None = None
    """The row that they were made from; they share what did not change with it."""


class RowRepair:
    """Repairs the rows of a log group, one after another."""

    def __init__(self, group: LogGroup, repairs: RepairSettings) -> None:
        self.group = group
        self.settings = group.settings
        self.parse = Splicer(number_columns(group.settings.columns)).parse_row if group.splices else parse_row
        """Reads the text of a row."""
        self.repairs = repairs
        self.rules = all_rules()
        self.codes = group.auditor.codes
        self.all_codes = frozenset(rule.code for rule in self.rules)
        self.compares = TRAINED_ONCE in self.codes
        """Whether the rows of the run are compared with each other once all are repaired."""
        self.terms = RepairTerms(
            strategies(repairs),
            self.rules,
            # What fails the gate is repaired; with `--with`, warnings too.
            Severity.WARNING
            if repairs.strategies or group.settings.fail_on in ("warning", "note")
            else Severity.ERROR,
            self.codes,
            repairs.unsafe,
            repairs.choices,
        )

    def repaired(self, raw: RawRow, place: Place, again: Again) -> RepairedRow:
        """The row, repaired if necessary."""
        try:
            read = self.group.read(raw, place)
            of_run = _OfRun.read(again, read.rollouts)
            audited = self._audit(read, self.group.auditor, of_run)
        except RecordError as error:
            return RepairedRow(self._unrepaired(raw, place, (unreadable(place, str(error), self.codes),)))
        before = tuple(self._selected(each.result) for each in audited)
        chosen = any(repair.chosen(self.terms.choices) for repair in self.terms.repairs)
        threshold = self.terms.threshold
        if not chosen and all(f.severity < threshold for result in before for f in result.findings):
            return RepairedRow(self._unrepaired(raw, place, before))
        if raw.spliced:
            del read, of_run, audited, before  # in a row of millions of tokens they take more than its text
            return self.repaired(raw.plain, place, again)
        assert raw.value is not None
        return self._repair(raw, raw.value, read, audited, place, of_run)

    def _repair(
        self,
        raw: RawRow,
        logged: Row,
        read: ReadRow,
        audited: Sequence[Audited],
        place: Place,
        of_run: _OfRun,
    ) -> RepairedRow:
        def audit(row: Row) -> list[Audited]:
            rollouts = self.group.read_again(read.format, row, place, logged)
            return self._audit(replace(read, row=row, rollouts=rollouts), self._judge, of_run)

        applied = apply_repairs(read.row, read.format, audited, audit, self.terms)
        outcome = self._outcome(place, tuple(self._selected(each.result) for each in audited), applied)
        if outcome.quarantined is not None or not applied.cured:
            return RepairedRow(outcome)
        # A table's columns are fixed, and its readers do not reject unknown keys, as those of documents may.
        inside = read.format.open_object if raw.of_text else ""
        rows = (self._row(logged, row, number, outcome, inside) for number, row in enumerate(applied.rows))
        return RepairedRow(outcome, tuple(rows), logged)

    @cached_property
    def _judge(self) -> Auditor:
        """The auditor of repaired rows: it assumes no slide, and has no fast encoder, whose errors must not prove
        a repair."""
        auditor = self.group.auditor.by_reference()
        return replace(auditor, conventions=replace(auditor.conventions, slide=None))

    def _outcome(self, place: Place, before: tuple[Result, ...], applied: Applied) -> Outcome:
        after = tuple(self._selected(each.result) for row in applied.rows for each in row.audited)
        failing = self._failing(after)
        because = applied.left_out if applied.left_out is not None else self._quarantined(failing, "fixed")
        remains = because is None
        return Outcome(
            place,
            before,
            after if remains else (),
            cured=dict(applied.cured),
            declined=dict(applied.declined) if failing else {},
            needs_unsafe=frozenset(applied.needs_unsafe) if failing else frozenset(),
            notes=tuple(applied.notes),
            costs=tuple(applied.costs),
            more_tokens=applied.more_tokens if remains else 0,
            rows=len(applied.rows) if remains else 0,
            quarantined=because,
        )

    def _unrepaired(self, raw: RawRow, place: Place, results: tuple[Result, ...]) -> Outcome:
        """The outcome of a row on which no repair is tried."""
        # Nothing could be moved of a row that was skipped or is a value inside another row, so it remains.
        movable = raw.value is not None or raw.text is not None
        because = self._quarantined(self._failing(results), "fixes") if movable else None
        remains = because is None
        return Outcome(
            place, results, results if remains else (), rows=int(remains), quarantined=because, stays=not movable
        )

    def _quarantined(self, failing: Sequence[Finding], verb: str) -> str | None:
        """Why a row with these findings goes to the quarantine; None when it does not."""
        if not failing or self.repairs.quarantine is None:
            return None
        return f"no repair {verb} {', '.join(sorted({finding.code for finding in failing}))}"

    def _row(self, original: Row, written: AppliedRow, number: int, outcome: Outcome, inside: str) -> Row:
        """One row as written to the file, with its provenance at the top level or in the object `inside` it."""
        row = self.group.as_logged(original, written.row)
        if not self.repairs.provenance:
            return row
        about: dict[str, object] = {
            "version": VERSION,
            "cured": {name: list(codes) for name, codes in outcome.cured.items()},
        }
        if outcome.rows > 1:
            about["part"] = {"number": number, "of": outcome.rows}
        if outcome.notes:
            about["notes"] = list(outcome.notes)
        was = original.get(inside) or {} if inside else original
        if was.get(COLUMN) is not None:
            about["before"] = was[COLUMN]
        return {**row, inside: {**was, COLUMN: about}} if inside else {**row, COLUMN: about}

    def _audit(self, read: ReadRow, auditor: Auditor, of_run: _OfRun) -> list[Audited]:
        """The rollouts of a row with the findings of all rules."""
        audited = []
        for rollout in read.rollouts:
            with guarded("the audit", rollout.place, LEAVE_OUT):
                try:
                    each = self._judged(rollout, auditor, of_run)
                except EncodeError as error:
                    each = self._judged(rollout, auditor.without_tokenizer(), of_run)
                    each = replace(each, result=unencoded(each.result, str(error), self.all_codes))
            audited.append(each)
        return audited

    def _judged(self, rollout: Rollout, auditor: Auditor, of_run: _OfRun) -> Audited:
        again, renderer = of_run.of(rollout), auditor.renderer_for(rollout)
        evidence = gather(rollout, auditor.tokenizer, renderer, auditor.speakers, auditor.conventions, again)
        ignored = self.all_codes - self.codes
        findings, skips = check(evidence, self.rules, self.all_codes, all_repairs, SINGLE, ignored)
        counts, shows = counts_of(evidence), witness(evidence)
        return Audited(evidence, Result(rollout.place, evidence.rollout, findings, skips, counts, witness=shows))

    def _selected(self, result: Result) -> Result:
        """The result with the selected codes only, and with what its rollout trains."""
        findings = tuple(finding for finding in result.findings if finding.code in self.codes)
        skips = tuple(skip for skip in result.skips if skip.code in self.codes)
        trainings = None if result.rollout is None or not self.compares else trainings_of(result.rollout)
        counts = (
            {**result.counts, **uncompared(result.counts, skips, self.codes)} if result.counts else result.counts
        )
        return replace(result, findings=findings, skips=skips, counts=counts, trainings=trainings)

    def _failing(self, results: Sequence[Result]) -> list[Finding]:
        return [finding for result in results for finding in fails(self.settings, result)]


def failing(flow: RowFlow, file: str, result: Result) -> int:
    """How many findings of a result fail the run under its log's settings."""
    return sum(finding.times for finding in fails(flow.groups[file].settings, result))


def fails(settings: Settings, result: Result) -> Iterator[Finding]:
    """The findings of a result that fail a run with these settings."""
    bar = Severity.bar(settings.fail_on)
    return (finding for finding in result.findings if bar is not None and finding.severity >= bar)


def strategies(repairs: RepairSettings) -> tuple[Repair, ...]:
    """The repairs of a run in the order to try them; SetupError for a repair that may not run."""
    if not repairs.strategies:
        offered = (repair for repair in all_repairs() if not repair.named_only and not repair.by_model)
        safe = (repair for repair in offered if repairs.unsafe or repair.safety is not Safety.UNSAFE)
        return tuple(repair for repair in safe if not repair.removes_rows or repairs.quarantine is not None)
    chosen = tuple(repair_named(name) for name in dict.fromkeys(repairs.strategies))
    for repair in chosen:
        if repair.safety is Safety.UNSAFE and not repairs.unsafe:
            raise SetupError(
                f"--with {repair.name}: {repair.title[0].lower()}{repair.title[1:]}, which is unsafe.\n"
                "It changes or removes recorded values, not only their position.\n"
                f"Add --unsafe to let it run; `tito-audit explain {repair.name}` says what it costs."
            )
        if repair.by_model and repairs.choices.rescored is None:
            raise SetupError(
                f"--with {repair.name}: there is no model to score with.\n"
                "Pass --provider hf=PATH, vllm=URL or sglang=URL."
            )
        if repair.removes_rows and repairs.quarantine is None:
            raise SetupError(
                f"--with {repair.name}: the rows that it removes have nowhere to go.\n"
                "Nothing recorded may be lost.\nAdd --quarantine FILE."
            )
    return chosen
