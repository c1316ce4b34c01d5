"""What an attention mask says about a row: where its padding ends, and which of its tokens are hidden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tito_audit.format import Row
from tito_audit.formats._columns import MASKS, first_filled, is_list
from tito_audit.record.arrays import Mask, as_floats
from tito_audit.record.build import column_values
from tito_audit.record.column import mask_encoding, trained_of
from tito_audit.record.rollout import Padding

PROMPT_LENGTHS = ("prompt_length", "prompt_len")


def without_padding(row: Row, name: str | None) -> tuple[Row, Padding, Mask | None]:
    """The row with padding cut from every column as long as the ids, the padding, and which tokens are hidden.

    Padding is what the attention mask hides at either end, unless the loss mask trains it.
    """
    mask = row.get("attention_mask")
    if name is None or not is_list(mask) or len(mask) != len(row[name]):  # type: ignore[arg-type]
        return row, Padding(), None
    visible = as_floats(mask, "attention_mask") > 0  # type: ignore[arg-type]
    if not visible.any() or visible.all():
        return row, Padding(), None
    kept = np.flatnonzero(visible | trained_tokens(row, len(visible)))
    start, end = int(kept[0]), int(kept[-1]) + 1
    hidden = None if visible[start:end].all() else ~visible[start:end]
    if end - start == len(visible):
        return row, Padding(), hidden
    cut: Mapping[str, Any] = {
        column: value[start:end] if is_list(value) and len(value) == len(row[name]) else value
        for column, value in row.items()
    }
    # Prompt lengths that include the padding on the left do not fit the cut row.
    cut = {k: v for k, v in cut.items() if k not in PROMPT_LENGTHS} if start else cut
    return cut, Padding(start, len(visible) - end), hidden


def trained_tokens(row: Row, width: int) -> Mask:
    """`[width]` what the row's loss mask trains, padding included; all False if no mask has that width."""
    name = first_filled(row, MASKS)
    if name is None or len(row[name]) != width:
        return np.zeros(width, np.bool_)
    values = column_values(row[name])
    encoding = mask_encoding(values)
    return np.zeros(width, np.bool_) if encoding is None else trained_of(values, encoding)


def hidden_tokens(row: Row, width: int) -> Mask | None:
    """`[width]` which tokens of a prompt and its response the attention mask hides; None if it hides none."""
    mask = row.get("attention_mask")
    if not is_list(mask) or len(mask) != width:  # type: ignore[arg-type]
        return None
    hidden = ~(as_floats(mask, "attention_mask") > 0)  # type: ignore[arg-type]
    return hidden if hidden.any() else None
