"""A rule: evidence in, hits out; or the cause of a difference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tito_audit.evidence.model import Difference, Evidence
from tito_audit.evidence.needs import Needs, words_for
from tito_audit.record.finding import Hit, Severity
from tito_audit.record.stated import NotRead


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a difference belongs to a rule: a short cause that groups findings, and a sentence."""

    cause: str
    message: str


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

    @property
    def title(self) -> str:
        """The first line of the docstring, without its full stop."""
        return self.doc.splitlines()[0].rstrip(".")


def rule(
    code: str, severity: Severity, *, needs: tuple[Needs, ...] = ()
) -> Callable[[Callable[[Evidence], Iterator[Hit]]], Rule]:
    """A decorator that makes a rule of a generator of hits.

    The first line of the generator's docstring says what is wrong; then come the headings `## What it finds`, `##
    Why it matters`, `## Example` and `## Repair`.
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


def selected(
    code: str, select: tuple[str, ...], ignore: tuple[str, ...], extend_select: tuple[str, ...] = ()
) -> bool:
    """Whether a code runs: the longest matching prefix decides, and select wins a tie.

    Without `select` every code is selected; `extend_select` adds to it.
    """
    chosen = max((len(p) for p in (*(select or ("",)), *extend_select) if code.startswith(p)), default=-1)
    refused = max((len(p) for p in ignore if code.startswith(p)), default=-1)
    return chosen >= 0 and chosen >= refused


def _name(function: Callable[..., object]) -> str:
    return function.__name__.replace("_", "-")
