"""Generic columns: a flat training row, a split row, or a list of calls, under any of the names in use.

The last resort of detection, and what `--map` leads to. What a column describes is decided by its length.
slime and miles samples written as JSON, verl, TRL, SkyRL and AReaL fields saved one sample a row are all
rows of this kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row
from tito_audit.formats._calls import COMPLETION_IDS, PROMPT_IDS, answers, call_turn, is_messages
from tito_audit.formats._columns import is_list, is_numbers, parsed, stated_facts
from tito_audit.formats._flat import FLAT_IDS, flat_row, split_row
from tito_audit.record.message import Message, as_messages, as_tools
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn

__all__ = ["FORMAT"]

_CALLS = ("calls", "turns", "steps", "trajectory")
_CALL_KEYS = {*PROMPT_IDS, *COMPLETION_IDS}


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The messages of a row, and whether they are only what its one call was sent."""

    messages: tuple[Message, ...]
    prompt_only: bool = False


def _matches(row: Row) -> bool:
    if any(is_list(row[name]) or row[name] is None for name in FLAT_IDS if name in row):
        return True
    if any(is_list(row[name]) or row[name] is None for name in COMPLETION_IDS if name in row):
        return True
    if _calls_name(row) is not None:
        return True
    return is_messages(parsed(row, "messages")) and not _numbers_elsewhere(row)


def _read(row: Row, place: Place) -> Sequence[Rollout]:
    conversation = _conversation(row)
    turns: tuple[Turn, ...] = ()
    trained: TrainingRow | None = None
    calls = _calls_name(row)
    if calls is not None:
        turns = _call_turns(row[calls], calls, conversation.messages)
    elif any(name in row for name in COMPLETION_IDS):
        trained = split_row(row)
        turns = () if trained is not None else (_single_turn(row, conversation),)
    if any(is_list(row.get(name)) for name in FLAT_IDS):
        trained = flat_row(row, has_calls=bool(turns)) or trained
    stated = stated_facts(row)
    if not turns and trained is None and not any(name in row for name in FLAT_IDS):
        stated["ids_wanted"] = False
    arguments = row.get("chat_template_kwargs")
    return (
        Rollout(
            place,
            FORMAT.name,
            conversation.messages,
            as_tools(parsed(row, "tools"), "tools"),
            template_kwargs=arguments if isinstance(arguments, Mapping) else {},
            turns=turns,
            training_row=trained,
            stated=stated,
        ),
    )


def _conversation(row: Row) -> _Conversation:
    messages = parsed(row, "messages")
    if messages is not None:
        read = as_messages(messages, "messages")
        return _Conversation(read, prompt_only=bool(read) and read[-1].role in ("user", "system"))
    prompt, completion = parsed(row, "prompt"), parsed(row, "completion")
    if not is_messages(prompt):
        return _Conversation(())
    if not is_messages(completion):
        return _Conversation(as_messages(prompt, "prompt"), prompt_only=True)
    return _Conversation(as_messages(prompt, "prompt") + as_messages(completion, "completion"))


def _single_turn(row: Row, conversation: _Conversation) -> Turn:
    """The one call of a split row: it wrote the last answer, unless the messages are what it was sent."""
    plain = {name: value for name, value in row.items() if name not in ("messages", *FLAT_IDS)}
    messages = conversation.messages
    if conversation.prompt_only:
        return call_turn(plain, prompt_messages=messages)
    (index,) = answers(messages, 1)
    return call_turn(plain, message_index=index)


def _call_turns(entries: Sequence[Any], name: str, messages: Sequence[Message]) -> tuple[Turn, ...]:
    for i, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise RecordError(f"{name}[{i}] is not a call (an object)")
    return tuple(
        call_turn(entry, f"{name}[{i}]", message_index=index)
        for i, (entry, index) in enumerate(zip(entries, answers(messages, len(entries)), strict=True))
    )


def _calls_name(row: Row) -> str | None:
    """The column that lists the row's calls: objects of which one of the first has a column of ids."""
    for name in _CALLS:
        entries = row.get(name)
        if isinstance(entries, list | tuple) and any(
            isinstance(entry, Mapping) and _CALL_KEYS & entry.keys() for entry in entries[:8]
        ):
            return name
    return None


def _numbers_elsewhere(row: Row) -> bool:
    """True when a row of messages also has lists of numbers that may be ids under an unknown name."""
    for name, value in row.items():
        if name in ("messages", "tools") or not is_list(value) or not len(value):
            continue
        if is_numbers(value) and len(value) > 1:
            return True
        if isinstance(value[0], Mapping) and any(
            is_numbers(inner) and len(inner) > 1 for inner in value[0].values() if is_list(inner)
        ):
            return True
    return False


FORMAT = Format(
    name="generic",
    title="Generic columns",
    signature="`token_ids`, `tokens` or `input_ids`; or prompt and completion ids; or `calls` of them",
    precedence=270,
    matches=_matches,
    read=_read,
    shows="Whatever columns there are: training row, mask, logprobs, calls, messages, tools. Other names are "
    "given with `--map OURS=THEIRS`.",
)
