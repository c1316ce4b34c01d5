"""A gateway that is killed under load loses no answer that a client got, and starts again on the same log."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

from tests.command import run
from tests.gateway.agents import Call
from tests.gateway.process import Process, gateway, stub
from tests.gateway.world import TOY, agents, drive
from tests.serving import ASK, PLAIN, asked, make_gateway, plain, served
from tests.tiers import examples


async def killed_amid(server: Process, seed: int, answers: int, after: float) -> list[Call]:
    """The calls of agents whose gateway dies so many seconds after they got so many answers."""
    crowd = agents(server.address, TOY, examples(8, 12), seed)
    going = asyncio.ensure_future(drive(crowd, examples(8, 15)))
    while not going.done() and sum(call.done for agent in crowd for call in agent.calls) < answers:
        await asyncio.sleep(0.005)
    await asyncio.sleep(after)
    server.kill()
    await asyncio.wait_for(going, 240)
    return [call for agent in crowd for call in agent.calls]


def lines_of(log: Path) -> tuple[dict[tuple[str, int], dict[str, object]], list[str]]:
    """The lines of a log by call and choice, and those that are no JSON."""
    lines, torn = {}, []
    for text in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            torn.append(text)
            continue
        lines[line["call_id"], line["choice"]] = line
    return lines, torn


def test_no_answer_is_lost_when_the_gateway_is_killed(tmp_path: Path) -> None:
    dice, log, calls = random.Random(3), tmp_path / "log.jsonl", []
    kills = examples(1, 50)
    with stub(TOY.folder, latency=0.01, per_chunk=0.002) as upstream:
        for number in range(kills):
            with gateway(f"vllm={upstream.address}", TOY.folder, log, *TOY.words) as server:
                calls += asyncio.run(killed_amid(server, number, dice.randint(5, 25), dice.uniform(0, 0.05)))
        with gateway(f"vllm={upstream.address}", TOY.folder, log, *TOY.words) as server:
            calls += asyncio.run(drive(agents(server.address, TOY, 2, 999), 3))
            assert server.stop() == 0
    lines, torn = lines_of(log)
    got = [call for call in calls if call.done]
    assert len(got) >= 5 * kills
    assert len(torn) <= kills
    for call in got:
        for choice, answer in enumerate(call.answers):
            line = lines[call.id or "", choice]
            message = line["response_message"] or {"content": line["text"]}
            assert isinstance(message, dict)
            assert (message["content"] or "") == (answer.get("content") or answer.get("text") or "")
    code, out, err = run("scan", log, "-t", TOY.folder, "--worst", "2")
    assert code == (1 if torn else 0), out + err


def test_a_torn_last_line_is_named_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    first, _ = make_gateway(log, [PLAIN] * 3, start_parser=plain)
    with served(first) as address:
        for _ in range(3):
            assert asked(address, "/v1/chat/completions", {"messages": [ASK]})[0] == 200
    log.write_bytes(log.read_bytes()[:-40])
    code, out, err = run("scan", log, "-t", TOY.folder)
    assert code == 1
    assert "log.jsonl:2" in out + err
    with stub(TOY.folder) as upstream, gateway(f"vllm={upstream.address}", TOY.folder, log, *TOY.words) as server:
        calls = asyncio.run(drive(agents(server.address, TOY, 1, 0), 3))
        assert server.stop() == 0
    lines, torn = lines_of(log)
    assert len(torn) == 1
    assert len(lines) == 2 + sum(len(call.answers) for call in calls if call.done)
