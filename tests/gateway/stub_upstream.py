"""A stand-in for a vLLM server: `/v1/completions` by token ids, with what it was asked kept word for word.

`python -m tests.gateway.stub_upstream --tokenizer DIR` prints its address and serves until it is ended. Its
behaviour is set by `POST /stub/knobs`, what it answered is read by `GET /stub/answers`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.gateway.script import Answer, Script, Temper

MODEL = "stub-model"
LARGEST = 64 << 20
_ABOUT = {"id": "cmpl-stub", "object": "text_completion", "created": 1, "model": MODEL}


@dataclass
class Knobs:
    """How the server behaves from now on."""

    latency: float = 0.0
    """Seconds before the first byte."""
    per_chunk: float = 0.0
    """Seconds between two chunks of a stream."""
    chunk: int = 3
    """Tokens of a chunk."""
    next: list[str] = field(default_factory=list)
    """What happens to the next requests, one word each: `429`, `500`, `hang`, `close`, `cut` (a stream that ends
    in its middle), `garbage`, `no_ids`; anything else is answered."""
    context: int = 1 << 20
    remember: bool = True
    """Whether requests and answers are kept; times are kept in any case."""
    load: bool = False
    """Short answers at no cost: 16 tokens, the first eight of which name the prompt."""


@dataclass
class Stub:
    """The server's state."""

    script: Script
    knobs: Knobs = field(default_factory=Knobs)
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Each request's body, `status` and, once they are written, `answers` (ids, logprobs, finish_reason)."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What each request took here, by the first letters of its first answer; with `load` these are unique."""
    cancelled: int = 0
    running: int = 0
    most: int = 0
    """The most requests that ran at once."""


STUB = web.AppKey("stub", Stub)


def application(script: Script, knobs: Knobs | None = None) -> web.Application:
    """The server as an application of aiohttp."""
    app = web.Application(client_max_size=LARGEST)
    app[STUB] = Stub(script, knobs or Knobs())
    app.router.add_post("/v1/completions", _completions)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/health", _health)
    app.router.add_get("/version", _version)
    app.router.add_get("/stub/answers", _answers)
    app.router.add_post("/stub/knobs", _knobs)
    return app


async def _models(request: web.Request) -> web.Response:
    stub = request.app[STUB]
    model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "max_model_len": stub.knobs.context}
    return web.json_response({"object": "list", "data": [model]})


async def _health(request: web.Request) -> web.Response:
    return web.Response()


async def _version(request: web.Request) -> web.Response:
    return web.json_response({"version": "0.32.0"})


async def _answers(request: web.Request) -> web.Response:
    stub = request.app[STUB]
    names = ("requests", "seconds", "cancelled", "running", "most")
    return web.json_response({name: getattr(stub, name) for name in names})


async def _knobs(request: web.Request) -> web.Response:
    stub = request.app[STUB]
    for name, value in (await request.json()).items():
        if name == "forget":
            stub.requests.clear()
            stub.seconds.clear()
            stub.cancelled = stub.most = 0
        else:
            assert hasattr(stub.knobs, name), name
            setattr(stub.knobs, name, value)
    return web.json_response(asdict(stub.knobs))


def _refusal(status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> web.Response:
    error = {"message": message, "type": kind, "param": param, "code": status}
    return web.json_response({"error": error}, status=status)


async def _completions(request: web.Request) -> web.StreamResponse:
    stub, began = request.app[STUB], time.perf_counter()
    body = await request.json()
    stub.running += 1
    stub.most = max(stub.most, stub.running)
    record: dict[str, Any] = {"body": body, "status": None, "answers": []}
    record["key"] = request.headers.get("Authorization")
    if stub.knobs.remember:
        stub.requests.append(record)
    try:
        response = await _answered(request, stub, body, record)
        record["status"] = response.status
        return response
    except (asyncio.CancelledError, ConnectionResetError):
        stub.cancelled += 1
        record["status"] = "cancelled"
        raise
    finally:
        stub.running -= 1
        stub.seconds[record.pop("name", "")] = time.perf_counter() - began


async def _answered(
    request: web.Request, stub: Stub, body: dict[str, Any], record: dict[str, Any]
) -> web.StreamResponse:
    behaviour = stub.knobs.next.pop(0) if stub.knobs.next else ""
    if stub.knobs.latency:
        await asyncio.sleep(stub.knobs.latency)
    if (failed := await _failed(request, behaviour)) is not None:
        return failed
    if (refused := _refused(stub, body)) is not None:
        return refused
    choices = [_Choice.of(stub, body, index) for index in range(body.get("n") or 1)]
    record["name"] = choices[0].text[:8]
    if behaviour == "no_ids":
        body = {**body, "return_token_ids": False}
    if body.get("stream"):
        return await _stream(request, stub, body, choices, record, cut=behaviour == "cut")
    record["answers"] = [choice.remembered() for choice in choices]
    return web.json_response(_whole(body, choices))


async def _failed(request: web.Request, behaviour: str) -> web.StreamResponse | None:
    """The answer of a server in trouble; None for one that works."""
    if behaviour == "429":
        response = _refusal(429, "Too many requests", "RateLimitError")
        response.headers["Retry-After"] = "1"
        return response
    if behaviour == "500":
        return _refusal(500, "EngineCore encountered an issue", "InternalServerError")
    if behaviour == "hang":
        await asyncio.sleep(3600)
    if behaviour == "close":
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError
    if behaviour == "garbage":
        return web.Response(text='{"id": "cmpl-1", "choices": [', content_type="application/json")
    return None


def _refused(stub: Stub, body: dict[str, Any]) -> web.Response | None:
    """What vLLM refuses, in its words."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
        return _refusal(400, "You must pass at least one prompt")
    size = stub.script.tokenizer.get_vocab_size()
    if (wrong := next((token for token in prompt if not 0 <= token < size), None)) is not None:
        return _refusal(400, f"Token id {wrong} is out of vocabulary")
    if body.get("model") not in (None, MODEL):
        text = f"The model `{body['model']}` does not exist. Valid aliases: {MODEL}."
        return _refusal(404, text, "NotFoundError", "model")
    if len(prompt) + (body.get("max_tokens") or 1) > stub.knobs.context:
        text = (
            f"This model's maximum context length is {stub.knobs.context} tokens. However, your prompt contains "
            f"at least {len(prompt)} input tokens."
        )
        return _refusal(400, text, param="input_tokens")
    if body.get("max_tokens") == 0 and not body.get("echo"):
        return _refusal(400, "max_tokens must be at least 1, got 0.")
    return None


@dataclass
class _Choice:
    """One answer of a request, as far as the request lets it go."""

    stub: Stub
    body: dict[str, Any]
    index: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: str
    stop: str | int | None

    @classmethod
    def of(cls, stub: Stub, body: dict[str, Any], index: int) -> _Choice:
        answer = (
            _load(stub, body) if stub.knobs.load else stub.script.answer(body["prompt"], index, body.get("seed"))
        )
        most = body["max_tokens"] if body.get("max_tokens") is not None else 16
        # A stop token comes from the request or is the model's own end; a stop text may begin in one token and end
        # in another.
        stops = set(body.get("stop_token_ids") or ())
        for at, token in enumerate(answer.ids, 1):
            ends = token in stops or (token == stub.script.end_id and not body.get("ignore_eos"))
            if ends and at <= most:
                stop = token if token in stops else None
                return cls._cut(stub, body, index, answer, at, "stop", stop)
            if at >= most:
                break
            if (text := _stop_text(stub, body, answer.ids[:at])) is not None:
                return cls._cut(stub, body, index, answer, at, "stop", text)
        return cls._cut(stub, body, index, answer, most, "length", None)

    @classmethod
    def _cut(
        cls,
        stub: Stub,
        body: dict[str, Any],
        index: int,
        answer: Answer,
        at: int,
        finish: str,
        stop: str | int | None,
    ) -> _Choice:
        ids = answer.ids[:at]
        shown = ids[:-1] if finish == "stop" and not isinstance(stop, str) else ids
        text = _decoded(stub, body, shown)
        if isinstance(stop, str) and not body.get("include_stop_str_in_output"):
            text = text[: text.index(stop)]
        return cls(stub, body, index, ids, answer.logprobs[:at], text, finish, stop)

    def remembered(self) -> dict[str, Any]:
        """What the server remembers of it."""
        own = {name: getattr(self, name) for name in ("index", "ids", "logprobs", "text")}
        return {**own, "finish_reason": self.finish, "stop_reason": self.stop}

    def shown(self, start: int, end: int, text: str, *, last: bool) -> dict[str, Any]:
        """Its tokens from `start` to `end` as the wire has them."""
        ids = self.body.get("return_token_ids")
        return {
            "index": self.index,
            "text": text,
            "logprobs": self._logprobs(start, end),
            "finish_reason": self.finish if last else None,
            "stop_reason": self.stop if last else None,
            "token_ids": list(self.ids[start:end]) if ids else None,
            "prompt_token_ids": self.body["prompt"] if ids and not start else None,
        }

    def _logprobs(self, start: int, end: int) -> dict[str, Any] | None:
        if self.body.get("logprobs") is None:
            return None
        span = self.ids[start:end]
        if self.body.get("return_tokens_as_token_ids"):
            names = [f"token_id:{token}" for token in span]
        else:
            names = [self.stub.script.tokenizer.decode([token], skip_special_tokens=False) for token in span]
        values = list(self.logprobs[start:end])
        tops = [self._top(token, name, value) for token, name, value in zip(span, names, values, strict=True)]
        offsets = [0] * len(span)
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, token: int, name: str, value: float) -> dict[str, float]:
        """The sampled token and its likeliest rivals: the ids behind it."""
        top = {name: value}
        for step in range(1, int(self.body["logprobs"])):
            rival = (token + step) % self.stub.script.tokenizer.get_vocab_size()
            if self.body.get("return_tokens_as_token_ids"):
                top[f"token_id:{rival}"] = value - step
            else:
                top[self.stub.script.tokenizer.decode([rival], skip_special_tokens=False)] = value - step
        return top


def _load(stub: Stub, body: dict[str, Any]) -> Answer:
    """A short answer that costs nothing: tokens decided by a checksum of the prompt."""
    number = zlib.crc32(json.dumps(body["prompt"]).encode())
    letters = [stub.script.vocabulary[letter] for letter in f"{number:08x}"]
    return Answer((*letters, *letters[:7], stub.script.end_id), (-0.5,) * 16)


def _decoded(stub: Stub, body: dict[str, Any], ids: tuple[int, ...]) -> str:
    skip = body.get("skip_special_tokens", True)
    return stub.script.tokenizer.decode(list(ids), skip_special_tokens=skip)


def _stop_text(stub: Stub, body: dict[str, Any], ids: tuple[int, ...]) -> str | None:
    """The stop text that these ids end with or contain for the first time."""
    stops = body.get("stop") or ()
    if not stops:
        return None
    text = _decoded(stub, body, ids)
    return next((stop for stop in ([stops] if isinstance(stops, str) else stops) if stop in text), None)


def _whole(body: dict[str, Any], choices: list[_Choice]) -> dict[str, Any]:
    shown = []
    for choice in choices:
        scored = body.get("prompt_logprobs")
        prompt = (
            None if scored is None else [None, *({str(token): _scored(token)} for token in body["prompt"][1:])]
        )
        shown.append({**choice.shown(0, len(choice.ids), choice.text, last=True), "prompt_logprobs": prompt})
    return {**_ABOUT, "choices": shown, "usage": _usage(body, choices)}


def _usage(body: dict[str, Any], choices: list[_Choice]) -> dict[str, int]:
    prompt, sampled = len(body["prompt"]), sum(len(choice.ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _scored(token: int) -> dict[str, Any]:
    return {"logprob": -(token % 97) / 16, "rank": 1, "decoded_token": ""}


async def _stream(
    request: web.Request,
    stub: Stub,
    body: dict[str, Any],
    choices: list[_Choice],
    record: dict[str, Any],
    *,
    cut: bool,
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    record["answers"] = [choice.remembered() for choice in choices]
    events = list(_events(stub, choices))
    for event in events[: len(events) // 2] if cut else events:
        await response.write(b"data: " + json.dumps({**_ABOUT, "choices": [event]}).encode() + b"\n\n")
        if stub.knobs.per_chunk:
            await asyncio.sleep(stub.knobs.per_chunk)
    if cut:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError
    if (body.get("stream_options") or {}).get("include_usage"):
        last = {**_ABOUT, "choices": [], "usage": _usage(body, choices)}
        await response.write(b"data: " + json.dumps(last).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _events(stub: Stub, choices: list[_Choice]) -> list[dict[str, Any]]:
    """The chunks of all answers by turns; text appears once its characters are whole, as a server does it."""
    lanes = [_lane(stub, choice) for choice in choices]
    longest = max(map(len, lanes))
    return [lane[step] for step in range(longest) for lane in lanes if step < len(lane)]


def _lane(stub: Stub, choice: _Choice) -> list[dict[str, Any]]:
    events, written, size = [], 0, stub.knobs.chunk
    for start in range(0, len(choice.ids), size):
        end = min(start + size, len(choice.ids))
        last = end == len(choice.ids)
        text = choice.text
        if not last:
            text = _decoded(stub, choice.body, choice.ids[:end]).rstrip("�")[: len(choice.text)]
        events.append(choice.shown(start, end, text[written:], last=last))
        written = max(written, len(text))
    return events


@asynccontextmanager
async def serving(app: web.Application, port: int = 0) -> AsyncIterator[str]:
    """The address of an application that is served in this process."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=1024)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _serve(arguments: argparse.Namespace) -> None:
    script = Script.of(arguments.tokenizer, arguments.end, arguments.control, Temper(), arguments.seed)
    app = application(script, Knobs(**json.loads(arguments.knobs)))
    async with serving(app, arguments.port) as address:
        print(address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with tokenizer.json")
    parser.add_argument("--end", default="<|im_end|>", help="the token that ends an answer")
    parser.add_argument("--control", default="<|im_start|>", help="a control token that ends nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--knobs", default="{}", help="as JSON")
    asyncio.run(_serve(parser.parse_args()))
