"""Answers to clients: completions and chat completions, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import orjson

from tito_audit.provider import GenerationChunk, GenerationResult
from tito_audit.serve.gateway import Call, Gateway
from tito_audit.sessions.shapes import Head, Tokens, usage


def chat_answer(gateway: Gateway, call: Call, results: Sequence[GenerationResult]) -> dict[str, Any]:
    """A whole chat completion."""
    choices = []
    for index, (one, result) in enumerate(zip(call.answers, results, strict=True)):
        choice = {
            "index": index,
            "message": {"refusal": None, **one.reading.message()},
            "logprobs": _chat_logprobs(gateway, call, result),
            "finish_reason": one.reading.why(result.finish_reason),
            "stop_reason": result.stop_reason,
        }
        choices.append({**choice, "token_ids": result.output_ids} if call.asked.token_ids else choice)
    more = {"prompt_token_ids": orjson.Fragment(call.ids.json)} if call.asked.token_ids else {}
    return _head(gateway, call).chat(choices, usage=_usage(call), **more)


def text_answer(gateway: Gateway, call: Call, results: Sequence[GenerationResult]) -> dict[str, Any]:
    """A whole completion."""
    choices = []
    for index, (one, result) in enumerate(zip(call.answers, results, strict=True)):
        choice = {
            "index": index,
            "text": one.reading.text,
            "logprobs": _text_logprobs(gateway, call, result, 0),
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
        }
        if call.asked.token_ids:
            choice |= {"prompt_token_ids": orjson.Fragment(call.ids.json), "token_ids": result.output_ids}
        choices.append(choice)
    return _head(gateway, call).text(choices, usage=_usage(call))


async def chat_stream(gateway: Gateway, call: Call) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a streamed chat completion. The last ones are sent once it is in the log."""
    head, asked = _head(gateway, call), call.asked
    ids: dict[str, Any] = {"prompt_token_ids": orjson.Fragment(call.ids.json)} if asked.token_ids else {}
    begin = {"role": "assistant", "content": ""}
    started = False
    async with aclosing(gateway.stream(call)) as pieces:
        async for chunk, deltas in pieces:
            if not started:
                started = True
                for index in range(len(call.answers)):
                    yield head.chat_chunk([_choice(index, delta=begin)], **ids)
            shown = _shown(gateway, call, chunk)
            # Tokens are sent once, with the first of their deltas.
            for number, delta in enumerate(deltas or ([{}] if shown else [])):
                yield head.chat_chunk([_choice(chunk.index, delta=delta, **({} if number else shown))])
    for index, one in enumerate(call.answers):
        choice = _choice(index, delta={}, stop_reason=one.stop_reason)
        yield head.chat_chunk([{**choice, "finish_reason": one.reading.why(one.finish_reason)}])
    if asked.include_usage:
        yield head.chat_chunk([], usage=_usage(call))


async def text_stream(gateway: Gateway, call: Call) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a streamed completion. The last ones are sent once it is in the log."""
    head, asked = _head(gateway, call), call.asked
    offsets = [0] * len(call.answers)
    told: set[int] = set()
    async with aclosing(gateway.stream(call)) as pieces:
        async for chunk, deltas in pieces:
            index = chunk.index
            text = "".join(delta.get("content", "") for delta in deltas)
            more: dict[str, Any] = {"token_ids": chunk.output_ids} if asked.token_ids else {}
            if asked.token_ids and index not in told:
                more["prompt_token_ids"] = orjson.Fragment(call.ids.json)
                told.add(index)
            if asked.logprobs:
                more["logprobs"] = _text_logprobs(gateway, call, chunk, offsets[index])
            offsets[index] += len(text)
            if text or more:
                yield head.text([_choice(index, text=text, **more)])
    for index, one in enumerate(call.answers):
        choice = _choice(index, text="", stop_reason=one.stop_reason)
        yield head.text([{**choice, "finish_reason": one.finish_reason}])
    if asked.include_usage:
        yield head.text([], usage=_usage(call))


def _head(gateway: Gateway, call: Call) -> Head:
    return Head(call.call_id, int(call.created), call.asked.model or gateway.model)


def _choice(index: int, **said: Any) -> dict[str, Any]:
    return {"index": index, "logprobs": None, "finish_reason": None, **said}


def _usage(call: Call) -> dict[str, int]:
    return usage(len(call.ids), sum(len(one.ids) for one in call.answers))


def _shown(gateway: Gateway, call: Call, chunk: GenerationChunk) -> dict[str, Any]:
    """The tokens of a chunk, as far as the client asked to see them."""
    if not chunk.output_ids:
        return {}
    shown: dict[str, Any] = {"token_ids": chunk.output_ids} if call.asked.token_ids else {}
    if call.asked.logprobs:
        shown["logprobs"] = _chat_logprobs(gateway, call, chunk)
    return shown


def _chat_logprobs(gateway: Gateway, call: Call, one: GenerationResult | GenerationChunk) -> Any:
    if not call.asked.logprobs:
        return None
    return Tokens(gateway.tokenizer.vocabulary).chat_logprobs(one)


def _text_logprobs(gateway: Gateway, call: Call, one: GenerationResult | GenerationChunk, offset: int) -> Any:
    if not call.asked.logprobs:
        return None
    return Tokens(gateway.tokenizer.vocabulary).text_logprobs(one, offset)
