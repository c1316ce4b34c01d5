"""Tells the values of a logprob column from the fill that stands at tokens without a logprob."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tito_audit.evidence.model import SampledSpan
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.column import Alignment, ColumnRole
from tito_audit.record.rollout import TrainingRow

IMPOSSIBLE = (1.0, -9999.0)
"""Entries that are never logprobs, whatever fill the format uses."""
_IMPOSSIBLY_LOW = min(IMPOSSIBLE)
LOWEST_LOGPROB = -1000.0
"""No sampled token has a logprob this low."""
MAX_SLIDE = 4
"""How many places off its tokens a mask or a logprob column is searched for."""


@dataclass(frozen=True, slots=True)
class LogprobValues:
    """The logprob column of a row, split into values and fill."""

    real: Mask
    """`[T]` True where the entry is a value."""
    fill: float
    """The entry where there is no logprob; NaN for null."""
    highest: float = np.nan
    """The highest value; NaN unless `logprob_values_on_mask` found them."""
    lowest: float = np.nan

    @property
    def clear_fill(self) -> bool:
        """Whether the fill cannot be a logprob; 0.0 can, that of a certain token."""
        return not (LOWEST_LOGPROB < self.fill <= 0)


def wrapped_places(spans: Sequence[SampledSpan], far: int, size: int) -> slice:
    """The places to which `np.roll` by `far` carries the values that leave one end of a row of `size` tokens.

    Places inside a span are left out, since a rolled value looks like any other there. `spans` are in order.
    """
    over = spans[-1].ends[-1] + far - size if far > 0 else -spans[0].start - far
    if over <= 0:
        return slice(0)
    if far > 0:
        return slice(min(over, spans[0].start))
    return slice(max(size - over, spans[-1].ends[-1]), size)


def first_covered(row: TrainingRow, role: ColumnRole = ColumnRole.LOGPROBS) -> int:
    """The first token for which the row's column of this role has an entry."""
    for column in row.columns:
        if column.role is role:
            if column.alignment is Alignment.FULL:
                break
            return (row.prompt_length or 0) if column.alignment is Alignment.RESPONSE else 1
    return 0


def find_logprob_values(row: TrainingRow, spans: Sequence[SampledSpan]) -> LogprobValues | None:
    """The logprob column split into values and fill; the fill is read from entries far from every span.

    None without a column, and where fill cannot be told: only trained tokens have entries, every entry is a value
    (prompt logprobs are logged too), or none is.
    """
    if row.logprobs is None or not _covers_row(row):
        return None
    on_mask = logprob_values_on_mask(row, spans)
    if on_mask is not None:
        return on_mask
    covered = np.arange(len(row.logprobs)) >= first_covered(row)
    inside = np.zeros(len(row.logprobs), np.bool_)
    near = inside.copy()
    for span in spans:
        inside[span.start : span.ends[-1]] = True
        near[max(span.start - MAX_SLIDE, 0) : span.ends[-1] + MAX_SLIDE] = True
    far = covered & ~near
    fill, outside = None, row.logprobs[far] if far.any() else row.logprobs[covered & ~inside]
    # At least 90 % of these entries equal the fill bit by bit. It is negative only if too low for a logprob.
    for at in (0, len(outside) // 2, len(outside) - 1) if len(outside) else ():
        entry = float(outside[at])
        if np.count_nonzero(_is_fill(outside, entry)) >= 0.9 * len(outside):
            fill = entry if np.isnan(entry) or entry >= 0 or entry <= LOWEST_LOGPROB else None
            break
    if fill is None and not far.any():
        # Too few entries lie outside: take the format's fill, else the most common entry that is no logprob.
        fill, entries = row.sentinel, row.logprobs[covered]
        odd = entries[np.isnan(entries) | (entries >= 0) | (entries <= LOWEST_LOGPROB)]
        if fill is None and len(odd):
            counts = [int(_is_fill(entries, float(value)).sum()) for value in odd[:8]]
            fill = float(odd[int(np.argmax(counts))])
        if fill is None and not (covered & ~inside).any():
            fill = np.nan  # the column covers a single answer and has a value for every token
    if fill is None:
        return None
    real = covered & ~_is_fill(row.logprobs, fill) & ~np.isnan(row.logprobs) & ~np.isin(row.logprobs, IMPOSSIBLE)
    if not real.any() or (real[covered].all() and (covered & ~inside).any()):
        return None
    return LogprobValues(real, fill)


def _covers_row(row: TrainingRow) -> bool:
    """Whether the logprob column has entries for more than the trained tokens."""
    for column in row.columns:
        if column.role is ColumnRole.LOGPROBS and column.alignment in (Alignment.SAMPLED, None):
            return False
    return True


def logprob_values_on_mask(
    row: TrainingRow, spans: Sequence[SampledSpan], *, inside: bool = False
) -> LogprobValues | None:
    """The values of a column with one for every trained token and the same fill elsewhere; None for other columns.

    Most rows have such a column, for which this costs a fraction of `find_logprob_values`. Pass `inside` if all
    trained tokens are known to lie in the spans.
    """
    mask, logprobs = row.loss_mask, row.logprobs
    if mask is None or logprobs is None or not _covers_row(row) or first_covered(row):
        return None
    if len(logprobs) <= sum([span.ends[-1] - span.start + 2 * MAX_SLIDE for span in spans]):
        return None
    if not inside and (
        not mask.any()
        or sum(int(np.count_nonzero(mask[span.start : span.ends[-1]])) for span in spans) < np.count_nonzero(mask)
    ):
        return None
    bits, at = logprobs.view(np.int64), int(mask.argmin()) if mask[0] else 0
    if not np.logical_and.reduce((bits != bits[at]) == mask):
        return None
    values, fill = logprobs[mask], float(logprobs[at])
    lowest, highest = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
    if not _IMPOSSIBLY_LOW < lowest <= highest <= 0 or LOWEST_LOGPROB < fill < 0:
        return None
    return LogprobValues(mask, fill, highest, lowest)


def _is_fill(logprobs: Logprobs, fill: float) -> Mask:
    """`[T]` True where an entry is the fill; -0.0 is not 0.0, since only arithmetic produces it."""
    if np.isnan(fill):
        return np.isnan(logprobs)
    return np.asarray((logprobs == fill) & (np.signbit(logprobs) == np.signbit(fill)))
