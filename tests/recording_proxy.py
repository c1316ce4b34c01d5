"""A proxy between a gateway and a server of models, which keeps requests, and answers as they came."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from tests.replay import threaded

Row = dict[str, Any]
_HEADERS = ("Content-Type", "Authorization", "Accept")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer."""

    path: str
    request: Row
    status: int
    body: bytes

    @property
    def choices(self) -> list[Row]:
        """What was sampled for each answer, by index: `prompt_token_ids`, `token_ids`, `logprobs`."""
        by_index: dict[int, Row] = {}
        for answer in self._answers():
            for part in answer["choices"]:
                choice = by_index.setdefault(
                    part["index"], {"prompt_token_ids": None, "token_ids": [], "logprobs": []}
                )
                prompt = part.get("prompt_token_ids") or answer.get("prompt_token_ids")
                choice["prompt_token_ids"] = prompt or choice["prompt_token_ids"]
                choice["token_ids"] += part["token_ids"] or []
                choice["logprobs"] += (part["logprobs"] or {}).get("token_logprobs") or []
        return [by_index[index] for index in sorted(by_index)]

    def _answers(self) -> list[Row]:
        if not self.request.get("stream"):
            return [json.loads(self.body)]
        events = [line.removeprefix(b"data: ") for line in self.body.splitlines() if line.startswith(b"data: ")]
        return [json.loads(event) for event in events if event != b"[DONE]"]


@dataclass(slots=True)
class Proxy:
    """A running proxy."""

    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)
    """Answered requests, in the order in which their answers ended."""

    @property
    def sampled(self) -> list[Exchange]:
        """The exchanges that sampled something."""
        answered = (exchange for exchange in self.exchanges if exchange.status == 200)
        return [exchange for exchange in answered if exchange.path == "/v1/completions"]


@contextmanager
def recording(upstream: str) -> Iterator[Proxy]:
    """A proxy before that server, in a thread of its own until the block ends."""
    proxy = Proxy()

    async def passed(request: web.Request) -> web.StreamResponse:
        async with aiohttp.ClientSession(upstream) as session:
            return await _passed(request, session, proxy)

    with threaded(lambda: passed) as proxy.url:
        yield proxy


async def _passed(request: web.Request, session: aiohttp.ClientSession, proxy: Proxy) -> web.StreamResponse:
    """The upstream's answer, piece by piece; one that its client leaves is left too, and not kept."""
    data = await request.read()
    headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
    async with session.request(request.method, request.path_qs, data=data, headers=headers) as upstream:
        answer = web.StreamResponse(status=upstream.status, headers={"Content-Type": upstream.content_type})
        await answer.prepare(request)
        body = b""
        async for piece in upstream.content.iter_any():
            body += piece
            await answer.write(piece)
        sent = json.loads(data) if data else {}
        proxy.exchanges.append(Exchange(request.path, sent, upstream.status, body))
        await answer.write_eof()
        return answer
