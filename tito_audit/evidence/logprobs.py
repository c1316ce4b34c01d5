"""How far the logprobs of a row lie off their tokens, as far as rules and repairs both ask it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tito_audit.evidence.masks import row_slide, runs_inside, sampled_turns
from tito_audit.evidence.model import Evidence, RowView
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.column import Alignment, ColumnRole
from tito_audit.record.rollout import TrainingRow, trained_runs

__all__ = ["IMPOSSIBLE", "ROUNDING", "LogprobShift", "first_covered", "shifts"]

ROUNDING = 1e-3
"""Values this close are the same number: logs round, some to four decimals."""
IMPOSSIBLE = (1.0, -9999.0)
"""Sentinels that no probability has, whatever the format says of its own."""
_FARTHEST_SHIFT = 4


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


def shifts(evidence: Evidence) -> list[LogprobShift]:
    """Stretches of the row whose logprobs provably belong to other tokens; [] when none do."""
    return evidence.once("shifts", _shifts)


def _shifts(evidence: Evidence) -> list[LogprobShift]:
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.logprobs is None:
        return []
    if view is not None and view.expected_logprobs is not None:
        return _against_calls(evidence, row, row.logprobs, view, view.expected_logprobs)
    return _against_sentinels(evidence, row, row.logprobs)


def first_covered(row: TrainingRow) -> int:
    """The first token that the logprob column of a row says anything of."""
    column = next((c for c in row.columns if c.role is ColumnRole.LOGPROBS), None)
    if column is None or column.alignment is Alignment.FULL:
        return 0
    return (row.prompt_length or 0) if column.alignment is Alignment.RESPONSE else 1


def _against_calls(
    evidence: Evidence, row: TrainingRow, logprobs: Logprobs, view: RowView, expected: Logprobs
) -> list[LogprobShift]:
    """Turns whose values are not those of their call, with the offset at which they are."""
    # Infinite values are LPR503's, and nothing can be told from their differences.
    known = np.isfinite(expected) & ~view.drifted
    expected = np.where(known, expected, np.nan)
    wrong = known & ~(np.abs(logprobs - expected) <= ROUNDING)
    if row.loss_mask is not None:
        wrong &= row.loss_mask
    if not wrong.any():
        return []
    wrong &= np.isfinite(logprobs)
    for silent in (*IMPOSSIBLE, *(() if row.sentinel is None else (row.sentinel,))):
        wrong &= logprobs != silent
    runs = trained_runs(wrong)
    turns = [
        (turn, spans) for turn, spans in sampled_turns(evidence) if any(runs_inside(runs, a, b) for a, b in spans)
    ]
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


def _against_sentinels(evidence: Evidence, row: TrainingRow, logprobs: Logprobs) -> list[LogprobShift]:
    """The whole trained part when values and sentinels begin and end early or late by the same places."""
    mask = row.loss_mask
    if mask is None or not mask.any() or mask.all():
        return []
    real = ~np.isnan(logprobs)
    if row.sentinel is not None:
        real &= logprobs != row.sentinel
    # A shift leaves a value outside of the trained part and a sentinel inside it.
    if not (real & ~mask).any() or not (mask & ~real).any():
        return []
    if row_slide(evidence):
        # The mask is what slid; the logprobs lie where they should.
        return []
    covered = first_covered(row)
    for far in range(1, _FARTHEST_SHIFT + 1):
        for offset in (far, -far):
            if _explains(real, mask, offset, covered):
                spans = trained_runs(mask)
                lost = int((mask & ~real).sum())
                return [LogprobShift(spans[0][0], spans[-1][1], None, offset, False, lost)]
    return []


def _explains(real: Mask, trained: Mask, offset: int, covered: int) -> bool:
    """True when moving the trained tokens by the offset, and only that, accounts for every value and sentinel.

    A sentinel inside the moved part is let go: 0.0 is also the value of a certain token.
    """
    moved = np.zeros(len(real), np.bool_)
    if offset > 0:
        moved[offset:] = trained[:-offset]
    else:
        moved[:offset] = trained[-offset:]
    moved[:covered] = False
    gained, lost = moved & ~trained, trained & ~moved
    if not gained.any() or not lost.any() or (real & ~moved).any():
        return False
    return bool(real[gained].all() and not real[lost].any())
