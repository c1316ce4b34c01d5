"""Arguments of a managed server's calls, and its answers as OpenAI objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np

from tito_audit.errors import SetupError
from tito_audit.parser import ParseOptions, Parser
from tito_audit.parsers import finish_reason, parse_answer, to_message
from tito_audit.provider import GenerationResult, SamplingParams
from tito_audit.record.message import as_messages, as_tools
from tito_audit.sessions.model import ChatCall
from tito_audit.sessions.shapes import Head, usage
from tito_audit.tokens.text_stream import decoded
from tito_audit.tokens.tokenizer import Tokenizer

_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "seed")
_OURS = frozenset(
    (
        *(
            "model",
            "messages",
            "prompt",
            "tools",
            "tool_choice",
            "n",
            "max_tokens",
            "max_completion_tokens",
            "stop",
        ),
        *("stop_token_ids", "logprobs", "top_logprobs", "chat_template_kwargs", "extra_body", "stream", "split"),
        *("user", "timeout", "extra_headers", "return_token_ids", "parallel_tool_calls", *_SAMPLED),
    )
)
"""Fields that are read or ignored here; every other field goes to the provider as it is."""
_PROMPT_END = 64
"""Ids at the end of a prompt that parsers are shown, as text."""


def sampling_of(given: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters among keyword arguments; ValueError if one is not supported."""
    asked = _merged(given)
    if asked.get("stream"):
        raise ValueError("A managed server gives whole answers: leave `stream` out.")
    _check_types(asked)
    stop = asked.get("stop") or ()
    longest = asked.get("max_completion_tokens")
    top = asked.get("top_logprobs") or 0
    if not top and type(asked.get("logprobs")) is int:  # /v1/completions has their number there
        top = asked["logprobs"]
    return SamplingParams(
        **{name: asked.get(name) for name in _SAMPLED},
        max_tokens=longest if longest is not None else asked.get("max_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(asked.get("stop_token_ids") or ()),
        n=asked.get("n") or 1,
        top_logprobs=top,
        extra={name: value for name, value in asked.items() if name not in _OURS and value is not None},
    )


def _merged(given: Mapping[str, Any]) -> dict[str, Any]:
    """All keyword arguments, `extra_body` included."""
    extra = given.get("extra_body") or {}
    if not isinstance(extra, Mapping):
        raise ValueError("`extra_body` is not a mapping.")
    return {**given, **extra}


def _check_types(asked: Mapping[str, Any]) -> None:
    for name in ("n", "max_tokens", "max_completion_tokens", "top_k", "seed"):
        value = asked.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"`{name}` is not a whole number: {value!r}.")
    for name in ("n", "max_tokens", "max_completion_tokens"):
        value = asked.get(name)
        if value is not None and value < 1:
            raise ValueError(f"`{name}` is below 1: {value}.")
    for name in ("temperature", "top_p", "min_p"):
        value = asked.get(name)
        if value is not None and (not isinstance(value, int | float) or not 0 <= value < float("inf")):
            raise ValueError(f"`{name}` is not a number of 0 or more: {value!r}.")
    stop, ids = asked.get("stop") or (), asked.get("stop_token_ids") or ()
    if not isinstance(stop, str | list | tuple) or not all(isinstance(one, str) for one in stop):
        raise ValueError("`stop` is not a string or a list of strings.")
    if not isinstance(ids, list | tuple) or not all(type(one) is int for one in ids):
        raise ValueError("`stop_token_ids` is not a list of token ids.")


def chat_call(given: Mapping[str, Any]) -> ChatCall:
    """The arguments that the prompt depends on. A last message of the assistant is continued."""
    messages = as_messages(given.get("messages"), "messages")
    if not messages:
        raise ValueError("`messages` is empty.")
    asked = _merged(given)
    if not isinstance(asked.get("chat_template_kwargs") or {}, Mapping):
        raise ValueError("`chat_template_kwargs` is not a mapping.")
    if asked.get("tool_choice") not in (None, "auto", "none"):
        raise ValueError(
            "`tool_choice` can be auto or none: to force a call a server samples text that is not in the chat "
            "template's form."
        )
    return ChatCall(
        messages,
        as_tools(asked.get("tools"), "tools"),
        dict(asked.get("chat_template_kwargs") or {}),
        add_generation_prompt=messages[-1].role != "assistant",
    )


@dataclass(frozen=True, slots=True)
class Reader:
    """Turns sampled tokens into what a client gets; the stored ids do not change."""

    tokenizer: Tokenizer
    reasoning: Parser | None = None
    tools: Parser | None = None

    def text(self, result: GenerationResult, sampling: SamplingParams) -> str:
        """An answer without the token or text that ended it."""
        shown = bool(sampling.extra.get("include_stop_str_in_output"))
        return decoded(
            self.tokenizer.vocabulary,
            result.output_ids,
            end_ids={*self.tokenizer.eos_ids, *sampling.stop_token_ids},
            stop=sampling.stop,
            keep_stop=shown,
        )

    def message(
        self, result: GenerationResult, sampling: SamplingParams, call: ChatCall, *, calls: bool
    ) -> tuple[dict[str, Any], str | None]:
        """An answer as an assistant message, and its finish reason; tool calls are read only where `calls`."""
        options = ParseOptions(call.tools if calls else (), self._prompt_end(result.input_ids))
        parsed = parse_answer(self.text(result, sampling), self.reasoning, self.tools, options)
        return to_message(parsed, lambda number: f"call_{uuid4().hex[:24]}"), finish_reason(
            parsed, result.finish_reason
        )

    def _prompt_end(self, ids: Sequence[int]) -> str:
        return self.tokenizer.vocabulary.text(np.array(ids[-_PROMPT_END:], np.int32))


def chat_completion(head: Head, choices: Sequence[Mapping[str, Any]], **more: Any) -> Any:
    """A `ChatCompletion` of the openai package."""
    return answer_types()["ChatCompletion"](**head.chat(choices, **more))


def text_completion(head: Head, choices: Sequence[Mapping[str, Any]], **more: Any) -> Any:
    """A `Completion` of the openai package."""
    return answer_types()["Completion"](**head.text(choices, **more))


def answer_types() -> Mapping[str, Callable[..., Any]]:
    """The answer types of the openai package, by name; SetupError if it is not installed."""
    try:
        from openai.types import Completion
        from openai.types.chat import ChatCompletion
    except ImportError:
        raise SetupError(
            "A managed server answers with types of the openai package: pip install 'tito-audit[serve]'"
        ) from None
    return {"Completion": Completion.construct, "ChatCompletion": ChatCompletion.construct}


def usage_of(results: Sequence[GenerationResult]) -> dict[str, int]:
    """How many tokens a call took; its prompt counts once."""
    return usage(len(results[0].input_ids), sum(len(one.output_ids) for one in results))
