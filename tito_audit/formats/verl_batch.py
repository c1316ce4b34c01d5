"""verl batches: prompts padded on the left and responses padded on the right, as in a `DataProto`.

verl-project/verl `verl/experimental/agent_loop/agent_loop.py` (`_postprocess`), saved as lists, one sample per
row or a whole batch. All columns but the ids are as wide as the response. What an agent loop returns for one
sample (`prompt_ids`, `response_ids`, `response_mask`) is read as `generic`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._columns import EXPERTS, as_logged, is_list
from tito_audit.formats._flat import restore_padding, strip_padding, trained_by_mask
from tito_audit.formats._kit import batches, is_batch, read_sample, updated_sample
from tito_audit.formats._update import with_values
from tito_audit.record.arrays import Mask, as_floats, as_ids
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout

_PROMPTS, _RESPONSES, _SEEN = "prompts", "responses", "attention_mask"
_NAMES = {"prompt_ids": _PROMPTS, "response_ids": _RESPONSES}
"""Column names of one sample -> of the batch."""
_WHOLE = ("input_ids", _SEEN, "position_ids")
"""Columns over the prompt and the response, derived from the others."""


def _may_be_ids(value: object) -> bool:
    return value is None or (is_list(value) and all(isinstance(entry, int | np.integer) for entry in value[:4]))


def read(row: Row, place: Place) -> Rollout:
    return read_sample(_without_padding(row), place, FORMAT.name, tuple(_NAMES), prompt=row.get("raw_prompt"))


def _without_padding(row: Row) -> dict[str, Any]:
    """The sample without its padding, under the names of an agent loop's output."""
    prompt, response = _visible_tokens(row)
    both = np.concatenate((prompt, response))
    plain: dict[str, Any] = {}
    for name, value in row.items():
        if name == _PROMPTS:
            plain["prompt_ids"] = strip_padding(value, prompt)
        elif name == _RESPONSES:
            plain["response_ids"] = strip_padding(value, response)
        elif name not in _WHOLE:
            wide = both if name in EXPERTS else response
            plain[name] = strip_padding(value, wide) if is_list(value) and len(value) == len(wide) else value
    seen = _attention_mask(row)[both]
    return plain if seen.all() else {**plain, _SEEN: seen}


def _visible_tokens(row: Row) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which entries of the prompt and of the response are tokens.

    Prompts are padded on the left, responses on the right; what the response mask trains is not padding.
    """
    prompt = _column_length(row, _PROMPTS)
    seen = _attention_mask(row)
    ahead, behind = seen[:prompt], seen[prompt:]
    behind = behind | trained_by_mask(row, len(behind))
    return np.maximum.accumulate(ahead), np.maximum.accumulate(behind[::-1])[::-1]


def _attention_mask(row: Row) -> Mask:
    """The attention mask over prompt and response; all True if there is none."""
    size = _column_length(row, _PROMPTS) + _column_length(row, _RESPONSES)
    if row.get(_SEEN) is None:
        return np.ones(size, np.bool_)
    seen: Mask = as_floats(row[_SEEN], _SEEN) == 1
    if len(seen) != size:
        raise RecordError(f"{_SEEN} has {len(seen)} entries for {size} of {_PROMPTS} and {_RESPONSES} together")
    return seen


def _column_length(row: Row, name: str) -> int:
    value = row.get(name)
    if value is not None and not is_list(value):
        raise RecordError(f"column {name!r} is not a list of token ids")
    return 0 if value is None else len(value)


def update_sample(row: Row, before: Rollout, after: RepairedRollout) -> Row:
    """A sample with its repaired columns, padded to their old widths."""
    plain = _without_padding(row)
    new = updated_sample(plain, before, after)
    changed = {_NAMES.get(name, name): value for name, value in new.items() if value is not plain[name]}
    if not changed:
        return row
    prompt, response = _visible_tokens(row)
    values = restore_padding(row, changed, (_PROMPTS, prompt), response)
    if not {_PROMPTS, _RESPONSES} & values.keys():
        return with_values(row, values)
    columns: dict[str, Any] = {}
    seen = np.concatenate((prompt, response))
    if not np.array_equal(seen, _attention_mask(row)):
        raise RecordError(f"{_SEEN} hides tokens between visible ones, and it is unclear where they are now")
    sizes = [0 if new[name] is None else len(new[name]) for name in _NAMES]
    width = _column_length(row, _PROMPTS)
    now = np.zeros(len(seen), np.bool_)
    now[width - sizes[0] : width + sizes[1]] = True
    if row.get(_SEEN) is None and not np.array_equal(now, seen):
        raise RecordError(f"the sample has no {_SEEN}: nothing would tell padding from tokens")
    for name in _WHOLE:
        original: Any = row.get(name)
        if not is_list(original) or len(original) != len(seen):
            if original is not None:
                raise RecordError(
                    f"column {name!r} does not cover {_PROMPTS} and {_RESPONSES}, so it cannot be updated"
                )
        elif name == "input_ids":
            parts = [as_ids({**row, **values}[part], part) for part in (_PROMPTS, _RESPONSES)]
            columns[name] = as_logged(np.concatenate(parts), original)
        elif name == _SEEN:
            columns[name] = as_logged(now.astype(np.int64), original)
        elif not np.array_equal(seen, now):
            if not np.array_equal(_position_ids(seen), as_floats(original, name)):
                raise RecordError(
                    "position_ids do not count the tokens, so they cannot be computed for other tokens"
                )
            columns[name] = as_logged(_position_ids(now), original)
    return with_values(row, {**values, **columns})


def _position_ids(seen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Positions as verl counts them: only visible tokens count, from 0."""
    positions: NDArray[np.int64] = np.maximum(np.cumsum(seen) - 1, 0)
    return positions


FORMAT = Format(
    name="verl_batch",
    title="verl batches (DataProto as lists)",
    signature=Signature("{prompts} and {responses} of ids, with {attention_mask} and {response_mask}"),
    precedence=226,
    matches=lambda row: (
        all(is_list(row.get(name)) for name in (_PROMPTS, _RESPONSES))
        and (
            is_batch(row, _PROMPTS) and _may_be_ids(row[_RESPONSES][0])
            if is_batch(row, _RESPONSES)
            else _may_be_ids(row[_RESPONSES]) and _may_be_ids(row[_PROMPTS])
        )
    ),
    **batches(read, update_sample, _RESPONSES).functions,
    shows="Each sample's training row with its mask, logprobs and what the trainer computed, padding removed; "
    "or its one call. The logs that verl itself writes hold text only.",
)
