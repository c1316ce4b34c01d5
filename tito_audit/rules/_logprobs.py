"""Recorded logprobs, one stretch of sampled tokens after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tito_audit.evidence.fill import IMPOSSIBLE
from tito_audit.evidence.logprobs import ROUNDING, shifts
from tito_audit.evidence.model import Evidence, RowView
from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.column import ColumnRole
from tito_audit.record.finding import Where
from tito_audit.record.rollout import TrainingRow, seen_by_loss, trained_runs

_EQUAL = 4
_EQUAL_ZERO = 8
_SENTINELS_BELOW = -1000
"""No probability that was sampled has such a logarithm: from here down, a format's value stands for none."""


@dataclass(frozen=True)
class SampledValues:
    """The logprobs of one completion, or those of the row that enter the loss."""

    where: Where
    turn: int | None
    ids: Ids
    """`[N]`"""
    logprobs: Logprobs
    """`[N]`"""
    trained: Mask
    """`[N]` tokens whose logprob enters the loss; all of a completion."""
    runs: tuple[tuple[int, int], ...]
    """Stretches of trained tokens that were sampled in one go."""
    sentinel: float | None
    expected: Logprobs | None
    """`[N]` what the calls recorded, for a row whose calls are known; NaN where they say nothing."""
    shifted: bool
    """True when the column lies off its tokens: then only LPR502 speaks."""

    @cached_property
    def spoken(self) -> Logprobs:
        """`[S]` the values that enter the loss, in order."""
        whole = self.runs == ((0, len(self.logprobs)),)
        return self.logprobs if whole else self.logprobs[self.trained]

    @cached_property
    def ordinary(self) -> bool:
        """True when every value that enters the loss is a number that a probability has.

        None is missing, infinite, above zero or a placeholder; nothing is said of 0.0.
        """
        # Most columns are ordinary everywhere, which is cheaper to see than in the trained part alone.
        return _ordinary(self.logprobs) or _ordinary(self.spoken)

    @cached_property
    def placeholders(self) -> Mask:
        """`[N]` True where a value is a sentinel that no probability has."""
        return _placeholders(self)

    @cached_property
    def zeros(self) -> Mask:
        """`[N]` True where a value is exactly 0.0; -0.0 is not, since only arithmetic writes it."""
        return np.asarray((self.logprobs == 0) & ~np.signbit(self.logprobs))

    @cached_property
    def constant_stretches(self) -> list[list[tuple[int, int]]]:
        """Stretches in which every value is the same: all of them as one entry, or each alone."""
        runs = list(self.runs)
        if runs and _constant(self, runs):
            return [runs]
        return [[run] for run in runs if _constant(self, [run])]


def sampled_values(evidence: Evidence) -> list[SampledValues]:
    """The logprobs of every completion, then those of the training row; columns that fit nothing are out."""
    return evidence.once("sampled values", lambda evidence: list(_sampled_values(evidence)))


def _sampled_values(evidence: Evidence) -> Iterator[SampledValues]:
    for number, turn in enumerate(evidence.rollout.turns):
        values, ids = turn.completion_logprobs, turn.completion_ids
        if values is None or ids is None or not len(ids):
            continue
        sentinel = next((c.sentinel for c in turn.columns if c.role is ColumnRole.LOGPROBS), None)
        everything = np.ones(len(ids), np.bool_)
        yield SampledValues(
            Where.COMPLETION, number, ids, values, everything, ((0, len(ids)),), sentinel, None, False
        )
    row = evidence.rollout.training_row
    if row is None or row.logprobs is None:
        return
    trained = _trained(row, evidence.row)
    if trained is not None:
        runs = tuple(trained_runs(trained if evidence.row is None else trained & evidence.row.sampled))
        expected = evidence.row.expected_logprobs if evidence.row is not None else None
        shifted = bool(shifts(evidence))
        yield SampledValues(
            Where.ROW, None, row.token_ids, row.logprobs, trained, runs, row.sentinel, expected, shifted
        )


def _ordinary(logprobs: Logprobs) -> bool:
    """True when every value is a number from above the sentinels up to 0; False for none and for NaN."""
    return len(logprobs) > 0 and bool(logprobs.max() <= 0) and bool(logprobs.min() > _SENTINELS_BELOW)


def _placeholders(values: SampledValues) -> Mask:
    """`[N]` True where a value is a sentinel that no probability has: 1.0, -9999, or the format's own.

    1.0 does not count where most values are above zero, since then it is no sentinel but a value of the
    wrong unit or sign. Never true for 0.0, which a certain token reaches.
    """
    marks = [*IMPOSSIBLE]
    if values.sentinel is not None and (values.sentinel > 0 or values.sentinel <= _SENTINELS_BELOW):
        marks.append(values.sentinel)
    spoken = values.logprobs[values.trained & np.isfinite(values.logprobs) & (values.logprobs != 1.0)]
    if len(spoken) and (spoken > ROUNDING).mean() > 0.5:
        marks = [mark for mark in marks if mark < 0]
    return np.asarray(np.isin(values.logprobs, marks))


def _constant(values: SampledValues, parts: list[tuple[int, int]]) -> bool:
    """True when the values of these stretches are one value, often enough to mean something."""
    start, end = parts[0]
    if end - start > 1 and values.logprobs[start] != values.logprobs[start + 1]:
        return False  # most stretches end here
    where = np.concatenate([np.arange(start, end) for start, end in parts])
    mine = values.logprobs[where]
    if len(mine) < _EQUAL or not np.isfinite(mine).all():
        return False
    if not values.ordinary and values.placeholders[where].any():
        return False
    if mine[0] == 0:
        return len(mine) >= _EQUAL_ZERO and bool(values.zeros[where].all())
    return bool((mine == mine[0]).all())


def _trained(row: TrainingRow, view: RowView | None) -> Mask | None:
    """`[T]` what enters the loss, from the best that says so; None when nothing does."""
    if row.loss_mask is not None:
        return seen_by_loss(row)
    return view.sampled if view is not None else None
