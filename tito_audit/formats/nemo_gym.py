"""NeMo-Gym rollouts: a request, a Responses object with ids on its output items, and a reward.

The same three token fields are read from assistant messages in chat form, which is what NeMo-Gym sends to
its model servers, and from a Responses object logged without its request.
NVIDIA-NeMo/Gym `nemo_gym/rollout_collection.py`, `openai_utils.py`, `responses_converter.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import model_name, only_text, same_messages, with_ascending_messages
from tito_audit.formats._columns import as_logged, as_object, has_entries, is_list, same_ids
from tito_audit.formats._extras import read_extras
from tito_audit.formats._responses import (
    ITEMS_UNREAD,
    TEXT_KEYS,
    TOKEN_KEYS,
    Item,
    ItemMessage,
    chat_tools,
    drop_empty_fields,
    is_response_object,
    nonempty_list,
    nonempty_text,
    parse_items,
    parse_request,
    per_token_lists,
    unknown_item_types,
)
from tito_audit.formats._update import object_at, sources_at, sources_of_calls, value_at, with_values
from tito_audit.formats._writer import (
    CallChange,
    check_written,
    count_tokens,
    find_call_changes,
    read_before,
    updated_counts,
)
from tito_audit.record.arrays import Ids, as_ids, empty_ids
from tito_audit.record.build import build_call_columns
from tito_audit.record.edits import ABSENT, Edit, Path, apply_edits
from tito_audit.record.message import Message, as_message, as_tools
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout, Turn
from tito_audit.record.sources import CallSource, Sources
from tito_audit.record.stated import Stated, Unread, group_key

CALL_KEYS = (*TOKEN_KEYS, *TEXT_KEYS, "routed_experts")
"""Keys of an item or message that hold a call's tokens and that no template reads."""


@dataclass(frozen=True, slots=True)
class GymCall:
    """One model call: what it was sent, what it wrote, and the items that hold it."""

    prompt: tuple[Message, ...]
    answer: Message
    token_item: Item | None
    """The item or message that holds its tokens."""
    items: tuple[Item, ...]
    """All items that it wrote, including `token_item`."""
    transition: int | None = None
    """The index of the inner list of the output that it ends; None if the output is one list."""


@dataclass(frozen=True, slots=True)
class GymLayout:
    """The messages and calls of a row."""

    messages: tuple[Message, ...]
    calls: tuple[GymCall, ...]
    has_request: bool
    """Whether the row holds what came before the output."""


def is_chat_form(row: Row) -> bool:
    """Whether the row is in chat form, with the tokens on messages."""
    return "responses_create_params" not in row and "output" not in row


def output_path(row: Row) -> Path:
    """The path of the list that holds the calls: messages or output items."""
    if is_chat_form(row):
        return ("messages",)
    return ("response", "output") if "responses_create_params" in row else ("output",)


def request_and_response(row: Row) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The request and the answer of a row that is not in chat form."""
    response = row["response"] if "responses_create_params" in row else row
    refusal = "responses_create_params is not an object, so the request is unknown"
    return as_object(row.get("responses_create_params", row), refusal), response


def read_layout(row: Row) -> GymLayout:
    """All messages of a row and its calls, in order."""
    messages: tuple[Message, ...] = ()
    calls: list[GymCall] = []
    if is_chat_form(row):
        wires = row["messages"]
        messages = tuple(
            as_message(drop_empty_fields(wire, CALL_KEYS) if isinstance(wire, Mapping) else wire, f"messages[{i}]")
            for i, wire in enumerate(wires)
        )
        calls = [
            GymCall(messages[:i], messages[i], wire, (wire,))
            for i, wire in enumerate(wires)
            if messages[i].role == "assistant" and any(wire.get(key) is not None for key in CALL_KEYS)
        ]
        return GymLayout(messages, tuple(calls), True)
    params, response = request_and_response(row)
    output, agent_input = response["output"], response.get("agent_input")
    # The input is the request's, or the agent's own version of it.
    if isinstance(agent_input, list):
        before = parse_request({**params, "input": agent_input}, "response.agent_input")
    else:
        before = parse_request(params, "responses_create_params")
        before += parse_items(nonempty_list(response.get("seed_obs")), "response.seed_obs")
    if len(output) and isinstance(output[0], list | tuple):
        # In a list of lists, each starts with the history of its last call.
        for number, inner in enumerate(output):
            own_steps = parse_items(inner, f"response.output[{number}]")
            system = [step for step in before if not step.items and step.message.role == "system"]
            # A history that starts a conversation already holds the request, but not its instructions.
            own_steps = [
                *(system if starts_conversation([step.message for step in own_steps]) else before),
                *own_steps,
            ]
            messages, own = _messages_and_calls(own_steps, 0, number)
            calls.extend(own[-1:])
    else:
        messages, calls = _messages_and_calls([*before, *parse_items(output, "response.output")], len(before))
        # Calls before the first with token fields are history; if none has any, all are calls.
        first = next((i for i, call in enumerate(calls) if call.token_item is not None), 0)
        calls = calls[first:] if calls and holds_tokens(calls[first].token_item or {}) else calls
    return GymLayout(messages, tuple(calls), bool(before))


def starts_conversation(messages: Sequence[Message]) -> bool:
    """Whether the first message can start a conversation: it is neither an answer nor a tool's."""
    return bool(messages) and messages[0].role not in ("assistant", "tool")


def holds_tokens(item: Item) -> bool:
    """Whether an item or message has ids in its token fields."""
    return has_entries(item.get("prompt_token_ids")) or has_entries(item.get("generation_token_ids"))


def hit_token_limit(response: Mapping[str, Any]) -> bool:
    """Whether the response says that its last call hit the token limit."""
    return nonempty_text(object_at(response, "incomplete_details").get("reason")) == "max_output_tokens"


def _messages_and_calls(
    all_steps: Sequence[ItemMessage], first: int, transition: int | None = None
) -> tuple[tuple[Message, ...], list[GymCall]]:
    """The messages of all steps, and the calls from step `first` on; earlier answers are history."""
    messages = tuple(step.message for step in all_steps)
    calls = [
        GymCall(messages[:i], step.message, step.token_item, step.items, transition)
        for i, step in enumerate(all_steps)
        if i >= first and step.is_call
    ]
    return messages, calls


_TokenCarrier: TypeAlias = tuple[Path, Item, tuple[int, ...]]
"""The path of an item or message with token fields, itself, and the calls whose tokens they are: one, unless
several hold the same tokens; none if no call of the row has them."""


@dataclass(frozen=True, slots=True)
class _LocatedRow:
    """A row, its rollout, and where the row stores each call."""

    row: Row
    rollout: Rollout
    layout: GymLayout
    output: Path
    items: tuple[tuple[Path, ...], ...]
    """For each call the paths of all items that it wrote, in order."""
    carriers: tuple[_TokenCarrier, ...]


def update(row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
    """The row with its repaired rollout, or a row for each part of a fork; the same object if nothing changed."""
    (rollout,) = read_before(row, repaired, read)
    changes = [find_call_changes(rollout, part) for part in repaired]
    if len(repaired) == 1 and not changes[0] and len(repaired[0].turns_from) == len(rollout.turns):
        return (row,)
    log_row = _locate(row, rollout)
    rows = []
    for part, changed in zip(repaired, changes, strict=True):
        numbers = part.turns_from
        edits = list(_item_edits(log_row, changed))
        # Counts are of all calls or of the last one.
        ways = [[count_tokens(turns), count_tokens(turns[-1:])] for turns in (rollout.turns, part.rollout.turns)]
        for path in ((), ("usage",), ("response",), ("response", "usage")):
            counts = updated_counts(object_at(row, *path), *ways)
            edits += [Edit((*path, name), count) for name, count in counts.items()]
        new = apply_edits(row, edits)
        if len(numbers) < len(rollout.turns):
            if not numbers:
                raise RecordError("a part of the rollout has no calls, so it has no row")
            new = _part_of_row(log_row, new, numbers)
        (again,) = read(new, rollout.place)
        check_written(again, part, rollout)
        rows.append(new)
    return tuple(rows)


def sources(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
    """Where the row stores the columns of its calls."""
    (rollout,) = rollouts
    carriers = _locate(row, rollout).carriers if rollout.turns else ()
    calls = []
    for number, turn in enumerate(rollout.turns):
        own = [(path, item) for path, item, numbers in carriers if number in numbers]
        there = {c.name: [(*path, c.name) for path, item in own if c.name in item] for c in turn.columns}
        calls.append(CallSource(columns={name: sources_at(paths) for name, paths in there.items()}))
    return sources_of_calls([calls])


def _locate(row: Row, rollout: Rollout) -> _LocatedRow:
    layout, output = read_layout(row), output_path(row)
    if len(layout.calls) != len(rollout.turns):
        raise RecordError("the row holds answers without tokens, so there is no place to write them")
    listed, at = value_at(row, output), 0
    items: list[tuple[Path, ...]] = []
    for call in layout.calls:
        paths: list[Path] = []
        if call.transition is not None:
            # A list repeats the earlier calls; the last is its own.
            inner = listed[call.transition]
            last = len(inner)
            for item in reversed(call.items):
                last = next((i for i in range(last - 1, -1, -1) if inner[i] is item), -1)
                paths.insert(0, (*output, call.transition, last))
            if last < 0:
                raise RecordError(f"list {call.transition} of the output holds no call of its own")
        else:
            # The output holds the items in the order of the calls.
            for item in call.items:
                at = next(i for i in range(at, len(listed)) if listed[i] is item) + 1
                paths.append((*output, at - 1))
        items.append(tuple(paths))
    own = {path: number for number, paths in enumerate(items) for path in paths}
    carriers: list[_TokenCarrier] = []
    for path, item in _walk_objects(row, ()):
        turns: tuple[int, ...] = (own[path],) if path in own else ()
        if path not in own:
            if not holds_tokens(item):
                continue
            with suppress(RecordError):
                prompt, completion = _ids(item, "prompt_token_ids"), _ids(item, "generation_token_ids")
                turns = tuple(
                    number
                    for number, turn in enumerate(rollout.turns)
                    if same_ids(prompt, turn.prompt_ids) and same_ids(completion, turn.completion_ids)
                )
        carriers.append((path, item, turns))
    return _LocatedRow(row, rollout, layout, output, tuple(items), tuple(carriers))


def _walk_objects(value: Any, path: Path) -> Iterator[tuple[Path, Item]]:
    """Every object in the row with its path, except in the rollout's inputs, which never change."""
    if isinstance(value, Mapping):
        yield path, value
        for key, inner in value.items():
            inputs = ("responses_create_params", "agent_input", "seed_obs")
            if key not in inputs and isinstance(inner, Mapping | list | tuple):
                yield from _walk_objects(inner, (*path, key))
    elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping | list | tuple):
        for number, inner in enumerate(value):
            if isinstance(inner, Mapping | list | tuple):
                yield from _walk_objects(inner, (*path, number))


def _item_edits(log_row: _LocatedRow, changes: Mapping[int, CallChange]) -> Iterator[Edit]:
    for path, item, numbers in log_row.carriers:
        wanted = [changes.get(number) for number in numbers]
        change = next((turn for turn in wanted if turn is not None), None)
        if change is None:
            continue
        if not all(turn is not None and same_ids(turn.prompt_ids, change.prompt_ids) for turn in wanted):
            raise RecordError(
                f"calls {' and '.join(map(str, numbers))} hold the same tokens and would get different "
                "ones; the log does not say which of them a copy repeats"
            )
        # A copy changes only in fields that had the call's old values.
        before, prompt, fields = change.before, change.prompt_ids, {}
        if prompt is not None and same_ids(_ids(item, "prompt_token_ids"), before.prompt_ids):
            fields["prompt_token_ids"] = as_logged(prompt, item["prompt_token_ids"])
            if item.get("routed_experts") is not None:
                fields["routed_experts"] = None
            usage, lengths = item.get("usage"), ([count_tokens([before])], [count_tokens([change.after])])
            if isinstance(usage, Mapping):
                fields["usage"] = with_values(usage, updated_counts(usage, *lengths))
            fields |= updated_counts(item, *lengths)
        columns: dict[str, Any] = dict(change.columns)
        if change.logprobs is not None:
            columns["generation_log_probs"] = change.logprobs
        was = {column.name: column.values for column in before.columns}
        for name, values in columns.items():
            if values is None and item.get(name) is not None:
                fields[name] = None
            elif values is not None and is_list(old := item.get(name)) and as_logged(was[name], old) is old:
                fields[name] = as_logged(values, old)
        new = with_values(item, fields)
        if new is not item:
            yield Edit(path, new)


def _part_of_row(log_row: _LocatedRow, row: Row, numbers: Collection[int]) -> Row:
    """The row without the tokens of calls of other parts; their text stays, since prompts repeat it.

    Its output ends with the last call of the part, and leaves out inner lists of other parts.
    """
    calls, last = log_row.layout.calls, max(numbers)
    for number, call in enumerate(calls):
        between = min(numbers) < number < last and number not in numbers
        if between and call.transition is None and not is_chat_form(log_row.row):
            raise RecordError(
                f"call {number} is between the calls of one part and belongs to another; in one list of items it "
                "would read as a call that lost its tokens"
            )
    tokens: list[Edit] = []
    for path, item, turns in log_row.carriers:
        if path[: len(log_row.output)] == log_row.output and not set(turns) & set(numbers):
            columns = {c.name for n in turns for c in log_row.rollout.turns[n].columns}
            tokens += [Edit((*path, name), ABSENT) for name in item if name in CALL_KEYS or name in columns]
    row = apply_edits(row, tokens)
    output = value_at(row, log_row.output)
    ends = last == len(calls) - 1
    cuts: list[Edit] = []
    if calls[last].transition is not None:
        own = {call.transition: number for number, call in enumerate(calls)}
        stop = len(output) if ends else calls[last].transition + 1  # type: ignore[operator]
        left = [inner for i, inner in enumerate(output) if (own[i] in numbers if i in own else i < stop)]
        cuts.append(Edit(log_row.output, left))
    elif not ends:
        stop = int(log_row.items[last][-1][-1]) + 1
        cuts.append(Edit(log_row.output, list(output[:stop])))
    if not ends and not is_chat_form(log_row.row) and hit_token_limit(request_and_response(log_row.row)[1]):
        # It is said of the last call.
        cuts.append(Edit((*log_row.output[:-1], "incomplete_details"), None))
    part: Row = apply_edits(row, cuts)
    return part


def _ids(item: Item, name: str) -> Ids | None:
    value = item.get(name)
    return None if value is None else as_ids(value, name)


def matches(row: Row) -> bool:
    if "responses_create_params" in row:
        response = row.get("response", row)
        return isinstance(response, dict | Mapping) and isinstance(response.get("output"), Sequence)
    if _any_holds_ids(row.get("messages")):
        return True
    return "object" in row and is_response_object(row) and _any_holds_ids(row["output"])


def read(row: Row, place: Place) -> Sequence[Rollout]:
    layout = read_layout(row)
    messages = layout.messages
    turns: tuple[Turn, ...] = ()
    token_items = [call.token_item for call in layout.calls if call.token_item is not None]
    if token_items:
        turns = with_ascending_messages([_read_turn(call, messages) for call in layout.calls], messages)
    params, response = (row, row) if is_chat_form(row) else request_and_response(row)
    stated = Stated(model=model_name(response.get("model")), group=group_key(row.get("_ng_task_index")))
    wants_ids = any(item.get(key) is not None for item in token_items for key in TOKEN_KEYS)
    stated = replace(stated.with_facts(mask_sample=row.get("mask_sample")), ids_wanted=wants_ids)
    stated = replace(stated, converted_tools=True)
    if is_chat_form(row):
        tools = as_tools(row.get("tools"), "tools")
        return (Rollout(place, FORMAT.name, messages, tools, turns=turns, stated=stated),)
    if turns and hit_token_limit(response):
        turns = (*turns[:-1], replace(turns[-1], finish_reason="length"))
    output = response["output"]
    inner = output if len(output) and isinstance(output[0], list | tuple) else [output]
    unread = tuple(sorted({kind for items in inner for kind in unknown_item_types(items)}))
    if unread:
        stated = stated.with_facts(items_not_read=unread).not_read(Unread.MESSAGES, ITEMS_UNREAD)
    if unread or not (layout.has_request or starts_conversation(messages)):
        # Incomplete messages would render as if nothing were missing.
        messages = ()
        turns = tuple(replace(turn, message_index=None, prompt_messages=None) for turn in turns)
    tools = chat_tools(nonempty_list(params.get("tools"), response.get("tools")), "responses_create_params.tools")
    return (Rollout(place, FORMAT.name, messages, tools, turns=turns, stated=stated),)


def _read_turn(call: GymCall, messages: Sequence[Message]) -> Turn:
    token_item = call.token_item or {}
    index = len(call.prompt)
    in_place = index < len(messages) and same_messages(messages[: index + 1], (*call.prompt, call.answer))
    text = nonempty_text(token_item.get("generation_str")) or only_text(call.answer)
    turn = Turn(
        prompt_ids=None,
        completion_ids=None,
        message_index=index if in_place else None,
        prompt_messages=None if in_place else call.prompt,
        prompt_text=nonempty_text(token_item.get("prompt_str")),
        completion_text=text,
        finish_reason="length" if nonempty_text(token_item.get("status")) == "incomplete" else None,
    )
    prompt, generated = token_item.get("prompt_token_ids"), token_item.get("generation_token_ids")
    if not has_entries(prompt) and not has_entries(generated):
        return turn
    completion_ids = None if generated is None else as_ids(generated, "generation_token_ids")
    logprobs = token_item.get("generation_log_probs")
    values, columns = build_call_columns(
        empty_ids() if completion_ids is None else completion_ids,
        logprobs=None if logprobs is None else ("generation_log_probs", logprobs),
        other=per_token_lists(token_item, TOKEN_KEYS, of_item=True),
    )
    return replace(
        turn,
        prompt_ids=None if prompt is None else as_ids(prompt, "prompt_token_ids"),
        completion_ids=completion_ids,
        completion_logprobs=values,
        columns=columns,
        extras=read_extras(token_item),
    )


def _any_holds_ids(values: object) -> bool:
    if not isinstance(values, list | Sequence) or isinstance(values, str):
        return False
    for value in values:
        if isinstance(value, dict | Mapping) and value.get("generation_token_ids") is not None:
            return True
    return False


FORMAT = Format(
    name="nemo_gym",
    title="NeMo-Gym rollouts",
    signature=Signature("{responses_create_params} + {response.output}; or messages with {generation_token_ids}"),
    precedence=50,
    matches=matches,
    read=read,
    sources=sources,
    update=update,
    shows="Messages, tools and every call: its complete prompt, what was sampled, its logprobs. No tokenizer "
    "is named and no loss mask is written: what was generated is trained.",
)
