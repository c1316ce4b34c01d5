"""Applies repairs to one row: each proposal is written, read back and audited again, and kept if that proves
it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.evidence.harm import harm
from tito_audit.evidence.model import Evidence
from tito_audit.format import Format, Row
from tito_audit.record.finding import Finding, Result, Severity
from tito_audit.record.repaired import RepairedRollout, unmended
from tito_audit.record.rollout import Rollout, TrainingRow, visible_part
from tito_audit.repair import Proposal, Repair, Safety
from tito_audit.rule import Rule
from tito_audit.run.check import explain
from tito_audit.run.guard import LEAVE_OUT, guarded
from tito_audit.settings.model import RepairChoices


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
_ROUNDS = 4
"""How many rounds of repairs a row gets while one of them still changes it."""

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
    for _ in range(_ROUNDS):
        before = applied.rows
        applied.declined.clear()
        applied.needs_unsafe.clear()
        _round(applied, others, form, audit, terms)
        if len(applied.rows) == len(before) and all(a is b for a, b in zip(applied.rows, before, strict=True)):
            break
    _round(applied, last, form, audit, terms)


def _round(applied: Applied, repairs: Sequence[Repair], form: Format, audit: Audit, terms: RepairTerms) -> None:
    """Try every repair once on the row in its current state."""
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
        repaired += proposal.rollouts if proposal is not None else (unmended(audited.rollout),)
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
    start, end = visible_part(row)
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
        because = next((why for old, new in pairs if (why := harm(old.evidence, new.evidence))), None)
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
    """How many findings these stand for."""
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
