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


class Safety(StrEnum):
    """Whether a repair runs without `--unsafe`."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    DEPENDS = "safe or unsafe"  # each Proposal says which, depending on what the log proves


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a repair proposes for one rollout; kept only if auditing the written row proves it."""

    rollouts: tuple[RepairedRollout, ...]
    """What replaces the rollout: one rollout, several for a fork, none to drop it. All keep its place."""
    safety: Safety = Safety.SAFE
    reason: str = ""
    """Why it is unsafe here, as a sentence without a full stop; "" when it is safe."""
    notes: tuple[str, ...] = ()
    """What was marked, for people: short sentences without a full stop."""
    cost: str = ""
    """What it costs, as a note; a run adds these up instead of listing them row by row."""
    stale: tuple[str, ...] = ()
    """Columns whose values a trainer computed from the old ids; null from the first change on."""
    dropped: tuple[str, ...] = ()
    unknown: Mapping[str, int] = field(default_factory=dict)
    """By column: how many entries have no recorded value."""
    more_tokens: int = 0
    """How many more tokens the rows of a fork hold than a single row: context that is computed again."""
    adds: frozenset[str] = frozenset()
    """Codes of findings that the repair may cause on purpose (MSK402 for tokens it takes out of the loss)."""


_Propose = Callable[[Evidence, tuple[Finding, ...], RepairChoices], Proposal | None]


@dataclass(frozen=True, slots=True)
class Repair:
    """One repair, made by `@repair`; each file of `repairs/` defines one, and its docstring is the manual."""

    name: str
    safety: Safety
    cures: tuple[str, ...]
    """Prefixes of the codes that it claims; () if it fixes no finding and runs only when asked for."""
    precedence: int
    """The order in which repairs are tried when the user names none, lowest first."""
    doc: str
    mend: _Propose
    """The repair itself, a pure function: it reads no file and encodes nothing. A finding may stand for many of
    its kind; `Finding.spans` gives the range of each. None when there is nothing to do for these findings.
    RecordError, with the reason, when there is something that it cannot do."""
    fits: Callable[[Evidence, Finding], bool]
    """Whether it would attempt this finding, judging by the evidence; cheap, for reports."""
    chosen: Callable[[RepairChoices], bool]
    """Whether the user's choices ask for it, even on rows without findings."""
    removes_rows: bool = False
    """Whether it drops whole rollouts: it runs last, and they need another file to go to."""
    named_only: bool = False
    """Whether it runs only when named, and then needs what all rows of the run show together."""
    by_model: bool = False
    """Whether it writes values of a model, which no log can prove; it runs only with `RepairChoices.rescored`."""

    @property
    def title(self) -> str:
        """The first line of the docstring, without its full stop."""
        return self.doc.splitlines()[0].rstrip(".")

    def claims(self, code: str) -> bool:
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
    named_only: bool = False,
    by_model: bool = False,
) -> Callable[[_Propose], Repair]:
    """A decorator that turns a function into a repair.

    The first line of the function's docstring says what the repair does; then come the headings `## What it does`,
    `## When it is safe`, `## What it costs` and `## Example`.
    """

    return lambda mend: Repair(
        name,
        safety,
        cures,
        precedence,
        inspect.getdoc(mend) or "",
        mend,
        fits or (lambda _evidence, _finding: True),
        chosen or (lambda _choices: False),
        removes_rows,
        named_only,
        by_model,
    )
