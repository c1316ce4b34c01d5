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

_TYPE_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", dict: "an object"}
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed")
_MAX_N = 128
_LENGTH_FIELDS = ("max_tokens", "max_completion_tokens")
_STOP_FIELDS = ("stop", "stop_token_ids")
_KNOWN_FIELDS = frozenset(
    (
        *("model", "messages", "prompt", "tools", "tool_choice", "parallel_tool_calls", "n", "echo", "best_of"),
        *("stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids", "skip_special_tokens"),
        "return_tokens_as_token_ids",
        *("chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message"),
        *("suffix", "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("verbosity", "modalities", *_SAMPLING_FIELDS, *_LENGTH_FIELDS, *_STOP_FIELDS),
    )
)
"""Fields that the gateway reads or ignores; all others go to the provider unchanged."""
_NOT_LOGGED = _KNOWN_FIELDS - {*_SAMPLING_FIELDS, *_LENGTH_FIELDS, *_STOP_FIELDS}
"""Fields that are no sampling parameters."""
_UNSUPPORTED = {
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
class SamplingRequest:
    """A request to an endpoint that samples."""

    endpoint: ClassVar[str] = "completions"
    """Its name in the log."""
    id_prefix: ClassVar[str] = "cmpl-"
    """What the id of the call begins with."""
    model: str | None
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    """Whether the stream ends with a chunk that states the usage."""
    logprobs: bool
    returns_token_ids: bool
    returns_tokens_as_ids: bool
    shows_special_tokens: bool
    """Whether control tokens stay in the text."""
    sampling_as_sent: Mapping[str, Any]
    """The sampling parameters as the client sent them, for the log."""
    session_id: str | None = None
    """The session that the body names; None if it names none."""


@dataclass(frozen=True, slots=True)
class ChatRequest(SamplingRequest):
    """A request to `/v1/chat/completions`."""

    endpoint: ClassVar[str] = "chat.completions"
    id_prefix: ClassVar[str] = "chatcmpl-"
    call: ChatCall = field(default_factory=lambda: ChatCall(()))
    messages: Sequence[Mapping[str, Any]] = ()
    """As the client sent them."""
    parsed_messages: tuple[Message, ...] = ()
    parses_calls: bool = True
    """False if the client sent no tools, or `tool_choice: none`."""
    forced_schemas: Mapping[str, Any] = field(default_factory=dict)
    """The functions of which the answer must call at least one: the schema of their parameters by name."""
    forced_by_name: bool = False
    """Whether `tool_choice` names the function."""
    single_call: bool = False
    """Whether an answer with forced calls may have one call only."""
    forced_syntax: str | None = None
    """How calls are forced: `template` in the template's syntax, `json`; None until the prompt is known."""


@dataclass(frozen=True, slots=True)
class TextRequest(SamplingRequest):
    """A request to `/v1/completions`."""

    prompt: str | Sequence[int] = ""


_C = TypeVar("_C", bound=ChatRequest)


def parse_chat_request(data: bytes) -> ChatRequest:
    """The request in a body of `/v1/chat/completions`; Refused names the field that is wrong."""
    return build_chat_request(parse_body(data), ChatRequest)


def build_chat_request(body: Body, kind: type[_C], **fields: Any) -> _C:
    """A request of this kind from the body of a chat completion; `fields` are those that the kind adds."""
    messages, tools = body.get("messages"), body.get("tools")
    if not isinstance(messages, list) or not messages:
        raise Refused("`messages` is not a list of messages", "messages")
    for number, message in enumerate(messages):
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
                unread = part.get("type") if isinstance(part, dict) else part
                raise Refused(
                    f"`messages[{number}].content` has a part of type {unread!r}: the gateway supports text only",
                    "messages",
                )
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise Refused("`tools` is not a list of tool definitions", "tools")
    tools = tools or ()
    choice, name = _tool_choice(body, tools)
    schemas = _function_schemas(tools) if choice == "required" else {}
    logprobs = _flag_field(body, "logprobs")
    top = count_field(body, "top_logprobs", 0) or 0
    if top and not logprobs:
        raise Refused("`top_logprobs` needs `logprobs: true`", "top_logprobs")
    parsed_messages = _parse_field(as_messages, messages, "messages")
    kwargs = dict(typed_field(body, "chat_template_kwargs", dict, default={}))
    effort = typed_field(body, "reasoning_effort", str)
    continued = typed_field(body, "continue_final_message", bool, default=False)
    opens = typed_field(body, "add_generation_prompt", bool, default=not continued)
    if continued and opens:
        raise Refused("`continue_final_message` and `add_generation_prompt` cannot both be true", "messages")
    if continued and messages[-1].get("role") != "assistant":
        raise Refused("`continue_final_message` needs a last message of the assistant", "messages")
    return kind(
        **_common_fields(body, logprobs, top),
        call=ChatCall(
            parsed_messages,
            _parse_field(as_tools, tools, "tools"),
            kwargs if effort is None else {"reasoning_effort": effort, **kwargs},
            add_generation_prompt=bool(opens),
        ),
        messages=messages,
        parsed_messages=parsed_messages,
        parses_calls=bool(tools) and choice != "none",
        forced_schemas=schemas if name is None else {name: schemas[name]},
        forced_by_name=name is not None,
        single_call=name is not None or body.get("parallel_tool_calls") is False,
        **fields,
    )


def parse_text_request(data: bytes) -> TextRequest:
    """The request in a body of `/v1/completions`; Refused names the field that is wrong."""
    body = parse_body(data)
    prompt: Any = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        _parse_field(as_ids, prompt, "prompt")
    elif not isinstance(prompt, str) or not prompt:
        raise Refused("`prompt` is not one prompt: a text or a list of token ids", "prompt")
    if (top := count_field(body, "logprobs", 0)) is None and body.get("logprobs") is True:
        raise Refused("`logprobs` is the number of alternatives to show", "logprobs")
    if _flag_field(body, "echo"):
        raise Refused("`echo` is not done here: score tokens with `tito-audit rescore`", "echo")
    return TextRequest(**_common_fields(body, top is not None, top or 0), prompt=prompt)


def parse_body(data: bytes) -> Body:
    """The JSON object in a body; Refused if it is none, or has a field that is not supported."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Refused(f"the body is not JSON: {error}", None) from None
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object", None)
    try:
        orjson.dumps([[[[body]]]])  # as deep as in a line of the log, which must hold it
    except TypeError:
        raise Refused("the body is nested too deeply: at most 250 levels", None) from None
    for name, why in _UNSUPPORTED.items():
        if body.get(name):
            raise Refused(f"`{name}` is not supported: {why}", name)
    return body


def _common_fields(body: Body, logprobs: bool, top: int) -> dict[str, Any]:
    options = typed_field(body, "stream_options", dict, default={}) or {}
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else _list_field(body, "stop", str, "a text or a list of texts")
    longest = count_field(body, "max_completion_tokens", 1)
    n = count_field(body, "n", 1) or 1
    if n > _MAX_N:
        raise Refused(f"`n` is above {_MAX_N}", "n")
    return {
        "model": typed_field(body, "model", str),
        "sampling": SamplingParams(
            temperature=_number_field(body, "temperature"),
            top_p=_number_field(body, "top_p"),
            top_k=typed_field(body, "top_k", int),
            min_p=_number_field(body, "min_p"),
            max_tokens=longest if longest is not None else count_field(body, "max_tokens", 1),
            stop=tuple(stops),
            stop_token_ids=tuple(_list_field(body, "stop_token_ids", int, "a list of token ids")),
            seed=typed_field(body, "seed", int),
            n=n,
            top_logprobs=top,
            extra={name: value for name, value in body.items() if name not in _KNOWN_FIELDS and value is not None},
        ),
        "stream": _flag_field(body, "stream"),
        "include_usage": bool(options.get("include_usage")),
        "logprobs": logprobs,
        "returns_token_ids": _flag_field(body, "return_token_ids"),
        "returns_tokens_as_ids": _flag_field(body, "return_tokens_as_token_ids"),
        "shows_special_tokens": not _flag_field(body, "skip_special_tokens"),
        "sampling_as_sent": {
            name: value for name, value in body.items() if name not in _NOT_LOGGED and value is not None
        },
    }


def typed_field(body: Body, name: str, kind: type[Any], what: str = "", *, default: Any = None) -> Any:
    """A field of the body, `default` if it is missing or null; Refused if it is not of this kind."""
    value = body.get(name)
    if value is None:
        return default
    kinds = (int, float) if kind is float else kind
    if not isinstance(value, kinds) or (kind is not bool and isinstance(value, bool)):
        raise Refused(f"`{name}` is not {what or _TYPE_WORDS[kind]}", name)
    return value


def _flag_field(body: Body, name: str) -> bool:
    return bool(typed_field(body, name, bool))


def count_field(body: Body, name: str, least: int) -> int | None:
    """A whole number; None if it is missing; Refused if it is below `least`."""
    count = typed_field(body, name, int) if body.get(name) is not True else None
    if count is not None and count < least:
        raise Refused(f"`{name}` is below {least}", name)
    return count


def _number_field(body: Body, name: str) -> float | None:
    number = typed_field(body, name, float)
    if number is not None and number < 0:
        raise Refused(f"`{name}` is below 0", name)
    return None if number is None else float(number)


def _list_field(body: Body, name: str, kind: type, what: str) -> Sequence[Any]:
    entries = body.get(name)
    if entries is None:
        return ()
    if not isinstance(entries, list) or not all(type(entry) is kind for entry in entries):
        raise Refused(f"`{name}` is not {what}", name)
    return entries


def _tool_choice(body: Body, tools: Sequence[Any]) -> tuple[str, str | None]:
    """`auto`, `none` or `required`, and the name of the function that it names."""
    choice, name = body.get("tool_choice"), None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in _function_schemas(tools):
            raise Refused("`tool_choice` names a function that is not among the tools", "tool_choice")
        return "required", name
    if choice not in (None, "auto", "none", "required"):
        raise Refused("`tool_choice` can be auto, none, required or a function", "tool_choice")
    if choice in ("auto", "required") and not tools:
        raise Refused(f"`tool_choice` is {choice}, but there are no tools", "tool_choice")
    if choice == "required" and not _function_schemas(tools):
        raise Refused("`tool_choice` is required, but no tool has a name", "tool_choice")
    return choice or "auto", name


def _function_schemas(tools: Sequence[Any]) -> dict[str, Any]:
    """The JSON schema of the parameters of each function among the tools, by name; None where it states none."""
    schemas: dict[str, Any] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            schemas[function["name"]] = function.get("parameters")
    if not all(schema is None or isinstance(schema, dict) for schema in schemas.values()):
        raise Refused("`tools` has parameters that are not a JSON schema", "tools")
    return schemas


def _parse_field(parse: Callable[[Any, str], _T], value: Any, name: str) -> _T:
    """What a parser of `record/` makes of a field; Refused, with its message, if it raises."""
    try:
        return parse(value, name)
    except RecordError as error:
        raise Refused(str(error), name) from None


# The other APIs' objects, as a chat completion has them


def function_wire(name: Any, **fields: Any) -> dict[str, Any]:
    """A tool, a call or a `tool_choice` of a function; `fields` are those besides the name."""
    return {"type": "function", "function": {"name": name, **fields}}


def assistant_wire(texts: Iterable[str], thoughts: Iterable[str], calls: Sequence[Body]) -> dict[str, Any]:
    """An earlier answer as the assistant message of a chat completion."""
    text, thought = "".join(texts), "".join(thoughts)
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if thought or calls else "")}
    if thought:
        message |= {"reasoning_content": thought, "reasoning": thought}
    return {**message, "tool_calls": list(calls)} if calls else message


def tool_wire(call_id: str, content: Any) -> dict[str, Any]:
    """The result of a call as a message of role `tool`."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def json_schema_format(**schema: Any) -> dict[str, Any]:
    """A `response_format` of this JSON schema."""
    return {"type": "json_schema", "json_schema": schema}
