"""Which columns hold numbers only, so that storage may read them as arrays."""

from __future__ import annotations

from collections.abc import Mapping

from tito_audit.formats._atropos import TOKEN_COLUMNS
from tito_audit.formats._calls import CALL_LISTS, CALL_LOGPROBS, COMPLETION_IDS, PROMPT_IDS
from tito_audit.formats._columns import FLAT_IDS, MASKS, ROW_LOGPROBS, STALE

_INTEGERS, _NUMBERS = "i", "ifb"
"""Kinds of numpy dtypes. A column of ids stays a list unless it holds only integers, so that an error can name
the first entry that is not an id."""

_IDS = (*FLAT_IDS, *PROMPT_IDS, *COMPLETION_IDS)
_OTHERS = (
    *MASKS,
    *ROW_LOGPROBS,
    *CALL_LOGPROBS,
    *TOKEN_COLUMNS,
    *STALE,
    "advantages",
    "attention_mask",
    "masked_tokens",
    "position_ids",
    "rewards",
    "token_loss_mask",
    "token_mask",
    "token_rewards",
)
_KINDS = {**dict.fromkeys(_OTHERS, _NUMBERS), **dict.fromkeys(_IDS, _INTEGERS)}

NUMBER_COLUMNS: Mapping[str, str] = {
    **_KINDS,
    **{f"{calls}[].{name}": kinds for calls in CALL_LISTS for name, kinds in _KINDS.items()},
}
"""Columns of a row and of the calls it lists, with the dtype kinds that an array there may have."""


def number_columns(mapping: Mapping[str, str]) -> Mapping[str, str]:
    """`NUMBER_COLUMNS` with the names that a user maps to them: `mapping` is ours -> the log's."""
    theirs = {name: _KINDS[ours] for ours, name in mapping.items() if ours in _KINDS}
    return {**NUMBER_COLUMNS, **theirs} if theirs else NUMBER_COLUMNS
