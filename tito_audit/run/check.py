"""From evidence to findings: each difference goes to one rule, and each rule runs or is skipped."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from tito_audit.errors import ODD_VALUES, PluginError, describe_error
from tito_audit.evidence.judgement import JUDGEMENT
from tito_audit.evidence.logprobs import verified_parts
from tito_audit.evidence.model import Against, Difference, Evidence, Explained, Verified
from tito_audit.evidence.needs import Needs, applies
from tito_audit.record.finding import TRAINING_ROW, Finding, FoldedFindings, Hit, Severity, Skip, Where
from tito_audit.record.rollout import Place
from tito_audit.record.stated import NotRead
from tito_audit.repair import Repair, Safety
from tito_audit.rule import Reason, Rule, hit_of, missing_evidence
from tito_audit.run.guard import failed, guarded
from tito_audit.run.headlines import Turns, linked

SINGLE = 100
"""How many findings of one rule, severity and cause in one rollout are each a finding of their own."""


class Spot(NamedTuple):
    """Where a hit is: all that a folded finding keeps of it."""

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
        differs: Difference = explained.difference
        beside = differs.against is Against.ROW
        return cls(
            differs.where, differs.turn, differs.start, differs.end, explained.cause, differs.later_turn, beside
        )


@dataclass(slots=True)
class _Group:
    """Findings of one rule, severity and cause."""

    hits: int = 0
    at: int = -1
    """The number of the finding that the others are folded into."""
    tokens: int = 0
    places: array[int] = field(default_factory=lambda: array("q"))
    turns: dict[int | None, None] = field(default_factory=dict)

    def add(self, spot: Spot) -> None:
        self.tokens += spot.end - spot.start
        self.places.extend((-1 if spot.turn is None else spot.turn, spot.start, spot.end))
        self.turns[spot.turn if spot.later_turn is None else spot.later_turn] = None


class Findings:
    """The findings of a rollout as its rules find them; beyond `single` of one kind, the others become one.

    `calls_at` are the rows of the calls if single calls were joined: findings of different rows stay apart.
    `single` None folds nothing.
    """

    def __init__(
        self, place: Place, calls_at: tuple[tuple[str, int], ...] = (), single: int | None = SINGLE
    ) -> None:
        self._place = place
        self._calls_at = calls_at
        self._single = single
        self._findings: list[Finding] = []
        self._groups: dict[Hashable, _Group] = {}

    def __bool__(self) -> bool:
        return bool(self._findings)

    def wants(self, code: str, severity: Severity, spot: Spot) -> bool:
        """Whether the hit at a spot has to be made: to be a finding, or the first of those that become one."""
        if self._single is None:
            return True
        row = self._calls_at[spot.turn] if self._calls_at and spot.turn is not None else None
        key = code, severity, spot.cause, spot.where, spot.later_turn is None, spot.beside, row
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        group.hits += 1
        if group.hits <= self._single:
            return True
        group.add(spot)
        if group.at < 0:
            group.at = len(self._findings)
            return True
        return False

    def add(self, code: str, severity: Severity, hit: Hit) -> None:
        """Add the hit at a spot that was wanted last."""
        self._findings.append(Finding(code, severity, self._place, hit))

    def take(self, code: str, usual: Severity, hit: Hit) -> None:
        """Add a hit of a rule, `usual` being its severity if it has none of its own."""
        severity = usual if hit.severity is None else hit.severity
        if self.wants(code, severity, Spot.of(hit)):
            self.add(code, severity, hit)

    def folded(self) -> tuple[list[Finding], dict[int, Turns]]:
        """The findings in order, and by number the turns of those that others were folded into."""
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
    known_cause = difference.known_cause
    # A construction that gives the recorded tokens is a proof; no guess from the bytes overrules it.
    if known_cause is not None:
        return known_cause.code, known_cause.cause, known_cause.what
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
    owned: dict[str, list[Explained]] = {}  # the explained differences by the code of their rule
    for each in evidence.explained:
        owned.setdefault(each.code, []).append(each)
    stated = evidence.rollout.stated
    findings = Findings(evidence.rollout.place, stated.calls_at, single)
    key = tuple(rules), selected, evidence.present, stated.reasons, verified_parts(evidence), frozenset(owned)
    to_run, skips = _to_run(*key)
    for rule in to_run:
        if rule.check is not None:
            try:
                for hit in rule.check(evidence):
                    findings.take(rule.code, rule.severity, hit)
            except ODD_VALUES as error:
                if rule.code not in ignored:
                    raise _failed(rule, evidence, error) from error
                failure = Skip(rule.code, f"it failed: {describe_error(error)}")
                skips = tuple(sorted((*skips, failure), key=lambda skip: skip.code))
        for each in owned.get(rule.code, ()) if rule.check is None else ():
            severity = min(rule.severity, each.difference.severity)
            if findings.wants(rule.code, severity, Spot.of_difference(each)):
                findings.add(rule.code, severity, hit_of(each, evidence, severity))
    if not findings:
        return (), skips
    every = linked(*findings.folded(), rules)
    codes = {finding.code for finding in every if finding.severity is not Severity.NOTE}
    offered = repairs() if codes else ()
    by_default = [repair for repair in offered if repair.safety is not Safety.UNSAFE and not repair.by_model]
    offers = {code: [repair for repair in by_default if repair.claims(code)] for code in codes}
    return tuple(_with_repair(finding, evidence, offers) for finding in every), skips


def _failed(rule: Rule, evidence: Evidence, error: Exception) -> PluginError:
    place, code = evidence.rollout.place, rule.code
    return failed(f"rule {code}", place, f"turn the rule off: `--ignore {code}`", error)


@lru_cache(maxsize=64)
def _owners(rules: tuple[Rule, ...]) -> _Owners:
    """The rules that explain differences, by precedence, each with its function."""
    owners = [(rule, rule.explain) for rule in rules if rule.explain is not None]
    return tuple(sorted(owners, key=lambda owner: owner[0].precedence))


@lru_cache(maxsize=1024)
def _to_run(
    rules: tuple[Rule, ...],
    selected: frozenset[str],
    present: Needs,
    reasons: tuple[NotRead, ...],
    verified: Verified,
    owned: frozenset[str],
) -> tuple[Sequence[Rule], tuple[Skip, ...]]:
    """The selected rules to run, and the skips of those that lack something and own no difference.

    Without differences of its own, a rule that only explains them has nothing to do, nor has one that finds
    nothing in sound evidence.
    """
    reasoned = [(rule, missing_evidence(rule, present, reasons)) for rule in rules if rule.code in selected]
    skips = [
        Skip(rule.code, because, applies(rule.needs, present))
        for rule, because in reasoned
        if because is not None and rule.code not in owned
    ]
    able = [rule for rule, because in reasoned if because is None or rule.code in owned]
    quiet = {rule.code for rule in able if rule.check is None or (rule.silent and rule.silent in verified)} - owned
    # Most rollouts skip the same rules: one tuple shared by all is pickled once.
    return [rule for rule in able if rule.code not in quiet], tuple(skips)


def _with_repair(finding: Finding, evidence: Evidence, offers: Mapping[str, Sequence[Repair]]) -> Finding:
    """The finding with the name of the repair that fits it; a note gets none."""
    if finding.severity is Severity.NOTE:
        return finding
    for repair in offers[finding.code]:
        with guarded(f"repair `{repair.name}`", finding.place, f"turn its rule off: `--ignore {finding.code}`"):
            if repair.fits(evidence, finding):
                return replace(finding, repair=repair.name)
    return finding
