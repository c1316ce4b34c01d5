"""What strangers send to a gateway, and what happens to it: each is refused in OpenAI's shape, nothing is lost."""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.serving import ASK, PLAIN, asked, codes_of, gated, logged, make_gateway, plain, served
from tito_audit.errors import ProviderError, SetupError
from tito_audit.parser import Delta, ParseOptions
from tito_audit.serve.app import HttpOptions, ServerOptions, serve
from tito_audit.serve.call_log import CallLog
from tito_audit.serve.errors import Refused
from tito_audit.serve.gateway import Gateway

CHAT = "/v1/chat/completions"
BODY = orjson.dumps({"messages": [ASK]})


def test_arguments_of_a_call_that_are_too_deep_to_be_read_stay_a_text(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": "[" * 100_000 + "]" * 100_000}, "type": "function", "id": "a"}
    history = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    with gated(tmp_path, [PLAIN], start_parser=plain) as (address, *_):
        status, _ = asked(address, CHAT, {"messages": history})
    assert status == 200


def test_a_body_may_be_compressed_and_one_that_only_says_so_is_refused(tmp_path: Path) -> None:
    gateway, _ = make_gateway(tmp_path / "log.jsonl", [PLAIN], start_parser=plain)
    headers = {"Content-Encoding": "gzip"}
    with served(gateway) as address:
        assert asked(address, CHAT, gzip.compress(BODY), **headers)[0] == 200
        status, answer = asked(address, CHAT, BODY, **headers)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("sync", [False, True])
def test_a_log_that_is_moved_or_deleted_is_made_anew(tmp_path: Path, sync: bool) -> None:
    path, moved = tmp_path / "log.jsonl", tmp_path / "log.1.jsonl"
    log = CallLog(path, sync=sync)
    for number in range(3):
        asyncio.run(log.append([{"n": number}]))
        if number == 0:
            path.rename(moved)
        if number == 1:
            path.unlink()
    assert logged(moved) == [{"n": 0}]
    assert logged(path) == [{"n": 2}]
    with pytest.raises(SetupError, match="another gateway"):
        CallLog(path)
    log.close()
    CallLog(path).close()


def test_without_a_place_for_a_new_log_there_is_no_answer(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    path = folder / "log.jsonl"
    gateway, _ = make_gateway(path, [PLAIN, PLAIN], start_parser=plain)
    with served(gateway) as address:
        path.unlink()
        folder.rmdir()
        status, answer = asked(address, CHAT, {"messages": [ASK]})
        assert (status, answer["error"]["code"]) == (507, "log_failed")
        folder.mkdir()
        assert asked(address, CHAT, {"messages": [ASK]})[0] == 200
    assert len(logged(path)) == 1
    assert codes_of(path) == []


class Heard:
    """A parser that keeps what it was fed."""

    def __init__(self) -> None:
        self.text = ""

    def feed(self, text: str) -> Sequence[Delta]:
        self.text += text
        return [Delta(content=text)]

    def close(self) -> Sequence[Delta]:
        return ()


def test_parsers_are_shown_the_control_tokens_that_a_client_hides(tmp_path: Path) -> None:
    runs: list[Heard] = []

    def start(options: ParseOptions) -> Heard:
        runs.append(Heard())
        return runs[-1]

    sampled = "Well,<|im_start|> it rains.<|im_end|>"
    contents = []
    for starting in (start, plain):
        gateway, _ = make_gateway(tmp_path / f"{starting.__name__}.jsonl", [sampled], start_parser=starting)
        with served(gateway) as address:
            _, answer = asked(address, CHAT, {"messages": [ASK], "skip_special_tokens": True})
        contents.append(answer["choices"][0]["message"]["content"])
    assert [run.text for run in runs] == [contents[0]]
    assert contents == ["Well,<|im_start|> it rains.", "Well, it rains."]


def test_a_server_that_was_not_there_at_the_start_is_asked_before_the_first_call(tmp_path: Path) -> None:
    gateway, provider = make_gateway(tmp_path / "log.jsonl", [PLAIN] * 2, start_parser=plain)
    gateway.model, provider.model = "default", None
    errors: list[Exception | None] = [ProviderError("it is down"), Refused("another tokenizer", status=502), None]

    async def check(asking: Gateway) -> None:
        error = errors.pop(0)
        if error is not None:
            raise error
        asking.model = "real"

    gateway.deferred_check = check
    with served(gateway) as address:
        ask: Any = {"model": "real", "messages": [ASK]}
        assert asked(address, CHAT, ask)[0] == 502
        assert asked(address, "/v1/models")[1]["data"][0]["id"] == "default"
        assert asked(address, CHAT, ask)[0] == 200
        assert asked(address, "/v1/models")[1]["data"][0]["id"] == "real"
        assert asked(address, CHAT, ask)[0] == 200
    assert [row["model"] for row in logged(tmp_path / "log.jsonl")] == ["real", "real"]


def test_what_is_no_http_and_clients_that_go_away_leave_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway, _ = make_gateway(tmp_path / "log.jsonl", [PLAIN], start_parser=plain)

    async def main() -> None:
        there: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        running = asyncio.ensure_future(serve(gateway, HttpOptions(), ServerOptions(port=0), there.set_result))
        host, port = (await there).removeprefix("http://").split(":")
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        for data in (
            b"\x16\x03\x01garbage\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            head + b"Content-Length: -1\r\n\r\n",
            head + b"Content-Encoding: br\r\nContent-Length: 3\r\n\r\nabc",
            head + b"X-Session-ID: " + b"y" * 9000 + b"\r\n\r\n",
            head + b"Content-Length: 5000\r\n\r\n{",
        ):
            reader, writer = await asyncio.open_connection(host, int(port), family=socket.AF_INET)
            writer.write(data)
            writer.write_eof()
            with suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 60)
            writer.close()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert caplog.records == []
