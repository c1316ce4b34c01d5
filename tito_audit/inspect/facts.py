"""Facts: statistics of a column's numbers, and what they could be by their values alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from tito_audit.inspect.columns import Numbers

_LARGEST_VOCABULARY = 2_000_000
_FLOOR = -100.0
"""Values below this are placeholders for a missing logprob."""


class Look(StrEnum):
    """What the values of a list of numbers look like."""

    IDS = "ids"  # integers in the range of a vocabulary
    MASK = "mask"  # 0 and 1, or booleans
    LABELS = "labels"  # -100 and ids
    LOGPROBS = "logprobs"  # not above 0, except values that mean "none"
    POSITIONS = "positions"  # 0, 1, 2, …
    OFFSETS = "offsets"  # from 0, never decreasing
    NUMBERS = "numbers"


@dataclass(frozen=True, slots=True)
class Facts:
    """Statistics of all numbers of a column."""

    look: Look
    count: int
    nulls: int
    low: float
    high: float
    distinct: int
    """How many distinct numbers there are, counted up to 64."""
    shares: tuple[tuple[float, float], ...]
    """Up to four special values (-100, 0, 1, -9999, …), each with its share."""
    constant: bool
    """Whether every list repeats one number."""
    whole: bool
    """Whether all are whole numbers."""


def facts_of(arrays: Sequence[Numbers]) -> Facts | None:
    """The facts of a column of number lists; None if it has no number."""
    filled = [array for array in arrays if len(array)]
    if not filled:
        return None
    every = np.concatenate([array.astype(np.float64) for array in filled])
    finite = every[np.isfinite(every)]
    if not len(finite):
        return Facts(Look.NUMBERS, len(every), len(every), np.nan, np.nan, 0, (), False, False)
    values, counts = np.unique(finite, return_counts=True)
    kind = "b" if all(array.dtype.kind == "b" for array in filled) else "i"
    if any(array.dtype.kind == "f" for array in filled):
        kind = "f"
    whole = bool((finite == np.floor(finite)).all())
    look = _look(filled, values, counts, kind, whole)
    signs = [i for i, value in enumerate(values) if value in (-100.0, 0.0, 1.0) or value < _FLOOR][:4]
    return Facts(
        look,
        len(every),
        len(every) - len(finite),
        float(values[0]),
        float(values[-1]),
        min(len(values), 64),
        tuple((float(values[i]), float(counts[i] / len(every))) for i in signs),
        all(len(array) > 1 and bool((array == array[0]).all()) for array in filled),
        whole,
    )


def _look(arrays: Sequence[Numbers], values: Numbers, counts: Numbers, kind: str, whole: bool) -> Look:
    if kind == "b" or (len(values) <= 2 and set(values.tolist()) <= {0.0, 1.0}):
        return Look.MASK
    if kind != "f" or whole:
        if all(len(array) > 1 and bool((np.diff(array) == 1).all()) and array[0] == 0 for array in arrays):
            return Look.POSITIONS
        if values[0] == -100 and (len(values) == 1 or (values[1] >= 0 and values[-1] < _LARGEST_VOCABULARY)):
            return Look.LABELS
        rising = [array for array in arrays if len(array) > 1]
        if rising and all(array[0] == 0 and bool((np.diff(array) >= 0).all()) for array in rising):
            return Look.OFFSETS
        # Lists of one number are scalars, not sequences.
        if kind != "f" and values[0] >= 0 and 2 <= values[-1] < _LARGEST_VOCABULARY and rising:
            return Look.IDS
    # Atropos writes 1.0 for a missing logprob; a few other values above 0 are tolerated.
    above = counts[(values > 0) & (values != 1.0)].sum()
    if kind == "f" and values[0] < 0 and above <= counts.sum() / 50:
        return Look.LOGPROBS
    return Look.NUMBERS
