"""Builds turns' columns and training rows from raw lists: aligned by length, never padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.arrays import Ids, Logprobs, Mask, as_floats
from tito_audit.record.column import (
    Alignment,
    Column,
    ColumnRole,
    MovePolicy,
    alignment_by_length,
    decode_mask,
    detect_mask_encoding,
    expand,
)
from tito_audit.record.rollout import NO_PADDING, Padding, TrainingRow
from tito_audit.record.token_extras import NO_EXTRAS, TokenExtras

Raw = Sequence[Any] | NDArray[Any]
_all = np.logical_and.reduce
"""Whether all of a mask are true, without the Python function that `mask.all()` calls."""
SHOWN_BY_ROW = float("nan")
"""A sentinel to be inferred from the row: the value that all its untrained tokens have."""


def build_training_row(
    token_ids: Ids,
    *,
    mask: tuple[str, Raw] | None = None,
    logprobs: tuple[str, Raw] | None = None,
    other: Mapping[str, tuple[Raw, MovePolicy]] | None = None,
    prompt_length: int | None = None,
    sentinel: float | None = None,
    absent_mask_trains_response: bool = False,
    shifts: bool | None = False,
    whole: bool = False,
    padding: Padding = NO_PADDING,
    hidden: Mask | None = None,
    extras: TokenExtras = NO_EXTRAS,
) -> TrainingRow:
    """A training row from raw columns, each given as (name in the log, values).

    A mask or logprob column whose length or values do not fit stays in `columns` with alignment None, and
    `loss_mask` or `logprobs` is None.

    other       further per-token columns by name; a row may hold any list, so those that do not fit are left out
    sentinel    what the format writes where there is no logprob; SHOWN_BY_ROW infers it from untrained tokens
    absent_mask_trains_response   slime's convention: a null mask trains everything after the prompt
    shifts      whether mask and logprobs leave out the first token, which nothing predicts. None: only if the
                logprobs show it; logprobs that start at the first trained token then also set `prompt_length`
    whole       whether both always have an entry for every token
    """
    full = len(token_ids)
    columns: list[Column] = []
    loss_mask: Mask | None = None
    if mask is not None:
        column, loss_mask = _read_mask(mask[0], mask[1], token_ids, prompt_length, shifts)
        columns.append(column)
    elif absent_mask_trains_response and prompt_length is not None:
        loss_mask = np.arange(full) >= prompt_length
    values: Logprobs | None = None
    if logprobs is not None:
        raw = as_floats(logprobs[1], logprobs[0])
        fit = alignment_by_length(len(raw), full=full, prompt_length=prompt_length, trained=loss_mask)
        if fit is Alignment.SHIFTED and not (_shows_shift(raw, columns, loss_mask) if shifts is None else shifts):
            fit = None
        if whole and fit is not Alignment.FULL:
            fit = None
        if fit is None and shifts is None and prompt_length is None and _covers_response(raw, loss_mask):
            fit, prompt_length = Alignment.RESPONSE, full - len(raw)
        if fit is not None:
            values = expand(raw, fit, full=full, prompt_length=prompt_length, trained=loss_mask)
        sentinel = _shared_untrained_value(values, loss_mask) if sentinel is SHOWN_BY_ROW else sentinel
        columns.append(Column(logprobs[0], ColumnRole.LOGPROBS, raw, fit, sentinel=sentinel))
    sentinel = None if sentinel is SHOWN_BY_ROW else sentinel
    for name, (entries, policy) in (other or {}).items():
        fit = alignment_by_length(len(entries), full=full, prompt_length=prompt_length, trained=loss_mask)
        if fit is not None and full > 1:
            columns.append(Column(name, ColumnRole.OTHER, column_values(entries), fit, policy))
    every = tuple(columns)
    return TrainingRow(token_ids, loss_mask, values, prompt_length, sentinel, every, (), padding, hidden, extras)


def _shared_untrained_value(logprobs: Logprobs | None, loss_mask: Mask | None) -> float | None:
    """The sentinel of a row: the value of all its untrained tokens; None if they differ or it may be a logprob.

    Most trainers write 0.0, Atropos 1.0, others null, and no column name tells which of them wrote the row.
    """
    if logprobs is None or loss_mask is None or not len(logprobs):
        return None
    first = float(logprobs[loss_mask.argmin()])
    if first != first or not _all((logprobs == first) | loss_mask):
        missing = np.isnan(logprobs)
        outside = logprobs[~loss_mask & ~missing]
        if not len(outside) or (outside != outside[0]).any():
            return None
        # The column may start after the prompt; nulls after its first value are a sentinel of their own.
        if np.count_nonzero((missing & ~loss_mask)[int(missing.argmin()) :]) > len(outside):
            return None
        first = float(outside[0])
    elif _all(loss_mask):
        return None
    # A lone untrained token may have a real logprob: below zero, above any floor.
    return None if -100 < first < 0 else first


def build_call_columns(
    completion_ids: Ids,
    *,
    logprobs: tuple[str, Raw] | None = None,
    other: Mapping[str, tuple[Raw, MovePolicy]] | None = None,
    sentinel: float | None = None,
) -> tuple[Logprobs | None, tuple[Column, ...]]:
    """The logprobs `[C]` of a call, None if their length does not fit, and all its per-token columns."""
    columns: list[Column] = []
    values: Logprobs | None = None
    if logprobs is not None:
        raw = as_floats(logprobs[1], logprobs[0])
        fits = len(raw) == len(completion_ids)
        values = raw if fits else None
        fit = Alignment.CALL if fits else None
        columns.append(Column(logprobs[0], ColumnRole.LOGPROBS, raw, fit, sentinel=sentinel))
    for name, (entries, policy) in (other or {}).items():
        if len(entries) == len(completion_ids):
            columns.append(Column(name, ColumnRole.OTHER, column_values(entries), Alignment.CALL, policy))
    return values, tuple(columns)


def _shows_shift(logprobs: Logprobs, masks: Sequence[Column], loss_mask: Mask | None) -> bool:
    """Whether logprobs one short of the tokens lack the first: the mask does too, or only then they fit it."""
    if loss_mask is None or any(mask.alignment is Alignment.SHIFTED for mask in masks):
        return True
    return _untrained_share_a_fill(logprobs, loss_mask[1:]) and not _untrained_share_a_fill(
        logprobs, loss_mask[:-1]
    )


def _covers_response(logprobs: Logprobs, loss_mask: Mask | None) -> bool:
    """Whether there are as many logprobs as tokens from the first trained one on."""
    if loss_mask is None or not loss_mask.any() or len(logprobs) != len(loss_mask) - int(loss_mask.argmax()):
        return False
    # Servers write a leading null for a token without context; then there is one logprob too many.
    return not np.isnan(logprobs[0]) or len(logprobs) != int(loss_mask.sum()) + 1


def _untrained_share_a_fill(logprobs: Logprobs, trained: Mask) -> bool:
    """Whether all untrained entries have one value that is no logprob, and no trained entry has it."""
    outside = np.unique(logprobs[~trained])
    if len(outside) != 1 or -100 < outside[0] < 0:
        return False
    inside = logprobs[trained]
    return not (np.isnan(inside) if np.isnan(outside[0]) else inside == outside[0]).any()


def _read_mask(
    name: str, entries: Raw, token_ids: Ids, prompt_length: int | None, shifts: bool | None
) -> tuple[Column, Mask | None]:
    """The mask column as recorded, and the mask as `[T]` bool; None if its values or length do not fit."""
    raw = column_values(entries)
    fit = alignment_by_length(len(raw), full=len(token_ids), prompt_length=prompt_length)
    fit = None if fit is Alignment.SHIFTED and shifts is False else fit
    # Every alignment that a mask can have ends with the last token.
    encoding = detect_mask_encoding(raw, None if fit is None else token_ids[len(token_ids) - len(raw) :])
    column = Column(name, ColumnRole.LOSS_MASK, raw, fit, encoding=encoding)
    if encoding is None or fit is None:
        return column, None
    trained = decode_mask(raw, encoding)
    return column, expand(trained, fit, full=len(token_ids), prompt_length=prompt_length, fill=False)


def column_values(entries: Raw) -> NDArray[Any]:
    """`[N]` entries as numbers if all are numbers (None as NaN), else as objects."""
    if isinstance(entries, np.ndarray):
        return entries
    kinds = set(map(type, entries))
    if kinds <= {bool}:
        return np.array(entries, np.bool_)
    try:
        if kinds <= {int}:
            return np.array(entries, np.int64)
        if kinds <= {int, float, bool, type(None)}:
            return as_floats(entries, "")
    except OverflowError:
        pass
    out = np.empty(len(entries), object)
    out[:] = list(entries)
    return out
