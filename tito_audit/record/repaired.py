"""RepairedRollout: one rollout as a repair leaves it, and where its parts come from."""

from __future__ import annotations

from dataclasses import dataclass

from tito_audit.record.rollout import Rollout


@dataclass(frozen=True, slots=True)
class RepairedRollout:
    """One rollout as a repair leaves it.

    Its `place.item` names the rollout of the row that it stands for; several with one item are the parts of
    a fork, in order. A repair changes prompts, columns and the training row, and may leave out turns; it
    never changes a completion.
    """

    rollout: Rollout
    turns_from: tuple[int, ...]
    """For each turn of `rollout` the number of the turn that it was in the rollout as read."""


def unmended(rollout: Rollout) -> RepairedRollout:
    """A rollout as it was read."""
    return RepairedRollout(rollout, tuple(range(len(rollout.turns))))
