"""Row repair: one row of a log audited, repaired and audited again.

Each proposal is written, read back and audited, and kept if that proves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import EncodeError, RecordError, SetupError
from tito_audit.evidence.gather import gather
from tito_audit.evidence.harm import find_harm
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.trainings import trainings_of
from tito_audit.evidence.witness import witness
from tito_audit.format import Format, Row
from tito_audit.formats import number_columns
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.record.outcome import COLUMN, Outcome
from tito_audit.record.repaired import RepairedRollout, unrepaired
from tito_audit.record.rollout import Place, Rollout, TrainingRow, visible_range, with_call_as_row
from tito_audit.record.trainings import TrainedAgain
from tito_audit.repair import Proposal, Repair, Safety
from tito_audit.repairs import all_repairs, repair_named
from tito_audit.rule import Rule
from tito_audit.rules import all_rules
from tito_audit.run.auditor import TRAINED_ONCE, Auditor, counts_of, uncompared, unencoded, unreadable
from tito_audit.run.check import SINGLE, check, explain
from tito_audit.run.guard import LEAVE_OUT, guarded
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.rows import LogGroup, ReadRow
from tito_audit.settings.model import RepairChoices, RepairSettings, Settings
from tito_audit.storage.number_arrays import ArrayParser
from tito_audit.storage.row import RawRow, parse_row
from tito_audit.version import VERSION


@dataclass(frozen=True, slots=True)
class Audited:
    """One rollout of a row and its audit."""

    evidence: Evidence
    result: Result

    @property
    def rollout(self) -> Rollout:
        """The rollout as read."""
        return self.evidence.rollout


_OF_TOKENS = ("TOK", "TPL")
"""Families of rules that judge the tokens of a call, not the mask or the logprobs on them."""

Audit = Callable[[Row], list[Audited]]
"""Reads a row and audits its rollouts with all rules; RecordError when it cannot be read."""


@dataclass(frozen=True, slots=True)
class AppliedRow:
    """A row as it would be written, and its audit."""

    row: Row
    audited: tuple[Audited, ...]


@dataclass(slots=True)
class Applied:
    """One row with all proven repairs applied."""

    rows: list[AppliedRow]
    """[] when a repair removed the row."""
    cured: dict[str, tuple[str, ...]] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)
    needs_unsafe: set[str] = field(default_factory=set)
    """Repairs that were declined only because they are unsafe here."""
    notes: list[str] = field(default_factory=list)
    costs: list[str] = field(default_factory=list)
    more_tokens: int = 0
    left_out: str | None = None
    """Why the row was removed."""


@dataclass(frozen=True, slots=True)
class RepairTerms:
    """The terms on which repairs run."""

    repairs: Sequence[Repair]
    """In the order to try them."""
    rules: Sequence[Rule]
    threshold: Severity
    """The lowest severity that is repaired."""
    selected: frozenset[str]
    """Codes whose findings are repaired; the proof looks at all codes."""
    unsafe: bool
    choices: RepairChoices


def apply_repairs(row: Row, form: Format, audited: Sequence[Audited], audit: Audit, terms: RepairTerms) -> Applied:
    """The row with the repairs applied one after the other.

    The format writes each proposal, and the new rows are read back and audited again. A proposal is kept when
    fewer findings of the codes that the repair claims are left, none is worse and none is new, except for warnings
    about tokens that the row held before. Otherwise the row stays as it was, and `declined` has the reason.
    """
    applied = Applied([AppliedRow(row, tuple(audited))])
    if terms.threshold < Severity.ERROR:
        # Repairing warnings must not prevent the repair of an error.
        _rounds(applied, form, audit, replace(terms, threshold=Severity.ERROR))
    _rounds(applied, form, audit, terms)
    return applied


def _rounds(applied: Applied, form: Format, audit: Audit, terms: RepairTerms) -> None:
    """Try all repairs on the row, over and over while one of them still changes it."""
    if not applied.rows:
        return
    # One repair may fix what kept an earlier one from being proven.
    last = [repair for repair in terms.repairs if repair.removes_rows]
    others = [repair for repair in terms.repairs if not repair.removes_rows]
    for _ in range(4):
        before = applied.rows
        applied.declined.clear()
        applied.needs_unsafe.clear()
        _round(applied, others, form, audit, terms)
        if len(applied.rows) == len(before) and all(a is b for a, b in zip(applied.rows, before, strict=True)):
            break
    _round(applied, last, form, audit, terms)


def _round(applied: Applied, repairs: Sequence[Repair], form: Format, audit: Audit, terms: RepairTerms) -> None:
    for repair in repairs:
        rows: list[AppliedRow] = []
        for written in applied.rows:
            rows += _step(written, repair, form, audit, terms, applied)
            if applied.left_out is not None:
                applied.rows = []
                return
        applied.rows = rows


def _step(
    written: AppliedRow, repair: Repair, form: Format, audit: Audit, terms: RepairTerms, applied: Applied
) -> list[AppliedRow]:
    """The rows that one repair makes of one row; the row itself if nothing is proven."""
    proposals = _proposals(written, repair, terms, applied)
    if any(not proposal.rollouts for proposal in proposals.values()):
        applied.left_out = next(proposal.reason for proposal in proposals.values() if not proposal.rollouts)
        applied.cured[repair.name] = _codes(_claimed(written, repair, terms))
        return []
    after = _proven(written, proposals, repair, form, audit, terms, applied)
    if after is None:
        return [written]
    before = _claimed(written, repair, terms)
    left = [finding for row in after for finding in _claimed(row, repair, terms)]
    codes = _codes(f for f in before if _count(before, f.code) > _count(left, f.code))
    applied.cured[repair.name] = tuple(dict.fromkeys((*applied.cured.get(repair.name, ()), *codes)))
    for proposal in proposals.values():
        _mark(applied, proposal)
    return after


def _proven(
    written: AppliedRow,
    proposals: dict[int, Proposal],
    repair: Repair,
    form: Format,
    audit: Audit,
    terms: RepairTerms,
    applied: Applied,
) -> list[AppliedRow] | None:
    """The row with all proposals that the audit proves; None if it proves none. The others are removed from
    `proposals`.

    Each rollout of a group is judged by itself: one that cannot be repaired does not block the others.
    """
    while proposals:
        try:
            after = _rewritten(written, proposals, form, audit)
        except RecordError as error:
            if len(proposals) == 1:
                applied.declined.setdefault(repair.name, str(error))
                return None
            alone = {item: {item: proposal} for item, proposal in proposals.items()}
            bad = {
                item
                for item, own in alone.items()
                if _proven(written, own, repair, form, audit, terms, applied) is None
            }
            bad = bad or {max(proposals)}
        else:
            reasons = {
                item: because
                for item in proposals
                if (because := _refuted(*_of_item(written, after, item), repair, terms, proposals[item].adds))
            }
            if not reasons:
                return after
            applied.declined.setdefault(repair.name, next(iter(reasons.values())))
            bad = set(reasons)
        for item in bad:
            del proposals[item]
    return None


def _of_item(before: AppliedRow, after: list[AppliedRow], item: int) -> tuple[AppliedRow, list[AppliedRow]]:
    """The part of a row that a proposal is about, before and after: its rollout in a group, else the whole row."""
    if len(before.audited) == 1:
        return before, after
    number = next(n for n, audited in enumerate(before.audited) if audited.rollout.place.item == item)
    (row,) = after
    return AppliedRow(before.row, before.audited[number : number + 1]), [
        AppliedRow(row.row, row.audited[number : number + 1])
    ]


def _proposals(written: AppliedRow, repair: Repair, terms: RepairTerms, applied: Applied) -> dict[int, Proposal]:
    """The proposals of the repair, by item of the rollout in its row; PluginError if it fails."""
    without = f"name the repairs to make, without this one: `--with NAME`, or {LEAVE_OUT}"
    proposals: dict[int, Proposal] = {}
    for audited in written.audited:
        findings = tuple(f for f in audited.result.findings if _acts_on(f, repair, terms))
        if not findings and not repair.chosen(terms.choices):
            continue
        try:
            with guarded(f"repair `{repair.name}`", audited.rollout.place, without):
                evidence = explain(audited.evidence, terms.rules, terms.selected)
                proposal = repair.mend(evidence, findings, terms.choices)
        except RecordError as error:
            applied.declined.setdefault(repair.name, str(error))
            continue
        if proposal is None:
            continue
        if proposal.safety is Safety.UNSAFE and not terms.unsafe:
            if repair.name not in applied.declined:
                applied.needs_unsafe.add(repair.name)
                applied.declined[repair.name] = f"unsafe here, needs --unsafe: {proposal.reason}"
            continue
        proposals[audited.rollout.place.item] = proposal
    return proposals


def _rewritten(
    written: AppliedRow, proposals: Mapping[int, Proposal], form: Format, audit: Audit
) -> list[AppliedRow]:
    """The rows that the format writes for the proposals, read and audited; RecordError if they hold less."""
    repaired: list[RepairedRollout] = []
    for audited in written.audited:
        proposal = proposals.get(audited.rollout.place.item)
        repaired += proposal.rollouts if proposal is not None else (unrepaired(audited.rollout),)
    rows = form.update(written.row, repaired)
    out = [AppliedRow(row, tuple(audit(row))) for row in rows]
    if len(written.audited) == 1:
        pairs = [(want, got.audited) for want, got in zip(repaired, out, strict=False)]
        if len(out) != len(repaired):
            raise RecordError(f"the format {form.name} wrote {len(out)} rows for {len(repaired)}")
    else:
        pairs = [(want, (got,)) for want, got in zip(repaired, out[0].audited, strict=False)]
        if len(out) != 1 or len(out[0].audited) != len(repaired):
            raise RecordError(f"a row of the format {form.name} cannot hold a forked rollout among others")
    for want, got in pairs:
        _holds(form, want.rollout, got)
    return out


def _holds(form: Format, want: Rollout, got: Sequence[Audited]) -> None:
    """RecordError unless the written row reads back as the rollout that the repair proposed."""
    if len(got) != 1:
        raise RecordError(f"the format {form.name} reads {len(got)} rollouts where one was written")
    read = got[0].rollout
    if (
        want.training_row is not None
        and not want.turns
        and len(read.turns) == 1
        and read.turns[0].as_row is not None
    ):
        read = with_call_as_row(read)
    row, wanted = read.training_row, want.training_row
    if (row is None) is not (wanted is None):
        raise RecordError(f"the format {form.name} has no place for a training row here")
    if row is not None and wanted is not None:
        wanted = _without_padding(wanted)
        for name in ("token_ids", "loss_mask", "logprobs"):
            if not _equal(getattr(row, name), getattr(wanted, name), wanted):
                raise RecordError(f"the format {form.name} cannot write this row's {name.replace('_', ' ')}")
    if len(read.turns) != len(want.turns):
        raise RecordError(
            f"the format {form.name} reads {len(read.turns)} calls where {len(want.turns)} were written"
        )
    for number, (turn, expected) in enumerate(zip(read.turns, want.turns, strict=True)):
        for name in ("prompt_ids", "completion_ids", "completion_logprobs"):
            if not _equal(getattr(turn, name), getattr(expected, name), None):
                raise RecordError(
                    f"the format {form.name} cannot write the {name.replace('_', ' ')} of call {number}"
                )


def _without_padding(row: TrainingRow) -> TrainingRow:
    """The row as it reads back: without untrained padding, which an attention mask hides at its ends."""
    start, end = visible_range(row)
    outside = np.ones(len(row.token_ids), np.bool_)
    outside[start:end] = False
    if row.loss_mask is None or (row.loss_mask & outside).any():
        return row
    return replace(
        row,
        token_ids=row.token_ids[start:end],
        loss_mask=row.loss_mask[start:end],
        logprobs=None if row.logprobs is None else row.logprobs[start:end],
    )


def _equal(got: NDArray[np.generic] | None, want: NDArray[np.generic] | None, row: TrainingRow | None) -> bool:
    """Whether the values are equal; a column's sentinel counts as unknown."""
    if got is None or want is None:
        return got is want
    if got.dtype.kind != "f":
        return bool(np.array_equal(got, want))
    read, wanted = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if row is not None:
        marks = [c.sentinel for c in row.columns if c.role == "logprobs" and c.sentinel is not None]
        read, wanted = (np.where(np.isnan(x) | np.isin(x, marks), np.nan, x) for x in (read, wanted))
    return len(read) == len(wanted) and bool(np.allclose(read, wanted, rtol=1e-6, atol=0, equal_nan=True))


def _refuted(
    before: AppliedRow, after: Sequence[AppliedRow], repair: Repair, terms: RepairTerms, adds: frozenset[str]
) -> str | None:
    """Why the new rows must not be written; None when the audit proves them better and no rollout worse."""
    # A model's values are not in the log, which could only show whether they are on their tokens.
    if repair.safety is not Safety.UNSAFE and not repair.by_model and len(after) == 1:
        pairs = zip(before.audited, after[0].audited, strict=False)
        because = next((why for old, new in pairs if (why := find_harm(old.evidence, new.evidence))), None)
        if because is not None:
            return because
    claimed = _claimed(before, repair, terms)
    left = [finding for row in after for finding in _claimed(row, repair, terms)]
    if claimed and _times(left) >= _times(claimed) and not repair.chosen(terms.choices):
        return f"{', '.join(_codes(left))} would remain"
    worst = _worst_by_kind(_findings(before))
    pairs_after = (
        (finding, new.rollout) for row in after for new in row.audited for finding in new.result.findings
    )
    harmful = (finding for finding, rollout in pairs_after if not _about_old_tokens(finding, rollout, before))
    for kind, severity in _worst_by_kind(harmful).items():
        if severity >= Severity.WARNING and severity > worst.get(kind, Severity.NOTE) and kind[0] not in adds:
            cause = f" ({kind[1]})" if kind[1] else ""
            return f"the repaired row would have {kind[0]}{cause}, which it does not have now"
    return None


def _about_old_tokens(finding: Finding, rollout: Rollout, before: AppliedRow) -> bool:
    """Whether a warning of a new row is about the tokens of a call that the row held before.

    A prompt is no worse for being the first of its row: only the call that explained what the template would not
    write, and made it a note, is in another row now.
    """
    turn = finding.hit.turn
    if finding.severity is not Severity.WARNING or not finding.code.startswith(_OF_TOKENS) or turn is None:
        return False
    call = rollout.turns[turn]
    return any(
        _equal(call.prompt_ids, old.prompt_ids, None) and _equal(call.completion_ids, old.completion_ids, None)
        for audited in before.audited
        for old in audited.rollout.turns
    )


def _acts_on(finding: Finding, repair: Repair, terms: RepairTerms) -> bool:
    return finding.severity >= terms.threshold and finding.code in terms.selected and repair.claims(finding.code)


def _claimed(written: AppliedRow, repair: Repair, terms: RepairTerms) -> list[Finding]:
    return [finding for finding in _findings(written) if _acts_on(finding, repair, terms)]


def _findings(written: AppliedRow) -> list[Finding]:
    return [finding for audited in written.audited for finding in audited.result.findings]


def _worst_by_kind(findings: Iterable[Finding]) -> dict[tuple[str, str], Severity]:
    worst: dict[tuple[str, str], Severity] = {}
    for finding in findings:
        kind = (finding.code, finding.hit.cause)
        worst[kind] = max(worst.get(kind, Severity.NOTE), finding.severity)
    return worst


def _codes(findings: Iterable[Finding]) -> tuple[str, ...]:
    return tuple(sorted({finding.code for finding in findings}))


def _count(findings: Sequence[Finding], code: str) -> int:
    return _times(finding for finding in findings if finding.code == code)


def _times(findings: Iterable[Finding]) -> int:
    return sum(finding.times for finding in findings)


def _mark(applied: Applied, proposal: Proposal) -> None:
    """Keep the costs and notes of a repair, for the report and the provenance column."""
    costs = [proposal.cost] if proposal.cost else []
    notes = [
        *costs,
        *proposal.notes,
        *(f"{name} is stale from the first changed token on and null there" for name in proposal.stale),
        *(f"{name} cannot be rebuilt and is null" for name in proposal.dropped),
        *(
            f"{count} entries of {name} have no recorded value and are null"
            for name, count in proposal.unknown.items()
        ),
    ]
    applied.more_tokens += proposal.more_tokens
    applied.notes += [note for note in notes if note not in applied.notes]
    applied.costs += costs


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
        self.parse = ArrayParser(number_columns(group.settings.columns)).parse_row if group.splices else parse_row
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
        if raw.has_arrays:
            del read, of_run, audited, before  # in a row of millions of tokens they take more than its text
            return self.repaired(raw.without_arrays, place, again)
        assert raw.value is not None
        return self._repair(raw, raw.value, read, audited, place, of_run)

    def _repair(
        self, raw: RawRow, logged: Row, read: ReadRow, audited: Sequence[Audited], place: Place, of_run: _OfRun
    ) -> RepairedRow:
        def audit(row: Row) -> list[Audited]:
            rollouts = self.group.read_again(read.format, row, place, logged)
            return self._audit(replace(read, row=row, rollouts=rollouts), self._judge, of_run)

        applied = apply_repairs(read.row, read.format, audited, audit, self.terms)
        before = tuple(self._selected(each.result) for each in audited)
        after = tuple(self._selected(each.result) for row in applied.rows for each in row.audited)
        failing = self._failing(after)
        because = applied.left_out if applied.left_out is not None else self._quarantined(failing, "fixed")
        remains = because is None
        outcome = Outcome(
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
        if because is not None or not applied.cured:
            return RepairedRow(outcome)
        # A table's columns are fixed, and its readers do not reject unknown keys, as those of documents may.
        inside = read.format.open_object if raw.accepts_new_keys else ""
        rows = (self._row(logged, row, number, outcome, inside) for number, row in enumerate(applied.rows))
        return RepairedRow(outcome, tuple(rows), logged)

    @cached_property
    def _judge(self) -> Auditor:
        """The auditor of repaired rows: it assumes no slide, and has no fast encoder, whose errors must not prove
        a repair."""
        auditor = self.group.auditor.by_reference()
        return replace(auditor, conventions=replace(auditor.conventions, slide=None))

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
        counts |= uncompared(counts, [skip for skip in skips if skip.code in self.codes], self.codes)
        return Audited(evidence, Result(rollout.place, evidence.rollout, findings, skips, counts, witness=shows))

    def _selected(self, result: Result) -> Result:
        """The result with the selected codes only, and with what its rollout trains."""
        findings = tuple(finding for finding in result.findings if finding.code in self.codes)
        skips = tuple(skip for skip in result.skips if skip.code in self.codes)
        trainings = None if result.rollout is None or not self.compares else trainings_of(result.rollout)
        return replace(result, findings=findings, skips=skips, trainings=trainings)

    def _failing(self, results: Sequence[Result]) -> list[Finding]:
        return [finding for result in results for finding in fails(self.settings, result)]


def failing(flow: RowFlow, file: str, result: Result) -> int:
    """How many findings of a result fail the run under its log's settings."""
    return sum(finding.times for finding in fails(flow.groups[file].settings, result))


def fails(settings: Settings, result: Result) -> Iterator[Finding]:
    """The findings of a result that fail a run with these settings."""
    bar = Severity.threshold(settings.fail_on)
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
                "Pass --provider hf=PATH, vllm=URL, sglang=URL or trl=URL."
            )
        if repair.removes_rows and repairs.quarantine is None:
            raise SetupError(
                f"--with {repair.name}: the rows that it removes have nowhere to go.\n"
                "Nothing recorded may be lost.\nAdd --quarantine FILE."
            )
    return chosen
