"""The page of the `html` report: what it says, what it carries of many findings, what it draws."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from html import unescape
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import report_results
from tests.browser import made
from tests.tables import table
from tito_audit.record.finding import Finding, Hit, Result, Severity, Skip, Where
from tito_audit.record.rollout import Place, Rollout
from tito_audit.reports import report_named
from tito_audit.reports._html import views as views_module
from tito_audit.reports._html.page import MAX_PLAIN_BLOCK, data_block
from tito_audit.reports._html.page_findings import PageFindings
from tito_audit.reports.html import draw_charts
from tito_audit.rules import all_rules
from tito_audit.summary import Gate, Summary
from tito_audit.viewer.model import Measures, Observed


def result(row: int, *findings: Finding, tokens: int = 120, skips: tuple[Skip, ...] = ()) -> Result:
    place = Place("logs/run.jsonl", row)
    counts = {"turns": 1, "tokens": tokens, "generated_tokens": tokens // 3}
    return Result(place, Rollout(place, "slime"), findings, skips, counts)


def finding(code: str, severity: Severity, place: Place | None = None, message: str = "wrong") -> Finding:
    return Finding(code, severity, place or Place("logs/run.jsonl", 0), Hit(Where.ROW, 0, 1, message))


def blocks(text: str, kind: str) -> list[Any]:
    """The data of a page, unpacked the way a browser does it."""
    scripts = re.findall(
        rf'<script type="[a-z/]+" data-kind="{kind}"( data-packed="deflate")?>([^<]*)</script>', text
    )
    return [json.loads(zlib.decompress(base64.b64decode(data)) if packed else data) for packed, data in scripts]


# --- what the page says ---------------------------------------------------------------------------------------


def headline(text: str) -> tuple[str, str, str]:
    """The verdict of a page: its state, its word, its line."""
    state = re.search(r'<section class="verdict (\w+)"', text)
    word = re.search(r'<h1 id="verdict">.*?</span>(.*?)</h1>', text)
    line = re.search(r'<p class="line">(.*?)</p>', text)
    assert state
    assert word
    assert line
    return state[1], word[1], line[1]


def results_of(rows: list[str]) -> list[Result]:
    """Results that have a TOK101 of each severity that is named; `empty` for one without tokens."""
    return [
        result(
            row,
            *(finding("TOK101", severity) for severity in Severity if severity.word in words.split()),
            tokens=0 if "empty" in words else 120,
            skips=(Skip("LPR501", "no logprobs"),) if "skip" in words else (),
        )
        for row, words in enumerate(rows)
    ]


@pytest.mark.parametrize(*table(__file__, "without_a_gate_the_page_opens_with_what_was_found"))
def test_without_a_gate_the_page_opens_with_what_was_found(
    rows: list[str], state: str, word: str, line: str
) -> None:
    text = made.written(results_of(rows))
    assert headline(text) == (state, word, line)
    assert f"<title>{word} · run.jsonl · tito-audit</title>" in text


@pytest.mark.parametrize(*table(__file__, "with_a_gate_the_page_opens_with_its_verdict_and_its_reasons"))
def test_with_a_gate_the_page_opens_with_its_verdict_and_its_reasons(
    rows: list[str], because: list[str], failing: int, expected: str
) -> None:
    summary = Summary(files=["run.jsonl"])
    gate = Gate(bool(because), tuple(because), "error", failing)

    def gated() -> Iterator[Result]:
        yield from results_of(rows)
        summary.gate = gate  # as a run does: known once its results are used up

    text = made.written(gated(), summary)
    assert headline(text)[1] == expected
    assert all(f"<li>{reason}</li>" in text for reason in because[bool(failing) :])


def test_the_page_of_the_fixed_results_says_what_its_gate_and_its_baseline_say() -> None:
    text = report_results.golden(report_named("html"))
    assert headline(text)[:2] == ("fail", "Failed")
    for words in ("TOK=0.01", "✗ above", "✓ within", "audit/baseline.jsonl"):
        assert words in text
    assert "4 of it fixed" in text  # one finding once, another three times
    assert "9 of 36 rows (25 %)" in text
    assert "no logprobs</td><td><code>LPR501-LPR506</code></td>" in text


@pytest.mark.parametrize(*table(__file__, "a_page_names_its_log_or_the_folder_of_its_logs"))
def test_a_page_names_its_log_or_the_folder_of_its_logs(files: list[str], name: str) -> None:
    assert f"· {name} · tito-audit</title>" in made.written([], Summary(files=files))


def test_rates_are_counted_by_generated_token_and_by_rollout() -> None:
    text = made.written([result(0, *[finding("TOK101", Severity.ERROR)] * 2), result(1), result(2), result(3)])
    row = re.search(r'data-code="TOK101".*?</tr>', text, re.DOTALL)
    assert row
    assert '<td class="n error">2</td>' in row[0]
    assert '<td class="n">1.2 %</td>' in row[0]  # 2 of 160 generated tokens
    assert '1 <span class="quiet">25 %</span>' in row[0]


def test_the_manual_of_a_rule_that_found_something_is_in_the_page() -> None:
    docs = {rule.code: rule.doc for rule in all_rules()}
    text = made.written([result(0, finding("LPR501", Severity.ERROR))], docs=docs)
    assert '<h3 class="manual">Why it matters</h3>' in text
    assert "one too many (the first is null, as servers\n" in text
    assert "Several sampled" not in text


def test_a_run_that_counted_no_tokens_says_so_in_place_of_charts() -> None:
    assert "Tokens were not counted in this run" in made.written([result(0)])
    empty = replace(result(0), observed=Observed(Measures()))
    assert "there is nothing to draw" in made.written([empty])


def test_a_page_is_the_same_each_time() -> None:
    def once() -> str:
        return made.written([*made.viewed(), *made.many(3000)])

    assert once() == once()


# --- what it carries ------------------------------------------------------------------------------------------

GROUPS = [(severity, code) for severity in Severity for code in ("TOK101", "TPL203", "SEQ301")]


@given(st.lists(st.sampled_from(GROUPS), max_size=300), st.integers(0, 60))
def test_of_too_many_findings_the_worst_are_carried_and_evenly_over_the_codes(
    groups: list[tuple[Severity, str]], bound: int
) -> None:
    with closing(PageFindings(bound)) as carried:
        carried.recount_every = 3
        for at, (severity, code) in enumerate(groups):
            carried.add([finding(code, severity, Place("a", at))])
        chunks = list(carried.chunks())
        assert carried.number == sum(len(chunk["row"]) for chunk in chunks) <= bound
    chosen = [
        (Severity(severity), chunk["strings"][code], row)
        for chunk in chunks
        for severity, code, row in zip(chunk["severity"], chunk["code"], chunk["row"], strict=True)
    ]
    assert [row for _, _, row in chosen] == sorted(row for _, _, row in chosen)
    counts, offered = Counter(entry[:2] for entry in chosen), Counter(groups)
    room = bound
    for severity in sorted(Severity, reverse=True):
        sizes = {group: number for group, number in offered.items() if group[0] is severity}
        cut = [counts[group] for group in sizes if counts[group] < sizes[group]]
        assert len(set(cut)) <= 1, "codes that were cut share alike"
        if cut:
            assert all(counts[group] <= cut[0] for group in sizes)
            assert room - sum(counts[group] for group in sizes) < len(sizes)
            room = 0
        else:
            room -= sum(sizes.values())
        if not room:
            assert not cut or sum(counts[group] for group in offered if group[0] < severity) == 0
    for group, number in counts.items():
        first = [at for at, entry in enumerate(groups) if entry == group][:number]
        assert [row for severity, code, row in chosen if (severity, code) == group] == first


def test_findings_beyond_the_bound_leave_neither_memory_nor_disk() -> None:
    with closing(PageFindings(100)) as carried:
        for at in range(20_000):
            carried.add([finding(f"TOK{at % 3}", Severity.ERROR, Place("a", at))])
        assert len(carried._group_of) < 5_000
        assert carried.number == 99


def test_a_page_that_leaves_findings_out_says_how_many_and_counts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tito_audit.reports._html.views.ViewBlocks.max_findings", 30)
    text = made.written([result(row, *[finding("TOK101", Severity.NOTE)] * 4) for row in range(25)])
    assert "<b>30 of 100 findings are in this page</b>" in text
    assert headline(text)[2] == "No errors; 100 notes in 25 of 25 rollouts (100 %)."
    assert sum(len(chunk["row"]) for chunk in blocks(text, "findings")) == 30


def test_rollouts_beyond_the_room_are_left_out_and_the_page_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made.written(made.viewed(6))
    assert len(blocks(whole, "view")) == 6
    assert "6 of 6 rollouts with findings are shown here" in whole
    monkeypatch.setattr(views_module, "MAX_VIEW_CHARACTERS", 4 * len(json.dumps(blocks(whole, "view")[0])))
    cut = made.written(made.viewed(6))
    shown = len(blocks(cut, "view"))
    assert 0 < shown < 6
    assert f"{shown} of 6 rollouts with findings" in cut
    assert "<code>tito-audit show FILE --row N</code> shows any" in cut


@given(st.recursive(st.none() | st.integers(-(2**53), 2**53) | st.text(), st.lists, max_leaves=20))
def test_a_block_of_data_holds_its_value_and_nothing_that_html_reads(value: Any) -> None:
    text = data_block("findings", [value])
    inner = text.partition(">")[2].removesuffix("</script>\n")
    assert not set(inner) & set("<>&\u2028\u2029")
    assert json.loads(inner) == [value]


def test_a_long_block_is_packed_and_comes_back() -> None:
    value = ["</script>" * 3, *range(MAX_PLAIN_BLOCK)]
    text = data_block("view", value)
    assert 'data-packed="deflate"' in text
    assert blocks(text, "view") == [value]
    assert len(text) < MAX_PLAIN_BLOCK * 3


def caused(place: Place, number: int) -> tuple[Finding, ...]:
    """So many findings that follow from one, which comes last."""
    root = finding("TOK101", Severity.ERROR, place)
    after = [
        replace(finding("SEQ301", Severity.ERROR, place, f"{at}"), because_of=root.fingerprint)
        for at in range(number)
    ]
    return (*after, root)


def test_findings_name_the_number_of_the_one_that_they_follow_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tito_audit.reports._html.page_findings._CHUNK_FINDINGS", 2)
    results = [result(row, *caused(Place("a", row), 2), finding("LPR505", Severity.NOTE)) for row in range(3)]
    chunks = blocks(made.written(results), "findings")
    because = [number for chunk in chunks for number in chunk["because"]]
    assert because == [2, 2, None, None, 6, 6, None, None, 10, 10, None, None], "also across blocks"


def test_a_finding_says_so_if_the_one_that_it_follows_from_is_left_out() -> None:
    with closing(PageFindings(1)) as carried:
        root = finding("TOK101", Severity.NOTE)
        carried.add([root, replace(finding("SEQ301", Severity.ERROR), because_of=root.fingerprint)])
        (chunk,) = carried.chunks()
    assert (chunk["strings"][chunk["code"][0]], chunk["because"]) == ("SEQ301", [-1])


def test_causes_come_first_each_counted_once() -> None:
    root = replace(finding("TOK101", Severity.ERROR), headline="{n} re-tokenized")
    after = replace(finding("SEQ301", Severity.ERROR, message="more"), because_of=root.fingerprint)
    text = made.written([result(0, root, after), result(1)])
    words = re.search(r'data-headline="([^"]*)"[^>]*>([^<]*)</a>', text)
    assert words
    assert words.groups() == ("rollouts re-tokenized", "1 rollout re-tokenized")
    assert "2 findings: SEQ301 1, TOK101 1" in unescape(text).replace("\xa0", " ")
    assert text.index('id="causes"') < text.index('id="rules"')
    assert blocks(text, "findings")[0]["strings"].count("rollouts re-tokenized") == 1


def test_causes_beyond_the_first_wait_behind_a_count() -> None:
    findings = [
        replace(finding(f"TOK{at}", Severity.ERROR, message=f"{at}"), headline=f"{{n}} of kind {at}")
        for at in range(11)
    ]
    text = made.written([result(0, *findings)])
    before, summary, after = text.partition("<summary>3 more causes</summary>")
    assert summary
    assert (before.count("data-headline="), after.count("data-headline=")) == (8, 3)


def test_the_page_and_the_text_report_name_the_same_next_steps() -> None:
    def written(name: str) -> str:
        return report_results.golden(report_named(name))

    commands = re.findall(r'<code data-copy="the command">(.*?)</code>', written("html"))
    shown = written("text")
    assert len(commands) >= 3
    for command in commands:
        assert unescape(command) in " ".join(shown.split())


# --- charts ---------------------------------------------------------------------------------------------------


def test_charts_hold_shapes_and_words_only() -> None:
    for chart in draw_charts(made.measures()):
        assert not re.search(
            r"<script|<style|\bid=|style=|href|http|<!--|\bon\w+=", chart.svg.replace("xmlns", "")
        )
        assert chart.svg.count("<title>") >= 4
        assert "NaN" not in chart.svg


def test_charts_say_the_numbers_that_were_measured() -> None:
    turns, positions, logprobs, roles = draw_charts(made.measures())
    assert turns.rows[0] == ("0", "935", "5", "10", "20", "3.7 %")
    assert turns.rows[3] == ("3", "0", "0", "0", "0", "–")
    assert "turn 0: 5 of 935 tokens drifted, error (0.53 %)" in turns.svg
    assert positions.rows[2][:2] == ("64+", "60")
    assert "The median of the 360 drifted tokens lies" not in turns.caption
    assert "12 tokens without a logprob are left out" in logprobs.caption
    assert roles.rows[0] == ("assistant", "600", "12", "98 %")
    assert "tool: 7 of 307 tokens trained (2.3 %)" in roles.svg


def test_a_chart_with_nothing_to_draw_is_left_out() -> None:
    assert draw_charts(Measures()) == []
    only = Measures()
    only.by_turn[0, 0] = 5
    assert [chart.name for chart in draw_charts(only)] == ["turns"]


def test_where_nothing_drifted_words_stand_in_place_of_an_empty_drawing() -> None:
    measures = Measures()
    measures.by_turn[:2, 0] = (500, 700)
    (chart,) = draw_charts(measures)
    assert (chart.svg, chart.caption) == ("", "None of the 1,200 generated tokens drifted.")
    assert [row[:2] for row in chart.rows] == [("0", "500"), ("1", "700")]


def test_a_page_of_an_empty_log_says_that_nothing_is_there() -> None:
    text = made.written([], Summary(files=["empty.jsonl"]))
    for words in ("There is no rollout, so there is nothing to draw.", "No rule had anything to check."):
        assert words in text
    assert "Tokens were not counted" not in text


def test_roles_of_a_log_are_shown_and_do_nothing() -> None:
    measures = Measures(roles={made.HOSTILE: (3, 4), **{f"role {at}": (1, at) for at in range(20)}})
    (chart,) = draw_charts(measures)
    assert "<script" not in chart.svg
    assert chart.rows[-1][0] == "9 other roles"
    assert len(chart.rows) == 13


def test_the_policy_admits_the_pages_own_script_and_style_and_nothing_else() -> None:
    text = made.written(made.viewed())
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert policy
    assert len(scripts) == len(styles) == 1

    def hashed(code: str) -> str:
        return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()

    assert policy[1].replace("&#39;", "'") == (
        f"default-src 'none'; script-src 'sha256-{hashed(scripts[0])}'; style-src 'sha256-{hashed(styles[0])}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert not re.search(r'\s(?:src|action|on\w+|style)="', text), "no attribute that loads or runs"
