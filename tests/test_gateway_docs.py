"""The guides to the gateway: their agents run before one, and they name every reason to fork."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.serving import (
    CALL,
    FLAT,
    PLAIN,
    SCHEMAS,
    TOOLS,
    asked,
    check_chain,
    codes_of,
    logged,
    make_gateway,
    served,
)
from tito_audit.sessions.model import ForkReason

DOCS = Path(__file__).resolve().parents[1] / "docs"


class LookUp:
    """The tools of the agents in the guides."""

    def __init__(self, tools: list[Any]) -> None:
        self.tools = self.definitions = tools

    def __call__(self, name: str, arguments: Any) -> str:
        return f"{name}: 7 degrees"


@pytest.mark.parametrize(
    ("guide", "word", "path", "tools"),
    [
        ("record-clean-rollouts", "chat.completions", "/v1", TOOLS),
        ("serve", "responses", "/v1", FLAT),
        ("serve", "anthropic", "", SCHEMAS),
    ],
)
def test_the_agents_of_the_guides_leave_a_clean_log(
    tmp_path: Path, guide: str, word: str, path: str, tools: list[Any]
) -> None:
    text = (DOCS / f"{guide}.md").read_text(encoding="utf-8")
    code = next(code for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if word in code)
    names: dict[str, Any] = {}
    exec(code, names)
    log = tmp_path / "rollouts.jsonl"
    gateway, provider = make_gateway(log, [CALL, PLAIN] * 3)
    with served(gateway) as address:
        for task in range(3):
            answer = names["rollout"](address + path, f"task-{task}", f"The weather in {task}?", LookUp(tools))
            assert PLAIN.removesuffix("<|im_end|>") in str(answer)
        assert asked(address, "/sessions/task-0")[1]["session_id"] == "task-0"
        asked(address, "/sessions/task-0/close", {"reward": 1.0})
    *rows, end = logged(log)
    assert end["reward"] == 1.0
    assert [row["session_id"] for row in rows] == [f"task-{task}" for task in (0, 0, 1, 1, 2, 2)]
    for task in range(3):
        check_chain(rows[2 * task : 2 * task + 2])
    assert [tuple(row["completion_token_ids"]) for row in rows] == provider.sampled
    assert codes_of(log) == []


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
