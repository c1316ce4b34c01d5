"""Samples of slime and miles: one list of ids that ends with the response, and columns over the response.

THUDM/slime and radixark/miles `utils/types.py` (`Sample`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._beside import read_beside, with_token_versions
from tito_audit.formats._calls import COMPLETION_IDS, PROMPT_IDS
from tito_audit.formats._columns import FLAT_IDS, ids_or_none, is_list, logprob_column, names_in, other_columns
from tito_audit.formats._flat import updated_flat_row
from tito_audit.formats._update import with_values
from tito_audit.record.arrays import json_kind
from tito_audit.record.build import build_training_row
from tito_audit.record.column import Alignment, Column, ColumnRole, MovePolicy
from tito_audit.record.rollout import TrainingRow

_MASK, _LOGPROBS = "loss_mask", "rollout_log_probs"
_TOKEN_BOUND = {
    "mopd_teacher_log_probs": Alignment.RESPONSE,
    "rollout_indexer_topk": Alignment.ROWS_MINUS_1,
    "rollout_routed_experts": Alignment.ROWS_MINUS_1,
    "rollout_sampling_mask": Alignment.RAGGED,
    "rollout_top_p_token_ids": Alignment.RAGGED,
    "rollout_top_p_token_offsets": Alignment.RAGGED,
}
"""Columns of an engine or a teacher about exactly these tokens; they cannot be moved to others."""
_TOP_K = ("rollout_topk_token_ids", "rollout_topk_log_probs")
"""Lists of the top k, one per response token."""
_NOT_PER_TOKEN = names_in("metadata train_metadata multimodal_inputs multimodal_train_inputs messages tools")
_KNOWN = {"tokens", _MASK, _LOGPROBS, "weight_versions", "attention_mask"}
_KNOWN |= {*_TOKEN_BOUND, *_TOP_K, *_NOT_PER_TOKEN, *FLAT_IDS, *PROMPT_IDS, *COMPLETION_IDS}


def read_sample_row(row: Row) -> TrainingRow | None:
    """The training row of a sample; None if it holds no ids.

    RecordError if the response is longer than the tokens, or it is unclear where it begins.
    """
    ids = ids_or_none(row["tokens"], "tokens")
    length, mask = row.get("response_length"), row.get(_MASK)
    if type(length) is not int or length < 0:
        raise RecordError(f"response_length is {_in_words(length)}, so it is unclear where the response begins")
    if mask is not None and not is_list(mask):
        raise RecordError(f"column {_MASK!r} is {_in_words(mask)}, not a list of one entry per response token")
    if ids is None:
        return None
    if length > len(ids):
        raise RecordError(f"response_length is {length}, but the column 'tokens' holds only {len(ids)} ids")
    other = other_columns(row, _KNOWN)
    for name in _TOP_K:
        if is_list(row.get(name)):
            other[name] = row[name], MovePolicy.MOVE
    trained = build_training_row(
        ids,
        mask=None if mask is None else (_MASK, mask),
        logprobs=logprob_column(row, _LOGPROBS),
        other=other,
        prompt_length=len(ids) - length,
        sentinel=0.0,
        absent_mask_trains_response=mask is None,
    )
    fixed = []
    for name, alignment in _TOKEN_BOUND.items():
        if row.get(name) is not None:
            # Dropped as soon as a token changes; a column packed into a string has no values here.
            listed = list(row[name]) if is_list(row[name]) else []
            values: NDArray[Any] = np.empty(len(listed), object)
            values[:] = listed
            fixed.append(Column(name, ColumnRole.OTHER, values, alignment, MovePolicy.DROP))
    trained = replace(trained, columns=(*trained.columns, *fixed), extras=read_beside(row))
    return with_token_versions(row, trained)


def updated_sample(row: Row, before: TrainingRow, after: TrainingRow) -> Row:
    """The sample with the columns, copies and counts of `after`; the same object if nothing changed.

    Columns about exactly the old tokens become null if the tokens changed.
    """
    new = updated_flat_row(row, before, after, ids="tokens", skip=("messages", "tools"))
    if row.get(_MASK) is None and after.loss_mask is not None and before.loss_mask is not None:
        # Null trains the whole response; a mask replaces it if not all of that is trained now.
        start = after.prompt_length or 0
        if after.loss_mask[:start].any():
            raise RecordError(f"column {_MASK!r} covers the response and cannot train a token before it")
        if not after.loss_mask[start:].all():
            if _MASK not in row:
                raise RecordError(f"without a column {_MASK!r} the sample trains all of its response")
            new = with_values(new, {_MASK: after.loss_mask[start:].astype(np.int64).tolist()})
    if np.array_equal(before.token_ids, after.token_ids):
        return new
    return with_values(new, {name: None for name in _TOKEN_BOUND if row.get(name) is not None})


def _in_words(value: object) -> str:
    if value is None:
        return "missing or null"
    return f"{value}" if isinstance(value, int | float) else json_kind(value)
