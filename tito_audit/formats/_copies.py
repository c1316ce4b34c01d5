"""What a row repeats about its ids: the same list under another name or deeper down, and stored counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tito_audit.formats._columns import is_list, is_numbers
from tito_audit.formats._values import as_logged
from tito_audit.record.rollout import TrainingRow, Turn

_Object = TypeVar("_Object", bound=Mapping[str, Any])

_PROMPT = (
    "prompt_length",
    "prompt_len",
    "prompt_tokens",
    "input_tokens",
    "num_prompt_tokens",
    "num_input_tokens",
    "prompt_token_count",
)
_RESPONSE = (
    "response_length",
    "response_len",
    "completion_length",
    "completion_len",
    "response_tokens",
    "completion_tokens",
    "output_tokens",
    "num_response_tokens",
    "num_completion_tokens",
    "num_generated_tokens",
    "num_output_tokens",
)
_TOTAL = (
    "total_length",
    "total_len",
    "total_tokens",
    "input_length",
    "input_lengths",
    "length",
    "num_tokens",
    "num_total_tokens",
    "seq_len",
    "seq_length",
    "seqlen",
    "sequence_length",
    "token_count",
)
_TRAINED = ("effective_response_length", "num_action_tokens", "num_loss_tokens", "num_trained_tokens")
_COUNTERS = ("usage", "meta_info")
"""Objects in a row or a call that hold such counts."""

CountPairs = Mapping[str, Sequence[tuple[int, int]]]
"""Each count's name to pairs of a value it may have had and the value that becomes."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Ids that a row may hold more than once."""

    old: Sequence[Any] | NDArray[Any]
    new: Sequence[Any] | NDArray[Any]
    names: Collection[str]
    """Keys under which such a list counts as a copy."""


def with_copies(value: Any, copies: Sequence[Copy], skip: Collection[str] = ()) -> Any:
    """The object with the new ids in every list equal to a copy's old ids; the same object if there is none.

    Nested objects and lists are searched too, except under the keys in `skip`.
    """
    if not copies:
        return value
    if isinstance(value, Mapping):
        changed = {}
        for name, inner in value.items():
            if name not in skip and (new := _copied(name, inner, copies, skip)) is not inner:
                changed[name] = new
        return {**value, **changed} if changed else value
    if isinstance(value, list | tuple) and any(isinstance(entry, Mapping | list | tuple) for entry in value):
        return with_list(value, [with_copies(entry, copies, skip) for entry in value])
    return value


def with_list(old: Sequence[Any], entries: list[Any]) -> Any:
    """The entries as a list; `old` itself if it holds the same objects."""
    same = len(old) == len(entries) and all(a is b for a, b in zip(old, entries, strict=True))
    return old if same else entries


def with_counts(value: _Object, pairs: CountPairs) -> _Object:
    """The object with its stored counts updated; the same object if no count that was right has changed."""
    changed: dict[str, Any] = {}
    for name, inner in value.items():
        if name in _COUNTERS and isinstance(inner, Mapping):
            new = with_counts(inner, pairs)
        else:
            new = _counted(inner, pairs.get(name, ()))
        if new is not inner:
            changed[name] = new
    return {**value, **changed} if changed else value  # type: ignore[return-value]  # a row again


def row_counts(before: TrainingRow, after: TrainingRow) -> CountPairs:
    """The counts that may be stored with a training row, before and after."""
    old, new = len(before.token_ids), len(after.token_ids)
    widths = (
        before.padding.left + old + before.padding.right,
        after.padding.left + new + after.padding.right,
    )
    pairs: dict[str, list[tuple[int, int]]] = {name: [(old, new), widths] for name in _TOTAL}
    if before.prompt_length is not None and after.prompt_length is not None:
        prompts = (before.prompt_length, after.prompt_length)
        ahead = (before.padding.left + prompts[0], after.padding.left + prompts[1])
        pairs |= {name: [prompts, ahead] for name in _PROMPT}
        pairs |= {name: [(old - prompts[0], new - prompts[1])] for name in _RESPONSE}
    if before.loss_mask is not None and after.loss_mask is not None:
        trained = (int(before.loss_mask.sum()), int(after.loss_mask.sum()))
        pairs |= {name: [trained] for name in _TRAINED}
    return pairs


def total_counts(old: int, new: int) -> CountPairs:
    """The counts of all tokens of a row, before and after."""
    return {name: [(old, new)] for name in _TOTAL}


def call_counts(before: Turn, after: Turn) -> CountPairs:
    """The counts that may be stored with a call, before and after; completions never change."""
    if before.prompt_ids is None or after.prompt_ids is None:
        return {}
    prompts = (len(before.prompt_ids), len(after.prompt_ids))
    pairs: dict[str, list[tuple[int, int]]] = {name: [prompts] for name in _PROMPT}
    if before.completion_ids is not None:
        completion = len(before.completion_ids)
        pairs |= {name: [(prompts[0] + completion, prompts[1] + completion)] for name in _TOTAL}
    return pairs


def _copied(name: str, value: Any, copies: Sequence[Copy], skip: Collection[str]) -> Any:
    if not is_list(value) or not len(value) or not is_numbers(value):
        return with_copies(value, copies, skip)
    for copy in copies:
        if name in copy.names and len(value) == len(copy.old) and np.array_equal(value, copy.old):
            return as_logged(copy.new, value)
    return value


def _counted(value: Any, pairs: Sequence[tuple[int, int]]) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return value
    for old, new in pairs:
        if value == old:
            return value if old == new else type(value)(new)
    return value
