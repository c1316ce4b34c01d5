"""Testimony: what single rows show about how their log was written, counted for the whole log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from tito_audit.record.reading import Slide
from tito_audit.record.rollout import Place

PLACES = 5
"""How many of the rows that show the same are named."""
IDS = 64
DIFFERENT = 3
"""How many first tokens with different ids are not all certain without a reason."""


class Verdict(StrEnum):
    """What a row shows about its columns."""

    CLEAN = "clean"  # the simplest reading has no fault
    OPEN = "open"  # the simplest reading is a fault, but one without a fault stands
    FAULTY = "faulty"  # no reading without a fault stands


class EndsOf(StrEnum):
    """What a row does with the ends of the answers that it trains."""

    TRAINED = "trained"
    KEPT = "kept"  # sampled, but not trained
    OPEN = "open"  # not trained, and nothing shows whether they were sampled
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Witness:
    """What one row shows about how its log was written."""

    verdict: Verdict
    slides: tuple[Slide, ...] = ()
    """The slides that explain the row, if any; one proves a faulty row."""
    simplest: tuple[Slide, ...] = ()
    """Those among them of a row that may be right which suppose no more than that it is."""
    certain: tuple[int, ...] = ()
    """The ids of first tokens whose logprob is exactly the fill: certain, or moved away."""
    first: int | None = None
    """How many first tokens it leaves out of each answer; None if nothing says what was sampled."""
    ends: EndsOf | None = None
    contradicts: tuple[str, ...] = ()
    """The flags of the run that say otherwise than the row."""
    sft: tuple[str, ...] = ()
    """What a row for SFT shows, as names of facts; () of other rows."""


@dataclass(slots=True)
class Tally:
    """Rows that show the same."""

    rows: int = 0
    places: tuple[Place, ...] = ()
    """The first of these rows, up to PLACES."""

    def add(self, rows: int, places: Iterable[Place]) -> None:
        """Count further rows."""
        self.rows += rows
        if len(self.places) == PLACES:  # rows mostly come in order
            last = self.places[-1]
            places = [place for place in places if (place.row, place.item) < (last.row, last.item)]
            if not places:
                return
        every = sorted({*self.places, *places}, key=lambda place: (place.row, place.item))
        self.places = tuple(every[:PLACES])


_tallies = partial(defaultdict[Any, Tally], Tally)


@dataclass(slots=True)
class Testimony:
    """The witnesses of one log, counted. Its size is bounded; the order and grouping in which rows are added does
    not matter."""

    rows: int = 0
    proven: dict[tuple[int, int], Tally] = field(default_factory=_tallies)
    """By slide of mask and logprobs: faulty rows that it alone explains."""
    faulty: Tally = field(default_factory=Tally)
    """All faulty rows."""
    open: dict[tuple[Slide, ...], Tally] = field(default_factory=_tallies)
    """By the slides that they allow: rows that may have a fault, which is their simplest reading."""
    tied: dict[tuple[int, int], Tally] = field(default_factory=_tallies)
    """By slide: rows that are not faulty and that it explains as simply as a reading without a fault."""
    certain: frozenset[int] = frozenset()
    """Ids of first tokens whose logprob is exactly the fill: the lowest ones, up to IDS."""
    allowed: dict[tuple[int, int], Tally] = field(default_factory=_tallies)
    """By slide: rows that are not faulty and allow it."""
    first: dict[int, Tally] = field(default_factory=_tallies)
    """By number of first tokens that a row leaves out of each answer."""
    ends: dict[EndsOf, Tally] = field(default_factory=_tallies)
    contradictions: dict[str, Tally] = field(default_factory=_tallies)
    """By flag of the run: rows that contradict it."""
    sft: dict[str, Tally] = field(default_factory=_tallies)
    """By fact: the rows for SFT that show it."""

    def add(self, witness: Witness, place: Place) -> None:
        """Count one row."""
        row = 1, (place,)
        self.rows += 1
        pairs = {(slide.mask, slide.logprobs) for slide in witness.slides}
        if witness.verdict is Verdict.FAULTY:
            self.faulty.add(*row)
            for pair in pairs if len(witness.slides) == 1 else ():
                self.proven[pair].add(*row)
        else:
            for pair in pairs:
                self.allowed[pair].add(*row)
            for pair in {(slide.mask, slide.logprobs) for slide in witness.simplest}:
                self.tied[pair].add(*row)
            if not self.certain.issuperset(witness.certain):
                self.certain = frozenset(sorted({*self.certain, *witness.certain})[:IDS])
        if witness.verdict is Verdict.OPEN:
            self.open[witness.slides].add(*row)
        if witness.first is not None:
            self.first[witness.first].add(*row)
        if witness.ends is not None:
            self.ends[witness.ends].add(*row)
        for fact in witness.sft:
            self.sft[fact].add(*row)
        for flag in witness.contradicts:
            self.contradictions[flag].add(*row)

    def repaired(self, was: Witness, now: Witness, place: Place) -> None:
        """Count what a row allows once a fault is repaired that hid it, as a mask of ones does."""
        if was.verdict is Verdict.FAULTY and len(was.slides) != 1 and now.verdict is not Verdict.FAULTY:
            for pair in {(slide.mask, slide.logprobs) for slide in now.slides}:
                self.allowed[pair].add(1, (place,))

    @property
    def open_rows(self) -> int:
        """Rows whose simplest reading is a fault, but which may be right."""
        return self.rows if self.undecided else sum(tally.rows for tally in self.open.values())

    @property
    def undecided(self) -> list[Slide]:
        """Slides of the logprobs that all rows of the log have, or none: no row tells which.

        Without them, first tokens of several ids would all be certain; a model may always begin with the same one.
        """
        pairs = sorted(pair for pair, tally in self.tied.items() if pair[1] and tally.rows == self.rows)
        return [Slide(*pair) for pair in pairs] if len(self.certain) >= DIFFERENT else []

    @property
    def beside_faults(self) -> Mapping[Slide, Tally]:
        """By slide that some rows prove: the rows that allow it and prove nothing."""
        pairs = sorted(self.proven.keys() & self.allowed.keys())
        return {Slide(*pair): self.allowed[pair] for pair in pairs}
