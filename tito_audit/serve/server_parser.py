"""Answers parsed by the server that sampled them, for model families without a parser here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from tito_audit.parser import Delta, Parsed
from tito_audit.provider import GenerationResult
from tito_audit.serve.request import ChatAsked


@runtime_checkable
class ParsingProvider(Protocol):
    """A provider whose server has parsers of its own."""

    async def derender(
        self, results: Sequence[GenerationResult], chat_request: Mapping[str, Any]
    ) -> tuple[Parsed, ...]:
        """The answers to one prompt, parsed; ProviderError if the server cannot."""
        ...


class SilentRun:
    """A parser run that emits nothing, because the server parses the whole answer at the end."""

    def feed(self, text: str) -> Sequence[Delta]:
        return ()

    def close(self) -> Sequence[Delta]:
        return ()


def chat_request(fields: ChatAsked) -> dict[str, Any]:
    """The request as the server's parsers need it."""
    body: dict[str, Any] = {
        "messages": list(fields.messages),
        "chat_template_kwargs": dict(fields.call.template_kwargs),
        "skip_special_tokens": not fields.special,
    }
    return {**body, "tools": list(fields.call.tools)} if fields.parses_calls else body


def deltas_of(parsed: Parsed) -> tuple[Delta, ...]:
    """A parsed answer as deltas."""
    calls = (
        Delta(call=number, name=call.name, arguments=call.arguments)
        for number, call in enumerate(parsed.tool_calls)
    )
    return (Delta(parsed.content or "", parsed.reasoning or ""), *calls)
