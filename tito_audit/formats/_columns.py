"""The names that frameworks give their columns, how a column is read, and how new values are written in its form.

A column may hold integers, null or NaN, the numpy type of a table, or logprobs stored with other data. What is
written keeps that form.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import orjson
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.record.arrays import Ids, Logprobs, as_ids, json_kind
from tito_audit.record.column import MovePolicy
from tito_audit.record.nesting import load_json
from tito_audit.record.sources import Layout

Raw: TypeAlias = Sequence[Any] | NDArray[Any]
"""A list as storage returns it: a Python list, or a numpy array where a column holds only numbers."""

_LISTS = (list, tuple, np.ndarray)
_IDS = np.dtype(np.int32)
_NUMBERS = frozenset((int, float, bool, type(None)))


def names_in(text: str) -> tuple[str, ...]:
    """The names in a text, separated by white space."""
    return tuple(text.split())


FLAT_IDS = ("token_ids", "tokens", "input_ids")
"""Column names for a whole sequence of ids."""

MASKS = names_in(
    """loss_mask loss_masks mask masks assistant_mask assistant_masks response_mask completion_mask env_mask
    tool_mask action_mask labels"""
)
"""Column names for a loss mask."""
RESPONSE_MASKS = ("env_mask", "tool_mask", "response_mask", "completion_mask", "action_mask", *MASKS)
"""Column names for a mask over a response, in order of preference."""

ROW_LOGPROBS = names_in(
    """logprobs rollout_log_probs rollout_logprobs inference_logprobs sampled_logprobs response_logprobs
    completion_logprobs generation_log_probs generation_logprobs sampling_per_token_logps
    log_probs old_log_probs"""
)
"""Column names for the logprobs of a row; the last two are the trainer's own if another one is present too."""

SEGMENT_COLUMNS = ("segment_ids", "document_ids", "doc_ids", "sequence_ids", "sample_ids")
"""Column names for the sample number of each token, in a row of several samples."""

STALE_COLUMNS = frozenset(
    names_in(
        """distill_logprobs distill_token_ids entropies entropy importance_ratio importance_sampling_ratio
    is_masked is_masked_high is_masked_low log_importance_ratio mismatch_kl old_log_prob old_log_probs
    old_logprobs old_per_token_logps opd_reverse_kl prev_logprobs prob_delta prox_logp prox_logprobs
    proximal_logprobs ref_log_prob ref_log_probs ref_logprobs ref_per_token_logps reference_logprobs
    rescored_logprobs returns teacher_log_probs teacher_logprobs teacher_per_token_logps trainer_logprobs
    values"""
    )
)
"""Columns that a trainer, a critic, a reference model or a teacher computed from these ids."""
EXPERTS = names_in(
    """routed_experts rollout_routed_experts expert_indices rollout_expert_indices routing_matrices
    trainer_routed_experts"""
)
"""Columns with the experts that an engine or the trainer routed each token to, prompt tokens included."""
ENGINE_COLUMNS = frozenset(
    (
        *EXPERTS,
        *("kept_tokens", "output_token_sampling_mask", "rollout_sampling_mask", "sampling_mask"),
        *("rollout_indexer_topk", "rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
        *("top_p_kept_token_ids", "top_p_kept_token_offsets", "top_p_token_ids", "top_p_token_offsets"),
    )
)
"""Columns that an engine returned for exactly these tokens; nothing else can compute them for other tokens."""
_POLICIES = {
    **dict.fromkeys(STALE_COLUMNS, MovePolicy.STALE),
    **dict.fromkeys(("position_ids", "attention_mask", *SEGMENT_COLUMNS), MovePolicy.COPY),
    **dict.fromkeys(ENGINE_COLUMNS, MovePolicy.DROP),
}
"""What a repair does to a column, by its name; all others move."""


def is_list(value: object) -> TypeGuard[Raw]:
    """Whether the value is a Python list or a numpy array."""
    return isinstance(value, _LISTS)


def has_entries(value: object) -> TypeGuard[Raw]:
    """Whether the value is a list with at least one entry."""
    return is_list(value) and len(value) > 0


def is_given(value: Any) -> bool:
    """False for null and for an empty list: both are how logs say that they have none."""
    return value is not None and not (isinstance(value, _LISTS) and not len(value))


def to_list(values: Any) -> list[Any]:
    """The entries of a list or an array as Python values."""
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def is_messages(value: object) -> bool:
    """Whether the value is a nonempty list of objects that all have a `role`."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and isinstance(value[0], dict | Mapping)
        and all(isinstance(entry, dict | Mapping) and "role" in entry for entry in value)
    )


def as_object(value: object, refusal: str) -> Mapping[str, Any]:
    """The value itself; RecordError with the text `refusal` if it is not an object."""
    if not isinstance(value, dict | Mapping):
        raise RecordError(refusal)
    return value


def as_objects(value: object, refusal: str) -> Sequence[Mapping[str, Any]]:
    """The value itself; RecordError with the text `refusal` if it is not a list of objects."""
    if not isinstance(value, list | tuple) or not all(isinstance(entry, dict | Mapping) for entry in value):
        raise RecordError(refusal)
    return value


def per_token_column(row: Mapping[str, Any], name: str) -> tuple[str, Raw] | None:
    """A column as (name, entries); None if it is null or missing, RecordError if it is not a list."""
    value: Any = row.get(name)
    if value is not None and not is_list(value):
        raise RecordError(f"column {name!r} is not a list of one entry per token")
    return None if value is None else (name, value)


def is_number_list(value: object) -> bool:
    """Whether the first four entries of a list are numbers or null; the rest is not checked."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iufb"
    if not isinstance(value, list | tuple):
        return False
    kinds = set(map(type, value[:4]))
    return kinds <= _NUMBERS or (
        dict not in kinds and all(entry is None or isinstance(entry, int | float) for entry in value[:4])
    )


def may_hold_ids(value: object) -> bool:
    """Whether a list may hold ids: two or more whole numbers, or lists or objects that hold such a list."""
    if isinstance(value, np.ndarray):
        return value.ndim > 1 or (value.dtype.kind in "iu" and len(value) > 1)
    if not isinstance(value, list | tuple) or not value:
        return False
    if isinstance(value[0], dict | Mapping):
        return any(may_hold_ids(inner) for inner in value[0].values() if is_list(inner))
    if is_list(value[0]):
        return any(may_hold_ids(inner) for inner in value[:2])
    return len(value) > 1 and all(type(entry) is int for entry in value[:4])


def lists_or_null(row: Mapping[str, Any], *names: str) -> bool:
    """Whether the row has all of these columns and each holds a list or null."""
    return all(name in row and (row[name] is None or isinstance(row[name], _LISTS)) for name in names)


def first_present_name(row: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The name of the first of these columns that is not null; None if all are."""
    return next((name for name in names if row.get(name) is not None), None)


def first_list_name(row: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The name of the first of these columns that holds a list, even an empty one; None if none does."""
    for name in names:
        if name in row and isinstance(row[name], _LISTS):
            return name
    return None


def first_filled_name(row: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The name of the first of these columns whose list has entries; else of the first that holds a list."""
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
    """Token ids `[N]` int32, `name` for errors; None for null and for an empty list."""
    if type(value) is np.ndarray and value.dtype is _IDS and value.ndim == 1:
        return value if len(value) else None
    return None if value is None or (isinstance(value, _LISTS) and not len(value)) else as_ids(value, name)


def logprob_column(row: Mapping[str, Any], name: str | None) -> tuple[str, Raw] | None:
    """A column of logprobs as (name, one number per token); None if the row has none.

    It may be OpenAI's object (entries with a `logprob` in `content`, or `token_logprobs`), or a list per token:
    SGLang's `[logprob, id, text]`, or the top k with the sampled token first. In both the logprob comes first.
    """
    value = row.get(name) if name is not None else None
    if name is None or value is None:
        return None
    if isinstance(value, _LISTS):
        if not len(value) or not isinstance(value[0], _LISTS):
            return name, value
        # Tables hold the inner lists as arrays; tolist returns plain numbers.
        inner = [entry.tolist() if isinstance(entry, np.ndarray) else entry for entry in value]
        return name, [entry[0] if has_entries(entry) else None for entry in inner]
    if not isinstance(value, dict | Mapping):
        raise RecordError(f"column {name!r} is {json_kind(value)}, not a list of logprobs")
    if is_list(value.get("token_logprobs")):
        return name, value["token_logprobs"]
    content = value.get("content")
    if not isinstance(content, list | tuple) or not all(isinstance(e, dict | Mapping) for e in content):
        raise RecordError(f"column {name!r} is an object without a `content` list of tokens")
    return name, [entry.get("logprob") for entry in content]


def other_columns(row: Mapping[str, Any], read_names: Collection[str]) -> dict[str, tuple[Raw, MovePolicy]]:
    """Every list that may have one entry per token, except those in `read_names`, with what a repair does to it.

    Which lists fit is decided later, by length. An unknown list of numbers as long as the tokens is taken to
    describe them, so it moves with them.
    """
    columns: dict[str, tuple[Raw, MovePolicy]] = {}
    for name, value in row.items():
        if name in read_names or not isinstance(value, _LISTS) or len(value) < 2:
            continue
        policy = _POLICIES.get(name, MovePolicy.MOVE)
        if policy is not MovePolicy.MOVE or is_number_list(value):
            columns[name] = (value, policy)
    return columns


def columns_of_lengths(
    row: Mapping[str, Any], read_names: Collection[str], sizes: Collection[int]
) -> dict[str, tuple[Raw, MovePolicy]]:
    """Every list of one of these lengths, except those in `read_names`, with what a repair does to it."""
    return {
        name: (value, move_policy(name))
        for name, value in row.items()
        if name not in read_names and is_list(value) and len(value) in sizes
    }


def move_policy(name: str) -> MovePolicy:
    """What a repair does to the column of this name when tokens change."""
    return _POLICIES.get(name, MovePolicy.MOVE)


def parsed_column(row: Mapping[str, Any], name: str) -> Any:
    """A column's value, parsed if it is JSON in a string, which is how tables hold nested values."""
    value = row.get(name)
    if not isinstance(value, str):
        return value
    try:
        return load_json(value) if value.strip() else None
    except orjson.JSONDecodeError:
        return value


_TOKENS_EXAMINED = 32
"""How many tokens of a call are read; they show the unit of the logprobs, which all tokens share."""
_ALTERNATIVES_READ = 64
"""How many alternatives are read per token."""


def read_alternatives(logged: Any) -> tuple[tuple[float, ...], ...]:
    """The distinct top k logprobs of a call's first tokens, highest first; () if the log has one value per token.

    They are in OpenAI's object (`content` with `top_logprobs`, or lists of texts and logprobs), or in a list per
    token. Equal values count once, because some servers repeat the sampled token.
    """
    tokens: Any = logged
    if not isinstance(logged, _LISTS) and isinstance(logged, dict | Mapping):
        tokens = logged.get("content")
        if is_list(tokens):
            tokens = [t.get("top_logprobs") if isinstance(t, Mapping) else None for t in tokens[:_TOKENS_EXAMINED]]
        else:
            tokens = logged.get("top_logprobs")
    if not isinstance(tokens, _LISTS) or not len(tokens) or isinstance(tokens[0], int | float):
        return ()
    likeliest: list[tuple[float, ...]] = []
    for top in tokens[:_TOKENS_EXAMINED]:
        entries: Iterable[Any] = ()
        if isinstance(top, dict | Mapping):
            entries = list(top.values())[:_ALTERNATIVES_READ]
        elif is_list(top):
            part: Raw = top[:_ALTERNATIVES_READ]
            # SGLang's [logprob, id, text] and [logprob, id] are one token, not alternatives.
            if len(part) not in (2, 3) or not isinstance(part[1], int):
                entries = [entry.get("logprob") if isinstance(entry, Mapping) else entry for entry in part]
        numbers = {float(n) for n in entries if isinstance(n, int | float) and not isinstance(n, bool)}
        if len(numbers) > 1:
            likeliest.append(tuple(sorted(numbers, reverse=True)))
    return tuple(likeliest)


def as_logged(values: NDArray[Any] | Sequence[Any] | None, original: Any) -> Any:
    """The values in the form that the log had the column in; `original` itself if they are equal to it.

    A numpy array keeps its type, unless a value is unknown and the type has no NaN; RecordError if the
    type cannot hold a value. In a list, whole numbers stay whole numbers if the log had only those, and
    NaN is written as null unless the column itself holds NaN.
    """
    if values is None:
        return None
    if is_list(original) and equal_values(values, original):
        return original
    new = to_list(values)
    if isinstance(original, np.ndarray) and original.dtype.kind in "iufb":
        dtype = original.dtype
        if dtype.kind == "f":
            return np.array([np.nan if value is None else value for value in new], dtype)
        if any(is_unknown(value) for value in new):
            return [None if is_unknown(value) else int_if_whole(value) for value in new]
        try:
            array = np.array([int_if_whole(value) for value in new], dtype)
        except OverflowError:
            array = np.empty(0, dtype)
        if len(array) != len(new) or not np.array_equal(array, np.array(new)):
            raise RecordError(f"a column of {dtype} in this table cannot hold the repaired values")
        return array
    old = list(original) if is_list(original) else []
    if any(isinstance(value, float) and value != value for value in old):
        return new
    new = [None if is_unknown(value) else value for value in new]
    kinds = {type(value) for value in old} - {type(None)}
    if kinds == {bool}:
        return [value if value is None else bool(value) for value in new]
    if kinds == {float}:
        return [float(value) if type(value) is int else value for value in new]
    if int in kinds and not any(isinstance(value, float) and value.is_integer() for value in old):
        return [int_if_whole(value) for value in new]
    return new


def parse_literal(value: Any) -> Any:
    """The value, parsed if it is a string of JSON or of a Python literal; a string of neither as it is."""
    if not isinstance(value, str):
        return value
    try:
        return load_json(value)
    except ValueError:
        pass
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return value


def equal_values(new: Any, old: Any) -> bool:
    """Whether two lists are equal; NaN equals null, since both mean "unknown", and 1 equals 1.0."""
    if new is old:
        return True
    if len(new) != len(old):
        return False
    if isinstance(new, np.ndarray) and isinstance(old, np.ndarray) and new.dtype.kind in "iufb":
        if old.dtype.kind == "f" and new.dtype.kind == "f":
            return bool(np.array_equal(new, old, equal_nan=True))
        if old.dtype.kind in "iub":
            return bool(np.array_equal(new, old))
    return all(a is b or _equal_entries(a, b) for a, b in zip(to_list(new), to_list(old), strict=True))


def same_ids(left: NDArray[Any] | None, right: NDArray[Any] | None) -> bool:
    """Whether both hold the same ids, or both are None."""
    return left is right or (left is not None and right is not None and np.array_equal(left, right))


def same_floats(left: NDArray[Any] | None, right: NDArray[Any] | None) -> bool:
    """Whether both hold the same numbers, with NaN in the same places, or both are None."""
    return left is right or (
        left is not None and right is not None and np.array_equal(left, right, equal_nan=True)
    )


def same_value(left: Any, right: Any) -> bool:
    """Whether two values for one path are the same: equal, and of one type unless they are lists."""
    if isinstance(left, list | np.ndarray) and isinstance(right, list | np.ndarray):
        return len(left) == len(right) and all(a is b or a == b for a, b in zip(left, right, strict=True))
    return left is right or (type(left) is type(right) and bool(left == right))


def _equal_entries(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if is_list(a) and is_list(b):
        return equal_values(a, b)
    if is_list(a) or is_list(b):
        return False
    if isinstance(a, dict | Mapping) and isinstance(b, dict | Mapping):
        return a.keys() == b.keys() and all(_equal_entries(a[key], b[key]) for key in a)
    if isinstance(a, int | float) and isinstance(b, int | float) and isinstance(a, float) != isinstance(b, float):
        with suppress(OverflowError):
            a, b = float(a), float(b)  # a whole number that no float can hold was read as the nearest float
    return bool(a == b) or (is_unknown(a) and is_unknown(b))


def is_unknown(value: object) -> bool:
    """Whether the value is null or NaN."""
    return value is None or (isinstance(value, float) and value != value)


def int_if_whole(value: Any) -> Any:
    """A float without a fraction as an int; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_nested_logprobs(original: Any) -> bool:
    """Whether logprobs are stored with other data: in an object, or in one list per token."""
    return isinstance(original, dict | Mapping) or (
        isinstance(original, list | tuple) and len(original) > 0 and is_list(original[0])
    )


def logprobs_as_logged(values: NDArray[Any], original: Any) -> Any:
    """The object or the lists that hold logprobs with other data, with new logprobs; `original` if they are equal.

    Only the logprobs change: OpenAI's object keeps its tokens, SGLang's triples their ids and texts.
    RecordError if the count changes, because the other data cannot be made up.
    """
    inside = isinstance(original, dict | Mapping)
    name = "token_logprobs" if inside and is_list(original.get("token_logprobs")) else "content"
    layout = (Layout.PLAIN if name == "token_logprobs" else Layout.ENTRIES) if inside else Layout.TRIPLES
    old = original.get(name) if inside else original
    old = () if old is None else old
    if len(values) != len(old):
        raise RecordError(
            f"the logprobs are stored with the texts or ids of {len(old)} tokens and would become {len(values)}: "
            "the texts and ids for that many cannot be made up"
        )
    new = with_logprobs(old, layout=layout, old=values, new=values, ids=None)
    if new is old or (layout is not Layout.PLAIN and all(a is b for a, b in zip(new, old, strict=True))):
        return original
    return {**original, name: new} if inside else new


def with_logprobs(value: Any, *, layout: Layout, old: Logprobs, new: Logprobs, ids: Ids | None) -> Any:
    """A value of this layout with the `new` logprobs in place of the `old`; the same object if they are equal.

    If there are fewer, whole entries are dropped; RecordError if it is unclear which. `ids`, those of the
    completion, help to tell for triples.
    """
    if layout is Layout.PLAIN:
        return as_logged(new, value)
    if layout is not Layout.PARALLEL:
        objects = layout is Layout.ENTRIES
        if len(new) != len(old):
            also = [] if objects or ids is None else [([int(entry[1]) for entry in value], ids.tolist())]
            start = _start_of_kept(old, new, also)
            return list(value[start : start + len(new)])
        was = [entry.get("logprob") if objects else entry[0] if has_entries(entry) else None for entry in value]
        scores = as_logged(new, was)
        if objects and scores is was:
            return value
        entries: list[Any] = []
        for entry, score, before in zip(value, scores, was, strict=True):
            if score == before or (is_unknown(score) and is_unknown(before)):
                entries.append(entry)
            elif isinstance(entry, dict | Mapping):
                entries.append({**entry, "logprob": score})
            elif not has_entries(entry):
                raise RecordError("a token's list of logprobs is empty and has no place for the sampled one")
            elif isinstance(entry, np.ndarray) and entry.dtype.kind == "f":
                entries.append(np.array([np.nan if score is None else score, *entry[1:].tolist()], entry.dtype))
            else:
                entries.append([score, *to_list(entry[1:])])
        return entries
    if len(new) == len(old):
        return {**value, "token_logprobs": as_logged(new, value["token_logprobs"])}
    start = _start_of_kept(old, new, [])
    cut = {
        name: values[start : start + len(new)]
        for name, values in value.items()
        if is_list(values) and len(values) == len(old)
    }
    return {**value, **cut}


def _start_of_kept(old: Logprobs, new: Logprobs, also: Sequence[tuple[list[int], list[int]]]) -> int:
    """The index in `old` where `new` starts; RecordError unless it is the only one.

    In each pair of `also`, the entries of the first list from that index on must be the second list.
    """
    size = len(new)
    starts = [
        start
        for start in range(len(old) - size + 1)
        if same_floats(old[start : start + size], new)
        and all(have[start : start + size] == want for have, want in also)
    ]
    if len(starts) != 1:
        raise RecordError(
            f"{len(old)} logprobs should become {size}, and it is unclear which of the log's entries to drop"
        )
    return starts[0]
