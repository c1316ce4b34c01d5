"""Pages on joined calls: `show` marks the call that was asked for, and commands to paste join as their run did."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.command import run, written

Json = dict[str, Any]


def call(session: object, prompt: list[int], completion: list[int], **more: Any) -> Json:
    return {"session_id": session, "prompt_ids": prompt, "completion_ids": completion, **more}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Rows 0, 2 and 3 are one conversation, whose last prompt is not what was said before."""
    rows = [
        call("a", [1, 2], [3]),
        call("b", [7], [8]),
        call("a", [1, 2, 9, 4, 6], [7]),
        call("a", [1, 2, 3, 4], [5]),
    ]
    return written(tmp_path / "my log.jsonl", rows)


def hints(text: str, command: str) -> list[list[str]]:
    """The commands of a page, from which words to explain them are cut."""
    lines = re.findall(rf"tito-audit {command} .*", text)
    return [shlex.split(line.split("   ")[0])[1:] for line in lines]


@pytest.mark.parametrize(
    "joining", [["--session", "session_id"], ["--no-join"], []], ids=lambda words: " ".join(words) or "by history"
)
def test_commands_to_paste_join_as_their_run_did(log: Path, joining: list[str]) -> None:
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    broken = written(log, [{**line, "completion_logprobs": [-0.5, -0.5]} for line in lines])
    output = run("scan", broken, *joining)[1]
    (pasted,) = hints(output, "show")
    assert pasted[-len(joining) :] == joining if joining else pasted[-2] == "--row"
    code, page, _ = run(*pasted)
    assert code == 0
    assert ("calls that were joined" in " ".join(page.split())) == (joining != ["--no-join"])
    (pasted,) = hints(output, "repair")
    assert pasted == ["repair", str(log), "-o", "OUT", *joining]
    html = run("scan", broken, *joining, "-f", "html")[1]
    assert ("data-joining=" in html) == bool(joining)
    if joining:
        assert f'data-joining=" {" ".join(joining)}"' in html
