"""Findings of one cause: linked, counted once, with both sides of what a prompt broke."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.command import run
from tests.tables import table
from tests.world import ROOT, TOY
from tito_audit.record.finding import Finding, Hit, Result, Severity, Where
from tito_audit.record.rollout import Place
from tito_audit.rules import all_rules
from tito_audit.run.headlines import link_findings, with_headline
from tito_audit.summary import Summary

SHARED = ROOT.parent / "shared"
NEMO = ROOT / "fixtures" / "formats" / "nemo_gym.jsonl"


def scanned(*arguments: object) -> dict[str, Any]:
    """The JSON report of a scan."""
    return json.loads(run("scan", *arguments, "-f", "json")[1])


def place_of(finding: dict[str, Any]) -> tuple[str, int, int]:
    return finding["file"], finding["row"], finding["item"]


def counted(report: dict[str, Any]) -> dict[str, Counter[str]]:
    """Causes by the code of their root and by severity, counted from the findings alone."""
    by_rollout: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for finding in report["findings"]:
        by_rollout.setdefault(place_of(finding), []).append(finding)
    causes: dict[str, Counter[str]] = {}
    for findings in by_rollout.values():
        roots = {finding["fingerprint"]: finding for finding in findings if finding["because_of"] is None}
        for finding in findings:
            assert finding["because_of"] is None or finding["because_of"] in roots
        for fingerprint in roots:
            group = [f for f in findings if fingerprint in (f["fingerprint"], f["because_of"])]
            worst = min(("error", "warning", "note").index(finding["severity"]) for finding in group)
            causes.setdefault(roots[fingerprint]["code"], Counter())[("error", "warning", "note")[worst]] += 1
    return causes


def test_a_broken_prefix_follows_from_what_broke_it_and_counts_once() -> None:
    report = scanned(NEMO, "-t", TOY, "--select", "SEQ,TOK,TPL")
    errors = [finding for finding in report["findings"] if finding["severity"] == "error"]
    by_print = {finding["fingerprint"]: finding for finding in errors}
    follows = {(f["code"], by_print[f["because_of"]]["code"]) for f in errors if f["because_of"]}
    assert follows == {("SEQ301", "TOK101"), ("SEQ302", "TPL203"), ("SEQ302", "TPL204")}
    headlines = report["summary"]["headlines"]
    heads = {head["text"]: (head["error"], head["rollouts"], head["codes"]) for head in headlines}
    assert heads["1 prompt re-tokenized"] == (1, 1, {"SEQ301": 1, "TOK101": 1})
    assert heads["1 prompt with a tool call rewritten by the template"][:2] == (1, 1)
    assert heads["1 prompt with reasoning stripped from the history"][:2] == (1, 1)


def test_without_the_rules_that_say_how_a_prefix_broke_it_is_a_cause_itself() -> None:
    report = scanned(NEMO, "-t", TOY, "--select", "SEQ301,SEQ302")
    assert {finding["because_of"] for finding in report["findings"]} == {None}
    assert [headline["text"] for headline in report["summary"]["headlines"]] == [
        "2 prompts re-rendered as other text",
        "1 prompt re-tokenized",
    ]


@pytest.mark.parametrize("select", ["SEQ301,SEQ302", "SEQ,TOK,TPL"])
def test_both_sides_of_a_broken_prefix_are_what_the_calls_hold(select: str) -> None:
    report = scanned(NEMO, "-t", TOY, "--select", select)
    rows = [json.loads(line) for line in NEMO.read_text().splitlines()]
    broken = [finding for finding in report["findings"] if finding["code"] in ("SEQ301", "SEQ302")]
    assert len(broken) == 3
    for finding in broken:
        calls = [item for item in rows[finding["row"]]["response"]["output"] if "generation_token_ids" in item]
        call, before = calls[finding["turn"]], calls[finding["turn"] - 1]
        prompt, seen = call["prompt_token_ids"], before["prompt_token_ids"] + before["generation_token_ids"]
        assert finding["recorded"]["label"] == "next prompt"
        inside = finding["start"] < len(before["prompt_token_ids"])
        assert finding["canonical"]["label"] == ("previous call" if inside else "sampled")
        around, start = finding["context"], finding["start"]
        lead, tail = around["before"]["ids"], around["after"]["ids"]
        for ids, ids_of_call in ((finding["recorded"]["ids"], prompt), (finding["canonical"]["ids"], seen)):
            whole = [*lead, *ids, *tail]
            assert ids_of_call[start - len(lead) : start - len(lead) + len(whole)] == whole
        assert finding["recorded"]["ids"] != finding["canonical"]["ids"]
        assert lead


def test_every_rule_has_a_headline_with_a_place_for_its_number() -> None:
    assert [rule.code for rule in all_rules() if rule.headline.count("{n}") != 1] == []


def hit(code: str, severity: Severity, turn: int | None, later: int | None = None, **more: Any) -> Finding:
    where = Where.ROW if turn is None else Where.COMPLETION if later != turn else Where.PROMPT
    return with_headline(
        Finding(code, severity, Place("a", 0), Hit(where, 0, 1, "", turn, later_turn=later, **more))
    )


def test_findings_are_linked_by_cause_and_prompt_only() -> None:
    error, note = Severity.ERROR, Severity.NOTE
    findings = [
        hit("LPR507", Severity.WARNING, 0),
        hit("MSK401", error, None, cause="slid by +1"),
        hit("MSK402", error, None, cause="slid by +1"),
        hit("MSK402", Severity.WARNING, None, cause="turn left out"),
        hit("SEQ301", error, 1, 1),
        hit("SEQ302", error, 2, 2),
        hit("SEQ305", Severity.WARNING, 3),
        hit("TOK101", error, 0, 1),
        hit("TOK103", error, 0, 1, cause="resplit"),
        hit("TOK101", error, 1, 2, cause="merge"),
        hit("TOK102", note, 1),
        hit("TPL203", error, 1, 2),
    ]
    out = link_findings(findings, {})
    assert [replaced.hit for replaced in out] == [finding.hit for finding in findings]
    names = {finding.fingerprint: f"{finding.code}@{finding.hit.later_turn}" for finding in out}
    follows = {at: names[finding.because_of] for at, finding in enumerate(out) if finding.because_of}
    assert follows == {0: "TOK101@1", 2: "MSK401@None", 4: "TOK101@1", 5: "TPL203@2", 8: "TOK101@1"}
    assert out[1].headline == "{n} with a shifted loss mask"
    assert out[10].headline == "{n} that would change if re-encoded"


def test_a_finding_never_follows_from_itself() -> None:
    """Two differences that begin alike may have the same fingerprint."""
    twice = [hit("TPL299", Severity.ERROR, 0, 1), hit("TPL299", Severity.ERROR, 0, 1)]
    assert len({finding.fingerprint for finding in twice}) == 1
    assert [finding.because_of for finding in link_findings(twice, {})] == [None, None]


@given(st.data())
def test_findings_that_all_differ_follow_from_none(data: st.DataObject) -> None:
    """A finding on drifted logprobs, from which nothing follows, has the causes looked for in any case."""
    codes, turns = st.sampled_from(("TOK101", "TOK103", "TPL204", "MSK401", "SEQ301")), st.integers(0, 2)
    later, severities = st.one_of(st.none(), turns), st.sampled_from(Severity)
    shown = data.draw(st.lists(st.tuples(codes, severities, st.one_of(st.none(), turns), later), min_size=1))
    findings = [hit(*each) for each in shown]
    of_logprobs = hit("LPR507", Severity.WARNING, 9)
    assert link_findings(findings, {}) == link_findings([*findings, of_logprobs], {})[:-1]


@given(st.lists(st.tuples(st.sampled_from(("TOK101", "TPL204")), st.sampled_from(Severity), st.integers(0, 1))))
def test_findings_of_one_fingerprint_are_one_cause(shown: list[tuple[str, Severity, int]]) -> None:
    findings = [hit(*each) for each in shown]
    alike: dict[str, list[Finding]] = {}
    for finding in findings:
        alike.setdefault(finding.fingerprint, []).append(finding)
    want = Counter((group[-1].headline, max(each.severity for each in group)) for group in alike.values())
    summary = Summary()
    summary.add(Result(Place("a", 0), None, tuple(findings)))
    heads = summary.headlines.values()
    counts = {(head.text, severity): getattr(head, severity.word) for head in heads for severity in Severity}
    assert +Counter(counts) == want


def test_equal_tokens_around_a_difference_are_in_both_sequences(tmp_path: Path) -> None:
    """Two differences that touch, one in a prompt and one in a completion of that prompt."""
    answer = [434, 257]  # ` answ`, `er`; the next prompt has them as 492
    first = {"prompt_ids": [322, *answer], "completion_ids": [*answer, 322]}
    second = {"prompt_ids": [322, *answer, *answer, 322], "completion_ids": [322]}
    third = {"prompt_ids": [322, 492, 492, 322, 322], "completion_ids": [322]}
    log = tmp_path / "calls.jsonl"
    log.write_text(json.dumps({"calls": [first, second, third]}) + "\n")
    report = scanned(log, "-t", TOY)
    findings = [f for f in report["findings"] if f["code"] == "TOK101" and f["turn"] is not None]
    assert {finding["where"] for finding in findings} == {"prompt", "completion"}
    for finding in findings:
        around = [finding["context"][end]["ids"] for end in ("before", "after")]
        whole = ",".join(map(str, [*around[0], *finding["canonical"]["ids"], *around[1]]))
        assert whole in ",".join(map(str, third["prompt_ids"]))


@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout")
@pytest.mark.parametrize("name", ["qwen2.5-coder", "gemma-3"])
def test_headlines_count_the_causes_of_real_drift(name: str) -> None:
    report = scanned(SHARED / "rollouts" / name / "retok.jsonl.gz", "-t", SHARED / "tokenizers" / name)
    errors = {head["text"]: head["error"] for head in report["summary"]["headlines"] if head["error"]}
    broken = [finding for finding in report["findings"] if finding["code"] in ("SEQ301", "SEQ302")]
    assert all(finding["because_of"] for finding in broken)
    by_code: Counter[str] = Counter()
    for code, kinds in counted(report).items():
        by_code[code] += kinds["error"]
    assert sum(errors.values()) == by_code.total()
    if name == "qwen2.5-coder":
        rewritten = "60 prompts with a tool call rewritten by the template"
        assert errors == {rewritten: 60, "20 prompts re-tokenized": 20}
    for finding in broken:
        assert finding["canonical"]["ids"] or finding["recorded"]["ids"]
        assert finding["canonical"]["label"] in ("sampled", "previous call")


def test_without_a_tokenizer_a_broken_prefix_is_not_said_to_be_another_text() -> None:
    report = scanned(NEMO, "--select", "SEQ302")
    (headline,) = report["summary"]["headlines"]
    assert headline["text"] == "3 prompts re-tokenized or re-rendered"
    assert {finding["cause"] for finding in report["findings"]} == {"cause unknown"}
    for finding in report["findings"]:
        assert "other tokens (re-tokenized or re-rendered;" in finding["message"]
        assert "text" not in finding["message"]


@pytest.mark.parametrize(*table(__file__, "a_headline_does_not_claim_what_its_finding_leaves_undecided"))
def test_a_headline_does_not_claim_what_its_finding_leaves_undecided(code: str, says: str) -> None:
    assert says in hit(code, Severity.NOTE, None, cause="undecided").headline
