"""RepairedRollout: a rollout as a repair leaves it, and where its turns come from."""

from __future__ import annotations

from dataclasses import dataclass

from tito_audit.record.rollout import Rollout


@dataclass(frozen=True, slots=True)
class RepairedRollout:
    """A rollout as a repair leaves it.

    `place.item` says which rollout of the row it replaces; several with one item are the parts of a fork, in
    order. A repair may change prompts, columns and the training row, and leave out turns, but never changes a
    completion.
    """

    rollout: Rollout
    turns_from: tuple[int, ...]
    """Each turn's number in the original rollout."""


def unrepaired(rollout: Rollout) -> RepairedRollout:
    """The rollout unchanged, with all its turns."""
    return RepairedRollout(rollout, tuple(range(len(rollout.turns))))
