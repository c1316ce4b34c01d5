"""Masks of very many runs: columns in place of objects give what objects do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.toy import toy_tokenizer
from tito_audit.evidence import trainings
from tito_audit.evidence.gather import gather
from tito_audit.evidence.logprobs import shifts
from tito_audit.evidence.run_spans import RunSpans, spans_of_runs
from tito_audit.evidence.trainings import trainings_of
from tito_audit.record import runs
from tito_audit.record.build import training_row
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.runs import ManyRuns, each_run, run_ends, trained_runs
from tito_audit.rules import all_rules
from tito_audit.run.check import check

masks = st.lists(st.booleans(), max_size=40).map(lambda bits: np.array(bits, np.bool_))
values = st.sampled_from([-0.5, -0.5, -0.25, -1.5, 0.0, 1.0, -9999.0, float("nan"), -60.0, 0.5])


@contextmanager
def many(least: int) -> Iterator[None]:
    """With columns for more than so many runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "MANY", least)
        patch.setattr(trainings, "MANY", least / 2)
        patch.setattr(trainings, "_AT_ONCE", 3)
        yield


@st.composite
def rows(draw: st.DrawFn) -> Rollout:
    """A training row whose mask has several runs, with values on them, or near them, and fill elsewhere."""
    source = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = 60
    mask = np.repeat(source.random(size) < 0.5, source.integers(1, 6, size))[:size]
    mask[0] = False
    sampled = source.choice(draw(st.lists(values, min_size=3, max_size=6)), size)
    on = np.roll(mask, draw(st.integers(-2, 2)))
    logprobs = np.where(on, sampled, draw(st.sampled_from([0.0, 1.0, float("nan")])))
    line = training_row(
        source.integers(200, 260, size).astype(np.int32),
        mask=("loss_mask", mask.astype(int).tolist()),
        logprobs=("logprobs", logprobs),
    )
    return Rollout(Place("row.jsonl", 0), "generic", training_row=line)


@given(masks)
def test_runs_are_the_same_as_columns(mask: Any) -> None:
    few = list(each_run(mask))
    assert trained_runs(mask) == few
    columns = ManyRuns.of(mask)
    assert (columns == few, list(columns), len(columns)) == (True, few, len(few))
    assert columns != [*few, (0, 1)]
    assert [columns[number] for number in range(len(few))] == few
    assert list(columns[1:]) == few[1:]
    assert list(columns.long(2)) == [run for run in few if run[1] - run[0] >= 2]
    with many(0):
        assert trained_runs(mask) == few
        assert run_ends(mask) == dict(few)
        assert [start for start in range(len(mask) + 1) if start in run_ends(mask)] == [start for start, _ in few]
        assert list(spans_of_runs(mask)) == (list(RunSpans(columns)) if few else [])


@given(masks, st.integers(-9, 9))
def test_runs_move_without_those_that_leave_the_row(mask: Any, far: int) -> None:
    wanted = np.zeros_like(mask)
    for start, end in each_run(mask):
        wanted[max(start + far, 0) : max(end + far, 0)] = True
    assert ManyRuns.of(mask).moved(far, len(mask)).tolist() == wanted.tolist()


@given(rows())
def test_a_row_of_many_runs_is_audited_as_one_of_few(rollout: Rollout) -> None:
    codes = frozenset(rule.code for rule in all_rules())

    def audited() -> Any:
        evidence = gather(rollout, toy_tokenizer(), None)
        return trainings_of(rollout), shifts(evidence), check(evidence, all_rules(), codes)

    few = audited()
    with many(1):
        assert audited() == few
