"""From evidence to findings: each difference goes to one rule, and each rule runs or is skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from tito_audit.errors import ODD_VALUES, PluginError, in_words
from tito_audit.evidence.judgement import JUDGEMENT
from tito_audit.evidence.model import Difference, Evidence, Explained, Sound
from tito_audit.evidence.needs import Needs, applies
from tito_audit.record.finding import Finding, Severity, Skip
from tito_audit.record.stated import NotRead
from tito_audit.repair import Repair, Safety
from tito_audit.rule import Reason, Rule, hit_of, missing
from tito_audit.run.fold import Findings, Spot
from tito_audit.run.guard import failed, guarded
from tito_audit.run.headlines import linked

_Explain = Callable[[Difference, Evidence], Reason | None]
_Owners = tuple[tuple[Rule, _Explain], ...]


def explain(evidence: Evidence, rules: Sequence[Rule], selected: frozenset[str] | None = None) -> Evidence:
    """The evidence, with each difference explained by the rule of lowest precedence that has a reason for it.

    All rules take part, selected or not, so deselecting a rule never changes the code of a difference, unless
    the rule fails. PluginError if a rule fails that is selected (None: all are).
    """
    if not evidence.differences and not evidence.explained:
        return evidence  # nothing to explain, so its cache stays valid
    owners = _owners(tuple(rules))
    explained = tuple(
        Explained(difference, *reason)
        for difference in evidence.differences
        if (reason := _reason(difference, evidence, owners, selected)) is not None
    )
    # The judgement of the row does not depend on why it differs.
    memo = {JUDGEMENT: evidence.memo[JUDGEMENT]} if JUDGEMENT in evidence.memo else {}
    return replace(evidence, explained=explained, memo=memo)


def _reason(
    difference: Difference, evidence: Evidence, owners: _Owners, selected: frozenset[str] | None
) -> tuple[str, str, str] | None:
    """The code that owns a difference, its cause and what it is; None if no rule has a reason."""
    construction = difference.construction
    # A construction that gives the recorded tokens is a proof; no guess from the bytes overrules it.
    if construction is not None:
        return construction.code, construction.cause, construction.what
    for rule, reason_for in owners:
        try:
            reason = reason_for(difference, evidence)
        except ODD_VALUES as error:
            if selected is None or rule.code in selected:
                raise _failed(rule, evidence, error) from error
            continue
        if reason is not None:
            return rule.code, reason.cause, reason.what
    return None


def check(
    evidence: Evidence,
    rules: Sequence[Rule],
    selected: frozenset[str],
    repairs: Callable[[], Sequence[Repair]] = tuple,
    single: int | None = None,
    ignored: frozenset[str] = frozenset(),
) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """The findings of the selected codes, in code order, and the rules that had to be skipped.

    With `repairs`, each finding above a note names the first repair that fits it; `repairs` is called only if
    there is such a finding. With `single`, findings of one rule, severity and cause beyond that many are folded
    into one. PluginError if a rule fails; one that is `ignored` is skipped instead.
    """
    explained = explain(evidence, rules, selected - ignored)
    return check_explained(explained, rules, selected, repairs, single, ignored)


def check_explained(
    evidence: Evidence,
    rules: Sequence[Rule],
    selected: frozenset[str],
    repairs: Callable[[], Sequence[Repair]] = tuple,
    single: int | None = None,
    ignored: frozenset[str] = frozenset(),
) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """The same for evidence returned by `explain`."""
    owned = _owned(evidence)
    found = Findings(evidence.rollout.place, evidence.rollout.stated.calls_at, single)
    skips: list[Skip] = []
    for rule, skip in _asked(
        tuple(rules), selected, evidence.present, evidence.rollout.stated.reasons, evidence.sound, bool(owned)
    ):
        mine = owned.get(rule.code)
        if skip is not None and mine is None:
            skips.append(skip)
            continue
        if rule.check is not None:
            try:
                for hit in rule.check(evidence):
                    found.take(rule.code, rule.severity, hit)
            except ODD_VALUES as error:
                if rule.code not in ignored:
                    raise _failed(rule, evidence, error) from error
                skips.append(Skip(rule.code, f"it failed: {in_words(error)}"))
        for one in mine or () if rule.check is None else ():
            severity = min(rule.severity, one.difference.severity)
            if found.wants(rule.code, severity, Spot.of_difference(one)):
                found.add(rule.code, severity, hit_of(one, evidence, severity))
    if not found:
        return (), tuple(skips)
    findings = linked(*found.folded(), rules)
    codes = {finding.code for finding in findings if finding.severity is not Severity.NOTE}
    offers = {code: _offers(code, repairs()) for code in codes}
    return tuple(_with_repair(one, evidence, offers) for one in findings), tuple(skips)


def _failed(rule: Rule, evidence: Evidence, error: Exception) -> PluginError:
    place, code = evidence.rollout.place, rule.code
    return failed(f"rule {code}", place, f"turn the rule off: `--ignore {code}`", error)


@lru_cache(maxsize=64)
def _owners(rules: tuple[Rule, ...]) -> _Owners:
    """The rules that explain differences, by precedence, each with its function."""
    owners = [(rule, rule.explain) for rule in rules if rule.explain is not None]
    return tuple(sorted(owners, key=lambda owner: owner[0].precedence))


@lru_cache(maxsize=256)
def _asked(
    rules: tuple[Rule, ...],
    selected: frozenset[str],
    present: Needs,
    reasons: tuple[NotRead, ...],
    sound: Sound,
    differs: bool,
) -> tuple[tuple[Rule, Skip | None], ...]:
    """The selected rules to run, each with its skip if it lacks something.

    Without differences, a rule that only explains them matters only for its skip; so does a rule that finds
    nothing in sound evidence.
    """
    asked = ((rule, missing(rule, present, reasons)) for rule in rules if rule.code in selected)
    return tuple(
        (rule, None if because is None else Skip(rule.code, because, applies(rule.needs, present)))
        for rule, because in asked
        if because is not None
        or differs
        or (rule.check is not None and not (rule.silent and rule.silent in sound))
    )


def _owned(evidence: Evidence) -> Mapping[str, Sequence[Explained]]:
    """The explained differences by the code of their rule."""
    owned: dict[str, list[Explained]] = {}
    for one in evidence.explained:
        owned.setdefault(one.code, []).append(one)
    return owned


def _offers(code: str, repairs: Sequence[Repair]) -> list[Repair]:
    """The repairs that claim a code and run by default."""
    by_log = (repair for repair in repairs if repair.safety is not Safety.UNSAFE and not repair.by_model)
    return [repair for repair in by_log if repair.claims(code)]


def _with_repair(finding: Finding, evidence: Evidence, offers: Mapping[str, Sequence[Repair]]) -> Finding:
    """The finding with the name of the repair that fits it; a note gets none."""
    if finding.severity is Severity.NOTE:
        return finding
    for repair in offers[finding.code]:
        with guarded(f"repair `{repair.name}`", finding.place, f"turn its rule off: `--ignore {finding.code}`"):
            if repair.fits(evidence, finding):
                return replace(finding, repair=repair.name)
    return finding
