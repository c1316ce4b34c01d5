"""Per-token columns: which token entry *i* describes, how a mask is encoded, what moves with a token."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.record.arrays import Ids, Mask

_ID_LIMIT = 2**31
"""Numbers from here on are neither token ids nor loss weights."""


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
    """How a loss mask marks trained tokens."""

    LABELS = "labels"  # its own token id, else -100
    BINARY = "binary"  # 1, else 0
    FLOAT = "float"  # a weight above 0.0, else 0.0
    BOOL = "bool"  # true, else false
    IMPLIED = "implied"  # no mask: what a call generated is trained
    ABSENT = "absent"  # null: the whole response is trained


class ColumnRole(StrEnum):
    """What a per-token column is for."""

    LOSS_MASK = "loss_mask"
    LOGPROBS = "logprobs"
    OTHER = "other"


class MovePolicy(StrEnum):
    """What happens to a column's entries when tokens move or change."""

    MOVE = "move"  # moves with its token
    COPY = "copy"  # derived from the ids, and derived again
    STALE = "stale"  # computed by a trainer from the old ids; wrong at and after any change
    DROP = "drop"  # cannot be rebuilt (expert routing, kept-token sets)


@dataclass(frozen=True, slots=True)
class Column:
    """One per-token column as recorded, before it is interpreted."""

    name: str
    role: ColumnRole
    values: NDArray[Any]
    """`[N]` as recorded; numbers if all are numbers, else objects. NaN for null."""
    alignment: Alignment | None
    """None when the length fits nothing that it could describe; REC002 and LPR501 report that."""
    policy: MovePolicy = MovePolicy.MOVE
    encoding: MaskEncoding | None = None
    """The encoding of a mask; None for other roles, or when the values are not a mask."""
    sentinel: float | None = None
    """What the format writes where there is no logprob; None when it writes null or nothing, and for other
    roles."""


def alignment_by_length(
    length: int, *, full: int, prompt_length: int | None = None, trained: Mask | None = None
) -> Alignment | None:
    """The first of full, response, sampled, shifted that a column of this length fits; None if none.

    `full` is the number of tokens, `prompt_length` the first sampled position, `trained` which tokens are trained.
    Names are never considered: frameworks use one name for different alignments.
    """
    if length == full:
        return Alignment.FULL
    if prompt_length is not None and length == full - prompt_length:
        return Alignment.RESPONSE
    if trained is not None and length == np.count_nonzero(trained):
        return Alignment.SAMPLED
    if length == full - 1:
        return Alignment.SHIFTED
    return None


def expand(
    values: NDArray[Any],
    alignment: Alignment,
    *,
    full: int,
    prompt_length: int | None = None,
    trained: Mask | None = None,
    fill: Any = np.nan,
) -> NDArray[Any]:
    """`[full]` a column with an entry for each token, `fill` where it has none.

    ValueError for an alignment to anything but the tokens of one row.
    """
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


def detect_mask_encoding(values: NDArray[Any], ids: Ids | None = None) -> MaskEncoding | None:
    """How a mask column is encoded; None when its values are not a mask.

    Booleans are BOOL; 0 and 1 BINARY; -100 and ids LABELS (Atropos, NousResearch/atropos
    `atroposlib/envs/base.py`), which, if no -100 occurs, must be the `ids` of their tokens; 0 and positive weights
    FLOAT. Other whole numbers count or number something (segments, turns) and say nothing about the loss.
    """
    if values.dtype.kind == "b":
        return MaskEncoding.BOOL
    if values.dtype.kind not in "iuf" or (values.dtype.kind == "f" and np.isnan(values).any()):
        return None
    if values.dtype == np.float16:
        values = values.astype(np.float64)  # float16 cannot hold ids, nor _ID_LIMIT
    if values.dtype.kind in "iu" and len(values):
        least, most = np.minimum.reduce(values), np.maximum.reduce(values)
        if 0 <= least <= most <= 1:
            return MaskEncoding.BINARY
    if (values == -100).any():
        rest = values[values != -100]
        are_ids = bool(((rest >= 0) & (rest < _ID_LIMIT) & (rest == np.floor(rest))).all())
        return MaskEncoding.LABELS if are_ids else None
    if ((values == 0) | (values == 1)).all():
        return MaskEncoding.FLOAT if values.dtype.kind == "f" else MaskEncoding.BINARY
    if ids is not None and np.array_equal(values, ids):
        return MaskEncoding.LABELS
    if values.dtype.kind != "f" or values.min() < 0 or values.max() >= _ID_LIMIT:
        return None
    # Several different whole numbers are segment numbers stored as floats, not weights.
    has_fractions = bool((values != np.floor(values)).any())
    return MaskEncoding.FLOAT if has_fractions or len(np.unique(values[values > 0])) == 1 else None


def decode_mask(values: NDArray[Any], encoding: MaskEncoding) -> Mask:
    """`[N]` bool, True where a mask column trains the token."""
    if encoding is MaskEncoding.LABELS:
        return np.asarray(values != -100)
    return np.asarray(values > 0)
