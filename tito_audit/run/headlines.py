"""Headlines: what findings are counted as in a verdict, and which findings of a rollout share a cause."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tito_audit.record.finding import Finding, Hit, Severity
from tito_audit.rule import Rule
from tito_audit.rules import rule_of

_DRIFT_FAMILIES = ("TPL", "TOK")
"""Rule families that say why a prompt holds other tokens, the more telling first."""
_LINK_FAMILY = "SEQ"
"""The rule family that says that a prompt breaks its history, whatever the reason."""
_OF_DRIFT = "LPR507"
"""The rule about what drift did to logprobs."""
_HARMLESS = {"TOK": "{n} that would change if re-encoded", "TPL": "{n} that the template would write differently"}
"""Headlines of differences that did not reach a later prompt or the training row."""
_UNDECIDED = {
    "LPR501": "{n} with logprobs that may cover a longer response",
    "LPR502": "{n} with logprobs that may be shifted",
    "LPR505": "{n} with a logprob of 0 that may be a placeholder",
    "LPR506": "{n} with logprobs of 0 that may be placeholders",
    "REC004": "{n} with ids that may be placeholders",
    "MSK401": "{n} with a loss mask that may be shifted",
    "MSK402": "{n} with a loss mask that may be shifted",
    "REC009": "{n} with tokens that may be trained twice",
}
"""Headlines of findings that the log does not settle."""

Turns = Collection[int | None]
"""The turns that a folded finding is about, each once."""
_Key = tuple[str, int | None, str]
"""A headline, the turn that it is about, and the unit that it counts."""


def link_findings(findings: list[Finding], folds: Mapping[int, Turns]) -> list[Finding]:
    """The findings of a rollout, which have headlines, in their order, each with the finding that it follows from.

    Findings of one headline about the same prompt, completion or row have one cause: all follow from the most
    severe of them, or from the first of those; one with the same fingerprint follows from none. A broken prefix
    follows from what template or tokenizer did to that prompt. `folds` are the turns of folded findings, by index;
    a folded finding follows from another only if it does in all its turns.
    """
    if len(findings) == 1:
        return findings
    root_causes = _RootCauses(findings, folds)
    if root_causes.all_differ:
        return findings
    fingerprints: dict[int, str] = {}
    out = []
    for index, finding in enumerate(findings):
        roots = root_causes.roots_of(index)
        if finding.folded is not None and index in roots:
            units = sum(root == index for root in roots)
            out.append(replace(finding, folded=replace(finding.folded, units=units)))
            continue
        root = roots[0]
        if root == index:
            out.append(finding)
            continue
        if root not in fingerprints:
            fingerprints[root] = findings[root].fingerprint
        alike = finding.code == findings[root].code and finding.fingerprint == fingerprints[root]
        out.append(finding if alike else replace(finding, because_of=fingerprints[root]))
    return out


class _RootCauses:
    """What each finding of a rollout follows from."""

    def __init__(self, findings: Sequence[Finding], folds: Mapping[int, Turns]) -> None:
        self._findings = findings
        self._turns: list[Turns] = []
        self._keys: list[list[_Key]] = []
        for index, finding in enumerate(findings):
            hit, unit = finding.hit, finding.unit
            turns = folds.get(index, (hit.turn if hit.later_turn is None else hit.later_turn,))
            self._turns.append(turns)
            # Whatever the training row shows counts once, whichever call it is about.
            counted = (None,) if unit in ("training row", "rollout") else turns
            self._keys.append([(finding.headline, turn, unit) for turn in counted])
        linked = [finding for finding in findings if finding.code.startswith((_LINK_FAMILY, _OF_DRIFT))]
        self.all_differ = not (linked or folds) and len({key for (key,) in self._keys}) == len(findings)
        """Whether each finding has a headline or a turn of its own, and so follows from no other."""
        if self.all_differ:
            return
        self._roots: dict[_Key, int] = {}
        """By headline and turn: the index of the most severe finding."""
        # The most severe first; among equals, findings that say why a prefix broke before those that say it did.
        ranks = [(-finding.severity, finding.code.startswith(_LINK_FAMILY)) for finding in findings]
        for index in sorted(range(len(findings)), key=ranks.__getitem__):
            for key in self._keys[index]:
                self._roots.setdefault(key, index)
        self._broken: dict[int | None, int] = {}
        """By turn: the index of the finding that says why its prompt breaks its history."""
        for family in _DRIFT_FAMILIES:
            for index in dict.fromkeys(self._roots.values()):
                finding = self._findings[index]
                if finding.hit.later_turn is not None and finding.code.startswith(family):
                    for turn in self._turns[index]:
                        self._broken.setdefault(turn, index)
        drifted = (at for at in self._roots.values() if findings[at].code.startswith(_DRIFT_FAMILIES))
        self._drifted = next(drifted, None)

    def roots_of(self, index: int) -> list[int]:
        """The index of the finding that this one follows from, for each of its turns; its own if from none."""
        finding = self._findings[index]
        if finding.code == _OF_DRIFT and self._drifted is not None:
            return [self._drifted]
        roots = list(map(self._roots.__getitem__, self._keys[index]))
        if finding.code.startswith(_LINK_FAMILY) and finding.hit.later_turn is not None:
            return [self._broken.get(turn, root) for turn, root in zip(self._turns[index], roots, strict=True)]
        return roots


def with_headline(finding: Finding) -> Finding:
    """A finding that follows from no other, with its headline."""
    return replace(
        finding, headline=headline_of(rule_of(finding.code), finding.code, finding.severity, finding.hit)
    )


def headline_of(rule: Rule | None, code: str, severity: Severity, hit: Hit) -> str:
    """What a finding with this hit is counted as in a verdict, with `{n}` for the number and the unit."""
    if hit.headline:
        return hit.headline
    headline = rule.headline if rule is not None else ""
    if rule is not None and rule.explain is not None and severity is Severity.NOTE:
        headline = _HARMLESS.get(code[:3], headline)
    elif hit.cause == "undecided":
        headline = _UNDECIDED.get(code, headline)
    elif hit.cause.startswith("slid by"):  # it shows as tokens trained too early and tokens left out
        headline = "{n} with a shifted loss mask"
    elif code == "SEQ302" and not (hit.recorded.pieces or hit.canonical.pieces):
        # Without a tokenizer it is unknown which of the two it is.
        headline = "{n} re-tokenized or re-rendered"
    if not headline and rule is not None:
        headline = f"{{n}}: {rule.title[:1].lower()}{rule.title[1:]}"
    return headline or f"{{n}} with {code}"
