"""Which entries of a logprob column are logprobs, and which just fill the places of tokens without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tito_audit.evidence.model import SampledSpan
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.column import Alignment, ColumnRole
from tito_audit.record.rollout import TrainingRow

IMPOSSIBLE = (1.0, -9999.0)
"""Values that are never logprobs, whatever the format's fill."""
_IMPOSSIBLY_LOW = min(IMPOSSIBLE)
FLOOR = -1000.0
"""No sampled token has a logprob this low."""
FARTHEST = 4
"""How many places off its tokens a mask or a column is looked for."""


@dataclass(frozen=True, slots=True)
class Values:
    """The logprob column of a row: which entries are values, and what fills the rest."""

    real: Mask
    """`[T]` True where the entry is a value."""
    covered: Mask
    """`[T]` True where the column has an entry at all."""
    fill: float
    """The entry where there is no logprob; NaN for null."""
    highest: float = np.nan
    """The highest value, if it was looked for."""
    lowest: float = np.nan

    @property
    def certain(self) -> bool:
        """Whether the fill cannot be a logprob; 0.0 is also the logprob of a certain token."""
        return not (FLOOR < self.fill <= 0)


def rolled_to(spans: Sequence[SampledSpan], far: int, size: int) -> slice:
    """Where values moved by `far` past one end of a row of this size reappear if rolled, as by `np.roll`.

    Only places outside the spans (given in order): inside a span, a rolled value looks like any other.
    """
    over = spans[-1].ends[-1] + far - size if far > 0 else -spans[0].start - far
    if over <= 0:
        return slice(0)
    if far > 0:
        return slice(min(over, spans[0].start))
    return slice(max(size - over, spans[-1].ends[-1]), size)


def first_covered(row: TrainingRow, role: ColumnRole = ColumnRole.LOGPROBS) -> int:
    """The first token that the row's column of this role covers."""
    for column in row.columns:
        if column.role is role:
            if column.alignment is Alignment.FULL:
                break
            return (row.prompt_length or 0) if column.alignment is Alignment.RESPONSE else 1
    return 0


def values_of(row: TrainingRow, spans: Sequence[SampledSpan], reach: int) -> Values | None:
    """The values of the logprob column; its fill is read from the entries far from every span.

    None without a column, where only trained tokens have entries, where every entry is a value (prompt logprobs
    are logged too), and where none is.
    """
    if row.logprobs is None or not _covers_row(row):
        return None
    on_mask = values_on_mask(row, spans, reach)
    if on_mask is not None:
        return on_mask
    covered = np.arange(len(row.logprobs)) >= first_covered(row)
    inside = np.zeros(len(row.logprobs), np.bool_)
    near = inside.copy()
    for span in spans:
        inside[span.start : span.ends[-1]] = True
        near[max(span.start - reach, 0) : span.ends[-1] + reach] = True
    far = covered & ~near
    fill = _fill(row.logprobs[far] if far.any() else row.logprobs[covered & ~inside])
    if fill is None and not far.any():
        # Too few entries lie outside to tell: take the format's fill, or the most common odd entry.
        fill, entries = row.sentinel, row.logprobs[covered]
        odd = entries[np.isnan(entries) | (entries >= 0) | (entries <= FLOOR)]
        if fill is None and len(odd):
            counts = [int(_equals(entries, float(value)).sum()) for value in odd[:8]]
            fill = float(odd[int(np.argmax(counts))])
        if fill is None and not (covered & ~inside).any():
            fill = np.nan  # a column over a single answer, with a value for every token
    if fill is None:
        return None
    real = covered & ~_equals(row.logprobs, fill) & ~np.isnan(row.logprobs) & ~np.isin(row.logprobs, IMPOSSIBLE)
    if not real.any() or (real[covered].all() and (covered & ~inside).any()):
        return None
    return Values(real, covered, fill)


def _covers_row(row: TrainingRow) -> bool:
    """Whether the logprob column has entries for more than the trained tokens."""
    own = [column.alignment for column in row.columns if column.role is ColumnRole.LOGPROBS]
    return Alignment.SAMPLED not in own and None not in own


def values_on_mask(
    row: TrainingRow, spans: Sequence[SampledSpan], reach: int, *, inside: bool = False
) -> Values | None:
    """The values of a column that has one for every trained token and the same fill everywhere else.

    This gives what `values_of` finds in most rows at a fraction of the cost; None for other rows. Pass `inside` if
    all trained tokens are known to lie in the spans.
    """
    mask, logprobs = row.loss_mask, row.logprobs
    if mask is None or logprobs is None or not _covers_row(row) or first_covered(row):
        return None
    if len(logprobs) <= sum([span.ends[-1] - span.start + 2 * reach for span in spans]):
        return None
    if not inside and (
        not mask.any()
        or sum(int(np.count_nonzero(mask[span.start : span.ends[-1]])) for span in spans) < np.count_nonzero(mask)
    ):
        return None
    bits, at = logprobs.view(np.int64), int(mask.argmin()) if mask[0] else 0
    if not ((bits != bits[at]) == mask).all():
        return None
    values, fill = logprobs[mask], float(logprobs[at])
    lowest, highest = float(values.min()), float(values.max())
    if not _IMPOSSIBLY_LOW < lowest <= highest <= 0 or FLOOR < fill < 0:
        return None
    return Values(mask, np.ones(len(mask), np.bool_), fill, highest, lowest)


def _fill(entries: Logprobs) -> float | None:
    """The one value that nearly all of these entries have, compared bit by bit; None when there is none."""
    for candidate in {
        at: float(entries[at]) for at in (0, len(entries) // 2, len(entries) - 1) if len(entries)
    }.values():
        if np.count_nonzero(_equals(entries, candidate)) >= 0.9 * len(entries):
            # A negative value may be the fill only where it is too low for a logprob.
            return candidate if np.isnan(candidate) or candidate >= 0 or candidate <= FLOOR else None
    return None


def _equals(logprobs: Logprobs, fill: float) -> Mask:
    """`[T]` True where an entry is the fill; -0.0 does not equal 0.0, since only arithmetic produces it."""
    if np.isnan(fill):
        return np.isnan(logprobs)
    return np.asarray((logprobs == fill) & (np.signbit(logprobs) == np.signbit(fill)))
