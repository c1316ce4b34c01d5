"""Requests and answers in the shapes of OpenAI's API, with vLLM's `token_ids` and `prompt_token_ids`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np

from tito_audit.errors import SetupError
from tito_audit.parser import ParseOptions, Parser
from tito_audit.parsers import finish_reason, parse_answer, to_message
from tito_audit.provider import GenerationChunk, GenerationResult, SamplingParams, TopLogprobs
from tito_audit.record.message import as_messages, as_tools
from tito_audit.sessions.model import ChatCall
from tito_audit.tokens.text_stream import decode
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Vocabulary


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Id, time and model, with which all objects of a response begin."""

    id: str
    created: int
    model: str

    def chat(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """A whole chat completion."""
        return self._object("chat.completion", choices, more)

    def chat_chunk(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """A chunk of a streamed chat completion."""
        return self._object("chat.completion.chunk", choices, more)

    def text(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """A text completion, or a chunk of one: OpenAI gives both the same `object`."""
        return self._object("text_completion", choices, more)

    def _object(self, kind: str, choices: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> dict[str, Any]:
        own = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**own, "choices": list(choices), **more}


def usage(prompt: int, completion: int) -> dict[str, int]:
    """How many tokens a call took."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


@dataclass(frozen=True, slots=True)
class TokenView:
    """Shows sampled tokens and their logprobs to a client."""

    vocabulary: Vocabulary
    as_ids: bool = False
    """Whether tokens are shown as `token_id:N`, as with vLLM's `return_tokens_as_token_ids`."""

    def chat_logprobs(self, result: GenerationResult | GenerationChunk) -> dict[str, Any]:
        """`choices[].logprobs` of a chat completion."""
        return {
            "content": [
                {**self._entry(token, value), "top_logprobs": [self._entry(*other) for other in others]}
                for token, value, others in zip(result.output_ids, result.logprobs, _tops(result), strict=True)
            ]
        }

    def text_logprobs(self, result: GenerationResult | GenerationChunk, offset: int) -> dict[str, Any]:
        """`choices[].logprobs` of a text completion that begins at character `offset`."""
        texts = [self._text(token) for token in result.output_ids]
        sizes = [len(self.vocabulary.token_bytes(token).decode("utf-8", "replace")) for token in result.output_ids]
        offsets = np.cumsum([offset, *sizes])[:-1].tolist()
        each = zip(texts, result.logprobs, _tops(result), strict=True)
        return {
            "text_offset": offsets,
            "token_logprobs": [float(value) for value in result.logprobs],
            "tokens": texts,
            "top_logprobs": [
                {text: float(value), **{self._text(other): float(its) for other, its in others}}
                for text, value, others in each
            ],
        }

    def _text(self, token: int) -> str:
        return (
            f"token_id:{token}" if self.as_ids else self.vocabulary.token_bytes(token).decode("utf-8", "replace")
        )

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.vocabulary.token_bytes(token)
        return {"token": self._text(token), "logprob": float(logprob), "bytes": list(data)}


def _tops(result: GenerationResult | GenerationChunk) -> Sequence[TopLogprobs]:
    """The top logprobs at each token; () where a server gave none."""
    return result.top_logprobs if result.top_logprobs is not None else [()] * len(result.output_ids)


_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "seed")
_OURS = frozenset(
    (
        *("model", "messages", "prompt", "tools", "tool_choice", "n", "max_tokens", "max_completion_tokens"),
        *("stop", "stop_token_ids", "logprobs", "top_logprobs", "chat_template_kwargs", "extra_body", "stream"),
        *("split", "user", "timeout", "extra_headers", "return_token_ids", "parallel_tool_calls", *_SAMPLED),
    )
)
"""Fields that are read or ignored here; all others go to the provider unchanged."""


def parse_sampling(arguments: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters among keyword arguments; ValueError for a value that is not supported."""
    body = _with_extra_body(arguments)
    if body.get("stream"):
        raise ValueError("A managed server gives whole answers: leave `stream` out.")
    for name in ("n", "max_tokens", "max_completion_tokens", "top_k", "seed"):
        value = body.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"`{name}` is not a whole number: {value!r}.")
    for name in ("n", "max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is not None and value < 1:
            raise ValueError(f"`{name}` is below 1: {value}.")
    for name in ("temperature", "top_p", "min_p"):
        value = body.get(name)
        if value is not None and (not isinstance(value, int | float) or not 0 <= value < float("inf")):
            raise ValueError(f"`{name}` is not a number of 0 or more: {value!r}.")
    stop, ids = body.get("stop") or (), body.get("stop_token_ids") or ()
    if not isinstance(stop, str | list | tuple) or not all(isinstance(item, str) for item in stop):
        raise ValueError("`stop` is not a string or a list of strings.")
    if not isinstance(ids, list | tuple) or not all(type(item) is int for item in ids):
        raise ValueError("`stop_token_ids` is not a list of token ids.")
    max_tokens = body.get("max_completion_tokens")
    top = body.get("top_logprobs") or 0
    if not top and type(body.get("logprobs")) is int:  # where /v1/completions has their number
        top = body["logprobs"]
    return SamplingParams(
        **{name: body.get(name) for name in _SAMPLED},
        max_tokens=max_tokens if max_tokens is not None else body.get("max_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(ids),
        n=body.get("n") or 1,
        top_logprobs=top,
        extra={name: value for name, value in body.items() if name not in _OURS and value is not None},
    )


def _with_extra_body(arguments: Mapping[str, Any]) -> dict[str, Any]:
    extra = arguments.get("extra_body") or {}
    if not isinstance(extra, Mapping):
        raise ValueError("`extra_body` is not a mapping.")
    return {**arguments, **extra}


def parse_chat_call(arguments: Mapping[str, Any]) -> ChatCall:
    """The arguments that the prompt depends on; if the last message is the assistant's, it is continued."""
    messages = as_messages(arguments.get("messages"), "messages")
    if not messages:
        raise ValueError("`messages` is empty.")
    body = _with_extra_body(arguments)
    if not isinstance(body.get("chat_template_kwargs") or {}, Mapping):
        raise ValueError("`chat_template_kwargs` is not a mapping.")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise ValueError(
            "`tool_choice` can be auto or none: to force a call a server samples text that is not in the chat "
            "template's form."
        )
    return ChatCall(
        messages,
        as_tools(body.get("tools"), "tools"),
        dict(body.get("chat_template_kwargs") or {}),
        add_generation_prompt=messages[-1].role != "assistant",
    )


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Reads text, reasoning and tool calls from sampled tokens."""

    tokenizer: Tokenizer
    reasoning: Parser | None = None
    tools: Parser | None = None

    def read_text(self, result: GenerationResult, sampling: SamplingParams) -> str:
        """The text of an answer, without the stop token or text that ended it."""
        shown = bool(sampling.extra.get("include_stop_str_in_output"))
        return decode(
            self.tokenizer.vocabulary,
            result.output_ids,
            end_ids={*self.tokenizer.eos_ids, *sampling.stop_token_ids},
            stop=sampling.stop,
            keep_stop=shown,
        )

    def read_message(
        self, result: GenerationResult, sampling: SamplingParams, call: ChatCall, *, calls: bool
    ) -> tuple[dict[str, Any], str | None]:
        """An answer as an assistant message, and its finish reason; tool calls are read only if `calls`."""
        prompt_end = self.tokenizer.vocabulary.text(np.array(result.input_ids[-64:], np.int32))
        options = ParseOptions(call.tools if calls else (), prompt_end)
        parsed = parse_answer(self.read_text(result, sampling), self.reasoning, self.tools, options)
        message = to_message(parsed, lambda number: f"call_{uuid4().hex[:24]}")
        return message, finish_reason(parsed, result.finish_reason)


def answer_types() -> Mapping[str, Callable[..., Any]]:
    """The response types of the openai package, by name; SetupError if it is not installed."""
    try:
        from openai.types import Completion
        from openai.types.chat import ChatCompletion
    except ImportError:
        raise SetupError(
            "A managed server answers with types of the openai package: pip install 'tito-audit[serve]'"
        ) from None
    return {"Completion": Completion.construct, "ChatCompletion": ChatCompletion.construct}


def usage_of(results: Sequence[GenerationResult]) -> dict[str, int]:
    """`usage` of the answers to one prompt, which counts once."""
    return usage(len(results[0].input_ids), sum(len(result.output_ids) for result in results))
