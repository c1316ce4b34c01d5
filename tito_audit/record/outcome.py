"""Outcome: what a repair run did with one row of a log."""

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
    """Its rollouts as written, read back and audited again; equal to `before` when nothing changed; () when the
    row was moved to the quarantine."""
    cured: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By repair, the codes that it fixed, in the order in which repairs were tried."""
    declined: Mapping[str, str] = field(default_factory=dict)
    """For each repair that claimed a finding and did not fix it, the reason."""
    needs_unsafe: frozenset[str] = frozenset()
    """The repairs among them that `--unsafe` would have allowed."""
    notes: tuple[str, ...] = ()
    """Notes from the repairs: costs, marks, columns that could not move with the tokens."""
    costs: tuple[str, ...] = ()
    """The notes among them that a run adds up."""
    rows: int = 1
    """How many rows are written for this one: more than 1 after a fork, 0 in quarantine."""
    more_tokens: int = 0
    """How many more tokens the rows of a fork hold than a single row."""
    quarantined: str | None = None
    """Why it was moved to the quarantine; None if it was not."""
    stays: bool = False
    """True for a row of which nothing was read, as it is too long: no quarantine can take it."""

    @property
    def repaired(self) -> bool:
        """Whether the row that is written differs from the one that was read."""
        return bool(self.cured)
