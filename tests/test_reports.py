"""Reports: the golden text of one fixed set of results, the schema, and hostile words made harmless."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from tito_audit.record.finding import Finding, Hit, Result, Severity, Side, Skip, Where
from tito_audit.record.rollout import Place, Rollout
from tito_audit.report import Report, ReportOptions
from tito_audit.reports import all_reports, report_named
from tito_audit.reports._boxes import boxes
from tito_audit.reports._visible import escaped_json, visible
from tito_audit.reports._worst import PER_CODE, Worst
from tito_audit.summary import Summary

GOLDENS = Path(__file__).resolve().parents[1] / "fixtures" / "reports"
TITLES = {
    "REC001": "A row cannot be read",
    "TOK101": "Several sampled tokens re-encode as one",
    "TPL203": "A tool call is written back differently",
    "LPR505": "A placeholder value stands where a logprob is trained",
}


def finding(code: str, severity: Severity, place: Place, **hit: object) -> Finding:
    fields: dict[str, object] = {"where": Where.COMPLETION, "start": 0, "end": 0, "message": "", **hit}
    return Finding(code, severity, place, Hit(**fields))  # type: ignore[arg-type]


def merge(place: Place, severity: Severity, start: int = 12) -> Finding:
    return finding(
        "TOK101",
        severity,
        place,
        turn=1,
        start=start,
        end=start + 2,
        cause="merge",
        message="Two sampled tokens re-encode as one, and turn 2's prompt holds the re-encoded form.",
        recorded=Side((43, 7, 905), ("Skin", "ny", " cat")),
        canonical=Side((4410, 905), ("Skinny", " cat")),
    )


def tool_call(place: Place) -> Finding:
    return finding(
        "TPL203",
        Severity.WARNING,
        place,
        turn=0,
        start=3,
        end=9,
        cause="tool call spacing",
        message="The template writes the arguments without the spaces that were sampled.",
        recorded=Side((90, 25, 220, 16), ('{"', 'city":', " ", '"Rom"}')),
        canonical=Side((90, 26), ('{"', 'city":"Rom"}')),
    )


def result(row: int, *findings: Finding, skips: tuple[Skip, ...] = (), tokens: int = 120) -> Result:
    place = Place("logs/run.jsonl", row)
    counts = {"turns": 2, "tokens": tokens, "generated_tokens": tokens // 3}
    return Result(place, Rollout(place, "slime"), findings, skips, counts)


def results() -> Iterator[Result]:
    """One fixed set of made-up results: everything a report has to show once."""
    no_logprobs = tuple(Skip(f"LPR50{digit}", "no logprobs") for digit in range(1, 7))
    skips = (*no_logprobs, Skip("TPL203", "no messages"))
    places = [Place("logs/run.jsonl", row) for row in range(6)]
    yield result(0, merge(places[0], Severity.ERROR), merge(places[0], Severity.NOTE, 40))
    yield result(1, tool_call(places[1]), skips=no_logprobs)
    yield result(2, skips=skips)
    unreadable = "The line is no JSON: it ends inside a string at byte 812."
    bad = finding("REC001", Severity.ERROR, places[3], where=Where.ROW, message=unreadable, cause="no JSON")
    yield Result(places[3], None, (bad,))
    sentinel = finding(
        "LPR505",
        Severity.ERROR,
        places[4],
        where=Where.ROW,
        start=100,
        end=140,
        cause="0.0",
        message="40 trained tokens carry the logprob 0.0, which stands for 'none' in this log. " * 2,
        recorded=Side(tuple(range(1000, 1040)), tuple(f" word{n}" for n in range(40))),
    )
    yield result(4, sentinel, merge(places[4], Severity.ERROR))
    yield result(5, hostile(places[5]), tokens=0)


def hostile(place: Place) -> Finding:
    """A finding whose text tries to act on the terminal."""
    return finding(
        "TOK101",
        Severity.NOTE,
        place,
        turn=0,
        end=3,
        cause="[bold red]merge[/]",
        message="[red]not red[/red] \x1b[31mnot red\x1b[0m \x07 \u202egnihton\u202c line\nforged \ud83d",
        recorded=Side((1, 2, 3), ("\x1b]0;owned\x07", " \n", "\u202e[bold]")),
        canonical=Side((4,), ("\x1b]0;owned\x07 \n\u202e[bold]",)),
    )


def tally(of: Iterator[Result], summary: Summary) -> Iterator[Result]:
    for one in of:
        summary.add(one)
        yield one


def written(report: Report, of: Iterator[Result], **options: object) -> str:
    summary = Summary(files=["logs/run.jsonl"], tokenizer="toy_bpe", encoder="tokenizers", seconds=2.0)
    summary.notices.append("no chat template: the TPL rules were skipped")
    out = io.StringIO()
    report.write(tally(of, summary), summary, out, ReportOptions(titles=TITLES, **options))  # type: ignore[arg-type]
    return out.getvalue()


@pytest.mark.parametrize("report", all_reports(), ids=lambda report: report.name)
def test_a_report_writes_its_golden_text(report: Report) -> None:
    golden = GOLDENS / f"{report.name}.txt"
    text = written(report, results())
    if os.environ.get("UPDATE_GOLDENS"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("report", all_reports(), ids=lambda report: report.name)
def test_a_report_of_no_results_is_valid(report: Report) -> None:
    text = written(report, iter(()))
    if report.name == "text":
        assert "nothing to audit: no rollouts" in text
    else:
        assert json.loads(text)["summary"]["rollouts"] == 0


def test_an_unknown_report_names_the_reports_there_are() -> None:
    with pytest.raises(Exception, match="json, jsonl, text"):
        report_named("html")


def test_json_and_jsonl_hold_the_same_findings_and_the_documented_keys() -> None:
    whole = json.loads(written(report_named("json"), results()))
    *lines, last = written(report_named("jsonl"), results()).splitlines()
    assert list(whole) == ["summary", "findings"]
    assert whole["findings"] == [json.loads(line) for line in lines]
    assert whole["summary"] == json.loads(last)["summary"]
    keys = "code severity file row item turn where start end cause message recorded canonical repair fingerprint"
    assert " ".join(whole["findings"][0]) == keys
    assert whole["summary"]["schema_version"] == 1
    assert whole["summary"]["findings"]["TOK101"]["rollouts"] == 3
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
    text = written(report_named("text"), results(), color=color)
    plain = Text.from_ansi(text).plain
    assert "\x1b]" not in text
    assert not set(plain) & set("\x1b\x07\u202e\u202c\r")
    assert "[red]not red[/red] ␛[31mnot red␛[0m ␇ \\u202egnihton\\u202c line⏎forged \\ud83d" in " ".join(
        plain.split()
    )
    assert ("\x1b[" in text) is color


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cat", "cat"),
        (" cat", "·cat"),
        ("  ", "··"),
        ("\n\n", "⏎⏎"),
        ("", "∅"),
        ("\x1b[2J", "␛[2J"),
        ("\x9b2J", "\\x9b2J"),
        ("a\u202eb", "a\\u202eb"),
        ("\u200d", "\\u200d"),
        ("\xa0", "\\xa0"),
        ("\ud83d", "\\ud83d"),
        ("\U000e0041", "\\U000e0041"),
        ("\u0301x", "◌\u0301x"),
        ("\u3164", "\\u3164"),
        ("日本", "日本"),
    ],
)
def test_a_token_is_shown_with_every_character_seen(text: str, shown: str) -> None:
    assert visible(text, edges=True) == shown


@given(st.text())
def test_visible_text_is_one_printable_line(text: str) -> None:
    assert visible(text).isprintable()
    assert visible(text, edges=True).isprintable()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_page_keeps_to_its_width(width: int) -> None:
    lines = written(report_named("text"), results(), width=width).splitlines()
    assert max(cell_len(line) for line in lines if "tito-audit" not in line) <= width


tokens = st.lists(st.text(min_size=1, max_size=40), max_size=40)


@given(tokens, tokens, st.integers(44, 120))
def test_boxes_fit_and_end_for_any_tokens(recorded: list[str], canonical: list[str], width: int) -> None:
    one = Side(tuple(range(len(recorded))), tuple(recorded))
    other = Side(tuple(range(len(canonical))), tuple(canonical))
    for line in boxes(one, other, width):
        assert cell_len(line.plain) <= width


def test_tokens_of_the_same_text_stand_above_each_other() -> None:
    recorded = Side((43, 7, 905), ("Skin", "ny", " cat"))
    lines = [line.plain for line in boxes(recorded, Side((4410, 905), ("Skinny", " cat")), 80)]
    assert lines == [
        "recorded   │Skin│ny│·cat│",
        "            43   7  905",
        "canonical  │Skinny │·cat│",
        "            4410    905",
    ]


def test_a_long_stretch_is_cut_in_the_middle_with_a_count() -> None:
    side = Side(tuple(range(500)), tuple(f" w{n}" for n in range(500)))
    text = "\n".join(line.plain for line in boxes(side, Side(), 80))
    assert "… 488 tokens …" in text
    assert "w499" in text


def test_without_a_tokenizer_the_ids_stand_alone() -> None:
    assert [line.plain for line in boxes(Side((5, 6)), Side((7,)), 80)] == [
        "recorded   │5│6│",
        "canonical  │7  │",
    ]


def test_the_worst_are_spread_over_rules_and_stay_few_however_long_the_log() -> None:
    worst = Worst()
    for row in range(2000):
        place = Place("a", row)
        severity = Severity.ERROR if row > 1000 else Severity.NOTE
        worst.add(Result(place, None, (merge(place, severity), tool_call(place))))
        odd = finding("LPR505", Severity.ERROR, place, cause=f"cause {row}")
        worst.add(Result(place, None, (odd,)))
    picked = worst.pick(10)
    assert [one.code for one in picked[:2]] == ["LPR505", "TOK101"]
    assert [one.severity for one in picked] == sorted((one.severity for one in picked), reverse=True)
    assert max([one.code for one in picked].count(code) for code in TITLES) == PER_CODE
    assert len({one.place for one in picked if one.code == "TOK101"}) == PER_CODE
    assert sum(len(kept) for pair in worst._kept.values() for kept in pair) < 60


def test_a_log_without_ids_is_never_called_clean() -> None:
    text = written(report_named("text"), iter([result(0, tokens=0), result(1, tokens=0)]))
    assert "nothing to audit: no token ids in 2 rollouts" in text
    assert "clean" not in text
    some = written(report_named("text"), iter([result(0, tokens=0), result(1)]))
    assert "clean: nothing found in 1 rollout; nothing to audit in 1 without token ids" in some


def test_results_hold_no_rollout_after_a_report_has_seen_them() -> None:
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
            one = result(row, merge(Place("logs/run.jsonl", row), Severity.ERROR))
            yield Result(one.place, Rollout(one.place, "slime", stated={"x": array}), one.findings)
            del array, one
            gc.collect(0)
            assert sum(ref() is not None for ref in watched) <= 3

    written(report_named("text"), many())
