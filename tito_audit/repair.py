"""A repair: evidence and findings in, repaired rollouts out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tito_audit.evidence.model import Evidence
from tito_audit.record.finding import Finding
from tito_audit.record.repaired import RepairedRollout
from tito_audit.settings.model import RepairChoices

__all__ = ["Proposal", "Repair", "Safety", "repair"]


class Safety(StrEnum):
    """Whether a repair may run without being asked for by `--unsafe`."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    DEPENDS = "safe or unsafe"  # each Proposal says which, by what the log proves


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a repair proposes for one rollout; kept only if the audit of the written row proves it."""

    rollouts: tuple[RepairedRollout, ...]
    """In place of the rollout: one, several for a fork, none to leave it out. All have its place."""
    safety: Safety = Safety.SAFE
    reason: str = ""
    """Why it is unsafe here, as a sentence without its full stop; "" when it is safe."""
    notes: tuple[str, ...] = ()
    """For the reader: what was marked. Short sentences without a full stop."""
    cost: str = ""
    """What it costs, as a note; a run sums this up and does not list it row by row."""
    stale: tuple[str, ...] = ()
    """Columns whose values a trainer computed from the old ids; null from the first change on."""
    dropped: tuple[str, ...] = ()
    unknown: Mapping[str, int] = field(default_factory=dict)
    """Column to entries for which nothing was recorded."""
    more_tokens: int = 0
    """Tokens that the rows of a fork hold more than one row would: context that is computed again."""
    adds: frozenset[str] = frozenset()
    """Codes that the repair may bring about by what it does on purpose (untrained tokens: MSK402)."""


Mender = Callable[[Evidence, tuple[Finding, ...], RepairChoices], Proposal | None]


@dataclass(frozen=True, slots=True)
class Repair:
    """One file of `repairs/` defines one of these with @repair; the docstring is its manual."""

    name: str
    safety: Safety
    cures: tuple[str, ...]
    """Prefixes of the codes that it claims; () for one that is asked for and cures nothing by itself."""
    precedence: int
    """The order in which repairs are tried when the user names none: the lowest first."""
    doc: str
    mend: Mender
    """None when it can do nothing for these findings of this rollout. RecordError, with the reason, when
    it should and cannot. A pure function: it reads no file and encodes nothing."""
    fits: Callable[[Evidence, Finding], bool]
    """Whether it would take this finding on, by what the evidence shows; cheap, for reports."""
    chosen: Callable[[RepairChoices], bool]
    """Whether the user's choices ask for it even on rows without findings."""
    removes_rows: bool = False
    """Whether it leaves whole rollouts out: it comes last, and they need another place to go."""

    @property
    def title(self) -> str:
        """The first line of the docstring, without its full stop."""
        return self.doc.splitlines()[0].rstrip(".")

    def claims(self, code: str) -> bool:
        """Whether a code is one that it cures."""
        return code.startswith(self.cures) if self.cures else False


def repair(
    name: str,
    *,
    cures: tuple[str, ...],
    safety: Safety,
    precedence: int,
    fits: Callable[[Evidence, Finding], bool] | None = None,
    chosen: Callable[[RepairChoices], bool] | None = None,
    removes_rows: bool = False,
) -> Callable[[Mender], Repair]:
    """A decorator that makes a repair of a function.

    The docstring's first line says what it does; then come the headings `## What it does`, `## When it is
    safe`, `## What it costs` and `## Example`.
    """

    def decorate(mend: Mender) -> Repair:
        return Repair(
            name,
            safety,
            cures,
            precedence,
            inspect.getdoc(mend) or "",
            mend,
            fits or (lambda _evidence, _finding: True),
            chosen or (lambda _choices: False),
            removes_rows,
        )

    return decorate
