"""Mask and logprob rules on made-up rows: what they say holds for every mask and every column."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.tiers import examples
from tito_audit.evidence.judgement import row_mask_slide
from tito_audit.evidence.masks import left_out
from tito_audit.evidence.model import Evidence, RowView
from tito_audit.evidence.needs import Needs
from tito_audit.record.arrays import Logprobs, Mask
from tito_audit.record.build import build_call_columns, build_training_row
from tito_audit.record.finding import Hit, Where
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn
from tito_audit.rules import rule_of

PARTS = ("MSK401", "MSK402", "MSK404")
END = 7
"""The id that ends a turn in these rows."""


@dataclass(frozen=True)
class Shape:
    """A row as (given, sampled) lengths of its turns, with a tail that was given."""

    turns: tuple[tuple[int, int], ...]
    tail: int
    ends: bool
    """Whether each turn samples its end token."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        edges = np.cumsum([length for turn in self.turns for length in turn]).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))

    @property
    def length(self) -> int:
        return sum(map(sum, self.turns)) + self.tail

    def sampled(self) -> Mask:
        mask = np.zeros(self.length, np.bool_)
        for start, end in self.spans:
            mask[start:end] = True
        return mask

    def view(self, expected: Logprobs | None = None) -> RowView:
        turn, offset = np.full(self.length, -1, np.int32), np.full(self.length, -1, np.int32)
        roles = ["user"] * self.length
        for number, (start, end) in enumerate(self.spans):
            turn[start:end], offset[start:end] = number, np.arange(end - start)
            roles[start:end] = ["assistant"] * (end - start)
        return RowView(self.sampled(), True, tuple(roles), turn, offset, expected, np.zeros(self.length, np.bool_))

    def ids(self) -> np.ndarray:
        ids = np.arange(10, 10 + self.length, dtype=np.int32)
        if self.ends:
            ids[[end - 1 for _, end in self.spans]] = END
        return ids


@st.composite
def shapes(draw: st.DrawFn, least: int = 1) -> Shape:
    turns = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(least, 8)), min_size=1, max_size=4))
    return Shape(tuple(turns), draw(st.integers(0, 6)), draw(st.booleans()))


def evidence(shape: Shape, row: TrainingRow, expected: Logprobs | None = None) -> Evidence:
    rollout = Rollout(Place("made up", 0), "toy", training_row=row)
    present = Needs.ROW | Needs.MASK | Needs.SAMPLED | Needs.ROW_LOGPROBS
    return Evidence(rollout, None, present, end_ids=frozenset({END}), row=shape.view(expected))


def masked(shape: Shape, mask: Mask) -> Evidence:
    return evidence(shape, build_training_row(shape.ids(), mask=("loss_mask", mask)))


def scored(shape: Shape, logprobs: Logprobs, expected: Logprobs | None = None) -> Evidence:
    mask = ("loss_mask", shape.sampled())
    row = build_training_row(shape.ids(), mask=mask, logprobs=("logprobs", logprobs), sentinel=0.0)
    return evidence(shape, row, expected)


def completion(logprobs: Logprobs) -> Evidence:
    ids = np.arange(10, 10 + len(logprobs), dtype=np.int32)
    values, columns = build_call_columns(ids, logprobs=("logprobs", logprobs))
    turn = Turn(None, ids, values, columns=columns)
    return Evidence(Rollout(Place("made up", 0), "toy", turns=(turn,)), None, Needs.COMPLETION_LOGPROBS)


def hits(code: str, seen: Evidence) -> list[Hit]:
    rule = rule_of(code)
    assert rule is not None
    assert rule.check is not None
    return list(rule.check(seen))


def covered(impossible: list[Hit], length: int) -> Mask:
    """The positions inside hits, each in one hit only."""
    count = np.zeros(length, np.int64)
    for hit in impossible:
        count[hit.start : hit.end] += 1
    assert (count <= 1).all()
    return count == 1


def values_of(shape: Shape, seed: int) -> Logprobs:
    """A logprob for every sampled token, none like another, NaN elsewhere."""
    generator = np.random.default_rng(seed)
    values = np.where(shape.sampled(), -generator.permutation(shape.length) * 0.05 - 0.05, np.nan)
    return np.asarray(values, np.float64)


def with_zeros(values: Logprobs) -> Logprobs:
    return np.nan_to_num(values, nan=0.0)


@given(shapes())
def test_a_mask_of_what_was_sampled_is_never_flagged(shape: Shape) -> None:
    seen = masked(shape, shape.sampled())
    assert [hit for code in (*PARTS, "MSK403") for hit in hits(code, seen)] == []


@given(shapes(), st.data())
def test_the_mask_rules_cover_every_disagreement_exactly_once(shape: Shape, data: st.DataObject) -> None:
    flips = data.draw(st.lists(st.booleans(), min_size=shape.length, max_size=shape.length))
    mask = shape.sampled() ^ np.array(flips, np.bool_)
    seen = masked(shape, mask)
    parts = [hit for code in PARTS for hit in hits(code, seen)]
    if hits("MSK403", seen):
        assert parts == []
    else:
        left = left_out(seen)  # first or last tokens that the writer's convention leaves out of the loss
        meant = np.zeros(shape.length, np.bool_) if left is None or row_mask_slide(seen) else left.tokens
        assert np.array_equal(covered(parts, shape.length), (mask != shape.sampled()) & ~meant)


@given(shapes())
def test_an_inverted_mask_is_one_finding(shape: Shape) -> None:
    seen = masked(shape, ~shape.sampled())
    assert [(hit.start, hit.end, hit.cause) for hit in hits("MSK403", seen)] == [(0, shape.length, "inverted")]
    assert [hit for code in PARTS for hit in hits(code, seen)] == []


@given(shapes(least=3), st.sampled_from((1, -1)))
def test_a_mask_that_slid_says_how_far(shape: Shape, offset: int) -> None:
    assume(all(length > 1 for length, _ in shape.turns) and (offset < 0 or shape.tail))
    seen = masked(shape, np.roll(shape.sampled(), offset))
    slides = [hit for code in PARTS for hit in hits(code, seen)]
    assert slides
    assert {hit.cause for hit in slides} == {f"slid by {offset:+d}"}
    assert hits("MSK404", seen) == []


@given(shapes(), st.integers(0, 99), st.integers(0, 1))
def test_the_values_of_the_calls_are_never_flagged_however_rounded(shape: Shape, seed: int, rounded: int) -> None:
    expected = values_of(shape, seed)
    written = np.round(expected - 1e-5, 4) if rounded else expected
    assert hits("LPR502", scored(shape, with_zeros(written), expected)) == []


@settings(max_examples=examples(80, 200))
@given(shapes(least=4), st.integers(0, 99), st.sampled_from((1, 2, -1, -2)))
def test_a_shift_against_the_calls_is_found_in_every_turn_of_the_row(shape: Shape, seed: int, offset: int) -> None:
    expected = values_of(shape, seed)
    moved = np.zeros(shape.length)
    source = np.arange(shape.length) - offset
    inside = (source >= 0) & (source < shape.length)
    moved[inside] = with_zeros(expected)[source[inside]]
    shifts = hits("LPR502", scored(shape, moved, expected))
    assert [(hit.start, hit.end) for hit in shifts] == shape.spans
    assert {hit.cause for hit in shifts} == {f"shifted by {offset:+d}"}


@given(shapes(least=3), st.integers(0, 99), st.sampled_from((1, -1)))
def test_without_calls_a_shift_is_read_off_the_sentinels(shape: Shape, seed: int, offset: int) -> None:
    assume(offset < 0 or shape.tail)
    moved = np.roll(with_zeros(values_of(shape, seed)), offset)
    shifts = hits("LPR502", scored(shape, moved))
    assert [(hit.start, hit.end) for hit in shifts] == [(shape.spans[0][0], shape.spans[-1][1])]
    assert [hit.cause for hit in shifts] == [f"shifted by {offset:+d}"]


@given(shapes(), st.integers(0, 99))
def test_ordinary_logprobs_are_never_flagged(shape: Shape, seed: int) -> None:
    values = values_of(shape, seed)
    for code in ("LPR501", "LPR502", "LPR503", "LPR504", "LPR505", "LPR506"):
        assert hits(code, scored(shape, with_zeros(values))) == []
        assert hits(code, scored(shape, with_zeros(values), values)) == []
        assert hits(code, completion(values[shape.sampled()])) == []


BAD = st.sampled_from((np.nan, np.inf, -np.inf, 0.3, 7.0, 1.0, -9999.0))


@given(st.lists(st.one_of(st.floats(-9, -0.01), BAD), min_size=5, max_size=30))
def test_every_impossible_value_is_in_one_finding(values: list[float]) -> None:
    logprobs = np.array(values)
    # Most values are logprobs, so that 1.0 is a placeholder and not a value of another unit.
    assume(np.isfinite(logprobs).any() and (logprobs > 0).mean() < 0.4)
    seen = completion(logprobs)
    impossible = [hit for code in ("LPR503", "LPR504", "LPR505") for hit in hits(code, seen)]
    ordinary = np.isfinite(logprobs) & (logprobs <= 0) & (logprobs != -9999)
    assume(ordinary.sum() > (logprobs > 0).sum())
    assert np.array_equal(covered(impossible, len(logprobs)), ~ordinary)
    assert all(hit.where is Where.COMPLETION and hit.turn == 0 for hit in impossible)


@given(st.integers(1, 40), st.sampled_from((0.0, -0.7)))
def test_equal_values_are_flagged_from_the_length_on_that_the_rule_names(count: int, value: float) -> None:
    constant = hits("LPR506", completion(np.full(count, value)))
    assert bool(constant) == (count >= (8 if value == 0 else 4))


@given(st.integers(0, 12), st.integers(1, 6))
def test_a_column_of_another_length_is_counted(tokens: int, more: int) -> None:
    for length in (tokens + more, max(tokens - more, 0)):
        ids = np.arange(tokens, dtype=np.int32)
        _, columns = build_call_columns(ids, logprobs=("logprobs", np.full(length, -0.5)))
        rollout = Rollout(Place("made up", 0), "toy", turns=(Turn(None, ids, None, columns=columns),))
        counted = hits("LPR501", Evidence(rollout, None, Needs.COMPLETION_LOGPROBS))
        assert len(counted) == (tokens > 0 and length != tokens)
