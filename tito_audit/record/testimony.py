"""Testimony: what one row can say of how its whole log was written, and what all rows of a log say together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tito_audit.record.rollout import Place

__all__ = ["PLACES", "Reading", "Testimony", "Witness"]

PLACES = 5
"""Rows that are named of all that say the same."""


@dataclass(frozen=True, slots=True, order=True)
class Reading:
    """One way in which a row may have been written: how far mask and logprobs lie off the sampled tokens."""

    mask: int = 0
    """Places late (+) or early (-)."""
    logprobs: int = 0

    @property
    def right(self) -> bool:
        """Whether both lie where they should."""
        return not self.mask and not self.logprobs


@dataclass(frozen=True, slots=True)
class Witness:
    """What one row leaves open: every reading that its tokens, mask and logprobs allow."""

    standing: tuple[Reading, ...]
    """In order, each once; one: the row is decided."""
    spans: int
    """Sampled stretches that were looked at."""


@dataclass(slots=True)
class Tally:
    """Rows that leave the same readings open."""

    rows: int = 0
    spans: int = 0
    places: tuple[Place, ...] = ()
    """The first of them, at most PLACES."""


@dataclass(slots=True)
class Testimony:
    """The witnesses of one log, counted. Bounded, and the same in whatever order and parts rows are added."""

    tallies: dict[tuple[Reading, ...], Tally] = field(default_factory=dict)

    def add(self, witness: Witness, place: Place) -> None:
        """Count one row."""
        self._count(witness.standing, 1, witness.spans, (place,))

    def merge(self, other: Testimony) -> None:
        """Count what another part of the same log said."""
        for standing, tally in other.tallies.items():
            self._count(standing, tally.rows, tally.spans, tally.places)

    def common(self) -> frozenset[Reading]:
        """The readings that every row leaves open; empty where rows contradict each other or none spoke."""
        sets = [frozenset(standing) for standing in self.tallies]
        return frozenset.intersection(*sets) if sets else frozenset()

    def _count(self, standing: tuple[Reading, ...], rows: int, spans: int, places: Iterable[Place]) -> None:
        tally = self.tallies.setdefault(standing, Tally())
        tally.rows += rows
        tally.spans += spans
        named = sorted({*tally.places, *places}, key=lambda place: (place.row, place.item))
        tally.places = tuple(named[:PLACES])
