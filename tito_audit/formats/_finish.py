"""Why the sampled turns of a training row ended, if the row says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tito_audit.formats._columns import is_list
from tito_audit.record.rollout import TrainingRow, Turn

_EACH = ("finish_reasons", "stop_reasons")
_ONE = ("finish_reason", "stop_reason", *_EACH)
_CONTAINERS = ("metadata", "meta_info", "extra_info")
_CUT = ("is_truncated", "truncated")
_WORDS = {
    **dict.fromkeys(("stop", "completed", "eos", "eos_token", "end_turn", "stop_sequence", "stop_token"), "stop"),
    **dict.fromkeys(
        ("length", "truncated", "max_tokens", "max_length", "max_new_tokens", "max_seq_len"), "length"
    ),
    **dict.fromkeys(("tool_calls", "tool_call", "tool_use", "function_call"), "tool_calls"),
}
_STATUS = {"completed": "stop", "truncated": "length", "aborted": "abort"}
"""`status` of slime and miles (THUDM/slime `slime/utils/types.py`); other values do not say why a turn ended."""


def with_finishes(
    trained: TrainingRow | None, row: Mapping[str, Any], turns: Sequence[Turn] = ()
) -> TrainingRow | None:
    """The training row with the finish reasons of its last turns, from its calls, the row, or an object in it."""
    if trained is None:
        return None
    of_turns = tuple(_finish_word(turn.finish_reason) for turn in turns)
    if any(of_turns):
        return replace(trained, finish_reasons=of_turns)
    reasons = _named_reasons(row)
    for name in _CONTAINERS:
        reasons = reasons or _named_reasons(row.get(name))
    reasons = reasons or _reason_by_status(row)
    return replace(trained, finish_reasons=reasons) if reasons else trained


def _finish_word(value: object) -> str | None:
    """`stop`, `length` or `tool_calls` for the frameworks' words for them, else the log's own; None if unset."""
    if isinstance(value, Mapping):
        value = value.get("type")
    if not isinstance(value, str) or not value:
        return None
    return _WORDS.get(value.lower(), value)


def _named_reasons(row: object) -> tuple[str | None, ...]:
    """The reasons that one object names; () if it names none."""
    if not isinstance(row, Mapping):
        return ()
    for name in _EACH:
        value: Any = row.get(name)
        if is_list(value) and all(one is None or isinstance(one, str | Mapping) for one in value):
            words = tuple(_finish_word(one) for one in value)
            if any(words):
                return words
    word = next((found for name in _ONE if (found := _finish_word(row.get(name)))), None)
    return () if word is None else (word,)


def _reason_by_status(row: Mapping[str, Any]) -> tuple[str | None, ...]:
    """The reason implied by slime's status, or by a flag that the row was truncated."""
    status = row.get("status")
    word = _STATUS.get(status) if isinstance(status, str) else None
    if word is None and any(row.get(name) is True for name in _CUT):
        word = "length"
    return () if word is None else (word,)
