"""Recognizes columns by the names in use; shared by formats with plain columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import orjson
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.record.arrays import Ids, as_ids, json_kind
from tito_audit.record.column import MovePolicy
from tito_audit.record.nesting import parsed_json

Raw: TypeAlias = Sequence[Any] | NDArray[Any]

_LISTS = (list, tuple, np.ndarray)

FLAT_IDS = ("token_ids", "tokens", "input_ids")
"""Column names for a whole sequence of ids."""

MASKS = (
    "loss_mask",
    "loss_masks",
    "mask",
    "masks",
    "assistant_mask",
    "assistant_masks",
    "response_mask",
    "completion_mask",
    "env_mask",
    "tool_mask",
    "action_mask",
    "labels",
)
"""Column names for a loss mask."""
RESPONSE_MASKS = ("env_mask", "tool_mask", "response_mask", "completion_mask", "action_mask", *MASKS)
"""Column names for a mask over a response, in order of preference."""

ROW_LOGPROBS = (
    "logprobs",
    "rollout_log_probs",
    "rollout_logprobs",
    "inference_logprobs",
    "sampled_logprobs",
    "response_logprobs",
    "completion_logprobs",
    "generation_log_probs",
    "generation_logprobs",
    "sampling_per_token_logps",
    # The trainer's own, if a column above is present too.
    "log_probs",
    "old_log_probs",
)
"""Column names for the logprobs of a row."""

SEGMENTS = ("segment_ids", "document_ids", "doc_ids", "sequence_ids", "sample_ids")
"""Column names for the sample number of each token, in a row of several samples."""

STALE = {
    # Computed from the old ids by a trainer, a critic, a reference model or a teacher.
    "distill_logprobs",
    "distill_token_ids",
    "entropies",
    "entropy",
    "importance_ratio",
    "importance_sampling_ratio",
    "is_masked",
    "is_masked_high",
    "is_masked_low",
    "log_importance_ratio",
    "mismatch_kl",
    "old_log_prob",
    "old_log_probs",
    "old_logprobs",
    "old_per_token_logps",
    "opd_reverse_kl",
    "prev_logprobs",
    "prob_delta",
    "prox_logp",
    "prox_logprobs",
    "proximal_logprobs",
    "ref_log_prob",
    "ref_log_probs",
    "ref_logprobs",
    "ref_per_token_logps",
    "reference_logprobs",
    "rescored_logprobs",
    "returns",
    "teacher_log_probs",
    "teacher_logprobs",
    "teacher_per_token_logps",
    "trainer_logprobs",
    "values",
}
"""Columns computed by something other than the sampler."""
_DROP = {
    "expert_indices",
    "rollout_expert_indices",
    "rollout_routed_experts",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "routed_experts",
    "routing_matrices",
}


def is_list(value: object) -> TypeGuard[Raw]:
    """True for a list as storage returns it: a Python list or a numpy array."""
    return isinstance(value, _LISTS)


def filled(value: object) -> TypeGuard[Raw]:
    """True for a list with entries."""
    return is_list(value) and len(value) > 0


def is_given(value: Any) -> bool:
    """False for null and for an empty list, which is how logs say that they have none."""
    return value is not None and not (isinstance(value, _LISTS) and not len(value))


def plain(values: Any) -> list[Any]:
    """The entries of a list or an array as Python values."""
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def is_messages(value: object) -> bool:
    """True for a list whose entries have roles."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and isinstance(value[0], dict | Mapping)
        and all(isinstance(entry, dict | Mapping) and "role" in entry for entry in value)
    )


def is_numbers(value: object) -> bool:
    """True for a list whose first entries are numbers or null; the rest is not checked."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iufb"
    return isinstance(value, list | tuple) and all(
        entry is None or isinstance(entry, int | float) for entry in value[:4]
    )


def holds_ids(value: object) -> bool:
    """True for a list that may hold ids: two or more whole numbers, or lists or objects that hold such a list."""
    if isinstance(value, np.ndarray):
        return value.ndim > 1 or (value.dtype.kind in "iu" and len(value) > 1)
    if not isinstance(value, list | tuple) or not value:
        return False
    if isinstance(value[0], dict | Mapping):
        return any(holds_ids(inner) for inner in value[0].values() if is_list(inner))
    if is_list(value[0]):
        return any(holds_ids(inner) for inner in value[:2])
    return len(value) > 1 and all(type(entry) is int for entry in value[:4])


def first_list(row: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The first of these columns that holds a list, even an empty one; None if none does."""
    for name in names:
        if name in row and isinstance(row[name], _LISTS):
            return name
    return None


def first_filled(row: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The first of these columns that holds a list with entries; else the first that holds a list."""
    empty = None
    for name in names:
        if name in row and isinstance(row[name], _LISTS):
            if len(row[name]):
                return name
            empty = empty or name
    return empty


def first_text(row: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The text of the first of these columns that holds a string; None if none does."""
    for name in names:
        if name in row and isinstance(row[name], str):
            text: str = row[name]
            return text
    return None


def ids_or_none(value: Any, name: str) -> Ids | None:
    """Token ids `[N]` int32; None for null and for an empty list."""
    return as_ids(value, name) if is_given(value) else None


def flat_logprobs(row: Mapping[str, Any], name: str | None) -> tuple[str, Raw] | None:
    """A logprob column as (name, one number per token); None if the row has none.

    An object is OpenAI's (`content` entries with a `logprob`, or `token_logprobs`); lists inside the list are
    SGLang's `[logprob, id, text]` or the top k with the sampled token first: in both the value comes first.
    """
    value = row.get(name) if name is not None else None
    if name is None or value is None:
        return None
    if isinstance(value, dict | Mapping):
        if is_list(value.get("token_logprobs")):
            return name, value["token_logprobs"]
        content = value.get("content")
        if not isinstance(content, list | tuple) or not all(isinstance(e, dict | Mapping) for e in content):
            raise RecordError(f"column {name!r} is an object without a `content` list of tokens")
        return name, [entry.get("logprob") for entry in content]
    if not is_list(value):
        raise RecordError(f"column {name!r} is {json_kind(value)}, not a list of logprobs")
    if len(value) and is_list(value[0]):
        # A table of numbers may have turned the inner lists into arrays; tolist returns plain numbers.
        inner = [entry.tolist() if isinstance(entry, np.ndarray) else entry for entry in value]
        return name, [entry[0] if filled(entry) else None for entry in inner]
    return name, value


def other_columns(row: Mapping[str, Any], taken: Collection[str]) -> dict[str, tuple[Raw, MovePolicy]]:
    """Every list that may have one entry per token, except those in `taken`; lengths decide later what fits.

    An unknown list of numbers as long as the tokens is taken to describe them: it has to move with them.
    """
    found: dict[str, tuple[Raw, MovePolicy]] = {}
    for name, value in row.items():
        if name in taken or not isinstance(value, _LISTS) or len(value) < 2:
            continue
        policy = policy_of(name)
        if policy is not MovePolicy.MOVE or is_numbers(value):
            found[name] = (value, policy)
    return found


def lists_of_lengths(
    row: Mapping[str, Any], taken: Collection[str], sizes: Collection[int]
) -> dict[str, tuple[Raw, MovePolicy]]:
    """Every list of one of these lengths, except those in `taken`."""
    return {
        name: (value, policy_of(name))
        for name, value in row.items()
        if name not in taken and is_list(value) and len(value) in sizes
    }


def policy_of(name: str) -> MovePolicy:
    """What happens to a column when its tokens change, by its name."""
    if name in _DROP:
        return MovePolicy.DROP
    if name in ("position_ids", "attention_mask", *SEGMENTS):
        return MovePolicy.COPY
    return MovePolicy.STALE if name in STALE else MovePolicy.MOVE


def parsed(row: Mapping[str, Any], name: str) -> Any:
    """A column's value, parsed if it is a JSON string, as in tables that can hold it no other way."""
    value = row.get(name)
    if not isinstance(value, str):
        return value
    try:
        return parsed_json(value) if value.strip() else None
    except orjson.JSONDecodeError:
        return value
