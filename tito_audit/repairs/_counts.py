"""A logprob column of another length than its tokens: which entry is too many, or where one is missing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.evidence.fill import IMPOSSIBLE
from tito_audit.evidence.logprobs import ROUNDING
from tito_audit.record.arrays import Logprobs, Mask

_PROOF = 2
"""Known values that have to agree before they prove anything."""


def fillers(values: Logprobs, sentinel: float | None) -> Mask:
    """`[N]` True where an entry is no logprob but what stands for none: null, 1.0, -9999, the sentinel.

    0.0 counts where the log has no sentinel of its own.
    """
    marks = (*IMPOSSIBLE, 0.0 if sentinel is None else sentinel)
    return np.asarray(np.isnan(values) | np.isin(values, marks))


def fitted_by_values(values: Logprobs, known: Logprobs) -> Logprobs | None:
    """The entries as one each for `known` `[N]`, whose numbers they have to repeat; None when they do not.

    One entry too many is left out where all others then agree; one too few is put in where all others
    agree, with the known value. NaN in `known` says nothing.
    """
    extra = len(values) - len(known)
    if np.isfinite(known).sum() < _PROOF or abs(extra) != 1:
        return None
    size = min(len(values), len(known))
    front = _agree(values[:size], known[:size])
    back = _agree(values[len(values) - size :], known[len(known) - size :])
    # At place j everything before j agrees as it stands, everything behind it one place on.
    before = np.concatenate(([True], np.logical_and.accumulate(front)))
    behind = np.concatenate((np.logical_and.accumulate(back[::-1])[::-1], [True]))
    places = np.flatnonzero(before & behind)
    if not len(places):
        return None
    if extra > 0:
        # Where the proof leaves a choice, it is an end, else between entries that say the same.
        ends = places[(places == 0) | (places == len(known))]
        fitted = [np.delete(values, place) for place in (ends if len(ends) else places)]
        return fitted[0] if all(_alike(fitted[0], one, known) for one in fitted[1:]) else None
    place = next((int(p) for p in places if np.isfinite(known[p])), None)
    return None if place is None else np.insert(values, place, known[place])


def fitted_by_mask(values: Logprobs, trained: Mask, sentinel: float | None) -> Logprobs | None:
    """Without its first or its last entry, a filler, where values then stand exactly under the mask.

    A filler under the mask is let go inside a trained run, not at its ends: 0.0 is also a certain token's.
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
    """Without the one entry at an end that cannot be a logprob, where all others can."""
    if len(values) != length + 1:
        return None
    marks: Sequence[float] = (*IMPOSSIBLE, *((sentinel,) if sentinel else ()))
    impossible = np.flatnonzero(np.isnan(values) | np.isin(values, marks))
    if len(impossible) != 1 or int(impossible[0]) not in (0, length):
        return None
    return np.delete(values, int(impossible[0]))


def unprovable(name: str) -> RecordError:
    """The refusal for a column of which no entry can be told to be the wrong one."""
    return RecordError(f"column {name!r}: which entry is too many or missing is not provable from this log")


def _agree(values: Logprobs, known: Logprobs) -> Mask:
    return np.asarray(~np.isfinite(known) | (np.abs(values - known) <= ROUNDING))


def _alike(one: Logprobs, other: Logprobs, known: Logprobs) -> bool:
    """Whether two ways to fit give the same values, rounding aside, where it matters or everywhere."""
    spoken = np.isfinite(known)
    rest = (one[~spoken], other[~spoken])
    return bool(
        (np.abs(one[spoken] - other[spoken]) <= 2 * ROUNDING).all() and np.array_equal(*rest, equal_nan=True)
    )
