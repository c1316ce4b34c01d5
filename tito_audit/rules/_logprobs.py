"""Recorded logprobs, one stretch of sampled tokens after the other, and how far they lie off them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tito_audit.evidence.model import Evidence, RowView
from tito_audit.record.arrays import Ids, Logprobs, Mask
from tito_audit.record.column import Alignment, ColumnRole
from tito_audit.record.finding import Where
from tito_audit.record.rollout import TrainingRow, trained_runs
from tito_audit.rules._masks import mask_slide, sampled_turns

__all__ = [
    "ROUNDING",
    "LogprobShift",
    "SampledValues",
    "constant_stretches",
    "placeholders",
    "sampled_values",
    "shifts",
    "zeros",
]

ROUNDING = 1e-3
"""Values this close are the same number: logs round, some to four decimals."""
_EQUAL = 4
_EQUAL_ZERO = 8
_FARTHEST_SHIFT = 4
_IMPOSSIBLE = (1.0, -9999.0)


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class LogprobShift:
    """A stretch of the row whose logprobs lie off their tokens or are others than the calls recorded."""

    start: int
    end: int
    turn: int | None
    offset: int
    """Places late (+) or early (-); 0 when no offset makes them the calls' values."""
    by_calls: bool
    values: int
    """Values that are not their token's."""


def sampled_values(evidence: Evidence) -> Iterator[SampledValues]:
    """The logprobs of every completion, then those of the training row; columns that fit nothing are out."""
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


def placeholders(values: SampledValues) -> Mask:
    """`[N]` True where a value is a sentinel that no probability has: 1.0, -9999, or the format's own.

    1.0 does not count where most values are above zero, since then it is no sentinel but a value of the
    wrong unit or sign. Never true for 0.0, which a certain token reaches.
    """
    marks = [*_IMPOSSIBLE]
    if values.sentinel is not None and (values.sentinel > 0 or values.sentinel <= -1000):
        marks.append(values.sentinel)
    spoken = values.logprobs[values.trained & np.isfinite(values.logprobs) & (values.logprobs != 1.0)]
    if len(spoken) and (spoken > ROUNDING).mean() > 0.5:
        marks = [mark for mark in marks if mark < 0]
    return np.asarray(np.isin(values.logprobs, marks))


def zeros(values: SampledValues) -> Mask:
    """`[N]` True where a value is exactly 0.0; -0.0 is not, since only arithmetic writes it."""
    return np.asarray((values.logprobs == 0) & ~np.signbit(values.logprobs))


def constant_stretches(values: SampledValues) -> list[list[tuple[int, int]]]:
    """Stretches in which every value is the same: all of them as one entry, or each alone."""
    runs = list(values.runs)
    if runs and _constant(values, runs):
        return [runs]
    return [[run] for run in runs if _constant(values, [run])]


def shifts(evidence: Evidence) -> list[LogprobShift]:
    """Stretches of the row whose logprobs provably belong to other tokens; [] when none do."""
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.logprobs is None:
        return []
    if view is not None and view.expected_logprobs is not None:
        return _against_calls(row, row.logprobs, view, view.expected_logprobs)
    return _against_sentinels(row, row.logprobs, view)


def _constant(values: SampledValues, parts: list[tuple[int, int]]) -> bool:
    """True when the values of these stretches are one value, often enough to mean something."""
    where = np.concatenate([np.arange(start, end) for start, end in parts])
    mine = values.logprobs[where]
    if len(mine) < _EQUAL or not np.isfinite(mine).all() or placeholders(values)[where].any():
        return False
    if mine[0] == 0:
        return len(mine) >= _EQUAL_ZERO and bool(zeros(values)[where].all())
    return bool((mine == mine[0]).all())


def _trained(row: TrainingRow, view: RowView | None) -> Mask | None:
    """`[T]` what enters the loss, from the best that says so; None when nothing does."""
    if row.loss_mask is not None:
        return row.loss_mask
    return view.sampled if view is not None else None


def _against_calls(row: TrainingRow, logprobs: Logprobs, view: RowView, expected: Logprobs) -> list[LogprobShift]:
    """Turns whose values are not those of their call, with the offset at which they are."""
    # Infinite values are LPR503's, and nothing can be told from their differences.
    known = np.isfinite(expected) & ~view.drifted
    silent = ~np.isfinite(logprobs) | np.isin(logprobs, _IMPOSSIBLE)
    if row.sentinel is not None:
        silent |= logprobs == row.sentinel
    expected = np.where(known, expected, np.nan)
    wrong = known & ~silent & ~(np.abs(logprobs - expected) <= ROUNDING)
    if row.loss_mask is not None:
        wrong &= row.loss_mask
    turns = [(turn, spans) for turn, spans in sampled_turns(view) if any(wrong[a:b].any() for a, b in spans)]
    spans = [span for _, stretch in turns for span in stretch]
    offset = _offset(logprobs, expected, spans)
    found = []
    for turn, stretch in turns:
        marked = np.concatenate([np.flatnonzero(wrong[a:b]) + a for a, b in stretch])
        start, end = (stretch[0][0], stretch[-1][1]) if offset else (int(marked[0]), int(marked[-1]) + 1)
        found.append(LogprobShift(start, end, turn, offset, True, len(marked)))
    return found


def _offset(logprobs: Logprobs, expected: Logprobs, spans: list[tuple[int, int]]) -> int:
    """The offset at which all values inside the spans are the expected ones; 0 when there is none.

    At least two values must be wrong where they stand and right at the offset, so that a row of values
    close to zero proves nothing.
    """
    for far in range(1, _FARTHEST_SHIFT + 1):
        for offset in (far, -far):
            cured = 0
            for start, end in spans:
                here = np.arange(max(start, start - offset), min(end, end - offset))
                here = here[~np.isnan(expected[here])]
                moved = np.abs(logprobs[here + offset] - expected[here]) <= ROUNDING
                if not moved.all():
                    break
                cured += int((~(np.abs(logprobs[here] - expected[here]) <= ROUNDING)).sum())
            else:
                if cured >= 2:
                    return offset
    return 0


def _against_sentinels(row: TrainingRow, logprobs: Logprobs, view: RowView | None) -> list[LogprobShift]:
    """The whole trained part when values and sentinels begin and end early or late by the same places."""
    mask = row.loss_mask
    if mask is None or not mask.any() or mask.all():
        return []
    if view is not None and mask_slide(mask, view.sampled):
        # The mask is what slid; the logprobs lie where they should.
        return []
    column = next((c for c in row.columns if c.role is ColumnRole.LOGPROBS), None)
    if column is not None and column.alignment is not Alignment.FULL:
        covered = (row.prompt_length or 0) if column.alignment is Alignment.RESPONSE else 1
    else:
        covered = 0
    real = ~np.isnan(logprobs)
    if row.sentinel is not None:
        real &= logprobs != row.sentinel
    spans = trained_runs(mask)
    for far in range(1, _FARTHEST_SHIFT + 1):
        for offset in (far, -far):
            if _explains(real, spans, offset, covered):
                lost = int((mask & ~real).sum())
                return [LogprobShift(spans[0][0], spans[-1][1], None, offset, False, lost)]
    return []


def _explains(real: Mask, spans: list[tuple[int, int]], offset: int, covered: int) -> bool:
    """True when moving the spans by the offset, and only that, accounts for every value and sentinel.

    A sentinel inside the moved spans is let go: 0.0 is also the value of a certain token.
    """
    moved = np.zeros(len(real), np.bool_)
    trained = moved.copy()
    for start, end in spans:
        trained[start:end] = True
        moved[max(start + offset, covered) : max(end + offset, covered)] = True
    gained, lost = moved & ~trained, trained & ~moved
    if not gained.any() or not lost.any() or (real & ~moved).any():
        return False
    return bool(real[gained].all() and not real[lost].any())
