"""Padding: what an attention mask says about it, and columns without it and with it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._columns import MASKS, first_filled, is_list, plain
from tito_audit.formats._values import as_logged
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
    if name is None or not is_list(mask) or len(mask) != len(row[name]):
        return row, Padding(), None
    visible = as_floats(mask, "attention_mask") > 0
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
    if not is_list(mask) or len(mask) != width:
        return None
    hidden = ~(as_floats(mask, "attention_mask") > 0)
    return hidden if hidden.any() else None


def unpadded(value: Any, visible: Mask) -> Any:
    """A column without its padding; the same object if it has none."""
    if value is None or visible.all():
        return value
    where = np.flatnonzero(visible)
    return value[int(where[0]) : int(where[-1]) + 1] if len(where) else value[:0]


def repadded(row: Row, changed: Mapping[str, Any], prompt: tuple[str, Mask], response: Mask) -> dict[str, Any]:
    """A sample's changed columns, padded to their old widths; `prompt` is padded on the left.

    Columns of other widths than the response are not padded. RecordError if one has more tokens than its width.
    """
    values: dict[str, Any] = {}
    for name, value in changed.items():
        old: Any = row[name]
        if is_list(value) and name == prompt[0]:
            values[name] = _repadded(value, old, prompt[1], left=True, name=name)
        elif is_list(value) and is_list(old) and len(old) == len(response):
            values[name] = _repadded(value, old, response, left=False, name=name)
        else:
            values[name] = value
    return values


def _repadded(value: Any, original: Any, visible: Mask, *, left: bool, name: str) -> Any:
    width, size = len(visible), len(value)
    if size > width:
        raise RecordError(f"{name} would have {size} tokens, but the batch is only {width} tokens wide there")
    hidden = np.flatnonzero(~visible)
    fill: Any = original[int(hidden[0])] if len(hidden) else None
    if size < width and fill is None:
        raise RecordError(f"{name} would need padding, and nothing in it says with which value")
    padding = [fill] * (width - size)
    return as_logged([*padding, *plain(value)] if left else [*plain(value), *padding], original)
