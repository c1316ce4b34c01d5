"""Logged responses of servers as calls: each choice as a rollout, or calls that continue each other as a thread.

`response_format` is for rows that hold a response and maybe its request, `thread_rows` for rows that hold threads
of calls, each a `LoggedCall`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._calls import model_name, only_text, same_messages, stop_string
from tito_audit.formats._columns import first_text, read_alternatives
from tito_audit.formats._extras import read_extras, version_spans
from tito_audit.formats._responses import (
    UNAVAILABLE_LOGPROB,
    Exchange,
    GeneratedTokens,
    all_choices,
    choices,
    drop_empty_fields,
    find_exchange,
    may_be_token_ids,
    nvext_parts,
    per_token_lists,
    read_generated_tokens,
    read_openai_logprobs,
    read_sglang_scores,
)
from tito_audit.formats._update import equals_numbers, object_at, sources_at, sources_of_calls, value_at
from tito_audit.formats._writer import RowFunctions, listed_calls, logged_logprobs
from tito_audit.record.arrays import Ids, as_ids, empty_ids
from tito_audit.record.build import build_call_columns
from tito_audit.record.edits import Path
from tito_audit.record.message import Message, ToolSpec, as_message, as_messages, as_tools, without_arrays
from tito_audit.record.rollout import Place, Rollout, Turn, Usage
from tito_audit.record.sources import CallSource, Counter, Layout, Source, Sources
from tito_audit.record.stated import NOTHING_STATED, Stated, group_key

_ID_KEYS = ("token_ids", "output_ids", "prompt_token_ids")
ONE_CALL_REFUSAL = "an answer holds a single call, which cannot be left out"
_PROMPT_KEYS = ("prompt_token_ids", "input_ids", "token_ids", "prompt")
_SCORES = "output_token_logprobs"
_PROMPT_HOLDERS = ("", "meta_info", "usage")
"""Where a response or choice may keep data of its prompt: itself, and these objects in it."""


def read_choice(
    request: Mapping[str, Any], response: Mapping[str, Any], choice: Mapping[str, Any], number: int = 0
) -> tuple[Turn, str, bool]:
    """The call that sampled choice `number` of a response, with its message; `response` may be the choice itself.

    Also how two copies of its ids differ, "" if they do not; and whether ids are wanted: False if it has no ids,
    no tokens as text, and no column for either.
    """
    tokens = read_generated_tokens(choice, response)
    logged = choice.get("message")
    message = None
    if isinstance(logged, Mapping):
        message = as_message({"role": "assistant", **drop_empty_fields(logged)}, "choices[].message")
    turn = _turn_without_prompt(tokens, choice, response, message)
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and not may_be_token_ids(prompt):
        # A batch of prompts; the choices of the first prompt come first.
        prompt = prompt[min(number * len(prompt) // len(choices(response)), len(prompt) - 1)]
    prompt_text = prompt if isinstance(prompt, str) else first_text(response, ("prompt_text",))
    if prompt_text is None and "meta_info" not in request:
        prompt_text = first_text(request, ("text",))
    copies = (
        ("prompt_token_ids", response.get("prompt_token_ids")),
        ("prompt_token_ids", choice.get("prompt_token_ids")),
        *(
            ("nvext.engine_data.prompt_token_ids", part.get("prompt_token_ids"))
            for _, part in nvext_parts(response)
        ),
        ("request.prompt_token_ids", request.get("prompt_token_ids")),
        ("request.input_ids", request.get("input_ids")),
        ("request.token_ids", request.get("token_ids")),
        ("request.prompt", prompt if may_be_token_ids(prompt) else None),
    )
    where, prompt_ids = next((copy for copy in copies if copy[1] is not None), ("", None))
    if prompt_ids is None:
        # SGLang's prompt logprobs hold the ids of the prompt, unless only a part of it was scored.
        scored = read_sglang_scores(choice, "input_token_logprobs")
        counted = object_at(choice, "meta_info").get("prompt_tokens")
        if scored and (not isinstance(counted, int | float) or counted == len(scored)):
            where, prompt_ids = "meta_info.input_token_logprobs", [token for _, token in scored]
    turn = replace(
        turn,
        prompt_text=prompt_text,
        prompt_ids=None if prompt_ids is None else as_ids(prompt_ids, where),
        answer=message if message is not None and message.role == "assistant" else None,
        usage=read_usage(request, response, choice, tokens.ids),
    )
    has_tokens = any(part is not None for part in (turn.prompt_ids, tokens.ids, tokens.texts))
    scores = object_at(choice, "meta_info").get("output_token_logprobs")
    wants_ids = has_tokens or scores is not None or any(choice.get(key) is not None for key in _ID_KEYS)
    return turn, tokens.disagreement or "", wants_ids


def read_choices(row: Row, place: Place, name: str) -> Sequence[Rollout]:
    """One rollout for each choice of each response in the row, as format `name`."""
    logged = find_exchange(row)
    if logged is None:
        raise RecordError("not the answer of a server: an object with `choices` or `meta_info` is expected")
    base = Rollout(place, name, **request_fields(logged.request))
    before = request_messages(logged.request)
    answers = list(all_choices(logged))
    rollouts = []
    for item, (response, choice, number, _) in enumerate(answers):
        turn, conflict, wants_ids = read_choice(logged.request, response, choice, number)
        messages = (*before, turn.answer) if before and turn.answer is not None else ()
        stated = replace(stated_by_request(logged.request, response), copies_disagree=conflict)
        if len(answers) > 1:
            stated = replace(stated, group=group_key(response.get("id")))
        turns = (replace(turn, message_index=len(before) if messages else None),) if wants_ids else ()
        stated = stated if wants_ids else stated.without_ids()
        own = replace(place, item=item)
        rollouts.append(replace(base, place=own, messages=messages, turns=turns, stated=stated))
    return tuple(rollouts)


def response_format(
    name: str, holds: Callable[[Exchange], bool], *, title: str, signature: Signature, precedence: int, shows: str
) -> Format:
    """The format of rows that hold responses of a server; `holds` says whether they are that server's."""

    def matches(row: Row) -> bool:
        logged = find_exchange(row)
        return logged is not None and holds(logged)

    rows = listed_calls(partial(read_choices, name=name), choice_sources, drop_error=ONE_CALL_REFUSAL)
    return Format(name, title, signature, precedence, matches, **rows, shows=shows, row_is_call=True)


def stated_by_request(request: Mapping[str, Any], response: Mapping[str, Any]) -> Stated:
    """The model and the chat template that a request and its response state."""
    template = request.get("chat_template")
    stated = Stated(model=model_name(response.get("model")) or model_name(request.get("model")))
    return stated.with_facts(chat_template=template) if isinstance(template, str) else stated


def request_fields(request: Mapping[str, Any]) -> dict[str, Any]:
    """The Rollout fields that a chat request states: tools and template arguments."""
    return {"tools": as_tools(request.get("tools"), "request.tools"), "template_kwargs": template_kwargs(request)}


def template_kwargs(request: Mapping[str, Any]) -> dict[str, Any]:
    """The template arguments of a chat request."""
    return dict(without_arrays(object_at(request, "chat_template_kwargs")))


def request_messages(request: Mapping[str, Any]) -> tuple[Message, ...]:
    """The messages of a chat request without their empty fields; () if it has none."""
    wires = request.get("messages")
    if isinstance(wires, list | tuple):
        wires = [drop_empty_fields(wire) if isinstance(wire, Mapping) else wire for wire in wires]
    return as_messages(wires, "request.messages")


def read_usage(
    request: Mapping[str, Any], response: Mapping[str, Any], choice: Mapping[str, Any], ids: Ids | None
) -> Usage | None:
    """The token counts of a choice or of its whole response; None if they may count tokens that are not logged."""
    listed: Sequence[Mapping[str, Any]] = choices(response)
    meta, usage = object_at(choice, "meta_info"), object_at(response, "usage")
    if "completion_tokens" in meta:
        listed, usage = (choice,), meta
    elif [entry.get("index", at) for at, entry in enumerate(listed)] != list(range(len(listed))):
        return None  # the choices of one response are in several rows
    if request.get("echo") or any(_int_or_zero(request.get(name)) > len(listed) for name in ("n", "best_of")):
        return None
    parts = [ids] if len(listed) == 1 else [read_generated_tokens(entry).ids for entry in listed]
    counted, details = _int_or_zero(usage.get("completion_tokens")), object_at(usage, "completion_tokens_details")
    if not counted or any(part is None for part in parts):
        return None
    reasoning = _int_or_zero(details.get("reasoning_tokens")) or _int_or_zero(usage.get("reasoning_tokens"))
    counted -= _int_or_zero(details.get("rejected_prediction_tokens"))
    alone = request is not response and ("model" in request or "n" in request)
    recorded, stated = (
        sum(len(part) for part in parts if part is not None),
        _int_or_zero(usage.get("prompt_tokens")),
    )
    # Most servers count cached tokens (vLLM: usage.prompt_tokens_details), others leave them out.
    cached = _int_or_zero(object_at(usage, "prompt_tokens_details").get("cached_tokens"))
    prompt = (stated, stated + cached) if stated and len(listed) == 1 else ()
    return Usage(counted, recorded, len(listed), alone, reasoning, prompt)


def _turn_without_prompt(
    tokens: GeneratedTokens, choice: Mapping[str, Any], response: Mapping[str, Any], message: Message | None
) -> Turn:
    """The turn of a choice, without its prompt."""
    values, columns = build_call_columns(
        empty_ids() if tokens.ids is None else tokens.ids,
        logprobs=None if tokens.ids is None else tokens.logprobs,
        other=per_token_lists(choice, _ID_KEYS),
        sentinel=None if tokens.from_meta_info else UNAVAILABLE_LOGPROB,
    )
    if message is None:
        text = first_text(choice, ("text",))
    else:
        text = only_text(message) if message.content is not None else None
    reason = choice.get("finish_reason")
    if reason is None:
        reason = object_at(choice, "meta_info").get("finish_reason")
    if isinstance(reason, Mapping):
        reason = reason.get("type")
    spans = next(filter(None, map(version_spans, _logged_versions(choice, response, "weight_versions"))), ())
    versions = tuple(dict.fromkeys(version for version, _, _ in spans)) or next(
        (
            (str(name),)
            for name in _logged_versions(choice, response, "weight_version")
            if isinstance(name, str | int)
        ),
        (),
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
        extras=read_extras(choice, object_at(choice, "meta_info"), object_at(response, "meta_info")),
        token_texts=tokens.texts,
        columns=() if tokens.ids is None else columns,
        alternatives=read_alternatives(choice.get("logprobs")),
    )


def _logged_versions(choice: Mapping[str, Any], response: Mapping[str, Any], name: str) -> Iterator[object]:
    """The values under `name` in every object where servers write weight versions."""
    yield from (object_at(choice, "meta_info").get(name), choice.get(name))
    yield from (object_at(response, part).get(name) for part in ("meta_info", "metadata"))
    yield response.get(name)


def _int_or_zero(value: object) -> int:
    return value if type(value) is int else 0


def choice_sources(row: Row, rollouts: Sequence[Rollout], within: Path = ()) -> Sequence[Sources]:
    """The source of each choice of the responses in the row, or in its object at `within`."""
    logged = find_exchange(value_at(row, within))
    if logged is not None and within:
        request_paths, answered = (
            tuple((*within, *path) for path in paths) for paths in (logged.request_paths, logged.response_paths)
        )
        logged = replace(logged, request_paths=request_paths, response_paths=answered)
    listed = list(all_choices(logged)) if logged is not None else []
    return sources_of_calls(
        [
            choice_source(row, logged, path if choice is response else path[:-2], path, turn)
            for turn in rollout.turns
            if logged is not None
        ]
        for (response, choice, _, path), rollout in zip(listed, rollouts, strict=True)
    )


def choice_source(row: Row, logged: Exchange, above: Path, path: Path, turn: Turn) -> CallSource:
    """The source of the choice at `path`, in the response at `above`, with every copy that the row holds."""
    beside = [(*above, *inside) for inside, _ in nvext_parts(value_at(row, above))]
    holders = list(dict.fromkeys((above, path, *beside)))
    inner = [(*holder, part) if part else holder for holder in holders for part in _PROMPT_HOLDERS]
    inner = [place for place in inner if object_at(row, *place)]
    # Copies of the prompt are in the response, the choice and the request, which may hold a batch of prompts.
    prompts: list[Path] = []
    for holder in dict.fromkeys((*holders, *logged.request_paths)):
        for name in _PROMPT_KEYS if holder in logged.request_paths else _PROMPT_KEYS[:1]:
            value = value_at(row, holder).get(name)
            copies = {(*holder, name): value}
            if isinstance(value, list) and name == "prompt" and not may_be_token_ids(value):
                copies = {(*holder, name, number): entry for number, entry in enumerate(value)}
            prompts += [
                place
                for place, ids in copies.items()
                if may_be_token_ids(ids) and equals_numbers(ids, turn.prompt_ids)
            ]
    # Copies of the logprobs are OpenAI's entries or parallel lists, and SGLang's triples.
    choice, recorded = value_at(row, path), logged_logprobs(turn)
    scores, (name, _, values) = read_sglang_scores(choice, _SCORES), read_openai_logprobs(choice)
    logprobs = []
    if scores is not None and equals_numbers([value for value, _ in scores], recorded):
        logprobs.append(Source((*path, "meta_info", _SCORES), Layout.TRIPLES))
    if equals_numbers(values, recorded):
        entries = Source((*path, "logprobs", "content"), Layout.ENTRIES)
        logprobs.append(entries if name == "logprobs.content" else Source((*path, "logprobs"), Layout.PARALLEL))
    return CallSource(
        prompts=sources_at(prompts),
        logprobs=(
            *logprobs,
            *sources_at(
                (*place, "completion_logprobs")
                for place in beside
                if equals_numbers(value_at(row, place).get("completion_logprobs"), recorded)
            ),
        ),
        columns={name: (Source((*path, name)),) for name in choice},
        routing=tuple((*place, "routed_experts") for place in inner if "routed_experts" in value_at(row, place)),
        counters=tuple(map(Counter, inner)),
        scored=any(
            object_at(row, *holder, "meta_info").get("input_token_logprobs") is not None
            or value_at(row, holder).get("prompt_logprobs") is not None
            for holder in holders
        ),
    )


FindSource = Callable[[], CallSource]
"""Finds where a row stores a call; only called to write or convert the row."""


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One logged model call: what it was sent, what it answered, and where its row stores it."""

    turn: Turn
    """Without `message_index` and `prompt_messages`."""
    source: FindSource
    prompt: tuple[Message, ...] = ()
    """The messages that it was sent; () if the log does not say."""
    answer: Message | None = None
    tools: tuple[ToolSpec, ...] = ()
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    stated: Stated = NOTHING_STATED
    wants_ids: bool = True
    """False if the log has neither ids nor a column for them."""
    retries: tuple[LoggedCall, ...] = ()
    """Earlier calls with the same prompt, which changes in them too."""

    def find_source(self) -> CallSource:
        """Where its row stores the call and its retries."""
        source, retries = self.source(), tuple((call.turn, call.find_source()) for call in self.retries)
        return replace(source, retries=retries) if retries else source


@dataclass(frozen=True, slots=True)
class Thread:
    """A rollout whose calls continue each other, and where its row stores each call."""

    rollout: Rollout
    sources: tuple[FindSource, ...]


def thread_rows(read_threads: Callable[[Row, Place], Sequence[Thread]]) -> RowFunctions:
    """The functions of a format whose rows hold threads; `read_threads` returns those of a row with its place."""

    def read(row: Row, place: Place) -> Sequence[Rollout]:
        return tuple(
            replace(thread.rollout, place=replace(place, item=item))
            for item, thread in enumerate(read_threads(row, place))
        )

    def sources(row: Row, rollouts: Sequence[Rollout]) -> Sequence[Sources]:
        threads = read_threads(row, rollouts[0].place)
        return sources_of_calls([source() for source in thread.sources] for thread in threads)

    return listed_calls(
        read,
        sources,
        drop_error="this format cannot leave out a call of a conversation",
        fork_error="this format holds each conversation once and cannot hold the parts of a fork",
    )


def chat_calls(
    root: Row, request: Mapping[str, Any], response: Mapping[str, Any], request_path: Path, path: Path
) -> list[LoggedCall]:
    """One call for each choice of the chat or completions response at `path` of the row; [] if it has none."""
    listed = response.get("choices")
    if isinstance(listed, list | tuple) and not listed:
        return []
    logged = Exchange(request, (response,), (request_path,), (path,))
    fields, before = request_fields(request), request_messages(request)
    calls = []
    for number, choice in enumerate(choices(response)):
        at = path if choice is response else (*path, "choices", number)
        turn, conflict, wants_ids = read_choice(request, response, choice, number)
        source = partial(choice_source, root, logged, path, at, turn)
        stated = replace(stated_by_request(request, response), copies_disagree=conflict)
        calls.append(LoggedCall(turn, source, before, turn.answer, stated=stated, wants_ids=wants_ids, **fields))
    return calls


def group_into_threads(exchanges: Sequence[Sequence[LoggedCall]]) -> list[list[LoggedCall]]:
    """Calls grouped by conversation, in order; each exchange is the list of its choices.

    Calls with another model, attempt, tools or template arguments are another conversation. Of several choices,
    the one that a later call was sent, else the first, continues it; every other choice is a thread of its own.
    """

    def context(call: LoggedCall) -> tuple[Any, ...]:
        return call.stated.model, call.stated.attempt, call.tools, call.template_kwargs

    conversations: list[list[Sequence[LoggedCall]]] = []
    for exchange in filter(None, exchanges):
        conversation = next(
            (
                conversation
                for conversation in conversations
                if context(conversation[0][0]) == context(exchange[0])
            ),
            None,
        )
        if conversation is None:
            conversations.append(conversation := [])
        conversation.append(exchange)
    threads: list[list[LoggedCall]] = []
    other_choices: list[list[LoggedCall]] = []
    for conversation in conversations:
        threads.append([])
        for number, exchange in enumerate(conversation):
            later_prompts = [later[0].prompt for later in conversation[number + 1 :]]
            continued = next(
                (
                    call
                    for call in exchange
                    if len(exchange) > 1
                    and call.answer is not None
                    and call.prompt
                    and any(
                        same_messages(prompt[: len(call.prompt) + 1], (*call.prompt, call.answer))
                        for prompt in later_prompts
                    )
                ),
                exchange[0],
            )
            threads[-1].append(continued)
            other_choices += [[call] for call in exchange if call is not continued]
    return [*threads, *other_choices]


def build_thread(calls: Sequence[LoggedCall], place: Place, name: str, stated: Stated) -> Thread:
    """The thread of these calls: its messages are those of the last call, which place the calls that they hold."""
    last = calls[-1]
    messages = last.prompt if last.answer is None or not last.prompt else (*last.prompt, last.answer)
    copies = next((call.stated.copies_disagree for call in calls if call.stated.copies_disagree), "")
    facts = replace(last.stated, copies_disagree=copies).overlay(stated)
    rollout = Rollout(place, name, messages, last.tools, last.template_kwargs, stated=facts)
    if not any(call.wants_ids for call in calls):
        return Thread(replace(rollout, stated=facts.without_ids()), ())
    turns: list[Turn] = []
    next_index = len(messages)
    for call in reversed(calls):
        index = len(call.prompt)
        fits = call.answer is not None and 0 < index < next_index
        if fits and call.answer is not None and same_messages(messages[: index + 1], (*call.prompt, call.answer)):
            next_index = index
            turns.append(replace(call.turn, message_index=index))
        else:
            turns.append(replace(call.turn, prompt_messages=call.prompt or None))
    return Thread(replace(rollout, turns=tuple(reversed(turns))), tuple(call.find_source for call in calls))
