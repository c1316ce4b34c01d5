"""Outcome: what `repair` did with one row of a log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tito_audit.record.finding import Result
from tito_audit.record.rollout import Place

COLUMN = "tito_audit"
"""The column of a written row that says which repair fixed which findings."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to one row of a log, and why."""

    place: Place
    before: tuple[Result, ...]
    """Its rollouts as read; one Result without a rollout for an unreadable row."""
    after: tuple[Result, ...]
    """Its rollouts as written, read back and audited again; equal to `before` when nothing changed; () for a
    quarantined row."""
    cured: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The codes that each repair fixed, in the order in which repairs were tried."""
    declined: Mapping[str, str] = field(default_factory=dict)
    """Why a repair that claimed a finding did not fix it, by repair."""
    needs_unsafe: frozenset[str] = frozenset()
    """The declined repairs that `--unsafe` would have allowed."""
    notes: tuple[str, ...] = ()
    """Costs, marks, columns that could not move with the tokens."""
    costs: tuple[str, ...] = ()
    """Those of `notes` that a run adds up."""
    rows: int = 1
    """Rows written for this one: more than 1 after a fork, 0 in quarantine."""
    more_tokens: int = 0
    """Tokens that the rows of a fork hold beyond those of a single row."""
    quarantined: str | None = None
    """Why it was moved to the quarantine; None if it was not."""
    stays: bool = False
    """True for a row too long to be read: no quarantine can take it."""

    @property
    def repaired(self) -> bool:
        """Whether the written row differs from the row as read."""
        return bool(self.cured)
