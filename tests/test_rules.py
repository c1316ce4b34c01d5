"""The contract of a rule, held by every file of `rules/`, on the cases of `fixtures/rules/`."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import tito_audit.rules
from tests import toy
from tito_audit.evidence.gather import gather
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import empty_ids
from tito_audit.record.column import Column, ColumnRole
from tito_audit.record.finding import Hit, Where
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn
from tito_audit.record.token_extras import NO_EXTRAS
from tito_audit.rule import Rule, missing_evidence
from tito_audit.rules import FAMILIES, all_rules, rule_of
from tito_audit.run.check import check

FIXTURES = toy.ROOT / "fixtures" / "rules"
RULES = all_rules()
MADE_WHILE_READING = {"REC001", "REC007", "REC011", "TPL213"}
"""Codes whose findings are made while reading, of rows that never become a rollout or of a whole log; they have no
flag case."""
HEADINGS = ("## What it finds", "## Why it matters", "## Example", "## Repair")


@cache
def cases(code: str, kind: str) -> list[dict[str, Any]]:
    """The `flag` or `pass` cases of a rule."""
    path = FIXTURES / f"{code}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")).get(kind, []) if path.exists() else []


def every(kind: str) -> list[Any]:
    """Every case of a kind, as pytest parameters."""
    return [
        pytest.param(rule, case, id=f"{rule.code}: {case['name']}")
        for rule in RULES
        for case in cases(rule.code, kind)
    ]


def hits_of(rule: Rule, evidence: Evidence) -> list[Hit]:
    """What a rule says of a rollout, as the pipeline asks it, with the severity it is reported at."""
    findings, _ = check(evidence, RULES, frozenset((rule.code,)))
    return [replace(finding.hit, severity=finding.severity) for finding in findings]


def place_of(hit: Hit) -> str:
    """A hit's place as cases write it."""
    turn = "" if hit.where is Where.ROW else f"turn {hit.turn} "
    return f"{turn}{hit.where.value} {hit.start}:{hit.end}"


def length_of(hit: Hit, rollout: Rollout) -> int:
    """How many tokens the sequence has that a hit counts in."""
    if hit.where is Where.ROW:
        return 0 if rollout.training_row is None else len(rollout.training_row.token_ids)
    assert hit.turn is not None
    turn = rollout.turns[hit.turn]
    ids = turn.prompt_ids if hit.where is Where.PROMPT else turn.completion_ids
    return 0 if ids is None else len(ids)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
class TestContract:
    def test_the_file_is_named_after_code_and_name(self, rule: Rule) -> None:
        stem = f"{rule.code.lower()}_{rule.name.replace('-', '_')}"
        assert (Path(tito_audit.rules.__file__).parent / f"{stem}.py").is_file()
        assert rule.code[:3] in FAMILIES
        assert rule.code[3:].isdigit()
        assert len(rule.code) == 6

    def test_the_docstring_is_a_manual(self, rule: Rule) -> None:
        lines = rule.doc.splitlines()
        assert lines[0].endswith(".")
        assert lines[1] == ""
        assert [line for line in lines if line.startswith("## ")] == [*HEADINGS]
        parts = rule.doc.split("## ")[1:]
        assert all(part.partition("\n")[2].strip() for part in parts), "a heading has nothing under it"

    def test_it_has_a_check_or_an_explanation_of_differences(self, rule: Rule) -> None:
        assert (rule.check is None) != (rule.explain is None)
        assert rule_of(rule.code) is rule

    def test_its_cases_flag_and_pass(self, rule: Rule) -> None:
        assert (FIXTURES / f"{rule.code}.toml").is_file(), f"fixtures/rules/{rule.code}.toml is missing"
        assert cases(rule.code, "pass")
        assert cases(rule.code, "flag") or rule.code in MADE_WHILE_READING
        names = [case["name"] for kind in ("flag", "pass") for case in cases(rule.code, kind)]
        assert len(names) == len(set(names))

    def test_it_says_nothing_of_a_rollout_that_holds_nothing(self, rule: Rule) -> None:
        bare = Rollout(Place("toy", 0), "toy")
        hollow = replace(
            bare,
            turns=(Turn(None, None), Turn(empty_ids(), empty_ids())),
            training_row=TrainingRow(empty_ids(), None, None),
        )
        for rollout in (bare, hollow):
            evidence = gather(rollout, None, None)
            assert list(rule.check(evidence)) == [] if rule.check else True


@pytest.mark.parametrize(("rule", "case"), every("flag"))
def test_a_flag_case_is_found_where_it_says_and_nowhere_else(rule: Rule, case: dict[str, Any]) -> None:
    evidence = toy.evidence_of(case)
    if rule.check is not None:
        assert missing_evidence(rule, evidence.present) is None
    hits = hits_of(rule, evidence)
    assert sorted(map(place_of, hits)) == sorted(case["expect"]), [hit.message for hit in hits]
    for hit in hits:
        assert hit.severity is not None
        assert hit.severity.word == case.get("severity", hit.severity.word)
        assert hit.cause == case.get("cause", hit.cause)
        assert case.get("message", "") in hit.message


@pytest.mark.parametrize(("rule", "case"), every("flag"))
def test_a_hit_reads_as_one_sentence_and_lies_inside_its_sequence(rule: Rule, case: dict[str, Any]) -> None:
    evidence = toy.evidence_of(case)
    for hit in hits_of(rule, evidence):
        assert hit.cause
        assert hit.message == hit.message.strip()
        assert not hit.message.endswith(".")
        assert 0 <= hit.start <= hit.end <= length_of(hit, evidence.rollout)
        assert max(len(hit.recorded.ids), len(hit.canonical.ids)) <= 16
        pieces = len(hit.recorded.ids) if evidence.vocabulary is not None else 0
        assert len(hit.recorded.pieces) in (pieces, 0)


@pytest.mark.parametrize(("rule", "case"), every("pass"))
def test_a_pass_case_is_silent(rule: Rule, case: dict[str, Any]) -> None:
    assert [hit.message for hit in hits_of(rule, toy.evidence_of(case))] == []


@pytest.mark.parametrize(("rule", "case"), every("flag"))
def test_a_rule_that_lacks_a_column_is_skipped(rule: Rule, case: dict[str, Any]) -> None:
    for need in rule.needs:
        evidence = evidence_without(case, need)
        assert missing_evidence(rule, evidence.present) is not None, f"{need} was dropped and not missed"
        if rule.check is not None:
            assert hits_of(rule, evidence) == []


def evidence_without(case: dict[str, Any], need: Needs) -> Evidence:
    """What is seen of a case when its log does not hold what is needed."""
    rollout = toy.rollout_of(case)
    for part in need:
        rollout = without(rollout, part)
    no_tokenizer = bool(need & (Needs.TOKENIZER | Needs.SAMPLED)) or not case.get("tokenizer", True)
    if need & Needs.IMAGE_TOKENS:
        case = {**case, "tokenizer_name": "toy_bpe"}
    unrendered = bool(need & (Needs.RENDERING | Needs.HISTORY | Needs.TEMPLATE))
    no_template = no_tokenizer or unrendered or not case.get("template", True)
    tokenizer = None if no_tokenizer else toy.tokenizer_of(case)
    return gather(rollout, tokenizer, None if no_template else toy.renderer_of(case))


def without(rollout: Rollout, need: Needs) -> Rollout:
    """A rollout whose log does not hold one kind of thing."""
    turns, row = rollout.turns, rollout.training_row
    if need is Needs.MESSAGES:
        bare = tuple(replace(turn, message_index=None, prompt_messages=None) for turn in turns)
        return replace(rollout, messages=(), turns=bare)
    if need is Needs.PROMPTS:
        return replace(rollout, turns=tuple(replace(turn, prompt_ids=None) for turn in turns))
    if need is Needs.COMPLETIONS:
        nothing = {"completion_ids": None, "completion_logprobs": None, "token_texts": None, "columns": ()}
        return replace(rollout, turns=tuple(replace(turn, **nothing) for turn in turns))  # type: ignore[arg-type]
    if need is Needs.COMPLETION_LOGPROBS:
        return replace(rollout, turns=tuple(replace(turn, completion_logprobs=None, columns=()) for turn in turns))
    if need is Needs.WEIGHT_VERSIONS:
        silent = replace(rollout.stated, policy_versions=(), facts={})
        nameless = tuple(replace(turn, weight_versions=()) for turn in turns)
        return without_others(replace(rollout, turns=nameless, stated=silent))
    if need is Needs.TRAINER_LOGPROBS:
        return without_others(rollout)
    if need in (Needs.EXPERTS_READ, Needs.KEPT_SETS_READ, Needs.CREDIT):
        alone = tuple(replace(turn, extras=NO_EXTRAS) for turn in turns)
        plain_row = None if row is None else replace(row, extras=NO_EXTRAS)
        return replace(rollout, turns=alone, training_row=plain_row)
    if need in (Needs.SEVERAL_CALLS, Needs.HISTORY):
        return replace(rollout, turns=turns[:1])
    if need is Needs.HIDDEN:
        return rollout if row is None else replace(rollout, training_row=replace(row, hidden=None))
    if need is Needs.SAMPLED:
        return replace(rollout, turns=(), messages=())
    if need is Needs.ROW or row is None:
        return replace(rollout, training_row=None)
    if need is Needs.MASK:
        return replace(rollout, training_row=without_column(row, ColumnRole.LOSS_MASK))
    if need is Needs.ROW_LOGPROBS:
        return replace(rollout, training_row=without_column(row, ColumnRole.LOGPROBS))
    return rollout


def without_others(rollout: Rollout) -> Rollout:
    """A rollout without columns other than masks and logprobs."""
    row = rollout.training_row
    turns = tuple(replace(turn, columns=named(turn.columns)) for turn in rollout.turns)
    return replace(
        rollout, turns=turns, training_row=None if row is None else replace(row, columns=named(row.columns))
    )


def named(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    return tuple(column for column in columns if column.role is not ColumnRole.OTHER)


def without_column(row: TrainingRow, role: ColumnRole) -> TrainingRow:
    columns = tuple(column for column in row.columns if column.role is not role)
    if role is ColumnRole.LOSS_MASK:
        return replace(row, loss_mask=None, columns=columns)
    return replace(row, logprobs=None, columns=columns)


def test_every_fixture_belongs_to_a_rule() -> None:
    assert {path.stem for path in FIXTURES.glob("*.toml")} <= {rule.code for rule in RULES}
