"""Columns of a batch, padded to its longest sample: padding removed, and added again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.formats._values import as_logged


def unpadded(value: Any, visible: NDArray[np.bool_]) -> Any:
    """A column without its padding; the same object if it has none."""
    if value is None or visible.all():
        return value
    where = np.flatnonzero(visible)
    return value[int(where[0]) : int(where[-1]) + 1] if len(where) else value[:0]


def repadded(value: Any, original: Any, visible: NDArray[np.bool_], *, left: bool, name: str) -> Any:
    """A column padded to its old width; RecordError if it has more tokens than that."""
    width, size = len(visible), len(value)
    if size > width:
        raise RecordError(f"{name} would have {size} tokens, but the batch is only {width} tokens wide there")
    hidden = np.flatnonzero(~visible)
    fill: Any = original[int(hidden[0])] if len(hidden) else None
    if size < width and fill is None:
        raise RecordError(f"{name} would need padding, and nothing in it says with which value")
    inner = value.tolist() if isinstance(value, np.ndarray) else list(value)
    padding = [fill] * (width - size)
    return as_logged([*padding, *inner] if left else [*inner, *padding], original)
