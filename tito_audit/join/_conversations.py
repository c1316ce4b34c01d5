"""Reads conversations from rows of other files, and puts them into rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tito_audit.errors import RecordError, SetupError
from tito_audit.format import Row
from tito_audit.formats import chat_tools, format_named, pick_format
from tito_audit.record.message import Message, ToolSpec
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.settings.model import Settings
from tito_audit.storage import find_logs, open_log

_PLAIN = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The text side of a rollout."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    template_kwargs: Mapping[str, object] | None = None
    calls: tuple[tuple[int | None, tuple[Message, ...] | None], ...] = ()
    """For each call in the row, the index of its message and what it was sent; None where unknown."""


def conversations(row: Row, place: Place) -> tuple[Conversation, ...]:
    """The conversations of a row of any format, or of its columns `messages` and `tools`; () when it has none.

    RecordError when it has messages that cannot be read.
    """
    plain = {name: row[name] for name in _PLAIN if row.get(name) is not None}
    try:
        form = pick_format(row)
    except RecordError:
        return _plain(plain, place) if plain else ()
    try:
        return tuple(_conversation_of(rollout) for rollout in form.read(row, place))
    except RecordError:
        # A row with bad ids may have good messages.
        if not plain:
            raise
        return _plain(plain, place)


def has_messages(rollout: Rollout) -> bool:
    """Whether a rollout has messages of its own."""
    return bool(rollout.messages) or any(turn.prompt_messages is not None for turn in rollout.turns)


def with_conversation(rollout: Rollout, conversation: Conversation) -> Rollout:
    """The rollout with these messages, and each call with its own if calls and answers can be paired."""
    members = rollout.stated.chain
    chain = list(range(len(rollout.turns)) if members is None else members)
    paired = _paired([rollout.turns[number] for number in chain], conversation)
    if members is not None and paired is not None and _is_another_agent(rollout, chain, paired, conversation):
        paired = None
    turns = list(rollout.turns)
    if paired is not None:
        for number, (index, sent) in zip(chain, paired, strict=True):
            turns[number] = replace(turns[number], message_index=index, prompt_messages=sent)
        _mark_retries(turns, chain, conversation.messages)
    arguments = rollout.template_kwargs or conversation.template_kwargs or {}
    return replace(rollout, messages=conversation.messages, turns=tuple(turns), template_kwargs=arguments)


def _plain(columns: Row, place: Place) -> tuple[Conversation, ...]:
    """The conversations in these columns; several where `messages` is a list of lists."""
    form, messages = format_named("generic"), columns.get("messages")
    each = [columns]
    if (
        isinstance(messages, list | tuple)
        and messages
        and all(isinstance(message_list, list | tuple) for message_list in messages)
    ):
        each = [{**columns, "messages": message_list} for message_list in messages]
    return tuple(_conversation_of(rollout) for message_list in each for rollout in form.read(message_list, place))


def _conversation_of(rollout: Rollout) -> Conversation:
    calls = tuple((turn.message_index, turn.prompt_messages) for turn in rollout.turns)
    return Conversation(rollout.messages, rollout.tools, rollout.template_kwargs, calls)


def _paired(
    turns: Sequence[Turn], conversation: Conversation
) -> Sequence[tuple[int | None, tuple[Message, ...] | None]] | None:
    """Each call's message index and what it was sent; None if calls and answers cannot be paired."""
    if not turns:
        return None
    if len(conversation.calls) == len(turns) and any(
        index is not None or sent for index, sent in conversation.calls
    ):
        return conversation.calls
    answers = [i for i, message in enumerate(conversation.messages) if message.sampled]
    last = answers[-len(turns) :]
    if len(turns) == 1 and conversation.messages and not conversation.messages[-1].sampled:
        if last and _wrote(turns, conversation.messages, last):
            return [(last[0], None)]
        # What the only call was sent; after a tool message, this is certain only if the call wrote other text.
        sure = conversation.messages[-1].speaker != "tool" or turns[0].completion_text is not None
        return [(None, conversation.messages)] if sure else None
    # More answers than calls: the first ones are examples, not sampled, or the log holds only some of the calls.
    if len(answers) < len(turns) or (len(answers) > len(turns) and not _wrote(turns, conversation.messages, last)):
        return None
    return [(index, None) for index in last]


def _wrote(turns: Sequence[Turn], messages: Sequence[Message], indices: Sequence[int]) -> bool:
    """Whether these messages have the texts that the calls are known to have written."""
    pairs = [
        (turn.completion_text, messages[index].text)
        for turn, index in zip(turns, indices, strict=True)
        if turn.completion_text is not None
    ]
    return bool(pairs) and all(ours == theirs for ours, theirs in pairs)


def _is_another_agent(
    rollout: Rollout,
    chain: Sequence[int],
    paired: Sequence[tuple[int | None, tuple[Message, ...] | None]],
    conversation: Conversation,
) -> bool:
    """Whether the messages are another agent's: none of them has a text that the chain is known to have
    written."""
    pairs = [
        (rollout.turns[number].completion_text, conversation.messages[index].text)
        for number, (index, _) in zip(chain, paired, strict=True)
        if index is not None and rollout.turns[number].completion_text is not None
    ]
    return bool(pairs) and not any((own or "").strip() == theirs.strip() for own, theirs in pairs)


def _mark_retries(turns: list[Turn], chain: Sequence[int], messages: tuple[Message, ...]) -> None:
    """Set what each retry (a call outside the chain with the prompt of a call in it) was sent."""
    for number, turn in enumerate(turns):
        if number in chain or turn.prompt_ids is None:
            continue
        for other in (turns[k] for k in chain):
            prompt = other.prompt_ids
            if prompt is not None and len(prompt) == len(turn.prompt_ids) and (prompt == turn.prompt_ids).all():
                sent = (
                    messages[: other.message_index] if other.message_index is not None else other.prompt_messages
                )
                turns[number] = replace(turn, prompt_messages=sent)
                break


# Files of tools: one list for all rollouts, or rows with an id and tools


_SHAPES = ("parameters", "input_schema", "description")
"""Keys that show that an object with a name describes a tool."""


def shared_tools(named: str, settings: Settings) -> tuple[ToolSpec, ...] | None:
    """The list of tools in a file; None if the file has rows with tools instead. SetupError if it has neither."""
    (file, *more) = find_logs([named])
    rows: list[Row] = []
    for raw in open_log(file, max_row_bytes=settings.max_row_bytes):
        if raw.value is None:
            raise SetupError(f"--tools {file}: row {raw.index} cannot be read: {raw.error}")
        rows.append(raw.value)
        if not _is_tool(raw.value):
            break
    if not rows:
        raise SetupError(
            f"--tools {file}: it holds no tools. Write a JSON array of them, or rows with an id and `tools`."
        )
    if all(map(_is_tool, rows)) and not more:
        return _listed(rows, file.name)
    if "tools" not in rows[-1]:
        raise SetupError(
            f"--tools {file}: row {len(rows) - 1} is neither a tool (an object with `function`) nor a "
            f"row with `tools`; it has {', '.join(map(str, list(rows[-1])[:12]))}."
        )
    if rows[-1].keys() <= {"tools", "tool_choice", "parallel_tool_calls"} and not more:
        return _listed(rows[-1]["tools"], file.name)
    return None


def _listed(tools: object, where: str) -> tuple[ToolSpec, ...]:
    try:
        specs = chat_tools(tools, f"--tools {where}")
    except RecordError as error:
        raise SetupError(f"{error}.") from None
    if not specs:
        raise SetupError(f"--tools {where}: the list of tools is empty.")
    return specs


def _is_tool(row: Row) -> bool:
    if isinstance(row.get("function"), Mapping):
        return True
    return isinstance(row.get("name"), str) and "tools" not in row and any(name in row for name in _SHAPES)
