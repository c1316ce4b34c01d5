"""From evidence to findings: one rule explains each difference, and each selected rule runs or is skipped."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import NamedTuple, TypeVar

from tito_audit.align.blocks import BlockKind
from tito_audit.errors import ODD_VALUES, PluginError, TitoAuditError, describe_error
from tito_audit.evidence.judgement import JUDGEMENT
from tito_audit.evidence.logprobs import verified_parts
from tito_audit.evidence.model import Against, Evidence, Explained, Occasion, Verified
from tito_audit.evidence.needs import Needs, applies
from tito_audit.record.finding import TRAINING_ROW, Finding, FoldedFindings, Hit, Severity, Skip, Where
from tito_audit.record.rollout import Place
from tito_audit.record.stated import NotRead
from tito_audit.repair import Repair, Safety
from tito_audit.rule import Explain, Rule, hit_of, missing_evidence
from tito_audit.run.guard import plugin_error
from tito_audit.run.headlines import Turns, headline_of, link_findings

_T = TypeVar("_T", Hit, Explained)
SINGLE = 100
"""From this many findings of one rule, severity and cause in a rollout on, further ones are folded into one."""


class Spot(NamedTuple):
    """Where a hit is: what a folded finding keeps of it."""

    where: Where
    turn: int | None
    start: int
    end: int
    cause: str
    later_turn: int | None
    beside: bool
    """Whether it is shown against the training row."""

    @classmethod
    def of(cls, hit: Hit) -> Spot:
        """The spot of a hit."""
        beside = hit.canonical.label == TRAINING_ROW
        return cls(hit.where, hit.turn, hit.start, hit.end, hit.cause, hit.later_turn, beside)

    @classmethod
    def of_difference(cls, explained: Explained) -> Spot:
        """The spot of the hit of an explained difference."""
        at, cause = explained.difference, explained.cause
        return cls(at.where, at.turn, at.start, at.end, cause, at.later_turn, at.against is Against.ROW)


@dataclass(slots=True)
class _FoldGroup:
    """Findings of one rule, severity and cause."""

    hits: int = 0
    at: int = -1
    """The index of the finding that the others are folded into; -1: none is folded."""
    tokens: int = 0
    places: array[int] = field(default_factory=partial(array, "q"))
    turns: dict[int | None, None] = field(default_factory=dict)

    def add(self, spot: Spot) -> None:
        self.tokens += spot.end - spot.start
        self.places.extend((-1 if spot.turn is None else spot.turn, spot.start, spot.end))
        self.turns[spot.turn if spot.later_turn is None else spot.later_turn] = None


class FindingCollector:
    """Collects the findings of a rollout; beyond `single` of one kind, the others are folded into one.

    `calls_at` are the rows of joined calls; findings of different rows are not folded. `single` None folds none.
    """

    def __init__(
        self, place: Place, calls_at: tuple[tuple[str, int], ...] = (), single: int | None = SINGLE
    ) -> None:
        self._place = place
        self._calls_at = calls_at
        self._single = single
        self._findings: list[Finding] = []
        self._groups: dict[Hashable, _FoldGroup] = {}

    def __bool__(self) -> bool:
        return bool(self._findings)

    def wants(self, code: str, severity: Severity, spot_of: Callable[[_T], Spot], shown: _T) -> bool:
        """Count what is to be shown; False if it is folded into another finding, so that no hit need be made.

        Hits are counted by their spots, which are made once there are enough findings to fold any.
        """
        if self._single is None or len(self._findings) < self._single:
            return True
        if not self._groups:
            for finding in self._findings:
                self._count(finding.code, finding.severity, Spot.of(finding.hit))
        return self._count(code, severity, spot_of(shown))

    def _count(self, code: str, severity: Severity, spot: Spot) -> bool:
        row = self._calls_at[spot.turn] if self._calls_at and spot.turn is not None else None
        key = code, severity, spot.cause, spot.where, spot.later_turn is None, spot.beside, row
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _FoldGroup()
        group.hits += 1
        if self._single is None or group.hits <= self._single:
            return True
        group.add(spot)
        if group.at < 0:
            group.at = len(self._findings)
            return True
        return False

    def append(self, rule: Rule, severity: Severity, hit: Hit) -> None:
        """Add a hit of a rule for which `wants` was True."""
        headline = headline_of(rule, rule.code, severity, hit)
        self._findings.append(Finding(rule.code, severity, self._place, hit, headline=headline))

    def add_hit(self, rule: Rule, hit: Hit) -> None:
        """Add or fold a hit of a rule, which has the rule's severity unless it has its own."""
        severity = rule.severity if hit.severity is None else hit.severity
        if self.wants(rule.code, severity, Spot.of, hit):
            self.append(rule, severity, hit)

    def fold(self) -> tuple[list[Finding], dict[int, Turns]]:
        """The findings in order and, by index, the turns of those that others were folded into."""
        turns: dict[int, Turns] = {}
        for group in self._groups.values():
            if group.hits > (self._single or 0) + 1 and group.at >= 0:
                first, times = self._findings[group.at], group.hits - (self._single or 0)
                message = f"{first.hit.message} ({times - 1:,} more like this in the row are counted here)"
                packed, group.places = group.places.tobytes(), array("q")
                folded = FoldedFindings(times, len(group.turns), group.tokens, packed)
                self._findings[group.at] = replace(first, hit=replace(first.hit, message=message), folded=folded)
                turns[group.at] = group.turns.keys()
        return self._findings, turns


def explain_differences(
    evidence: Evidence, rules: Sequence[Rule], selected: frozenset[str] | None = None
) -> Evidence:
    """The evidence with each difference explained by the first rule, by precedence, that has a reason for it.

    All rules take part, so that deselecting one does not change the code of a difference. PluginError if a
    selected rule fails (None: all are selected).
    """
    if not evidence.differences and not evidence.explained:
        return evidence  # unchanged, so what it has cached stays valid
    explainers = _explainers(tuple(rules))
    explained: list[Explained] = []
    for difference in evidence.differences:
        # A construction that gives the recorded tokens is a proof and overrules what the bytes suggest.
        if (proof := difference.known_cause) is not None:
            explained.append(Explained(difference, proof.code, proof.cause, proof.what))
            continue
        for rule, explain in explainers[difference.kind, difference.where]:
            try:
                reason = explain(difference, evidence)
            except ODD_VALUES as error:
                if selected is None or rule.code in selected:
                    raise _rule_failure(rule, evidence, error) from error
                continue
            if reason is not None:
                explained.append(Explained(difference, rule.code, reason.cause, reason.what))
                break
    # Of what is cached, only the judgement of the row does not depend on the explanations.
    memo = {JUDGEMENT: evidence.memo[JUDGEMENT]} if JUDGEMENT in evidence.memo else {}
    return replace(evidence, explained=tuple(explained), memo=memo)


@lru_cache(maxsize=16)
def _explainers(rules: tuple[Rule, ...]) -> dict[tuple[BlockKind, Where], list[tuple[Rule, Explain]]]:
    """By kind and place of a difference: the rules that may explain it, lowest precedence first."""
    causes = [
        (rule, rule.explain) for rule in sorted(rules, key=attrgetter("precedence")) if rule.explain is not None
    ]
    return {
        (kind, where): [(rule, explain) for rule, explain in causes if kind in rule.kinds and where in rule.places]
        for kind in BlockKind
        for where in Where
    }


def check(
    evidence: Evidence,
    rules: Sequence[Rule],
    selected: frozenset[str],
    repairs: Callable[[], Sequence[Repair]] = tuple,
    single: int | None = None,
    ignored: frozenset[str] = frozenset(),
) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """The findings of the selected codes, in code order, and the rules that were skipped.

    With `repairs`, which is called only if needed, each finding above a note names the first repair that fits it.
    With `single`, further findings of one rule, severity and cause are folded into one. PluginError if a rule
    fails; an `ignored` rule is skipped instead.
    """
    explained = explain_differences(evidence, rules, selected - ignored)
    return check_explained(explained, rules, selected, repairs, single, ignored)


def check_explained(
    evidence: Evidence,
    rules: Sequence[Rule],
    selected: frozenset[str],
    repairs: Callable[[], Sequence[Repair]] = tuple,
    single: int | None = None,
    ignored: frozenset[str] = frozenset(),
) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """The same as `check`, for evidence returned by `explain_differences`."""
    owned: dict[str, list[Explained]] = {}  # the explained differences by the code of their rule
    for each in evidence.explained:
        owned.setdefault(each.code, []).append(each)
    stated = evidence.rollout.stated
    findings = FindingCollector(evidence.rollout.place, stated.calls_at, single)
    shown = verified_parts(evidence), evidence.occasions, frozenset(owned)
    to_run, skips = _rules_to_run(tuple(rules), selected, evidence.present, stated.reasons, *shown)
    for rule in to_run:
        if rule.check is not None:
            try:
                for hit in rule.check(evidence):
                    findings.add_hit(rule, hit)
            except ODD_VALUES as error:
                if rule.code not in ignored:
                    raise _rule_failure(rule, evidence, error) from error
                failure = Skip(rule.code, f"it failed: {describe_error(error)}")
                skips = tuple(sorted((*skips, failure), key=lambda skip: skip.code))
        for each in owned.get(rule.code, ()) if rule.check is None else ():
            severity = min(rule.severity, each.difference.severity)
            if findings.wants(rule.code, severity, Spot.of_difference, each):
                findings.append(rule, severity, hit_of(each, evidence, severity))
    if not findings:
        return (), skips
    linked = link_findings(*findings.fold())
    offered = None  # asked for only if needed
    for number, finding in enumerate(linked):
        if finding.severity is Severity.NOTE:
            continue
        if offered is None:
            offered = [each for each in repairs() if each.safety is not Safety.UNSAFE and not each.by_model]
        for repair in offered:
            try:
                fits = repair.claims(finding.code) and repair.fits(evidence, finding)
            except TitoAuditError:
                raise
            except ODD_VALUES as error:
                way_out = f"turn its rule off: `--ignore {finding.code}`"
                raise plugin_error(f"repair `{repair.name}`", finding.place, way_out, error) from error
            if fits:
                linked[number] = replace(finding, repair=repair.name)
                break
    return tuple(linked), skips


def _rule_failure(rule: Rule, evidence: Evidence, error: Exception) -> PluginError:
    place, code = evidence.rollout.place, rule.code
    return plugin_error(f"rule {code}", place, f"turn the rule off: `--ignore {code}`", error)


@lru_cache(maxsize=1024)
def _rules_to_run(
    rules: tuple[Rule, ...],
    selected: frozenset[str],
    present: Needs,
    reasons: tuple[NotRead, ...],
    verified: Verified,
    occasions: frozenset[Occasion],
    owned: frozenset[str],
) -> tuple[Sequence[Rule], tuple[Skip, ...]]:
    """The selected rules to run, and the skips of those that lack something.

    `owned` are the codes of explained differences: their rules run in any case. Of the others, rules that only
    explain differences, that find nothing in sound evidence, or that lack their occasion need not run.
    """
    reasoned = [(rule, missing_evidence(rule, present, reasons)) for rule in rules if rule.code in selected]
    skips = [
        Skip(rule.code, because, applies(rule.needs, present))
        for rule, because in reasoned
        if because is not None and rule.code not in owned
    ]
    able = [rule for rule, because in reasoned if because is None or rule.code in owned]
    to_run = [
        rule
        for rule in able
        if rule.code in owned
        or not (
            rule.check is None
            or (rule.silent and rule.silent in verified)
            or (rule.when is not None and rule.when not in occasions)
        )
    ]
    # One tuple shared by all rollouts is pickled once; most rollouts skip the same rules.
    return to_run, tuple(skips)
