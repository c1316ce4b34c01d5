"""RepairedRollout: a rollout as a repair leaves it, and where its turns come from."""

from __future__ import annotations

from dataclasses import dataclass

from tito_audit.record.rollout import Rollout


@dataclass(frozen=True, slots=True)
class RepairedRollout:
    """A rollout as a repair leaves it.

    `place.item` says which rollout of the row it replaces; several with the same item are the parts of a fork, in
    order. A repair may change prompts, columns and the training row, and leave out turns; it never changes a
    completion.
    """

    rollout: Rollout
    turns_from: tuple[int, ...]
    """For each turn of `rollout`, its number in the original rollout."""


def unmended(rollout: Rollout) -> RepairedRollout:
    """An unchanged rollout with all its turns."""
    return RepairedRollout(rollout, tuple(range(len(rollout.turns))))
