"""The guides to the gateway: the agent of one runs before a gateway, the other names every reason to fork."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from tests.command import run
from tests.gateway.agents import TOOLS
from tests.gateway.process import gateway, stub
from tests.gateway.world import TOY
from tito_audit.sessions.model import ForkReason

DOCS = Path(__file__).resolve().parents[1] / "docs"


class LookUp:
    """The tools of the agent in the guide."""

    tools = TOOLS

    def __call__(self, name: str, arguments: str) -> str:
        return f"{name}: 7 degrees"


def test_the_agent_of_the_guide_leaves_a_clean_log(tmp_path: Path) -> None:
    guide = (DOCS / "record-clean-rollouts.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", guide, re.M | re.S)[0], names)
    log = tmp_path / "rollouts.jsonl"
    with (
        stub(TOY.folder, "--seed", 2) as upstream,
        gateway(f"vllm={upstream.address}", TOY.folder, log, *TOY.words) as server,
    ):
        for task in range(6):
            names["rollout"](f"{server.address}/v1", f"task-{task}", f"The weather in {task}?", LookUp())
        rollout = server.get("/sessions/task-0")
        server.post("/sessions/task-0/close", {"reward": 1.0})
        assert server.stop() == 0
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert rollout["session_id"] == "task-0"
    assert lines[-1]["reward"] == 1.0
    answers = [line for line in lines if "closed" not in line]
    assert {line["session_id"] for line in answers} == {f"task-{task}" for task in range(6)}
    assert any(line["branch"] == "continues" for line in answers)
    code, out, err = run("scan", log, "-t", TOY.folder)
    assert code == 0, out + err


def test_every_reason_to_fork_is_told_with_an_example() -> None:
    guide = (DOCS / "gateway-guarantees.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \| \w", guide, re.M)) == {str(reason) for reason in ForkReason}


def test_addresses_of_clients_end_as_their_api_wants_them() -> None:
    guide = (DOCS / "clients.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w .-]+) \| ([\w, ]+) \| (.*) \| ([^|]+) \|$", guide, re.M)[1:]
    assert len({client for client, *_ in rows}) >= 16
    for client, api, line, tried in rows:
        assert tried == "not tried" or re.search(r"\d+\.\d+\.\d+", tried), client
        for end in re.findall(r"127\.0\.0\.1:8377([^\s\"`]*)", line):
            assert end == ("" if api == "Messages" else "/v1"), client
    codex = tomllib.loads(re.findall(r"^```text\n(.*?)^```", guide, re.M | re.S)[0])
    assert codex["model_providers"][codex["model_provider"]]["wire_api"] == "responses"
