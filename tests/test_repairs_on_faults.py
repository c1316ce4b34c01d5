"""Faults put into clean rollouts at random places are mended there, and nothing is changed elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import toy
from tests.faults import Log, clean_logs, encode, text_of
from tests.test_repair_properties import pairs_at
from tests.tiers import examples
from tito_audit.errors import RecordError
from tito_audit.evidence.gather import gather
from tito_audit.evidence.model import Evidence
from tito_audit.record.build import build_training_row
from tito_audit.record.column import Alignment, Column, ColumnRole, MaskEncoding, MovePolicy
from tito_audit.record.finding import Finding, Severity, Where
from tito_audit.record.rollout import Padding, Rollout, TrainingRow
from tito_audit.record.runs import trained_runs
from tito_audit.repair import Proposal
from tito_audit.repairs import repair_named
from tito_audit.rules import all_rules
from tito_audit.run.check import check, explain_differences
from tito_audit.settings.model import RepairChoices

few = settings(max_examples=examples(8, 20), deadline=None, derandomize=True)
anywhere = st.integers(0, 10**6)
ways = st.sampled_from(["span", "turn", "first-divergence"])
RULES = all_rules()
CODES = frozenset(rule.code for rule in RULES)


def seen(rollout: Rollout, *, template: bool = True) -> Evidence:
    renderer = toy.toy_renderer() if template else None
    return explain_differences(gather(rollout, toy.toy_tokenizer(), renderer), RULES)


def findings_of(evidence: Evidence, at_least: Severity = Severity.ERROR) -> tuple[Finding, ...]:
    return tuple(finding for finding in check(evidence, RULES, CODES)[0] if finding.severity >= at_least)


def mended(
    name: str, rollout: Rollout, choices: RepairChoices | None = None, at_least: Severity = Severity.ERROR
) -> Proposal | None:
    """What a repair proposes for the findings that it claims."""
    repair, evidence = repair_named(name), seen(rollout)
    claimed = tuple(finding for finding in findings_of(evidence, at_least) if repair.claims(finding.code))
    return repair.mend(evidence, claimed, choices or RepairChoices())


def row_of(mend: Proposal | None) -> TrainingRow:
    assert mend is not None
    (changed,) = mend.rollouts
    assert changed.rollout.training_row is not None
    return changed.rollout.training_row


def column(row: TrainingRow, role: ColumnRole) -> Column:
    return next(row_column for row_column in row.columns if row_column.role is role)


def drifted(log: Log, choice: int) -> Log:
    """A log whose row alone holds an answer re-encoded, which was sampled with one token in two."""
    options = pairs_at(log)
    assume(options)
    turn, at, pair = options[choice % len(options)]
    heard = log.copy()
    out = log.replaced(turn, at, at + 1, pair)
    assume(encode(text_of(out.completions[turn])) == heard.completions[turn])
    start = out.regions[turn][0] + at
    out.row_ids[start : start + 2] = heard.completions[turn][at : at + 1]
    out.row_mask[start : start + 2] = [1]
    out.row_logprobs[start : start + 2] = [-7.0]
    out.regions = [(a - (k > turn), b - (k >= turn)) for k, (a, b) in enumerate(out.regions)]
    return out


@few
@given(clean_logs(), st.sampled_from([-2, -1, 1, 2]))
def test_a_shifted_column_is_moved_back_value_for_value(log: Log, shift: int) -> None:
    clean = list(log.row_logprobs)
    log.row_logprobs = [*log.row_logprobs[-shift:], *log.row_logprobs[:-shift]]
    mend = mended("realign", log.rollout())
    row = row_of(mend)
    values = np.array(clean, np.float64)
    trained = np.array(log.row_mask, np.bool_)
    assert row.logprobs is not None
    assert (row.logprobs[trained] == values[trained]).all()
    assert row.loss_mask is not None
    assert row.loss_mask.tolist() == trained.tolist()
    assert mend is not None
    assert findings_of(seen(mend.rollouts[0].rollout), Severity.WARNING) == ()


@few
@given(clean_logs(), anywhere, st.sampled_from([-1, 1]))
def test_one_shifted_turn_is_moved_back_and_the_others_are_not_touched(log: Log, choice: int, shift: int) -> None:
    clean = np.array(log.row_logprobs, np.float64)
    start, end = log.regions[choice % len(log)]
    assume(end - start > 3)
    part = [0.0, *log.row_logprobs[start : end - 1]] if shift > 0 else [*log.row_logprobs[start + 1 : end], 0.0]
    log.row_logprobs[start:end] = part
    row = row_of(mended("realign", log.rollout()))
    assert row.logprobs is not None
    assert (row.logprobs == clean).all()


@few
@given(clean_logs(), st.sampled_from([-2, -1, 1, 2]))
def test_a_mask_that_slid_is_moved_back(log: Log, slide: int) -> None:
    clean = list(log.row_mask)
    log.row_mask = [*log.row_mask[-slide:], *log.row_mask[:-slide]] if slide < 0 else [0] * slide + clean[:-slide]
    row = row_of(mended("realign", log.rollout()))
    assert row.loss_mask is not None
    assert row.loss_mask.astype(int).tolist() == clean


@few
@given(clean_logs(), anywhere, anywhere)
def test_an_entry_too_many_in_the_row_is_found_by_the_calls(log: Log, choice: int, place: int) -> None:
    clean = np.array(log.row_logprobs, np.float64)
    log.row_logprobs.insert(place % (len(clean) + 1), -50.0 - choice % 7)
    try:
        row = row_of(mended("realign", log.rollout()))
    except RecordError:
        return  # among tokens that no call sampled, nothing says which entry is the one too many
    trained = np.array(log.row_mask, np.bool_)
    assert row.logprobs is not None
    assert (row.logprobs[trained] == clean[trained]).all()
    assert column(row, ColumnRole.LOGPROBS).alignment is Alignment.FULL


@few
@given(clean_logs(), anywhere, ways)
def test_drift_leaves_the_loss_and_nothing_enters_it(log: Log, choice: int, way: str) -> None:
    rollout = drifted(log, choice).rollout()
    before = rollout.training_row
    assert before is not None
    narrow = mended("mask", rollout)
    mend = mended("mask", rollout, RepairChoices(mask_by=way))  # type: ignore[arg-type]
    row, span = row_of(mend), row_of(narrow)
    assert row.loss_mask is not None
    assert span.loss_mask is not None
    assert before.loss_mask is not None
    assert not (row.loss_mask & ~before.loss_mask).any()
    assert not (row.loss_mask & ~span.loss_mask).any()
    assert np.array_equal(row.logprobs, before.logprobs, equal_nan=True)  # type: ignore[arg-type]
    assert column(row, ColumnRole.LOGPROBS) is column(before, ColumnRole.LOGPROBS)
    assert mend is not None
    after = seen(mend.rollouts[0].rollout)
    assert after.row is not None
    assert not (row.loss_mask & ~after.row.sampled).any()
    assert findings_of(after) == ()


@few
@given(clean_logs(), st.data())
def test_exactly_the_tokens_without_a_logprob_leave_the_loss(log: Log, data: st.DataObject) -> None:
    where = np.flatnonzero(log.row_mask)
    bad = data.draw(st.sets(st.sampled_from(where.tolist()), min_size=1, max_size=4))
    assume(len(bad) < len(where))
    # Where every answer lacks its first value, the others may as well lie one place late: nothing is repaired.
    assume(not {start for start, _ in trained_runs(np.asarray(log.row_mask, bool))} <= bad)
    for position in bad:
        log.row_logprobs[position] = data.draw(st.sampled_from([None, float("inf"), 1.0, -9999.0, 0.5]))
    row = row_of(mended("mask", replace(log.rollout(), turns=())))
    assert row.loss_mask is not None
    assert set(np.flatnonzero(row.loss_mask)) == set(where.tolist()) - bad


@few
@given(clean_logs(), anywhere, st.booleans())
def test_a_row_of_todays_tokens_has_no_difference_and_no_made_up_logprob(
    log: Log, choice: int, messages: bool
) -> None:
    options = pairs_at(log)
    assume(options)
    turn, at, pair = options[choice % len(options)]
    first = log.regions[turn][0] + at
    log = log.replaced(turn, at, at + 1, pair)
    rollout = replace(log.rollout(), turns=(), messages=log.rollout().messages if messages else ())
    try:
        mend = mended("canonical", rollout, at_least=Severity.NOTE)
    except RecordError:
        assert first <= log.regions[0][0], "only a change before all others leaves nothing to train"
        return
    row = row_of(mend)
    assert mend is not None
    assert row.loss_mask is not None
    after = findings_of(seen(mend.rollouts[0].rollout), Severity.NOTE)
    assert not [finding for finding in after if finding.code.startswith(("TOK", "TPL"))]
    assert not row.loss_mask[first:].any()
    logprobs = np.array(log.row_logprobs[:first], np.float64)
    assert row.logprobs is not None
    assert (row.logprobs[:first] == logprobs).all()
    assert np.isnan(row.logprobs[first:]).all()


@few
@given(clean_logs(), st.permutations(["labels", "binary", "float", "bool"]))
def test_every_mask_style_trains_the_same_tokens(log: Log, styles: list[str]) -> None:
    rollout = log.rollout()
    assert rollout.training_row is not None
    wanted = rollout.training_row.loss_mask
    for style in styles:
        mend = mended("normalize", rollout, RepairChoices(mask_style=style))  # type: ignore[arg-type]
        if mend is None:
            continue
        rollout = mend.rollouts[0].rollout
        mask = column(row_of(mend), ColumnRole.LOSS_MASK)
        assert mask.encoding is MaskEncoding(style)
        again = build_training_row(rollout.training_row.token_ids, mask=("loss_mask", mask.values))  # type: ignore[union-attr]
        assert np.array_equal(again.loss_mask, wanted)  # type: ignore[arg-type]
        assert column(again, ColumnRole.LOSS_MASK).encoding is mask.encoding


def small_row(**more: Any) -> TrainingRow:
    """Ten tokens, the last four trained, with columns of every kind beside mask and logprobs."""
    ids = np.arange(20, 30, dtype=np.int32)
    row = build_training_row(
        ids,
        mask=("mask", more.pop("mask", [0] * 6 + [1] * 4)),
        logprobs=("logprobs", more.pop("logprobs", [None] * 6 + [-0.5, None, -0.25, -0.125])),
        other={"advantages": ([0.5] * 4, MovePolicy.STALE), "position": (list(range(10)), MovePolicy.COPY)},
        sentinel=more.pop("sentinel", 0.0),
    )
    return replace(row, **more)


def small(row: TrainingRow) -> Evidence:
    log = Log([], [], [], [], [], 0, has_row=False)
    return gather(replace(log.rollout(), training_row=row), None, None)


def test_columns_of_trained_tokens_lose_the_entries_of_those_that_leave_and_no_other_is_touched() -> None:
    before = small_row()
    evidence = small(before)
    repair = repair_named("mask")
    row = row_of(repair.mend(evidence, findings_of(evidence), RepairChoices()))
    old, new = ({row_column.name: row_column for row_column in each.columns} for each in (before, row))
    assert new["advantages"].values.tolist() == [0.5] * 3
    assert new["position"] is old["position"]
    assert new["logprobs"] is old["logprobs"], "null stays null, though the format writes 0.0"
    assert new["mask"].values.tolist() == [0] * 6 + [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("choice", "expected"), [("left", Padding(5, 0)), ("right", Padding(0, 5)), ("none", Padding())]
)
def test_padding_goes_to_the_chosen_side_in_its_width(choice: Any, expected: Padding) -> None:
    evidence = small(small_row(padding=Padding(3, 2)))
    repair = repair_named("normalize")
    row = row_of(repair.mend(evidence, (), RepairChoices(padding=choice)))
    assert row.padding == expected
    again = small(row)
    assert repair.mend(again, (), RepairChoices(padding=choice)) is None


def test_a_mask_of_one_weight_slides_back_with_it() -> None:
    log = Log([], [], [None], [[5, 6, 7]], [[8, 9, 10]], 0).lay()
    log.row_ids.append(11)
    log.row_mask = [0.0, 0.0, 0.25, 0.25, 0.25, 0.0, 0.0]  # type: ignore[list-item]
    log.row_logprobs.append(0.0)
    evidence = gather(log.rollout(), None, None)
    row = row_of(repair_named("realign").mend(evidence, findings_of(evidence), RepairChoices()))
    assert column(row, ColumnRole.LOSS_MASK).values.tolist() == [0.0, 0.0, 0.0, 0.25, 0.25, 0.25, 0.0]


def test_a_finding_of_a_call_that_the_row_does_not_hold_changes_nothing() -> None:
    log = Log([], [], [None], [[5, 6, 7]], [[8, 9, 10]], 0).lay()
    log.logprobs[0] = [-0.5, None, -0.25]
    evidence = gather(log.rollout(), None, None)
    findings = tuple(finding for finding in findings_of(evidence) if finding.hit.where is Where.COMPLETION)
    assert [finding.code for finding in findings] == ["LPR503"]
    assert repair_named("mask").mend(evidence, findings, RepairChoices()) is None
