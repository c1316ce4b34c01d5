"""A rule: evidence in, hits out; or the cause of a difference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs, words_for
from tito_audit.record.finding import Hit, Severity
from tito_audit.record.stated import NotRead

__all__ = ["Needs", "Reason", "Rule", "cause", "missing", "rule", "selected"]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a difference is this rule's: a few words that group, and a sentence."""

    cause: str
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One file of `rules/` defines one of these with @rule or @cause; the docstring is its manual.

    There is one of each, so two are equal only when they are one: they are cheap keys.
    """

    code: str
    name: str
    severity: Severity
    needs: tuple[Needs, ...]
    """All have to be there; each may be several joined by |, of which one is enough."""
    doc: str
    check: Callable[[Evidence], Iterator[Hit]] | None = None
    explain: Callable[[Difference, Evidence], Reason | None] | None = None
    precedence: int = 0
    """Of causes: the lowest that gives a reason owns the difference."""

    @property
    def title(self) -> str:
        """The first line of the docstring, without its full stop."""
        return self.doc.splitlines()[0].rstrip(".")


def rule(
    code: str, severity: Severity, *, needs: tuple[Needs, ...] = ()
) -> Callable[[Callable[[Evidence], Iterator[Hit]]], Rule]:
    """A decorator that makes a rule of a generator of hits.

    The docstring's first line says what is wrong; then come the headings `## What it finds`,
    `## Why it matters`, `## Example` and `## Repair`.
    """

    def decorate(check: Callable[[Evidence], Iterator[Hit]]) -> Rule:
        return Rule(code, _name(check), severity, needs, inspect.getdoc(check) or "", check=check)

    return decorate


def cause(
    code: str,
    severity: Severity,
    *,
    precedence: int,
    needs: tuple[Needs, ...] = (),
) -> Callable[[Callable[[Difference, Evidence], Reason | None]], Rule]:
    """A decorator that makes a rule of a function which says whether a difference is of its kind.

    Every difference of a rollout goes to the rule of lowest precedence that gives a Reason. Its
    severity is the difference's own (what the later prompt or the training row made of it), at most
    `severity`.
    """

    def decorate(explain: Callable[[Difference, Evidence], Reason | None]) -> Rule:
        doc = inspect.getdoc(explain) or ""
        return Rule(code, _name(explain), severity, needs, doc, explain=explain, precedence=precedence)

    return decorate


def missing(rule: Rule, present: Needs, reasons: tuple[NotRead, ...] = ()) -> str | None:
    """What the rule lacks, in words and with the format's reasons; None when it can look."""
    for need in rule.needs:
        if need and not (need & present):
            return words_for(need, present, reasons)
    return None


def selected(
    code: str, select: tuple[str, ...], ignore: tuple[str, ...], extend_select: tuple[str, ...] = ()
) -> bool:
    """Whether a code runs: the longest matching prefix decides, and select wins a tie.

    No `select` is every code; `extend_select` adds to it.
    """
    chosen = max((len(p) for p in (*(select or ("",)), *extend_select) if code.startswith(p)), default=-1)
    refused = max((len(p) for p in ignore if code.startswith(p)), default=-1)
    return chosen >= 0 and chosen >= refused


def _name(function: Callable[..., object]) -> str:
    return function.__name__.replace("_", "-")
