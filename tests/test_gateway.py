"""The gateway over HTTP, as the openai client meets it; its provider's answers are written down."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import time
import urllib.error
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import openai
import orjson
import pytest

from tests import toy
from tests.command import run
from tests.serving import client, logged, make_gateway, served
from tito_audit.errors import ProviderError
from tito_audit.parser import ParseOptions
from tito_audit.parsers import start_answer
from tito_audit.serve.app import HttpOptions

TOY = toy.TOKENIZERS / "toy_bpe"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Look up the weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ASK: Any = {"role": "user", "content": "What is the weather in Oslo?"}
CALL = '<tool_call>\n{"name": "weather",  "arguments": {"city":   "Oslo"}}\n</tool_call><|im_end|>'
SAID = "<think>\n\n</think>\n\nIt rains in Oslo.<|im_end|>"
PLAIN = "It rains in Oslo, and it is 7 degrees.<|im_end|>"


def asked(address: str, path: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, Any]:
    """Status and object of a request without the openai client."""
    data = None if body is None else body if isinstance(body, bytes) else orjson.dumps(body)
    request = urllib.request.Request(address + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, orjson.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, orjson.loads(error.read())


def plain(options: ParseOptions) -> Any:
    """Answers that are content and nothing else."""
    return start_answer(options=options)


def errors_of(log: Path, *arguments: str) -> list[str]:
    """The codes of errors that a scan finds."""
    _, out, _ = run("scan", str(log), "-t", str(TOY), *arguments, "--report", "json")
    found = orjson.loads(out)["findings"]
    return sorted({one["code"] for one in found if one["severity"] == "error"})


def as_sent_back(message: Any) -> dict[str, Any]:
    """An answer as agents put it into their history."""
    return message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_three_turns_leaves_a_log_of_one_chain(tmp_path: Path, streams: bool) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [CALL, SAID, SAID])
    with served(gateway) as address:
        agent = client(address)
        history: list[Any] = [ASK]
        for reply in ({"role": "tool", "content": "rain"}, {"role": "tool", "content": "wind"}, None):
            if streams:
                pieces = list(
                    agent.chat.completions.create(model="toy", messages=history, tools=TOOLS, stream=True)
                )
                message = added_up(pieces)
            else:
                answer = agent.chat.completions.create(model="toy", messages=history, tools=TOOLS)
                message = as_sent_back(answer.choices[0].message)
            history += [message, reply]
    rows = logged(log)
    assert [row["branch"] for row in rows] == ["start", "continues", "continues"]
    for before, row in pairwise(rows):
        seen = before["prompt_token_ids"] + before["completion_token_ids"]
        assert row["prompt_token_ids"][: len(seen)] == seen
        assert row["parent"] == {"call_id": before["call_id"], "choice": 0}
        assert row["thread_id"] == before["thread_id"]
    assert [row["prompt_token_ids"] for row in rows] == [list(ids) for ids in provider.prompts]
    assert [row["completion_token_ids"] for row in rows] == [list(ids) for ids in provider.sampled]
    assert rows[0]["response_message"]["tool_calls"][0]["function"]["arguments"] == '{"city":   "Oslo"}'
    assert errors_of(log) == []


def added_up(pieces: list[Any]) -> dict[str, Any]:
    """The message that the deltas of one answer add up to."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for piece in pieces:
        delta = piece.choices[0].delta
        message["content"] += delta.content or ""
        for call in delta.tool_calls or ():
            calls = message.setdefault("tool_calls", [])
            if call.id is not None:
                calls.append({"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}})
            calls[call.index]["function"]["name"] += call.function.name or ""
            calls[call.index]["function"]["arguments"] += call.function.arguments or ""
    return message


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
        own = [one for one in chunks if one.choices[0].index == choice.index]
        message = added_up(own)
        assert message["content"] == choice.message.content
        told = choice.message.model_dump()["tool_calls"][0]["function"]
        assert message["tool_calls"][0]["function"] == told
        reasoning = "".join(getattr(one.choices[0].delta, "reasoning_content", None) or "" for one in own)
        assert reasoning == choice.message.reasoning_content  # type: ignore[attr-defined]
        assert [one.choices[0].finish_reason for one in own][-1] == choice.finish_reason == "tool_calls"
        ids = [token for one in own for token in getattr(one.choices[0], "token_ids", None) or ()]
        assert ids == logged(pieces_log)[choice.index]["completion_token_ids"]
        scored = [
            entry.logprob for one in own if one.choices[0].logprobs for entry in one.choices[0].logprobs.content
        ]
        np.testing.assert_allclose(scored, logged(pieces_log)[choice.index]["logprobs"])
    assert errors_of(pieces_log) == []


def test_several_answers_are_threads_of_their_own_and_the_one_that_goes_on_is_continued(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    texts = [f"Answer {k} it is.<|im_end|>" for k in range(3)]
    gateway, _ = make_gateway(log, [*texts, *texts, PLAIN], start_parser=plain)
    with served(gateway) as address:
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
    assert errors_of(log) == []


def test_sessions_are_named_by_header_or_path_or_found_by_history(tmp_path: Path) -> None:
    gateway, _ = make_gateway(tmp_path / "log.jsonl", [PLAIN] * 4, start_parser=plain)
    with served(gateway) as address:
        ask: Any = {"model": "toy", "messages": [ASK]}
        client(address, "/s/by-path").chat.completions.create(**ask)
        headers = {"X-Session-ID": "by-header"}
        answer = client(address).chat.completions.with_raw_response.create(**ask, extra_headers=headers)
        assert answer.headers["X-Session-ID"] == "by-header"
        assert answer.headers["X-Tito-Branch"] == "start"
        message = as_sent_back(answer.parse().choices[0].message)
        more: Any = [ASK, message, {"role": "user", "content": "Thanks"}]
        found = client(address).chat.completions.with_raw_response.create(model="toy", messages=more)
        assert found.headers["X-Session-ID"] == "by-header", "the latest of the sessions that have this history"
        edited = [{**ASK, "content": "Else?"}, message, {"role": "user", "content": "Thanks"}]
        fork = client(address, "/s/by-header").chat.completions.with_raw_response.create(
            model="toy", messages=edited
        )
        assert fork.headers["X-Tito-Branch"] == "fork"
        assert fork.headers["X-Tito-Fork"]
        _, listed = asked(address, "/sessions")
    assert [one["session_id"] for one in listed["sessions"]] == ["by-path", "by-header"]


def test_a_session_is_read_closed_with_a_reward_and_deleted(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, _ = make_gateway(log, [PLAIN, PLAIN, PLAIN], start_parser=plain)
    with served(gateway) as address:
        chat = client(address, "/s/one").chat.completions
        first = chat.create(model="toy", messages=[ASK])
        again: list[Any] = [ASK, as_sent_back(first.choices[0].message), {"role": "user", "content": "Sure?"}]
        chat.create(model="toy", messages=again)
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
            chat.create(model="toy", messages=[ASK])
        assert asked(address, "/sessions/one", method="DELETE") == (200, {"session_id": "one", "deleted": True})
        assert asked(address, "/sessions/one")[0] == 404
        assert chat.create(model="toy", messages=[ASK]).choices, "the name is free again"
    end = logged(log)[2]
    assert (end["session_id"], end["reward"]) == ("one", 0.5)
    assert errors_of(log) == []


def test_completions_of_text_continue_what_they_start_with(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [" in the morning", " and in the evening", " at night"])
    with served(gateway) as address:
        texts = client(address).completions
        first = texts.create(model="toy", prompt="It rains", logprobs=1, max_tokens=50)
        grown = "It rains" + first.choices[0].text + ", often"
        pieces = list(texts.create(model="toy", prompt=grown, stream=True, logprobs=0))
        text = "".join(one.choices[0].text for one in pieces)
        by_ids = texts.create(model="toy", prompt=list(provider.prompts[1] + provider.sampled[1]))
    assert text == " and in the evening"
    assert first.choices[0].logprobs is not None
    assert "".join(first.choices[0].logprobs.tokens or ()) == first.choices[0].text
    assert by_ids.choices[0].text == " at night"
    seen = provider.prompts[0] + provider.sampled[0]
    assert provider.prompts[1][: len(seen)] == seen, "sampled tokens are never encoded again"
    offsets = [at for one in pieces if one.choices[0].logprobs for at in one.choices[0].logprobs.text_offset or ()]
    assert offsets == sorted(offsets)
    assert [row["branch"] for row in logged(log)] == ["start", "continues", "continues"]
    assert errors_of(log) == []


def test_what_a_client_asks_for_reaches_the_provider(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [PLAIN], start_parser=plain)
    with served(gateway) as address:
        answer = client(address).chat.completions.create(
            model="toy",
            messages=[ASK],
            temperature=0.5,
            top_p=0.9,
            seed=7,
            stop=["degrees"],
            max_completion_tokens=400,
            logprobs=True,
            top_logprobs=2,
            frequency_penalty=0.25,
            user="someone",
            extra_body={
                "top_k": 5,
                "min_p": 0.1,
                "stop_token_ids": [3],
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
    (sampling,) = provider.asked
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (7, ("degrees",), (3,))
    assert (sampling.max_tokens, sampling.top_logprobs) == (400, 2)
    assert sampling.extra == {"frequency_penalty": 0.25, "ignore_eos": True}
    (choice,) = answer.choices
    assert choice.message.content == "It rains in Oslo, and it is 7 ", "without the stop text and all behind it"
    assert choice.logprobs is not None
    assert len(choice.logprobs.content or ()) == len(provider.sampled[0])
    assert len((choice.logprobs.content or ())[0].top_logprobs) == 2
    assert choice.token_ids == list(provider.sampled[0])  # type: ignore[attr-defined]
    assert answer.prompt_token_ids == list(provider.prompts[0])  # type: ignore[attr-defined]
    (row,) = logged(log)
    assert row["sampling"]["temperature"] == 0.5
    assert "user" not in row["sampling"]


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
    assert whole is not None
    assert [entry.token for entry in whole.content or ()] == shown
    assert all(entry.top_logprobs[0].token.startswith("token_id:") for entry in whole.content or ())
    said = bytes(byte for entry in whole.content or () for byte in entry.bytes or ())
    assert said.decode() == PLAIN
    streamed = [entry.token for part in parts if part is not None for entry in part.content or ()]
    assert streamed == [f"token_id:{token}" for token in provider.sampled[1]]
    assert text.logprobs is not None
    assert text.logprobs.tokens == [f"token_id:{token}" for token in provider.sampled[2]]
    assert (text.logprobs.text_offset or ())[-1] == len(PLAIN.removesuffix("<|im_end|>"))
    assert "return_tokens_as_token_ids" not in provider.asked[0].extra


WRONG = {
    "no JSON": (b"{", 400, None),
    "no object": (b"[]", 400, None),
    "no messages": ({"model": "toy"}, 400, "messages"),
    "no role": ({"messages": [{"content": "x"}]}, 400, "messages"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    "a number as text": ({"messages": [ASK], "temperature": "hot"}, 400, "temperature"),
    "below zero": ({"messages": [ASK], "temperature": -1}, 400, "temperature"),
    "no answers": ({"messages": [ASK], "n": 0}, 400, "n"),
    "too many answers": ({"messages": [ASK], "n": 4096}, 400, "n"),
    "stop of numbers": ({"messages": [ASK], "stop": [1]}, 400, "stop"),
    "a forced call": ({"messages": [ASK], "tools": TOOLS, "tool_choice": "required"}, 400, "tool_choice"),
    "a template": ({"messages": [ASK], "chat_template": "{{ 1 }}"}, 400, "chat_template"),
    "top without logprobs": ({"messages": [ASK], "top_logprobs": 3}, 400, "top_logprobs"),
    "another model": ({"messages": [ASK], "model": "other"}, 404, "model"),
    "what the template refuses": ({"messages": [{"role": "narrator", "content": "x"}]}, 400, "messages"),
    "lone surrogates": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, None),
    "too large": ({"messages": [{"role": "user", "content": "x" * 9000}]}, 413, None),
}


def test_what_is_wrong_with_a_request_is_said_of_its_field(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [])
    with served(gateway, HttpOptions(max_body=8000)) as address:
        for what, (body, status, param) in WRONG.items():
            got, said = asked(address, "/v1/chat/completions", body)
            assert (got, said["error"]["param"]) == (status, param), what
            assert said["error"]["message"], what
        for prompt in (None, "", [], [1, "a"], [[1], [2]]):
            got, said = asked(address, "/v1/completions", {"prompt": prompt})
            assert (got, said["error"]["param"]) == (400, "prompt")
        assert asked(address, "/v1/completions", {"prompt": "a", "echo": True})[0] == 400
        assert asked(address, "/v1/other", {})[0] == 404
        assert asked(address, "/v1/chat/completions", method="GET")[0] == 405
    assert provider.prompts == []
    assert logged(log) == []


def test_errors_of_the_provider_have_its_status(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    late = ProviderError("it did not answer in 600 s")
    late.__cause__ = TimeoutError()
    failures = [
        (ProviderError("too long", status=400), 400),
        (ProviderError("busy", status=429), 429),
        (ProviderError("overloaded", status=503), 503),
        (ProviderError("wrong key", status=401), 502),
        (ProviderError("nobody there"), 502),
        (late, 504),
    ]
    gateway, _ = make_gateway(log, [error for error, _ in failures for _ in range(2)])
    with served(gateway) as address:
        for error, status in failures:
            for stream in (False, True):
                body = {"messages": [ASK], "stream": stream}
                got, said = asked(address, "/v1/chat/completions", body)
                assert (got, said["error"]["message"]) == (status, str(error))
    assert logged(log) == []


def test_a_stream_that_fails_ends_with_an_error_and_is_logged_as_broken_off(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [PLAIN, PLAIN], start_parser=plain)
    provider.fails_after = 3
    with served(gateway) as address:
        got: list[Any] = []
        stream = client(address).chat.completions.create(model="toy", messages=[ASK], stream=True)
        with pytest.raises(openai.APIError, match="broke off"):
            got.extend(iter(stream))
        provider.fails_after = None
        client(address).chat.completions.create(model="toy", messages=[ASK])
    broken, whole = logged(log)
    assert (broken["status"], broken["finish_reason"]) == ("broken_off", "abort")
    assert broken["completion_token_ids"] == list(provider.sampled[0][:3])
    assert all(piece.choices[0].finish_reason is None for piece in got)
    assert (whole["status"], whole["parent"]) == ("answered", None)
    assert errors_of(log) == []


def test_a_client_that_goes_away_ends_its_generation(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    gateway, provider = make_gateway(log, [PLAIN, PLAIN, PLAIN], start_parser=plain)
    provider.stays_after = 8
    with served(gateway) as address:
        stream = client(address, "/s/left").chat.completions.create(model="toy", messages=[ASK], stream=True)
        for _ in range(4):
            next(iter(stream))
        stream.close()
        until(lambda: provider.closed_early == 1 and log.stat().st_size > 0)
        provider.stays_after = None
        client(address, "/s/left").chat.completions.create(model="toy", messages=[ASK])
    gone, whole = logged(log)
    assert gone["status"] == "client_gone"
    assert 0 < len(gone["completion_token_ids"]) < len(provider.sampled[0])
    assert gone["completion_token_ids"] == list(provider.sampled[0][: len(gone["completion_token_ids"])])
    assert gone["thread_id"] != whole["thread_id"]
    assert whole["branch"] == "start", "what no client was answered is no part of the session"
    assert errors_of(log) == []


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
    with urllib.request.urlopen(f"{address}/metrics", timeout=20) as answer:
        text: str = answer.read().decode()
    return text


def test_a_key_may_be_any_bytes(tmp_path: Path) -> None:
    gateway, _ = make_gateway(tmp_path / "log.jsonl", [])
    with served(gateway, HttpOptions(api_key="schlüssel")) as address:
        host, port = address.removeprefix("http://").split(":")
        for key, status in ((b"\xff\xfe", b"401"), ("schlüssel".encode(), b"200")):
            with socket.create_connection((host, int(port)), timeout=10) as wire:
                wire.sendall(b"GET /sessions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + key + b"\r\n\r\n")
                assert wire.recv(200).split()[1] == status


def until(holds: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


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
        status, said = asked(address, "/v1/chat/completions", {"messages": [ASK]})
        streamed = raw(address, {"messages": [ASK], "stream": True})
        is_full.clear()
        assert asked(address, "/v1/chat/completions", {"messages": [ASK]})[0] == 200
    assert status == 507
    assert "the disk is full" in said["error"]["message"]
    assert b"[DONE]" not in streamed
    assert b'"finish_reason":"stop"' not in streamed
    (row,) = logged(log)
    assert row["branch"] == "start", "what was not logged is not in the session"


def raw(address: str, body: Any) -> bytes:
    request = urllib.request.Request(f"{address}/v1/chat/completions", orjson.dumps(body))
    with urllib.request.urlopen(request, timeout=20) as answer:
        data: bytes = answer.read()
    return data


def test_a_key_is_asked_for_and_compared(tmp_path: Path) -> None:
    gateway, _ = make_gateway(tmp_path / "log.jsonl", [PLAIN])
    with served(gateway, HttpOptions(api_key="secret")) as address:
        with pytest.raises(openai.AuthenticationError):
            client(address, key="other").models.list()
        assert client(address, key="secret").models.list().data[0].id == "toy"
        assert asked(address, "/sessions")[0] == 401
        assert asked(address, "/health")[0] == 200


def test_the_access_log_and_metrics_hold_nothing_of_a_prompt_or_a_name(tmp_path: Path) -> None:
    lines: list[str] = []
    gateway, _ = make_gateway(tmp_path / "log.jsonl", [PLAIN, PLAIN], start_parser=plain)
    with served(gateway, HttpOptions(access_log=lines.append)) as address:
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
    assert errors_of(log) == []


def test_idle_sessions_leave_memory_and_come_back_as_forks(tmp_path: Path) -> None:
    gateway, _ = make_gateway(tmp_path / "log.jsonl", [PLAIN, PLAIN], start_parser=plain)
    with served(gateway) as address:
        chat = client(address, "/s/one").chat.completions
        first = chat.create(model="toy", messages=[ASK])
        gateway.conversations.drop_idle(gateway.clock() + 1)
        assert asked(address, "/sessions/one")[0] == 404
        again: list[Any] = [ASK, as_sent_back(first.choices[0].message), {"role": "user", "content": "Sure?"}]
        answer = chat.with_raw_response.create(model="toy", messages=again)
    assert answer.headers["X-Tito-Fork"] == "left_memory"


def test_answers_of_one_call_that_are_equal_are_samples_of_their_own(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    said = "A<|im_end|>"
    gateway, _ = make_gateway(log, [said, said, said])
    with served(gateway) as address:
        client(address).chat.completions.create(model="toy", messages=[ASK], n=3)
    rows = logged(log)
    assert len({tuple(row["completion_token_ids"]) for row in rows}) == 1
    assert errors_of(log) == []
    log.write_bytes(log.read_bytes() + orjson.dumps(rows[1]) + b"\n")
    assert errors_of(log) == ["REC009"]
