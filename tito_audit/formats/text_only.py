"""Rows of text without ids: they cannot be audited, and a notice says what to save instead.

Which known tools write such logs, and what to save instead, says the table in `_text_logs.py`; others hold a
prompt and a completion, or chat data in the columns of ShareGPT or Alpaca. Rows with only `messages` are read as
`generic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import stated_facts
from tito_audit.formats._columns import is_list, is_messages, may_hold_ids, parsed_column
from tito_audit.formats._kit import SampleRows
from tito_audit.formats._text_logs import TOKEN_COLUMNS, text_log_despite_ids, text_log_notice
from tito_audit.formats._update import object_at
from tito_audit.record.message import Message, as_messages, as_tools
from tito_audit.record.nesting import load_json
from tito_audit.record.rollout import Place, Rollout

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
"""Roles of ShareGPT, by their names in chat form."""
_PROMPT_KEYS = ("prompt", "prompts", "question", "query", "instruction")
_ANSWER_KEYS = ("completion", "completions", "response", "responses", "answer", "output", "text")


def matches(row: Row) -> bool:
    if text_log_despite_ids(row) is not None:
        return True
    if TOKEN_COLUMNS.isdisjoint(row) and _sharegpt_messages(row) is not None:
        return True
    pair = any(_is_text(row.get(name)) for name in _PROMPT_KEYS) and any(
        _is_text(row.get(name)) for name in _ANSWER_KEYS
    )
    if not pair or TOKEN_COLUMNS & row.keys():
        return False
    # A column may hide ids: as whole numbers at any depth, or in a string of JSON.
    return not any(
        len(value) > 2 and value[0] in "[{"
        if isinstance(value, str) and name not in (*_PROMPT_KEYS, *_ANSWER_KEYS)
        else _may_hold_ids(value)
        for name, value in row.items()
    )


def read(row: Row, place: Place) -> Rollout:
    stated = replace(stated_facts(row), ids_wanted=False, notice=text_log_notice(row, FORMAT.name))
    prompt, wrote = (
        next((value for name in names if is_messages(value := parsed_column(row, name))), None)
        for names in (_PROMPT_KEYS, _ANSWER_KEYS)
    )
    logged = parsed_column(row, "messages")
    messages: tuple[Message, ...] = as_messages(logged if is_messages(logged) else None, "messages")
    if not messages and prompt is not None and wrote is not None:
        before = as_messages(prompt, "prompt")
        messages = before + as_messages(wrote, "completion")
        stated = stated.with_facts(prompt_messages=len(before))
    elif not messages and (shared := _sharegpt_messages(row)) is not None:
        messages = as_messages(shared, "conversations")
    elif not messages and not stated.notice:
        messages = as_messages(_alpaca_messages(row), "instruction")
    kwargs = object_at(row, "chat_template_kwargs")
    return Rollout(
        place, FORMAT.name, messages, as_tools(parsed_column(row, "tools"), "tools"), kwargs, stated=stated
    )


def _sharegpt_messages(row: Row) -> list[dict[str, Any]] | None:
    """The messages of a ShareGPT row, in chat form; None of other rows.

    As hiyouga/LLaMA-Factory reads them (`src/llamafactory/data/converter.py`, `SharegptDatasetConverter`): a
    `system` column opens the conversation, `function_call` is an answer that calls tools, `observation` what they
    return.
    """
    turns = parsed_column(row, "conversations")
    if not isinstance(turns, list | tuple | np.ndarray) or not len(turns):
        return None
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("from", turn.get("role")), str):
            return None
        role = _SHAREGPT_ROLES.get(who := turn.get("from", turn.get("role")), who)
        text = turn.get("value", turn.get("content"))
        rest = {name: turn[name] for name in ("weight", "train") if turn.get(name) is not None}
        message = {"role": role, "content": text}
        if who == "function_call":
            with suppress(ValueError, TypeError, RecordError):
                parsed_calls = load_json(text)
                calls = parsed_calls if isinstance(parsed_calls, list) else [parsed_calls]
                if calls and all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
                    listed = [{"type": "function", "function": call} for call in calls]
                    message |= {"content": "", "tool_calls": listed}
        messages.append({**message, **rest})
    system = row.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _alpaca_messages(row: Row) -> list[dict[str, Any]] | None:
    """The messages of a row in Alpaca's columns, in chat form; None of other rows.

    As hiyouga/LLaMA-Factory reads them (`src/llamafactory/data/converter.py`, `AlpacaDatasetConverter`): `input`
    follows the instruction on its own line, `history` holds earlier questions and answers.
    """
    texts = [row.get(name) for name in ("instruction", "input")]
    prompt = "\n".join(text for text in texts if isinstance(text, str) and text)
    if not isinstance(texts[0], str) or not prompt or not isinstance(row.get("output"), str):
        return None
    system, history = row.get("system"), parsed_column(row, "history") or ()
    if not all(is_list(pair) and len(pair) == 2 and {*map(type, pair)} == {str} for pair in history):
        return None
    turns = [*history, (prompt, row["output"])]
    messages = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def _may_hold_ids(value: Any, depth: int = 6) -> bool:
    """Whether a value may hold a list of ids, at any depth that logs have."""
    if isinstance(value, Mapping):
        return depth > 0 and any(_may_hold_ids(inner, depth - 1) for inner in value.values())
    if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        return depth > 0 and any(_may_hold_ids(inner, depth - 1) for inner in value[:8])
    return may_hold_ids(value)


def _is_text(value: Any) -> bool:
    """True for a text, messages, or a list of either."""
    if isinstance(value, list | tuple) and value and not isinstance(value[0], Mapping):
        return all(isinstance(part, str) or is_messages(part) for part in value[:4])
    return isinstance(value, str) or is_messages(value)


FORMAT = Format(
    name="text_only",
    title="Text without token ids",
    signature=Signature(
        "{prompt|question}, and {completion|response}, as text or messages, without ids; or {conversations}, in "
        "ShareGPT form; or {gts}, {output}; or {step}, {completion}, {advantages}; or {gen_step}, {prompt}, "
        "{completion}; or {input_prompt}, {output_response}; or {head_version}, {completion}; or {schema_version},"
        " {traj_idx}; or {trace_id}, {branches}; or {chosen} and {rejected}, as text or messages; or the keys of a"
        " transcript, trace or evaluation log named on the right"
    ),
    precedence=280,
    matches=matches,
    **SampleRows(read, lambda row, before, part: row).functions,
    shows="Nothing: no ids were recorded. A notice says what it is and what to log instead: text logs of verl, "
    "TRL, ms-swift, SkyRL, AReaL and tinker-cookbook; annotations of prime-rl; logs of SWE-agent, mini-SWE-agent, "
    "OpenHands, inspect_ai and terminal-bench; LiteLLM, Langfuse and OpenTelemetry; transcripts of Claude Code "
    "and Codex; fine-tuning files of OpenAI; preference data as text; chat data in the columns of ShareGPT or "
    "Alpaca.",
)
