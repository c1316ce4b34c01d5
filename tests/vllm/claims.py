"""Logs that agents leave behind, and what a scan says of them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.command import run, written
from tests.gateway.process import gateway
from tests.recording_proxy import Exchange, recording
from tests.vllm.agent import Agent, Row, run_all
from tests.vllm.server import VllmServer


def direct_log(server: VllmServer, folder: Path, agents: Sequence[Agent]) -> Path:
    """What agents log that ask the server itself: each call with the answer they went on with."""
    direct = [replace(agent, more={**agent.more, "return_token_ids": True}) for agent in agents]
    conversations = asyncio.run(run_all(direct, f"{server.url}/v1"))
    rows = [
        {"session_id": f"s{number}", **_followed(row, turn % agent.n)}
        for number, (agent, calls) in enumerate(zip(direct, conversations, strict=True))
        for turn, row in enumerate(calls)
    ]
    return written(folder / "direct.jsonl", rows)


def _followed(row: Row, choice: int) -> Row:
    response = row["response"]
    return {**row, "response": {**response, "choices": [{**response["choices"][choice], "index": 0}]}}


def scanned(log: Path, server: VllmServer, *more: object) -> tuple[int, Counter[str]]:
    """The exit code of a scan, and how many errors each rule found.

    The toy model spells control tokens in pieces as often as not. By chance all of the first rows do: REC007 then
    takes them for those of another tokenizer, and no other rule would run.
    """
    code, out, errors = run("scan", log, "-t", server.model, "--ignore", "REC007", "--report", "json", *more)
    assert out, errors
    counts = json.loads(out)["summary"]["findings"]
    return code, Counter({rule: counts["error"] for rule, counts in counts.items() if counts["error"]})


@dataclass(frozen=True, slots=True)
class Served:
    """What a gateway left behind."""

    log: Path
    calls: Sequence[Sequence[Row]]
    """Each agent's calls: requests, and responses as it got them."""
    sampled: Sequence[Exchange]
    """What the server behind the gateway was asked, and what it sampled."""

    @property
    def lines(self) -> list[Row]:
        """The log."""
        return [json.loads(line) for line in self.log.read_bytes().splitlines()]


def served(
    server: VllmServer, folder: Path, agents: Sequence[Agent], *words: object, at_once: bool = True
) -> Served:
    """What `tito-audit serve` leaves behind of agents that ask it, with a proxy between it and the server.

    A seed samples the same again only if the same requests share a batch: not with other agents `at_once`.
    """
    folder.mkdir(exist_ok=True)
    log = folder / "calls.jsonl"
    with recording(server.url) as proxy:
        with gateway(f"vllm={proxy.url}", server.model, log, *words) as process:
            calls = asyncio.run(run_all(agents, f"{process.address}/v1", at_once=at_once))
            assert process.stop() == 0
        return Served(log, calls, tuple(proxy.sampled))
