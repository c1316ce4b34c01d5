"""Packed rows: columns of unknown names that show that a row holds several samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tito_audit.formats import SEGMENTS
from tito_audit.inspect.columns import Column, Item, Numbers

LENGTHS, POSITIONS = "seq_lens", "position_ids"
_NAMES = {LENGTHS, POSITIONS, *SEGMENTS, "sequence_lengths", "cu_seqlens", "attention_mask"}
"""Columns by which a scan splits rows."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A column that splits rows into samples."""

    path: str
    name: str
    """The name under which a scan would split rows by it."""


def packed_by(columns: Sequence[Column], items: Sequence[Item], ids: str | None) -> Packed | None:
    """The column that splits the rows of these ids into samples; None if there is none, or a scan knows one."""
    numbers = [column for column in columns if column.top and not column.scope and column.arrays]
    if ids is None or any(column.path in _NAMES for column in numbers):
        return None
    for column in numbers:
        pairs = [(item.lists.get(column.path), item.lists.get(ids)) for item in items]
        both = [(values, tokens) for values, tokens in pairs if values is not None and tokens is not None]
        if len(both) < 2 or any(values.dtype.kind not in "iu" for values, _ in both):
            continue
        if all(_restarts(values) and len(values) == len(tokens) for values, tokens in both):
            return Packed(column.path, POSITIONS)
        if all(_sums(values, len(tokens)) for values, tokens in both) and max(len(v) for v, _ in both) > 1:
            return Packed(column.path, LENGTHS)
    return None


def _sums(values: Numbers, length: int) -> bool:
    """Whether these numbers are the lengths of a list's parts."""
    return 0 < len(values) < length and bool((values > 0).all()) and int(values.sum()) == length


def _restarts(values: Numbers) -> bool:
    """Whether a list counts up from 0, and again from 0."""
    steps = np.diff(values)
    counts = (steps == 1) | (values[1:] == 0)
    return len(steps) > 0 and values[0] == 0 and bool(counts.all()) and bool((steps < 0).any())
