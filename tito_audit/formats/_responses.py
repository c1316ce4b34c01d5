"""Items of the Responses API as chat messages, and the responses of chat and completions servers.

A call writes several items (reasoning, text, tool calls) that form one assistant message, so items are grouped by
call before one of them is found to hold the tokens.

vLLM, SGLang, Dynamo and OpenAI return choices of one shape and differ in where they put token ids. A row is a
response, a response and its request under two keys, or both merged into one object.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats._columns import as_objects, int_if_whole, is_list, to_list
from tito_audit.formats._update import object_at
from tito_audit.record.arrays import Ids, as_ids
from tito_audit.record.column import MovePolicy
from tito_audit.record.edits import Path
from tito_audit.record.message import Message, ToolSpec, as_message
from tito_audit.record.rollout import TokenText

Item = Mapping[str, Any]

ITEMS_UNREAD = "the answer has items that chat messages have no place for, such as a hosted web search"
"""Why messages of such an answer are not read."""

TOKEN_KEYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""What NeMo-Gym writes on one item of a call: all three or none."""

TEXT_KEYS = ("prompt_str", "generation_str")
"""What NeMo-RL keeps instead in its log of a NeMo-Gym result: the decoded prompt and generation."""

_ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output")


@dataclass(frozen=True, slots=True)
class ItemMessage:
    """One chat message and the items that form it."""

    message: Message
    items: tuple[Item, ...]

    @property
    def is_call(self) -> bool:
        """Whether a model wrote it."""
        return self.message.role == "assistant"

    @property
    def token_item(self) -> Item | None:
        """The item that holds the tokens of the call, those of the completion first; None if none does."""
        keys = (*TOKEN_KEYS, *TEXT_KEYS)
        token_items = [item for item in self.items if any(item.get(key) is not None for key in keys)]
        return next(
            (item for item in reversed(token_items) if _holds_generation(item)),
            token_items[-1] if token_items else None,
        )


def nonempty_text(*values: object) -> str | None:
    """The first nonempty string among these values; None if there is none."""
    return next((value for value in values if isinstance(value, str) and value), None)


def nonempty_list(*values: object) -> Sequence[Any]:
    """The first nonempty list among these values; () if there is none."""
    return next((value for value in values if isinstance(value, list | tuple) and value), ())


def is_response_object(value: Mapping[str, Any]) -> bool:
    """Whether a value is a response of the Responses API."""
    kind = value.get("object")
    return isinstance(kind, str) and kind == "response" and isinstance(value.get("output"), list | tuple)


def parse_request(params: Mapping[str, Any], where: str) -> list[ItemMessage]:
    """The messages of a request: `instructions` as a system message, then its input."""
    messages: list[ItemMessage] = []
    instructions = params.get("instructions")
    if isinstance(instructions, str) and instructions:
        messages.append(ItemMessage(as_message({"role": "system", "content": instructions}, where), ()))
    request_input = params.get("input")
    if isinstance(request_input, str):
        messages.append(ItemMessage(as_message({"role": "user", "content": request_input}, where), ()))
    elif request_input is not None:
        messages.extend(parse_items(request_input, f"{where}.input"))
    return messages


def parse_items(items: object, where: str) -> list[ItemMessage]:
    """The messages that a list of items forms, in order; items of an unknown type are left out."""
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise RecordError(f"{where} is not a list of items")
    if not all(isinstance(item, Mapping) for item in items):
        raise RecordError(f"{where} holds something that is not an item (an object)")
    formed: list[ItemMessage] = []
    run: list[Item] = []
    for item in items:
        if _item_type(item) in ("reasoning", "function_call") or _is_answer(item):
            run.append(item)
            continue
        formed.extend(_assistant_messages(run, where))
        run = []
        if _item_type(item) in _ITEM_TYPES:
            # Not written by a model.
            if _item_type(item) == "function_call_output":
                content = _chat_content(item.get("output"), where)
                wire = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            else:
                wire = {"role": item.get("role"), "content": _chat_content(item.get("content"), where)}
            formed.append(ItemMessage(as_message(wire, where), (item,)))
    return [*formed, *_assistant_messages(run, where)]


def unknown_item_types(items: object) -> tuple[str, ...]:
    """The item types that chat messages have no place for, such as a hosted web search."""
    if not isinstance(items, Sequence) or isinstance(items, str):
        return ()
    return tuple(sorted({_item_type(item) for item in items if isinstance(item, Mapping)} - set(_ITEM_TYPES)))


def chat_tools(tools: object, where: str) -> tuple[ToolSpec, ...]:
    """Tools of the Responses API in chat form; tools of a type other than `function` stay as they are.

    Keys are in the order in which servers pass functions to templates. As in NeMo-Gym `strict` is left out: it is
    an instruction to a hosted service and would show up in the prompt.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise RecordError(f"{where} is not a list of tools")
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise RecordError(f"{where} holds something that is not a tool definition (an object)")
    chat: list[ToolSpec] = []
    for tool in tools:
        if (nonempty_text(tool.get("type")) or "function") == "function" and not isinstance(
            tool.get("function"), Mapping
        ):
            first = {key: tool[key] for key in ("name", "description", "parameters") if key in tool}
            rest = {key: value for key, value in tool.items() if key not in (*first, "type", "strict")}
            tool = {"type": "function", "function": {**first, **rest}}
        chat.append(tool)
    return tuple(chat)


def per_token_lists(
    holder: Mapping[str, Any], read_names: Collection[str], *, of_item: bool = False
) -> dict[str, tuple[Any, MovePolicy]]:
    """Every other list of numbers of a choice, or of an item, which may hold flags too but no shorter lists."""
    columns: dict[str, tuple[Any, MovePolicy]] = {}
    for name, value in holder.items():
        if name == "routed_experts" and isinstance(value, list):
            columns[name] = (value, MovePolicy.DROP)
            continue
        if name in read_names or not isinstance(value, list | np.ndarray):
            continue
        if isinstance(value, np.ndarray):
            fits = value.ndim == 1 and value.dtype.kind in ("iufb" if of_item else "iuf")
        elif of_item:
            fits = len(value) > 1 and all(isinstance(entry, int | float) for entry in value)
        else:
            fits = all(type(entry) in (int, float) for entry in value)
        if fits:
            columns[name] = (value, MovePolicy.MOVE)
    return columns


def drop_empty_fields(message: Mapping[str, Any], dropped: Collection[str] = ()) -> dict[str, Any]:
    """A message as templates get it: without empty fields, for whose presence templates test."""
    wire = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in message.items()
        if key not in dropped
        and value is not None
        and not (isinstance(value, list | np.ndarray) and len(value) == 0)
    }
    # Templates read `content` without testing for it, and Parquet keeps no nulls.
    wire.setdefault("content", None)
    return wire


def _assistant_messages(run: Sequence[Item], where: str) -> Iterator[ItemMessage]:
    """The assistant message of each call in a run of items that the model wrote.

    If several items hold tokens, a call ends with the item that holds its tokens, or, where that is a text, with
    the tool calls without tokens that follow it.
    """
    ends = [i + 1 for i, item in enumerate(run) if _holds_generation(item)]
    cuts = [0]
    for end in ends[:-1]:
        stop = end
        if _item_type(run[end - 1]) == "message":
            while _item_type(run[stop]) == "function_call" and not _holds_generation(run[stop]):
                stop += 1
            # Tool calls that end in one with tokens belong to the next call.
            stop = end if _item_type(run[stop]) == "function_call" else stop
        cuts.append(stop)
    for start, stop in pairwise([*cuts, len(run)] if run else ()):
        group = run[start:stop]
        texts = []
        for item in filter(_is_answer, group):
            content = item.get("content")
            if content is None or isinstance(content, str):
                texts.append(content or "")
                continue
            if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
                raise RecordError(f"{where} holds an answer whose content is neither text nor a list of parts")
            texts.append("".join(part["text"] for part in content if isinstance(part.get("text"), str)))
        # The text of reasoning is in the summary, or in the content on servers that log it there.
        lists = [nonempty_list(i.get("summary"), i.get("content")) for i in group if _item_type(i) == "reasoning"]
        parts = [part for listed in lists for part in listed if isinstance(part, Mapping)]
        reasoning = [text for part in parts if (text := nonempty_text(part.get("text"))) is not None]
        calls = []
        for item in group:
            if _item_type(item) == "function_call":
                if not isinstance(item.get("name"), str):
                    raise RecordError(f"{where} holds a function_call without a name")
                function = {"name": item["name"], "arguments": item.get("arguments")}
                named = nonempty_text(item.get("call_id"), item.get("id"))
                calls.append({"id": named, "type": "function", "function": function})
        wire: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or reasoning else None}
        if reasoning:
            wire["reasoning_content"] = "\n".join(reasoning)
        if calls:
            wire["tool_calls"] = calls
        yield ItemMessage(as_message(wire, where), tuple(group))


def _chat_content(value: object, where: str) -> object:
    """Content in chat form; parts that are all text become one string, as servers join them for templates."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value
    if not all(isinstance(part, Mapping) for part in value):
        raise RecordError(f"{where} holds content that is neither text nor a list of parts")
    parts: list[Mapping[str, Any]] = []
    for part in value:
        kind = nonempty_text(part.get("type"))
        if kind in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
            part = {"type": "text", "text": part["text"]}
        elif kind == "input_image":
            part = {"type": "image_url", "image_url": {"url": part.get("image_url")}}
        parts.append(part)
    if all(nonempty_text(part.get("type")) == "text" and isinstance(part.get("text"), str) for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _item_type(item: Item) -> str:
    """The type of an item; an item without one is a `message` if it has a role, else ""."""
    kind = item.get("type")
    return kind if isinstance(kind, str) else "message" if isinstance(item.get("role"), str) else ""


def _is_answer(item: Item) -> bool:
    return _item_type(item) == "message" and nonempty_text(item.get("role")) == "assistant"


def _holds_generation(item: Item) -> bool:
    generated = item.get("generation_token_ids")
    return isinstance(generated, list | tuple | np.ndarray) and len(generated) > 0


UNAVAILABLE_LOGPROB = -9999.0
"""What OpenAI-compatible servers write for a logprob that is not available."""

_REQUEST_KEYS = ("request", "input")
_CHOICE_KEYS = ("message", "delta", "token_ids", "logprobs", "finish_reason", "meta_info")
_TOKEN_ID = re.compile(r"token_id:(\d+)")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One or several responses and their request."""

    request: Mapping[str, Any]
    """Empty if the log holds only responses."""
    responses: tuple[Mapping[str, Any], ...]
    request_paths: tuple[Path, ...] = ()
    """The objects of the row that hold the request's fields, the one that takes precedence first."""
    response_paths: tuple[Path, ...] = ()
    """Where in the row each response is."""


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """The tokens of a choice."""

    ids: Ids | None
    logprobs: tuple[str, Sequence[Any]] | None
    """The name of their column, and the values."""
    from_meta_info: bool
    """Whether the logprobs are SGLang's, which writes no placeholder for one that is not available."""
    texts: tuple[TokenText, ...] | None
    """Tokens as text if there are no ids."""
    disagreement: str | None
    """How two copies of the ids differ; None if they agree or there is only one."""


def find_exchange(row: Row) -> Exchange | None:
    """The responses and the request of a row; None if it has none of the known shapes."""
    if _is_response(row):
        key_of_request = next((key for key in _REQUEST_KEYS if isinstance(row.get(key), Mapping)), None)
        return _with_request(row, key_of_request, {(): row})
    for key in ("response", "output"):
        answers = _responses_under(row.get(key), key)
        if answers:
            key_of_request = next((k for k in (*_REQUEST_KEYS, "body") if isinstance(row.get(k), Mapping)), None)
            return _with_request(row, key_of_request, answers)
    answers = _responses_under(row.get("body"), "body")
    return _with_request(row, None, answers) if answers else None


def _with_request(row: Row, holder: str | None, answers: Mapping[Path, Mapping[str, Any]]) -> Exchange:
    """The responses with the request under the key `holder`; if that is None, the row itself is the request."""
    request: Mapping[str, Any] = row if holder is None else row[holder]
    path: Path = () if holder is None else (holder,)
    # The request may be wrapped as `body` of an HTTP request, and clients put fields into `extra_body`.
    body = request.get("body")
    if isinstance(body, Mapping) and not _is_response(body):
        request, path = body, (*path, "body")
    extra = request.get("extra_body")
    paths: tuple[Path, ...] = (path,)
    if isinstance(extra, Mapping):
        request, paths = {**extra, **request}, (path, (*path, "extra_body"))
    return Exchange(request, tuple(answers.values()), paths, tuple(answers))


def all_choices(logged: Exchange) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], int, Path]]:
    """Every choice of every response, as (response, choice, number of the choice, path in the row)."""
    for response, path in zip(logged.responses, logged.response_paths, strict=True):
        for number, choice in enumerate(choices(response)):
            yield response, choice, number, path if choice is response else (*path, "choices", number)


def choices(response: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The choices of a response; an SGLang response without `choices` is its own choice."""
    listed = response.get("choices")
    if listed is None:
        return (response,)
    listed = as_objects(listed, "choices is not a list of answers (objects)")
    if not listed:
        raise RecordError("choices is empty: the server gave no answer, so there is nothing to audit")
    if any(choice.get("delta") is not None for choice in listed):
        raise RecordError(
            "choices holds a chunk of a stream. Ids and logprobs of one answer are spread over several chunks; "
            "log the joined answer"
        )
    return listed


def nvext_parts(response: Mapping[str, Any]) -> list[tuple[Path, Mapping[str, Any]]]:
    """The objects in which Dynamo puts ids and logprobs of its only choice, with their paths in the response."""
    paths: tuple[Path, ...] = (("nvext",), ("nvext", "engine_data"))
    alone = isinstance(response.get("choices"), list | tuple) and len(response["choices"]) == 1
    return [(path, part) for path in paths if alone and (part := object_at(response, *path))]


def read_generated_tokens(choice: Mapping[str, Any], response: Mapping[str, Any] | None = None) -> GeneratedTokens:
    """The tokens of a choice: its ids, else those of Dynamo, of `token_id:N` strings, or of SGLang's triples."""
    name, strings, values = read_openai_logprobs(choice)
    scores = read_sglang_scores(choice, "output_token_logprobs")
    copies: dict[str, Ids] = {}
    for key in ("token_ids", "output_ids"):
        if choice.get(key) is not None:
            copies[key] = as_ids(choice[key], key)
    beside = nvext_parts(response or {})
    for path, part in beside:
        if part.get("completion_token_ids") is not None:
            where = ".".join(map(str, (*path, "completion_token_ids")))
            copies[where] = as_ids(part["completion_token_ids"], where)
    if strings and all(is_token_id_string(string) for string in strings):
        copies[name] = as_ids([int(string.removeprefix("token_id:")) for string in strings], name)
    if scores is not None:
        copies["meta_info.output_token_logprobs"] = as_ids([token for _, token in scores], "token id")
    logprobs: tuple[str, Sequence[Any]] | None = (name, values) if values is not None else None
    if scores is not None:
        logprobs = ("meta_info.output_token_logprobs", [value for value, _ in scores])
    if logprobs is None:
        scored = (_list_or_none(part.get("completion_logprobs")) for _, part in beside)
        logprobs = next((("completion_logprobs", column) for column in scored if column is not None), None)
    texts = token_texts(choice.get("logprobs")) if not copies else None
    # The first copy is read, and compared with the others.
    first, ids = next(iter(copies.items()), ("", None))
    disagreement = None
    for name, other in copies.items():
        if ids is None or other is ids or disagreement is not None or np.array_equal(ids, other):
            continue
        disagreement = f"{first} has {len(ids)} ids, {name} has {len(other)}"
        if len(ids) == len(other):
            at = int(np.flatnonzero(ids != other)[0])
            disagreement = f"{first} has id {ids[at]} at position {at}, {name} has {other[at]}"
    return GeneratedTokens(ids, logprobs, scores is not None, texts, disagreement)


def token_texts(logprobs: object) -> tuple[TokenText, ...] | None:
    """Tokens as strings and bytes, from the entries of a chat choice or the lists of a completion."""
    entries = logprobs.get("content") if isinstance(logprobs, Mapping) else logprobs
    if isinstance(entries, list | tuple) and entries:
        texts = []
        for entry in entries:
            if not isinstance(entry, Mapping) or not isinstance(entry.get("token"), str):
                raise RecordError("logprobs.content holds an entry that is not a token: an object with `token`")
            data = entry.get("bytes")
            if data is not None:
                try:
                    data = bytes(int(value) for value in data)
                except (TypeError, ValueError, OverflowError):
                    raise RecordError("logprobs.content holds `bytes` that are not numbers below 256") from None
            texts.append(TokenText(entry["token"], data, _float_or_nan(entry.get("logprob"))))
        return tuple(texts)
    tokens = _list_or_none(logprobs.get("tokens")) if isinstance(logprobs, Mapping) else None
    if tokens is None or not isinstance(logprobs, Mapping):
        return None
    values = _list_or_none(logprobs.get("token_logprobs"))
    if values is not None and len(values) != len(tokens):
        raise RecordError(
            f"logprobs.tokens has {len(tokens)} entries and token_logprobs {len(values)}; "
            "without ids nothing says which belongs to which"
        )
    pairs = zip(tokens, values or [None] * len(tokens), strict=True)
    return tuple(TokenText(str(token), None, _float_or_nan(value)) for token, value in pairs) or None


def may_be_token_ids(value: object) -> bool:
    """Whether a value is a list that may be token ids."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return isinstance(value, list) and bool(value) and type(value[0]) is int


def read_openai_logprobs(choice: Mapping[str, Any]) -> tuple[str, list[str], list[Any] | None]:
    """OpenAI's `logprobs`: the name of the list, the token strings, and the values (None if there are none)."""
    logged = choice.get("logprobs")
    if not isinstance(logged, Mapping):
        return "logprobs", [], None
    content = logged.get("content")
    if isinstance(content, list | tuple):
        entries = [entry for entry in content if isinstance(entry, Mapping)]
        strings = [entry["token"] for entry in entries if isinstance(entry.get("token"), str)]
        return "logprobs.content", strings, [entry.get("logprob") for entry in entries]
    values, tokens = _list_or_none(logged.get("token_logprobs")), _list_or_none(logged.get("tokens"))
    strings = [token for token in tokens or () if isinstance(token, str)]
    return "logprobs.token_logprobs", strings, values


def _list_or_none(value: object) -> list[Any] | None:
    return to_list(value) if is_list(value) else None


def _float_or_nan(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def read_sglang_scores(choice: Mapping[str, Any], name: str) -> list[tuple[Any, Any]] | None:
    """The (logprob, id) pairs of SGLang's `[logprob, id, text]` entries; None if there are none.

    Parquet turns an entry into an array of floats, so ids are converted back.
    """
    entries = object_at(choice, "meta_info").get(name)
    if not isinstance(entries, list | tuple):
        return None
    listed = [_list_or_none(entry) for entry in entries]
    pairs = [(entry[0], int_if_whole(entry[1])) for entry in listed if entry is not None and len(entry) >= 2]
    if len(pairs) != len(listed):
        raise RecordError(f"meta_info.{name} is not a list of [logprob, token id, text]")
    return pairs


def _responses_under(value: object, key: str) -> dict[Path, Mapping[str, Any]]:
    """The responses under a key, by path: an object, one wrapped with its HTTP status, or a list of objects."""
    if isinstance(value, Mapping):
        if _is_response(value):
            return {(key,): value}
        body = value.get("body")
        return {(key, "body"): body} if isinstance(body, Mapping) and _is_response(body) else {}
    listed = value if isinstance(value, list | tuple) else ()
    if not all(isinstance(entry, Mapping) and _is_response(entry) for entry in listed):
        return {}
    return {(key, number): entry for number, entry in enumerate(listed)}


def _is_response(value: Mapping[str, Any]) -> bool:
    if is_response_object(value):
        return True
    listed = value.get("choices")
    if isinstance(listed, list | tuple):
        # The choices of a multiple-choice question have none of these keys.
        holder, names = (listed[0], _CHOICE_KEYS) if listed else (value, ("model", "usage", "object"))
        return isinstance(holder, Mapping) and any(key in holder for key in names)
    meta = value.get("meta_info")
    if not isinstance(meta, Mapping):
        return False
    return "output_token_logprobs" in meta or "output_ids" in value or "text" in value


def first_choices(logged: Exchange) -> list[Mapping[str, Any]]:
    """The first choice of each response, which is enough to recognize the server."""
    listed = ((r,) if r.get("choices") is None else r["choices"] for r in logged.responses)
    return [choices[0] for choices in listed if len(choices) and isinstance(choices[0], Mapping)]


def is_token_id_string(value: object) -> bool:
    return isinstance(value, str) and _TOKEN_ID.fullmatch(value) is not None
