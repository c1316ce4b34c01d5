"""Reports for CI: within limits, nothing dropped unsaid, and nothing that a model said acts on who shows them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.report_results import (
    DOCS,
    GATE,
    ODD,
    TITLES,
    TRAPS,
    finding,
    golden,
    merge,
    result,
    results,
    tool_call,
    written,
)
from tests.runner import commands
from tests.tiers import examples
from tito_audit.record.finding import Finding, Result, Severity, Side
from tito_audit.record.rollout import Place
from tito_audit.reports import all_reports, report_named
from tito_audit.reports.markdown import code, fenced
from tito_audit.summary import Gate, RateCount
from tito_audit.terminal.escape import cut, inert
from tito_audit.terminal.worst import Shortlist

RUN = "logs/run.jsonl"
CONCISE = re.compile(
    r"(?P<file>.+):(?P<row>\d+)(\[\d+\])?:(\d+|-):(\d+-\d+|-) [A-Z]{3}\d{3} (error|warning|note): .*"
)
CONCISE_PLACE = re.compile(r".+?:\d+(\[\d+\])?:(\d+|-):(\d+-\d+|-)(?= [A-Z]{3}\d{3} )")
PASSED = Gate(failed=False, because=(), fail_on="error", failing=0)


def many(number: int, severity: Severity = Severity.ERROR) -> Iterator[Result]:
    """A log with one finding a row, of two rules in turn."""
    for row in range(number):
        place = Place(RUN, row)
        hit = merge(place, severity) if row % 10 else replace(tool_call(place), severity=severity)
        yield result(row, hit)


def finding_of(trap: str, severity: Severity = Severity.ERROR) -> Finding:
    """A finding that says something everywhere."""
    side = Side((1,), (trap,))
    hit = {"turn": 0, "end": 1, "cause": trap, "message": trap, "recorded": side, "canonical": side}
    return finding("TOK101", severity, Place(f"{trap or 'x'}.jsonl", 0), **hit)


def saying(name: str, trap: str) -> str:
    """A report of a run in which everything that can be a log's own words is `trap`."""
    trapped = finding_of(trap)
    gate = replace(GATE, baseline=trap, fixed=tuple(replace(f, message=trap, file=trap) for f in GATE.fixed))
    of = [result(0, trapped, file=trapped.place.file)]
    return written(report_named(name), of, gate=gate, files=(trapped.place.file,), notices=(trap,))


@pytest.mark.parametrize("name", ["concise", "json", "jsonl", "junit", "markdown", "sarif", "text"])
@pytest.mark.parametrize("trap", TRAPS)
def test_no_word_of_a_log_is_a_command_to_a_runner(name: str, trap: str) -> None:
    assert commands(saying(name, trap)) == []
    assert commands(golden(report_named(name))) == []


@pytest.mark.parametrize("trap", [*TRAPS, "::error::x", " ::stop-commands::x", "%0A::error::x", "a,line=1::b"])
def test_annotations_say_what_they_were_given_and_nothing_else(trap: str) -> None:
    text = saying("github", trap)
    printed = commands(text)
    assert len(printed) == text.count("\n")
    assert {command.name for command in printed} <= {"error", "warning", "notice"}
    about = [command for command in printed if "file" in command.properties]
    assert len(about) == 1
    assert set(about[0].properties) == {"file", "line", "title"}
    assert about[0].properties["line"] == "1"


@pytest.mark.parametrize("severity", list(Severity))
@pytest.mark.parametrize("number", [0, 1, 9, 10, 11, 500])
def test_ten_annotations_of_a_kind_come_out_and_the_last_counts_the_rest(number: int, severity: Severity) -> None:
    printed = commands(written(report_named("github"), many(number, severity), gate=None))
    assert len(printed) == min(number, 10)
    assert {command.name for command in printed} <= {{"note": "notice"}.get(severity.word, severity.word)}
    if number > 10:
        assert f"{number - 9:,} more findings" in printed[-1].data
        assert "TPL203" in " ".join(command.properties["title"] for command in printed)


def test_a_failed_gate_says_why_first_and_keeps_within_ten() -> None:
    printed = commands(written(report_named("github"), many(40), gate=GATE))
    errors = [command for command in printed if command.name == "error"]
    assert len(errors) == 10
    assert errors[0].data == "\n".join(GATE.because)
    assert "32 more findings" in errors[-1].data


def test_annotations_are_short_enough_to_be_shown_whole() -> None:
    long = finding_of("x" * 50_000)
    (annotation,) = commands(written(report_named("github"), [result(0, replace(long, place=Place(RUN, 0)))]))
    assert len(annotation.data) <= 4096
    assert "more characters" in annotation.data


def test_concise_has_one_line_for_each_finding_and_one_for_the_run() -> None:
    *lines, last = golden(report_named("concise")).splitlines()
    assert len(lines) == 12
    assert all(CONCISE.fullmatch(line) for line in lines)
    assert last.startswith("tito-audit: failed: new errors in 3 of 8 rollouts (38 %) (2 known): ")
    assert len(golden(report_named("concise")).split("\n")) == 14


def test_the_place_of_a_concise_line_can_be_shown() -> None:
    from tito_audit.cli.show import parse_place

    *lines, _ = written(report_named("concise"), results()).splitlines()
    places = [parse_place(line[: CONCISE_PLACE.match(line).end()]) for line in lines]  # type: ignore[union-attr]
    shown = [(at.place, at.hit) for result in results() for at in result.findings if not at.known]
    for wanted, (place, hit) in zip(places, shown, strict=True):
        assert (wanted.log, wanted.row, wanted.item) == (place.file, place.row, place.item)
        assert wanted.turn == hit.turn
        if wanted.span is not None:
            assert (wanted.span.start, wanted.span.end) == (hit.start, hit.end)
    assert sum(wanted.span is not None for wanted in places) == len(places) - 1


def test_concise_colours_only_where_colours_are_wanted() -> None:
    text = written(report_named("concise"), many(3), color=True)
    assert "\x1b[31merror\x1b[0m" in text
    assert "\x1b" not in written(report_named("concise"), many(3))


@pytest.mark.parametrize("name", ["concise", "github", "markdown", "junit"])
def test_what_the_baseline_holds_is_counted_and_not_shown(name: str) -> None:
    old = [result(row, replace(merge(Place(RUN, row), Severity.ERROR), known=True)) for row in range(3)]
    gate = replace(PASSED, baseline="b.jsonl", known=3)
    text = written(report_named(name), old, gate=gate)
    assert "3 known" in text.replace("&#32;", " ")
    assert not re.search(r"[1-9]\d* (new )?errors?\b", text)
    assert "re-encoded form" not in text
    assert "::error" not in text
    assert "<failure" not in text


@pytest.mark.parametrize("name", ["html", "junit", "markdown", "text"])
def test_a_rate_of_nothing_generated_is_no_number(name: str) -> None:
    rates = (RateCount("TOK=0.01", findings=3, of=0, rate=math.inf, failed=True),)
    gate = Gate(True, ("TOK: 3 findings, but no generated token to divide by",), "error", 0, rates)
    text = written(report_named(name), results(), gate=gate)
    assert "TOK=0.01" in text
    assert "0 generated tokens" in text
    assert not re.search(r"\binf\b", text)


def test_a_run_in_which_nothing_was_audited_never_passes() -> None:
    for name in ("concise", "markdown"):
        text = written(report_named(name), [result(0, tokens=0)], gate=PASSED)
        assert "nothing" in text
        assert "passed" not in text


def markdown_tokens(text: str) -> Iterator[Token]:
    """What GitHub would make of Markdown: tables, bare addresses and HTML taken as such."""
    for token in MarkdownIt("gfm-like", {"html": True, "linkify": True}).parse(text):
        yield token
        yield from token.children or ()


OURS = re.compile(r"(</?details( open)?>|<summary>[\w ,:'-]+</summary>|\s)+")


def assert_inert(text: str) -> None:
    """No link, image or HTML but ours, and no name or number outside code that GitHub would link."""
    for token in markdown_tokens(text):
        assert token.type not in {"link_open", "image", "html_inline"}, token
        if token.type == "html_block":
            assert OURS.fullmatch(token.content), token.content
        if token.type == "text":
            assert not re.search(r"@\w|#\d|GH-\d|://|www\.", token.content), token.content


@pytest.mark.parametrize("trap", TRAPS)
def test_markdown_shows_what_a_log_says_as_code_only(trap: str) -> None:
    text = saying("markdown", trap)
    assert_inert(text)
    shown = "".join(token.content for token in markdown_tokens(text) if token.type in {"fence", "code_inline"})
    assert inert(trap)[:3].strip() in shown or not trap[:3].isprintable()


def test_the_golden_markdown_is_inert_and_its_tables_are_whole() -> None:
    text = golden(report_named("markdown"))
    assert_inert(text)
    kinds = Counter(token.type for token in markdown_tokens(text))
    assert kinds["table_open"] == 3
    assert kinds["td_open"] == 8 * 4 + 5 * 2 + 5 * 3
    assert kinds["fence"] == 9


@given(st.text())
def test_any_text_stays_one_piece_of_code(text: str) -> None:
    line = list(markdown_tokens(f"a {code(text)} b"))
    assert [token.type for token in line if token.type in {"text", "code_inline"}] == [
        "text",
        "code_inline",
        "text",
    ]
    row = [token.type for token in markdown_tokens(f"| x | y |\n| --- | --- |\n| {code(text)} | b |")]
    assert (row.count("td_open"), row.count("code_inline")) == (2, 1)
    block = [token.type for token in markdown_tokens(fenced([text, "end"]))]
    assert block == ["fence"]


def test_markdown_fits_a_comment_however_much_there_is_to_say() -> None:
    def enormous() -> Iterator[Result]:
        for row in range(examples(80, 300)):
            codes = [f"TOK{number}" for number in range(100, 300)]
            long = "<b>`@nobody` " * 200
            place = Place(f"{row}/{'long ' * 50}.jsonl", row)
            of = [replace(finding_of(long), code=code, place=place) for code in codes]
            yield result(row, *of, file=place.file)

    gate = replace(GATE, because=("reason " * 30,) * 500, rates=GATE.rates * 300, fixed=GATE.fixed * 500)
    files = tuple(f"{'f' * 200}{number}" for number in range(500))
    notices = ("notice " * 40,) * 300
    text = written(report_named("markdown"), enormous(), gate=gate, files=files, notices=notices, worst=10_000)
    assert 20_000 < len(text) < 65_000
    assert "more" in text
    assert_inert(text)


def number(pattern: str, text: str) -> int:
    """The one number that the pattern finds."""
    (digits,) = re.findall(pattern, text)
    return int(digits.replace(",", ""))


def findings_in(name: str, text: str) -> int:
    """How many findings a report says that there are: those it shows and those it counts as left out."""
    if name == "concise":
        return text.count("\n") - 1
    if name == "json":
        return len(json.loads(text)["findings"])
    if name == "jsonl":
        return text.count("\n") - 1
    if name == "sarif":
        (run,) = json.loads(text)["runs"]
        return len(run["results"]) + int(run["properties"]["leftOut"])
    if name == "github":
        printed = [command for command in commands(text) if "file" in command.properties]
        left = [re.match(r"([\d,]+) more finding", command.data) for command in commands(text)]
        return len(printed) + sum(int(match[1].replace(",", "")) for match in left if match)
    if name == "junit":
        shown = 0
        for case in ElementTree.fromstring(text.encode()).iter("testcase"):
            words = "\n".join(problem.text or "" for problem in case)
            shown += len(re.findall(r"^(?:error|warning|note), row ", words, re.MULTILINE))
            left = re.findall(r"^and ([\d,]+) more$", words, re.MULTILINE)
            shown += sum(int(digits.replace(",", "")) for digits in left)
        return shown
    if name in ("markdown", "text"):
        rows = re.findall(r"^(?:\| `)?(?:TOK101|TPL203)\b.*", text, re.MULTILINE)
        cells = [row.split("|")[3:6] if name == "markdown" else row.split()[-5:-2] for row in rows]
        return sum(int(cell.replace(",", "")) for row in cells for cell in row)
    if name == "prometheus":
        return sum(map(int, re.findall(r"^tito_audit_findings\{.*\} (\d+)$", text, re.MULTILINE)))
    if name == "html":
        return number(r"of ([\d,]+) findings are in this page", text)
    return sum(text.count(code) for code in ("TOK101", "TPL203"))  # shows them all, each with its code


@pytest.mark.parametrize("name", [report.name for report in all_reports()])
def test_what_is_shown_and_what_is_left_out_are_all_findings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = examples(2_201, 3_001)

    def of_many_files() -> Iterator[Result]:
        for row in range(count):
            place = Place(f"logs/{row % (count - 101)}.jsonl", row)
            severity = Severity(row % 3)
            hits = (merge(place, severity), merge(place, severity, 40), tool_call(place))
            yield result(row, *hits, file=place.file)

    monkeypatch.setattr("tito_audit.reports._html.views.ViewBlocks.max_findings", 500)
    text = written(report_named(name), of_many_files(), gate=None, notes=True)
    assert findings_in(name, text) == 3 * count
    if name in ("text", "markdown", "html"):
        errors, notes = count // 3, 2 * (count // 3 + 1)
        assert f"rrors in {errors:,} of {count:,} rollouts" in text
        assert f"warnings in {count:,}" in text
        assert f"{notes:,} notes" in text


def test_sarif_keeps_the_worst_and_says_how_many_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_kinds() -> Iterator[Result]:
        yield from many(300, Severity.NOTE)
        yield from many(30, Severity.ERROR)
        yield result(1, replace(tool_call(Place(RUN, 1)), known=True))

    monkeypatch.setattr("tito_audit.reports.sarif.RESULTS", 50)
    (run,) = json.loads(written(report_named("sarif"), all_kinds(), gate=GATE))["runs"]
    levels = Counter(entry["level"] for entry in run["results"])
    assert levels == {"error": 30, "note": 20}
    assert {entry["baselineState"] for entry in run["results"]} == {"new"}
    assert Counter(entry["ruleId"] for entry in run["results"] if entry["level"] == "note") == {
        "TOK101": 10,
        "TPL203": 10,
    }
    assert run["properties"]["leftOut"] == 281
    first = run["invocations"][0]["toolExecutionNotifications"][0]
    assert first["level"] == "warning"
    assert first["message"]["text"].startswith("281 findings left out")


def test_sarif_is_what_code_scanning_takes() -> None:
    log = json.loads(golden(report_named("sarif")))
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == sorted(TITLES)
    for rule in rules:
        assert rule["shortDescription"]["text"] == TITLES[rule["id"]]
        assert rule["fullDescription"]["text"] == "More of it, in `words`."
        assert rule["help"]["markdown"] == DOCS[rule["id"]]
    marks = {
        (
            entry["locations"][0]["physicalLocation"]["artifactLocation"]["uri"],
            *entry["partialFingerprints"].values(),
        )
        for entry in run["results"]
    }
    assert len(marks) == len(run["results"]) == 14
    for entry in run["results"]:
        assert rules[entry["ruleIndex"]]["id"] == entry["ruleId"]
        assert "](" not in entry["message"]["text"]
        assert len(entry["message"]["text"]) <= 1024
        (location,) = entry["locations"]
        place = location["physicalLocation"]
        assert ("region" in place) is place["artifactLocation"]["uri"].endswith("run.jsonl")
    assert Counter(entry["baselineState"] for entry in run["results"]) == {"new": 12, "unchanged": 2}
    fixed = [(entry["code"], entry["times"]) for entry in run["properties"]["fixed"]]
    assert fixed == [("TPL203", 1), ("TOK101", 3)]
    assert run["invocations"][0]["exitCode"] == 1


@pytest.mark.parametrize(
    ("file", "uri"),
    [
        ("logs/run.jsonl", "logs/run.jsonl"),
        ("./a b/ü.jsonl", "a%20b/%C3%BC.jsonl"),
        ("a:b#c?.jsonl", "a%3Ab%23c%3F.jsonl"),
        ("caf\udce9.jsonl", "caf%E9.jsonl"),
        ("half\ud83d.jsonl", "half%5Cud83d.jsonl"),
        ("/srv/logs/x.jsonl", "file:///srv/logs/x.jsonl"),
    ],
)
def test_a_path_is_a_uri_in_sarif(file: str, uri: str) -> None:
    error = replace(merge(Place(file, 0), Severity.ERROR))
    (run,) = json.loads(written(report_named("sarif"), [result(0, error, file=file)]))["runs"]
    artifact = run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert artifact["uri"] == uri
    assert ("uriBaseId" in artifact) is not uri.startswith("file:")


def test_an_absolute_path_within_the_sources_is_relative_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(Path.cwd() / "logs" / "run.jsonl")
    error = merge(Place(file, 3), Severity.ERROR)
    (run,) = json.loads(written(report_named("sarif"), [result(3, error, file=file)], files=(file,)))["runs"]
    physical = run["results"][0]["locations"][0]["physicalLocation"]
    assert physical["artifactLocation"] == {"uri": "logs/run.jsonl", "uriBaseId": "%SRCROOT%"}
    assert run["automationDetails"]["id"] == "tito-audit/logs/run.jsonl/"


def test_uploads_of_other_logs_are_other_categories_and_the_same_logs_the_same() -> None:
    def category(*files: str) -> str:
        run = json.loads(written(report_named("sarif"), (), files=files))["runs"][0]
        return str(run["automationDetails"]["id"])

    assert category("logs/a.jsonl") == "tito-audit/logs/a.jsonl/"
    assert category("logs/a.jsonl", "logs/b.jsonl") == "tito-audit/logs/"
    assert category("../x/a.jsonl") == "tito-audit/x/a.jsonl/"
    assert category("a.jsonl", "/b.jsonl") == category() == "tito-audit/"


def test_junit_fails_skips_and_passes_as_the_rules_did() -> None:
    root = ElementTree.fromstring(golden(report_named("junit")).encode())
    suites = {suite.get("name"): suite for suite in root}
    assert list(suites) == [RUN, ODD, "tito-audit: all files"]
    failed = [case.get("name", "")[:6] for case in suites[RUN] if case.find("failure") is not None]
    assert failed == ["LPR505", "REC001", "TOK101"]
    assert not suites[ODD].findall("testcase/failure")
    assert [case.find("failure") is not None for case in suites["tito-audit: all files"].findall("testcase")] == [
        True,
        False,
        True,
        False,
        False,
    ]
    for suite in root:
        assert int(suite.get("tests", "")) == len(suite.findall("testcase"))
        assert int(suite.get("failures", "")) == len(suite.findall("testcase/failure"))
        assert int(suite.get("skipped", "")) == len(suite.findall("testcase/skipped"))
    assert root.get("failures") == "5"


def test_a_rule_that_could_look_at_no_rollout_is_skipped_in_junit_and_never_passes() -> None:
    from tito_audit.record.finding import Skip

    skips = (Skip("LPR505", "no logprobs"),)
    of = [result(row, skips=skips) for row in range(3)]
    text = written(report_named("junit"), of, files=(RUN, "empty.jsonl"), ran=lambda file: ["LPR505", "TOK101"])
    ran, empty = ElementTree.fromstring(text.encode())
    assert [(case.get("name", "")[:6], [child.tag for child in case]) for case in ran.findall("testcase")] == [
        ("LPR505", ["skipped"]),
        ("TOK101", []),
    ]
    assert len(empty.findall("testcase/skipped")) == 2
    (skipped,) = ran.findall("testcase/skipped")
    assert skipped.text == skipped.get("message") == "no logprobs (3 rollouts)"


def test_no_word_of_a_log_is_an_attachment_to_junit() -> None:
    text = saying("junit", "[[ATTACHMENT|/etc/passwd]]")
    root = ElementTree.fromstring(text.encode())
    texts = [element.text or "" for element in root.iter() if element.tag != "property"]
    assert any("ATTACHMENT|/etc/passwd" in words for words in texts)
    assert not any("[[ATTACHMENT" in words for words in texts)


@pytest.mark.parametrize("trap", TRAPS)
def test_junit_is_xml_whatever_a_model_wrote(trap: str) -> None:
    root = ElementTree.fromstring(saying("junit", trap).encode())
    assert root.find("testsuite/testcase/failure") is not None


def test_junit_of_very_many_files_shares_a_suite_among_the_last() -> None:
    of = (result(0, merge(Place(f"{n}.jsonl", 0), Severity.ERROR), file=f"{n}.jsonl") for n in range(2100))
    root = ElementTree.fromstring(written(report_named("junit"), of, files=()).encode())
    assert len(root) == 2001
    assert root[-1].get("name") == "100 more files"
    assert root.get("failures") == "2001"


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"))), st.integers(0, 8))
def test_what_is_kept_is_the_highest_ranks_and_bounded(offers: list[tuple[int, str]], limit: int) -> None:
    shortlist: Shortlist[tuple[int, str]] = Shortlist(limit)
    for rank, kind in offers:
        shortlist.offer(rank, kind, (rank, kind))
    ranked = list(shortlist)
    assert len(ranked) == len(shortlist) == min(limit, len(offers))
    assert shortlist.left_out == len(offers) - len(ranked)
    assert [rank for rank, _ in ranked] == sorted((rank for rank, _ in offers), reverse=True)[: len(ranked)]
    if ranked:
        lowest = Counter(kind for rank, kind in ranked if rank == ranked[-1][0])
        offered = Counter(kind for rank, kind in offers if rank == ranked[-1][0])
        full = max(lowest.values())
        assert all(lowest[kind] >= min(full - 1, offered[kind]) for kind in offered), "kinds share the room"


@given(st.text(), st.integers(60, 200))
def test_cut_text_fits_and_counts_what_is_gone(text: str, limit: int) -> None:
    short = cut(text, limit)
    assert len(short) <= limit
    if short != text:
        left = int(re.search(r"… \((\d+) more characters\)$", short)[1])  # type: ignore[index]
        assert text.startswith(short.split(" … (")[0]) or " … (" in text
        assert left == len(text) - len(short) + len(f" … ({left} more characters)")
