"""Which model and tokenizer a row names, wherever it does, ignoring placeholder names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tito_audit.record.stated import Stated

_NAMES = (
    ("model", "model_name", "model_name_or_path", "model_path", "model_id"),
    ("tokenizer", "tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"),
)
_CONTAINERS = ("metadata", "meta_info", "extra_info", "config", "sampling_args", "agent", "response", "request")
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
"""What clients send to a server that has one model and needs no name (NeMo-Gym, OpenAI-compatible servers)."""


def real_name(value: object) -> str | None:
    """The name of a model or tokenizer; None for anything else, and for a placeholder."""
    if isinstance(value, Mapping):
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
    model, tokenizer = (_in_row(row, names) or one_model(list(_of_calls(row, names))) for names in _NAMES)
    return Stated(model=model, tokenizer=tokenizer)


def _in_row(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    objects = [row, *(value for name in _CONTAINERS if isinstance(value := row.get(name), Mapping))]
    return next((found for one in objects for name in names if (found := real_name(one.get(name)))), None)


def _of_calls(row: Mapping[str, Any], names: Sequence[str]) -> Iterator[str | None]:
    for key in _CALLS:
        calls = row.get(key)
        for call in calls[:_MOST_CALLS] if isinstance(calls, list | tuple) else ():
            if isinstance(call, Mapping):
                yield _in_row(call, names)
