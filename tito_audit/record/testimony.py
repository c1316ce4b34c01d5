"""Testimony: what rows show about how their log was written, counted over the whole log."""

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
"""Rows that are named for one observation."""
MAX_IDS = 64
MIN_DISTINCT_IDS = 3
"""This many different first tokens are not all sampled with certainty: their logprobs must have slid away."""


class Verdict(StrEnum):
    """What a row shows about its columns."""

    CLEAN = "clean"  # the simplest reading has no fault
    OPEN = "open"  # the simplest reading is a fault, but one without a fault stands
    FAULTY = "faulty"  # no reading without a fault stands


class AnswerEnds(StrEnum):
    """Whether a row trains the end tokens of its answers."""

    TRAINED = "trained"
    KEPT = "kept"  # sampled, but not trained
    OPEN = "open"  # not trained, and nothing shows whether they were sampled
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Witness:
    """What one row shows about how its log was written."""

    verdict: Verdict
    slides: tuple[Slide, ...] = ()
    """The slides that explain the row; a single one proves a FAULTY row."""
    simplest: tuple[Slide, ...] = ()
    """Those that explain a row as simply as the reading in which it is right."""
    certain: tuple[int, ...] = ()
    """Ids of first tokens whose logprob is the sentinel: sampled with certainty, or their logprob slid away."""
    first: int | None = None
    """First tokens that it leaves out of each answer; None if nothing shows what was sampled."""
    ends: AnswerEnds | None = None
    contradicts: tuple[str, ...] = ()
    """The flags of the run that the row contradicts."""
    sft: tuple[str, ...] = ()
    """Names of facts that an SFT row shows; () for other rows."""


@dataclass(slots=True)
class Tally:
    """The rows that show one thing."""

    rows: int = 0
    places: tuple[Place, ...] = ()
    """The first of them, up to PLACES."""

    def add(self, rows: int, places: Iterable[Place]) -> None:
        """Count more rows."""
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
    """The witnesses of one log, counted. Bounded in size, whatever the order in which rows are added."""

    rows: int = 0
    proven: dict[tuple[int, int], Tally] = field(default_factory=_tallies)
    """Faulty rows that one slide alone explains, by (places of the mask, places of the logprobs)."""
    faulty: Tally = field(default_factory=Tally)
    open: dict[tuple[Slide, ...], Tally] = field(default_factory=_tallies)
    """OPEN rows by the slides that explain them."""
    tied: dict[tuple[int, int], Tally] = field(default_factory=_tallies)
    """Rows without a proven fault that a slide explains as simply as a reading without a fault, by its places."""
    certain: frozenset[int] = frozenset()
    """The lowest ids of `Witness.certain`, up to MAX_IDS."""
    allowed: dict[tuple[int, int], Tally] = field(default_factory=_tallies)
    """Rows without a proven fault that a slide explains, by its places."""
    first: dict[int, Tally] = field(default_factory=_tallies)
    ends: dict[AnswerEnds, Tally] = field(default_factory=_tallies)
    contradictions: dict[str, Tally] = field(default_factory=_tallies)
    """By flag of the run."""
    sft: dict[str, Tally] = field(default_factory=_tallies)
    """By name of the fact."""

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
                self.certain = frozenset(sorted({*self.certain, *witness.certain})[:MAX_IDS])
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

    def add_repaired(self, was: Witness, now: Witness, place: Place) -> None:
        """Count the slides that a row allows once its fault is repaired; a mask of ones hides them before."""
        if was.verdict is Verdict.FAULTY and len(was.slides) != 1 and now.verdict is not Verdict.FAULTY:
            for pair in {(slide.mask, slide.logprobs) for slide in now.slides}:
                self.allowed[pair].add(1, (place,))

    @property
    def open_rows(self) -> int:
        """Rows that cannot be judged: OPEN ones, or all where a slide is undecided."""
        return self.rows if self.undecided else sum(tally.rows for tally in self.open.values())

    @property
    def undecided(self) -> list[Slide]:
        """Slides of the logprobs that either all rows of the log have or none.

        Listed only where MIN_DISTINCT_IDS first tokens would else be certain; a model may always begin alike.
        """
        pairs = sorted(pair for pair, tally in self.tied.items() if pair[1] and tally.rows == self.rows)
        return [Slide(*pair) for pair in pairs] if len(self.certain) >= MIN_DISTINCT_IDS else []

    @property
    def allowed_where_proven(self) -> Mapping[Slide, Tally]:
        """By slide that some rows prove, the other rows that allow it."""
        pairs = sorted(self.proven.keys() & self.allowed.keys())
        return {Slide(*pair): self.allowed[pair] for pair in pairs}
