"""Why the sampled turns of a training row ended, as far as its row says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tito_audit.formats._columns import is_list
from tito_audit.record.rollout import TrainingRow, Turn

_EACH = ("finish_reasons", "stop_reasons")
_ONE = ("finish_reason", "stop_reason", *_EACH)
_INSIDE = ("metadata", "meta_info", "extra_info")
_CUT = ("is_truncated", "truncated")
_WORDS = {
    **dict.fromkeys(("stop", "completed", "eos", "eos_token", "end_turn", "stop_sequence", "stop_token"), "stop"),
    **dict.fromkeys(
        ("length", "truncated", "max_tokens", "max_length", "max_new_tokens", "max_seq_len"), "length"
    ),
    **dict.fromkeys(("tool_calls", "tool_call", "tool_use", "function_call"), "tool_calls"),
}
_STATUS = {"completed": "stop", "truncated": "length", "aborted": "abort"}
"""slime's and miles' `status` (THUDM/slime `slime/utils/types.py`); others say nothing of the last turn."""


def with_finishes(
    trained: TrainingRow | None, row: Mapping[str, Any], turns: Sequence[Turn] = ()
) -> TrainingRow | None:
    """The training row with why its last turns ended: as its calls say, or its row, or an object of the row."""
    if trained is None:
        return None
    of_turns = tuple(finish_word(turn.finish_reason) for turn in turns)
    if any(of_turns):
        return replace(trained, finish_reasons=of_turns)
    said = (
        _said(row) or next((found for name in _INSIDE if (found := _said(row.get(name)))), ()) or _of_status(row)
    )
    return replace(trained, finish_reasons=said) if said else trained


def finish_word(value: object) -> str | None:
    """`stop`, `length` or `tool_calls` for what frameworks call so, else the log's own word; None: nothing."""
    if isinstance(value, Mapping):
        value = value.get("type")
    if not isinstance(value, str) or not value:
        return None
    return _WORDS.get(value.lower(), value)


def _said(row: object) -> tuple[str | None, ...]:
    """What one object says by the names of reasons."""
    if not isinstance(row, Mapping):
        return ()
    for name in _EACH:
        value: Any = row.get(name)
        if is_list(value) and all(one is None or isinstance(one, str | Mapping) for one in value):
            words = tuple(finish_word(one) for one in value)
            if any(words):
                return words
    word = next((found for name in _ONE if (found := finish_word(row.get(name)))), None)
    return () if word is None else (word,)


def _of_status(row: Mapping[str, Any]) -> tuple[str | None, ...]:
    """What a row says of its end without a reason: slime's status, or that it was cut."""
    status = row.get("status")
    word = _STATUS.get(status) if isinstance(status, str) else None
    if word is None and any(row.get(name) is True for name in _CUT):
        word = "length"
    return () if word is None else (word,)
