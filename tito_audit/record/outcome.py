"""Outcome: what a repair run did with one row of a log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tito_audit.record.finding import Result
from tito_audit.record.rollout import Place

__all__ = ["Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of a log: what it said before, what it says now, and why."""

    place: Place
    before: tuple[Result, ...]
    """The row's rollouts as read; one Result without a rollout for a row that cannot be read."""
    after: tuple[Result, ...]
    """Its rollouts as written, read and audited again; the same as `before` when nothing changed; () when
    the row was moved to the quarantine."""
    cured: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Strategy to the codes that it cured, in the order in which they were tried."""
    declined: Mapping[str, str] = field(default_factory=dict)
    """Strategy that claimed a finding and did not cure it, to the reason."""
    needs_unsafe: frozenset[str] = frozenset()
    """Those of them that would have run had unsafe repairs been allowed."""
    notes: tuple[str, ...] = ()
    """What the repairs say of themselves: costs, marks, columns that could not go with the tokens."""
    costs: tuple[str, ...] = ()
    """Those of the notes that a run sums up."""
    rows: int = 1
    """Rows written in place of this one: more than 1 after a fork, 0 in quarantine."""
    more_tokens: int = 0
    """Tokens that the rows of a fork hold more than one row would."""
    quarantined: str | None = None
    """Why it was moved to the quarantine; None when it was not."""

    @property
    def repaired(self) -> bool:
        """Whether another row is written than was read."""
        return bool(self.cured)
