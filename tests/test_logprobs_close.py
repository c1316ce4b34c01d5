"""Two samplings or scorings of the same ids: how far they differ, and where outputs part."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tito_audit
from tests.replay_paths import RECORDED
from tito_audit.provider import GenerationResult, ScoredTokens
from tito_audit.rescore.close import BFLOAT16, FLOAT32, THRESHOLDS, check_logprobs_close

LOGPROBS = st.floats(-30, 0)
PAIRS = st.lists(st.tuples(st.integers(0, 9), LOGPROBS, LOGPROBS), min_size=1, max_size=12)


def score(ids, logprobs, start=1, tops=None):
    return ScoredTokens(tuple(ids), start, tuple(logprobs), tops)


def answer(prompt, output, logprobs, tops=None):
    return GenerationResult(tuple(prompt), tuple(output), tuple(logprobs), tops)


@given(PAIRS, st.integers(1, 5), st.floats(0, 3), st.floats(0, 0.5))
def test_each_number_is_what_a_slow_count_gives(pairs, prompt, atol, rtol):
    ids, a, b = zip(*pairs, strict=True)
    check = check_logprobs_close(
        answer([7] * prompt, ids, a), score([7] * prompt + list(ids), b, prompt), atol=atol, rtol=rtol
    )
    gaps = [y - x for x, y in zip(a, b, strict=True)]
    assert check.tokens == len(pairs)
    assert check.outside == sum(abs(y - x) > atol + rtol * abs(y) for x, y in zip(a, b, strict=True))
    assert check.close == (check.outside == 0)
    assert check.mean == pytest.approx(sum(map(abs, gaps)) / len(gaps))
    assert check.largest == max(map(abs, gaps))
    assert check.k1 == pytest.approx(-sum(gaps) / len(gaps))
    assert check.k3 == pytest.approx(sum(math.exp(gap) - 1 - gap for gap in gaps) / len(gaps), rel=1e-9, abs=1e-9)
    assert [edge for edge, _ in check.above] == list(THRESHOLDS)
    for edge, share in check.above:
        assert share == pytest.approx(sum(abs(gap) > edge for gap in gaps) / len(gaps))
    ordered = sorted(range(len(gaps)), key=lambda at: -abs(gaps[at]))
    assert [gap.position - prompt for gap in check.worst] == [at for at in ordered[:5] if gaps[at]]
    for gap in check.worst:
        at = gap.position - prompt
        assert (gap.token_id, gap.a, gap.b) == (ids[at], a[at], b[at])


def test_only_what_both_sides_scored_is_compared():
    ids = [1, 2, 3, 4, 5]
    early, late = score(ids, [-1, -2, -3, -4]), score(ids, [-3.5, -4], 3)
    assert (check := check_logprobs_close(early, late)).tokens == 2
    assert (check.largest, check.worst[0].position) == (0.5, 3)
    assert check_logprobs_close(late, early).k1 == -check.k1
    with pytest.raises(ValueError, match="no token has logprobs on both sides: they begin at 1 and 5"):
        check_logprobs_close(early, score(ids, [], 5))


def test_values_that_are_no_numbers_are_not_close():
    check = check_logprobs_close(score([1, 2, 3], [-1, math.nan]), score([1, 2, 3], [-1, -2]))
    assert (check.close, check.outside) == (False, 1)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (score([1, 2, 4], [-1, -1]), "not the same, from position 2: 3 and 4"),
        (score([1, 2], [-1]), "one side has 3 of them, the other 2"),
        (answer([1, 9], [3], [-1], (((3, -1.0),),)), "not the same, from position 1: 2 and 9"),
        (answer([1], [5, 3], [-1, -1], (((5, -1.0),),) * 2), "not the same, from position 1"),
    ],
)
def test_other_ids_are_named(other, message):
    with pytest.raises(ValueError, match=message):
        check_logprobs_close(score([1, 2, 3], [-1, -1]), other)


@pytest.mark.parametrize(("a_likely", "b_likely"), [(True, True), (True, False), (False, True), (False, False)])
def test_outputs_may_part_where_each_pick_is_likely_on_the_other_side(a_likely, b_likely):
    same = ((8, -0.1), (9, -2.5))
    a = answer([1, 2], [8, 5, 7], [-0.1, -0.6, -1], (same, ((5, -0.6), (6 if b_likely else 3, -0.7)), same))
    b = answer([1, 2], [8, 6], [-0.1001, -0.6], (same, ((6, -0.6), (5 if a_likely else 4, -0.7))))
    check = check_logprobs_close(a, b)
    part = check.first_difference
    assert (part.position, part.a, part.b) == (3, 5, 6)
    assert (part.a_is_likely_in_b, part.b_is_likely_in_a) == (a_likely, b_likely)
    assert check.tokens == 1
    assert check.close == (a_likely and b_likely)
    assert not check_logprobs_close(a, b, atol=1e-6).close
    words = "both picks are likely" if check.close else f"id {6 if a_likely else 5} is not likely"
    assert f"diverge at token 3 (ids 5 and 6): {words}" in str(check)


def test_outputs_that_part_without_alternatives_are_refused():
    a, b = answer([1], [2, 3], [-1, -1]), answer([1], [2, 4], [-1, -1])
    with pytest.raises(ValueError, match="position 2: 3 and 4; sample both with top_logprobs"):
        check_logprobs_close(a, b)
    first = ((3, -1.0), (4, -1.0))
    a, b = (replace(side, input_ids=(1, 2), output_ids=side.output_ids[1:]) for side in (a, b))
    check = check_logprobs_close(replace(a, top_logprobs=(first,)), replace(b, top_logprobs=(first,)))
    assert (check.close, check.tokens) == (True, 0)


def test_it_says_what_it_found():
    check = check_logprobs_close(score([1, 2, 3], [-1, -2]), score([1, 2, 3], [-1, -2.5]))
    assert str(check).splitlines() == [
        "2 tokens, 1 outside the tolerance: mean |difference| 0.25, largest 0.5, k1 0.25, k3 0.0533",
        "  token 2 (id 3): -2 and -2.5",
    ]


def test_it_is_public():
    assert tito_audit.check_logprobs_close is check_logprobs_close


@pytest.mark.shared
@pytest.mark.skipif(not RECORDED.is_dir(), reason=f"no recorded answers at {RECORDED}")
@pytest.mark.parametrize(
    ("log", "bound", "tokens", "mean", "largest"),
    [("rescored-float32", FLOAT32, 3153, 6.5e-6, 5.8e-5), ("rescored-bfloat16", BFLOAT16, 1576, 0.038, 0.33)],
)
def test_the_tolerances_are_above_what_was_measured(log, bound, tokens, mean, largest):
    lines = (RECORDED.parent / f"{log}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    checks = []
    for row in rows:
        ids, start = row["prompt_ids"] + row["completion_ids"], len(row["prompt_ids"])
        sampled = answer(row["prompt_ids"], row["completion_ids"], row["sampled"])
        checks.append(check_logprobs_close(sampled, score(ids, row["hf_float32"], start), atol=bound))
        assert check_logprobs_close(sampled, score(ids, row["vllm_prompt_logprobs"], start)).close
    assert all(check.close for check in checks)
    assert sum(check.tokens for check in checks) == tokens
    assert sum(check.mean * check.tokens for check in checks) / tokens == pytest.approx(mean, rel=0.02)
    assert max(check.largest for check in checks) == pytest.approx(largest, rel=0.02)
