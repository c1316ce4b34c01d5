"""Request bodies of OpenAI's API with vLLM's additions, checked field by field."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import orjson

from tito_audit.errors import RecordError
from tito_audit.provider import SamplingParams
from tito_audit.record.arrays import as_ids
from tito_audit.record.message import Message, as_messages, as_tools
from tito_audit.serve.errors import Refused
from tito_audit.sessions.model import ChatCall

Body = Mapping[str, Any]
_T = TypeVar("_T")

_KINDS = {bool: "true or false", int: "a whole number", str: "a text", dict: "an object"}
_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "seed")
_MOST_ANSWERS = 128
_LENGTHS = ("max_tokens", "max_completion_tokens")
_STOPS = ("stop", "stop_token_ids")
_OURS = frozenset(
    (
        *("model", "messages", "prompt", "tools", "tool_choice", "parallel_tool_calls", "n", "echo", "best_of"),
        *("stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids", "skip_special_tokens"),
        "return_tokens_as_token_ids",
        *("chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message"),
        *("suffix", "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("verbosity", "modalities", *_SAMPLED, *_LENGTHS, *_STOPS),
    )
)
"""Fields that the gateway reads or ignores; every other field goes to the provider as it is."""
_REFUSED = {
    "chat_template": "the gateway has one chat template; start it with --chat-template FILE",
    "documents": "pass them in chat_template_kwargs, where the template reads them",
    "functions": "pass tools",
    "function_call": "pass tools",
    "audio": "the gateway supports text only",
    "prompt_logprobs": "the log of the gateway has the logprobs of what is sampled; score prompts with "
    "`tito-audit rescore`",
    "use_beam_search": "beam search does not sample",
    "suffix": "the answer comes after the prompt",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to an endpoint that samples."""

    endpoint: ClassVar[str] = "completions"
    """Its name in the log."""
    id_prefix: ClassVar[str] = "cmpl-"
    """What the ids of its answers begin with."""
    model: str | None
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    """Whether the stream ends with a chunk that states the usage."""
    logprobs: bool
    token_ids: bool
    """`return_token_ids`"""
    tokens_as_ids: bool
    """`return_tokens_as_token_ids`"""
    special: bool
    """Whether control tokens are shown in the text."""
    sampling_as_sent: Mapping[str, Any]
    """The sampling parameters as the client sent them, for the log."""
    session_id: str | None = None
    """The session that the request continues, where its body says so."""


@dataclass(frozen=True, slots=True)
class ChatAsked(Asked):
    """A request to `/v1/chat/completions`."""

    endpoint: ClassVar[str] = "chat.completions"
    id_prefix: ClassVar[str] = "chatcmpl-"
    call: ChatCall = field(default_factory=lambda: ChatCall(()))
    messages: Sequence[Mapping[str, Any]] = ()
    """As the client sent them."""
    sent: tuple[Message, ...] = ()
    """The same, read."""
    parses_calls: bool = True
    """False where the client sent no tools, or `tool_choice` none."""
    forced: Mapping[str, Any] = field(default_factory=dict)
    """The parameters of the functions, by name, one of which the answer has to call; {} if it need not."""
    forced_by_name: bool = False
    """`tool_choice` names the function."""
    one_call: bool = False
    """The answer may have one call only, where calls are forced."""
    syntax: str | None = None
    """How calls are forced: in the `template`'s syntax, or as `json`; None until the prompt is known."""


@dataclass(frozen=True, slots=True)
class TextAsked(Asked):
    """A request to `/v1/completions`."""

    prompt: str | Sequence[int] = ""


_C = TypeVar("_C", bound=ChatAsked)


def chat_asked(data: bytes) -> ChatAsked:
    """The request in a body of `/v1/chat/completions`; Refused names the field that is wrong."""
    return chat_of(body_of(data), ChatAsked)


def chat_of(body: Body, kind: type[_C], **more: Any) -> _C:
    """The same of a body that was read, or translated from another API, whose own fields are `more`."""
    messages, tools = _messages(body), body.get("tools")
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise Refused("`tools` is not a list of tool definitions", "tools")
    tools = tools or ()
    choice, name = _tool_choice(body, tools)
    schemas = _schemas(tools) if choice == "required" else {}
    logprobs = _flag(body, "logprobs")
    top = count_of(body, "top_logprobs", 0) or 0
    if top and not logprobs:
        raise Refused("`top_logprobs` needs `logprobs: true`", "top_logprobs")
    sent = _read("messages", lambda: as_messages(messages, "messages"))
    kwargs = dict(value_of(body, "chat_template_kwargs", dict, default={}))
    effort = value_of(body, "reasoning_effort", str)
    continued = value_of(body, "continue_final_message", bool, default=False)
    opens = value_of(body, "add_generation_prompt", bool, default=not continued)
    if continued and opens:
        raise Refused("`continue_final_message` and `add_generation_prompt` cannot both be true", "messages")
    if continued and messages[-1].get("role") != "assistant":
        raise Refused("`continue_final_message` needs a last message of the assistant", "messages")
    return kind(
        **_shared_fields(body, logprobs, top),
        call=ChatCall(
            sent,
            _read("tools", lambda: as_tools(tools, "tools")),
            kwargs if effort is None else {"reasoning_effort": effort, **kwargs},
            add_generation_prompt=bool(opens),
        ),
        messages=messages,
        sent=sent,
        parses_calls=bool(tools) and choice != "none",
        forced=schemas if name is None else {name: schemas[name]},
        forced_by_name=name is not None,
        one_call=name is not None or body.get("parallel_tool_calls") is False,
        **more,
    )


def text_asked(data: bytes) -> TextAsked:
    """The request in a body of `/v1/completions`; Refused names the field that is wrong."""
    body = body_of(data)
    prompt: Any = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        _read("prompt", lambda: as_ids(prompt, "prompt"))
    elif not isinstance(prompt, str) or not prompt:
        raise Refused("`prompt` is not one prompt: a text or a list of token ids", "prompt")
    if (top := count_of(body, "logprobs", 0)) is None and body.get("logprobs") is True:
        raise Refused("`logprobs` is the number of alternatives to show", "logprobs")
    if _flag(body, "echo"):
        raise Refused("`echo` is not done here: score tokens with `tito-audit rescore`", "echo")
    return TextAsked(**_shared_fields(body, top is not None, top or 0), prompt=prompt)


def body_of(data: bytes) -> Body:
    """The object in a request; Refused if there is none, or a field of it is not supported."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Refused(f"the body is not JSON: {error}", None) from None
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object", None)
    try:
        orjson.dumps([[[[body]]]])  # The same limit as for a line of the log.
    except TypeError:
        raise Refused("the body is nested too deeply: at most 250 levels", None) from None
    for name, why in _REFUSED.items():
        if body.get(name):
            raise Refused(f"`{name}` is not supported: {why}", name)
    return body


def _shared_fields(body: Body, logprobs: bool, top: int) -> dict[str, Any]:
    options = value_of(body, "stream_options", dict, default={}) or {}

    stop = body.get("stop")
    stops = (stop,) if isinstance(stop, str) else tuple(_list(body, "stop", str, "a text or a list of texts"))
    longest = count_of(body, "max_completion_tokens", 1)
    n = count_of(body, "n", 1) or 1
    if n > _MOST_ANSWERS:
        raise Refused(f"`n` is above {_MOST_ANSWERS}", "n")
    return {
        "model": value_of(body, "model", str),
        "sampling": SamplingParams(
            temperature=_number(body, "temperature"),
            top_p=_number(body, "top_p"),
            top_k=value_of(body, "top_k", int),
            min_p=_number(body, "min_p"),
            max_tokens=longest if longest is not None else count_of(body, "max_tokens", 1),
            stop=stops,
            stop_token_ids=tuple(_list(body, "stop_token_ids", int, "a list of token ids")),
            seed=value_of(body, "seed", int),
            n=n,
            top_logprobs=top,
            extra={name: value for name, value in body.items() if name not in _OURS and value is not None},
        ),
        "stream": _flag(body, "stream"),
        "include_usage": bool(options.get("include_usage")),
        "logprobs": logprobs,
        "token_ids": _flag(body, "return_token_ids"),
        "tokens_as_ids": _flag(body, "return_tokens_as_token_ids"),
        "special": not _flag(body, "skip_special_tokens"),
        "sampling_as_sent": {
            name: body[name]
            for name in body
            if (name not in _OURS or name in (*_SAMPLED, *_LENGTHS, *_STOPS)) and body[name] is not None
        },
    }


def value_of(body: Body, name: str, kind: type[Any], what: str = "", *, default: Any = None) -> Any:
    """A field; Refused if it is not of this kind."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Refused(f"`{name}` is not {what or _KINDS[kind]}", name)
    return value


def _flag(body: Body, name: str) -> bool:
    return bool(value_of(body, name, bool))


def count_of(body: Body, name: str, least: int) -> int | None:
    """A number; Refused if it is none, or below the least."""
    count = value_of(body, name, int) if body.get(name) is not True else None
    if count is not None and count < least:
        raise Refused(f"`{name}` is below {least}", name)
    return count


def _number(body: Body, name: str) -> float | None:
    number = body.get(name)
    if number is None:
        return None
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise Refused(f"`{name}` is not a number", name)
    if number < 0:
        raise Refused(f"`{name}` is below 0", name)
    return float(number)


def _list(body: Body, name: str, kind: type, what: str) -> Sequence[Any]:
    entries = body.get(name)
    if entries is None:
        return ()
    if not isinstance(entries, list) or not all(type(entry) is kind for entry in entries):
        raise Refused(f"`{name}` is not {what}", name)
    return entries


def _messages(body: Body) -> Sequence[Mapping[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("`messages` is not a list of messages", "messages")
    for number, message in enumerate(messages):
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
                kind = part.get("type") if isinstance(part, dict) else part
                raise Refused(
                    f"`messages[{number}].content` has a part of type {kind!r}: the gateway supports text only",
                    "messages",
                )
    return messages


def _tool_choice(body: Body, tools: Sequence[Any]) -> tuple[str, str | None]:
    """auto, none or required, and the function that is named."""
    choice, name = body.get("tool_choice"), None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in _schemas(tools):
            raise Refused("`tool_choice` names a function that is not among the tools", "tool_choice")
        return "required", name
    if choice not in (None, "auto", "none", "required"):
        raise Refused("`tool_choice` can be auto, none, required or a function", "tool_choice")
    if choice in ("auto", "required") and not tools:
        raise Refused(f"`tool_choice` is {choice}, but there are no tools", "tool_choice")
    if choice == "required" and not _schemas(tools):
        raise Refused("`tool_choice` is required, but no tool has a name", "tool_choice")
    return choice or "auto", name


def _schemas(tools: Sequence[Any]) -> dict[str, Any]:
    """The parameters of the functions among the tools, by name."""
    schemas: dict[str, Any] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            schemas[function["name"]] = function.get("parameters")
    if not all(schema is None or isinstance(schema, dict) for schema in schemas.values()):
        raise Refused("`tools` has parameters that are not a JSON schema", "tools")
    return schemas


def _read(name: str, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except RecordError as error:
        raise Refused(str(error), name) from None


# What the other APIs say, as a chat request says it


def as_function(name: Any, **more: Any) -> dict[str, Any]:
    """A function that is called, chosen or given as a tool, with what it has besides its name."""
    return {"type": "function", "function": {"name": name, **more}}


def as_answer(texts: Iterable[str], thoughts: Iterable[str], calls: Sequence[Body]) -> dict[str, Any]:
    """The parts of an earlier answer as the message that a chat completion would have given."""
    text, thought = "".join(texts), "".join(thoughts)
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if thought or calls else "")}
    if thought:
        message |= {"reasoning_content": thought, "reasoning": thought}
    return {**message, "tool_calls": list(calls)} if calls else message


def as_result(call_id: str, content: Any) -> dict[str, Any]:
    """What a call gave back."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def as_schema(**schema: Any) -> dict[str, Any]:
    """The form of an answer that is JSON."""
    return {"type": "json_schema", "json_schema": schema}
