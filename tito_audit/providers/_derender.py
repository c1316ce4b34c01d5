"""vLLM's own parsers: sampled ids are sent back and returned as reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tito_audit.errors import ProviderError
from tito_audit.parser import Parsed, ParsedCall
from tito_audit.provider import GenerationResult

PATH = "/v1/chat/completions/derender"


def derender_body(
    model: str, results: Sequence[GenerationResult], chat_request: Mapping[str, Any]
) -> dict[str, Any]:
    """The request to parse the answers to one prompt."""
    choices = [
        {
            "index": index,
            "token_ids": list(result.output_ids),
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
        }
        for index, result in enumerate(results)
    ]
    return {
        "model": model,
        "generate_response": {"request_id": "derender", "model": model, "choices": choices},
        "chat_request": {**chat_request, "model": model, "stream": False},
        "prompt_tokens": len(results[0].input_ids),
        "prompt_token_ids": list(results[0].input_ids),
    }


def derendered(answer: object, count: int, where: str) -> tuple[Parsed, ...]:
    """The answers as the server parsed them, in the order of their index; ProviderError for anything else."""
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    try:
        parsed = {choice["index"]: _parsed(choice["message"]) for choice in choices or ()}
        return tuple(parsed[index] for index in range(count))
    except (AttributeError, KeyError, TypeError) as error:
        raise ProviderError(
            f"{where}: {count} answers were sent, and not all came back parsed ({error})"
        ) from None


def _parsed(message: Mapping[str, Any]) -> Parsed:
    calls = (call["function"] for call in message.get("tool_calls") or ())
    return Parsed(
        message.get("content") or None,
        message.get("reasoning") or message.get("reasoning_content") or None,
        tuple(ParsedCall(call["name"], call["arguments"]) for call in calls),
    )
