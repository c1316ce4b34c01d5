"""Reports: the golden text of one fixed set of results, the schema, and hostile words made harmless."""

from __future__ import annotations

import io
import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from tests.report_results import ODD, TITLES, finding, golden, hostile, merge, result, results, tool_call, written
from tests.tables import table
from tests.world import ROOT
from tito_audit.record.finding import Hit, Result, Severity, Side, Skip, Where
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.stated import Stated
from tito_audit.report import Report, ReportOptions, feed_results
from tito_audit.reports import all_reports, report_named
from tito_audit.summary import Headline, RuleCount, Summary
from tito_audit.terminal.boxes import draw_boxes
from tito_audit.terminal.escape import escaped_json, visible
from tito_audit.terminal.verdict import verdict
from tito_audit.terminal.worst import WorstFindings

GOLDENS = ROOT / "fixtures" / "reports"
EMPTY: dict[str, Callable[[str], bool]] = {
    "concise": lambda text: text == "tito-audit: nothing audited: there are no rollouts\n",
    "github": lambda text: text == "",
    "html": lambda text: "no rollouts" in text and text.rstrip().endswith("</html>"),
    "json": lambda text: json.loads(text)["summary"]["rollouts"] == 0,
    "jsonl": lambda text: json.loads(text)["summary"]["rollouts"] == 0,
    "junit": lambda text: ElementTree.fromstring(text.encode()).get("tests") == "0",
    "prometheus": lambda text: 'verdict="nothing audited"} 1\n' in text and 'verdict="clean"} 0\n' in text,
    "markdown": lambda text: text.startswith("### ⚠️ tito-audit: nothing audited\n"),
    "sarif": lambda text: json.loads(text)["runs"][0]["results"] == [],
    "text": lambda text: text.endswith("nothing audited: there are no rollouts\n"),
}
"""What a report of no results has to be; of a report that is not named here, only that it calls nothing clean."""


def summary_of(audited: Iterable[Result]) -> Summary:
    """What the results come to."""
    summary = Summary()
    for row in audited:
        summary.add(row)
    return summary


@pytest.mark.parametrize("report", all_reports(), ids=lambda report: report.name)
def test_a_report_writes_its_golden_text(report: Report) -> None:
    file = GOLDENS / f"{report.name}.txt"
    text = golden(report)
    if os.environ.get("UPDATE_GOLDENS"):
        file.write_text(text, encoding="utf-8", newline="")
    assert text == file.read_bytes().decode()


@pytest.mark.parametrize("report", all_reports(), ids=lambda report: report.name)
def test_a_report_of_no_results_is_valid(report: Report) -> None:
    text = written(report, ())
    assert EMPTY.get(report.name, lambda text: "clean" not in text)(text), text


def test_an_unknown_report_names_the_reports_there_are() -> None:
    with pytest.raises(Exception, match=", ".join(sorted(report.name for report in all_reports()))):
        report_named("pdf")


def test_json_and_jsonl_hold_the_same_findings_and_the_documented_keys() -> None:
    whole = json.loads(written(report_named("json"), results()))
    *lines, last = written(report_named("jsonl"), results()).splitlines()
    assert list(whole) == ["summary", "findings"]
    assert whole["findings"] == [json.loads(line) for line in lines]
    assert whole["summary"] == json.loads(last)["summary"]
    keys = "code severity file row item turn where start end cause message recorded canonical context repair"
    assert " ".join(whole["findings"][0]) == keys + " fingerprint known because_of"
    assert whole["summary"]["schema_version"] == 1
    assert whole["summary"]["findings"]["TOK101"]["rollouts"] == 4
    assert whole["summary"]["skipped"]["LPR501"] == {"rollouts": 2, "because": "no logprobs"}
    assert whole["summary"]["rows_unreadable"] == 1


@pytest.mark.parametrize("name", ["json", "jsonl"])
def test_json_survives_half_characters_and_hides_those_that_act(name: str) -> None:
    text = written(report_named(name), iter([result(5, hostile(Place("a\udcff.jsonl", 5)))]))
    assert not set(text) & set("\x1b\x07\u202e\x9b")
    first = json.loads(text)["findings"][0] if name == "json" else json.loads(text.splitlines()[0])
    assert first["recorded"]["pieces"][0] == "\x1b]0;owned\x07"
    assert first["message"].endswith("\\ud83d")
    assert first["file"] == "a\\udcff.jsonl"


@given(st.text())
def test_escaping_json_never_changes_its_value(text: str) -> None:
    assert json.loads(escaped_json(json.dumps(text, ensure_ascii=False))) == text


@pytest.mark.parametrize("color", [False, True])
def test_no_word_of_the_log_acts_on_the_terminal(color: bool) -> None:
    text = written(report_named("text"), [result(5, hostile(Place("logs/run.jsonl", 5)))], color=color, notes=True)
    plain = Text.from_ansi(text).plain
    assert "\x1b]" not in text
    assert not set(plain) & set("\x1b\x07\u202e\u202c\r")
    assert "[red]not red[/red] ␛[31mnot red␛[0m ␇ \\u202egnihton\\u202c line⏎forged \\ud83d" in " ".join(
        plain.split()
    )
    assert ("\x1b[" in text) is color


VISIBLE = table(__file__, "a_token_is_shown_with_every_character_seen")


@pytest.mark.parametrize(VISIBLE[0], [*VISIBLE[1], ("\ud83d", "\\ud83d")])
def test_a_token_is_shown_with_every_character_seen(text: str, shown: str) -> None:
    assert visible(text, edges=True) == shown


@given(st.text())
def test_visible_text_is_one_printable_line(text: str) -> None:
    assert visible(text).isprintable()
    assert visible(text, edges=True).isprintable()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_page_keeps_to_its_width(width: int) -> None:
    short = [row for row in results() if row.place.file != ODD]
    lines = written(report_named("text"), short, width=width).splitlines()
    assert max(cell_len(line) for line in lines[:-1] if "tito-audit" not in line) <= width


@pytest.mark.parametrize("width", [60, 79, 80, 100])
def test_no_number_of_the_table_is_cut_off(width: int) -> None:
    new = Counter({Severity.ERROR: 234_567, Severity.WARNING: 345_678, Severity.NOTE: 45_678})
    count = RuleCount(rollouts=123_456, tokens=98_765_432, new=new)
    summary = Summary(files=["run.jsonl"], findings={"TOK101": count})
    out = io.StringIO()
    summary.headlines["", "log"] = Headline("{n} odd", "log", note=1)
    feed_results(
        (), report_named("text").write(summary, out, ReportOptions(width=width, titles=TITLES, notes=True))
    )
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith("TOK101")]
    shown = line.split()[-(5 if width >= 80 else 4) :]
    assert shown[:4] == ["234,567", "345,678", "45,678", "123,456"]
    assert shown[4:] == (["98,765,432"] if width >= 80 else [])
    assert cell_len(line) <= width


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_command_to_paste_is_on_one_line(width: int) -> None:
    lines = written(report_named("text"), results(), width=width).splitlines()
    commands = [line for line in lines if line.startswith("  tito-audit show ")]
    assert len(commands) == 1
    words = shlex.split(commands[0].partition("   that rollout")[0])
    assert words[:2] == ["tito-audit", "show"]
    assert words[3] == "--row"
    after = lines[lines.index(commands[0]) + 1]
    assert "that rollout, token by token" in commands[0] + after
    assert cell_len(after) <= width


tokens = st.lists(st.text(min_size=1, max_size=40), max_size=40)


def hit_of(recorded: Side, canonical: Side) -> Hit:
    """A hit of a completion with these sides."""
    return Hit(Where.COMPLETION, 0, len(recorded.ids), "", 0, recorded=recorded, canonical=canonical)


@given(tokens, tokens, st.integers(44, 120))
def test_boxes_fit_and_end_for_any_tokens(recorded: list[str], canonical: list[str], width: int) -> None:
    left = Side(tuple(range(len(recorded))), tuple(recorded))
    other = Side(tuple(range(len(canonical))), tuple(canonical))
    for line in draw_boxes(hit_of(left, other), width):
        assert cell_len(line.plain) <= width


@pytest.mark.parametrize(
    ("recorded", "canonical", "lines"),
    [
        (
            Side((43, 7, 905), ("Skin", "ny", " cat")),
            Side((4410, 905), ("Skinny", " cat")),
            [
                "sampled      │Skin│ny│·cat│",
                "              43   7  905",
                "re-encoded   │Skinny │·cat│",
                "              4410    905",
            ],
        ),
        (Side((5, 6)), Side((7,)), ["sampled      │5│6│", "re-encoded   │7  │"]),
    ],
    ids=["tokens of the same text stand above each other", "without a tokenizer the ids stand alone"],
)
def test_two_sides_stand_in_boxes(recorded: Side, canonical: Side, lines: list[str]) -> None:
    assert [line.plain for line in draw_boxes(hit_of(recorded, canonical), 80)] == lines


def test_a_long_stretch_is_cut_in_the_middle_with_a_count() -> None:
    side = Side(tuple(range(500)), tuple(f" w{n}" for n in range(500)))
    text = "\n".join(line.plain for line in draw_boxes(hit_of(side, Side()), 80))
    assert "… 488 tokens …" in text
    assert "w499" in text


def test_the_worst_are_spread_over_rules_and_stay_few_however_long_the_log() -> None:
    worst = WorstFindings()
    for row in range(2000):
        place = Place("a", row)
        severity = Severity.ERROR if row > 1000 else Severity.NOTE
        worst.add((merge(place, severity), tool_call(place)))
        odd = finding("LPR505", Severity.ERROR, place, cause=f"cause {row}")
        worst.add((odd,))
    entries = worst.pick(10)
    picked = [entry.finding for entry in entries]
    assert [shown.code for shown in picked[:2]] == ["TOK101", "LPR505"]
    assert [shown.severity for shown in picked] == sorted((shown.severity for shown in picked), reverse=True)
    assert [shown.code for shown in picked].count("LPR505") == 1
    assert sum(map(len, worst._kept.values())) < 60


def test_findings_of_one_log_code_and_cause_are_one_entry_that_counts_them() -> None:
    rows = [
        result(row, *(merge(Place("a", row), Severity.ERROR, at) for at in (12, 40)), file="a") for row in range(9)
    ]
    other = [result(2, merge(Place("b", 2), Severity.ERROR), file="b")]
    text = written(report_named("text"), iter([*rows, *other]))
    assert text.count("error TOK101") == 1
    assert "  18 like this in 9 rows: 0, 1, 2, 3, 4, …\n" in text
    assert "like this in" in written(report_named("markdown"), iter([*rows, *other]))


@pytest.mark.parametrize("name", ["text", "markdown", "github"])
def test_what_says_that_the_log_does_not_fit_leads(name: str) -> None:
    place = Place("a", 0)
    misfit = finding(
        "REC007", Severity.ERROR, place, where=Where.LOG, message="another one", cause="another tokenizer"
    )
    sentinel = finding(
        "LPR505", Severity.ERROR, place, where=Where.ROW, start=1, end=2, message="a 0.0", cause="0.0"
    )
    text = written(report_named(name), iter([result(0, sentinel), Result(place, None, (misfit,), of_log=True)]))
    assert text.index("another one") < text.index("a 0.0")
    assert text.index("REC007") < text.index("LPR505")


def test_a_log_without_ids_is_never_called_clean() -> None:
    text = written(report_named("text"), iter([result(0, tokens=0), result(1, tokens=0)]))
    assert text.splitlines()[-1] == "nothing audited: no token ids in 2 rollouts"
    assert "clean" not in text
    some = written(report_named("text"), iter([result(0, tokens=0), result(1)]))
    assert some.splitlines()[-1] == "clean: no findings in 1 rollout; nothing audited in 1 without token ids"


def test_a_log_in_which_nothing_was_compared_is_never_called_clean() -> None:
    skips = tuple(Skip(f"TOK10{digit}", "no tokenizer") for digit in range(1, 8))
    alone = [
        replace(clean, counts={**clean.counts, "uncompared": 1})
        for clean in (result(0, skips=skips), result(1, skips=skips))
    ]
    for name in ("concise", "markdown", "text"):
        text = written(report_named(name), iter(alone))
        assert "clean" not in text
        assert "7 rules need a tokenizer: pass -t NAME" in text
    assert verdict(summary_of(alone)).word == "nothing compared"
    some = written(report_named("text"), iter([alone[0], result(1)]))
    assert some.splitlines()[-1].startswith("clean: no findings in 1 rollout; ")
    assert "; nothing compared in 1: 7 rules need a tokenizer: pass -t NAME" in some.splitlines()[-1]


@pytest.mark.parametrize("report", all_reports(), ids=lambda report: report.name)
def test_results_hold_no_rollout_after_a_report_has_seen_them(report: Report) -> None:
    """A report of a large log holds findings only: the arrays of each rollout may go."""
    import gc
    import weakref

    class Marked(np.ndarray):
        pass

    watched: list[weakref.ref[Marked]] = []

    def many() -> Iterator[Result]:
        for row in range(50):
            array = np.zeros(1, np.int32).view(Marked)
            watched.append(weakref.ref(array))
            plain = result(row, merge(Place("logs/run.jsonl", row), Severity.ERROR))
            rollout = Rollout(plain.place, "slime", stated=Stated(facts={"x": array}))
            yield Result(plain.place, rollout, plain.findings)
            del array, plain, rollout
            gc.collect(0)
            assert sum(ref() is not None for ref in watched) <= 3

    written(report, many())
