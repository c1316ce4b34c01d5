"""RepairedRollout: a rollout as a repair leaves it, and where its turns come from."""

from __future__ import annotations

from dataclasses import dataclass

from tito_audit.record.rollout import Rollout


@dataclass(frozen=True, slots=True)
class RepairedRollout:
    """A rollout as a repair leaves it.

    `place.item` says which rollout of the row it replaces; several with the same item are the parts of a fork, in
    order. A repair changes prompts, columns and the training row, and may leave out turns; it never changes a
    completion.
    """

    rollout: Rollout
    turns_from: tuple[int, ...]
    """For each turn of `rollout`, its number in the rollout as read."""


def unmended(rollout: Rollout) -> RepairedRollout:
    """A rollout as it was read, with all its turns."""
    return RepairedRollout(rollout, tuple(range(len(rollout.turns))))
