"""The verdict of a scan through the command line: what was not compared never passes."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.command import run
from tests.tables import table
from tests.world import TOY
from tito_audit.report import ReportOptions, feed_results
from tito_audit.reports import report_named
from tito_audit.summary import Summary

THOUGHT = "<think>\n2+2 is 4\n</think>\n\nIt is 4"
MESSAGES = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": THOUGHT},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "It is 6"},
]
TEXT = {"messages": MESSAGES}
ROW = {"token_ids": [20, 21, 22, 23], "loss_mask": [0, 0, 1, 1], "messages": MESSAGES[2:]}
SCORED = {**ROW, "logprobs": [0.0, 0.0, 1.5, -0.25]}
"""With a logprob above 0, which needs no tokenizer."""
UNREADABLE = "[1]"
ROWS = {"TEXT": TEXT, "ROW": ROW, "SCORED": SCORED, "UNREADABLE": UNREADABLE}


def last_line(folder: Path, rows: list[Any], options: str) -> tuple[int, str]:
    """The exit code of a scan and the last line of its page."""
    log = folder / "log.jsonl"
    log.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    code, out, _ = run("scan", str(log), *options.replace("TOY", str(TOY)).split())
    return code, out.splitlines()[-1]


@pytest.mark.parametrize(*table(__file__, "what_was_not_compared_never_passes"))
def test_what_was_not_compared_never_passes(rows: str, options: str, verdict: str, tmp_path: Path) -> None:
    code, line = last_line(tmp_path, [ROWS[name] for name in rows.split()], options)
    assert line.startswith(verdict)
    assert code == 0


def test_what_fails_is_called_failed_even_if_nothing_was_compared(tmp_path: Path) -> None:
    assert last_line(tmp_path, [SCORED] * 3, "")[0] == 1
    code, line = last_line(tmp_path, [TEXT] * 3, "-t TOY --fail-on note")
    assert code == 1
    assert line == "failed: 1 note in the log as a whole; nothing audited in 3 without token ids"


@pytest.mark.parametrize("name", ["text", "markdown", "html", "concise"])
def test_rows_that_could_not_be_judged_are_counted_in_every_verdict(name: str) -> None:
    summary = Summary(rollouts=40, open_rows=20, open_beside_faults=19, fault_beside="--assume logprobs=+1")
    out = StringIO()
    feed_results((), report_named(name).write(summary, out, ReportOptions(color=False)))
    text = " ".join(out.getvalue().split())
    assert "20 rows could not be judged; 19 rows may have the same fault; nothing in them decides it: " in text
    assert ": state it with --assume logprobs=+1 if it is so" in text


@pytest.mark.parametrize("name", ["json", "jsonl", "sarif", "prometheus"])
def test_reports_for_machines_count_rows_that_could_not_be_judged(name: str) -> None:
    out = StringIO()
    feed_results((), report_named(name).write(Summary(rollouts=40, open_rows=20), out, ReportOptions()))
    assert re.search(r'"?open_?[rR]ows"?:? ?20\b', out.getvalue())
