"""The contract of a repair, held by every file of `repairs/`, on the cases of `fixtures/repairs/`.

A case is a `[[repair]]` table: a rollout as `toy.py` writes it, and

    choices    what the user chose, such as { mask_by = "turn" }
    threshold  the severity from which on findings are acted on; `error` when not given
    after      the rollouts that it becomes, each with what is other than before: `row`, `mask`, `logprobs`,
               `turns`, or `calls`, the logprobs of each call; [] when it is left out
    notes      words of the notes, one entry for each note that matters
    safety     `safe` or `unsafe`, if it matters
    left       codes that it claims and need not cure here
    refused    words of the reason for which it refuses
    nothing    true where it has nothing to do
    model      what a model says of the tokens, for `rescore`
    again      runs of the row that other rows train first; with `again_turn`, of the completion of that call
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tito_audit.repairs
from tests import toy
from tito_audit.errors import RecordError, SetupError
from tito_audit.evidence.gather import gather
from tito_audit.evidence.model import Evidence
from tito_audit.record.build import build_training_row
from tito_audit.record.column import ColumnRole, expand
from tito_audit.record.finding import Finding, Severity
from tito_audit.record.model_scores import ModelScores
from tito_audit.record.rollout import Place, Rollout, TrainingRow
from tito_audit.repair import Proposal, Repair, Safety
from tito_audit.repairs import all_repairs, repair_named
from tito_audit.rules import FAMILIES, all_rules
from tito_audit.run.check import check, explain_differences
from tito_audit.settings.model import RepairChoices

FIXTURES = toy.ROOT / "fixtures" / "repairs"
REPAIRS = all_repairs()
RULES = all_rules()
EVERY_CODE = frozenset(rule.code for rule in RULES)
HEADINGS = ("## What it does", "## When it is safe", "## What it costs", "## Example")
ROUNDING = 1e-3

Case = dict[str, Any]


@cache
def cases(name: str) -> list[Case]:
    """The cases of a repair."""
    path = FIXTURES / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")).get("repair", []) if path.exists() else []


def every(*kinds: str) -> list[Any]:
    """The cases of every repair that are of a kind: `after`, `refused`, `nothing`."""
    return [
        pytest.param(repair, case, id=f"{repair.name}: {case['name']}")
        for repair in REPAIRS
        for case in cases(repair.name)
        if any(kind in case for kind in kinds)
    ]


def choices_of(case: Case) -> RepairChoices:
    if "model" in case:
        return RepairChoices(rescored=lambda evidence: scores_of(case["model"], evidence.rollout))
    return RepairChoices(**case.get("choices", {}))


def scores_of(scores: dict[str, Any], rollout: Rollout) -> ModelScores:
    """What the model of a case says; what a call recorded is a logprob unless it is missing."""
    calls = {number: np.array(values) for number, values in enumerate(scores.get("calls", ()))}
    recorded: dict[int | None, Any] = {
        number: np.zeros(len(values), np.bool_) if logprobs is None else np.isfinite(logprobs)
        for number, values in calls.items()
        for logprobs in (rollout.turns[number].completion_logprobs,)
    }
    if "stated" in scores:
        recorded[None] = np.array([digit == "1" for digit in scores["stated"]])
    row = None if "row" not in scores else np.array(scores["row"])
    return ModelScores("toy", calls, row, recorded, scores.get("replaces", False), scores.get("adds", True))


def gathered(rollout: Rollout, case: Case) -> Evidence:
    """What is seen of a rollout, with tokenizer and template as the case has them."""
    tokenizer = toy.tokenizer_of(case) if case.get("tokenizer", True) else None
    renderer = toy.renderer_of(case) if tokenizer and case.get("template", True) else None
    return explain_differences(gather(rollout, tokenizer, renderer, trained_again=toy.again_of(case)), RULES)


def findings_of(evidence: Evidence) -> tuple[Finding, ...]:
    return check(evidence, RULES, EVERY_CODE)[0]


def acted_on(repair: Repair, evidence: Evidence, case: Case) -> tuple[Finding, ...]:
    """The findings that the driver would give to the repair."""
    threshold = Severity[case.get("threshold", "error").upper()]
    claimed = (finding for finding in findings_of(evidence) if repair.claims(finding.code))
    return tuple(finding for finding in claimed if finding.severity >= threshold)


def mended(repair: Repair, case: Case) -> tuple[Evidence, tuple[Finding, ...], Proposal]:
    """A case, what the repair was asked to cure, and what it proposes."""
    evidence = gathered(toy.rollout_of(case), case)
    findings = acted_on(repair, evidence, case)
    mend = repair.mend(evidence, findings, choices_of(case))
    assert mend is not None
    return evidence, findings, mend


def read_again(row: TrainingRow) -> TrainingRow:
    """A row as a format would read it from its columns."""
    by_role = {column.role: column for column in row.columns}
    mask, logprobs = by_role.get(ColumnRole.LOSS_MASK), by_role.get(ColumnRole.LOGPROBS)
    return build_training_row(
        row.token_ids,
        mask=None if mask is None else (mask.name, mask.values),
        logprobs=None if logprobs is None else (logprobs.name, logprobs.values),
        prompt_length=row.prompt_length,
        sentinel=row.sentinel,
    )


def rollouts_of(mend: Proposal) -> list[Rollout]:
    """What a mend gives, with its rows as a format would read them."""
    out = []
    for changed in mend.rollouts:
        row = changed.rollout.training_row
        assert len(changed.turns_from) == len(changed.rollout.turns)
        out.append(changed.rollout if row is None else replace(changed.rollout, training_row=read_again(row)))
    return out


def worst(findings: Sequence[Finding]) -> dict[tuple[str, str], Severity]:
    """The highest severity of each code and cause."""
    out: dict[tuple[str, str], Severity] = {}
    for finding in findings:
        kind = (finding.code, finding.hit.cause)
        out[kind] = max(out.get(kind, Severity.NOTE), finding.severity)
    return out


def equal(a: Any, b: Any) -> bool:
    """Equal arrays, or both None."""
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and bool(np.allclose(a, b, rtol=0, atol=1e-12, equal_nan=True))


@pytest.mark.parametrize("repair", REPAIRS, ids=lambda repair: repair.name)
class TestContract:
    def test_the_file_is_named_after_the_repair(self, repair: Repair) -> None:
        assert (Path(tito_audit.repairs.__file__).parent / f"{repair.name}.py").is_file()
        assert repair_named(repair.name) is repair

    def test_the_docstring_is_a_manual(self, repair: Repair) -> None:
        lines = repair.doc.splitlines()
        assert lines[0].endswith(".")
        assert lines[1] == ""
        assert [line for line in lines if line.startswith("## ")] == [*HEADINGS]
        parts = repair.doc.split("## ")[1:]
        assert all(part.partition("\n")[2].strip() for part in parts), "a heading has nothing under it"

    def test_it_claims_codes_that_there_are(self, repair: Repair) -> None:
        for prefix in repair.cures:
            assert prefix[:3] in FAMILIES
            assert any(code.startswith(prefix) for code in EVERY_CODE), prefix

    def test_it_has_cases(self, repair: Repair) -> None:
        assert (FIXTURES / f"{repair.name}.toml").is_file(), f"fixtures/repairs/{repair.name}.toml is missing"
        names = [case["name"] for case in cases(repair.name)]
        assert len(names) == len(set(names))
        assert any("after" in case for case in cases(repair.name))
        for case in cases(repair.name):
            assert sum(kind in case for kind in ("after", "refused", "nothing")) == 1, case["name"]

    def test_it_does_nothing_to_a_rollout_that_holds_nothing(self, repair: Repair) -> None:
        bare = Rollout(Place("toy", 0), "toy")
        hollow = replace(bare, training_row=TrainingRow(np.empty(0, np.int32), None, None))
        for rollout in (bare, hollow):
            evidence = gather(rollout, None, None)
            assert repair.mend(evidence, (), RepairChoices()) is None
            assert repair.mend(evidence, (), RepairChoices("turn", 0.0, "binary", "left")) is None


@pytest.mark.parametrize(("repair", "case"), every("after"))
class TestCures:
    def test_before_becomes_after(self, repair: Repair, case: Case) -> None:
        _, _, mend = mended(repair, case)
        rollouts = rollouts_of(mend)
        assert len(rollouts) == len(case["after"])
        for got, after in zip(rollouts, case["after"], strict=True):
            want = toy.rollout_of({**case, **after})
            row, wanted = got.training_row, want.training_row
            assert (row is None) is (wanted is None)
            if row is not None and wanted is not None:
                assert row.token_ids.tolist() == wanted.token_ids.tolist()
                assert equal(row.loss_mask, wanted.loss_mask), row.loss_mask
                assert equal(row.logprobs, wanted.logprobs), row.logprobs
            if "turns" in after:
                assert_turns(got, want)
            for turn, values in zip(got.turns, after.get("calls", ()), strict="calls" in after):
                assert equal(turn.completion_logprobs, values)

    def test_it_says_what_it_did(self, repair: Repair, case: Case) -> None:
        _, _, mend = mended(repair, case)
        assert mend.safety.value == case.get("safety", mend.safety.value)
        assert mend.safety in (Safety.SAFE, Safety.UNSAFE)
        assert mend.safety is repair.safety or repair.safety is Safety.DEPENDS
        assert bool(mend.reason) is (mend.safety is Safety.UNSAFE)
        for words in case.get("notes", ()):
            assert any(words in note for note in (mend.cost, *mend.notes)), mend.notes
        for sentence in (*mend.notes, mend.cost, mend.reason):
            assert sentence == sentence.strip()
            assert not sentence.endswith(".")

    def test_what_it_claims_is_gone_and_nothing_new_is_there(self, repair: Repair, case: Case) -> None:
        evidence, findings, mend = mended(repair, case)
        assert findings or repair.chosen(choices_of(case)), [finding.code for finding in findings_of(evidence)]
        curable = [finding for finding in findings if finding.code not in case.get("left", ())]
        assert all(repair.fits(evidence, finding) for finding in curable)
        before = worst(findings_of(evidence))
        for rollout in rollouts_of(mend):
            after = gathered(rollout, case)
            left = {finding.code for finding in acted_on(repair, after, case)}
            assert left <= set(case.get("left", ()))
            for kind, severity in worst(findings_of(after)).items():
                if severity >= Severity.WARNING and kind[0] not in mend.adds:
                    assert severity <= before.get(kind, Severity.NOTE), kind

    def test_repairing_again_changes_nothing(self, repair: Repair, case: Case) -> None:
        _, _, mend = mended(repair, case)
        for rollout in rollouts_of(mend):
            again = gathered(rollout, case)
            findings = acted_on(repair, again, case)
            if findings or repair.chosen(choices_of(case)):
                try:
                    assert repair.mend(again, findings, choices_of(case)) is None
                except RecordError:
                    assert findings

    def test_what_is_trained_was_sampled_with_its_logprob(self, repair: Repair, case: Case) -> None:
        evidence, _, mend = mended(repair, case)
        for rollout in rollouts_of(mend):
            assert_true(gathered(rollout, case))
            if repair.name != "realign":
                assert_kept(evidence.rollout, rollout, repair)

    def test_every_column_fits(self, repair: Repair, case: Case) -> None:
        _, _, mend = mended(repair, case)
        for changed in mend.rollouts:
            assert_fitting(changed.rollout)


def assert_turns(got: Rollout, want: Rollout) -> None:
    assert len(got.turns) == len(want.turns)
    for turn, other in zip(got.turns, want.turns, strict=True):
        assert equal(turn.prompt_ids, other.prompt_ids)
        assert equal(turn.completion_ids, other.completion_ids)
        assert equal(turn.completion_logprobs, other.completion_logprobs)


def assert_true(evidence: Evidence) -> None:
    """Every trained token was sampled there, by the calls if there are any, with the value of its call."""
    row, view = evidence.rollout.training_row, evidence.row
    if row is None or row.loss_mask is None or view is None or not view.proven:
        return
    assert not (row.loss_mask & ~view.sampled).any()
    if row.logprobs is not None and view.expected_logprobs is not None:
        scored = row.loss_mask & np.isfinite(view.expected_logprobs)
        assert (np.abs(row.logprobs - view.expected_logprobs)[scored] <= ROUNDING).all()


def assert_kept(before: Rollout, after: Rollout, repair: Repair) -> None:
    """A token of an unchanged row that is trained has the logprob that it had; a model may fill what had none."""
    old, new = before.training_row, after.training_row
    if old is None or new is None or old.logprobs is None or new.logprobs is None or new.loss_mask is None:
        return
    if before.turns or not np.array_equal(old.token_ids, new.token_ids):
        return
    had = new.loss_mask & np.isfinite(old.logprobs) if repair.by_model else new.loss_mask
    assert equal(new.logprobs[had], old.logprobs[had])


def assert_fitting(rollout: Rollout) -> None:
    """Every column has an entry for each token that it describes, and arrays are as long as the ids."""
    for turn in rollout.turns:
        if turn.completion_ids is not None and turn.completion_logprobs is not None:
            assert len(turn.completion_logprobs) == len(turn.completion_ids)
    row = rollout.training_row
    if row is None:
        return
    size = len(row.token_ids)
    for array in (row.loss_mask, row.logprobs):
        assert array is None or len(array) == size
    for column in row.columns:
        if column.alignment is not None:
            parts = {"full": size, "prompt_length": row.prompt_length, "trained": row.loss_mask}
            assert len(expand(column.values.astype(object), column.alignment, fill=None, **parts)) == size


@pytest.mark.parametrize(("repair", "case"), every("refused"))
def test_it_refuses_what_is_not_provable_and_says_why(repair: Repair, case: Case) -> None:
    evidence = gathered(toy.rollout_of(case), case)
    findings = acted_on(repair, evidence, case)
    assert findings or repair.chosen(choices_of(case))
    with pytest.raises(RecordError) as caught:
        repair.mend(evidence, findings, choices_of(case))
    assert case["refused"] in str(caught.value)


@pytest.mark.parametrize(("repair", "case"), every("nothing"))
def test_it_has_nothing_to_do(repair: Repair, case: Case) -> None:
    evidence = gathered(toy.rollout_of(case), case)
    assert repair.mend(evidence, acted_on(repair, evidence, case), choices_of(case)) is None


def test_every_fixture_belongs_to_a_repair() -> None:
    assert {path.stem for path in FIXTURES.glob("*.toml")} == {repair.name for repair in REPAIRS}


def test_repairs_are_tried_in_the_order_of_their_precedence() -> None:
    assert [repair.precedence for repair in REPAIRS] == sorted({repair.precedence for repair in REPAIRS})
    assert [repair.name for repair in REPAIRS][-1] == "drop"


def test_a_name_that_is_no_repair_is_answered_with_those_that_are_close() -> None:
    with pytest.raises(SetupError, match=r'^Unknown repair "maks": did you mean mask\? \(splice, .*, drop\)$'):
        repair_named("maks")
