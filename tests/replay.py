"""A server of models that replays recorded answers, or answers as a test wants it to, byte by byte."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.replay_paths import RECORDED
from tito_audit.provider import ProviderOptions, SamplingParams
from tito_audit.providers import open_provider

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler | web.Application, port: int = 0) -> AsyncIterator[str]:
    """The address of a local server: an application, or one that answers every request by `handler`."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(request)  # type: ignore[operator]

    app = handler if isinstance(handler, web.Application) else web.Application(client_max_size=1 << 28)
    if app is not handler:
        app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


@contextmanager
def threaded(make: Callable[[], Handler | web.Application], port: int = 0) -> Iterator[str]:
    """The same in a thread of its own until the block ends."""
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    address: list[str] = []

    async def main() -> None:
        async with serving(make(), port) as url:
            address.append(url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    try:
        assert ready.wait(10)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()


def recorded(*names: str) -> list[dict[str, Any]]:
    """Recorded requests with their answers, by name."""
    return [json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8")) for name in names]


@dataclass
class Replay:
    """Answers each request as it was answered when it was recorded; any other with 400.

    Requests are equal if method, path and body are, save the fields of `ignoring`. Answers are sent in pieces of
    random sizes, cut anywhere.
    """

    records: Iterable[Mapping[str, Any]]
    ignoring: frozenset[str] = frozenset()
    context: int = 2048
    seed: int = 0
    requests: list[tuple[str, Any]] = field(default_factory=list)
    """Every path that was asked, with its body."""

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        """The recorded answer."""
        body = json.loads(await request.read() or b"null")
        self.requests.append((request.path, body))
        if request.path == "/v1/models":
            names = dict.fromkeys(record["request"].get("model") or "model" for record in self.records)
            cards = [{"id": name, "max_model_len": self.context} for name in names]
            return web.json_response({"object": "list", "data": cards})
        wanted = (request.method, request.path, self._key(body))
        for record in self.records:
            if (record["method"], record["path"], self._key(record["request"])) == wanted:
                return await self._sent(request, record)
        return web.json_response({"error": {"message": f"not recorded: {body}", "code": 400}}, status=400)

    def _key(self, body: Any) -> Any:
        """What of a body has to be equal."""
        if not isinstance(body, dict):
            return body
        return {key: self._key(value) for key, value in body.items() if key not in self.ignoring}

    async def _sent(self, request: web.Request, record: Mapping[str, Any]) -> web.StreamResponse:
        """A recorded answer, in pieces."""
        if "events" not in record:
            data = json.dumps(record["response"], ensure_ascii=False).encode()
            return await in_pieces(request, data, status=record["status"], seed=self.seed)
        return await in_pieces(request, sse(record["events"]), kind="text/event-stream", seed=self.seed)


def sse(events: Iterable[Any]) -> bytes:
    """Events as a server sends them."""
    texts = (event if isinstance(event, str) else json.dumps(event, ensure_ascii=False) for event in events)
    return "".join(f"data: {text}\n\n" for text in texts).encode()


async def in_pieces(
    request: web.Request, data: bytes, *, status: int = 200, kind: str = "application/json", seed: int = 0
) -> web.StreamResponse:
    """An answer whose bytes are cut at random places."""
    numbers = random.Random(seed)
    response = web.StreamResponse(status=status, headers={"Content-Type": kind})
    await response.prepare(request)
    while data:
        size = numbers.choice([1, 3, 50, 1000, 20_000])
        await response.write(data[:size])
        data = data[size:]
        if numbers.random() < 0.3:
            await asyncio.sleep(0)
    await response.write_eof()
    return response


class Fixed:
    """A server that answers every call alike, a stream by events; it keeps what it was sent at `calls`."""

    def __init__(
        self,
        body: Any = None,
        *,
        status: int = 200,
        data: bytes | None = None,
        kind: str = "application/json",
        headers: Mapping[str, str] | None = None,
        context: int | None = 100,
        drop: bool = False,
    ) -> None:
        self.status, self.kind, self.headers, self.context = status, kind, headers, context
        self.body, self.data, self.drop = body, data, drop
        self.calls: list[Any] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": self.context}]})
        if request.method == "GET":
            return web.json_response({"detail": "Not Found"}, status=404)
        self.calls.append(json.loads(await request.read()))
        return await self.answer(request)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """The answer to a call; `drop` breaks the connection where a stream should end."""
        if not self.calls[-1].get("stream"):
            data = self.data if self.data is not None else json.dumps(self.body).encode()
            headers = {"Content-Type": self.kind, **(self.headers or {})}
            return web.Response(body=data, status=self.status, headers=headers)
        data = self.data or sse(self.body)
        if not self.drop:
            return await in_pieces(request, data, kind="text/event-stream", seed=len(data))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(data)
        assert request.transport is not None
        request.transport.close()
        return response


def asked(
    kind: str, handler: Handler, work: Callable[[Any], Awaitable[Any]], *, endpoint: str = "", **options: Any
) -> Any:
    """What some work with a provider of this kind returns, whose server answers by `handler`."""

    async def run() -> Any:
        async with serving(handler) as url:
            provider = open_provider(f"{kind}={url}{endpoint}", ProviderOptions(**options))
            try:
                return await work(provider)
            finally:
                await provider.close()

    return asyncio.run(run())


def generated(kind: str, handler: Handler, ids: Iterable[int] = (5, 6, 7), **choices: Any) -> Any:
    """The answers to a prompt."""
    sampling = SamplingParams(**{"max_tokens": 9, **choices})
    return asked(kind, handler, lambda provider: provider.generate_n(list(ids), sampling))


def streamed(
    kind: str, handler: Handler, ids: Iterable[int] = (5, 6, 7), endpoint: str = "", **choices: Any
) -> Any:
    """The chunks of a stream."""
    sampling = SamplingParams(**{"max_tokens": 9, **choices})

    async def work(provider: Any) -> Any:
        return [chunk async for chunk in provider.stream(list(ids), sampling)]

    return asked(kind, handler, work, endpoint=endpoint)


def scored(kind: str, handler: Handler, ids: Iterable[int] = (5, 6, 7), **choices: Any) -> Any:
    """The score of ids."""
    return asked(kind, handler, lambda provider: provider.score(list(ids), **choices))


def changed(value: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The value with some of it changed; `...` leaves out."""
    return {key: item for key, item in {**value, **changes}.items() if item not in (..., "...")}
