"""Reads one model call as a Turn under any column names, with the message that it wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._beside import BESIDE, beside_of, spans_of, version_spans, weight_versions
from tito_audit.formats._columns import (
    EXPERTS,
    FLAT_IDS,
    Raw,
    alternatives,
    as_logged,
    first_filled,
    first_text,
    flat_logprobs,
    ids_or_none,
    is_list,
    is_messages,
    is_nested,
    logprobs_as_logged,
    names_in,
    other_columns,
    plain,
    same_ids,
)
from tito_audit.formats._update import Copy, added_column, call_counts, with_copies, with_counts, with_values
from tito_audit.record.arrays import empty_ids
from tito_audit.record.build import build_call_columns
from tito_audit.record.column import ColumnRole, MovePolicy
from tito_audit.record.message import Message, ToolSpec, as_messages
from tito_audit.record.policy_columns import SAMPLING, WEIGHTS, versions_and_trainers_logged
from tito_audit.record.rollout import Rollout, TrainingRow, Turn
from tito_audit.record.stated import NOTHING_STATED, Stated
from tito_audit.record.token_extras import NO_EXTRAS

PROMPT_IDS = ("prompt_ids", "prompt_token_ids", "prompt_tokens", "input_tokens")
COMPLETION_IDS = names_in(
    """completion_ids completion_token_ids generation_token_ids response_ids response_token_ids response_tokens
    output_ids output_token_ids output_tokens completion_tokens generated_ids"""
)
CALL_LOGPROBS = names_in(
    """completion_logprobs generation_log_probs generation_logprobs response_logprobs response_log_probs
    output_logprobs logprobs rollout_log_probs rollout_logprobs inference_logprobs sampled_logprobs
    sampling_per_token_logps log_probs old_log_probs"""
)
CALL_LISTS = ("calls", "turns", "steps", "trajectory")
"""Columns that list the calls of a row."""
_TEXT = ("completion_text", "text", "response_text", "output_text", "completion", "response", "output")
_ENTRY_PROMPT = (*PROMPT_IDS, "input_ids")
_ENTRY_COMPLETION = (*COMPLETION_IDS, "token_ids")
_ID_NAMES = {*PROMPT_IDS, *COMPLETION_IDS, *FLAT_IDS}


def call_turn(
    entry: Mapping[str, Any],
    where: str = "",
    *,
    message_index: int | None = None,
    prompt_messages: tuple[Message, ...] | None = None,
) -> Turn:
    """The call that an object holds; `where` names the object in errors, "" for the row itself.

    Missing, null or empty ids give a turn with text and without ids, so that rules can report it. If only
    one side is empty, that side is known to have no tokens.
    """
    prompt_name = first_filled(entry, _ENTRY_PROMPT)
    completion_name = first_filled(entry, _ENTRY_COMPLETION)
    logprobs_name = None if _LOGPROBS.isdisjoint(entry) else first_filled(entry, CALL_LOGPROBS)
    if logprobs_name is None and not _LOGPROBS.isdisjoint(entry):
        logprobs_name = next((n for n in CALL_LOGPROBS if isinstance(entry.get(n), dict | Mapping)), None)
    text = first_text(entry, _TEXT)
    try:
        turn = turn_of_tokens(
            (prompt_name or "", entry.get(prompt_name or "")),
            (completion_name or "", entry.get(completion_name or "")),
            lambda: flat_logprobs(entry, logprobs_name),
            other_columns(entry, {*_ENTRY_PROMPT, *_ENTRY_COMPLETION, logprobs_name or ""}),
            entry,
            message_index=message_index,
            prompt_text=first_text(entry, ("prompt_text", "prompt")),
            completion_text=text,
            finish_reason=finish_reason(entry),
            stop_string=stop_string(entry),
            extras=NO_EXTRAS if BESIDE.isdisjoint(entry) else beside_of(entry),
            alternatives=alternatives(entry[logprobs_name]) if logprobs_name else (),
        )
        sent = entry.get("messages", entry.get("prompt")) if prompt_messages is None else None
        if is_messages(sent):
            prompt_messages = as_messages(sent, "messages")
    except RecordError as error:
        raise RecordError(f"{where}: {error}" if where else str(error)) from None
    if prompt_messages is None:
        return turn
    # Some logs append the answer to what was sent; its text shows it.
    if prompt_messages and prompt_messages[-1].sampled and prompt_messages[-1].text == text:
        prompt_messages = prompt_messages[:-1]
    return replace(turn, prompt_messages=prompt_messages)


def turn_of_tokens(
    prompt: tuple[str, object],
    completion: tuple[str, object],
    logprobs: Callable[[], tuple[str, Raw] | None],
    other: Mapping[str, tuple[Raw, MovePolicy]],
    versions: Mapping[str, Any] = MappingProxyType({}),
    **fields: Any,
) -> Turn:
    """The turn of a prompt and a completion, each as (name in the log, value), with further `fields` of it.

    `versions` may name versions of the weights. An empty completion with a prompt is known to have no tokens.
    Without ids, empty columns are ignored, and columns with entries show that ids are missing.
    """
    prompt_ids, ids = ids_or_none(prompt[1], prompt[0]), ids_or_none(completion[1], completion[0])
    if ids is None and prompt_ids is not None and completion[1] is not None:
        ids = empty_ids()
    values, columns = build_call_columns(empty_ids() if ids is None else ids, logprobs=logprobs(), other=other)
    if ids is None:
        values, columns = None, tuple(column for column in columns if len(column.values))
    if WEIGHTS in versions or "weight_version" in versions:
        fields |= {"weight_versions": weight_versions(versions), "weight_spans": spans_of(versions, ids)}
    return Turn(prompt_ids, ids, values, columns=columns, **fields)


def turn_at(entry: Mapping[str, Any], prompt: str, completion: str, read_names: Collection[str]) -> Turn:
    """The call of an object that holds its ids under these names, how it ended and with which weights."""
    return turn_of_tokens(
        (prompt, entry.get(prompt)),
        (completion, entry.get(completion)),
        lambda: flat_logprobs(entry, "logprobs"),
        other_columns(entry, read_names),
        entry,
        finish_reason=finish_reason(entry),
        stop_string=stop_string(entry),
        extras=NO_EXTRAS if BESIDE.isdisjoint(entry) else beside_of(entry),
    )


def place_in(messages: Sequence[Message], sent: Sequence[Message], answer: Message | None) -> dict[str, Any]:
    """Where in the messages a call wrote its answer, as a field of its turn; else what it was sent."""
    whole = [message.wire for message in (*sent, *((answer,) if answer is not None else ()))]
    if answer is not None and [message.wire for message in messages[: len(whole)]] == whole:
        return {"message_index": len(sent)}
    return {"prompt_messages": tuple(sent) or None}


@contextmanager
def within(where: str) -> Iterator[None]:
    """What is read, of which errors say where it is; "" for the row itself."""
    try:
        yield
    except RecordError as error:
        raise RecordError(f"{where}: {error}" if where else str(error)) from None


def text_alone(answer: Message) -> str | None:
    """The text of an answer; None if its completion holds more, reasoning or tool calls."""
    return answer.text if not answer.tool_calls and answer.reasoning is None else None


def updated_call(
    entry: Mapping[str, Any], before: Turn, after: Turn, *, skip: Collection[str] = ()
) -> Mapping[str, Any]:
    """The object that holds a call, with the prompt and columns of `after`.

    Columns in `skip` belong to something else. RecordError if the object has no column for a prompt.
    """
    now = {column.name: column.values for column in after.columns}
    columns: dict[str, Any] = {}
    for column in before.columns:
        original, values = entry[column.name], now.get(column.name)
        if values is not None and column.role is ColumnRole.LOGPROBS and is_nested(original):
            columns[column.name] = logprobs_as_logged(values, original)
        else:
            columns[column.name] = as_logged(values, original)
    names_before = {column.name for column in before.columns}
    columns |= {new.name: added_column(entry, new) for new in after.columns if new.name not in names_before}
    # The new prompt in every copy that the call holds, and its counts.
    entry = with_values(entry, columns)
    old, new = before.prompt_ids, after.prompt_ids
    if same_ids(old, new):
        return entry
    names = [name for name in _ENTRY_PROMPT if name not in skip]
    name = first_filled(entry, names)
    if name is None or new is None:
        raise RecordError("the call has no column for the ids of its prompt")
    # Where the completion has the same ids, as placeholders do, only a name tells the two apart.
    repeats = names if same_ids(old, before.completion_ids) else {*names, *_ID_NAMES}
    copies = [] if old is None else [Copy(old, new, {*repeats} - {*skip})]
    if before.seen_ids is not None and after.seen_ids is not None:
        copies.append(Copy(before.seen_ids, after.seen_ids, _ID_NAMES - {*skip}))
    copied: Mapping[str, Any] = with_copies(entry, copies, skip)
    # Experts are those of the old prompt too; sets of kept tokens are of the completion alone.
    gone = {key: None for key in EXPERTS if entry.get(key) is not None}
    written = with_values(copied, {name: as_logged(new, entry[name]), **gone})
    return with_counts(written, call_counts(before, after))


def answer_indices(messages: Sequence[Message], calls: int) -> list[int | None]:
    """The index of the message that each of `calls` calls wrote, in order; None if that is unclear."""
    indices = [i for i, message in enumerate(messages) if message.sampled]
    # More answers than calls: the first ones are examples in the prompt, which were not sampled.
    # Fewer: a retry, a sub-agent or a compacted history left no message, and only the tokens could show
    # which calls those were.
    if len(indices) < calls or not calls:
        return [None] * calls
    return list(indices[-calls:])


def written_once(turns: Sequence[Turn], messages: Sequence[Message]) -> tuple[Turn, ...]:
    """The calls, each with a message later than those of earlier calls.

    If two name the same message, as a retry does, it belongs to the later one; the other keeps what it was sent.
    """
    limit = len(messages)
    kept_turns: list[Turn] = []
    for turn in reversed(turns):
        index = turn.message_index
        if index is not None and index >= limit:
            turn = replace(turn, message_index=None, prompt_messages=tuple(messages[:index]))
        elif index is not None:
            limit = index
        kept_turns.append(turn)
    return tuple(reversed(kept_turns))


def finish_reason(entry: Mapping[str, Any]) -> str | None:
    """Why a call ended, in the words of the log; SGLang wraps it in an object."""
    value = entry.get("finish_reason", entry.get("stop_reason"))
    if isinstance(value, str):
        return value
    if value is not None and isinstance(value, dict | Mapping) and isinstance(value.get("type"), str):
        kind: str = value["type"]
        return kind
    return "length" if entry.get("is_truncated") is True else None


def stop_string(entry: Mapping[str, Any]) -> str | None:
    """The stop string that a call names beside its finish reason: vLLM's `stop_reason`, SGLang's `matched`.

    Ids of stop tokens are no strings; without a finish reason, `stop_reason` is one.
    """
    reason = entry.get("finish_reason")
    if reason is None:
        return None
    if not isinstance(reason, str) and isinstance(reason, dict | Mapping):
        text = reason.get("matched")
    else:
        text = entry.get("stop_reason") or entry.get("matched_stop")
    return text if isinstance(text, str) and text and reason is not None else None


def same_messages(left: Sequence[Message], right: Sequence[Message]) -> bool:
    """True if these are the same messages, comparing only what rules and templates read."""
    return len(left) == len(right) and all(
        a is b or seen_by_template(a) == seen_by_template(b) for a, b in zip(left, right, strict=True)
    )


def seen_by_template(message: Message) -> object:
    """What a template reads of a message."""
    return message.role, message.text, message.reasoning, message.tool_calls


_GROUPS = ("group", "group_id", "group_index")
_NAMES = (
    ("model", "model_name", "model_name_or_path", "model_path", "model_id"),
    ("tokenizer", "tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"),
)
_CONTAINERS = ("metadata", "meta_info", "extra_info", "config", "sampling_args", "agent", "response", "request")
_NAMED_OR_HELD = frozenset((*(name for names in _NAMES for name in names), *_CONTAINERS))
_MOST_CALLS = 256
_STAND_INS = {
    "",
    *names_in("actor auto default dummy llm local model none null policy policy_model rollout string unknown"),
}
"""Placeholder names that clients send to a server with one model (NeMo-Gym, OpenAI-compatible servers)."""
_GRIDS = "image_grid_thw"
_PICTURE_INPUTS = ("multi_modal_inputs", "multimodal_train_inputs", "multimodal_inputs", "mm_kwargs")
"""Objects that hold processed images: verl, slime and miles, prime-rl."""
_RARE = frozenset(("weight_version", "weight_versions", _GRIDS, *_PICTURE_INPUTS))
"""Keys of facts that few rows have."""
_STATING = _RARE.union(_GROUPS, ("id",))
LISTS_OF_CALLS = frozenset(CALL_LISTS)
_LOGPROBS = frozenset(CALL_LOGPROBS)
TOOLS_MISSING = "they call tools that the log does not list"
"""Why messages of such a conversation are not read."""
_EACH = ("finish_reasons", "stop_reasons")
_ONE = ("finish_reason", "stop_reason", *_EACH)
_HOLDERS = ("metadata", "meta_info", "extra_info")
_CUT = ("is_truncated", "truncated")
_ENDING = frozenset((*_ONE, *_HOLDERS, *_CUT, "status"))
"""Keys that may say why a turn ended."""
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
    named = model_facts(row)
    if named is NOTHING_STATED and _STATING.isdisjoint(row):
        return named
    group = next((row[name] for name in _GROUPS if name in row and isinstance(row[name], int | str)), None)
    facts: dict[str, object] = {"id": row["id"]} if isinstance(row.get("id"), str) else {}
    if not _RARE.isdisjoint(row):
        spans = version_spans(row.get("weight_versions"))
        rare = {"weight_versions": weight_versions(row), "weight_spans": spans, _GRIDS: _image_grids(row)}
        facts |= {name: value for name, value in rare.items() if value}
    return Stated(model=named.model, tokenizer=named.tokenizer, group=group, facts=facts)


def _image_grids(row: Mapping[str, Any]) -> tuple[tuple[int, int, int], ...]:
    """The grids of patches (time, height, width) of a row's images; () if it names none."""
    inputs = (value for name in _PICTURE_INPUTS if isinstance(value := row.get(name), dict | Mapping))
    grids: Any = next((grid for holder in (row, *inputs) if is_list(grid := holder.get(_GRIDS))), ())
    try:
        sizes = [tuple(int(side) for side in grid) for grid in grids]
    except (TypeError, ValueError, OverflowError):
        return ()
    return tuple((grid[0], grid[1], grid[2]) for grid in sizes) if all(len(grid) == 3 for grid in sizes) else ()


def real_name(value: object) -> str | None:
    """The name of a model or tokenizer; None for anything else, and for a placeholder."""
    if value is None:
        return None
    if isinstance(value, dict | Mapping):
        value = value.get("name")
    if not isinstance(value, str) or value.strip().lower() in _STAND_INS:
        return None
    return value


def one_model(names: Sequence[object]) -> str | None:
    """The one real name among those of several calls; None if there is none or more than one."""
    real_names = {name for logged in names if (name := real_name(logged)) is not None}
    return real_names.pop() if len(real_names) == 1 else None


def model_facts(row: Mapping[str, Any]) -> Stated:
    """`model` and `tokenizer` as named by the row, an object in it, or all of its calls."""
    if _NAMED_OR_HELD.isdisjoint(row) and LISTS_OF_CALLS.isdisjoint(row):
        return NOTHING_STATED
    listed = (value for key in CALL_LISTS if isinstance(value := row.get(key), list | tuple))
    calls = [call for value in listed for call in value[:_MOST_CALLS] if isinstance(call, dict | Mapping)]
    calls = [call for call in calls if not _NAMED_OR_HELD.isdisjoint(call)]
    model, tokenizer = (
        _in_row(row, names) or one_model([_in_row(call, names) for call in calls]) for names in _NAMES
    )
    return Stated(model=model, tokenizer=tokenizer)


def _in_row(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    if _NAMED_OR_HELD.isdisjoint(row):
        return None
    objects = [row, *(value for name in _CONTAINERS if isinstance(value := row.get(name), dict | Mapping))]
    return next((real for holder in objects for name in names if (real := real_name(holder.get(name)))), None)


def calls_unknown_tools(messages: Iterable[Message], tools: Sequence[ToolSpec]) -> bool:
    """True if a message calls a tool that was not logged.

    Either the tools are missing, and no prompt can be rendered as it was, or none were offered and an agent
    parsed the calls from the model's text, which the messages then do not hold.
    """
    functions = (tool.get("function", tool) for tool in tools)
    offered = {
        function.get("name")
        for function in functions
        if isinstance(function, Mapping) and isinstance(function.get("name"), str)
    }
    return any(call.name not in offered for message in messages for call in message.tool_calls)


# Why the sampled turns of a training row ended


def with_finishes(
    trained: TrainingRow | None, row: Mapping[str, Any], turns: Sequence[Turn] = ()
) -> TrainingRow | None:
    """The training row with the finish reasons of its last turns, from its calls, the row, or an object in it."""
    if trained is None:
        return None
    of_turns = tuple(_finish_word(turn.finish_reason) for turn in turns) if turns else ()
    if any(of_turns):
        return replace(trained, finish_reasons=of_turns)
    if _ENDING.isdisjoint(row):
        return trained
    reasons = _named_reasons(row)
    for name in _HOLDERS:
        if not reasons and row.get(name) is not None:
            reasons = _named_reasons(row[name])
    if not reasons:
        status = row.get("status")
        word = _STATUS.get(status) if isinstance(status, str) else None
        if word is None and any(row.get(name) is True for name in _CUT):
            word = "length"
        reasons = () if word is None else (word,)
    return replace(trained, finish_reasons=reasons) if reasons else trained


def _finish_word(value: object) -> str | None:
    """`stop`, `length` or `tool_calls` for the frameworks' words for them, else the log's own; None if unset."""
    if value is None:
        return None
    if not isinstance(value, str) and isinstance(value, dict | Mapping):
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
        if is_list(value) and all(entry is None or isinstance(entry, str | Mapping) for entry in value):
            words = tuple(_finish_word(entry) for entry in value)
            if any(words):
                return words
    word = next((text for name in _ONE if (text := _finish_word(row.get(name)))), None)
    return () if word is None else (word,)


# How tokens were sampled: a temperature per token in prime-rl, the sampling of a row or of each call elsewhere

_MOST_SAMPLING = {"temperature": 5.0, "top_p": 1.0, "top_k": math.inf, "min_p": 1.0}
_SAMPLING_PER_TOKEN = ("temperatures", "completion_temperatures")
_SAMPLING_HOLDERS = (
    *("sampling_params", "sampling_args", "sampling", "sampling_config", "generation_config", "generation_kwargs"),
    *("request", "response", "body", "config", "meta_info", "metadata", "extra_info", "extra_body"),
)
_MAY_NAME_SAMPLING = frozenset((*_MOST_SAMPLING, *_SAMPLING_PER_TOKEN, *_SAMPLING_HOLDERS, *CALL_LISTS))


def with_sampling(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
    """The rollouts of a row, those with a trainer's logprobs with what the row says about the sampling."""
    if _MAY_NAME_SAMPLING.isdisjoint(row):
        return rollouts
    with_trainer = [versions_and_trainers_logged(rollout)[1] for rollout in rollouts]
    if not any(with_trainer):
        return rollouts
    # What the row says, or what all of its calls say alike.
    settings = _sampling_in(row, 2)
    lists = (value for name in CALL_LISTS if isinstance(value := row.get(name), list | tuple))
    calls = [
        _sampling_in(call, 2)
        for calls in lists
        for call in calls[:_MOST_CALLS]
        if isinstance(call, dict | Mapping)
    ]
    for name in _MOST_SAMPLING:
        values = {call.get(name) for call in calls}
        if len(values) > 1:
            settings.pop(name, None)  # calls that were sampled in several ways
        elif values and (value := values.pop()) is not None:
            settings[name] = value
    if not settings:
        return rollouts
    return [
        replace(rollout, stated=rollout.stated.with_facts(**{SAMPLING: settings})) if compared else rollout
        for rollout, compared in zip(rollouts, with_trainer, strict=True)
    ]


def _sampling_in(holder: Mapping[str, Any], deep: int) -> dict[str, float]:
    settings: dict[str, float] = {}
    for name in _SAMPLING_HOLDERS if deep else ():
        if isinstance(inner := holder.get(name), dict | Mapping):
            settings |= _sampling_in(inner, deep - 1)
    for name in _MOST_SAMPLING:
        value = holder.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST_SAMPLING[name]:
            settings[name] = float(value)
    for name in _SAMPLING_PER_TOKEN:
        if is_list(values := holder.get(name)) and len(values):
            # 0 where nothing was sampled.
            distinct = {value for value in plain(values) if isinstance(value, int | float) and value}
            if len(distinct) == 1:
                settings["temperature"] = float(distinct.pop())
    return settings
