"""Several samples in one row: each a rollout with its own part of every column, written back into its place."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.command import written
from tests.forms import PLACE, as_table, plain, spliced, trained_row
from tests.tiers import examples
from tests.world import lines_of
from tito_audit import Settings, convert_rollouts, scan_rollouts
from tito_audit.formats import pick_format
from tito_audit.record.repaired import RepairedRollout, unrepaired
from tito_audit.record.rollout import Rollout, TrainingRow

Json = dict[str, Any]

FIRST = {"token_ids": [1, 11, 12, 21, 2], "loss_mask": [0, 0, 0, 1, 1], "logprobs": [0.0, 0.0, 0.0, -0.5, -0.1]}
SECOND = {
    "token_ids": [1, 13, 22, 23, 2, 14],
    "loss_mask": [0, 0, 1, 1, 1, 0],
    "logprobs": [0.0, 0.0, -1, -2, -3, 0],
}
THIRD = {"token_ids": [1, 15, 24], "loss_mask": [0, 0, 1], "logprobs": [0.0, 0.0, -4.0]}
SAMPLES = [FIRST, SECOND, THIRD]


def length_columns(lengths: Sequence[int], padding: int = 0) -> dict[str, Json]:
    """By their kind, the columns that say where samples of these lengths end."""
    each = list(enumerate(lengths, 1))
    pad = [0] * padding
    positions = [at for n in lengths for at in range(n)] + pad
    return {
        "lengths": {"seq_lens": list(lengths)},
        "sequence_lengths": {"sequence_lengths": list(lengths)},
        "bounds": {"cu_seqlens": [0, *accumulate(lengths)]},
        "long bounds": {"cu_seqlens": [0, *accumulate(lengths), sum(lengths), sum(lengths)]},
        "positions": {"position_ids": positions},
        "segments": {"segment_ids": [number for number, n in each for _ in range(n)] + pad},
        "documents": {"document_ids": [number + 5 for number, n in each for _ in range(n)] + [-1] * padding},
        "attention": {"attention_mask": [number for number, n in each for _ in range(n)] + pad},
        "both": {
            "position_ids": positions,
            "sample_lengths": list(lengths),
            "attention_mask": [1] * sum(lengths) + pad,
        },
    }


WAYS = tuple(length_columns([]))


def packed(samples: Sequence[Mapping[str, Any]], how: str, padding: int = 0, **more: Any) -> Json:
    row: Json = {}
    for name, fill in (("token_ids", 9), ("loss_mask", 0), ("logprobs", 0.0)):
        if all(name in sample for sample in samples):
            row[name] = [entry for sample in samples for entry in sample[name]] + [fill] * padding
    return {**row, **length_columns([len(sample["token_ids"]) for sample in samples], padding)[how], **more}


def read(row: Mapping[str, Any]) -> Sequence[Rollout]:
    return pick_format(row).read(row, PLACE)


def rows_of(row: Mapping[str, Any]) -> list[TrainingRow]:
    return [trained_row(row, item) for item in range(len(read(row)))]


def assert_same(row: TrainingRow, other: TrainingRow) -> None:
    assert row.token_ids.tolist() == other.token_ids.tolist()
    for name in ("loss_mask", "logprobs"):
        left, right = getattr(row, name), getattr(other, name)
        assert (left is None) == (right is None)
        if left is not None:
            np.testing.assert_array_equal(left, right)


in_both_shapes = pytest.mark.parametrize("as_read", [lambda row: row, as_table], ids=["json", "table"])


@pytest.mark.parametrize("how", WAYS)
@in_both_shapes
@pytest.mark.parametrize("padding", [0, 1, 3])
def test_each_sample_reads_as_it_would_by_itself(how: str, as_read: Any, padding: int) -> None:
    row = as_read(packed(SAMPLES, how, padding))
    rollouts = read(row)
    assert [rollout.place.item for rollout in rollouts] == [0, 1, 2]
    for sample, row_read in zip(SAMPLES, rows_of(row), strict=True):
        (alone,) = rows_of(as_read(sample))
        assert_same(row_read, alone)


@pytest.mark.parametrize("how", WAYS)
@in_both_shapes
def test_a_packed_row_in_which_nothing_changed_is_the_row_itself(how: str, as_read: Any) -> None:
    for padding in (0, 2):
        row = as_read(packed(SAMPLES, how, padding, rewards=[1.0, 0.0, 0.5], model="m", num_tokens=14))
        before = copy.deepcopy(plain(row))
        (new,) = pick_format(row).update(row, [unrepaired(rollout) for rollout in read(row)])
        assert new is row
        assert plain(row) == before


def changed(row: Json, item: int, mended_row: TrainingRow) -> Json:
    mended = [unrepaired(rollout) for rollout in read(row)]
    mended[item] = RepairedRollout(replace(mended[item].rollout, training_row=mended_row), ())
    (new,) = pick_format(row).update(row, mended)
    return dict(new)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("item", [0, 1, 2])
@pytest.mark.parametrize("ids", [[], [31], [31, 32], [31, 32, 33, 34]])
@pytest.mark.parametrize("padding", [0, 2])
def test_a_sample_that_changes_its_length_leaves_the_others_as_they_were(
    how: str, item: int, ids: list[int], padding: int
) -> None:
    row = packed(SAMPLES, how, padding)
    old = rows_of(row)
    wanted = spliced(old[item], 1, 2, ids)
    new = changed(row, item, wanted)
    for number, row_read in enumerate(rows_of(new)):
        assert_same(row_read, wanted if number == item else old[number])
    lengths = [len(row_read.token_ids) for row_read in rows_of(new)]
    assert lengths == [len(row_read.token_ids) for row_read in (*old[:item], wanted, *old[item + 1 :])]
    for name, value in length_columns(lengths, padding)[how].items():
        assert new[name] == value, name
    assert json.loads(json.dumps(new)) == new


def test_logprobs_that_fit_no_sample_are_counted_against_the_row(tmp_path: Path) -> None:
    row = packed(SAMPLES, "positions")
    row["logprobs"] = row["logprobs"][:-2]
    (result,) = scan_rollouts(written(tmp_path / "log.jsonl", [row]), Settings())
    assert [finding.code for finding in result.findings if finding.severity.word == "error"] == ["LPR501"]
    (same,) = pick_format(row).update(row, [unrepaired(rollout) for rollout in read(row)])
    assert same is row


def test_each_sample_of_a_packed_row_is_audited_and_named(tmp_path: Path) -> None:
    row = packed(SAMPLES, "positions")
    row["logprobs"][13] = None
    results = list(scan_rollouts(written(tmp_path / "log.jsonl", [row]), Settings()))
    assert len(results) == 3
    (finding,) = [finding for result in results for finding in result.findings]
    assert (finding.code, finding.place.item, finding.hit.start) == ("LPR503", 2, 2)


samples = st.lists(
    st.integers(2, 6).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(3, 99), min_size=n, max_size=n),
            st.lists(st.booleans(), min_size=n - 1, max_size=n - 1).map(lambda some: [0, *map(int, some)]),
        )
    ),
    min_size=2,
    max_size=5,
)


@given(samples, st.sampled_from(WAYS), st.integers(0, 3), st.data())
@settings(max_examples=examples(40, 150), deadline=None)
def test_whatever_is_packed_is_read_and_written_sample_by_sample(
    drawn: list[tuple[list[int], list[int]]], how: str, padding: int, data: st.DataObject
) -> None:
    plain_rows = [{"token_ids": ids, "loss_mask": mask} for ids, mask in drawn]
    if how in ("segments", "documents", "attention"):
        # Numbers that only repeat what is trained are those of turns.
        plain_rows[0]["loss_mask"] = [0] * (len(plain_rows[0]["token_ids"]) - 1) + [1]
    row = packed(plain_rows, how, padding)
    old = rows_of(row)
    assert [row_read.token_ids.tolist() for row_read in old] == [ids for ids, _ in drawn]
    item = data.draw(st.integers(0, len(old) - 1))
    wanted = spliced(old[item], 0, 1, data.draw(st.lists(st.integers(3, 99), min_size=1, max_size=4)))
    for number, row_read in enumerate(rows_of(changed(row, item, wanted))):
        assert_same(row_read, wanted if number == item else old[number])


def test_packed_rows_are_converted_sample_by_sample_with_what_each_has(tmp_path: Path) -> None:
    for how in WAYS:
        out = tmp_path / "out.jsonl"
        log = written(tmp_path / "log.jsonl", [packed(SAMPLES, how, 1, rewards=[1.0, 2.0, 3.0])])
        carried = convert_rollouts(log, "rows", out, overwrite=True).carried
        assert (carried.lost, carried.repeated, carried.refused) == ({}, {}, []), how
        assert [(row["token_ids"], row["rewards"]) for row in lines_of(out)] == [
            (sample["token_ids"], reward) for sample, reward in zip(SAMPLES, (1.0, 2.0, 3.0), strict=True)
        ]
