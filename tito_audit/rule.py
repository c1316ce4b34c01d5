"""A rule: evidence in, hits out; or the cause of a difference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tito_audit.evidence.model import Against, Difference, Evidence, Explained, Sound, TextSide
from tito_audit.evidence.needs import Needs, words_for
from tito_audit.record.finding import Hit, Severity
from tito_audit.record.stated import NotRead

SHOWN_TOKENS = 16
"""Tokens of each side that a finding holds."""
_NAMED_TOKENS = 8
"""Tokens of each side that the message of a difference names."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a difference belongs to a rule."""

    cause: str
    """A few words that group findings."""
    what: str
    """A clause that says what is wrong; `hit_of` adds the tokens of both sides and the effect."""


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One rule, made by `@rule` or `@cause`; each file of `rules/` defines one, and its docstring is the manual.

    Rules are compared by identity, which makes them cheap keys.
    """

    code: str
    name: str
    severity: Severity
    needs: tuple[Needs, ...]
    """All are needed; an entry of several joined by `|` needs one of them."""
    doc: str
    check: Callable[[Evidence], Iterator[Hit]] | None = None
    explain: Callable[[Difference, Evidence], Reason | None] | None = None
    precedence: int = 0
    """For causes: the lowest one that gives a reason owns the difference."""
    silent: Sound = Sound.NOTHING
    """If all of this is sound, the rule finds nothing; NOTHING: it has to be asked."""

    @property
    def title(self) -> str:
        """The first line of the docstring, without its full stop."""
        return self.doc.splitlines()[0].rstrip(".")


def rule(
    code: str, severity: Severity, *, needs: tuple[Needs, ...] = (), silent: Sound = Sound.NOTHING
) -> Callable[[Callable[[Evidence], Iterator[Hit]]], Rule]:
    """A decorator that makes a rule of a generator of hits.

    The first line of the generator's docstring says what is wrong; then come the headings `## What it finds`, `##
    Why it matters`, `## Example` and `## Repair`. The rule is not asked about a row if everything that `silent`
    names is sound.
    """

    def decorate(check: Callable[[Evidence], Iterator[Hit]]) -> Rule:
        doc = inspect.getdoc(check) or ""
        return Rule(code, _name(check), severity, needs, doc, check=check, silent=silent)

    return decorate


def cause(
    code: str, severity: Severity, *, precedence: int, needs: tuple[Needs, ...] = ()
) -> Callable[[Callable[[Difference, Evidence], Reason | None]], Rule]:
    """A decorator that makes a rule of a function which says whether it explains a difference.

    Every difference of a rollout goes to the rule of lowest precedence that gives a Reason. The finding has the
    severity of the difference (what the later prompt or the training row made of it), at most `severity`.
    """

    def decorate(explain: Callable[[Difference, Evidence], Reason | None]) -> Rule:
        doc = inspect.getdoc(explain) or ""
        return Rule(code, _name(explain), severity, needs, doc, explain=explain, precedence=precedence)

    return decorate


def missing(rule: Rule, present: Needs, reasons: tuple[NotRead, ...] = ()) -> str | None:
    """The evidence that the rule lacks, in words and with the format's reasons; None when it can run."""
    for need in rule.needs:
        if need and not (need & present):
            return words_for(need, present, reasons)
    return None


def hit_of(explained: Explained, evidence: Evidence, severity: Severity) -> Hit:
    """An explained difference as a hit: what is wrong, the tokens of both sides, and the effect."""
    difference = explained.difference
    recorded, canonical = (_pieces(side, evidence) for side in (difference.recorded, difference.canonical))
    other = {
        Against.REENCODED: "encoding the text again gives",
        Against.NEXT_PROMPT: f"turn {difference.later_turn}'s prompt has",
        Against.ROW: "the training row has",
        Against.TEMPLATE: "the template writes",
    }[difference.against]
    return Hit(
        difference.where,
        difference.start,
        difference.end,
        f"{explained.what}: recorded {recorded}, {other} {canonical}; {difference.effect}",
        turn=difference.turn,
        cause=explained.cause,
        severity=severity,
        recorded=evidence.side(difference.recorded.ids[:SHOWN_TOKENS]),
        canonical=evidence.side(difference.canonical.ids[:SHOWN_TOKENS]),
    )


def selected(
    code: str, select: tuple[str, ...], ignore: tuple[str, ...], extend_select: tuple[str, ...] = ()
) -> bool:
    """Whether a code runs: the longest matching prefix decides, and select wins a tie.

    Without `select` every code is selected; `extend_select` adds to it.
    """
    chosen = max((len(p) for p in (*(select or ("",)), *extend_select) if code.startswith(p)), default=-1)
    refused = max((len(p) for p in ignore if code.startswith(p)), default=-1)
    return chosen >= 0 and chosen >= refused


def _pieces(side: TextSide, evidence: Evidence) -> str:
    """The tokens of a side as text, `' Skin'+'ny'`: at most eight, `nothing` for none."""
    if not len(side.ids):
        return "nothing"
    vocabulary, ids = evidence.vocabulary, side.ids[:_NAMED_TOKENS]
    named = [str(int(i)) if vocabulary is None else repr(vocabulary.piece(int(i))) for i in ids]
    more = len(side.ids) - len(named)
    return "+".join(named) + (f" and {more} more token{'s' * (more > 1)}" if more else "")


def _name(function: Callable[..., object]) -> str:
    return function.__name__.replace("_", "-")
