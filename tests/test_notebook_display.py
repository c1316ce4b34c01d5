"""What a notebook displays of a run: the words of every report, without markup of the log's."""

from __future__ import annotations

import os
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.report_results import TRAPS, results
from tests.tiers import DEEP
from tests.world import FORMATS, ROOT, TOY
from tito_audit import GateSettings, Settings, gate_rollouts, repair_rollouts, scan_rollouts
from tito_audit.summary import Summary
from tito_audit.tables.display import NotebookPage
from tito_audit.terminal.escape import visible
from tito_audit.terminal.verdict import verdict_line

LOG = ROOT / "fixtures" / "docs" / "first_scan.jsonl"
TAGS = {*"div b ul li span table thead tbody tr th td details summary pre".split()}  # noqa: SIM905


class Seen(HTMLParser):
    """The tags, attributes and text of a display."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.styles: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        self.styles += [value or "" for name, value in attrs if name == "style"]
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile() -> tuple[str, Summary]:
    """The display of results in which every text tries to act."""
    page, summary = NotebookPage(), Summary(files=["logs/<b>run</b>.jsonl"])
    for result in results():
        summary.add(result)
        page.add(result.findings)
    summary.notices += TRAPS
    return page.html(summary), summary


def test_no_text_of_a_log_becomes_markup() -> None:
    html, summary = hostile()
    seen = Seen(html)
    assert not seen.open
    assert set(seen.tags) <= TAGS
    assert seen.attributes <= {"style", "open"}
    assert not [style for style in seen.styles if "url" in style or "expression" in style]
    assert not set(html) & set("\x1b\x07\u202e\x9b\x00")
    assert "<img src=x onerror=alert(2)>" in seen.text
    assert "logs/<b>run</b>.jsonl" in seen.text
    assert verdict_line(summary) in seen.text.replace("tito-audit: ", "")


def test_a_display_has_the_verdict_the_causes_the_rules_and_the_worst_findings() -> None:
    scan = scan_rollouts(LOG, Settings(tokenizer=str(TOY)))
    seen = Seen(scan._repr_html_())
    assert f"tito-audit: {verdict_line(scan.summary)}" in seen.text
    for headline in scan.summary.ranked_headlines():
        assert headline.words in seen.text
    assert all(code in seen.text for code in scan.summary.findings)
    assert "│·Skin│ny │" in seen.text
    assert "repair fork · fingerprint 6dce2f88a8356ab3" in seen.text


def test_a_gate_s_verdict_is_displayed() -> None:
    gated = gate_rollouts(LOG, Settings(tokenizer=str(TOY)), GateSettings())
    assert "tito-audit: failed: errors in 2 of 5" in Seen(gated._repr_html_()).text
    assert repr(gated).startswith("<GatedScan: failed: errors in 2 of 5")


def test_what_cannot_run_is_displayed_as_one_message() -> None:
    html = scan_rollouts("no/such/<log>.jsonl")._repr_html_()
    seen = Seen(html)
    assert "Scan: not run" in seen.text
    assert "no/such/<log>.jsonl" in seen.text
    assert "Traceback" not in seen.text
    scan = scan_rollouts(LOG, Settings(tokenizer=str(TOY)))
    shown = scan._repr_mimebundle_(include=None, exclude=None)
    assert shown == {"text/html": scan._repr_html_(), "text/plain": repr(scan)}
    assert "errors in 2 of 5" in shown["text/plain"]


def test_a_scan_that_was_iterated_is_displayed_without_a_second_audit() -> None:
    read: list[int] = []
    scan = scan_rollouts(LOG, Settings(tokenizer=str(TOY)), lambda *progress: read.append(progress[0]))
    for _ in scan:
        pass
    text = Seen(scan._repr_html_()).text
    assert len(read) == 5
    assert verdict_line(scan.summary) in text
    assert "findings_table() reads the log again" in text
    assert "│·Skin│ny │" not in text


def test_a_log_without_ids_is_not_displayed_as_clean() -> None:
    text = Seen(scan_rollouts(FORMATS / "text_only.jsonl")._repr_html_()).text
    assert "nothing audited" in text
    assert "clean" not in text
    assert visible("No rollout holds token ids") in text


def test_displaying_a_repair_never_runs_it(tmp_path: Path) -> None:
    out = tmp_path / "repaired.jsonl"
    run = repair_rollouts(LOG, out, Settings(tokenizer=str(TOY)))
    assert "not run yet" in Seen(run._repr_html_()).text
    assert repr(run) == "<Repairs: not run yet>"
    assert not out.exists()
    for _ in run:
        pass
    seen = Seen(run._repr_html_())
    assert set(seen.tags) <= TAGS
    for when, summary in (("before", run.before), ("after", run.after)):
        assert f"{when}, {verdict_line(summary)}" in seen.text
        assert f"{when}: {verdict_line(summary)}" in repr(run)
    assert run.before.metrics()["tito_audit/errors"] > run.after.metrics()["tito_audit/errors"] == 0


@pytest.mark.skipif(not DEEP, reason="starts a Jupyter kernel")
def test_a_notebook_displays_a_scan() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cells = [
        "from tito_audit import Settings, scan_rollouts",
        f"scan = scan_rollouts({str(LOG)!r}, Settings(tokenizer={str(TOY)!r}))\nscan",
        "scan.to_pandas().groupby('code').size().to_dict()",
        "scan_rollouts('no/such/log.jsonl')",
        "print(scan)\nprint(scan_rollouts(scan.logs).verdict)",
        "from tito_audit import inspect_rollouts\n"
        "ids = [[1200 - 37 * i, 2, 30 * i + 5, 400 - i] for i in range(6)]\n"
        "rows = [{'toks': each, 'm': [0, 1, 1, 1], 'lp': [0, -0.5, -0.2, -0.3]} for each in ids]\n"
        "inspect_rollouts(rows)",
        "scan_rollouts(rows, Settings(chat_template='x')).run()",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])
    try:
        nbclient.NotebookClient(book, timeout=120, kernel_name="python3", allow_errors=True).execute()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    display, counts, refused, printed, inspected, raised = (cell.outputs[0] for cell in book.cells[1:])
    display, counts, refused = (output.data for output in (display, counts, refused))
    assert "│·Skin│ny │" in Seen(display["text/html"]).text
    assert display["text/plain"].startswith("<Scan: failed: errors in 2 of 5")
    assert printed.text.startswith("failed: errors in 2 of 5")
    assert printed.text.endswith("failed\n")
    assert "Settings(map={" in Seen(inspected.data["text/html"]).text
    assert raised.ename == "SetupError"
    assert raised.traceback[-1].startswith("Pass Settings(tokenizer=")
    assert len(raised.traceback) < 8
    assert "'TOK101': " in counts["text/plain"]
    assert "Scan: not run" in Seen(refused["text/html"]).text
