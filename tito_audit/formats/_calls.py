"""A model call as a Turn, and what a row states: model, finish reasons, sampling settings and other facts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._columns import (
    EXPERTS,
    FLAT_IDS,
    Raw,
    as_logged,
    first_filled_name,
    first_text,
    ids_or_none,
    is_list,
    is_messages,
    is_nested_logprobs,
    logprob_column,
    logprobs_as_logged,
    names_in,
    other_columns,
    read_alternatives,
    same_ids,
    to_list,
)
from tito_audit.formats._extras import EXTRA_COLUMNS, read_extras, version_spans, weight_versions
from tito_audit.formats._update import (
    RepeatedIds,
    added_column,
    call_counts,
    with_counts,
    with_new_copies,
    with_values,
)
from tito_audit.record.arrays import Logprobs, empty_ids
from tito_audit.record.build import build_call_columns
from tito_audit.record.column import Column, ColumnRole, MovePolicy
from tito_audit.record.message import Message, ToolSpec, as_messages, sampled_indices
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
_COMPLETION_TEXTS = ("completion_text", "text", "response_text", "output_text", "completion", "response", "output")
_ENTRY_PROMPT = (*PROMPT_IDS, "input_ids")
_ENTRY_COMPLETION = (*COMPLETION_IDS, "token_ids")
_ENTRY_IDS = frozenset((*_ENTRY_PROMPT, *_ENTRY_COMPLETION))
_ENTRY_TEXTS = frozenset((*_COMPLETION_TEXTS, "prompt_text", "prompt", "messages"))
_ENTRY_ENDS = frozenset(("finish_reason", "stop_reason", "is_truncated"))
_ENTRY_KEYS = _ENTRY_IDS.union(_ENTRY_TEXTS, _ENTRY_ENDS, CALL_LOGPROBS, EXTRA_COLUMNS)
_ID_NAMES = {*PROMPT_IDS, *COMPLETION_IDS, *FLAT_IDS}


class _KnownKeys(NamedTuple):
    """Which keys of a call have to be read: most calls have few."""

    prompts: tuple[str, ...]
    completions: tuple[str, ...]
    logprobs: tuple[str, ...]
    ids: int
    """How many keys are names of ids."""
    has_texts: bool
    may_end: bool
    """False: neither `finish_reason` nor `stop_string` finds anything."""
    has_extras: bool

    @classmethod
    @lru_cache(1024)
    def of(cls, keys: frozenset[str]) -> _KnownKeys:
        """For the keys of a call that are in `_ENTRY_KEYS`: others, which may be long, are not remembered."""
        prompts, completions, logprobs = (
            tuple([name for name in names if name in keys])
            for names in (_ENTRY_PROMPT, _ENTRY_COMPLETION, CALL_LOGPROBS)
        )
        texts, ends, extras = (not names.isdisjoint(keys) for names in (_ENTRY_TEXTS, _ENTRY_ENDS, EXTRA_COLUMNS))
        return cls(prompts, completions, logprobs, len(keys & _ENTRY_IDS), texts, ends, extras)


def read_turn(
    entry: Mapping[str, Any],
    where: str = "",
    *,
    message_index: int | None = None,
    prompt_messages: tuple[Message, ...] | None = None,
) -> Turn:
    """The call that an object holds under the usual names; `where` names it in errors, "" for the row itself.

    Missing, null or empty ids give a turn with text and without ids, for rules to report. If only one side is
    empty, that side is known to have no tokens.
    """
    keys = _KnownKeys.of(_ENTRY_KEYS.intersection(entry))
    prompt_name = first_filled_name(entry, keys.prompts)
    completion_name = first_filled_name(entry, keys.completions)
    logprobs_name = None
    if keys.logprobs:
        objects = (name for name in keys.logprobs if isinstance(entry.get(name), dict | Mapping))
        logprobs_name = first_filled_name(entry, keys.logprobs) or next(objects, None)
    text = prompt_text = sent = None
    if keys.has_texts:
        text, prompt_text = first_text(entry, _COMPLETION_TEXTS), first_text(entry, ("prompt_text", "prompt"))
        sent = entry.get("messages", entry.get("prompt"))
    reads_all = len(entry) - keys.ids == (logprobs_name is not None)
    try:  # not `errors_at`, which costs six function calls for each call of a row
        turn = build_turn(
            (prompt_name or "", entry.get(prompt_name or "")),
            (completion_name or "", entry.get(completion_name or "")),
            None if logprobs_name is None else partial(logprob_column, entry, logprobs_name),
            {} if reads_all else other_columns(entry, {*_ENTRY_IDS, logprobs_name or ""}),
            entry,
            message_index=message_index,
            prompt_text=prompt_text,
            completion_text=text,
            finish_reason=finish_reason(entry) if keys.may_end else None,
            stop_string=stop_string(entry) if keys.may_end else None,
            extras=read_extras(entry) if keys.has_extras else NO_EXTRAS,
            alternatives=read_alternatives(entry[logprobs_name]) if logprobs_name else (),
        )
        if sent is not None and prompt_messages is None and is_messages(sent):
            prompt_messages = as_messages(sent, "messages")
    except RecordError as error:
        raise RecordError(f"{where}: {error}" if where else str(error)) from None
    if prompt_messages is None:
        return turn
    # Some logs append the answer to the messages that were sent; an equal text shows it.
    if prompt_messages and prompt_messages[-1].sampled and prompt_messages[-1].text == text:
        prompt_messages = prompt_messages[:-1]
    return replace(turn, prompt_messages=prompt_messages)


def build_turn(
    prompt: tuple[str, object],
    completion: tuple[str, object],
    logprobs: Callable[[], tuple[str, Raw] | None] | None,
    other: Mapping[str, tuple[Raw, MovePolicy]],
    versions: Mapping[str, Any] = MappingProxyType({}),
    **fields: Any,
) -> Turn:
    """The turn with these ids, given as (name in the log, value), and with further `fields` of Turn.

    `logprobs` returns a column's name and values; None: the call has none. `other` are its other columns.
    `versions` is the object that may name the weight versions. An empty completion with a prompt is known to have
    no tokens. Without ids, empty columns are ignored, and columns with entries show that ids are missing.
    """
    prompt_ids, ids = ids_or_none(prompt[1], prompt[0]), ids_or_none(completion[1], completion[0])
    if ids is None and prompt_ids is not None and completion[1] is not None:
        ids = empty_ids()
    column = None if logprobs is None else logprobs()
    values: Logprobs | None = None
    columns: tuple[Column, ...] = ()
    if column is not None or other:
        values, columns = build_call_columns(empty_ids() if ids is None else ids, logprobs=column, other=other)
        if ids is None:
            values, columns = None, tuple([each for each in columns if len(each.values)])
    if WEIGHTS in versions or "weight_version" in versions:
        spans = version_spans(versions.get(WEIGHTS), 0 if ids is None else len(ids))
        fields |= {"weight_versions": weight_versions(versions), "weight_spans": spans}
    return Turn(prompt_ids, ids, values, columns=columns, **fields)


def read_turn_at(entry: Mapping[str, Any], prompt: str, completion: str, read_names: Collection[str]) -> Turn:
    """The call of an object whose ids are under these two names, with its finish reason and weight versions.

    Lists in `read_names` are not columns of the call.
    """
    return build_turn(
        (prompt, entry.get(prompt)),
        (completion, entry.get(completion)),
        lambda: logprob_column(entry, "logprobs"),
        other_columns(entry, read_names),
        entry,
        finish_reason=finish_reason(entry),
        stop_string=stop_string(entry),
        extras=NO_EXTRAS if EXTRA_COLUMNS.isdisjoint(entry) else read_extras(entry),
    )


def message_place(messages: Sequence[Message], sent: Sequence[Message], answer: Message | None) -> dict[str, Any]:
    """The fields that place a Turn: `message_index` if the messages hold its answer, else `prompt_messages`."""
    if answer is not None:
        conversation = [message.wire for message in (*sent, answer)]
        if [message.wire for message in messages[: len(conversation)]] == conversation:
            return {"message_index": len(sent)}
    return {"prompt_messages": tuple(sent) or None}


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Prefix the RecordErrors of a block with the place that is read; "" for the row itself adds nothing."""
    try:
        yield
    except RecordError as error:
        raise RecordError(f"{where}: {error}" if where else str(error)) from None


def only_text(answer: Message) -> str | None:
    """The text of an answer that is only text; None if it also holds reasoning or tool calls."""
    return answer.text if not answer.tool_calls and answer.reasoning is None else None


def updated_call(
    entry: Mapping[str, Any], before: Turn, after: Turn, *, skip: Collection[str] = ()
) -> Mapping[str, Any]:
    """The object that holds a call, with the prompt and columns of `after`, in every copy, and with new counts.

    Columns in `skip` belong to something else. RecordError if the object has no column for a prompt.
    """
    now = {column.name: column.values for column in after.columns}
    columns: dict[str, Any] = {}
    for column in before.columns:
        original, values = entry[column.name], now.get(column.name)
        if values is not None and column.role is ColumnRole.LOGPROBS and is_nested_logprobs(original):
            columns[column.name] = logprobs_as_logged(values, original)
        else:
            columns[column.name] = as_logged(values, original)
    names_before = {column.name for column in before.columns}
    columns |= {new.name: added_column(entry, new) for new in after.columns if new.name not in names_before}
    entry = with_values(entry, columns)
    old, new = before.prompt_ids, after.prompt_ids
    if same_ids(old, new):
        return entry
    names = [name for name in _ENTRY_PROMPT if name not in skip]
    name = first_filled_name(entry, names)
    if name is None or new is None:
        raise RecordError("the call has no column for the ids of its prompt")
    # If the completion has the same ids, as placeholders do, only names tell the two apart.
    repeats = names if same_ids(old, before.completion_ids) else {*names, *_ID_NAMES}
    copies = [] if old is None else [RepeatedIds(old, new, {*repeats} - {*skip})]
    if before.seen_ids is not None and after.seen_ids is not None:
        copies.append(RepeatedIds(before.seen_ids, after.seen_ids, _ID_NAMES - {*skip}))
    copied: Mapping[str, Any] = with_new_copies(entry, copies, skip)
    # Experts were recorded for the old prompt too; sets of kept tokens only for the completion.
    dropped = {key: None for key in EXPERTS if entry.get(key) is not None}
    written = with_values(copied, {name: as_logged(new, entry[name]), **dropped})
    return with_counts(written, call_counts(before, after))


def answer_indices(messages: Sequence[Message], calls: int) -> list[int | None]:
    """For each of `calls` calls, in order, the index of the message that it wrote; all None if unclear.

    The calls are paired with the last answers: earlier ones are examples in the prompt. With fewer answers than
    calls it is unclear: a retry, a sub-agent or a compacted history left no message.
    """
    indices = sampled_indices(messages)
    if len(indices) < calls or not calls:
        return [None] * calls
    return list(indices[-calls:])


def with_ascending_messages(turns: Sequence[Turn], messages: Sequence[Message]) -> tuple[Turn, ...]:
    """The turns with ascending message indices.

    A retry names the same message as the call after it. The message belongs to the later call; the earlier keeps
    only the messages that it was sent.
    """
    next_index = len(messages)
    placed: list[Turn] = []
    for turn in reversed(turns):
        index = turn.message_index
        if index is not None and index >= next_index:
            turn = replace(turn, message_index=None, prompt_messages=tuple(messages[:index]))
        elif index is not None:
            next_index = index
        placed.append(turn)
    return tuple(reversed(placed))


def finish_reason(entry: Mapping[str, Any]) -> str | None:
    """Why a call ended, in the words of the log; None if it does not say. SGLang wraps the word in an object."""
    value = entry.get("finish_reason", entry.get("stop_reason"))
    if isinstance(value, str):
        return value
    if value is not None and isinstance(value, dict | Mapping) and isinstance(value.get("type"), str):
        kind: str = value["type"]
        return kind
    return "length" if entry.get("is_truncated") is True else None


def stop_string(entry: Mapping[str, Any]) -> str | None:
    """The stop string that a call names beside its finish reason: vLLM's `stop_reason`, SGLang's `matched`.

    None for the id of a stop token. Without a `finish_reason`, `stop_reason` is the finish reason itself.
    """
    reason = entry.get("finish_reason")
    if reason is None:
        return None
    if not isinstance(reason, str) and isinstance(reason, dict | Mapping):
        text = reason.get("matched")
    else:
        text = entry.get("stop_reason") or entry.get("matched_stop")
    return text if isinstance(text, str) and text else None


def same_messages(left: Sequence[Message], right: Sequence[Message]) -> bool:
    """Whether the messages are equal in what templates read of them."""
    return len(left) == len(right) and all(
        a is b or seen_by_template(a) == seen_by_template(b) for a, b in zip(left, right, strict=True)
    )


def seen_by_template(message: Message) -> object:
    """What templates read of a message, as a value to compare."""
    return message.role, message.text, message.reasoning, message.tool_calls


_GROUP_KEYS = ("group", "group_id", "group_index")
_MODEL_KEYS = (
    ("model", "model_name", "model_name_or_path", "model_path", "model_id"),
    ("tokenizer", "tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"),
)
_OBJECTS_WITH_MODEL = names_in("metadata meta_info extra_info config sampling_args agent response request")
_MAY_NAME_MODEL = frozenset((*(name for names in _MODEL_KEYS for name in names), *_OBJECTS_WITH_MODEL))
_CALLS_EXAMINED = 256
_PLACEHOLDER_NAMES = {
    "",
    *names_in("actor auto default dummy llm local model none null policy policy_model rollout string unknown"),
}
"""Placeholder names that clients send to a server with one model (NeMo-Gym, OpenAI-compatible servers)."""
_IMAGE_GRIDS = "image_grid_thw"
_IMAGE_INPUTS = ("multi_modal_inputs", "multimodal_train_inputs", "multimodal_inputs", "mm_kwargs")
"""Objects that hold processed images: verl, slime and miles, prime-rl."""
_RARE_FACTS = frozenset(("weight_version", "weight_versions", _IMAGE_GRIDS, *_IMAGE_INPUTS))
"""Keys of facts that few rows have."""
_FACT_KEYS = _RARE_FACTS.union(_GROUP_KEYS, ("id",))
LISTS_OF_CALLS = frozenset(CALL_LISTS)
TOOLS_MISSING = "they call tools that the log does not list"
"""Why messages of such a conversation are not read."""
_REASON_LIST_KEYS = ("finish_reasons", "stop_reasons")
_REASON_KEYS = ("finish_reason", "stop_reason", *_REASON_LIST_KEYS)
_OBJECTS_WITH_REASON = ("metadata", "meta_info", "extra_info")
_TRUNCATED_FLAGS = ("is_truncated", "truncated")
_MAY_NAME_REASON = frozenset((*_REASON_KEYS, *_OBJECTS_WITH_REASON, *_TRUNCATED_FLAGS, "status"))
"""Keys that may say why a turn ended."""
_NORMAL_FINISH_REASONS = {
    **dict.fromkeys(("stop", "completed", "eos", "eos_token", "end_turn", "stop_sequence", "stop_token"), "stop"),
    **dict.fromkeys(
        ("length", "truncated", "max_tokens", "max_length", "max_new_tokens", "max_seq_len"), "length"
    ),
    **dict.fromkeys(("tool_calls", "tool_call", "tool_use", "function_call"), "tool_calls"),
}
FINISH_REASON_OF_STATUS = {"completed": "stop", "truncated": "length", "aborted": "abort"}
"""`status` of slime and miles (THUDM/slime `slime/utils/types.py`); other values do not say why a turn ended."""


def stated_facts(row: Mapping[str, Any]) -> Stated:
    """What the row states: model, tokenizer, `id` if it is a string, group, weight versions and image grids."""
    named = stated_model(row)
    if named is NOTHING_STATED and _FACT_KEYS.isdisjoint(row):
        return named
    group = next((row[name] for name in _GROUP_KEYS if name in row and isinstance(row[name], int | str)), None)
    facts: dict[str, object] = {"id": row["id"]} if isinstance(row.get("id"), str) else {}
    if not _RARE_FACTS.isdisjoint(row):
        # The patch grids (time, height, width) of the row's images.
        inputs = (value for name in _IMAGE_INPUTS if isinstance(value := row.get(name), dict | Mapping))
        grids: Any = next((grid for holder in (row, *inputs) if is_list(grid := holder.get(_IMAGE_GRIDS))), ())
        try:
            sizes = tuple([tuple(int(side) for side in grid) for grid in grids])
        except (TypeError, ValueError, OverflowError):
            sizes = ()
        rare = {
            "weight_versions": weight_versions(row),
            "weight_spans": version_spans(row.get("weight_versions")),
            _IMAGE_GRIDS: sizes if all(len(size) == 3 for size in sizes) else (),
        }
        facts |= {name: value for name, value in rare.items() if value}
    return Stated(model=named.model, tokenizer=named.tokenizer, group=group, facts=facts)


def model_name(value: object) -> str | None:
    """The name of a model or tokenizer; None for a placeholder such as `default`, and for anything else."""
    if value is None:
        return None
    if isinstance(value, dict | Mapping):
        value = value.get("name")
    if not isinstance(value, str) or value.strip().lower() in _PLACEHOLDER_NAMES:
        return None
    return value


def one_model_name(names: Sequence[object]) -> str | None:
    """The model that all calls name, placeholders ignored; None if they name none or several."""
    distinct = set(map(model_name, names)) - {None}
    return distinct.pop() if len(distinct) == 1 else None


def stated_model(row: Mapping[str, Any]) -> Stated:
    """The model and the tokenizer that the row, an object in it, or all of its calls name."""
    calls: list[Mapping[str, Any]] = []
    if not LISTS_OF_CALLS.isdisjoint(row):
        calls = [
            call
            for key in CALL_LISTS
            if isinstance(entries := row.get(key), list | tuple)
            for call in entries[:_CALLS_EXAMINED]
            if isinstance(call, dict | Mapping) and not _MAY_NAME_MODEL.isdisjoint(call)
        ]
    if not calls and _MAY_NAME_MODEL.isdisjoint(row):
        return NOTHING_STATED
    model, tokenizer = (
        _model_name_in(row, names) or one_model_name([_model_name_in(call, names) for call in calls])
        for names in _MODEL_KEYS
    )
    return Stated(model=model, tokenizer=tokenizer)


def _model_name_in(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    if _MAY_NAME_MODEL.isdisjoint(row):
        return None
    objects = [row, *(value for name in _OBJECTS_WITH_MODEL if isinstance(value := row.get(name), dict | Mapping))]
    return next((real for holder in objects for name in names if (real := model_name(holder.get(name)))), None)


def calls_unknown_tools(messages: Iterable[Message], tools: Sequence[ToolSpec]) -> bool:
    """Whether a message calls a tool that is not in `tools`; then no prompt can be rendered again.

    Either the log lacks the tools, or none were offered and an agent parsed the calls from the model's text, which
    the messages then do not hold.
    """
    functions = (tool.get("function", tool) for tool in tools)
    offered = {
        function.get("name")
        for function in functions
        if isinstance(function, Mapping) and isinstance(function.get("name"), str)
    }
    return any(call.name not in offered for message in messages for call in message.tool_calls)


def with_finish_reasons(
    trained: TrainingRow | None, row: Mapping[str, Any], turns: Sequence[Turn] = ()
) -> TrainingRow | None:
    """The training row with the finish reasons of its last turns: from `turns`, the row, or an object in it."""
    if trained is None:
        return None
    of_turns = tuple(_normal_finish_reason(turn.finish_reason) for turn in turns) if turns else ()
    if any(of_turns):
        return replace(trained, finish_reasons=of_turns)
    if _MAY_NAME_REASON.isdisjoint(row):
        return trained
    reasons = _logged_finish_reasons(row)
    for name in _OBJECTS_WITH_REASON:
        if not reasons and row.get(name) is not None:
            reasons = _logged_finish_reasons(row[name])
    if not reasons:
        status = row.get("status")
        word = FINISH_REASON_OF_STATUS.get(status) if isinstance(status, str) else None
        if word is None and any(row.get(name) is True for name in _TRUNCATED_FLAGS):
            word = "length"
        reasons = () if word is None else (word,)
    return replace(trained, finish_reasons=reasons) if reasons else trained


def _normal_finish_reason(value: object) -> str | None:
    """A finish reason as `stop`, `length` or `tool_calls`, or in the log's own word; None if there is none."""
    if value is None:
        return None
    if not isinstance(value, str) and isinstance(value, dict | Mapping):
        value = value.get("type")
    if not isinstance(value, str) or not value:
        return None
    return _NORMAL_FINISH_REASONS.get(value.lower(), value)


def _logged_finish_reasons(row: object) -> tuple[str | None, ...]:
    """The finish reasons that one object names; () if it names none."""
    if not isinstance(row, dict | Mapping):
        return ()
    for name in _REASON_LIST_KEYS:
        value: Any = row.get(name)
        if is_list(value) and all(entry is None or isinstance(entry, str | Mapping) for entry in value):
            words = tuple(_normal_finish_reason(entry) for entry in value)
            if any(words):
                return words
    word = next((text for name in _REASON_KEYS if (text := _normal_finish_reason(row.get(name)))), None)
    return () if word is None else (word,)


_SAMPLING_LIMITS = {"temperature": 5.0, "top_p": 1.0, "top_k": math.inf, "min_p": 1.0}
_TEMPERATURES_PER_TOKEN = ("temperatures", "completion_temperatures")
_OBJECTS_WITH_SAMPLING = (
    *("sampling_params", "sampling_args", "sampling", "sampling_config", "generation_config", "generation_kwargs"),
    *("request", "response", "body", "config", "meta_info", "metadata", "extra_info", "extra_body"),
)
_MAY_NAME_SAMPLING = frozenset((*_SAMPLING_LIMITS, *_TEMPERATURES_PER_TOKEN, *_OBJECTS_WITH_SAMPLING, *CALL_LISTS))


def with_sampling_settings(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
    """The rollouts of a row, with its sampling settings as a fact of those that hold a trainer's logprobs.

    A setting is that of the row, or the one that all calls share; prime-rl writes a temperature per token.
    """
    if _MAY_NAME_SAMPLING.isdisjoint(row):
        return rollouts
    has_trainer = [versions_and_trainers_logged(rollout)[1] for rollout in rollouts]
    if not any(has_trainer):
        return rollouts
    settings = _read_sampling_settings(row, 2)
    lists = (value for name in CALL_LISTS if isinstance(value := row.get(name), list | tuple))
    calls = [
        _read_sampling_settings(call, 2)
        for calls in lists
        for call in calls[:_CALLS_EXAMINED]
        if isinstance(call, dict | Mapping)
    ]
    for name in _SAMPLING_LIMITS:
        values = {call.get(name) for call in calls}
        if len(values) > 1:
            settings.pop(name, None)  # the calls differ
        elif values and (value := values.pop()) is not None:
            settings[name] = value
    if not settings:
        return rollouts
    return [
        replace(rollout, stated=rollout.stated.with_facts(**{SAMPLING: settings})) if is_compared else rollout
        for rollout, is_compared in zip(rollouts, has_trainer, strict=True)
    ]


def _read_sampling_settings(holder: Mapping[str, Any], depth: int) -> dict[str, float]:
    """The sampling settings of an object and of objects in it; its own win."""
    settings: dict[str, float] = {}
    for name in _OBJECTS_WITH_SAMPLING if depth else ():
        if isinstance(inner := holder.get(name), dict | Mapping):
            settings |= _read_sampling_settings(inner, depth - 1)
    for name in _SAMPLING_LIMITS:
        value = holder.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _SAMPLING_LIMITS[name]:
            settings[name] = float(value)
    for name in _TEMPERATURES_PER_TOKEN:
        if is_list(values := holder.get(name)) and len(values):
            # 0 where nothing was sampled.
            distinct = {value for value in to_list(values) if isinstance(value, int | float) and value}
            if len(distinct) == 1:
                settings["temperature"] = float(distinct.pop())
    return settings
