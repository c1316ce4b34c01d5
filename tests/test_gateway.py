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

from tests.gateway.clients import Chat, added_up, as_sent_back
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
    whole_log, pieces_log = tmp_path / "whole.jsonl", tmp_path / "pieces.jsonl"
    gateway, _ = make_gateway(whole_log, answers)
    with served(gateway) as address:
        whole = client(address).chat.completions.create(model="toy", messages=[ASK], tools=TOOLS, n=n)
    gateway, _ = make_gateway(pieces_log, answers)
    with served(gateway) as address:
        pieces = list(
            client(address).chat.completions.create(
                model="toy",
                messages=[ASK],
                tools=TOOLS,
                n=n,
                stream=True,
                logprobs=True,
                stream_options={"include_usage": True},
                extra_body={"return_token_ids": True},
            )
        )
    *chunks, last = pieces
    assert last.choices == []
    assert last.usage.completion_tokens == sum(len(row["completion_token_ids"]) for row in logged(pieces_log))
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
        assert ids == logged(pieces_log)[choice.index]["completion_token_ids"]
        scored = [entry.logprob for part in parts if part.logprobs for entry in part.logprobs.content]
        np.testing.assert_allclose(scored, logged(pieces_log)[choice.index]["logprobs"])
    assert codes_of(pieces_log, passes="warning") == []


def test_several_answers_are_threads_of_their_own_and_the_one_that_goes_on_is_continued(tmp_path: Path) -> None:
    texts = [f"Answer {k} it is.<|im_end|>" for k in range(3)]
    with gated(tmp_path, [*texts, *texts, PLAIN], start_parser=plain) as (address, _, log):
        chat = client(address).chat.completions
        first = chat.create(model="toy", messages=[ASK], n=3)
        history = [ASK, as_sent_back(first.choices[1].message), {"role": "user", "content": "And then?"}]
        chat.create(model="toy", messages=history, n=3)
        chat.create(model="toy", messages=history)
    rows = logged(log)
    assert [row["choice"] for row in rows] == [0, 1, 2, 0, 1, 2, 0]
    threads = [row["thread_id"] for row in rows]
    assert len(set(threads)) == 6, "each answer is in one thread, and only one of them goes on"
    assert threads[3] == threads[1]
    assert {row["parent"]["choice"] for row in rows[3:]} == {1}
    assert {row["session_id"] for row in rows} == {rows[0]["session_id"]}
    assert codes_of(log, passes="warning") == []


def test_sessions_are_named_by_header_or_path_or_found_by_history(tmp_path: Path) -> None:
    with gated(tmp_path, [PLAIN] * 4, start_parser=plain) as (address, *_):
        ask: Any = {"model": "toy", "messages": [ASK]}
        client(address, "/s/by-path").chat.completions.create(**ask)
        headers = {"X-Session-ID": "by-header"}
        answer = client(address).chat.completions.with_raw_response.create(**ask, extra_headers=headers)
        assert answer.headers["X-Session-ID"] == "by-header"
        assert answer.headers["X-Tito-Branch"] == "start"
        message = as_sent_back(answer.parse().choices[0].message)
        more: Any = [ASK, message, {"role": "user", "content": "Thanks"}]
        continued = client(address).chat.completions.with_raw_response.create(model="toy", messages=more)
        # The latest of the sessions that have this history.
        assert continued.headers["X-Session-ID"] == "by-header"
        edited = [{**ASK, "content": "Else?"}, message, {"role": "user", "content": "Thanks"}]
        fork = client(address, "/s/by-header").chat.completions.with_raw_response.create(
            model="toy", messages=edited
        )
        assert fork.headers["X-Tito-Branch"] == "fork"
        assert fork.headers["X-Tito-Fork"] == "edited"
        _, listed = asked(address, "/sessions")
    assert [session["session_id"] for session in listed["sessions"]] == ["by-path", "by-header"]


def test_a_session_is_read_closed_with_a_reward_and_deleted(tmp_path: Path) -> None:
    with gated(tmp_path, [PLAIN, PLAIN, PLAIN], start_parser=plain) as (address, _, log):
        agent = Chat(f"{address}/s/one", [])
        agent.tell("user", "Oslo?")
        agent.tell("user", "Sure?")
        status, read = asked(address, "/sessions/one")
        assert status == 200
        (row,) = read["rollouts"]
        lines = logged(log)
        assert row["token_ids"] == lines[1]["prompt_token_ids"] + lines[1]["completion_token_ids"]
        trained = [token for token, on in zip(row["token_ids"], row["loss_mask"], strict=True) if on]
        assert trained == lines[0]["completion_token_ids"] + lines[1]["completion_token_ids"]
        scored = [value for value, on in zip(row["logprobs"], row["loss_mask"], strict=True) if on]
        assert scored == lines[0]["logprobs"] + lines[1]["logprobs"]
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * 2
        status, closed = asked(address, "/sessions/one/close", {"reward": 0.5})
        assert (status, closed["reward"]) == (200, 0.5)
        assert asked(address, "/sessions/one/close", {"reward": 1})[0] == 409
        with pytest.raises(openai.ConflictError):
            agent.ask(streams=False)
        assert asked(address, "/sessions/one", method="DELETE") == (200, {"session_id": "one", "deleted": True})
        assert asked(address, "/sessions/one")[0] == 404
        assert agent.ask(streams=False).id, "the name is free again"
    end = logged(log)[2]
    assert (end["session_id"], end["reward"]) == ("one", 0.5)
    assert codes_of(log) == []


def test_completions_of_text_continue_what_they_start_with(tmp_path: Path) -> None:
    with gated(tmp_path, [" in the morning", " and in the evening", " at night"]) as (address, provider, log):
        texts = client(address).completions
        first = texts.create(model="toy", prompt="It rains", logprobs=1, max_tokens=50)
        grown = "It rains" + first.choices[0].text + ", often"
        pieces = list(texts.create(model="toy", prompt=grown, stream=True, logprobs=0))
        text = "".join(piece.choices[0].text for piece in pieces)
        by_ids = texts.create(model="toy", prompt=list(provider.prompts[1] + provider.sampled[1]))
    assert text == " and in the evening"
    assert "".join(first.choices[0].logprobs.tokens or ()) == first.choices[0].text
    assert by_ids.choices[0].text == " at night"
    seen = provider.prompts[0] + provider.sampled[0]
    assert provider.prompts[1][: len(seen)] == seen, "sampled tokens are never encoded again"
    logprobs = [piece.choices[0].logprobs for piece in pieces]
    offsets = [at for scored in logprobs if scored for at in scored.text_offset or ()]
    assert offsets == sorted(offsets)
    assert [row["branch"] for row in logged(log)] == ["start", "continues", "continues"]
    assert codes_of(log) == []


def test_tokens_of_logprobs_may_be_ids_as_with_vllm(tmp_path: Path) -> None:
    """As NeMo-Gym asks for them; bytes and offsets are those of the text."""
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [PLAIN] * 3, start_parser=plain)
    more = {"return_tokens_as_token_ids": True}
    with served(gateway) as address:
        agent = client(address)
        ask: Any = {"model": "toy", "messages": [ASK], "logprobs": True, "extra_body": more}
        whole = agent.chat.completions.create(**ask, top_logprobs=1).choices[0].logprobs
        parts = [part.choices[0].logprobs for part in agent.chat.completions.create(**ask, stream=True)]
        text = agent.completions.create(model="toy", prompt="It", logprobs=1, extra_body=more).choices[0]
    shown = [f"token_id:{token}" for token in provider.sampled[0]]
    assert [entry.token for entry in whole.content or ()] == shown
    assert all(entry.top_logprobs[0].token.startswith("token_id:") for entry in whole.content or ())
    spelled = bytes(byte for entry in whole.content or () for byte in entry.bytes or ())
    assert spelled.decode() == PLAIN
    streamed = [entry.token for part in parts if part is not None for entry in part.content or ()]
    assert streamed == [f"token_id:{token}" for token in provider.sampled[1]]
    assert text.logprobs.tokens == [f"token_id:{token}" for token in provider.sampled[2]]
    assert (text.logprobs.text_offset or ())[-1] == len(PLAIN.removesuffix("<|im_end|>"))
    assert "return_tokens_as_token_ids" not in provider.asked[0].extra


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


def test_idle_sessions_leave_memory_and_come_back_as_forks(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, _ = make_gateway(log, [PLAIN, PLAIN], start_parser=plain)
    with served(gateway) as address:
        agent = Chat(f"{address}/s/one", [])
        agent.tell("user", "Oslo?")
        gateway.conversations.drop_idle(gateway.clock() + 1)
        assert asked(address, "/sessions/one")[0] == 404
        agent.tell("user", "Sure?")
    assert logged(log)[1]["fork"]["reason"] == "left_memory"


def test_answers_of_one_call_that_are_equal_are_samples_of_their_own(tmp_path: Path) -> None:
    answer = "A<|im_end|>"
    with gated(tmp_path, [answer, answer, answer]) as (address, _, log):
        client(address).chat.completions.create(model="toy", messages=[ASK], n=3)
    rows = logged(log)
    assert len({tuple(row["completion_token_ids"]) for row in rows}) == 1
    assert codes_of(log) == []
    log.write_bytes(log.read_bytes() + orjson.dumps(rows[1]) + b"\n")
    assert codes_of(log) == ["REC009"]
