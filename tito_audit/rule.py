"""A rule: evidence in, hits out; or the cause of a difference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from tito_audit.align.blocks import BlockKind
from tito_audit.evidence.model import Against, Difference, Evidence, Explained, Occasion, Verified
from tito_audit.evidence.needs import Needs, describe_missing
from tito_audit.record.finding import (
    NEXT_PROMPT,
    PROMPT,
    RE_ENCODED,
    SAMPLED,
    TEMPLATE,
    TRAINING_ROW,
    Hit,
    Severity,
    Side,
    Where,
)
from tito_audit.record.stated import NotRead

SHOWN_TOKENS = 16
"""How many tokens of each side a finding keeps."""
SAME_BYTES = frozenset((BlockKind.MERGE, BlockKind.SPLIT, BlockKind.RESPLIT))
"""The kinds of differences whose sides spell the same bytes."""
OTHER_BYTES = frozenset(BlockKind) - SAME_BYTES
_OWN_LABELS = {Where.PROMPT: PROMPT, Where.COMPLETION: SAMPLED, Where.ROW: TRAINING_ROW}
_OTHER_WORDS = {
    Against.REENCODED: ("which re-encodes as", RE_ENCODED),
    Against.NEXT_PROMPT: ("", NEXT_PROMPT),
    Against.ROW: ("the training row has", TRAINING_ROW),
    Against.TEMPLATE: ("the template writes", TEMPLATE),
}
"""What holds the other tokens, in a message, and the label of that side; a next prompt is named with its turn."""
_NO_TOKENS = Side()
_NAMED_TOKENS = 8
"""How many tokens of each side the message of a difference names."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a difference belongs to a rule."""

    cause: str
    """A few words that group findings."""
    what: str
    """A clause that says what is wrong; `hit_of` adds the tokens of both sides and the effect."""


Explain = Callable[[Difference, Evidence], Reason | None]
"""Why a difference belongs to a rule; None if it does not."""


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One rule, made by `@rule` or `@cause`; each file of `rules/` defines one, and its docstring is the manual.

    Rules are compared by identity, which makes them cheap keys.
    """

    code: str
    name: str
    severity: Severity
    needs: tuple[Needs, ...]
    """All are required; of alternatives joined by `|`, one is."""
    doc: str
    check: Callable[[Evidence], Iterator[Hit]] | None = None
    explain: Explain | None = None
    precedence: int = 0
    """For causes: the rule of lowest precedence that gives a reason owns the difference."""
    kinds: frozenset[BlockKind] = frozenset(BlockKind)
    """For causes: the differences that it may explain."""
    places: frozenset[Where] = frozenset(Where)
    """For causes: where these differences lie."""
    silent: Verified = Verified.NOTHING
    """If all of this is sound, the rule finds nothing and is not run; NOTHING: it always runs."""
    when: Occasion | None = None
    """Without this occasion, the rule finds nothing and is not run; None: it needs none."""
    of_log: bool = False
    """Whether it judges a whole log or run, and so covers no single rollout."""
    headline: str = ""
    """What its findings add up to, in a few words, with `{n}` for their number: `{n} re-tokenized`. Rules with the
    same headline report one cause."""

    @property
    def title(self) -> str:
        """The first line of the docstring, without its full stop."""
        return self.doc.splitlines()[0].rstrip(".")


def rule(
    code: str,
    severity: Severity,
    *,
    needs: tuple[Needs, ...] = (),
    silent: Verified = Verified.NOTHING,
    when: Occasion | None = None,
    of_log: bool = False,
    headline: str = "",
) -> Callable[[Callable[[Evidence], Iterator[Hit]]], Rule]:
    """A decorator that turns a generator of hits into a rule.

    The first line of the generator's docstring says what is wrong; then come the headings `## What it finds`, `##
    Why it matters`, `## Example` and `## Repair`. The rule does not run on a row where everything that `silent`
    names is sound, or that does not give the occasion `when`. `of_log` rules judge a whole log or run.
    """

    def decorate(check: Callable[[Evidence], Iterator[Hit]]) -> Rule:
        name, doc = _name_and_manual(check)
        return Rule(
            code, name, severity, needs, doc, check, silent=silent, when=when, of_log=of_log, headline=headline
        )

    return decorate


def cause(
    code: str,
    severity: Severity,
    *,
    precedence: int,
    kinds: Collection[BlockKind] = frozenset(BlockKind),
    places: Collection[Where] = frozenset(Where),
    needs: tuple[Needs, ...] = (),
    headline: str = "",
) -> Callable[[Explain], Rule]:
    """A decorator that turns a function that may explain a difference into a rule.

    Every difference of a rollout goes to the rule of lowest precedence that gives a Reason, of those for its kind
    and place. The finding has the severity of the difference (what the later prompt or the training row made of
    it), capped at `severity`.
    """

    def decorate(explain: Explain) -> Rule:
        name, doc = _name_and_manual(explain)
        of = frozenset(kinds), frozenset(places)
        return Rule(code, name, severity, needs, doc, None, explain, precedence, *of, headline=headline)

    return decorate


def missing_evidence(rule: Rule, present: Needs, reasons: tuple[NotRead, ...] = ()) -> str | None:
    """The evidence that a rule lacks, in words with the format's reasons; None if the rule can run."""
    for need in rule.needs:
        if need and not (need & present):
            return describe_missing(need, present, reasons)
    return None


def hit_of(explained: Explained, evidence: Evidence, severity: Severity) -> Hit:
    """The hit of an explained difference; its message: what is wrong, the tokens of both sides, the effect."""
    difference = explained.difference
    other, label = _OTHER_WORDS[difference.against]
    if difference.against is Against.NEXT_PROMPT:
        other = f"turn {difference.later_turn}'s prompt has"
    own = _OWN_LABELS[difference.where]
    has = own if own == SAMPLED else f"the {own} has"
    own_ids, other_ids = difference.recorded.ids, difference.canonical.ids
    # The equal tokens before and after it, unless it reaches beyond its sequence.
    ids = evidence.sequence(difference.where, difference.turn)
    start, end = difference.start, difference.end
    before = after = _NO_TOKENS
    if ids is not None and len(own_ids) == end - start:
        equal_before, equal_after = difference.equal
        before = evidence.side(ids[max(start - equal_before, 0) : start])
        if max(len(own_ids), len(other_ids)) <= SHOWN_TOKENS:
            after = evidence.side(ids[end : end + equal_after])
    recorded = evidence.side(own_ids[:SHOWN_TOKENS], own)
    canonical = evidence.side(other_ids[:SHOWN_TOKENS], label)
    quoted, other_quoted = _quote_tokens(recorded, len(own_ids)), _quote_tokens(canonical, len(other_ids))
    return Hit(
        difference.where,
        start,
        end,
        f"{explained.what}: {has} {quoted}, {other} {other_quoted}; {difference.effect}",
        turn=difference.turn,
        cause=explained.cause,
        severity=severity,
        recorded=recorded,
        canonical=canonical,
        before=before,
        after=after,
        later_turn=difference.later_turn,
    )


def is_selected(
    code: str, select: tuple[str, ...], ignore: tuple[str, ...], extend_select: tuple[str, ...] = ()
) -> bool:
    """Whether a code runs: the longest matching prefix decides, and select wins a tie.

    Without `select` every code is selected; `extend_select` adds to it.
    """
    chosen = max((len(p) for p in (*(select or ("",)), *extend_select) if code.startswith(p)), default=-1)
    refused = max((len(p) for p in ignore if code.startswith(p)), default=-1)
    return chosen >= 0 and chosen >= refused


def _quote_tokens(side: Side, count: int) -> str:
    """The first eight of `count` tokens of a side as text, `' Skin'+'ny'`; `nothing` if there are none."""
    if not count:
        return "nothing"
    named = list(map(repr, side.pieces[:_NAMED_TOKENS] or side.ids[:_NAMED_TOKENS]))
    more = count - len(named)
    return "+".join(named) + (f" and {more} more token{'s' * (more > 1)}" if more else "")


def _name_and_manual(function: Callable[..., object]) -> tuple[str, str]:
    """The rule's name, `merged-tokens` for a function `merged_tokens`, and its docstring."""
    return function.__name__.replace("_", "-"), inspect.getdoc(function) or ""
