"""Finds every reading of a training row: the conventions and slides that its mask and logprobs allow.

A writer may prefill the first tokens of each answer or leave them out of the loss, train the end of an answer or
not, and leave out whole answers. A slide puts the mask, the logprobs or both some places off: in the whole row,
from one answer on, or in one answer. `tests/truth` tries every reading instead, and must find the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from tito_audit.evidence.logprob_values import MAX_SLIDE, LogprobValues
from tito_audit.evidence.masks import MAX_PREFILL
from tito_audit.evidence.model import SampledSpan
from tito_audit.record.arrays import Mask, Offsets
from tito_audit.record.reading import TO_END, Conventions, EndConvention, FirstConvention, Slide
from tito_audit.record.runs import trained_runs

_SLIDES = tuple(sorted(range(-MAX_SLIDE, MAX_SLIDE + 1), key=abs))
_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SlideFit:
    """A slide that explains a row, and what was trained before it slid."""

    slide: Slide
    answers: range
    """The answers in which something is off."""
    departures: int
    """How many departures from the usual it supposes; the fewer, the simpler."""
    starts: Offsets
    """`[A]` the first trained token of each answer."""
    ends: Offsets
    """`[A]` where its trained tokens end; equal to `starts` where it has none."""


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    """A mask or logprob column, if it is some places off, compared with each answer. All arrays are `[A]`."""

    fits: _Flags
    """Whether it may be the column of this answer."""
    entries: Offsets
    """How many of its runs, or values, lie in the answer."""
    starts: Offsets
    """The first token that is trained, or has a value."""
    ends: Offsets
    departs: _Flags
    """Whether first tokens would be left out."""


class Readings:
    """The readings of one row. `[A]` arrays have an entry for each of its answers, in order."""

    def __init__(
        self,
        spans: Sequence[SampledSpan],
        mask: Mask | None,
        values: LogprobValues | None,
        first_covered: tuple[int, int],
        stated: Conventions,
    ) -> None:
        # Where each answer begins, its turn end begins, and the answer ends at the earliest and at the latest.
        bounds = [(span.start, span.content_end, span.ends[0], span.ends[-1]) for span in spans]
        self.starts, self.closes, self.least, self.last = np.array(bounds, np.int64).reshape(-1, 4).T
        if stated.first is FirstConvention.PREFILL:  # prefilled tokens are no part of an answer
            self.starts = np.minimum(self.starts + stated.tokens, self.closes)
        self.stated, self.first_covered = stated, first_covered
        self.mask, self.values = mask, values
        real = values.real if values is not None else np.zeros(0 if mask is None else len(mask), np.bool_)
        self.size = len(real)
        runs = trained_runs(mask) if mask is not None else ()
        self.runs = np.array(runs, np.int64).reshape(-1, 2)
        self.counts = np.concatenate((np.zeros(1, np.int64), real.cumsum()))
        self.clear_fill = values is not None and values.clear_fill
        # The mask in place: parts of answers may be left out.
        if not len(self.runs):
            self.trained = self._empty_column()
        else:
            before = self.runs[:, 0].searchsorted(self.starts)
            after = np.maximum(self.runs[:, 1].searchsorted(self.last, side="right"), before)
            some, most = after > before, len(self.runs) - 1
            starts = np.where(some, self.runs[np.minimum(before, most), 0], self.starts)
            ends = np.where(some, self.runs[np.maximum(after - 1, 0), 1], self.starts)
            fits = np.ones(len(starts), np.bool_)
            if self.stated.first is not None:
                tokens = self.stated.tokens if self.stated.first is FirstConvention.LEFT_OUT else 0
                fits = ~some | (starts == np.minimum(self.starts + tokens, self.closes))
            if self.stated.end is EndConvention.UNTRAINED:
                fits &= ends <= self.closes
            self.trained = _Column(fits, after - before, starts, ends, some & (starts > self.starts))
        self.mask_in_place = int(self.trained.entries.sum()) == len(self.runs)
        self.values_in_place = int(self._values_column(0, 0).entries.sum()) == int(self.counts[-1])
        """Whether every value is at a token that may have been sampled."""
        self.lacks_values = bool(self.clear_fill and mask is not None and (mask & ~real).any())
        """Whether trained tokens have the fill, which cannot be a logprob."""

    def departures_in_place(self) -> int | None:
        """How many departures a reading without any fault supposes; None if no such reading is possible."""
        if not self.mask_in_place or not self.values_in_place or self.lacks_values:
            return None
        departures = self._count_departures(self.trained, 0)
        if departures is None or not self.trained.fits.all():
            return None
        return departures + (len(self.runs) > int((self.trained.ends > self.trained.starts).sum()))

    def _count_departures(self, mask: _Column, shifts: Offsets | int) -> int | None:
        """How many departures a mask supposes if values are off by these shifts; None if it leaves out an end that
        the run says is trained."""
        trains = mask.ends > mask.starts
        kept_ends = (
            trains
            & (mask.ends <= self.closes)
            & (self._count_values(self.closes + shifts, self.last + shifts) > 0)
        )
        if self.stated.end is EndConvention.TRAINED and kept_ends.any():
            return None
        unusual = [mask.departs, kept_ends]
        if self.values is not None and not self.clear_fill:
            unusual.append(trains & (self._count_values(self.starts + shifts, mask.starts + shifts + 1) == 0))
        return sum(bool(flags.any()) for flags in unusual)

    @property
    def may_lack_values(self) -> bool:
        """Whether both columns may be in place, with logprobs missing that the loss needs."""
        return self.mask_in_place and self.values_in_place and self.lacks_values

    def ends(self, fit: SlideFit | None) -> tuple[int | None, ...]:
        """Where the sampling of each answer ended, by its mask and values, if they slid by `fit`.

        None if that is open: a certain end may have a logprob that equals the fill.
        """
        shifts, trained = np.zeros_like(self.starts), self.trained.ends
        if fit is not None:
            shifts[fit.slide.first : None if fit.slide.last == TO_END else fit.slide.last + 1] = fit.slide.logprobs
            trained = fit.ends
        ends = np.maximum(trained, self.closes + self._count_values(self.closes + shifts, self.last + shifts))
        lost = self.last + shifts > self.size
        sure = (
            (self.least == self.last) | (ends > self.closes) | (trained > self.starts) | (self.clear_fill & ~lost)
        )
        pairs = zip(np.maximum(ends, self.least).tolist(), sure.tolist(), strict=True)
        return tuple(end if fits else None for end, fits in pairs)

    def find_fits(self, *, of_row: bool = False, with_mask: bool = True) -> list[SlideFit]:
        """Every slide that explains the row, the simplest first; `of_row`: only those of the whole row.

        Without `with_mask` only the logprobs are explained.
        """
        explained: dict[Slide, SlideFit] = {}
        with_mask = with_mask and self.mask is not None
        masks: dict[int, dict[int, _Column]] = {}
        columns: dict[int, dict[int, _Column]] = {}
        # (first tokens of each answer that are not trained, those of them without a value). If the fill may be a
        # logprob, a prefilled token looks like one that was certain.
        firsts = [(self.stated.tokens, 0)]
        if self.stated.first is not FirstConvention.LEFT_OUT:
            most = 0 if self.stated.first is not None else MAX_PREFILL
            firsts = [
                (first, prefilled)
                for first in range(most + 1)
                for prefilled in sorted({0, first} if self.clear_fill else {0})
            ]
        for first, prefilled in firsts:
            if first not in masks:
                masks[first] = {0: self._empty_column()}
                if with_mask and len(self.runs):
                    masks[first] = self._mask_columns(first, of_row=of_row)
            if prefilled not in columns:
                columns[prefilled] = {0: self._empty_column()}
                if self.values is not None:
                    columns[prefilled] = {far: self._values_column(far, prefilled) for far in _SLIDES}
            runs = len(self.runs) if with_mask else 0
            for fit in self._fits_of_any_shape(masks[first], columns[prefilled], runs, of_row=of_row):
                other = explained.get(fit.slide)
                if other is not None:
                    # Two conventions allow the same slide: keep what both say was trained.
                    starts, ends = np.maximum(fit.starts, other.starts), np.minimum(fit.ends, other.ends)
                    simpler = fit if fit.departures <= other.departures else other
                    fit = replace(simpler, starts=starts, ends=np.maximum(starts, ends))
                explained[fit.slide] = fit
        return sorted(explained.values(), key=lambda fit: (fit.departures, fit.slide))

    def _empty_column(self) -> _Column:
        """A column without entries, which fits every answer."""
        none = np.zeros(len(self.starts), np.bool_)
        return _Column(~none, none.astype(np.int64), self.starts, self.starts, none)

    def _mask_columns(self, first: int, *, of_row: bool) -> dict[int, _Column]:
        """The mask for each number of places it may be off, if it leaves out the `first` tokens of each answer.

        If the whole row slid, the first trained token has to be the first of an answer.
        """
        starts, begins = np.minimum(self.starts + first, self.closes), int(self.runs[0, 0])
        # Entries that slid before the first place of the mask are lost.
        cut = begins == self.first_covered[0] and int(starts[0]) - MAX_SLIDE < begins
        offsets: Sequence[int] = _SLIDES
        if of_row and not cut:
            offsets = tuple(set((begins - starts)[np.abs(begins - starts) <= MAX_SLIDE].tolist()))
        latest = self.closes if self.stated.end is EndConvention.UNTRAINED else self.last
        masks = {}
        for far in offsets:
            moved = np.minimum(np.maximum(starts + far, self.first_covered[0]), self.size)  # np.clip costs more
            at = np.minimum(self.runs[:, 0].searchsorted(moved), len(self.runs) - 1)
            hit, run_ends = self.runs[at, 0] == moved, self.runs[at, 1]
            # Entries that slid past the end of the row are lost, so the answer may have ended later.
            ends = np.where(run_ends == self.size, np.maximum(self.closes, self.size - far), run_ends - far)
            fits = ~hit | ((ends >= self.closes) & (ends <= latest))
            left_out = hit & (starts > self.starts)
            masks[far] = _Column(fits, hit.astype(np.int64), starts, np.where(hit, ends, starts), left_out)
        return masks

    def _values_column(self, far: int, prefilled: int) -> _Column:
        """The logprobs, if they are `far` places off and each answer has `prefilled` prefilled tokens."""
        starts = np.minimum(self.starts + prefilled, self.closes)
        start, closes, last = np.minimum(
            np.maximum(np.array((starts, self.closes, self.last)) + far, self.first_covered[1]), self.size
        )
        body = self.counts[closes] - self.counts[start]
        ending = self.counts[last] - self.counts[closes]
        entries = body + ending
        # What slid past the end of the row is lost, so the answer may have ended later.
        ends = np.where(last - closes < self.last - self.closes, self.last, self.closes + ending)
        if not self.clear_fill:
            anywhere = np.ones(len(start), np.bool_)
            return _Column(anywhere, entries, starts, ends, ~anywhere)
        together = self.counts[np.minimum(closes + ending, self.size)] - self.counts[closes] == ending
        full = (body == closes - start) & together
        return _Column(full | (entries == 0), entries, starts, np.where(full, ends, starts), np.zeros_like(full))

    def _count_values(self, start: Offsets, end: Offsets) -> Offsets:
        """How many values lie in each of these ranges."""
        start, end = np.minimum(np.maximum(np.array((start, end)), 0), self.size)
        return np.asarray(self.counts[np.maximum(end, start)] - self.counts[start])

    def _fits_of_any_shape(
        self, masks: dict[int, _Column], columns: dict[int, _Column], runs: int, *, of_row: bool
    ) -> Iterator[SlideFit]:
        """The slides, of every shape, that one convention allows: of the row, of an answer, or from one answer on.

        Left out are those that move nothing, and those by which trained tokens would have no value.
        """
        by_mask = {far: _possible_shapes(masks.get(0, mask), mask, runs, of_row) for far, mask in masks.items()}
        if not any(shapes.any() for shapes in by_mask.values()):
            return
        values = int(self.counts[-1])
        by_values = {
            shift: _possible_shapes(columns[0], column, values, of_row) for shift, column in columns.items()
        }
        for far, shift in product(masks, columns):
            shapes = by_mask[far] & by_values[shift]
            if not (far or shift) or not shapes.any():
                continue
            for alone, answer in np.argwhere(shapes).tolist():
                chosen = np.zeros(len(self.starts), np.bool_)
                chosen[answer : answer + 1 if alone else None] = True
                mask = _mix_columns(masks.get(0, masks[far]), masks[far], chosen)
                column = _mix_columns(columns[0], columns[shift], chosen)
                trains = mask.ends > mask.starts
                beyond = (mask.ends > column.ends) | (mask.starts < column.starts)
                if self.clear_fill and (trains & beyond).any():
                    continue
                # Slides that differ only in untrained answers are the same, unless they move only those.
                shown = (mask.entries > 0) | (column.entries > 0)
                of_trained = bool((trains & chosen).any())
                moved = (mask.entries > 0 if of_trained else shown).nonzero()[0]
                inside = moved[chosen[moved]]
                if not len(inside) or (far and not of_trained):
                    continue
                shifts, ends = np.where(chosen, shift, 0), mask.ends
                of_mask = self._count_departures(mask, shifts)
                if of_mask is None:
                    continue
                if far > 0 and (trains & (ends > self.closes)).any():
                    # Entries that slid past the end of the row are lost: a sampled end was trained if others were.
                    sampled = self.closes + self._count_values(self.closes + shifts, self.last + shifts)
                    lost = trains & chosen & (self.last + far > self.size)
                    ends = np.where(lost, np.maximum(ends, sampled), ends)
                first = int(inside[0]) if inside[0] > moved[0] else 0
                last = TO_END if inside[-1] == moved[-1] else int(inside[-1])
                departures = bool(far) + bool(shift) + bool(first or last != TO_END) + of_mask
                off = (chosen & shown).nonzero()[0]
                answers = range(int(off[0]), int(off[-1]) + 1)
                yield SlideFit(Slide(far, shift, first, last), answers, departures, mask.starts, ends)


def _possible_shapes(rest: _Column, moved: _Column, entries: int, of_row: bool) -> _Flags:
    """`[2, A]` whether a column with this many entries may be off from answer a on, and whether in answer a alone.

    `rest` is the column in place, `moved` the one some places off. With `of_row`: `[1, 1]` whether all is off.
    """
    if of_row:
        return np.array([[bool(moved.fits.all()) and int(moved.entries.sum()) == entries]])
    lies = np.concatenate((np.ones(1, np.bool_), np.logical_and.accumulate(rest.fits)))
    lies_after = np.concatenate((np.logical_and.accumulate(rest.fits[::-1])[::-1], np.ones(1, np.bool_)))
    moves_after = np.logical_and.accumulate(moved.fits[::-1])[::-1]
    resting = np.concatenate((np.zeros(1, np.int64), rest.entries.cumsum()))
    moving = np.concatenate((np.zeros(1, np.int64), moved.entries.cumsum()))
    onwards = lies[:-1] & moves_after & (resting[:-1] + moving[-1] - moving[:-1] == entries)
    alone = lies[:-1] & moved.fits & lies_after[1:] & (resting[-1] - rest.entries + moved.entries == entries)
    return np.stack((onwards, alone))


def _mix_columns(rest: _Column, moved: _Column, chosen: _Flags) -> _Column:
    """The column that is `moved` in the chosen answers and `rest` in the others."""
    if rest is moved or chosen.all():
        return moved
    return _Column(
        *(
            np.where(chosen, getattr(moved, name), getattr(rest, name))
            for name in ("fits", "entries", "starts", "ends", "departs")
        )
    )
