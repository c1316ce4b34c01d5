"""A shifted logprob column, moved back as far as the log proves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.evidence.fill import first_covered
from tito_audit.evidence.judgement import judgement, restored_logprobs
from tito_audit.evidence.logprobs import ROUNDING, LogprobShift, shifts
from tito_audit.evidence.model import Evidence, RowView
from tito_audit.record.arrays import Logprobs, Mask, Offsets
from tito_audit.record.rollout import TrainingRow


@dataclass(frozen=True, slots=True)
class MovedBack:
    """Logprobs back on their tokens."""

    logprobs: Logprobs
    """`[T]`"""
    lost: Mask
    """`[T]` sampled tokens whose value fell off an end and is not recorded elsewhere in the log."""
    offset: int
    by_calls: bool


def moved_back(evidence: Evidence) -> MovedBack | None:
    """The logprobs of the row back on their tokens; None when they are not shifted.

    RecordError when they are wrong and no offset is proven to put them right.
    """
    found, row, view = shifts(evidence), evidence.rollout.training_row, evidence.row
    if not found or row is None or row.logprobs is None:
        return None
    offset = found[0].offset
    if found[0].undecided:
        raise RecordError("the row alone does not show how far its logprobs are shifted")
    if not offset:
        raise RecordError("the row's logprobs do not match the calls' at any offset")
    judged = judgement(evidence)
    if not found[0].by_calls and judged is not None:
        logprobs, lost = restored_logprobs(row, judged)
        return MovedBack(logprobs, lost, offset, by_calls=False)
    source = np.arange(len(row.logprobs)) + offset
    inside = (
        (source >= first_covered(row)) & (np.arange(len(source)) >= first_covered(row)) & (source < len(source))
    )
    source = np.where(inside, source, 0)
    fill, first = _filler(evidence, row), first_covered(row)
    whole = np.where(inside, row.logprobs[source], fill)
    whole[:first] = row.logprobs[:first]
    assert view is not None
    assert view.expected_logprobs is not None
    expected = view.expected_logprobs
    right = inside & (np.abs(row.logprobs[source] - expected) <= ROUNDING)
    # Whether all turns, and so the whole column, are shifted by the same offset.
    assert view.expected_logprobs is not None
    together = inside & (view.turn >= 0) & (view.turn == view.turn[source])
    together &= view.turn_offset[source] - view.turn_offset == source - np.arange(len(source))
    if not (together & np.isfinite(view.expected_logprobs) & ~right & ~view.drifted).any():
        # The call supplies a value that fell off an end.
        values = np.where(np.isfinite(expected) & ~right, expected, whole)
        lost = ~inside & ~np.isfinite(expected)
    else:
        values, lost = _turn_by_turn(row, view, found, source, right, fill)
    trained = row.loss_mask if row.loss_mask is not None else np.zeros(len(source), np.bool_)
    lost &= trained
    return MovedBack(np.where(lost, fill, values), lost, offset, by_calls=True)


def _turn_by_turn(
    row: TrainingRow, view: RowView, found: list[LogprobShift], source: Offsets, right: Mask, fill: float
) -> tuple[Logprobs, Mask]:
    """The logprobs with only the shifted turns moved back; the call supplies each value that its turn lost."""
    assert row.logprobs is not None
    assert view.expected_logprobs is not None
    mine = np.isin(view.turn, [shift.turn for shift in found if shift.turn is not None])
    values = row.logprobs.copy()
    # A value outside its turn leaves a fill value behind.
    vacated = source[mine & right]
    values[vacated[~view.sampled[vacated]]] = fill
    values[mine] = np.where(right, row.logprobs[source], view.expected_logprobs)[mine]
    return values, mine & ~right & np.isnan(view.expected_logprobs)


def _filler(evidence: Evidence, row: TrainingRow) -> float:
    """The column's fill value for tokens without a logprob: the sentinel, else the most frequent value there."""
    if row.sentinel is not None:
        return row.sentinel
    judged, view = judgement(evidence), evidence.row
    if judged is not None and judged.values is not None:
        return judged.values.fill
    spoken = view.sampled if view is not None else row.loss_mask
    if row.logprobs is None or spoken is None or spoken.all():
        return float("nan")
    rest = row.logprobs[~spoken][first_covered(row) :]
    values, counts = np.unique(rest, return_counts=True)
    most = int(counts.argmax()) if len(counts) else 0
    return float(values[most]) if len(counts) and counts[most] * 2 > len(rest) else float("nan")
