"""Pages on joined calls: `show` marks the call that was asked for, and commands to paste join as their run did."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.command import run, written

pytestmark = pytest.mark.usefixtures("loaded_once")

ROOT = Path(__file__).resolve().parents[1]
TOY = str(ROOT / "fixtures" / "tokenizers" / "toy_bpe")
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


def titles(page: str) -> list[str]:
    return re.findall(r"^(?:▸ )?turn \d (?:prompt|completion) · row \d", page, re.MULTILINE)


@pytest.mark.parametrize(("row", "turn"), [(0, 0), (3, 1), (2, 2)])
def test_the_call_of_the_row_is_marked_among_those_of_its_conversation(log: Path, row: int, turn: int) -> None:
    code, page, _ = run("show", log, "--row", row, "--session", "session_id")
    assert code == 0
    at = {0: 0, 1: 3, 2: 2}
    assert titles(page) == [
        f"{'▸ ' * (one == turn)}turn {one} {part} · row {at[one]}"
        for one in range(3)
        for part in ("prompt", "completion")
    ]
    assert f"row {row} is turn {turn} of 3 calls that were joined, marked ▸" in " ".join(page.split())
    shown = json.loads(run("show", f"{log}:{row}", "--session", "session_id", "--json")[1])
    assert shown["calls"] == [{"file": str(log), "row": at[one]} for one in range(3)]
    assert shown["asked_turn"] == turn


def test_a_turn_that_is_not_in_this_file_is_said_to_be_elsewhere(log: Path) -> None:
    code, _, err = run("show", f"{log}:2:3", "--session", "session_id")
    assert code == 2
    assert "there is no turn 3; it holds 3 turns, 0 to 2. Only calls of this file are joined." in err


def test_without_joining_the_row_is_shown_alone(log: Path) -> None:
    code, page, _ = run("show", f"{log}:3", "--no-join")
    assert code == 0
    assert "1 turn, turn 0" in page
    assert "▸" not in page
    assert "joined" not in page
    shown = json.loads(run("show", f"{log}:3", "--no-join", "--json")[1])
    assert "calls" not in shown
    assert shown["row"] == 3


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
    found = run("scan", broken, *joining)[1]
    (pasted,) = hints(found, "show")
    assert pasted[-len(joining) :] == joining if joining else pasted[-2] == "--row"
    code, page, _ = run(*pasted)
    assert code == 0
    assert ("calls that were joined" in " ".join(page.split())) == (joining != ["--no-join"])
    (pasted,) = hints(found, "repair")
    assert pasted == ["repair", str(log), "-o", "OUT", *joining]
    html = run("scan", broken, *joining, "-f", "html")[1]
    assert ("data-joining=" in html) == bool(joining)
    if joining:
        assert f'data-joining=" {" ".join(joining)}"' in html


def test_a_key_with_signs_of_the_shell_is_quoted_in_commands(tmp_path: Path) -> None:
    rows = [{"my key": "a", **call(None, [1], [2], completion_logprobs=[0.5])}]
    found = run("scan", written(tmp_path / "log.jsonl", rows), "--session", "my key")[1]
    (pasted,) = hints(found, "show")
    assert pasted[-2:] == ["--session", "my key"]


def test_a_repair_proposes_to_show_what_it_left_as_it_read_it(log: Path) -> None:
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    broken = written(log, [{**line, "completion_logprobs": [-0.5, -0.5]} for line in lines])
    said = run("repair", broken, "--dry-run", "--session", "session_id")[1]
    assert [command[-2:] for command in hints(said, "show")] == [["--session", "session_id"]]


def test_commands_to_paste_read_the_log_as_their_run_did(tmp_path: Path) -> None:
    row = {"toks": [1, 2, 3], "lp": [0.0, -0.5], "train": [0, 1, 1]}
    log = written(tmp_path / "log.jsonl", [row])
    flags = ["--map", "token_ids=toks", "--map", "loss_mask=train", "--map", "logprobs=lp"]
    flags += ["--template-arg", 'thinking="a b"', "--clock", "2024-07-26T00:00:00"]
    found = run("scan", log, *flags)[1]
    (pasted,) = hints(found, "show")
    assert pasted[-len(flags) :] == flags
    code, page, _ = run(*pasted)
    assert code == 0
    assert "1 error REC004" in page


def test_a_log_that_cannot_be_read_is_inspected_first_and_never_proposed_to_be_accepted(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", [{"toks": [1, 2, 3]}])
    code, page, _ = run("scan", log)
    assert code == 1
    steps = re.findall(r"^  tito-audit (\S+) ", page[page.index("Next") :], re.MULTILINE)
    assert steps == ["inspect", "explain"]


def test_a_command_pasted_with_its_ellipsis_says_what_to_write_there() -> None:
    code, out, err = run("scan", "…", "--report", "html")
    assert (code, out) == (2, "")
    assert err == "tito-audit: …: it stands for the logs and flags of your scan; write them in its place.\n"
