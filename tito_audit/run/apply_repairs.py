"""From a row with findings to rows without: every repair proposed, written, audited again, kept if proven."""

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
from tito_audit.settings.model import RepairChoices

__all__ = ["Audit", "Audited", "Cure", "Terms", "Written", "cure_row"]


@dataclass(frozen=True, slots=True)
class Audited:
    """One rollout of a row with what was found in it."""

    evidence: Evidence
    result: Result

    @property
    def rollout(self) -> Rollout:
        """The rollout that was read."""
        return self.evidence.rollout


_ROUNDS = 4
"""How often all repairs are tried on a row, while any of them still cures something."""

Audit = Callable[[Row], list[Audited]]
"""Reads a row and audits its rollouts with every rule; RecordError when it cannot be read."""


@dataclass(frozen=True, slots=True)
class Written:
    """A row as it would be written, with its audit."""

    row: Row
    audited: tuple[Audited, ...]


@dataclass(slots=True)
class Cure:
    """What became of one row."""

    rows: list[Written]
    """[] when a repair left the row out."""
    cured: dict[str, tuple[str, ...]] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)
    needs_unsafe: set[str] = field(default_factory=set)
    """Repairs that declined for nothing but that they are unsafe here."""
    notes: list[str] = field(default_factory=list)
    costs: list[str] = field(default_factory=list)
    more_tokens: int = 0
    left_out: str | None = None
    """Why the row was left out."""


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms repairs run."""

    repairs: Sequence[Repair]
    """In the order in which they are tried."""
    rules: Sequence[Rule]
    threshold: Severity
    """Findings at or above it are acted on."""
    selected: frozenset[str]
    """Codes that are acted on; the proof looks at all."""
    unsafe: bool
    choices: RepairChoices


def cure_row(row: Row, form: Format, audited: Sequence[Audited], audit: Audit, terms: Terms) -> Cure:
    """The row after every repair that was proven on it, one after the other.

    A proposal is written by the format, read again and audited again; it is kept when fewer findings of the
    codes that it claims are left, none is worse and none is new. Otherwise the row stays as it was before it,
    and the reason is in `declined`.
    """
    cure = Cure([Written(row, tuple(audited))])
    if terms.threshold < Severity.ERROR:
        # What is asked for beside errors must not keep an error from its repair.
        _rounds(cure, form, audit, replace(terms, threshold=Severity.ERROR))
    _rounds(cure, form, audit, terms)
    return cure


def _rounds(cure: Cure, form: Format, audit: Audit, terms: Terms) -> None:
    """All repairs tried on what became of the row, as often as one of them still cures something."""
    if not cure.rows:
        return
    # What one repair cures may be what kept an earlier one from being proven.
    last = [repair for repair in terms.repairs if repair.removes_rows]
    others = [repair for repair in terms.repairs if not repair.removes_rows]
    for _ in range(_ROUNDS):
        before = cure.rows
        cure.declined.clear()
        cure.needs_unsafe.clear()
        _round(cure, others, form, audit, terms)
        if len(cure.rows) == len(before) and all(a is b for a, b in zip(cure.rows, before, strict=True)):
            break
    _round(cure, last, form, audit, terms)


def _round(cure: Cure, repairs: Sequence[Repair], form: Format, audit: Audit, terms: Terms) -> None:
    """Every repair tried once on what became of the row."""
    for repair in repairs:
        rows: list[Written] = []
        for written in cure.rows:
            rows += _step(written, repair, form, audit, terms, cure)
            if cure.left_out is not None:
                cure.rows = []
                return
        cure.rows = rows


def _step(written: Written, repair: Repair, form: Format, audit: Audit, terms: Terms, cure: Cure) -> list[Written]:
    """What one repair makes of one row: the row itself where it does nothing that could be proven."""
    mends = _mends(written, repair, terms, cure)
    if any(not mend.rollouts for mend in mends.values()):
        cure.left_out = next(mend.reason for mend in mends.values() if not mend.rollouts)
        cure.cured[repair.name] = _codes(_claimed(written, repair, terms))
        return []
    after = _proven(written, mends, repair, form, audit, terms, cure)
    if after is None:
        return [written]
    before = _claimed(written, repair, terms)
    left = [f for one in after for f in _claimed(one, repair, terms)]
    codes = _codes(f for f in before if _count(before, f.code) > _count(left, f.code))
    cure.cured[repair.name] = tuple(dict.fromkeys((*cure.cured.get(repair.name, ()), *codes)))
    for mend in mends.values():
        _mark(cure, mend)
    return after


def _proven(
    written: Written,
    mends: dict[int, Proposal],
    repair: Repair,
    form: Format,
    audit: Audit,
    terms: Terms,
    cure: Cure,
) -> list[Written] | None:
    """The row with those of the proposals that the audit proves, which alone stay in `mends`; None without any.

    Each rollout of a group is judged by itself: what cannot be done for one keeps no other from its cure.
    """
    while mends:
        try:
            after = _written_again(written, mends, form, audit)
        except RecordError as error:
            if len(mends) == 1:
                cure.declined.setdefault(repair.name, str(error))
                return None
            alone = {item: {item: mend} for item, mend in mends.items()}
            bad = {
                n for n, one in alone.items() if _proven(written, one, repair, form, audit, terms, cure) is None
            }
            bad = bad or {max(mends)}
        else:
            reasons = {
                item: because
                for item in mends
                if (because := _refuted(*_of_item(written, after, item), repair, terms, mends[item].adds))
            }
            if not reasons:
                return after
            cure.declined.setdefault(repair.name, next(iter(reasons.values())))
            bad = set(reasons)
        for item in bad:
            del mends[item]
    return None


def _of_item(before: Written, after: list[Written], item: int) -> tuple[Written, list[Written]]:
    """The part of a row that a proposal is about, before and after; all of it but in a group."""
    if len(before.audited) == 1:
        return before, after
    number = next(n for n, one in enumerate(before.audited) if one.rollout.place.item == item)
    (row,) = after
    return Written(before.row, before.audited[number : number + 1]), [
        Written(row.row, row.audited[number : number + 1])
    ]


def _mends(written: Written, repair: Repair, terms: Terms, cure: Cure) -> dict[int, Proposal]:
    """What the repair proposes for the rollouts of a row, by their item."""
    mends: dict[int, Proposal] = {}
    for one in written.audited:
        findings = tuple(f for f in one.result.findings if _acts_on(f, repair, terms))
        if not findings and not repair.chosen(terms.choices):
            continue
        try:
            mend = repair.mend(explain(one.evidence, terms.rules), findings, terms.choices)
        except RecordError as error:
            cure.declined.setdefault(repair.name, str(error))
            continue
        if mend is None:
            continue
        if mend.safety is Safety.UNSAFE and not terms.unsafe:
            if repair.name not in cure.declined:
                cure.needs_unsafe.add(repair.name)
                cure.declined[repair.name] = f"unsafe here, needs --unsafe: {mend.reason}"
            continue
        mends[one.rollout.place.item] = mend
    return mends


def _written_again(written: Written, mends: Mapping[int, Proposal], form: Format, audit: Audit) -> list[Written]:
    """The rows that the format makes of the proposals, read and audited; RecordError if they say less."""
    mended: list[RepairedRollout] = []
    for one in written.audited:
        mend = mends.get(one.rollout.place.item)
        mended += mend.rollouts if mend is not None else (unmended(one.rollout),)
    rows = form.update(written.row, mended)
    out = [Written(row, tuple(audit(row))) for row in rows]
    if len(written.audited) == 1:
        pairs = [(want, got.audited) for want, got in zip(mended, out, strict=False)]
        if len(out) != len(mended):
            raise RecordError(f"the format {form.name} wrote {len(out)} rows for {len(mended)}")
    else:
        pairs = [(want, (got,)) for want, got in zip(mended, out[0].audited, strict=False)]
        if len(out) != 1 or len(out[0].audited) != len(mended):
            raise RecordError(f"the format {form.name} cannot hold the parts of a fork beside other rollouts")
    for want, got in pairs:
        _holds(form, want.rollout, got)
    return out


def _holds(form: Format, want: Rollout, got: Sequence[Audited]) -> None:
    """RecordError unless reading the written row gives what the repair wanted to be there."""
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
    """The row as it is read again: without what an attention mask hides at its ends and nothing trains."""
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
    """Equal values; what a column writes where nothing is known counts as unknown."""
    if got is None or want is None:
        return got is want
    if got.dtype.kind != "f":
        return bool(np.array_equal(got, want))
    one, other = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if row is not None:
        marks = [c.sentinel for c in row.columns if c.role == "logprobs" and c.sentinel is not None]
        one, other = (np.where(np.isnan(x) | np.isin(x, marks), np.nan, x) for x in (one, other))
    return len(one) == len(other) and bool(np.allclose(one, other, rtol=1e-6, atol=0, equal_nan=True))


def _refuted(
    before: Written, after: Sequence[Written], repair: Repair, terms: Terms, adds: frozenset[str]
) -> str | None:
    """Why the new rows must not be written; None when the audit proves them better and no pair of them worse."""
    if repair.safety is not Safety.UNSAFE and len(after) == 1:
        pairs = zip(before.audited, after[0].audited, strict=False)
        because = next((why for old, new in pairs if (why := harm(old.evidence, new.evidence))), None)
        if because is not None:
            return because
    return _unproven(before, after, repair, terms, adds)


def _unproven(
    before: Written, after: Sequence[Written], repair: Repair, terms: Terms, adds: frozenset[str]
) -> str | None:
    """Why the audit does not prove the new rows better; None when it does."""
    claimed = _claimed(before, repair, terms)
    left = [f for one in after for f in _claimed(one, repair, terms)]
    if claimed and len(left) >= len(claimed) and not repair.chosen(terms.choices):
        return f"{', '.join(_codes(left))} would still be there"
    known = _worst_by_kind(_found(before))
    for kind, severity in _worst_by_kind(f for one in after for f in _found(one)).items():
        if severity >= Severity.WARNING and severity > known.get(kind, Severity.NOTE) and kind[0] not in adds:
            cause = f" ({kind[1]})" if kind[1] else ""
            return f"the repaired row would have {kind[0]}{cause}, which it has not now"
    return None


def _acts_on(finding: Finding, repair: Repair, terms: Terms) -> bool:
    return finding.severity >= terms.threshold and finding.code in terms.selected and repair.claims(finding.code)


def _claimed(written: Written, repair: Repair, terms: Terms) -> list[Finding]:
    return [finding for finding in _found(written) if _acts_on(finding, repair, terms)]


def _found(written: Written) -> list[Finding]:
    return [finding for one in written.audited for finding in one.result.findings]


def _worst_by_kind(findings: Iterable[Finding]) -> dict[tuple[str, str], Severity]:
    worst: dict[tuple[str, str], Severity] = {}
    for finding in findings:
        kind = (finding.code, finding.hit.cause)
        worst[kind] = max(worst.get(kind, Severity.NOTE), finding.severity)
    return worst


def _codes(findings: Iterable[Finding]) -> tuple[str, ...]:
    return tuple(sorted({finding.code for finding in findings}))


def _count(findings: Sequence[Finding], code: str) -> int:
    return sum(finding.code == code for finding in findings)


def _mark(cure: Cure, mend: Proposal) -> None:
    """Keep what the repair says of itself, for the reader and for the provenance column."""
    costs = [mend.cost] if mend.cost else []
    notes = [
        *costs,
        *mend.notes,
        *(f"{name} is stale from the first changed token on and null there" for name in mend.stale),
        *(f"{name} cannot be rebuilt and is null" for name in mend.dropped),
        *(
            f"{count} entries of {name} have no recorded value and are null"
            for name, count in mend.unknown.items()
        ),
    ]
    cure.more_tokens += mend.more_tokens
    cure.notes += [note for note in notes if note not in cure.notes]
    cure.costs += costs
