"""What `tito-audit repair` says is what it did: its page, its JSON report and its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.command import run
from tests.toy import ROOT, rollout_of

TOY = ("-t", ROOT / "fixtures" / "tokenizers" / "toy_bpe")
OPENS = "= <|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def calls_of(turns: list[dict[str, Any]], messages: list[dict[str, str]]) -> dict[str, Any]:
    """A row of calls as generic logs hold them, out of turns as in `fixtures/rules`."""
    rollout = rollout_of({"name": "a row", "turns": turns, "messages": messages})
    calls = []
    for turn in rollout.turns:
        assert turn.prompt_ids is not None
        assert turn.completion_ids is not None
        completion = turn.completion_ids.tolist()
        logprobs = [-0.5 - at % 7 / 16 for at in range(len(completion))]
        calls.append(
            {
                "prompt_token_ids": turn.prompt_ids.tolist(),
                "generation_token_ids": completion,
                "generation_log_probs": logprobs,
            }
        )
    return {"messages": messages, "calls": calls}


def broken_after_reasoning(thought: str) -> dict[str, Any]:
    """Three calls: the second keeps reasoning that the template strips, the third breaks the second's answer."""
    turns = [
        {"prompt": [OPENS.format("2+2?")], "completion": [f"= {thought}It is 4", "<|im_end|>"]},
        {"prompt": ["@seen", "\n", OPENS.format("3+3?")], "completion": ["= It is", " Skin", "ny", "<|im_end|>"]},
        {
            "prompt": ["@prompt 1", "= It is Skinny", "<|im_end|>", "\n", OPENS.format("5?")],
            "completion": ["9", "<|im_end|>"],
        },
    ]
    texts = ("2+2?", f"{thought}It is 4", "3+3?", "It is Skinny", "5?", "9")
    roles = ("user", "assistant") * 3
    return calls_of(turns, [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])


def repaired(tmp_path: Path, rows: list[dict[str, Any]], *options: object) -> tuple[int, str, dict[str, Any]]:
    """The exit code of a repair of these rows, its page, and its JSON report."""
    log, report = tmp_path / "log.jsonl", tmp_path / "report.json"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, page, _ = run(
        "repair", log, "-o", tmp_path / "out.jsonl", "-r", "text", "-r", f"json={report}", *options
    )
    return code, page, json.loads(report.read_text())


def test_a_note_that_is_a_warning_without_the_calls_before_it_refuses_no_fork(tmp_path: Path) -> None:
    rows = [broken_after_reasoning(f"<think>\n{text}</think>\n\n") for text in ("2+2 is 4\n", "\n")]
    code, page, report = repaired(tmp_path, rows, *TOY)
    assert code == 0
    assert (report["rows"]["forked"], report["rows"]["forked_into"]) == (2, 4)
    assert report["before"]["findings"]["TPL204"]["warning"] == 0
    assert report["after"]["findings"]["TPL204"]["warning"] == 2
    assert page.splitlines()[-1].startswith("no errors left: 4 errors → 0, 0 warnings → 2, ")


def test_a_fork_that_leaves_warnings_is_not_forked_again(tmp_path: Path) -> None:
    assert repaired(tmp_path, [broken_after_reasoning("<think>\n2+2 is 4\n</think>\n\n")], *TOY)[0] == 0
    again = tmp_path / "again.jsonl"
    code, page, _ = run("repair", tmp_path / "out.jsonl", "-o", again, *TOY)
    assert code == 0
    assert "2 rows · 0 repaired" in page
    assert again.read_bytes() == (tmp_path / "out.jsonl").read_bytes()
