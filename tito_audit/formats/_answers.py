"""Logged answers as calls: each choice a rollout of its own, or calls that continue each other as threads.

`format_of_answers` is for rows that hold an answer and maybe its request, `PartRows` for rows that hold threads of
calls, each a `LoggedCall`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row
from tito_audit.formats._beside import beside_of, version_spans
from tito_audit.formats._calls import real_name, same_messages, stop_string, text_alone
from tito_audit.formats._columns import alternatives, first_text
from tito_audit.formats._responses import (
    FLOOR,
    Exchange,
    Generated,
    all_choices,
    choices,
    exchange,
    generated,
    is_numbers,
    lists_of_tokens,
    logged_tokens,
    message_wire,
    nvext_parts,
    scores_of,
)
from tito_audit.formats._update import at, object_at, of_calls, plain_sources, same_as
from tito_audit.formats._writer import RowFunctions, call_rows, logged_logprobs, rewritten_calls
from tito_audit.record.arrays import Ids, as_ids, empty_ids
from tito_audit.record.build import build_call_columns
from tito_audit.record.edits import Path
from tito_audit.record.message import Message, ToolSpec, as_message, as_messages, as_tools, without_arrays
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place, Rollout, Turn, Usage
from tito_audit.record.sources import CallSource, Counter, Layout, Source, Sources
from tito_audit.record.stated import NOTHING_STATED, Stated, group_key
from tito_audit.signature import Signature

_ID_KEYS = ("token_ids", "output_ids", "prompt_token_ids")
ONE_CALL = "an answer holds a single call, which cannot be left out"
_PROMPT_KEYS = ("prompt_token_ids", "input_ids", "token_ids", "prompt")
_SCORES = "output_token_logprobs"
_PARTS = ("", "meta_info", "usage")
"""Where prompt data may be: the answer or choice itself, and the objects in it."""


def choice_call(
    request: Mapping[str, Any], response: Mapping[str, Any], choice: Mapping[str, Any], number: int = 0
) -> tuple[Turn, str, bool]:
    """The call that wrote choice `number` of an answer, with its message; `response` may be the choice itself.

    Then how two copies of its ids differ; and False if it has no ids, no tokens as text, and no column for them.
    """
    tokens = generated(choice, response)
    logged = choice.get("message")
    message = None
    if isinstance(logged, Mapping):
        message = as_message({"role": "assistant", **message_wire(logged)}, "choices[].message")
    turn = _with_prompt(_turn(tokens, choice, response, message), request, response, choice, number)
    nothing = turn.prompt_ids is None and tokens.ids is None and tokens.texts is None
    answer = message if message is not None and message.role == "assistant" else None
    turn = replace(turn, answer=answer, usage=usage_of(request, response, choice, tokens.ids))
    scores = object_at(choice, "meta_info").get("output_token_logprobs")
    wants_ids = not nothing or scores is not None or any(choice.get(key) is not None for key in _ID_KEYS)
    return turn, tokens.disagreement or "", wants_ids


def rollouts_of(row: Row, place: Place, name: str) -> Sequence[Rollout]:
    """One rollout for each choice of each answer in the row, as format `name`."""
    logged = exchange(row)
    if logged is None:
        raise RecordError("not the answer of a server: an object with `choices` or `meta_info` is expected")
    base = Rollout(place, name, **request_fields(logged.request))
    before = request_messages(logged.request)
    answers = list(all_choices(logged))
    rollouts = []
    for item, (response, choice, number, _) in enumerate(answers):
        turn, odd, wants_ids = choice_call(logged.request, response, choice, number)
        messages = (*before, turn.answer) if before and turn.answer is not None else ()
        stated = replace(request_facts(logged.request, response), copies_disagree=odd)
        if len(answers) > 1:
            stated = replace(stated, group=group_key(response.get("id")))
        turns = (replace(turn, message_index=len(before) if messages else None),) if wants_ids else ()
        stated = stated if wants_ids else stated.without_ids()
        own = replace(place, item=item)
        rollouts.append(replace(base, place=own, messages=messages, turns=turns, stated=stated))
    return tuple(rollouts)


def format_of_answers(
    name: str, holds: Callable[[Exchange], bool], *, title: str, signature: Signature, precedence: int, shows: str
) -> Format:
    """The format of rows that hold answers of a server, recognized by what `holds` finds in them."""

    def matches(row: Row) -> bool:
        logged = exchange(row)
        return logged is not None and holds(logged)

    rows = call_rows(partial(rollouts_of, name=name), choice_sources, stays=ONE_CALL)
    return Format(name, title, signature, precedence, matches, **rows, shows=shows, row_is_call=True)


def request_facts(request: Mapping[str, Any], response: Mapping[str, Any]) -> Stated:
    """What a request and its answer say about the model and its template."""
    template = request.get("chat_template")
    stated = Stated(model=real_name(response.get("model")) or real_name(request.get("model")))
    return stated.with_facts(chat_template=template) if isinstance(template, str) else stated


def request_fields(request: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Rollout that a chat request states: tools and template arguments."""
    return {"tools": as_tools(request.get("tools"), "request.tools"), "template_kwargs": template_kwargs(request)}


def template_kwargs(request: Mapping[str, Any]) -> dict[str, Any]:
    """The template arguments of a chat request."""
    return dict(without_arrays(object_at(request, "chat_template_kwargs")))


def request_messages(request: Mapping[str, Any]) -> tuple[Message, ...]:
    """The messages of a chat request, without empty fields; () if it has none."""
    wires = request.get("messages")
    if isinstance(wires, list | tuple):
        wires = [message_wire(wire) if isinstance(wire, Mapping) else wire for wire in wires]
    return as_messages(wires, "request.messages")


def usage_of(
    request: Mapping[str, Any], response: Mapping[str, Any], choice: Mapping[str, Any], ids: Ids | None
) -> Usage | None:
    """What the server counted for a choice, or for all of its answer; None if that may include other tokens."""
    listed: Sequence[Mapping[str, Any]] = choices(response)
    meta, usage = object_at(choice, "meta_info"), object_at(response, "usage")
    if "completion_tokens" in meta:
        listed, usage = (choice,), meta
    elif [entry.get("index", at) for at, entry in enumerate(listed)] != list(range(len(listed))):
        return None  # choices of one answer in several rows
    if request.get("echo") or any(_whole(request.get(name)) > len(listed) for name in ("n", "best_of")):
        return None
    parts = [ids] if len(listed) == 1 else [generated(entry).ids for entry in listed]
    counted, details = _whole(usage.get("completion_tokens")), object_at(usage, "completion_tokens_details")
    if not counted or any(part is None for part in parts):
        return None
    reasoning = _whole(details.get("reasoning_tokens")) or _whole(usage.get("reasoning_tokens"))
    counted -= _whole(details.get("rejected_prediction_tokens"))
    alone = request is not response and ("model" in request or "n" in request)
    recorded, stated = sum(len(part) for part in parts if part is not None), _whole(usage.get("prompt_tokens"))
    # What a cache held is counted by most servers (vLLM: usage.prompt_tokens_details), and left out by others.
    cached = _whole(object_at(usage, "prompt_tokens_details").get("cached_tokens"))
    prompt = (stated, stated + cached) if stated and len(listed) == 1 else ()
    return Usage(counted, recorded, len(listed), alone, reasoning, prompt)


def _turn(
    tokens: Generated, choice: Mapping[str, Any], response: Mapping[str, Any], message: Message | None
) -> Turn:
    """The turn with what was generated; its prompt is added later."""
    values, columns = build_call_columns(
        empty_ids() if tokens.ids is None else tokens.ids,
        logprobs=None if tokens.ids is None else tokens.logprobs,
        other=lists_of_tokens(choice, _ID_KEYS, _may_be_column),
        sentinel=None if tokens.from_meta_info else FLOOR,
    )
    # The decoded completion; None if the log does not have it in one piece.
    if message is None:
        text = first_text(choice, ("text",))
    else:
        text = text_alone(message) if message.content is not None else None
    reason = choice.get("finish_reason")
    if reason is None:
        reason = object_at(choice, "meta_info").get("finish_reason")
    if isinstance(reason, Mapping):
        reason = reason.get("type")
    spans = next(filter(None, map(version_spans, _versions(choice, response, "weight_versions"))), ())
    versions = tuple(dict.fromkeys(version for version, _, _ in spans)) or next(
        ((str(name),) for name in _versions(choice, response, "weight_version") if isinstance(name, str | int)), ()
    )
    return Turn(
        prompt_ids=None,
        completion_ids=tokens.ids,
        completion_logprobs=values,
        completion_text=text,
        finish_reason=reason if isinstance(reason, str) else None,
        stop_string=stop_string(choice) or stop_string(object_at(choice, "meta_info")),
        weight_versions=versions,
        weight_spans=spans,
        extras=beside_of(choice, object_at(choice, "meta_info"), object_at(response, "meta_info")),
        token_texts=tokens.texts,
        columns=() if tokens.ids is None else columns,
        alternatives=alternatives(choice.get("logprobs")),
    )


def _with_prompt(
    turn: Turn, request: Mapping[str, Any], response: Mapping[str, Any], choice: Mapping[str, Any], number: int
) -> Turn:
    """The turn with its prompt as ids and as text, wherever the log holds them."""
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and not is_numbers(prompt):
        # A batch of prompts: the choices of the first come first.
        prompt = prompt[min(number * len(prompt) // len(choices(response)), len(prompt) - 1)]
    text = prompt if isinstance(prompt, str) else first_text(response, ("prompt_text",))
    if text is None and "meta_info" not in request:
        text = first_text(request, ("text",))
    turn = replace(turn, prompt_text=text)
    places = (
        ("prompt_token_ids", response.get("prompt_token_ids")),
        ("prompt_token_ids", choice.get("prompt_token_ids")),
        *(
            ("nvext.engine_data.prompt_token_ids", part.get("prompt_token_ids"))
            for _, part in nvext_parts(response)
        ),
        ("request.prompt_token_ids", request.get("prompt_token_ids")),
        ("request.input_ids", request.get("input_ids")),
        ("request.token_ids", request.get("token_ids")),
        ("request.prompt", prompt if is_numbers(prompt) else None),
    )
    for name, values in places:
        if values is not None:
            return replace(turn, prompt_ids=as_ids(values, name))
    # The prompt's ids from SGLang's prompt logprobs, unless only a part was scored.
    scored = scores_of(choice, "input_token_logprobs")
    counted = object_at(choice, "meta_info").get("prompt_tokens")
    if not scored or (isinstance(counted, int | float) and counted != len(scored)):
        return turn
    return replace(turn, prompt_ids=as_ids([token for _, token in scored], "meta_info.input_token_logprobs"))


def _versions(choice: Mapping[str, Any], response: Mapping[str, Any], name: str) -> Iterator[object]:
    """What an answer says of its weights under a name, wherever servers write it."""
    yield from (object_at(choice, "meta_info").get(name), choice.get(name))
    yield from (object_at(response, part).get(name) for part in ("meta_info", "metadata"))
    yield response.get(name)


def _whole(value: object) -> int:
    return value if type(value) is int else 0


def _may_be_column(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iuf"
    return isinstance(value, list) and all(type(x) in (int, float) for x in value)


# Where a row holds a choice, with every copy of its prompt and of its logprobs


def choice_sources(row: Row, rollouts: Sequence[Rollout], within: Path = ()) -> Sequence[Sources]:
    """The source of each choice of the answers in the row, or in the object at `within`."""
    logged = exchange(at(row, within))
    if logged is not None and within:
        request_paths, answered = (
            tuple((*within, *path) for path in paths) for paths in (logged.request_paths, logged.response_paths)
        )
        logged = replace(logged, request_paths=request_paths, response_paths=answered)
    listed = list(all_choices(logged)) if logged is not None else []
    return of_calls(
        [
            choice_source(row, logged, path if choice is response else path[:-2], path, turn)
            for turn in rollout.turns
            if logged is not None
        ]
        for (response, choice, _, path), rollout in zip(listed, rollouts, strict=True)
    )


def choice_source(row: Row, logged: Exchange, above: Path, path: Path, turn: Turn) -> CallSource:
    """The source of the choice at `path`, in the answer at `above`, with every copy that the row holds."""
    beside = [(*above, *inside) for inside, _ in nvext_parts(at(row, above))]
    holders = list(dict.fromkeys((above, path, *beside)))
    inner = [(*holder, part) if part else holder for holder in holders for part in _PARTS]
    inner = [place for place in inner if object_at(row, *place)]
    # Every copy of the prompt: in the answer, the choice and the request, also if that has a batch of prompts.
    prompts: list[Path] = []
    for holder in dict.fromkeys((*holders, *logged.request_paths)):
        for name in _PROMPT_KEYS if holder in logged.request_paths else _PROMPT_KEYS[:1]:
            value = at(row, holder).get(name)
            copies = {(*holder, name): value}
            if isinstance(value, list) and name == "prompt" and not is_numbers(value):
                copies = {(*holder, name, number): entry for number, entry in enumerate(value)}
            prompts += [
                place for place, ids in copies.items() if is_numbers(ids) and same_as(ids, turn.prompt_ids)
            ]
    # Every copy of the logprobs: OpenAI's entries, its parallel lists, SGLang's triples.
    choice, recorded = at(row, path), logged_logprobs(turn)
    scores, (name, _, values) = scores_of(choice, _SCORES), logged_tokens(choice)
    logprobs = []
    if scores is not None and same_as([value for value, _ in scores], recorded):
        logprobs.append(Source((*path, "meta_info", _SCORES), Layout.TRIPLES))
    if same_as(values, recorded):
        entries = Source((*path, "logprobs", "content"), Layout.ENTRIES)
        logprobs.append(entries if name == "logprobs.content" else Source((*path, "logprobs"), Layout.PARALLEL))
    return CallSource(
        prompts=plain_sources(prompts),
        logprobs=(
            *logprobs,
            *plain_sources(
                (*place, "completion_logprobs")
                for place in beside
                if same_as(at(row, place).get("completion_logprobs"), recorded)
            ),
        ),
        columns={name: (Source((*path, name)),) for name in choice},
        routing=tuple((*place, "routed_experts") for place in inner if "routed_experts" in at(row, place)),
        counters=tuple(map(Counter, inner)),
        scored=any(
            object_at(row, *holder, "meta_info").get("input_token_logprobs") is not None
            or at(row, holder).get("prompt_logprobs") is not None
            for holder in holders
        ),
    )


# Threads: calls of one conversation, each where its row stores it

FindSource = Callable[[], CallSource]
"""Finds where a call is in its row; called only when something has to be written."""


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One model call with its request."""

    turn: Turn
    """Without `message_index` and `prompt_messages`."""
    source: FindSource
    prompt: tuple[Message, ...] = ()
    """() if the log does not say what it was sent."""
    answer: Message | None = None
    tools: tuple[ToolSpec, ...] = ()
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    stated: Stated = NOTHING_STATED
    wants_ids: bool = True
    """False if the log has neither ids nor a column for them."""


@dataclass(frozen=True, slots=True)
class Thread:
    """One rollout of a row, and where each of its calls is stored."""

    rollout: Rollout
    sources: tuple[FindSource, ...]


@dataclass(frozen=True, slots=True)
class PartRows:
    """The `read`, `sources` and `update` of a format whose rows hold threads of calls."""

    parts: Callable[[Row, Place], Sequence[Thread]]
    """The threads of a row; their items are not numbered yet."""

    def read(self, row: Row, place: Place) -> Sequence[Rollout]:
        """One rollout for each thread."""
        rollouts = (part.rollout for part in self.parts(row, place))
        return tuple(replace(rollout, place=replace(place, item=item)) for item, rollout in enumerate(rollouts))

    def sources(self, row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
        """Where the row stores the calls of each thread."""
        return of_calls([source() for source in part.sources] for part in self.parts(row, rollouts[0].place))

    def update(self, row: Row, repaired: Sequence[RepairedRollout]) -> Sequence[Row]:
        """The row with its repaired threads; RecordError for a fork."""
        items = [part.rollout.place.item for part in repaired]
        if len(set(items)) != len(items):
            raise RecordError("this format holds each conversation once and cannot hold the parts of a fork")
        stays = "this format cannot leave out a call of a conversation"
        return (rewritten_calls(row, repaired, self.read, self.sources, stays=stays),)

    @property
    def functions(self) -> RowFunctions:
        """What a format takes from here."""
        return RowFunctions(read=self.read, sources=self.sources, update=self.update)


def chat_calls(
    root: Row, request: Mapping[str, Any], response: Mapping[str, Any], request_path: Path, path: Path
) -> list[LoggedCall]:
    """One call for each choice of a chat answer or completion at `path` of the row; [] if it has none."""
    listed = response.get("choices")
    if isinstance(listed, list | tuple) and not listed:
        return []
    logged = Exchange(request, (response,), (request_path,), (path,))
    fields, before = request_fields(request), request_messages(request)
    calls = []
    for number, choice in enumerate(choices(response)):
        at = path if choice is response else (*path, "choices", number)
        turn, odd, wants_ids = choice_call(request, response, choice, number)
        source = partial(choice_source, root, logged, path, at, turn)
        stated = replace(request_facts(request, response), copies_disagree=odd)
        calls.append(LoggedCall(turn, source, before, turn.answer, stated=stated, wants_ids=wants_ids, **fields))
    return calls


def threads(exchanges: Sequence[Sequence[LoggedCall]]) -> list[list[LoggedCall]]:
    """Calls grouped into possible conversations, in order; each exchange is given as a list of its choices.

    Calls with other models, tools or template arguments belong to another agent. Of several choices, the one
    that a later call was sent (else the first) continues the conversation; each other one is a thread by itself.
    """

    def context(call: LoggedCall) -> tuple[Any, ...]:
        return call.stated.model, call.stated.attempt, call.tools, call.template_kwargs

    lines: list[list[Sequence[LoggedCall]]] = []
    for answered in filter(None, exchanges):
        line = next((line for line in lines if context(line[0][0]) == context(answered[0])), None)
        if line is None:
            lines.append(line := [])
        line.append(answered)
    main: list[list[LoggedCall]] = []
    alternatives: list[list[LoggedCall]] = []
    for line in lines:
        main.append([])
        for number, answered in enumerate(line):
            at = _continued(answered, line[number + 1 :])
            main[-1].append(answered[at])
            alternatives += [[call] for n, call in enumerate(answered) if n != at]
    return [*main, *alternatives]


def part_of(calls: Sequence[LoggedCall], place: Place, name: str, stated: Stated) -> Thread:
    """The rollout of one thread: its messages are the last call's, and calls that fit into them have an index."""
    last = calls[-1]
    messages = last.prompt if last.answer is None or not last.prompt else (*last.prompt, last.answer)
    # Facts that only one call states and that apply to all.
    copies = next((call.stated.copies_disagree for call in calls if call.stated.copies_disagree), "")
    facts = replace(last.stated, copies_disagree=copies).overlay(stated)
    rollout = Rollout(place, name, messages, last.tools, last.template_kwargs, stated=facts)
    if not any(call.wants_ids for call in calls):
        return Thread(replace(rollout, stated=facts.without_ids()), ())
    turns: list[Turn] = []
    limit = len(messages)
    for call in reversed(calls):
        index = len(call.prompt)
        fits = call.answer is not None and 0 < index < limit
        if fits and call.answer is not None and same_messages(messages[: index + 1], (*call.prompt, call.answer)):
            limit = index
            turns.append(replace(call.turn, message_index=index))
        else:
            turns.append(replace(call.turn, prompt_messages=call.prompt or None))
    return Thread(replace(rollout, turns=tuple(reversed(turns))), tuple(call.source for call in calls))


def _continued(exchange: Sequence[LoggedCall], after: Sequence[Sequence[LoggedCall]]) -> int:
    """The first choice whose answer a later call was sent; else the first."""
    for number, call in enumerate(exchange if len(exchange) > 1 else ()):
        if call.answer is not None and call.prompt:
            conversation = (*call.prompt, call.answer)
            if any(same_messages(later[0].prompt[: len(conversation)], conversation) for later in after):
                return number
    return 0
