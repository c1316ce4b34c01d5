"""Outcome: what a repair run did with one row of a log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tito_audit.record.finding import Result
from tito_audit.record.rollout import Place


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to one row of a log, and why."""

    place: Place
    before: tuple[Result, ...]
    """Its rollouts as read; one Result without a rollout for an unreadable row."""
    after: tuple[Result, ...]
    """Its rollouts as written, read and audited again; equal to `before` when nothing changed; () when the row
    was moved to the quarantine."""
    cured: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By repair: the codes that it cured, in the order in which repairs were tried."""
    declined: Mapping[str, str] = field(default_factory=dict)
    """By repair that claimed a finding and did not cure it: the reason."""
    needs_unsafe: frozenset[str] = frozenset()
    """Those of them that would have run with unsafe repairs allowed."""
    notes: tuple[str, ...] = ()
    """Notes of the repairs: costs, marks, columns that could not move with the tokens."""
    costs: tuple[str, ...] = ()
    """Those of the notes that a run sums up."""
    rows: int = 1
    """How many rows are written in place of this one: more than 1 after a fork, 0 in quarantine."""
    more_tokens: int = 0
    """How many more tokens the rows of a fork hold than one row would."""
    quarantined: str | None = None
    """Why it was moved to the quarantine; None when it was not."""

    @property
    def repaired(self) -> bool:
        """Whether the row that is written differs from the one that was read."""
        return bool(self.cured)
