"""The rules' fast forms say what the simple ones say: every shortcut against the sentence it stands for."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import toy
from tests.test_rules import RULES, every
from tests.tiers import examples
from tito_audit.align.pieces import Pieces
from tito_audit.errors import RecordError
from tito_audit.evidence.differences import find_normal_form
from tito_audit.evidence.judgement import row_mask_slide
from tito_audit.evidence.logprob_values import IMPOSSIBLE
from tito_audit.evidence.logprobs import logprob_shifts, verified_parts
from tito_audit.evidence.masks import (
    exact_mask_slide,
    left_out,
    mask_slide,
    sampled_turns,
    whole_mask,
)
from tito_audit.evidence.model import Evidence, Explained, RowView, TextSide, Verified
from tito_audit.evidence.needs import Needs, applies
from tito_audit.evidence.trainings import _sum_logprobs
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.build import build_call_columns, build_training_row
from tito_audit.record.finding import Finding, Hit, Severity, Skip, Where
from tito_audit.record.message import as_messages
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn
from tito_audit.record.runs import trained_runs
from tito_audit.repair import Safety
from tito_audit.repairs import all_repairs
from tito_audit.rule import Rule, hit_of, missing_evidence
from tito_audit.rules import _drift, rule_of
from tito_audit.rules._texts import _normalize, spelled_calls
from tito_audit.run.check import check
from tito_audit.run.headlines import link_findings, with_headline
from tito_audit.settings.model import RepairChoices

Runs = list[tuple[int, int]]
END = 7
"""The id that ends a turn in these rows."""
VALUES = (-0.5, -0.7, -1e-4, -2.25, 0.0, -0.0, 1.0, -9999.0, 0.3, 5e-7, -1000.0, np.nan, np.inf, -np.inf)
CODES = [rule.code for rule in RULES]


# The simple forms.


def simple_runs(mask: Mask) -> Runs:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(int), [0])))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def simple_turns(view: RowView) -> list[tuple[int | None, Runs]]:
    turns: dict[int, Runs] = {}
    for number, (start, end) in enumerate(simple_runs(view.sampled)):
        cuts = np.flatnonzero(np.diff(view.turn[start:end])) + start + 1
        for a, b in pairwise([start, *cuts.tolist(), end]):
            turn = int(view.turn[a])
            turns.setdefault(turn if turn >= 0 else -1 - number, []).append((a, b))
    return [(key if key >= 0 else None, spans) for key, spans in turns.items()]


def simple_slide(trained: Mask, sampled: Mask) -> int:
    if not (trained & ~sampled).any() or not (sampled & ~trained).any():
        return 0
    runs, full = set(simple_runs(sampled)), len(sampled)
    stretches = simple_runs(trained)
    for offset in (1, -1, 2, -2, 3, -3, 4, -4):
        moved = [(start - offset, end - offset if end < full else full) for start, end in stretches]
        clipped = [(start - offset, end - offset) for start, end in stretches]
        if all(a in runs or b in runs for a, b in zip(moved, clipped, strict=True)):
            return offset
    return 0


def simple_wrong(row: TrainingRow, view: RowView) -> Mask:
    """`[T]` values of the row that are not the calls', whatever the offset."""
    expected, logprobs = view.expected_logprobs, row.logprobs
    assert expected is not None
    assert logprobs is not None
    comparable = np.isfinite(expected) & ~view.drifted
    silent = ~np.isfinite(logprobs) | np.isin(logprobs, IMPOSSIBLE)
    if row.sentinel is not None:
        silent |= logprobs == row.sentinel
    wrong = comparable & ~silent & ~(np.abs(logprobs - np.where(comparable, expected, np.nan)) <= 1e-3)
    return wrong if row.loss_mask is None else wrong & row.loss_mask


def simple_zeros(row: TrainingRow, view: RowView) -> Mask:
    """`[T]` trained values of 0 that are farther from the calls' than the row rounds its others."""
    expected, logprobs = view.expected_logprobs, row.logprobs
    assert expected is not None
    assert logprobs is not None
    apart = np.abs(logprobs - expected)
    others = [gap for gap, value in zip(apart, logprobs, strict=True) if value != 0 and gap <= 1e-3]
    zeros = (logprobs == 0) & ~view.drifted & (apart > (max(*others, 1e-6) if others else 1e-3))
    return zeros if row.loss_mask is None else zeros & row.loss_mask


def marked_turns(view: RowView, marked: Mask) -> list[tuple[int | None, Mask]]:
    """The sampled turns that hold a marked token, and where."""
    return [
        (turn, np.concatenate([np.flatnonzero(marked[a:b]) + a for a, b in stretch]))
        for turn, stretch in simple_turns(view)
        if any(marked[a:b].any() for a, b in stretch)
    ]


def simple_check(
    evidence: Evidence, rules: Sequence[Rule], selected: frozenset[str]
) -> tuple[tuple[Finding, ...], tuple[Skip, ...]]:
    """Every rule asked in turn, every difference to every rule, every repair to every finding."""
    explained = []
    for difference in evidence.differences:
        known_cause = difference.known_cause
        if known_cause is not None:
            explained.append(Explained(difference, known_cause.code, known_cause.cause, known_cause.what))
            continue
        for rule in sorted((rule for rule in rules if rule.explain), key=lambda rule: rule.precedence):
            own = difference.kind in rule.kinds and difference.where in rule.places
            reason = rule.explain(difference, evidence) if rule.explain is not None and own else None
            if reason is not None:
                explained.append(Explained(difference, rule.code, reason.cause, reason.what))
                break
    evidence = replace(evidence, explained=tuple(explained), memo={})
    findings, skips = [], []
    for rule in rules:
        if rule.code not in selected:
            continue
        because = missing_evidence(rule, evidence.present, evidence.rollout.stated.reasons)
        hits = [simple_hit(rule, change, evidence) for change in explained if change.code == rule.code]
        if because is not None and not hits:
            skips.append(Skip(rule.code, because, applies(rule.needs, evidence.present)))
            continue
        hits = list(rule.check(evidence)) if rule.check is not None else hits
        for hit in hits:
            severity = rule.severity if hit.severity is None else hit.severity
            findings.append(with_headline(Finding(rule.code, severity, evidence.rollout.place, hit)))
    linked = link_findings(findings, {}) if findings else []
    return tuple(replace(finding, repair=simple_repair(finding, evidence)) for finding in linked), tuple(skips)


def simple_hit(rule: Rule, explained: Explained, evidence: Evidence) -> Hit:
    of = explained.difference
    recorded, canonical = (evidence.side(side.ids[:16]) for side in (of.recorded, of.canonical))
    severity = min(rule.severity, of.severity)
    hit = hit_of(explained, evidence, severity)
    own, other = replace(recorded, label=hit.recorded.label), replace(canonical, label=hit.canonical.label)
    more = {"before": hit.before, "after": hit.after, "later_turn": of.later_turn}
    return Hit(of.where, of.start, of.end, hit.message, of.turn, explained.cause, severity, own, other, **more)


def simple_repair(finding: Finding, evidence: Evidence) -> str | None:
    for repair in all_repairs():
        evidence = replace(evidence, memo={})
        by_log = repair.safety is not Safety.UNSAFE and not repair.by_model
        wanted = finding.severity is not Severity.NOTE and by_log
        if wanted and repair.claims(finding.code) and repair.fits(evidence, finding):
            return repair.name
    return None


# Rows in which anything may be wrong.


def masks(length: int) -> st.SearchStrategy[Mask]:
    """Masks of runs, as masks are, and now and then of single tokens."""
    edges = st.lists(st.integers(0, length), max_size=8)
    return edges.map(lambda cuts: np.isin(np.arange(length), cuts).cumsum() % 2 == 1)


@st.composite
def rows(draw: st.DrawFn, *, calls: bool = False) -> Evidence:
    """A row whose mask is mostly what was sampled, or slid, or anything; whose values are a few odd ones."""
    length = draw(st.integers(1, 24))
    sampled = draw(masks(length))
    mask = draw(st.one_of(st.just(sampled), masks(length), st.integers(-3, 3).map(lambda n: np.roll(sampled, n))))
    turn = np.where(sampled, np.array(draw(st.lists(st.integers(-1, 2), min_size=length, max_size=length))), -1)
    turn = np.sort(turn) if draw(st.booleans()) else turn
    seed = np.random.default_rng(draw(st.integers(0, 999)))
    usual = -seed.permutation(length) * 0.05 - 0.05
    expected = np.where(sampled, usual, np.nan) if calls else None
    values = np.where(sampled, usual, draw(st.sampled_from((0.0, np.nan, -0.3))))
    values = np.roll(values, draw(st.sampled_from((0, 0, 1, -1, 2, -4))))
    for at, value in draw(st.lists(st.tuples(st.integers(0, length - 1), st.sampled_from(VALUES)), max_size=6)):
        values[at : at + draw(st.sampled_from((1, 3, 9)))] = value
    ids = np.arange(10, 10 + length, dtype=np.int32)
    ids[draw(st.lists(st.integers(0, length - 1), max_size=4))] = END
    row = build_training_row(
        ids,
        mask=("loss_mask", mask),
        logprobs=("logprobs", values),
        prompt_length=draw(st.sampled_from((None, 0, 1))),
        sentinel=draw(st.sampled_from((None, 0.0, 1.0, -9999.0, 5.0))),
    )
    roles = tuple(draw(st.lists(st.sampled_from(("user", "assistant")), min_size=length, max_size=length)))
    view = RowView(
        sampled, calls, roles, turn.astype(np.int32), turn.astype(np.int32), expected, draw(masks(length))
    )
    present = Needs.ROW | Needs.MASK | Needs.SAMPLED | Needs.ROW_LOGPROBS
    return Evidence(
        Rollout(Place("made up", 0), "toy", training_row=row), None, present, None, frozenset({END}), row=view
    )


@st.composite
def moved_rows(draw: st.DrawFn) -> Evidence:
    """A row whose mask slid off what was sampled, or whose values slid off the mask; both cut off at its ends."""
    length = draw(st.integers(4, 30))
    sampled = draw(masks(length))
    mask = moved(sampled, draw(st.sampled_from((0, 0, 1, -1, 2))), False)
    filler = draw(st.sampled_from((0.0, np.nan)))
    values = moved(np.where(mask, -0.5 - np.arange(length), filler), draw(st.integers(-5, 5)), filler)
    values[draw(st.lists(st.integers(0, length - 1), max_size=1))] = filler
    prompt_length = draw(st.sampled_from((None, 2)))
    row = build_training_row(
        np.arange(10, 10 + length, dtype=np.int32),
        mask=("loss_mask", mask),
        logprobs=("logprobs", values[draw(st.sampled_from((0, 1, prompt_length or 0))) :]),
        prompt_length=prompt_length,
        sentinel=None if np.isnan(filler) else filler,
    )
    nobody, nothing = np.full(length, -1, np.int32), np.zeros(length, np.bool_)
    view = RowView(sampled, False, ("user",) * length, nobody, nobody, None, nothing)
    present = Needs.ROW | Needs.MASK | Needs.SAMPLED | Needs.ROW_LOGPROBS
    return Evidence(Rollout(Place("made up", 0), "toy", training_row=row), None, present, row=view)


def moved(column: Any, places: int, filler: Any) -> Any:
    """A column some places late (+) or early (-)."""
    out = np.full(len(column), filler, column.dtype)
    inside = column[: max(len(column) - places, 0)] if places >= 0 else column[-places:]
    start = max(places, 0)
    out[start : start + len(inside)] = inside
    return out


def parts(evidence: Evidence) -> tuple[TrainingRow, RowView, Mask, Logprobs]:
    row, view = evidence.rollout.training_row, evidence.row
    assert row is not None
    assert view is not None
    assert row.loss_mask is not None
    assert row.logprobs is not None
    return row, view, row.loss_mask, row.logprobs


def hits(code: str, evidence: Evidence) -> list[Hit]:
    rule = rule_of(code)
    assert rule is not None
    assert rule.check is not None
    return list(rule.check(evidence))


def spans(found_hits: Sequence[Hit], *causes: str) -> Runs:
    return [(hit.start, hit.end) for hit in found_hits if not causes or hit.cause.startswith(causes)]


@given(st.lists(st.booleans(), max_size=40))
def test_runs_are_where_the_mask_is_true(flags: list[bool]) -> None:
    mask = np.array(flags, np.bool_)
    assert trained_runs(mask) == simple_runs(mask)


@settings(max_examples=examples(40, 200))
@given(rows())
def test_turns_slides_and_whole_masks_are_those_of_the_simple_forms(evidence: Evidence) -> None:
    _, view, mask, _ = parts(evidence)
    assert sampled_turns(evidence) == simple_turns(view)
    assert mask_slide(mask, view.sampled) == exact_mask_slide(evidence) == simple_slide(mask, view.sampled)
    if np.array_equal(mask, view.sampled):
        assert whole_mask(evidence) in ((None, "all zeros") if not mask.all() else (None, "all ones"))
        assert [hit for code in ("MSK401", "MSK402", "MSK404") for hit in hits(code, evidence)] == []


@settings(max_examples=examples(40, 200))
@given(rows())
def test_parts_of_turns_left_out_are_found_turn_by_turn(evidence: Evidence) -> None:
    _, view, mask, _ = parts(evidence)
    missed = hits("MSK402", evidence)
    if whole_mask(evidence) is not None or row_mask_slide(evidence):
        return
    ends = {hit.start for hit in hits("MSK404", evidence) if hit.cause == "sampled, not trained"}
    left = left_out(evidence)  # first or last tokens that the writer's convention leaves out of the loss
    meant = np.zeros(len(mask), np.bool_) if left is None else left.tokens
    want: Runs = []
    for _, stretches in simple_turns(view):
        if any(mask[a:b].any() for a, b in stretches):
            for a, b in stretches:
                lacks = [not mask[at] and at not in ends and not meant[at] for at in range(a, b)]
                want += [(s + a, e + a) for s, e in simple_runs(np.array(lacks))]
        else:
            want.append((stretches[0][0], stretches[-1][1]))
    assert spans(missed) == want


@settings(max_examples=examples(40, 500))
@given(moved_rows())
def test_slides_that_are_cut_off_are_those_of_the_simple_form(evidence: Evidence) -> None:
    row, view = evidence.rollout.training_row, evidence.row
    assert row is not None
    assert view is not None
    assert row.loss_mask is not None
    assert exact_mask_slide(evidence) == simple_slide(row.loss_mask, view.sampled)


@settings(max_examples=examples(40, 200))
@given(rows(calls=True))
def test_shifts_against_calls_hold_every_wrong_value_and_no_turn_without_one(evidence: Evidence) -> None:
    row, view, _, _ = parts(evidence)
    wrong = simple_wrong(row, view)
    shifts = logprob_shifts(evidence)
    assert {shift.turn for shift in shifts} >= {turn for turn, _ in marked_turns(view, wrong)}
    if any(shift.offset for shift in shifts):
        return  # turns with values that are exact only at the offset moved with them
    if wrong.any():
        wrong |= simple_zeros(row, view)
    marked = marked_turns(view, wrong)
    assert [(shift.turn, shift.values) for shift in shifts] == [(turn, len(at)) for turn, at in marked]
    for shift, (_, at) in zip(shifts, marked, strict=True):
        assert shift.offset or (shift.start, shift.end) == (at[0], at[-1] + 1)


@settings(max_examples=examples(40, 300))
@given(rows(), st.booleans())
def test_values_that_are_no_logprobs_are_found_wherever_they_enter_the_loss(
    evidence: Evidence, calls: bool
) -> None:
    row, view, mask, logprobs = parts(evidence)
    sentinel = row.sentinel
    if calls:
        values, columns = build_call_columns(row.token_ids, logprobs=("logprobs", logprobs))
        turn = Turn(None, row.token_ids, values, columns=columns)
        evidence = Evidence(Rollout(Place("made up", 0), "toy", turns=(turn,)), None, Needs.COMPLETION_LOGPROBS)
        mask, sentinel = np.ones(len(mask), np.bool_), columns[0].sentinel
        runs = [(0, len(mask))]
    else:
        runs = simple_runs(mask & view.sampled)
        if logprob_shifts(evidence):
            assert [*hits("LPR503", evidence), *hits("LPR505", evidence)] == []
            return
    finite = np.isfinite(logprobs)
    marks = [1.0, -9999.0, *([sentinel] if sentinel is not None and (sentinel > 0 or sentinel <= -1000) else [])]
    spoken = logprobs[mask & finite & (logprobs != 1.0)]
    if len(spoken) and (spoken > 1e-3).mean() > 0.5:
        marks = [mark for mark in marks if mark < 0]
    stands_in = np.isin(logprobs, marks)
    suspect = hits("LPR503", evidence)
    assert spans(suspect, "not recorded") == simple_runs(np.isnan(logprobs) & mask)
    assert spans(suspect, "infinite") == simple_runs(np.isinf(logprobs) & mask)
    above = mask & (logprobs > 1e-6) & finite & ~stands_in
    whole = len(logprobs[mask & finite]) > 1 and bool((logprobs[mask & finite] > -1e-6).all())
    at = np.flatnonzero(above)
    extent = [(int(at[0]), int(at[-1]) + 1)] if len(at) else []
    assert spans(hits("LPR504", evidence)) == (extent if whole else simple_runs(above))
    suspect = hits("LPR505", evidence)
    assert spans(suspect, "sentinel") == simple_runs(stands_in & mask)
    same = [runs] if runs and simple_constant(logprobs, stands_in, runs) else None
    same = same or [[run] for run in runs if simple_constant(logprobs, stands_in, [run])]
    zeros = [(hit.start, hit.end, hit.cause) for hit in suspect if hit.cause in ("run of zeros", "undecided")]
    assert zeros == simple_padding(logprobs, mask, same, runs)
    assert spans(hits("LPR506", evidence)) == [(run[0][0], run[-1][1]) for run in same]


def simple_padding(
    logprobs: Logprobs, mask: Mask, constant: Sequence[Runs], runs: Runs
) -> list[tuple[int, int, str]]:
    """Eight exact zeros or more in a row, where so many are unlikely as often as the other values are zero."""
    trained = [at for at in range(len(mask)) if mask[at]]
    zero = [at for at in trained if logprobs[at] == 0 and not np.signbit(logprobs[at])]
    out = []
    for start, end in simple_runs(np.isin(np.arange(len(mask)), zero)):
        inside = any(a <= start and end <= b for runs in constant for a, b in runs)
        often = (len(zero) - (end - start) + 1) / (len(trained) - (end - start) + 2)
        edge = any(start == a or end == b for a, b in runs)
        rare = (end - start) * math.log10(often)
        if not inside and end - start >= 8 and rare < -6:
            out.append((start, end, "run of zeros"))
        elif not inside and ((end - start >= 8 and rare < -3.5) or (end - start >= 3 and edge and rare < -4)):
            out.append((start, end, "undecided"))
    return out


def simple_constant(logprobs: Logprobs, stands_in: Mask, stretches: Runs) -> bool:
    where = [at for a, b in stretches for at in range(a, b)]
    values = logprobs[where]
    if len(values) < 4 or not np.isfinite(values).all() or stands_in[where].any() or np.ptp(values):
        return False
    return bool(values[0]) or (len(values) >= 8 and not np.signbit(values).any())


@settings(max_examples=examples(40, 300))
@given(rows(calls=True))
def test_zeros_are_proven_wrong_by_the_calls_outside_of_constant_stretches(evidence: Evidence) -> None:
    _, view, mask, logprobs = parts(evidence)
    if logprob_shifts(evidence):
        return
    assert view.expected_logprobs is not None
    expected = view.expected_logprobs
    close = [abs(a - b) for a, b in zip(logprobs, expected, strict=True) if a and abs(a - b) <= 1e-3]
    rounded = max([1e-6, *close]) if close else 1e-3
    proven = (logprobs == 0) & ~np.signbit(logprobs) & mask & (np.abs(expected) > rounded)
    for hit in hits("LPR506", evidence):
        proven[hit.start : hit.end] &= ~(mask & view.sampled)[hit.start : hit.end]
    assert spans([hit for hit in hits("LPR505", evidence) if hit.message.count("0 where")]) == simple_runs(proven)


@settings(max_examples=examples(40, 300))
@given(st.lists(st.lists(st.integers(-3, 30), max_size=9), min_size=1, max_size=5), st.lists(st.integers(0, 9)))
def test_ids_that_a_prompt_repeats_are_reported_once(outputs: list[list[int]], cuts: list[int]) -> None:
    turns, seen = [], np.empty(0, np.int32)
    want: list[tuple[str, int, int, int]] = []
    for number, ids in enumerate(outputs):
        cut = cuts[number] if number < len(cuts) else 9
        prompt = np.concatenate([seen[:cut], np.array(ids[:4], np.int32)])
        shared = next((at for at in range(min(len(seen), len(prompt))) if seen[at] != prompt[at]), None)
        shared = min(len(seen), len(prompt)) if shared is None else shared
        wrong = (prompt < 0) & (np.arange(len(prompt)) >= shared)
        want += [("prompt", number, a, b) for a, b in simple_runs(wrong)]
        completion = np.array(ids[4:], np.int32)
        want += [("completion", number, a, b) for a, b in simple_runs(completion < 0)]
        turns.append(Turn(prompt, completion))
        seen = np.concatenate([prompt, completion])
    evidence = Evidence(Rollout(Place("made up", 0), "toy", turns=tuple(turns)), None, Needs.PROMPTS)
    assert [(hit.where.value, hit.turn, hit.start, hit.end) for hit in hits("REC003", evidence)] == want


@given(st.text(st.sampled_from("aé e\u0301\u212b\ufffd\ud55c\u1112\u1161\u11ab"), max_size=20))
def test_texts_are_folded_by_normal_form_and_runs_of_broken_characters(text: str) -> None:
    assert _normalize(text) == re.sub("\ufffd+", "\ufffd", unicodedata.normalize("NFC", text))


@settings(max_examples=examples(40, 300))
@given(rows(), st.sets(st.sampled_from(CODES)))
def test_rows_are_checked_as_by_asking_every_rule_and_repair_in_turn(evidence: Evidence, codes: set[str]) -> None:
    selected = frozenset(codes or CODES)
    want = simple_check(replace(evidence, memo={}), RULES, selected)
    assert repr(check(evidence, RULES, selected, all_repairs)) == repr(want)


@pytest.mark.parametrize(("rule", "case"), [*every("flag"), *every("pass")])
def test_cases_are_checked_as_by_asking_every_rule_and_repair_in_turn(rule: Rule, case: dict[str, Any]) -> None:
    evidence = toy.evidence_of(case)
    for selected in (frozenset(CODES), frozenset({rule.code}), frozenset(CODES) - {rule.code}):
        want = simple_check(replace(evidence, memo={}), RULES, selected)
        assert repr(check(evidence, RULES, selected, all_repairs)) == repr(want)
        # What a check worked out once does not change what the next one says.
        assert repr(check(evidence, RULES, selected, all_repairs)) == repr(want)


@settings(max_examples=examples(40, 200))
@given(rows(), st.integers(0, 23), st.integers(0, 23), st.sampled_from(("TOK101", "MSK401", "LPR503", "LPR504")))
def test_the_mask_fits_a_finding_that_covers_a_trained_token(
    evidence: Evidence, a: int, b: int, code: str
) -> None:
    _, _, mask, _ = parts(evidence)
    start, end = min(a, b, len(mask)), min(max(a, b), len(mask))
    finding = Finding(code, Severity.ERROR, Place("made up", 0), Hit(Where.ROW, start, end, ""))
    repair = next(repair for repair in all_repairs() if repair.name == "mask")
    try:
        proposal = repair.mend(evidence, (finding,), RepairChoices())
    except RecordError:  # it says what it cannot do
        return
    assert repair.fits(evidence, finding) == (proposal is not None)


CALL_VALUES = (-0.5, -0.5, -0.7, -1e-4, 0.0, -0.0, -2.25, 1.0, -1000.0, -9999.0, np.nan, -np.inf)


@settings(max_examples=examples(60, 400))
@given(st.lists(st.lists(st.sampled_from(CALL_VALUES), max_size=12), min_size=1, max_size=4), st.booleans())
def test_calls_with_sound_logprobs_are_checked_as_by_asking_every_rule(
    columns: list[list[float]], apart: bool
) -> None:
    """With `apart`, values differ from their neighbours, as a sampler's do."""
    turns = []
    for column in columns:
        values = np.array(column) - (np.arange(len(column)) * 0.03 if apart else 0)
        ids = np.arange(10, 10 + len(values), dtype=np.int32)
        recorded, logged = build_call_columns(ids, logprobs=("logprobs", values))
        turns.append(Turn(ids[:2], ids, recorded, columns=logged))
    present = Needs.COMPLETIONS | Needs.COMPLETION_LOGPROBS | Needs.PROMPTS
    evidence = Evidence(Rollout(Place("made up", 0), "toy", turns=tuple(turns)), None, present)
    want = simple_check(replace(evidence, memo={}), RULES, frozenset(CODES))
    assert repr(check(evidence, RULES, frozenset(CODES))) == repr(want)
    sound = all(
        (len(column) < 2 or len(set(turn.completion_logprobs.tolist())) > 1) and min(column, default=0) > -1000
        for column, turn in zip(columns, turns, strict=True)
        if turn.completion_logprobs is not None
    )
    if sound and apart and all(max(column, default=-1) < 0 for column in columns) and any(columns):
        assert verified_parts(evidence) is Verified.LOGPROBS


WORDS = ("The", " answer", " is", " 4", "!", " ", "\n", "é", "\u4f60", "look_up", '{"a": 1}', "<|im_end|>")


@settings(max_examples=examples(60, 400))
@given(
    st.lists(st.tuples(st.lists(st.sampled_from(WORDS), max_size=6), st.booleans()), min_size=1, max_size=3),
    st.sampled_from(("", "look_up", "other")),
    st.sampled_from(("text", "message", "both")),
    st.integers(-2, 3),
)
def test_calls_that_spell_their_answer_are_found_so_by_every_way_to_decode_them(
    answers: list[tuple[list[str], bool]], tool: str, logged: str, cut: int
) -> None:
    tokenizer = toy.toy_tokenizer()
    turns, messages = [], []
    for number, (words, ended) in enumerate(answers):
        text = "".join(words)
        ids = tokenizer.encode(text + "<|im_end|>" * ended)
        ids = ids[: len(ids) + cut] if cut < 0 else ids
        wire: dict[str, Any] = {"role": "assistant", "content": text + "?" * (cut == 3)}
        if tool:
            wire["tool_calls"] = [{"function": {"name": tool, "arguments": "{}"}}]
        messages += as_messages([{"role": "user", "content": "Hi"}, wire], "messages")
        written = None if logged == "message" else text.strip() if cut == 2 else text
        index = None if logged == "text" else 2 * number + 1
        turns.append(Turn(ids[:0], ids, message_index=index, completion_text=written, finish_reason="stop"))
    present = Needs.COMPLETIONS | Needs.PROMPTS | Needs.MESSAGES
    rollout = Rollout(Place("made up", 0), "toy", tuple(messages), turns=tuple(turns))
    evidence = Evidence(
        rollout, tokenizer.vocabulary, present, end_ids=frozenset(tokenizer.encode("<|im_end|>").tolist())
    )
    slow = replace(evidence, memo={"spelled out": frozenset()})
    for code in ("REC005", "REC006"):
        assert repr(hits(code, evidence)) == repr(hits(code, slow))
    if cut in (0, 1) and not tool:
        plain = [number for number, (words, _) in enumerate(answers) if words and "".join(words).isascii()]
        assert spelled_calls(evidence) >= set(plain)


SPELLED = ("<think>", "</think>", "4", "\n", "<|im_end|>")


@settings(max_examples=examples(100, 1000))
@given(st.lists(st.sampled_from(SPELLED), max_size=8), st.lists(st.sampled_from(SPELLED), max_size=8), st.data())
def test_reasoning_around_a_difference_is_looked_for_only_where_a_block_ends(
    own: list[str], other: list[str], data: st.DataObject
) -> None:
    sides = []
    for words in (own, other):
        start, end = sorted((data.draw(st.integers(0, len(words))), data.draw(st.integers(0, len(words)))))
        ends = np.cumsum([len(word) for word in words], dtype=np.int64)
        control = np.array([word == "<|im_end|>" for word in words], np.bool_)
        pieces = Pieces(np.arange(len(words), dtype=np.int32), ends, "".join(words).encode(), control)
        sides.append(TextSide(pieces, start, end))
    recorded, canonical = sides
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_drift, "_FEW_BYTES", 0)
        want = _drift.changed_reasoning(*(replace(side) for side in sides))
    assert _drift.changed_reasoning(recorded, canonical) == want


@given(st.text())
def test_text_is_never_normalised_to_nothing(text: str) -> None:
    data = text.encode()
    assert find_normal_form(data, b"") is None
    assert find_normal_form(b"", data) is None


@given(st.lists(st.lists(st.sampled_from(VALUES), min_size=1, max_size=5), max_size=5))
def test_logprobs_are_summed_at_once_as_one_stretch_after_the_other(columns: list[list[float]]) -> None:
    want = []
    for column in columns:
        real = [value for value in column if -50 < value < 0]
        placeholder = len(column) > 1 and len(set(real)) == 1
        want.append(sum(real) if real and not placeholder else np.nan)
    assert _sum_logprobs(list(map(np.array, columns))) == pytest.approx(want, nan_ok=True)
