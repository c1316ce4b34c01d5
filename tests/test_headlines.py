"""Findings of one cause: linked, counted once, with both sides of what a prompt broke."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.command import run
from tests.tables import table
from tito_audit.record.finding import Finding, Hit, Severity, Where
from tito_audit.record.rollout import Place
from tito_audit.rules import all_rules
from tito_audit.run.headlines import link_findings

ROOT = Path(__file__).resolve().parents[1]
TOY = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
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
    for one in report["findings"]:
        by_rollout.setdefault(place_of(one), []).append(one)
    found: dict[str, Counter[str]] = {}
    for findings in by_rollout.values():
        roots = {one["fingerprint"]: one for one in findings if one["because_of"] is None}
        for one in findings:
            assert one["because_of"] is None or one["because_of"] in roots
        for fingerprint in roots:
            group = [one for one in findings if fingerprint in (one["fingerprint"], one["because_of"])]
            worst = min(("error", "warning", "note").index(one["severity"]) for one in group)
            found.setdefault(roots[fingerprint]["code"], Counter())[("error", "warning", "note")[worst]] += 1
    return found


def test_a_broken_prefix_follows_from_what_broke_it_and_counts_once() -> None:
    report = scanned(NEMO, "-t", TOY, "--select", "SEQ,TOK,TPL")
    errors = [one for one in report["findings"] if one["severity"] == "error"]
    by_print = {one["fingerprint"]: one for one in errors}
    follows = {(one["code"], by_print[one["because_of"]]["code"]) for one in errors if one["because_of"]}
    assert follows == {("SEQ301", "TOK101"), ("SEQ302", "TPL203"), ("SEQ302", "TPL204")}
    heads = {one["text"]: (one["error"], one["rollouts"], one["codes"]) for one in report["summary"]["headlines"]}
    assert heads["1 prompt re-tokenized"] == (1, 1, {"SEQ301": 1, "TOK101": 1})
    assert heads["1 prompt with a tool call rewritten by the template"][:2] == (1, 1)
    assert heads["1 prompt with reasoning stripped from the history"][:2] == (1, 1)


def test_without_the_rules_that_say_how_a_prefix_broke_it_is_a_cause_itself() -> None:
    report = scanned(NEMO, "-t", TOY, "--select", "SEQ301,SEQ302")
    assert {one["because_of"] for one in report["findings"]} == {None}
    assert [one["text"] for one in report["summary"]["headlines"]] == [
        "2 prompts re-rendered as other text",
        "1 prompt re-tokenized",
    ]


@pytest.mark.parametrize("select", ["SEQ301,SEQ302", "SEQ,TOK,TPL"])
def test_both_sides_of_a_broken_prefix_are_what_the_calls_hold(select: str) -> None:
    report = scanned(NEMO, "-t", TOY, "--select", select)
    rows = [json.loads(line) for line in NEMO.read_text().splitlines()]
    broken = [one for one in report["findings"] if one["code"] in ("SEQ301", "SEQ302")]
    assert len(broken) == 3
    for one in broken:
        calls = [item for item in rows[one["row"]]["response"]["output"] if "generation_token_ids" in item]
        call, before = calls[one["turn"]], calls[one["turn"] - 1]
        prompt, seen = call["prompt_token_ids"], before["prompt_token_ids"] + before["generation_token_ids"]
        assert one["recorded"]["label"] == "next prompt"
        inside = one["start"] < len(before["prompt_token_ids"])
        assert one["canonical"]["label"] == ("previous call" if inside else "sampled")
        around, start = one["context"], one["start"]
        lead, tail = around["before"]["ids"], around["after"]["ids"]
        for ids, held in ((one["recorded"]["ids"], prompt), (one["canonical"]["ids"], seen)):
            whole = [*lead, *ids, *tail]
            assert held[start - len(lead) : start - len(lead) + len(whole)] == whole
        assert one["recorded"]["ids"] != one["canonical"]["ids"]
        assert lead


def test_every_rule_has_a_headline_with_a_place_for_its_number() -> None:
    assert [rule.code for rule in all_rules() if rule.headline.count("{n}") != 1] == []


def hit(code: str, severity: Severity, turn: int | None, later: int | None = None, **more: Any) -> Finding:
    where = Where.ROW if turn is None else Where.COMPLETION if later != turn else Where.PROMPT
    return Finding(code, severity, Place("a", 0), Hit(where, 0, 1, "", turn, later_turn=later, **more))


def test_findings_are_linked_by_cause_and_prompt_only() -> None:
    error, note = Severity.ERROR, Severity.NOTE
    found = [
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
    out = link_findings(found, {}, all_rules())
    assert [replaced.hit for replaced in out] == [one.hit for one in found]
    names = {one.fingerprint: f"{one.code}@{one.hit.later_turn}" for one in out}
    follows = [names[one.because_of] if one.because_of else None for one in out]
    assert follows == [
        "TOK101@1",
        None,
        "MSK401@None",
        None,
        "TOK101@1",
        "TPL203@2",
        None,
        None,
        "TOK101@1",
        None,
        None,
        None,
    ]
    assert out[1].headline == "{n} with a shifted loss mask"
    assert out[10].headline == "{n} that would change if re-encoded"


def test_a_finding_never_follows_from_itself() -> None:
    """Two differences that begin alike may have the same fingerprint."""
    twice = [hit("TPL299", Severity.ERROR, 0, 1), hit("TPL299", Severity.ERROR, 0, 1)]
    assert len({one.fingerprint for one in twice}) == 1
    assert [one.because_of for one in link_findings(twice, {}, all_rules())] == [None, None]


def test_equal_tokens_around_a_difference_are_in_both_sequences(tmp_path: Path) -> None:
    """Two differences that touch, one in a prompt and one in a completion of that prompt."""
    answer = [434, 257]  # ` answ`, `er`; the next prompt has them as 492
    first = {"prompt_ids": [322, *answer], "completion_ids": [*answer, 322]}
    second = {"prompt_ids": [322, *answer, *answer, 322], "completion_ids": [322]}
    third = {"prompt_ids": [322, 492, 492, 322, 322], "completion_ids": [322]}
    log = tmp_path / "calls.jsonl"
    log.write_text(json.dumps({"calls": [first, second, third]}) + "\n")
    found = [
        one for one in scanned(log, "-t", TOY)["findings"] if one["code"] == "TOK101" and one["turn"] is not None
    ]
    assert {one["where"] for one in found} == {"prompt", "completion"}
    for one in found:
        around = [one["context"][end]["ids"] for end in ("before", "after")]
        whole = ",".join(map(str, [*around[0], *one["canonical"]["ids"], *around[1]]))
        assert whole in ",".join(map(str, third["prompt_ids"]))


@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout")
@pytest.mark.parametrize("name", ["qwen2.5-coder", "gemma-3"])
def test_headlines_count_the_causes_of_real_drift(name: str) -> None:
    report = scanned(SHARED / "rollouts" / name / "retok.jsonl.gz", "-t", SHARED / "tokenizers" / name)
    errors = {one["text"]: one["error"] for one in report["summary"]["headlines"] if one["error"]}
    broken = [one for one in report["findings"] if one["code"] in ("SEQ301", "SEQ302")]
    assert all(one["because_of"] for one in broken)
    by_code: Counter[str] = Counter()
    for code, kinds in counted(report).items():
        by_code[code] += kinds["error"]
    assert sum(errors.values()) == by_code.total()
    if name == "qwen2.5-coder":
        assert errors == {
            "60 prompts with a tool call rewritten by the template": 60,
            "20 prompts re-tokenized": 20,
        }
    for one in broken:
        assert one["canonical"]["ids"] or one["recorded"]["ids"]
        assert one["canonical"]["label"] in ("sampled", "previous call")


def test_without_a_tokenizer_a_broken_prefix_is_not_said_to_be_another_text() -> None:
    report = scanned(NEMO, "--select", "SEQ302")
    assert [one["text"] for one in report["summary"]["headlines"]] == ["3 prompts re-tokenized or re-rendered"]
    assert {one["cause"] for one in report["findings"]} == {"cause unknown"}
    for one in report["findings"]:
        assert "other tokens (re-tokenized or re-rendered;" in one["message"]
        assert "text" not in one["message"]


@pytest.mark.parametrize(*table(__file__, "a_headline_does_not_claim_what_its_finding_leaves_undecided"))
def test_a_headline_does_not_claim_what_its_finding_leaves_undecided(code: str, says: str) -> None:
    (finding,) = link_findings([hit(code, Severity.NOTE, None, cause="undecided")], {}, all_rules())
    assert says in finding.headline
