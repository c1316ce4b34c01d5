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
from tito_audit import GateSettings, Result, Settings, gate_rollouts, scan_rollouts
from tito_audit.evidence.model import Evidence
from tito_audit.record import testimony as record
from tito_audit.record.finding import Finding, Severity, Where
from tito_audit.record.rollout import Place
from tito_audit.record.testimony import Reading, Witness
from tito_audit.report import ReportOptions
from tito_audit.reports import all_reports
from tito_audit.run.log_findings import findings_of_log
from tito_audit.run.scan import testimony_of as gathered_testimony
from tito_audit.run.workers import can_fork
from tito_audit.settings.model import MaxRate
from tito_audit.summary import Summary

RIGHT, LATE, EARLY = Reading(), Reading(0, 1), Reading(0, -1)
SLID = Reading(1, 0)
CODES = frozenset({"LPR502", "MSK401"})
forks = pytest.mark.skipif(not can_fork(), reason="processes are not forked on this system")


def log_saying(*standings: Sequence[Reading]) -> record.Testimony:
    """A log of rows that leave these readings open, one row after the other, two spans each."""
    heard = record.Testimony()
    for row, standing in enumerate(standings):
        heard.add(Witness(tuple(sorted(standing)), 2), Place("log", row))
    return heard


def found(*standings: Sequence[Reading], codes: frozenset[str] = CODES) -> list[tuple[str, str, str]]:
    return [
        (one.code, one.severity.word, one.hit.cause)
        for one in findings_of_log("log", log_saying(*standings), codes)
    ]


def only(*standings: Sequence[Reading]) -> Finding:
    (finding,) = findings_of_log("log", log_saying(*standings), CODES)
    return finding


# What the rows say


def test_rows_that_all_show_how_they_were_written_need_no_log_to_say_it() -> None:
    assert found((RIGHT,), (RIGHT,)) == []
    assert found((LATE,), (LATE,)) == []
    assert found((LATE,), (LATE, EARLY)) == []  # the second has a finding of its own already
    assert findings_of_log("log", record.Testimony(), CODES) == ()


def test_rows_that_other_rows_settle_as_right_have_no_finding() -> None:
    assert found((RIGHT,), (RIGHT, LATE)) == []
    assert found((RIGHT, LATE), (RIGHT, EARLY)) == []


def test_what_all_rows_share_is_an_error_of_the_log_where_it_is_not_right() -> None:
    finding = only((LATE,), (LATE,), (RIGHT, LATE), (RIGHT, LATE, EARLY))
    assert (finding.code, finding.severity, finding.hit.cause) == ("LPR502", Severity.ERROR, "shifted by +1")
    assert finding.place == Place("log", 2), "the first row that has no finding of its own"
    assert (finding.hit.where, finding.hit.start, finding.hit.end) == (Where.LOG, 0, 0)
    assert finding.repair == "realign"
    assert finding.hit.message == (
        "the logprobs are 1 place late in all 4 rows (8 sampled spans): 2 rows prove it, and it is the only "
        "reading that all rows allow (including rows 2, 3)"
    )


def test_a_mask_that_slid_with_the_logprobs_is_said_of_both() -> None:
    both = Reading(1, 1)
    assert found((both,), (RIGHT, both)) == [
        ("LPR502", "error", "shifted by +1"),
        ("MSK401", "error", "slid by +1"),
    ]
    assert found((SLID,), (RIGHT, SLID)) == [("MSK401", "error", "slid by +1")]
    assert found((both,), (RIGHT, both), codes=frozenset({"MSK401"})) == [("MSK401", "error", "slid by +1")]


def test_what_no_row_shows_alone_may_still_be_all_that_they_share() -> None:
    assert (
        "no single row proves it, but it is the only reading that all rows allow"
        in only((RIGHT, LATE), (EARLY, LATE)).hit.message
    )


def test_a_log_that_leaves_it_open_says_so_and_is_never_clean() -> None:
    finding = only((RIGHT, LATE), (RIGHT, LATE), (RIGHT, LATE))
    assert (finding.code, finding.severity, finding.hit.cause) == ("LPR502", Severity.NOTE, "undecided")
    assert finding.repair is None
    assert finding.hit.message.startswith(
        "3 of 3 rows do not show whether the logprobs are on their own tokens: "
        "rows 0, 1, 2 allow in place or 1 place late"
    )
    assert found((RIGHT, SLID), (RIGHT, SLID)) == [("MSK401", "note", "undecided")]


def test_rows_that_contradict_each_other_decide_nothing_for_the_others() -> None:
    finding = only((RIGHT,), (LATE,), (RIGHT, LATE))
    assert (finding.severity, finding.hit.cause, finding.place.row) == (Severity.NOTE, "undecided", 2)
    assert finding.hit.message.startswith("1 of 3 rows does not show")


def test_a_log_whose_rows_agree_that_it_is_wrong_but_not_how_is_warned_of() -> None:
    finding = only((LATE, EARLY), (RIGHT, LATE, EARLY))
    assert finding.severity is Severity.WARNING
    assert "other rows rule out that it is right" in finding.hit.message


def test_rows_open_in_the_mask_and_rows_open_in_the_logprobs_are_two_findings() -> None:
    assert found((RIGHT, SLID), (RIGHT, LATE), (EARLY,)) == [
        ("LPR502", "note", "undecided"),
        ("MSK401", "note", "undecided"),
    ]


def test_what_was_not_asked_for_is_not_said() -> None:
    assert found((RIGHT, LATE), codes=frozenset({"MSK401"})) == []
    assert found((LATE,), (RIGHT, LATE), codes=frozenset()) == []


def test_many_rows_are_named_by_the_first_of_them() -> None:
    assert "rows 0, 1, 2, 3, 4 and 16 more allow" in only(*[(RIGHT, LATE)] * 21).hit.message


# Through a scan

STANDINGS = {5: (LATE,), 6: (RIGHT, LATE), 7: (RIGHT,)}


def told_by_the_first_token(evidence: Evidence) -> Witness | None:
    """What a row says here: its first token stands for it, so that the scan alone is looked at."""
    row = evidence.rollout.training_row
    return Witness(STANDINGS[int(row.token_ids[0])], 1) if row is not None else None


@pytest.fixture
def speaking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tito_audit.run.auditor.witness", told_by_the_first_token)


def log_of(path: Path, firsts: Sequence[int]) -> str:
    row = {"loss_mask": [0, 0, 1, 1], "logprobs": [0.0, 0.0, -0.5, -0.25]}
    path.write_text("".join(json.dumps({"token_ids": [first, 6, 7, 8], **row}) + "\n" for first in firsts))
    return str(path)


def scanned(
    logs: list[str], jobs: int = 1, chunk: int | None = None, **options: Any
) -> tuple[list[Result], Summary]:
    scan = scan_rollouts(logs, Settings(jobs=jobs, **options))
    scan.chunk_bytes = chunk
    return list(scan), scan.summary


@pytest.mark.usefixtures("speaking")
@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=forks), pytest.param(3, marks=forks)])
def test_a_log_speaks_behind_its_rows_whatever_processes_read_it(tmp_path: Path, jobs: int) -> None:
    logs = [log_of(tmp_path / "a.jsonl", [5, 6, 5] * 20), log_of(tmp_path / "b.jsonl", [7, 6])]
    logs += [log_of(tmp_path / "c.jsonl", [5, 7, 6])]
    results, summary = scanned(logs, jobs, None if jobs == 1 else 300)
    said = [(number, one.place, one.findings[0].hit.cause) for number, one in enumerate(results) if one.of_log]
    assert said == [(60, Place(logs[0], 1), "shifted by +1"), (66, Place(logs[2], 2), "undecided")]
    assert "all 60 rows (60 sampled spans): 40 rows prove it" in results[60].findings[0].hit.message
    assert (summary.rollouts, summary.rows_unreadable) == (65, 0)
    count = summary.findings["LPR502"]
    assert (count.error, count.note, count.rollouts, count.tokens) == (1, 1, 0, 0)


@pytest.mark.usefixtures("speaking")
def test_a_log_speaks_of_the_rows_that_were_read(tmp_path: Path) -> None:
    log = log_of(tmp_path / "a.jsonl", [6, 6, 5])
    causes = {
        limit: [f.hit.cause for r in scanned([log], limit=limit)[0] for f in r.findings] for limit in (2, None)
    }
    assert causes == {2: ["undecided"], None: ["shifted by +1"]}
    assert not [one for one in scanned([log], row=0)[0] if one.of_log], "a row that was picked out is not the log"
    assert not [one for one in scanned([log], select=("TOK",))[0] if one.of_log]


@pytest.mark.usefixtures("speaking")
def test_what_all_rows_say_can_be_asked_for_alone(tmp_path: Path) -> None:
    logs = [log_of(tmp_path / "a.jsonl", [6, 6, 5]), log_of(tmp_path / "b.jsonl", [7])]
    heard = gathered_testimony(logs, Settings(limit=1))
    assert {log: one.common() for log, one in heard.items()} == {logs[0]: {LATE}, logs[1]: {RIGHT}}
    assert heard[logs[0]].tallies[(RIGHT, LATE)].rows == 2


@pytest.mark.usefixtures("speaking")
def test_a_gate_counts_a_finding_of_a_log_once_and_of_no_rollout(tmp_path: Path) -> None:
    log, baseline = log_of(tmp_path / "a.jsonl", [5, 6, 5]), str(tmp_path / "base.json")
    run = gate_rollouts(log, Settings(), GateSettings(max_rates=(MaxRate("LPR502", 0.4, "rollout"),)))
    list(run)
    assert run.summary.gate is not None
    assert [(rate.findings, rate.of) for rate in run.summary.gate.rates] == [(1, 3)]
    list(gate_rollouts(log, Settings(), GateSettings(baseline=baseline, update_baseline=True)))
    log_of(tmp_path / "a.jsonl", [5, 5, 5, 6, 5])
    again = gate_rollouts(log, Settings(), GateSettings(baseline=baseline))
    assert [finding.known for one in again for finding in one.findings] == [True]
    assert again.summary.gate is not None
    assert not again.summary.gate.failed
    log_of(tmp_path / "a.jsonl", [7, 7])
    gone = gate_rollouts(log, Settings(), GateSettings(baseline=baseline))
    list(gone)
    assert gone.summary.gate is not None
    assert [one.code for one in gone.summary.gate.fixed] == ["LPR502"]


@pytest.mark.usefixtures("speaking")
def test_the_gate_says_that_it_failed_of_the_log(tmp_path: Path) -> None:
    run = gate_rollouts(log_of(tmp_path / "a.jsonl", [5, 6]), Settings(), GateSettings())
    list(run)
    assert run.summary.gate is not None
    assert run.summary.gate.because == ("1 error of the log as a whole: LPR502 (1)",)


# In reports


def of_a_log() -> Iterator[Result]:
    finding = replace(only((LATE,), (RIGHT, LATE)), place=Place("logs/run.jsonl", 1))
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

    report.write(counted(), summary, out, ReportOptions(titles={"LPR502": "shifted"}))
    text = out.getvalue()
    none = r'rows_unreadable"?( value="0"|" value="0"|":0)?|.*tito_audit_unreadable_rows( gauge| 0|.* read.)'
    assert "unreadable" not in re.sub(none, "", text)
    if report.name != "html":  # which is packed
        assert "LPR502" in text
    if report.name == "text":
        assert "1 error in the log as a whole" in text
        assert "error LPR502 logs/run.jsonl:1 the whole log" in text
    if report.name == "github":
        assert "::the log as a whole, from row 1 on: the logprobs are" in text
    if report.name == "junit":
        assert 'name="rows_unreadable" value="0"' in text
    if report.name == "concise":
        assert text.startswith("logs/run.jsonl:1:-:- LPR502 error: ")
    if report.name == "sarif":
        place = json.loads(text)["runs"][0]["results"][0]["locations"][0]
        assert place["logicalLocations"][0]["fullyQualifiedName"] == "row 1/log"
    if report.name == "jsonl":
        assert json.loads(text.splitlines()[0])["where"] == "log"
