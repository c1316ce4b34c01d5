"""From evidence to findings: every difference given to one rule, every rule asked or skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tito_audit.evidence.model import Difference, Evidence, Explained
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Finding, Hit, Severity, Side, Skip
from tito_audit.repair import Repair, Safety
from tito_audit.rule import Rule, missing

__all__ = ["check", "explain"]

_SHOWN = 16
"""Tokens of a side that a finding carries; the rest is counted in its message."""


def explain(evidence: Evidence, rules: Sequence[Rule]) -> Evidence:
    """The evidence with every difference given to the rule of lowest precedence that has a reason for it.

    All rules take part, selected or not, so that leaving one out never renames a difference.
    """
    owners = sorted((rule for rule in rules if rule.explain is not None), key=lambda rule: rule.precedence)
    explained = []
    for difference in evidence.differences:
        for rule in owners:
            reason = rule.explain(difference, evidence) if rule.explain else None
            if reason is not None:
                explained.append(Explained(difference, rule.code, reason.cause, reason.message))
                break
    return replace(evidence, explained=tuple(explained), memo={})


def check(
    evidence: Evidence, rules: Sequence[Rule], selected: frozenset[str], repairs: Sequence[Repair] = ()
) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """Findings of the selected codes, in the order of codes, and what those rules could not look at.

    With `repairs`, each finding that is no note names the first that would take it on.
    """
    evidence = explain(evidence, rules)
    findings: list[Finding] = []
    skips: list[Skip] = []
    for rule in rules:
        if rule.code not in selected:
            continue
        because = missing(rule, evidence.present)
        hits = _hits(rule, evidence)
        if because is not None and not hits:
            skips.append(Skip(rule.code, because))
            continue
        if rule.check is not None:
            hits = list(rule.check(evidence))
        findings += [
            Finding(
                rule.code,
                rule.severity if hit.severity is None else hit.severity,
                evidence.rollout.place,
                hit,
            )
            for hit in hits
        ]
    return tuple(_with_repair(finding, evidence, repairs) for finding in findings), tuple(skips)


def _with_repair(finding: Finding, evidence: Evidence, repairs: Sequence[Repair]) -> Finding:
    """The finding with the name of the repair that it calls for; a note calls for none."""
    if finding.severity is Severity.NOTE:
        return finding
    for repair in repairs:
        if repair.safety is not Safety.UNSAFE and repair.claims(finding.code) and repair.fits(evidence, finding):
            return replace(finding, repair=repair.name)
    return finding


def _hits(rule: Rule, evidence: Evidence) -> list[Hit]:
    """The differences that a rule owns, as hits."""
    return [
        Hit(
            one.difference.where,
            one.difference.start,
            one.difference.end,
            one.message,
            turn=one.difference.turn,
            cause=one.cause,
            severity=_severity(rule, one.difference),
            recorded=_side(one.difference.recorded.ids, evidence),
            canonical=_side(one.difference.canonical.ids, evidence),
        )
        for one in evidence.explained
        if one.code == rule.code
    ]


def _severity(rule: Rule, difference: Difference) -> Severity:
    return min(rule.severity, difference.severity)


def _side(ids: Ids, evidence: Evidence) -> Side:
    """A side bounded to what a reader takes in."""
    return evidence.side(ids[:_SHOWN])
