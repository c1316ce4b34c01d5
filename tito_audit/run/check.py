"""From evidence to findings: every difference given to one rule, every rule asked or skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from tito_audit.evidence.model import Difference, Evidence, Explained
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Finding, Hit, Severity, Side, Skip
from tito_audit.record.stated import NotRead
from tito_audit.repair import Repair, Safety
from tito_audit.rule import Reason, Rule, missing

__all__ = ["check", "check_explained", "explain"]

_SHOWN = 16
"""Tokens of a side that a finding carries; the rest is counted in its message."""

Explain = Callable[[Difference, Evidence], Reason | None]


def explain(evidence: Evidence, rules: Sequence[Rule]) -> Evidence:
    """The evidence with every difference given to the rule of lowest precedence that has a reason for it.

    All rules take part, selected or not, so that leaving one out never renames a difference.
    """
    if not evidence.differences and not evidence.explained:
        return evidence  # nothing to explain, so nothing that was worked out of it changes either
    explained = []
    for difference in evidence.differences:
        built = difference.built
        if built is not None and built.code in _checking(tuple(rules)):
            explained.append(Explained(difference, built.code, built.cause, built.what))
            continue
        for rule, reason_for in _owners(tuple(rules)):
            # That it gives the recorded tokens is a proof, which no reading of the bytes beats.
            if built is not None and rule.code != built.code:
                continue
            reason = reason_for(difference, evidence)
            if reason is not None:
                explained.append(Explained(difference, rule.code, reason.cause, reason.message))
                break
    return replace(evidence, explained=tuple(explained), memo={})


def check(
    evidence: Evidence,
    rules: Sequence[Rule],
    selected: frozenset[str],
    repairs: Callable[[], Sequence[Repair]] = tuple,
) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """Findings of the selected codes, in the order of codes, and what those rules could not look at.

    With `repairs`, each finding that is no note names the first that would take it on; they are asked for only
    where there is such a finding.
    """
    return check_explained(explain(evidence, rules), rules, selected, repairs)


def check_explained(
    evidence: Evidence,
    rules: Sequence[Rule],
    selected: frozenset[str],
    repairs: Callable[[], Sequence[Repair]] = tuple,
) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """The same of evidence whose differences were given to rules already."""
    owned = _owned(evidence)
    findings: list[Finding] = []
    skips: list[Skip] = []
    for rule, skip in _asked(
        tuple(rules), selected, evidence.present, evidence.rollout.stated.reasons, bool(owned)
    ):
        mine = owned.get(rule.code)
        if skip is not None and mine is None:
            skips.append(skip)
            continue
        if rule.check is not None:
            hits = rule.check(evidence)
        elif mine is not None:
            hits = (_hit(rule, one, evidence) for one in mine)
        else:
            continue
        for hit in hits:
            severity = rule.severity if hit.severity is None else hit.severity
            findings.append(Finding(rule.code, severity, evidence.rollout.place, hit))
    if not findings:
        return (), tuple(skips)
    codes = {finding.code for finding in findings if finding.severity is not Severity.NOTE}
    offers = {code: _offers(code, repairs()) for code in codes}
    return tuple(_with_repair(one, evidence, offers) for one in findings), tuple(skips)


@lru_cache(maxsize=64)
def _owners(rules: tuple[Rule, ...]) -> tuple[tuple[Rule, Explain], ...]:
    """The rules that name causes of differences, by precedence, each with how it does."""
    owners = [(rule, rule.explain) for rule in rules if rule.explain is not None]
    return tuple(sorted(owners, key=lambda owner: owner[0].precedence))


@lru_cache(maxsize=64)
def _checking(rules: tuple[Rule, ...]) -> frozenset[str]:
    """The codes of rules that look for themselves at what is explained."""
    return frozenset(rule.code for rule in rules if rule.check is not None)


@lru_cache(maxsize=256)
def _asked(
    rules: tuple[Rule, ...],
    selected: frozenset[str],
    present: Needs,
    reasons: tuple[NotRead, ...],
    differs: bool,
) -> tuple[tuple[Rule, Skip | None], ...]:
    """The selected rules that may speak, each with the skip that stands for it when it cannot look.

    Where nothing differs, a rule that names the cause of differences has nothing to say but that.
    """
    asked = ((rule, missing(rule, present, reasons)) for rule in rules if rule.code in selected)
    return tuple(
        (rule, None if because is None else Skip(rule.code, because))
        for rule, because in asked
        if differs or rule.check is not None or because is not None
    )


def _owned(evidence: Evidence) -> dict[str, list[Explained]]:
    """The differences by the code of the rule that owns them."""
    owned: dict[str, list[Explained]] = {}
    for one in evidence.explained:
        owned.setdefault(one.code, []).append(one)
    return owned


def _offers(code: str, repairs: Sequence[Repair]) -> list[Repair]:
    """The repairs that claim a code and may run without being asked for."""
    return [repair for repair in repairs if repair.safety is not Safety.UNSAFE and repair.claims(code)]


def _with_repair(finding: Finding, evidence: Evidence, offers: Mapping[str, Sequence[Repair]]) -> Finding:
    """The finding with the name of the repair that it calls for; a note calls for none."""
    if finding.severity is Severity.NOTE:
        return finding
    name = next((repair.name for repair in offers[finding.code] if repair.fits(evidence, finding)), None)
    if name is None:
        return finding
    return replace(finding, repair=name)


def _hit(rule: Rule, one: Explained, evidence: Evidence) -> Hit:
    """A difference that a rule owns, as a hit."""
    difference = one.difference
    return Hit(
        difference.where,
        difference.start,
        difference.end,
        one.message,
        turn=difference.turn,
        cause=one.cause,
        severity=min(rule.severity, difference.severity),
        recorded=_side(difference.recorded.ids, evidence),
        canonical=_side(difference.canonical.ids, evidence),
    )


def _side(ids: Ids, evidence: Evidence) -> Side:
    """A side bounded to what a reader takes in."""
    return evidence.side(ids[:_SHOWN])
