"""What rows say about themselves: their model, their group, their tools, and why turns ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tito_audit.formats._calls import version_spans, weight_versions
from tito_audit.formats._columns import is_list
from tito_audit.record.message import Message, ToolSpec
from tito_audit.record.rollout import TrainingRow, Turn
from tito_audit.record.stated import Stated

_GROUPS = ("group", "group_id", "group_index")
_NAMES = (
    ("model", "model_name", "model_name_or_path", "model_path", "model_id"),
    ("tokenizer", "tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"),
)
_CONTAINERS = ("metadata", "meta_info", "extra_info", "config", "sampling_args", "agent", "response", "request")
_NAMED_OR_HELD = frozenset((*(name for names in _NAMES for name in names), *_CONTAINERS))
_CALLS = ("calls", "turns", "steps", "trajectory")
_MOST_CALLS = 256
_STAND_INS = {
    "",
    "actor",
    "auto",
    "default",
    "dummy",
    "llm",
    "local",
    "model",
    "none",
    "null",
    "policy",
    "policy_model",
    "rollout",
    "string",
    "unknown",
}
"""Placeholder names that clients send to a server with one model (NeMo-Gym, OpenAI-compatible servers)."""
_GRIDS = "image_grid_thw"
_PICTURE_INPUTS = ("multi_modal_inputs", "multimodal_train_inputs", "multimodal_inputs", "mm_kwargs")
"""Objects that hold processed images: verl, slime and miles, prime-rl."""
_RARE = frozenset(("weight_version", "weight_versions", _GRIDS, *_PICTURE_INPUTS))
"""Keys of facts that few rows have."""
TOOLS_MISSING = "they call tools that the log does not list"
"""Why messages of such a conversation are not read."""
_EACH = ("finish_reasons", "stop_reasons")
_ONE = ("finish_reason", "stop_reason", *_EACH)
_HOLDERS = ("metadata", "meta_info", "extra_info")
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


def stated_facts(row: Mapping[str, Any]) -> Stated:
    """What the row says about itself: its model, tokenizer, `id` if a string, group and weight versions."""
    model, tokenizer = _model_and_tokenizer(row)
    group = next((row[name] for name in _GROUPS if name in row and isinstance(row[name], int | str)), None)
    facts: dict[str, object] = {"id": row["id"]} if isinstance(row.get("id"), str) else {}
    if not _RARE.isdisjoint(row):
        facts |= _rare_facts(row)
    return Stated(model=model, tokenizer=tokenizer, group=group, facts=facts)


def _rare_facts(row: Mapping[str, Any]) -> dict[str, object]:
    spans = version_spans(row.get("weight_versions"))
    facts = {"weight_versions": weight_versions(row), "weight_spans": spans, _GRIDS: _image_grids(row)}
    return {name: value for name, value in facts.items() if value}


def _image_grids(row: Mapping[str, Any]) -> tuple[tuple[int, int, int], ...]:
    """The grids of patches (time, height, width) of a row's images; () if it names none."""
    held = (value for name in _PICTURE_INPUTS if isinstance(value := row.get(name), dict | Mapping))
    grids: Any = next((grid for one in (row, *held) if is_list(grid := one.get(_GRIDS))), ())
    try:
        found = [tuple(int(side) for side in grid) for grid in grids]
    except (TypeError, ValueError, OverflowError):
        return ()
    return tuple((one[0], one[1], one[2]) for one in found) if all(len(one) == 3 for one in found) else ()


def real_name(value: object) -> str | None:
    """The name of a model or tokenizer; None for anything else, and for a placeholder."""
    if isinstance(value, dict | Mapping):
        value = value.get("name")
    if not isinstance(value, str) or value.strip().lower() in _STAND_INS:
        return None
    return value


def one_model(names: Sequence[object]) -> str | None:
    """The one real name among those of several calls; None if there is none or more than one."""
    found = {name for one in names if (name := real_name(one)) is not None}
    return found.pop() if len(found) == 1 else None


def model_facts(row: Mapping[str, Any]) -> Stated:
    """`model` and `tokenizer` as named by the row, an object in it, or all of its calls."""
    model, tokenizer = _model_and_tokenizer(row)
    return Stated(model=model, tokenizer=tokenizer)


def _model_and_tokenizer(row: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """What the row, an object in it, or all of its calls name."""
    model, tokenizer = (_in_row(row, names) or one_model(list(_of_calls(row, names))) for names in _NAMES)
    return model, tokenizer


def _in_row(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    if _NAMED_OR_HELD.isdisjoint(row):
        return None
    objects = [row, *(value for name in _CONTAINERS if isinstance(value := row.get(name), dict | Mapping))]
    return next((found for one in objects for name in names if (found := real_name(one.get(name)))), None)


def _of_calls(row: Mapping[str, Any], names: Sequence[str]) -> Iterator[str | None]:
    for key in _CALLS:
        calls = row.get(key)
        for call in calls[:_MOST_CALLS] if isinstance(calls, list | tuple) else ():
            if isinstance(call, dict | Mapping):
                yield _in_row(call, names)


def calls_unknown_tools(messages: Iterable[Message], tools: Sequence[ToolSpec]) -> bool:
    """True if a message calls a tool that was not logged.

    Either the tools are missing, and no prompt can be rendered as it was, or none were offered and an agent
    parsed the calls from the model's text, which the messages then do not hold.
    """
    functions = (tool.get("function", tool) for tool in tools)
    names = {one.get("name") for one in functions if isinstance(one, dict | Mapping)}
    return any(call.name not in names for message in messages for call in message.tool_calls)


# Why the sampled turns of a training row ended


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
    for name in _HOLDERS:
        reasons = reasons or _named_reasons(row.get(name))
    reasons = reasons or _reason_by_status(row)
    return replace(trained, finish_reasons=reasons) if reasons else trained


def _finish_word(value: object) -> str | None:
    """`stop`, `length` or `tool_calls` for the frameworks' words for them, else the log's own; None if unset."""
    if isinstance(value, dict | Mapping):
        value = value.get("type")
    if not isinstance(value, str) or not value:
        return None
    return _WORDS.get(value.lower(), value)


def _named_reasons(row: object) -> tuple[str | None, ...]:
    """The reasons that one object names; () if it names none."""
    if not isinstance(row, dict | Mapping):
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
