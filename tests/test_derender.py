"""Answers parsed by the server that sampled them: recorded ones, wrong ones, and those of a real vLLM server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from tests.replay import recorded, serving
from tests.replay_paths import RECORDED
from tests.tiers import DEEP
from tests.vllm.server import VllmServer
from tito_audit.errors import ProviderError
from tito_audit.parser import Parsed, ParsedCall, ParseOptions, Reads
from tito_audit.parsers import parse_answer, parser_named
from tito_audit.provider import GenerationResult, SamplingParams
from tito_audit.providers.vllm import VLLMProvider
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.text_stream import decode

CALLED = Parsed(None, "\nI should look.\n", (ParsedCall("get_weather", '{"city": "Rome", "celsius": true}'),))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def result(ids: list[int], *, prompt: tuple[int, ...] = (1, 2), reason: str = "stop") -> GenerationResult:
    return GenerationResult(prompt, tuple(ids), (0.0,) * len(ids), finish_reason=reason)


def parsed_by(handler: Any, results: list[GenerationResult], request: dict) -> tuple[Parsed, ...]:
    async def run() -> tuple[Parsed, ...]:
        async with serving(handler) as url:
            provider = VLLMProvider(url)
            try:
                return await provider.derender(results, request)
            finally:
                await provider.close()

    return asyncio.run(run())


@pytest.mark.shared
@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recorded answers are not here")
@pytest.mark.parametrize(
    ("name", "expected"),
    [("tiny-derender", CALLED), ("derender-chat-tools", Parsed(None, None, CALLED.tool_calls))],
)
def test_recorded_answers_come_back_parsed(name: str, expected: Parsed) -> None:
    (row,) = recorded(name)
    request = row["request"]
    (choice,) = request["generate_response"]["choices"]
    sampled = result(choice["token_ids"], prompt=tuple(request["prompt_token_ids"]))
    sent: list[dict] = []
    assert parsed_by(answering(row["response"], sent=sent), [sampled], request["chat_request"]) == (expected,)
    (body,) = sent
    assert body["prompt_token_ids"] == request["prompt_token_ids"]
    assert body["chat_request"] == {**request["chat_request"], "model": "m", "stream": False}
    (choice_sent,) = body["generate_response"]["choices"]
    assert choice_sent == {key: choice[key] for key in choice_sent}, "as the server itself states it"


def answering(body: object, status: int = 200, sent: list[dict] | None = None) -> Any:
    async def handler(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": 100}]})
        if sent is not None:
            sent.append(await request.json())
        return web.json_response(body, status=status)

    return handler


def message(index: int, **values: Any) -> dict:
    return {"index": index, "message": {"role": "assistant", **values}}


def test_several_answers_come_back_in_their_order() -> None:
    body = {"choices": [message(1, content="b", reasoning_content="r"), message(0, content="", reasoning=None)]}
    assert parsed_by(answering(body), [result([3]), result([4])], {"messages": []}) == (
        Parsed(None),
        Parsed("b", "r"),
    )


def test_a_server_that_parses_nothing_is_named_with_what_to_do() -> None:
    with pytest.raises(ProviderError, match="does not parse answers; start it with --enable-scale-out"):
        parsed_by(answering({"detail": "Not Found"}, 404), [result([3])], {"messages": []})


@pytest.mark.parametrize(
    "body",
    [
        *({}, [], {"choices": []}, {"choices": [{"index": 0}]}, {"choices": [message(1, content="a")]}),
        {"choices": [message(0, tool_calls=[{"function": {"name": "f"}}])]},
        {"choices": ["x"]},
    ],
)
def test_an_answer_that_is_not_parsed_is_an_error_of_one_line(body: object) -> None:
    with pytest.raises(ProviderError, match="1 answers were sent, and not all came back parsed") as raised:
        parsed_by(answering(body), [result([3])], {"messages": []})
    assert "\n" not in str(raised.value)


def test_no_answers_are_not_sent() -> None:
    assert parsed_by(answering({}, 500), [], {"messages": []}) == ()


@pytest.mark.skipif(not DEEP, reason="make vllm")
@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "no tools"])
def test_a_real_server_parses_what_it_sampled_as_it_is_parsed_here(vllm_server: VllmServer, tools: list) -> None:
    tokenizer = load_tokenizer(str(vllm_server.model))
    call = r'\{"name":"get_weather", "arguments": \{"city":"(Paris|Rome)"\}\}'
    regex = rf"<think>\nHm\.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"
    prompt = tokenizer.encode("<|im_start|>user\nWarm?<|im_end|>\n<|im_start|>assistant\n").tolist()
    sampling = SamplingParams(
        temperature=1.0, max_tokens=200, seed=3, n=2, extra={"structured_outputs": {"regex": regex}}
    )
    chat = {"messages": [{"role": "user", "content": "Warm?"}], **({"tools": tools} if tools else {})}

    async def run() -> tuple[tuple[GenerationResult, ...], tuple[Parsed, ...]]:
        provider = VLLMProvider(vllm_server.url)
        try:
            results = await provider.generate_n(prompt, sampling)
            return results, await provider.derender(results, chat)
        finally:
            await provider.close()

    results, theirs = asyncio.run(run())
    assert len(theirs) == 2
    for sampled, parsed in zip(results, theirs, strict=True):
        text = decode(tokenizer.vocabulary, sampled.output_ids, end_ids=tokenizer.eos_ids)
        ours = parse_answer(
            text,
            parser_named("qwen3", Reads.REASONING),
            parser_named("hermes", Reads.TOOLS),
            ParseOptions(tools),
        )
        assert (ours.content, ours.reasoning) == (parsed.content, parsed.reasoning)
        assert [call.name for call in ours.tool_calls] == [call.name for call in parsed.tool_calls]
        for own, other in zip(ours.tool_calls, parsed.tool_calls, strict=True):
            assert json.loads(own.arguments) == json.loads(other.arguments)
        assert bool(ours.tool_calls) == bool(tools)
