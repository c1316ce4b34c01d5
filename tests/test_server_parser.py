"""`serve --tool-parser server`: what was sampled is parsed by the server that sampled it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import toy
from tests.gateway.clients import CLIENTS
from tests.serving import ASK, SAID, TOOLS, Scripted, check_chain, client, logged, make_gateway, served
from tito_audit.errors import ProviderError
from tito_audit.parser import Parsed, ParsedCall, ParseOptions, Reads
from tito_audit.parsers import parse_answer, parser_named
from tito_audit.provider import GenerationResult
from tito_audit.serve.gateway import Gateway
from tito_audit.tokens.text_stream import decode

CALL = (
    "<think>\nHm.\n</think>\n\n"
    '<tool_call>\n{"name": "weather",  "arguments": {"city":   "Oslo"}}\n</tool_call><|im_end|>'
)


class Parsing(Scripted):
    """A provider whose server parses answers, and writes arguments anew as vLLM does."""

    fails: ProviderError | None = None
    requests: list[Mapping[str, Any]]

    async def derender(
        self, results: Sequence[GenerationResult], chat_request: Mapping[str, Any]
    ) -> tuple[Parsed, ...]:
        self.requests.append(chat_request)
        if self.fails is not None:
            raise self.fails
        return tuple(self._parsed(result, chat_request) for result in results)

    def _parsed(self, result: GenerationResult, chat_request: Mapping[str, Any]) -> Parsed:
        tokenizer = toy.toy_tokenizer("toy_bpe")
        text = decode(tokenizer.vocabulary, result.output_ids, end_ids=tokenizer.eos_ids)
        options = ParseOptions(chat_request.get("tools", ()))
        answer = parse_answer(
            text, parser_named("qwen3", Reads.REASONING), parser_named("hermes", Reads.TOOLS), options
        )
        calls = (ParsedCall(call.name, json.dumps(json.loads(call.arguments))) for call in answer.tool_calls)
        return Parsed(answer.content, answer.reasoning, tuple(calls))


def parsing_gateway(log: Path, answers: list[str]) -> tuple[Gateway, Parsing]:
    gateway, _ = make_gateway(log, [])
    provider = Parsing(toy.toy_tokenizer("toy_bpe"), answers)
    provider.requests = []
    gateway.provider, gateway.server_parses = provider, True
    return gateway, provider


@pytest.mark.parametrize("api", CLIENTS)
def test_an_agent_gets_what_the_server_parsed_and_leaves_a_clean_log(tmp_path: Path, api: str) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = parsing_gateway(log, [CALL, SAID] * 2)
    with served(gateway) as address:
        for streams in (False, True):
            agent = CLIENTS[api](f"{address}/s/{streams}", [{"user": "Oslo?"}])
            first = agent.ask(streams)
            assert first.says["calls"] == [["weather", {"city": "Oslo"}]]
            assert (first.says["text"], first.why) == ("", "calls")
            assert first.says["reasoning"] == ("\nHm.\n" if agent.shows_reasoning else "")
            assert agent.tell("result", "rain", streams).says["text"] == "\n\nIt rains in Oslo."
    rows = logged(log)
    check_chain(rows[:2])
    check_chain(rows[2:])
    (call,) = rows[0]["response_message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Oslo"}', "as the server writes it"
    assert [tuple(row["completion_token_ids"]) for row in rows] == provider.sampled
    assert [request["tools"] for request in provider.requests] == [TOOLS] * 4
    assert provider.requests[0]["messages"] == [{"role": "user", "content": "Oslo?"}]


def test_without_tools_the_server_is_told_of_none(tmp_path: Path) -> None:
    gateway, provider = parsing_gateway(tmp_path / "log.jsonl", [CALL, CALL])
    with served(gateway) as address:
        agent = client(address)
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            (choice,) = agent.chat.completions.create(model="toy", messages=[ASK], **more).choices
            assert choice.message.tool_calls is None
            assert "<tool_call>" in choice.message.content
    assert all("tools" not in request for request in provider.requests)


@pytest.mark.parametrize("streams", [False, True])
def test_where_the_server_does_not_parse_the_client_gets_its_error(tmp_path: Path, streams: bool) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = parsing_gateway(log, [CALL])
    provider.fails = ProviderError("this server does not parse answers", status=404)

    def ask(address: str) -> None:
        answer = client(address).chat.completions.create(model="toy", messages=[ASK], stream=streams)
        if streams:
            list(answer)

    with served(gateway) as address, pytest.raises(openai.APIError, match="does not parse answers"):
        ask(address)
    assert [row["status"] for row in (logged(log) if log.exists() else [])] == (["broken_off"] if streams else [])


def test_texts_of_completions_are_not_parsed(tmp_path: Path) -> None:
    gateway, provider = parsing_gateway(tmp_path / "log.jsonl", [SAID])
    with served(gateway) as address:
        answer = client(address).completions.create(model="toy", prompt="Weather: ")
    assert answer.choices[0].text == SAID.removesuffix("<|im_end|>")
    assert provider.requests == []
