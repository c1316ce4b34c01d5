"""Rows of text without ids: they cannot be audited, and a notice says what to save instead.

Which known tools write such logs, and what to save instead, says the table in `_text_logs.py`; others hold a
prompt and a completion. Rows with only `messages` are read as `generic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tito_audit.format import Format, Row
from tito_audit.formats._calls import stated_facts
from tito_audit.formats._columns import holds_ids, is_messages, parsed
from tito_audit.formats._kit import SampleRows
from tito_audit.formats._text_logs import TOKEN_COLUMNS, known_text, notice_of_text
from tito_audit.record.message import Message, as_messages
from tito_audit.record.rollout import Place, Rollout
from tito_audit.signature import KeyWay, Signature, keys, way

_ASKED = ("prompt", "prompts", "question", "query", "instruction")
_WROTE = ("completion", "completions", "response", "responses", "answer", "output", "text")


def _matches(row: Row) -> bool:
    if known_text(row) is not None:
        return True
    pair = any(_is_text(row.get(name)) for name in _ASKED) and any(_is_text(row.get(name)) for name in _WROTE)
    return pair and not TOKEN_COLUMNS & row.keys() and not any(_may_hide_ids(*column) for column in row.items())


def _may_hide_ids(name: str, value: Any) -> bool:
    """Whether a column may hold ids: a list of whole numbers at any depth, or a string of JSON from a table."""
    if isinstance(value, str) and name not in (*_ASKED, *_WROTE):
        return len(value) > 2 and value[0] in "[{"
    return _may_hold_ids(value)


def _read(row: Row, place: Place) -> Rollout:
    stated = replace(stated_facts(row), ids_wanted=False, notice=notice_of_text(row, FORMAT.name))
    prompt, wrote = (
        next((value for name in names if is_messages(value := parsed(row, name))), None)
        for names in (_ASKED, _WROTE)
    )
    logged = parsed(row, "messages")
    messages: tuple[Message, ...] = as_messages(logged if is_messages(logged) else None, "messages")
    if not messages and prompt is not None and wrote is not None:
        messages = as_messages(prompt, "prompt") + as_messages(wrote, "completion")
    return Rollout(place, FORMAT.name, messages, stated=stated)


def _may_hold_ids(value: Any, depth: int = 6) -> bool:
    """Whether a value may hold a list of ids, at any depth that logs have."""
    if isinstance(value, Mapping):
        return depth > 0 and any(_may_hold_ids(inner, depth - 1) for inner in value.values())
    if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        return depth > 0 and any(_may_hold_ids(inner, depth - 1) for inner in value[:8])
    return holds_ids(value)


def _is_text(value: Any) -> bool:
    """True for a text, messages, or a list of either."""
    if isinstance(value, list | tuple) and value and not isinstance(value[0], Mapping):
        return all(isinstance(part, str) or is_messages(part) for part in value[:4])
    return isinstance(value, str) or is_messages(value)


FORMAT = Format(
    name="text_only",
    title="Text without token ids",
    signature=Signature.of(
        way(
            keys("prompt", "question"),
            keys("completion", "response", before=", and ", after=", as text or messages, without ids"),
        ),
        way("gts", "output"),
        way("input_prompt", "output_response"),
        way("head_version", "completion"),
        way("schema_version", "traj_idx"),
        way("trace_id", "branches"),
        way("chosen", keys("rejected", before=" and ", after=", as text or messages")),
        KeyWay(words="the keys of a transcript, trace or evaluation log named on the right"),
    ),
    precedence=280,
    matches=_matches,
    **SampleRows(_read, lambda row, before, part: row).functions,
    shows="Nothing: no ids were recorded. A notice says what it is and what to log instead: text logs of verl, "
    "TRL, SkyRL, AReaL and tinker-cookbook; annotations of prime-rl; logs of SWE-agent, mini-SWE-agent, OpenHands, "
    "inspect_ai and terminal-bench; LiteLLM, Langfuse and OpenTelemetry; transcripts of Claude Code and Codex; "
    "fine-tuning files of OpenAI; preference data as text.",
)
