"""Testimony: what single rows show about how their log was written, and what all its rows show together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from tito_audit.record.rollout import Place

CHANCE = -6.0
"""Decimal logarithm of the chance below which a reading is ruled out."""
TOKENS = 64
"""How many of the token ids that a reading needs to be certain are kept."""
PLACES = 5
"""How many of the rows that show the same are named."""


@dataclass(frozen=True, slots=True, order=True)
class Reading:
    """One way in which a row may have been written: how far its mask and logprobs are off the sampled tokens."""

    mask: int = 0
    """Places late (+) or early (-)."""
    logprobs: int = 0

    @property
    def right(self) -> bool:
        """Whether neither is shifted."""
        return not self.mask and not self.logprobs


@dataclass(frozen=True, slots=True)
class Witness:
    """What one row shows: every reading that its tokens, mask and logprobs allow."""

    possible: tuple[Reading, ...]
    """In order, without repeats; a single reading decides the row."""
    spans: int
    """How many sampled spans were examined."""
    chances: tuple[tuple[int, ...], ...] = ()
    """For each reading, the ids of the tokens that must be certain (logprob 0) by chance, if the column also
    writes 0 for no logprob; () if it writes something else."""
    zeros: int = 0
    """How many of `values` are such zeros."""
    values: int = 0
    """How many values lie well inside the spans."""


@dataclass(slots=True)
class Tally:
    """Rows that allow the same readings."""

    rows: int = 0
    spans: int = 0
    places: tuple[Place, ...] = ()
    """The first of these rows, up to PLACES."""


@dataclass(slots=True)
class Testimony:
    """The witnesses of one log, counted. Its size is bounded; the order and grouping in which rows are added does
    not matter."""

    tallies: dict[tuple[Reading, ...], Tally] = field(default_factory=dict)
    chances: dict[Reading, frozenset[int]] = field(default_factory=dict)
    """For each reading, ids of tokens that must be certain by chance: the lowest ones, up to TOKENS."""
    zeros: int = 0
    values: int = 0

    def add(self, witness: Witness, place: Place) -> None:
        """Count one row."""
        self._count(witness.possible, 1, witness.spans, (place,))
        for reading, tokens in zip(witness.possible, witness.chances, strict=False):
            self._chance(reading, tokens)
        self.zeros += witness.zeros
        self.values += witness.values

    def merge(self, other: Testimony) -> None:
        """Count what another part of the same log shows."""
        for possible, tally in other.tallies.items():
            self._count(possible, tally.rows, tally.spans, tally.places)
        for reading, tokens in other.chances.items():
            self._chance(reading, tokens)
        self.zeros += other.zeros
        self.values += other.values

    def common(self) -> frozenset[Reading]:
        """The readings that all rows allow; empty if rows contradict each other or there are none.

        A reading is ruled out if it needs more certain tokens than another reading than chance can explain.
        """
        sets = [frozenset(possible) for possible in self.tallies]
        shared = frozenset.intersection(*sets) if sets else frozenset()
        return frozenset(reading for reading in shared if self.odds(reading, shared) >= CHANCE)

    def odds(self, reading: Reading, others: Iterable[Reading]) -> float:
        """Decimal logarithm of how likely a reading is by chance, relative to the likeliest of others; at most
        0."""
        fewest = min((len(self.chances.get(one, ())) for one in others), default=0)
        return (len(self.chances.get(reading, ())) - fewest) * math.log10((self.zeros + 1) / (self.values + 2))

    def _chance(self, reading: Reading, tokens: Iterable[int]) -> None:
        self.chances[reading] = frozenset(sorted({*self.chances.get(reading, ()), *tokens})[:TOKENS])

    def _count(self, possible: tuple[Reading, ...], rows: int, spans: int, places: Iterable[Place]) -> None:
        tally = self.tallies.setdefault(possible, Tally())
        tally.rows += rows
        tally.spans += spans
        named = sorted({*tally.places, *places}, key=lambda place: (place.row, place.item))
        tally.places = tuple(named[:PLACES])
