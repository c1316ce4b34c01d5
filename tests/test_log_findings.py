"""Findings of a whole log: what rows prove together, and how reports, gates and processes take them."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import report_results
from tests.command import scanned
from tito_audit import GateSettings, Result, Settings, gate_rollouts
from tito_audit.evidence.model import Evidence
from tito_audit.record import testimony as record
from tito_audit.record.finding import Finding, Severity, Where
from tito_audit.record.reading import Slide
from tito_audit.record.rollout import Place
from tito_audit.record.testimony import AnswerEnds, Verdict, Witness
from tito_audit.report import ReportOptions, feed_results
from tito_audit.reports import all_reports
from tito_audit.run.log_findings import count_open, whole_log_findings
from tito_audit.run.workers import can_fork
from tito_audit.settings.model import MaxRate
from tito_audit.summary import Summary

LATE, EARLY, SLID = Slide(0, 1), Slide(0, -1), Slide(1, 0)
CODES = frozenset({"LPR502", "MSK401", "MSK402", "MSK404"})
forks = pytest.mark.skipif(not can_fork(), reason="processes are not forked on this system")


def faulty(*slides: Slide) -> Witness:
    return Witness(Verdict.FAULTY, slides)


def unsettled(*slides: Slide) -> Witness:
    """A row whose simplest reading is one of these slides."""
    return Witness(Verdict.OPEN, slides, slides)


def right(
    *slides: Slide, first: int | None = 0, ends: AnswerEnds | None = AnswerEnds.TRAINED, **more: Any
) -> Witness:
    """A row whose simplest reading has no fault, and which these slides would explain too."""
    return Witness(Verdict.CLEAN, slides, first=first, ends=ends, **more)


def log_of_witnesses(*witnesses: Witness) -> record.Testimony:
    """A log of rows that show this, one row after the other."""
    testimony = record.Testimony()
    for row, witness in enumerate(witnesses):
        testimony.add(witness, Place("log", row))
    return testimony


def findings_of(*witnesses: Witness, codes: frozenset[str] = CODES) -> list[tuple[str, str, str]]:
    findings = whole_log_findings("log", log_of_witnesses(*witnesses), codes)
    return [(finding.code, finding.severity.word, finding.hit.cause) for finding in findings]


def only(*witnesses: Witness) -> Finding:
    (finding,) = whole_log_findings("log", log_of_witnesses(*witnesses), CODES)
    return finding


# What the rows say


def test_rows_that_show_how_they_were_written_need_no_log_to_say_it() -> None:
    assert findings_of(right(), right()) == []
    assert findings_of(faulty(LATE), faulty(LATE), right()) == []
    assert findings_of(faulty(LATE, EARLY), right(LATE)) == [], "which slide it is was not proven"
    assert whole_log_findings("log", record.Testimony(), CODES) == ()


def test_rows_that_may_have_a_proven_fault_are_counted_and_named_and_stay() -> None:
    testimony = log_of_witnesses(faulty(LATE), faulty(LATE), right(LATE), right(LATE, EARLY), right())
    (finding,) = whole_log_findings("log", testimony, CODES)
    assert (finding.code, finding.severity, finding.repair) == ("LPR502", Severity.WARNING, None)
    assert finding.place == Place("log", 2), "the first row that is open"
    assert (finding.hit.where, finding.hit.start, finding.hit.end) == (Where.LOG, 0, 0)
    assert finding.hit.message == (
        "2 rows may also have the logprobs 1 place late, as rows 0, 1 of this log: nothing in rows 2, 3 decides "
        "it, so no repair touches them; if it is so, state it with --assume logprobs=+1"
    )
    summary = Summary()
    count_open(testimony, summary)
    assert (summary.open_rows, summary.open_beside_faults) == (0, 2)
    assert summary.fault_beside == "--assume logprobs=+1"


def test_a_row_whose_mask_of_ones_hid_a_proven_fault_may_have_it_once_that_is_repaired() -> None:
    testimony = log_of_witnesses(faulty(LATE), faulty())
    testimony.add_repaired(faulty(), right(LATE), Place("log", 1))
    testimony.add_repaired(faulty(LATE), right(LATE), Place("log", 0))  # it was moved back
    summary = Summary()
    count_open(testimony, summary)
    assert (summary.open_beside_faults, summary.fault_beside) == (1, "--assume logprobs=+1")


def test_a_row_that_one_row_of_its_log_proves_late_is_not_late_for_it() -> None:
    """However many rows are late, one that shows that it is right has no finding."""
    assert findings_of(*[faulty(LATE)] * 40, right()) == []


def test_rows_that_leave_it_open_are_a_note_and_counted() -> None:
    testimony = log_of_witnesses(unsettled(LATE), unsettled(LATE), right())
    (finding,) = whole_log_findings("log", testimony, CODES)
    assert (finding.code, finding.severity, finding.hit.cause) == ("LPR502", Severity.NOTE, "undecided")
    assert finding.hit.message.startswith(
        "2 of 3 rows do not show whether the logprobs are on the sampled tokens: rows 0, 1 may be right"
    )
    assert "or have the logprobs 1 place late" in finding.hit.message
    summary = Summary()
    count_open(testimony, summary)
    assert summary.open_rows == 2
    assert findings_of(unsettled(SLID), right()) == [("MSK401", "note", "undecided")]
    assert findings_of(unsettled(SLID), unsettled(LATE)) == [
        ("LPR502", "note", "undecided"),
        ("MSK401", "note", "undecided"),
    ]


def test_a_log_whose_first_tokens_would_all_be_certain_is_a_note() -> None:
    """One token that every answer begins with may well be certain; three different ones are not by chance."""
    same = [right(LATE, simplest=(LATE,), certain=(5,))] * 20
    assert findings_of(*same) == []
    different = [right(LATE, simplest=(LATE,), certain=(token,)) for token in range(3)]
    assert findings_of(*different) == [("LPR502", "note", "undecided")]
    assert findings_of(*different, right()) == [], "a row that rules it out"
    assert log_of_witnesses(*different).open_rows == 3


def test_a_convention_of_the_whole_log_is_one_note_and_of_some_rows_a_warning() -> None:
    left, with_ends = right(first=1), right(ends=AnswerEnds.KEPT)
    assert findings_of(left, left) == [("MSK402", "note", "first tokens left out")]
    assert (
        "the first token of each answer is left out of the loss in all 2 rows that show it"
        in only(left, left).hit.message
    )
    finding = only(right(), right(), left)
    assert (finding.severity, finding.place.row) == (Severity.WARNING, 2)
    assert finding.hit.message.endswith("left out of the loss in 1 of 3 rows: row 2; not in the others")
    assert only(left, left, right()).hit.message.endswith("in 2 of 3 rows: all but row 2")
    assert findings_of(with_ends, with_ends) == [("MSK404", "note", "sampled, not trained")]
    assert findings_of(with_ends, right()) == [("MSK404", "warning", "sampled, not trained")]


def test_ends_that_may_have_been_appended_are_a_note_if_no_row_trains_one() -> None:
    appended = right(ends=AnswerEnds.OPEN)
    assert findings_of(appended, appended) == [("MSK404", "note", "not trained")]
    assert findings_of(appended, right()) == []


def test_rows_that_contradict_what_the_run_states_are_named() -> None:
    finding = only(right(), right(contradicts=("--convention first",)))
    assert (finding.code, finding.severity) == ("MSK402", Severity.WARNING)
    assert finding.hit.message == "row 1 contradicts --convention first and is left as logged"


def test_what_was_not_asked_for_is_not_said() -> None:
    assert findings_of(unsettled(LATE), codes=frozenset({"MSK401"})) == []
    assert findings_of(right(first=1), codes=frozenset()) == []


def test_many_rows_are_named_by_the_first_of_them() -> None:
    assert "rows 0, 1, 2, 3, 4 and 16 more may be right" in only(*[unsettled(LATE)] * 21).hit.message


# Through a scan

WITNESSES = {5: faulty(LATE), 6: right(LATE), 7: right(), 8: unsettled(LATE)}


def told_by_the_first_token(evidence: Evidence) -> Witness | None:
    """What a row says here: its first token stands for it, so that the scan alone is looked at."""
    row = evidence.rollout.training_row
    return WITNESSES[int(row.token_ids[0])] if row is not None else None


@pytest.fixture
def speaking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tito_audit.run.auditor.witness", told_by_the_first_token)


def log_of(path: Path, firsts: Sequence[int]) -> str:
    row = {"loss_mask": [0, 0, 1, 1], "logprobs": [0.0, 0.0, -0.5, -0.25]}
    path.write_text("".join(json.dumps({"token_ids": [first, 6, 7, 8], **row}) + "\n" for first in firsts))
    return str(path)


BESIDE = "may have the fault of other rows"


@pytest.mark.usefixtures("speaking")
@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=forks), pytest.param(3, marks=forks)])
def test_a_log_speaks_behind_its_rows_whatever_processes_read_it(tmp_path: Path, jobs: int) -> None:
    logs = [log_of(tmp_path / "a.jsonl", [5, 6, 5] * 20), log_of(tmp_path / "b.jsonl", [7, 6])]
    logs += [log_of(tmp_path / "c.jsonl", [7, 8])]
    results, summary = scanned(logs, jobs, None if jobs == 1 else 300)
    of_log = {number: result for number, result in enumerate(results) if result.of_log}
    causes = [(number, result.place, result.findings[0].hit.cause) for number, result in of_log.items()]
    assert causes == [(60, Place(logs[0], 1), BESIDE), (65, Place(logs[2], 1), "undecided")]
    assert results[60].findings[0].hit.message.startswith("20 rows may also have the logprobs 1 place late")
    assert (summary.rollouts, summary.rows_unreadable) == (64, 0)
    assert (summary.open_rows, summary.open_beside_faults) == (1, 20)
    count = summary.findings["LPR502"]
    assert (count.warning, count.note, count.rollouts, count.tokens) == (1, 1, 0, 0)


@pytest.mark.usefixtures("speaking")
def test_a_log_speaks_of_the_rows_that_were_read(tmp_path: Path) -> None:
    log = log_of(tmp_path / "a.jsonl", [6, 6, 5])
    causes = {
        limit: [f.hit.cause for r in scanned([log], limit=limit)[0] for f in r.findings] for limit in (2, None)
    }
    assert causes == {2: [], None: [BESIDE]}
    assert not [result for result in scanned([log], row=0)[0] if result.of_log], (
        "a row that was picked out is not the log"
    )
    assert not [result for result in scanned([log], select=("TOK",))[0] if result.of_log]


@pytest.mark.usefixtures("speaking")
def test_a_gate_counts_a_finding_of_a_log_once_and_of_no_rollout(tmp_path: Path) -> None:
    log, baseline = log_of(tmp_path / "a.jsonl", [5, 6, 5]), str(tmp_path / "base.json")
    strict = Settings(fail_on="warning")
    run = gate_rollouts(log, strict, GateSettings(max_rates=(MaxRate("LPR502", 0.4, "rollout"),)))
    list(run)
    assert run.summary.gate is not None
    assert [(rate.findings, rate.of) for rate in run.summary.gate.rates] == [(1, 3)]
    list(gate_rollouts(log, strict, GateSettings(baseline=baseline, update_baseline=True)))
    log_of(tmp_path / "a.jsonl", [5, 5, 5, 6, 5])
    again = gate_rollouts(log, strict, GateSettings(baseline=baseline))
    assert [finding.known for result in again for finding in result.findings] == [True]
    assert again.summary.gate is not None
    assert not again.summary.gate.failed
    log_of(tmp_path / "a.jsonl", [7, 7])
    gone = gate_rollouts(log, strict, GateSettings(baseline=baseline))
    list(gone)
    assert gone.summary.gate is not None
    assert [entry.code for entry in gone.summary.gate.fixed] == ["LPR502"]


@pytest.mark.usefixtures("speaking")
def test_the_gate_says_that_it_failed_of_the_log(tmp_path: Path) -> None:
    run = gate_rollouts(log_of(tmp_path / "a.jsonl", [5, 6]), Settings(fail_on="warning"), GateSettings())
    list(run)
    assert run.summary.gate is not None
    assert run.summary.gate.because == ("1 warning of the log as a whole: LPR502 (1)",)


# In reports


def of_a_log() -> Iterator[Result]:
    finding = replace(only(faulty(LATE), right(LATE)), place=Place("logs/run.jsonl", 1))
    yield report_results.result(0)
    yield report_results.result(1)
    yield Result(finding.place, None, (finding,), of_log=True)


@pytest.mark.parametrize("report", all_reports(), ids=lambda report: report.name)
def test_every_report_takes_a_finding_of_a_log_for_what_it_is(report: Any) -> None:
    summary, out = Summary(files=["logs/run.jsonl"]), io.StringIO()

    def counted() -> Iterator[Result]:
        for result in of_a_log():
            summary.add(result)
            yield result

    feed_results(counted(), report.write(summary, out, ReportOptions(titles={"LPR502": "shifted"})))
    text = out.getvalue()
    none = r'rows_unreadable"?( value="0"|" value="0"|":0)?|.*tito_audit_unreadable_rows( gauge| 0|.* read.)'
    assert "unreadable" not in re.sub(none, "", text)
    if report.name != "html":  # which is packed
        assert "LPR502" in text
    if report.name == "text":
        assert "1 warning in the log as a whole" in text
        assert "warning LPR502 logs/run.jsonl:1 the whole log" in text
    if report.name == "github":
        assert "::the log as a whole, from row 1 on: 1 row may also have" in text
    if report.name == "junit":
        assert 'name="rows_unreadable" value="0"' in text
    if report.name == "concise":
        assert text.startswith("logs/run.jsonl:1:-:- LPR502 warning: ")
    if report.name == "sarif":
        place = json.loads(text)["runs"][0]["results"][0]["locations"][0]
        assert place["logicalLocations"][0]["fullyQualifiedName"] == "row 1/log"
    if report.name == "jsonl":
        assert json.loads(text.splitlines()[0])["where"] == "log"
