"""Per-token columns: what entry *i* describes, how a mask is written, what moves with a token."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.arrays import Ids, Mask

_NO_ID = 2**31
"""From here on a number is no token id, and no weight."""


class Alignment(StrEnum):
    """What entry *i* of a column describes."""

    FULL = "full"  # token i of the whole sequence
    RESPONSE = "response"  # token prompt_length + i
    CALL = "call"  # generated token i of one call
    SAMPLED = "sampled"  # the i-th trained token (compact)
    SHIFTED = "shifted"  # token i + 1
    ROWS_MINUS_1 = "rows-1"  # token i as an input (expert routing)
    RAGGED = "ragged"  # values offsets[i]:offsets[i+1] belong to token i


class MaskEncoding(StrEnum):
    """How a loss mask says "trained"."""

    LABELS = "labels"  # its own token id, else -100
    BINARY = "binary"  # 1, else 0
    FLOAT = "float"  # a weight above 0.0, else 0.0
    BOOL = "bool"  # true, else false
    IMPLIED = "implied"  # what a call generated, else not
    ABSENT = "absent"  # null: the whole response


class ColumnRole(StrEnum):
    """What a per-token column is for."""

    LOSS_MASK = "loss_mask"
    LOGPROBS = "logprobs"
    OTHER = "other"


class MovePolicy(StrEnum):
    """What becomes of a column's entries when tokens move or change."""

    MOVE = "move"  # belongs to its token and goes where it goes
    COPY = "copy"  # repeats the ids and is written again from them
    STALE = "stale"  # computed by a trainer from the old ids; wrong at and after any change
    DROP = "drop"  # cannot be rebuilt (expert routing, kept-token sets)


@dataclass(frozen=True, slots=True)
class Column:
    """One per-token column as recorded, before anything is made of it."""

    name: str
    role: ColumnRole
    values: NDArray[Any]
    """`[N]` as recorded; numbers where it holds numbers, else objects. NaN stands for null."""
    alignment: Alignment | None
    """None when its length fits nothing it could describe; rules REC002 and LPR501 look for that."""
    policy: MovePolicy = MovePolicy.MOVE
    encoding: MaskEncoding | None = None
    """Of a mask; None for other roles."""
    sentinel: float | None = None
    """Of logprobs: what the format writes where no logprob exists; None when it writes null or nothing."""


def alignment_by_length(
    length: int, *, full: int, prompt_length: int | None = None, trained: int | None = None
) -> Alignment | None:
    """What a column of this length describes; never decided by its name.

    `full` is the number of tokens, `prompt_length` the first sampled position if known, `trained` the
    number of trained tokens if known. The first of full, response, sampled, shifted that fits; None
    when none does.
    """
    if length == full:
        return Alignment.FULL
    if prompt_length is not None and length == full - prompt_length:
        return Alignment.RESPONSE
    if trained is not None and length == trained:
        return Alignment.SAMPLED
    if length == full - 1:
        return Alignment.SHIFTED
    return None


def spread(
    values: NDArray[Any],
    alignment: Alignment,
    *,
    full: int,
    prompt_length: int | None = None,
    trained: Mask | None = None,
    fill: Any = np.nan,
) -> NDArray[Any]:
    """A column as one entry a token, `[full]`; `fill` where it says nothing."""
    if alignment is Alignment.FULL:
        return values
    out = np.full(full, fill, dtype=np.result_type(values.dtype, type(fill)))
    if alignment is Alignment.RESPONSE and prompt_length is not None:
        out[prompt_length:] = values
    elif alignment is Alignment.SAMPLED and trained is not None:
        out[trained] = values
    elif alignment is Alignment.SHIFTED:
        out[1:] = values
    else:
        raise ValueError(f"a column aligned {alignment} cannot be spread over {full} tokens")
    return out


def mask_encoding(values: NDArray[Any], ids: Ids | None = None) -> MaskEncoding | None:
    """How a mask column is written; None when its values are no mask.

    A column of booleans is BOOL; of 0 and 1, BINARY; of -100 and ids, LABELS (Atropos, NousResearch/atropos
    `atroposlib/envs/base.py`), which without a -100 has to be the `ids` of its tokens; of 0 and weights above
    it, FLOAT. Other whole numbers count or name something (a segment, a turn) and say nothing of the loss.
    """
    if values.dtype.kind == "b":
        return MaskEncoding.BOOL
    if values.dtype.kind not in "iuf" or (values.dtype.kind == "f" and np.isnan(values).any()):
        return None
    if (values == -100).any():
        return MaskEncoding.LABELS if _are_labels(values) else None
    if ((values == 0) | (values == 1)).all():
        return MaskEncoding.FLOAT if values.dtype.kind == "f" else MaskEncoding.BINARY
    if ids is not None and np.array_equal(values, ids):
        return MaskEncoding.LABELS
    return MaskEncoding.FLOAT if _are_weights(values) else None


def _are_labels(values: NDArray[Any]) -> bool:
    """Whether all but -100 could be ids."""
    said = values[values != -100]
    return bool(((said >= 0) & (said < _NO_ID) & (said == np.floor(said))).all())


def _are_weights(values: NDArray[Any]) -> bool:
    """Whether these floats weigh tokens; several whole numbers are rather segments that a table made floats."""
    if values.dtype.kind != "f" or values.min() < 0 or values.max() >= _NO_ID:
        return False
    fractions = bool((values != np.floor(values)).any())
    return fractions or len(np.unique(values[values > 0])) == 1


def trained_of(values: NDArray[Any], encoding: MaskEncoding) -> Mask:
    """True where the mask column says that the token is trained, `[N]` bool."""
    if encoding is MaskEncoding.LABELS:
        return np.asarray(values != -100)
    return np.asarray(values > 0)
