"""Testimony: what one row can say of how its whole log was written, and what all rows of a log say together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from tito_audit.record.rollout import Place

CHANCE = -6.0
"""Decimal logarithm of the chance below which a reading falls."""
TOKENS = 64
"""Different tokens that are kept of those that a reading needs to be certain."""
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
    chances: tuple[tuple[int, ...], ...] = ()
    """Of each reading, the ids of the tokens that have to be certain by chance, where a certain token's logprob is
    what the column also writes for none; () where the two differ."""
    zeros: int = 0
    """How many values well inside the stretches are such a certain token's, of `values`."""
    values: int = 0


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
    chances: dict[Reading, frozenset[int]] = field(default_factory=dict)
    """Of each reading, ids of tokens that have to be certain by chance; at most TOKENS, the lowest."""
    zeros: int = 0
    values: int = 0

    def add(self, witness: Witness, place: Place) -> None:
        """Count one row."""
        self._count(witness.standing, 1, witness.spans, (place,))
        for reading, tokens in zip(witness.standing, witness.chances, strict=False):
            self._chance(reading, tokens)
        self.zeros += witness.zeros
        self.values += witness.values

    def merge(self, other: Testimony) -> None:
        """Count what another part of the same log said."""
        for standing, tally in other.tallies.items():
            self._count(standing, tally.rows, tally.spans, tally.places)
        for reading, tokens in other.chances.items():
            self._chance(reading, tokens)
        self.zeros += other.zeros
        self.values += other.values

    def common(self) -> frozenset[Reading]:
        """The readings that all rows leave open together; empty where rows contradict each other or none spoke.

        One that needs so many more tokens to be certain than another that chance does not make it falls.
        """
        sets = [frozenset(standing) for standing in self.tallies]
        shared = frozenset.intersection(*sets) if sets else frozenset()
        return frozenset(reading for reading in shared if self.odds(reading, shared) >= CHANCE)

    def odds(self, reading: Reading, others: Iterable[Reading]) -> float:
        """Decimal logarithm of how likely a reading is by chance, against the likeliest of others; at most 0."""
        fewest = min((len(self.chances.get(one, ())) for one in others), default=0)
        return (len(self.chances.get(reading, ())) - fewest) * math.log10((self.zeros + 1) / (self.values + 2))

    def _chance(self, reading: Reading, tokens: Iterable[int]) -> None:
        self.chances[reading] = frozenset(sorted({*self.chances.get(reading, ()), *tokens})[:TOKENS])

    def _count(self, standing: tuple[Reading, ...], rows: int, spans: int, places: Iterable[Place]) -> None:
        tally = self.tallies.setdefault(standing, Tally())
        tally.rows += rows
        tally.spans += spans
        named = sorted({*tally.places, *places}, key=lambda place: (place.row, place.item))
        tally.places = tuple(named[:PLACES])
