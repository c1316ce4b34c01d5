"""Repairs one row of a log: each proposal is written, read back, audited, and kept if that proves it better."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.record.outcome import COLUMN, Outcome
from tito_audit.record.repaired import RepairedRollout, unrepaired
from tito_audit.record.rollout import Place, Rollout, TrainingRow, visible_range, with_call_as_row
from tito_audit.record.trainings import TrainedAgain
from tito_audit.repair import Proposal, Repair, Safety
from tito_audit.repairs import all_repairs, repair_named
from tito_audit.rule import Rule
from tito_audit.rules import all_rules
from tito_audit.run.auditor import (
    TRAINED_ONCE,
    Auditor,
    add_encode_error,
    count_rollout,
    uncompared_count,
    unreadable_result,
)
from tito_audit.run.check import SINGLE, check, explain_differences
from tito_audit.run.guard import LEAVE_OUT, guard_plugin
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.rows import LogGroup, ReadRow
from tito_audit.settings.model import RepairChoices, RepairSettings, Settings
from tito_audit.storage.number_arrays import ArrayParser
from tito_audit.storage.row import RawRow, parse_row
from tito_audit.version import VERSION


@dataclass(frozen=True, slots=True)
class AuditedRollout:
    """One rollout of a row and its audit."""

    evidence: Evidence
    result: Result

    @property
    def rollout(self) -> Rollout:
        """The rollout as read."""
        return self.evidence.rollout


_TOKEN_FAMILIES = ("TOK", "TPL")
"""Rule families that judge the tokens of a call, not its mask or logprobs."""

AuditFunction = Callable[[Row], list[AuditedRollout]]
"""Reads a row and audits its rollouts with all rules; RecordError if it cannot be read."""


@dataclass(frozen=True, slots=True)
class AuditedRow:
    """A row as it would be written, and its audit."""

    row: Row
    rollouts: tuple[AuditedRollout, ...]

    @property
    def findings(self) -> list[Finding]:
        """The findings of all its rollouts."""
        return [finding for each in self.rollouts for finding in each.result.findings]


@dataclass(slots=True)
class AppliedRepairs:
    """What one row became, and what each repair did or why it did nothing."""

    rows: list[AuditedRow]
    """[] when a repair removed the row."""
    cured: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By repair: the codes that it fixed."""
    declined: dict[str, str] = field(default_factory=dict)
    """By repair: why its proposal was not taken."""
    needs_unsafe: set[str] = field(default_factory=set)
    """Repairs that were declined only because they are unsafe here."""
    notes: list[str] = field(default_factory=list)
    costs: list[str] = field(default_factory=list)
    more_tokens: int = 0
    left_out: str | None = None
    """Why the row was removed."""

    def add_costs(self, proposal: Proposal) -> None:
        """Add what a proposal costs, for the report and the provenance column."""
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
        self.more_tokens += proposal.more_tokens
        self.notes += [note for note in notes if note not in self.notes]
        self.costs += costs


@dataclass(frozen=True, slots=True)
class RepairTerms:
    """Which repairs may run, and on which findings."""

    repairs: Sequence[Repair]
    """In the order to try them."""
    rules: Sequence[Rule]
    threshold: Severity
    """The lowest severity that is repaired."""
    selected: frozenset[str]
    """Codes whose findings are repaired; the proof looks at all codes."""
    unsafe: bool
    choices: RepairChoices


def apply_repairs(
    row: Row, form: Format, audited: Sequence[AuditedRollout], audit: AuditFunction, terms: RepairTerms
) -> AppliedRepairs:
    """Apply the repairs to a row, one after the other.

    The format writes each proposal; the new rows are read back and audited. A proposal is taken if fewer findings
    of the repair's codes are left, none is worse and none is new, except for warnings about tokens that the row
    held before. Otherwise the row stays as it was, and `declined` says why.
    """
    applied = AppliedRepairs([AuditedRow(row, tuple(audited))])
    if terms.threshold < Severity.ERROR:
        # Repairing warnings must not prevent the repair of an error.
        _Attempt(form, audit, replace(terms, threshold=Severity.ERROR), applied).run()
    _Attempt(form, audit, terms, applied).run()
    return applied


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An attempt to repair a row on given terms."""

    form: Format
    audit: AuditFunction
    terms: RepairTerms
    applied: AppliedRepairs

    def run(self) -> None:
        """Try all repairs on the row, again while one of them changes it; those that remove rows come last."""
        applied = self.applied
        if not applied.rows:
            return
        last = [repair for repair in self.terms.repairs if repair.removes_rows]
        others = [repair for repair in self.terms.repairs if not repair.removes_rows]
        # Again, since one repair may fix what kept an earlier one from being proven.
        for _ in range(4):
            before = applied.rows
            applied.declined.clear()
            applied.needs_unsafe.clear()
            self.try_repairs(others)
            if len(applied.rows) == len(before) and all(a is b for a, b in zip(applied.rows, before, strict=True)):
                break
        self.try_repairs(last)

    def try_repairs(self, repairs: Sequence[Repair]) -> None:
        """Try each repair once on every row."""
        applied = self.applied
        for repair in repairs:
            rows: list[AuditedRow] = []
            for row in applied.rows:
                rows += self.try_repair(row, repair)
                if applied.left_out is not None:
                    applied.rows = []
                    return
            applied.rows = rows

    def try_repair(self, before: AuditedRow, repair: Repair) -> list[AuditedRow]:
        """The rows that one repair makes of one row; the row itself if nothing is proven."""
        applied, proposals = self.applied, self.propose(before, repair)
        removing = next((proposal for proposal in proposals.values() if not proposal.rollouts), None)
        if removing is not None:
            applied.left_out = removing.reason
            applied.cured[repair.name] = tuple(sorted(self.count_claimed([before], repair)))
            return []
        after = self.prove(before, proposals, repair)
        if after is None:
            return [before]
        claimed, left = self.count_claimed([before], repair), self.count_claimed(after, repair)
        fewer = sorted(code for code in claimed if claimed[code] > left[code])
        applied.cured[repair.name] = tuple(dict.fromkeys((*applied.cured.get(repair.name, ()), *fewer)))
        for proposal in proposals.values():
            applied.add_costs(proposal)
        return after

    def prove(self, before: AuditedRow, proposals: dict[int, Proposal], repair: Repair) -> list[AuditedRow] | None:
        """The rows with all proposals that the audit proves; None if it proves none.

        Removes the other proposals from `proposals`. Each rollout of a group is judged by itself: one that cannot
        be repaired does not prevent the repair of the others.
        """
        declined = self.applied.declined
        while proposals:
            try:
                after = self.write(before, proposals)
            except RecordError as error:
                if len(proposals) == 1:
                    declined.setdefault(repair.name, str(error))
                    return None
                alone = {item: {item: proposal} for item, proposal in proposals.items()}
                refuted = {item for item, own in alone.items() if self.prove(before, own, repair) is None}
                refuted = refuted or {max(proposals)}
            else:
                reasons: dict[int, str] = {}
                for item, proposal in proposals.items():
                    old, new = before, after
                    if len(before.rollouts) > 1:  # of a group, only the rollout of this item
                        items = [audited.rollout.place.item for audited in before.rollouts]
                        at = slice(items.index(item), items.index(item) + 1)
                        old = replace(before, rollouts=before.rollouts[at])
                        new = [replace(row, rollouts=row.rollouts[at]) for row in after]
                    reason = self.refute(old, new, repair, proposal.adds)
                    if reason is not None:
                        reasons[item] = reason
                if not reasons:
                    return after
                declined.setdefault(repair.name, next(iter(reasons.values())))
                refuted = set(reasons)
            for item in refuted:
                del proposals[item]
        return None

    def propose(self, row: AuditedRow, repair: Repair) -> dict[int, Proposal]:
        """The proposals of the repair, by item of the rollout in its row; PluginError if it fails."""
        declined, choices = self.applied.declined, self.terms.choices
        way_out = f"name the repairs to make, without this one: `--with NAME`, or {LEAVE_OUT}"
        proposals: dict[int, Proposal] = {}
        for audited in row.rollouts:
            findings = tuple(f for f in audited.result.findings if self.is_claimed(f, repair))
            if not findings and not repair.chosen(choices):
                continue
            try:
                with guard_plugin(f"repair `{repair.name}`", audited.rollout.place, way_out):
                    evidence = explain_differences(audited.evidence, self.terms.rules, self.terms.selected)
                    proposal = repair.mend(evidence, findings, choices)
            except RecordError as error:
                declined.setdefault(repair.name, str(error))
                continue
            if proposal is None:
                continue
            if proposal.safety is Safety.UNSAFE and not self.terms.unsafe:
                if repair.name not in declined:
                    self.applied.needs_unsafe.add(repair.name)
                    declined[repair.name] = f"unsafe here, needs --unsafe: {proposal.reason}"
                continue
            proposals[audited.rollout.place.item] = proposal
        return proposals

    def write(self, row: AuditedRow, proposals: Mapping[int, Proposal]) -> list[AuditedRow]:
        """The rows that the format writes for the proposals, read back and audited.

        RecordError if they do not hold what was proposed.
        """
        name = self.form.name
        repaired: list[RepairedRollout] = []
        for audited in row.rollouts:
            proposal = proposals.get(audited.rollout.place.item)
            repaired += proposal.rollouts if proposal is not None else (unrepaired(audited.rollout),)
        rows = self.form.update(row.row, repaired)
        out = [AuditedRow(new, tuple(self.audit(new))) for new in rows]
        if len(row.rollouts) == 1:
            read_back = [each.rollouts for each in out]
            if len(out) != len(repaired):
                raise RecordError(f"the format {name} wrote {len(out)} rows for {len(repaired)}")
        else:
            read_back = [(each,) for each in out[0].rollouts]
            if len(out) != 1 or len(read_back) != len(repaired):
                raise RecordError(f"a row of the format {name} cannot hold a forked rollout among others")
        for want, got in zip(repaired, read_back, strict=True):
            _check_read_back(self.form, want.rollout, got)
        return out

    def refute(
        self, before: AuditedRow, after: Sequence[AuditedRow], repair: Repair, adds: frozenset[str]
    ) -> str | None:
        """Why the new rows must not be written; None if the audit proves them better and no rollout worse.

        `adds` are codes that the proposal may add.
        """
        # A model's values are not in the log, which could only show whether they are on their tokens.
        if repair.safety is not Safety.UNSAFE and not repair.by_model and len(after) == 1:
            for old, new in zip(before.rollouts, after[0].rollouts, strict=False):
                because = find_harm(old.evidence, new.evidence)
                if because:
                    return because
        claimed, left = self.count_claimed([before], repair), self.count_claimed(after, repair)
        if claimed and left.total() >= claimed.total() and not repair.chosen(self.terms.choices):
            return f"{', '.join(sorted(left))} would remain"
        worst = _worst_by_kind(before.findings)
        new_findings = (
            finding
            for row in after
            for each in row.rollouts
            for finding in each.result.findings
            if not _is_about_old_tokens(finding, each.rollout, before)
        )
        for kind, severity in _worst_by_kind(new_findings).items():
            code, cause = kind
            if severity >= Severity.WARNING and severity > worst.get(kind, Severity.NOTE) and code not in adds:
                why = f" ({cause})" if cause else ""
                return f"the repaired row would have {code}{why}, which it does not have now"
        return None

    def count_claimed(self, rows: Iterable[AuditedRow], repair: Repair) -> Counter[str]:
        """By code, how many findings of these rows the repair is to fix."""
        counts = Counter[str]()
        for finding in (finding for row in rows for finding in row.findings):
            if self.is_claimed(finding, repair):
                counts[finding.code] += finding.times
        return counts

    def is_claimed(self, finding: Finding, repair: Repair) -> bool:
        """Whether the repair is to fix a finding."""
        terms = self.terms
        return (
            finding.severity >= terms.threshold and finding.code in terms.selected and repair.claims(finding.code)
        )


def _check_read_back(form: Format, want: Rollout, got: Sequence[AuditedRollout]) -> None:
    """Raise RecordError unless the written row reads back as the rollout that the repair proposed."""
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
        start, end = visible_range(wanted)
        mask, logprobs = wanted.loss_mask, wanted.logprobs
        # Untrained padding, which an attention mask hides at the ends, is not read back.
        if mask is not None and not (mask[:start].any() or mask[end:].any()):
            seen = None if logprobs is None else logprobs[start:end]
            ids = wanted.token_ids[start:end]
            wanted = replace(wanted, token_ids=ids, loss_mask=mask[start:end], logprobs=seen)
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


def _equal(got: NDArray[np.generic] | None, want: NDArray[np.generic] | None, row: TrainingRow | None) -> bool:
    """Whether two columns are equal. In logprobs of a training row, a sentinel equals a missing value (NaN)."""
    if got is None or want is None:
        return got is want
    if got.dtype.kind != "f":
        return bool(np.array_equal(got, want))
    read, wanted = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if row is not None:
        sentinels = [c.sentinel for c in row.columns if c.role == "logprobs" and c.sentinel is not None]
        read, wanted = (np.where(np.isnan(x) | np.isin(x, sentinels), np.nan, x) for x in (read, wanted))
    return len(read) == len(wanted) and bool(np.allclose(read, wanted, rtol=1e-6, atol=0, equal_nan=True))


def _is_about_old_tokens(finding: Finding, rollout: Rollout, before: AuditedRow) -> bool:
    """Whether a warning of a new row is about the tokens of a call that the row held before.

    A prompt is no worse for being the first of its row: only the call that explained what the template would not
    write, and made it a note, is in another row now.
    """
    turn = finding.hit.turn
    if finding.severity is not Severity.WARNING or not finding.code.startswith(_TOKEN_FAMILIES) or turn is None:
        return False
    call = rollout.turns[turn]
    return any(
        _equal(call.prompt_ids, old.prompt_ids, None) and _equal(call.completion_ids, old.completion_ids, None)
        for audited in before.rollouts
        for old in audited.rollout.turns
    )


def _worst_by_kind(findings: Iterable[Finding]) -> dict[tuple[str, str], Severity]:
    """By code and cause, the highest severity."""
    worst: dict[tuple[str, str], Severity] = {}
    for finding in findings:
        kind = (finding.code, finding.hit.cause)
        worst[kind] = max(worst.get(kind, Severity.NOTE), finding.severity)
    return worst


Again: TypeAlias = Mapping[int, tuple[TrainedAgain, ...]]
"""By item of a row: what its training row trains that another row of the run trains too."""


@dataclass(frozen=True, slots=True)
class RepairedRow:
    """A row after its repair."""

    outcome: Outcome
    rows: tuple[Row, ...] | None = None
    """The rows to write instead; None: the row is unchanged."""
    logged: Row | None = None
    """The row as logged; `rows` share their unchanged values with it."""


class RowRepair:
    """Repairs the rows of a log group."""

    def __init__(self, group: LogGroup, repairs: RepairSettings) -> None:
        self.group = group
        self.settings = group.settings
        self.parse = (
            ArrayParser(number_columns(group.settings.columns)).parse_row if group.can_splice else parse_row
        )
        """Parses the text of a row."""
        self.repairs = repairs
        self.rules = all_rules()
        self.codes = group.auditor.codes
        # Of repaired rows no slide is assumed, and no fault of a fast encoder can prove a repair.
        reference = group.auditor.by_reference()
        self.reference = replace(reference, conventions=replace(reference.conventions, slide=None))
        self.all_codes = frozenset(rule.code for rule in self.rules)
        self.compares = TRAINED_ONCE in self.codes
        """Whether the rows of the run are compared with each other once all are repaired."""
        # Repair what fails the run; with `--with`, warnings too.
        warnings = repairs.strategies or group.settings.fail_on in ("warning", "note")
        threshold = Severity.WARNING if warnings else Severity.ERROR
        chosen, unsafe, choices = chosen_repairs(repairs), repairs.unsafe, repairs.choices
        self.terms = RepairTerms(chosen, self.rules, threshold, self.codes, unsafe, choices)

    def repair_row(self, raw: RawRow, place: Place, again: Again) -> RepairedRow:
        """Audit a row and repair it if it has findings to repair."""
        try:
            read = self.group.read_row(raw, place)
            audited = self._audit(read.rollouts, self.group.auditor, again)
        except RecordError as error:
            return RepairedRow(self._unrepaired(raw, place, (unreadable_result(place, str(error), self.codes),)))
        before = tuple(self._select_codes(each.result) for each in audited)
        chosen = any(repair.chosen(self.terms.choices) for repair in self.terms.repairs)
        threshold = self.terms.threshold
        if not chosen and all(f.severity < threshold for result in before for f in result.findings):
            return RepairedRow(self._unrepaired(raw, place, before))
        if raw.has_arrays:
            del read, audited, before  # free memory: for millions of tokens they are larger than the text
            return self.repair_row(raw.without_arrays, place, again)
        return self._repair(raw, read, audited, place, again)

    def _repair(
        self, raw: RawRow, read: ReadRow, audited: Sequence[AuditedRollout], place: Place, again: Again
    ) -> RepairedRow:
        """Repair a row that was read and audited."""
        logged = raw.value
        assert logged is not None, "it was read"
        rows = {rollout.place.item: rollout.training_row for rollout in read.rollouts}
        ids = {item: row.token_ids for item, row in rows.items() if item in again and row is not None}

        def audit(row: Row) -> list[AuditedRollout]:
            rollouts = self.group.read_rollouts(read.format, row, place, logged)
            # What a training row trains again is known only as long as it holds the logged tokens.
            still = dict(again)
            for item, now in ((each.place.item, each.training_row) for each in rollouts if again):
                if now is not None and item in ids and not np.array_equal(now.token_ids, ids[item]):
                    still.pop(item, None)
            return self._audit(rollouts, self.reference, still)

        applied = apply_repairs(read.row, read.format, audited, audit, self.terms)
        before = tuple(self._select_codes(each.result) for each in audited)
        after = tuple(self._select_codes(each.result) for row in applied.rows for each in row.rollouts)
        failing = self._failing(after)
        because = applied.left_out if applied.left_out is not None else self._quarantine_reason(failing, "fixed")
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
        # Readers of documents may reject unknown keys at the top level; columns of a table can only be there.
        inside = read.format.open_object if raw.accepts_new_keys else ""
        new = (self._with_provenance(logged, row, n, outcome, inside) for n, row in enumerate(applied.rows))
        return RepairedRow(outcome, tuple(new), logged)

    def _unrepaired(self, raw: RawRow, place: Place, results: tuple[Result, ...]) -> Outcome:
        """The outcome of a row on which no repair is tried."""
        # A row that was skipped, or is a value inside another row, has no line that could be moved.
        movable = raw.value is not None or raw.text is not None
        because = self._quarantine_reason(self._failing(results), "fixes") if movable else None
        remains = because is None
        return Outcome(
            place, results, results if remains else (), rows=int(remains), quarantined=because, stays=not movable
        )

    def _quarantine_reason(self, failing: Sequence[Finding], verb: str) -> str | None:
        """Why a row with these failing findings goes to the quarantine; None if it does not."""
        if not failing or self.repairs.quarantine is None:
            return None
        return f"no repair {verb} {', '.join(sorted({finding.code for finding in failing}))}"

    def _with_provenance(
        self, original: Row, written: AuditedRow, number: int, outcome: Outcome, inside: str
    ) -> Row:
        """A row as it is written: with the log's columns, and its provenance at the top level or in `inside`."""
        row = self.group.with_log_columns(original, written.row)
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

    def _audit(self, rollouts: Sequence[Rollout], auditor: Auditor, again: Again) -> list[AuditedRollout]:
        """Audit rollouts; one that the tokenizer cannot encode without the tokenizer."""
        audited = []
        for rollout in rollouts:
            with guard_plugin("the audit", rollout.place, LEAVE_OUT):
                try:
                    each = self._audit_rollout(rollout, auditor, again)
                except EncodeError as error:
                    each = self._audit_rollout(rollout, auditor.without_tokenizer(), again)
                    each = replace(each, result=add_encode_error(each.result, str(error), self.all_codes))
            audited.append(each)
        return audited

    def _audit_rollout(self, rollout: Rollout, auditor: Auditor, again: Again) -> AuditedRollout:
        """Audit a rollout with all rules, of which those not selected may fail."""
        trained_again, renderer = again.get(rollout.place.item, ()), auditor.renderer_for(rollout)
        speakers, conventions = auditor.speakers, auditor.conventions
        evidence = gather(rollout, auditor.tokenizer, renderer, speakers, conventions, trained_again)
        ignored = self.all_codes - self.codes
        findings, skips = check(evidence, self.rules, self.all_codes, all_repairs, SINGLE, ignored)
        counts, shows = count_rollout(evidence), witness(evidence)
        counts |= uncompared_count(counts, [skip for skip in skips if skip.code in self.codes], self.codes)
        result = Result(rollout.place, evidence.rollout, findings, skips, counts, witness=shows)
        return AuditedRollout(evidence, result)

    def _select_codes(self, result: Result) -> Result:
        """The result with the selected codes only, plus what its rollout trains."""
        findings = tuple(finding for finding in result.findings if finding.code in self.codes)
        skips = tuple(skip for skip in result.skips if skip.code in self.codes)
        trainings = None if result.rollout is None or not self.compares else trainings_of(result.rollout)
        return replace(result, findings=findings, skips=skips, trainings=trainings)

    def _failing(self, results: Sequence[Result]) -> list[Finding]:
        return [finding for result in results for finding in failing_findings(self.settings, result)]


def count_failing(flow: RowFlow, file: str, result: Result) -> int:
    """How many findings of a result fail the run by the settings of its log."""
    return sum(finding.times for finding in failing_findings(flow.groups[file].settings, result))


def failing_findings(settings: Settings, result: Result) -> Iterator[Finding]:
    """The findings of a result at or above `fail_on`."""
    bar = Severity.threshold(settings.fail_on)
    return (finding for finding in result.findings if bar is not None and finding.severity >= bar)


def chosen_repairs(repairs: RepairSettings) -> tuple[Repair, ...]:
    """The repairs of a run in the order to try them; SetupError if a named one may not run."""
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
