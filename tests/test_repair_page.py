"""What `tito-audit repair` says is what it did: its page, its JSON report and its exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from tests.command import run, written
from tests.toy import ROOT, rollout_of
from tito_audit.cli.repair import REPORTS, RepairRun, RowTally
from tito_audit.record.finding import Severity
from tito_audit.report import ReportOptions
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.summary import RuleCount, Summary

TOY = ("-t", ROOT / "fixtures" / "tokenizers" / "toy_bpe")
THOUGHT = "<think>\n2+2 is 4\n</think>\n\n"
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
    log, report = written(tmp_path / "log.jsonl", rows), tmp_path / "report.json"
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
    assert page.splitlines()[-1].startswith(
        "no errors left: errors in 2 of 2 rollouts → 0, warnings in 0 of 2 rollouts → 2 of 4"
    )


def test_a_fork_that_leaves_warnings_is_not_forked_again(tmp_path: Path) -> None:
    assert repaired(tmp_path, [broken_after_reasoning(THOUGHT)], *TOY)[0] == 0
    again = tmp_path / "again.jsonl"
    code, page, _ = run("repair", tmp_path / "out.jsonl", "-o", again, *TOY)
    assert code == 0
    assert "2 rows · 0 repaired" in page
    assert again.read_bytes() == (tmp_path / "out.jsonl").read_bytes()


def test_a_dry_run_fixes_nothing_and_says_what_would_be(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(broken_after_reasoning("")) + "\n")
    code, page, _ = run("repair", log, "--dry-run", *TOY)
    assert code == 0
    assert page.splitlines()[-1].startswith("would be fixed: errors in 1 of 1 rollout → 0")


def test_rows_in_quarantine_are_not_called_fixed(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(broken_after_reasoning("")) + "\n[1]\n")
    quarantine = ("--quarantine", tmp_path / "bad.jsonl")
    code, page, _ = run("repair", log, "-o", tmp_path / "out.jsonl", *quarantine, *TOY)
    assert code == 0
    assert page.splitlines()[-1].startswith("no errors left: errors in 2 of 2 rollouts → 0; 1 row in quarantine")
    assert "; 1 row in quarantine" in page.splitlines()[-1]


def test_a_log_with_warnings_that_no_repair_was_asked_for_has_nothing_to_repair(tmp_path: Path) -> None:
    repaired(tmp_path, [broken_after_reasoning(THOUGHT)], *TOY)
    page = run("repair", tmp_path / "out.jsonl", "--dry-run", *TOY)[1]
    assert page.splitlines()[-1].startswith("nothing to repair: warnings in 1 of 2 rollouts → 1")


def page_of(before: Summary, after: Summary) -> str:
    """The last line of the page of a repair with these counts."""
    run = RepairRun(RowTally(Severity.ERROR), before, after, [], Settings(), RepairSettings(), "out.jsonl")
    out = StringIO()
    REPORTS["text"](run, out, ReportOptions())
    return out.getvalue().splitlines()[-1]


def test_rows_that_could_not_be_judged_are_counted_in_the_last_line() -> None:
    errors = {"MSK401": RuleCount(error=1)}
    before = Summary(
        rollouts=40, findings=errors, open_rows=20, open_beside_faults=19, fault_beside="--assume logprobs=+1"
    )
    assert page_of(before, Summary(rollouts=40, open_rows=20)) == (
        "not all fixed: 1 error → 0; 20 rows could not be judged; 19 rows may have the same fault; "
        "nothing in them decides it: state it with --assume logprobs=+1 if it is so"
    )
    alone = Summary(rollouts=40, findings=errors, open_rows=1)
    assert page_of(alone, replace(alone, findings={})) == "fixed: 1 error → 0; 1 row could not be judged"


def test_errors_that_no_row_has_by_itself_are_explained(tmp_path: Path) -> None:
    logprobs = [None, *(-0.3 - place % 7 / 8 for place in range(1, 400))]
    ids = [300 + place % 40 for place in range(400)]
    row = {"token_ids": ids, "loss_mask": [0] + [1] * 399, "logprobs": logprobs}
    code, page, _ = repaired(tmp_path, [row, row])
    assert code == 1
    assert "--with once   takes repeated training out of the loss where it is certain" in page
    assert "tito-audit explain REC009   what it means, and what fixes it" in page
