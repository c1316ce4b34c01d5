"""A logprob column with one entry too many or too few: which one is extra, or where one is missing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.evidence.fill import IMPOSSIBLE
from tito_audit.evidence.logprobs import ROUNDING
from tito_audit.record.arrays import Logprobs, Mask

_PROOF = 2
"""This many known values must agree to count as proof."""


def fillers(values: Logprobs, sentinel: float | None) -> Mask:
    """`[N]` True where an entry is a fill value and not a logprob: null, 1.0, -9999, the sentinel.

    0.0 counts if the log has no sentinel of its own.
    """
    marks = (*IMPOSSIBLE, 0.0 if sentinel is None else sentinel)
    return np.asarray(np.isnan(values) | np.isin(values, marks))


def fitted_by_values(values: Logprobs, known: Logprobs) -> Logprobs | None:
    """The column made as long as `known` `[N]`, if its numbers then equal the known ones; else None.

    An extra entry is removed, or a missing entry inserted with its known value, where all other entries then
    agree. NaN in `known` is not compared.
    """
    extra = len(values) - len(known)
    if np.isfinite(known).sum() < _PROOF or abs(extra) != 1:
        return None
    size = min(len(values), len(known))
    front = _agree(values[:size], known[:size])
    back = _agree(values[len(values) - size :], known[len(known) - size :])
    # At place j: everything before j agrees in place, and everything after it one place further on.
    before = np.concatenate(([True], np.logical_and.accumulate(front)))
    after = np.concatenate((np.logical_and.accumulate(back[::-1])[::-1], [True]))
    places = np.flatnonzero(before & after)
    if not len(places):
        return None
    if extra > 0:
        # If several places are left, take one at an end, else any one if the entries are equal.
        ends = places[(places == 0) | (places == len(known))]
        fitted = [np.delete(values, place) for place in (ends if len(ends) else places)]
        return fitted[0] if all(_alike(fitted[0], one, known) for one in fitted[1:]) else None
    place = next((int(p) for p in places if np.isfinite(known[p])), None)
    return None if place is None else np.insert(values, place, known[place])


def fitted_by_mask(values: Logprobs, trained: Mask, sentinel: float | None) -> Logprobs | None:
    """The column without its first or last entry, if that is a fill value and the rest then lie exactly under the
    mask.

    A fill value is accepted inside a trained run but not at its ends: 0.0 may also be a certain token's logprob.
    """
    if len(values) != len(trained) + 1 or not trained.any() or trained.all():
        return None
    padded = np.concatenate(([False], trained, [False]))
    ends = trained & ~(padded[:-2] & padded[2:])
    found = []
    for rest, end in ((values[1:], values[:1]), (values[:-1], values[-1:])):
        real = ~fillers(rest, sentinel)
        if fillers(end, sentinel)[0] and not (real & ~trained).any() and real[ends].all():
            found.append(rest)
    return found[0] if len(found) == 1 else None


def fitted_by_null(values: Logprobs, length: int, sentinel: float | None) -> Logprobs | None:
    """The column without the one entry at an end that cannot be a logprob, if all others can; else None."""
    if len(values) != length + 1:
        return None
    marks: Sequence[float] = (*IMPOSSIBLE, *((sentinel,) if sentinel else ()))
    impossible = np.flatnonzero(np.isnan(values) | np.isin(values, marks))
    if len(impossible) != 1 or int(impossible[0]) not in (0, length):
        return None
    return np.delete(values, int(impossible[0]))


def unprovable(name: str) -> RecordError:
    """The refusal for a column in which the wrong entry cannot be identified."""
    return RecordError(f"column {name!r}: this log does not prove which entry is extra or missing")


def _agree(values: Logprobs, known: Logprobs) -> Mask:
    return np.asarray(~np.isfinite(known) | (np.abs(values - known) <= ROUNDING))


def _alike(one: Logprobs, other: Logprobs, known: Logprobs) -> bool:
    """Whether two fits give the same values: up to rounding where values are known, exactly elsewhere."""
    said = np.isfinite(known)
    rest = (one[~said], other[~said])
    return bool((np.abs(one[said] - other[said]) <= 2 * ROUNDING).all() and np.array_equal(*rest, equal_nan=True))
