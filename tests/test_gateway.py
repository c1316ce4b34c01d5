"""The gateway over HTTP, as the openai client meets it; its provider's answers are written down."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import openai
import orjson
import pytest
from pydantic import BaseModel

from tests.gateway.clients import added_up, as_sent_back
from tests.serving import (
    ASK,
    CALL,
    PLAIN,
    TOOLS,
    asked,
    client,
    codes_of,
    fetched,
    gated,
    logged,
    make_gateway,
    plain,
    served,
    until,
)
from tito_audit.serve.app import HttpOptions


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_adds_up_to_what_the_same_ids_are_in_one_piece(tmp_path: Path, n: int) -> None:
    answers = [f"<think>\nHm {k}.\n</think>\n\nWell, {k}. {CALL}" for k in range(n)]
    ask: Any = {"model": "toy", "messages": [ASK], "tools": TOOLS, "n": n}
    more: Any = {"stream_options": {"include_usage": True}, "extra_body": {"return_token_ids": True}}
    with gated(tmp_path, answers * 2) as (address, _, log):
        whole = client(address, "/s/whole").chat.completions.create(**ask)
        pieces = client(address, "/s/pieces").chat.completions.create(**ask, **more, stream=True, logprobs=True)
        *chunks, last = pieces
    rows = logged(log)[n:]
    assert last.choices == []
    assert last.usage.completion_tokens == sum(len(row["completion_token_ids"]) for row in rows)
    for choice in whole.choices:
        own = [chunk for chunk in chunks if chunk.choices[0].index == choice.index]
        parts = [chunk.choices[0] for chunk in own]
        message = added_up(own)
        assert message["content"] == choice.message.content
        function = choice.message.model_dump()["tool_calls"][0]["function"]
        assert message["tool_calls"][0]["function"] == function
        assert message["reasoning_content"] == choice.message.reasoning_content
        assert parts[-1].finish_reason == choice.finish_reason == "tool_calls"
        ids = [token for part in parts for token in getattr(part, "token_ids", None) or ()]
        assert ids == rows[choice.index]["completion_token_ids"]
        scored = [entry.logprob for part in parts if part.logprobs for entry in part.logprobs.content]
        np.testing.assert_allclose(scored, rows[choice.index]["logprobs"])
    assert codes_of(log, passes="warning") == []


def test_a_client_that_does_not_wait_for_a_whole_answer_ends_its_generation(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [PLAIN, PLAIN], start_parser=plain)
    provider.pause = 600.0
    with served(gateway) as address:
        wire = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        wire.request("POST", "/v1/chat/completions", orjson.dumps({"messages": [ASK]}))
        until(lambda: provider.prompts)
        wire.close()
        until(lambda: "tito_audit_in_flight 1.0" in metrics_of(address))  # that of this very request
        provider.pause = 0.0
        client(address).chat.completions.create(model="toy", messages=[ASK])
    assert provider.closed_early == 1
    (row,) = logged(log)
    assert row["status"] == "answered"


def metrics_of(address: str) -> str:
    return fetched(address, "/metrics")[2].decode()


def test_a_key_may_be_any_bytes(tmp_path: Path) -> None:
    with gated(tmp_path, [], options=HttpOptions(api_key="schlüssel")) as (address, *_):
        host, port = address.removeprefix("http://").split(":")
        for key, status in ((b"\xff\xfe", b"401"), ("schlüssel".encode(), b"200")):
            with socket.create_connection((host, int(port)), timeout=10) as wire:
                wire.sendall(b"GET /sessions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + key + b"\r\n\r\n")
                assert wire.recv(200).split()[1] == status


def test_without_its_line_there_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.jsonl"
    gateway, _ = make_gateway(log, [PLAIN, PLAIN, PLAIN], start_parser=plain)
    write, is_full = os.write, [True]

    def filled(file: int, data: bytes) -> int:
        """A disk that takes a part of a line."""
        is_log = os.path.samestat(os.fstat(file), log.stat())
        return write(file, data[:100]) if is_log and is_full else write(file, data)

    monkeypatch.setattr(os, "write", filled)
    with served(gateway) as address:
        status, answer = asked(address, "/v1/chat/completions", {"messages": [ASK]})
        streamed = fetched(address, "/v1/chat/completions", {"messages": [ASK], "stream": True})[2]
        is_full.clear()
        assert asked(address, "/v1/chat/completions", {"messages": [ASK]})[0] == 200
    assert status == 507
    assert "the disk is full" in answer["error"]["message"]
    assert b"[DONE]" not in streamed
    assert b'"finish_reason":"stop"' not in streamed
    (row,) = logged(log)
    assert row["branch"] == "start", "what was not logged is not in the session"


def test_the_access_log_and_metrics_hold_nothing_of_a_prompt_or_a_name(tmp_path: Path) -> None:
    lines: list[str] = []
    with gated(tmp_path, [PLAIN, PLAIN], start_parser=plain, options=HttpOptions(access_log=lines.append)) as (
        address,
        *_,
    ):
        client(address, "/s/my-name").chat.completions.create(model="toy", messages=[ASK])
        asked(address, "/v1/chat/completions?key=hidden", {"messages": []})
        metrics = metrics_of(address)
    assert len(lines) == 3
    assert lines[0].startswith("POST /s/{session}/v1/chat/completions 200 ")
    for text in (metrics, *lines):
        assert not any(word in text for word in ("Oslo", "my-name", "hidden"))
    assert 'tito_audit_prompts_total{branch="start"} 1.0' in metrics
    assert "tito_audit_sessions 1.0" in metrics


def test_many_calls_at_once_are_each_logged_whole(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [PLAIN] * 120, start_parser=plain)
    provider.pause = 0.002

    async def talk(agent: openai.AsyncOpenAI, k: int) -> None:
        history: list[Any] = [{"role": "user", "content": f"Question {k}"}]
        for turn in range(3):
            answer = await agent.chat.completions.create(model="toy", messages=history)
            history += [as_sent_back(answer.choices[0].message), {"role": "user", "content": f"More {turn}"}]

    async def all_of_them(address: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0) as agent:
            await asyncio.gather(*(talk(agent, k) for k in range(40)))

    with served(gateway) as address:
        asyncio.run(all_of_them(address))
    rows = logged(log)
    assert len(rows) == 120
    assert len({row["thread_id"] for row in rows}) == 40
    assert codes_of(log) == []


def test_answers_of_one_call_that_are_equal_are_samples_of_their_own(tmp_path: Path) -> None:
    answer = "A<|im_end|>"
    with gated(tmp_path, [answer, answer, answer]) as (address, _, log):
        client(address).chat.completions.create(model="toy", messages=[ASK], n=3)
    rows = logged(log)
    assert len({tuple(row["completion_token_ids"]) for row in rows}) == 1
    assert codes_of(log) == []
    log.write_bytes(log.read_bytes() + orjson.dumps(rows[1]) + b"\n")
    assert codes_of(log) == ["REC009"]


class Weather(BaseModel):
    city: str
    degrees: int


def test_a_schema_is_passed_on_and_the_answer_parsed(tmp_path: Path) -> None:
    gateway, provider = make_gateway(
        tmp_path / "log.jsonl", ['{"city": "Oslo", "degrees": 7}<|im_end|>'] * 2, start_parser=plain
    )
    with served(gateway) as address:
        responses = client(address).responses
        parsed = responses.parse(model="toy", input="Oslo?", text_format=Weather)
        with responses.stream(model="toy", input="Oslo?", text_format=Weather) as stream:
            streamed = stream.get_final_response()
    assert parsed.output_parsed == streamed.output_parsed == Weather(city="Oslo", degrees=7)
    for sampling in provider.asked:
        wanted = sampling.extra["response_format"]
        assert (wanted["type"], wanted["json_schema"]["name"]) == ("json_schema", "Weather")
        assert wanted["json_schema"]["schema"]["required"] == ["city", "degrees"]
