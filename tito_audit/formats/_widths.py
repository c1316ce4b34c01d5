"""Columns of a batch as wide as its longest sample: what of them is tokens, and tokens back in that width."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.formats._values import as_logged


def kept(value: Any, visible: NDArray[np.bool_]) -> Any:
    """A column from its first token to its last; itself where all of it is."""
    if value is None or visible.all():
        return value
    where = np.flatnonzero(visible)
    return value[int(where[0]) : int(where[-1]) + 1] if len(where) else value[:0]


def in_width(value: Any, original: Any, visible: NDArray[np.bool_], *, left: bool, name: str) -> Any:
    """A column in the width that it had; RecordError where its tokens do not fit into it."""
    width, size = len(visible), len(value)
    if size > width:
        raise RecordError(
            f"{name} of {size} tokens do not fit into the {width} places that the batch has for them"
        )
    hidden = np.flatnonzero(~visible)
    fill: Any = original[int(hidden[0])] if len(hidden) else None
    if size < width and fill is None:
        raise RecordError(f"{name} would be padded, and nothing in it says with what")
    inner = value.tolist() if isinstance(value, np.ndarray) else list(value)
    padding = [fill] * (width - size)
    return as_logged([*padding, *inner] if left else [*inner, *padding], original)
