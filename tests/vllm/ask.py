"""What a server answers, asked without the package: requests as they are written in its manual."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import aiohttp

from tests.vllm.server import VllmServer

Row = dict[str, Any]


async def asked(server: VllmServer, path: str, body: Row) -> Row:
    """The answer to a request."""
    async with aiohttp.ClientSession() as session, session.post(server.url + path, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


def running(server: VllmServer) -> int:
    """How many requests the server samples for, or has waiting, at this moment."""
    counts = _metrics(server, "num_requests_(?:running|waiting)")
    assert len(counts) == 2, "the metrics that this reads"
    return int(sum(counts))


def sampled(server: VllmServer) -> int:
    """How many tokens the server has sampled since it started."""
    (count,) = _metrics(server, "generation_tokens_total")
    return int(count)


def _metrics(server: VllmServer, name: str) -> list[float]:
    """The values of the server's metrics with this name, a pattern."""
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        metrics = response.read().decode()
    return [float(value) for value in re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)]


async def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return once something holds; AssertionError if it does not come to it."""
    limit = time.monotonic() + seconds
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < limit
        await asyncio.sleep(0.05)
