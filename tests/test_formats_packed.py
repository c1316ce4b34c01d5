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

from tests.forms import as_table, plain, spliced
from tests.tiers import examples
from tito_audit import Settings, convert_rollouts, scan_rollouts
from tito_audit.errors import RecordError
from tito_audit.formats import pick_format
from tito_audit.record.moved import moved_row
from tito_audit.record.repaired import RepairedRollout, unmended
from tito_audit.record.rollout import Place, Rollout, TrainingRow

PLACE = Place("log.jsonl", 0)
Json = dict[str, Any]

FIRST = {"token_ids": [1, 11, 12, 21, 2], "loss_mask": [0, 0, 0, 1, 1], "logprobs": [0.0, 0.0, 0.0, -0.5, -0.1]}
SECOND = {
    "token_ids": [1, 13, 22, 23, 2, 14],
    "loss_mask": [0, 0, 1, 1, 1, 0],
    "logprobs": [0.0, 0.0, -1, -2, -3, 0],
}
THIRD = {"token_ids": [1, 15, 24], "loss_mask": [0, 0, 1], "logprobs": [0.0, 0.0, -4.0]}
SAMPLES = [FIRST, SECOND, THIRD]


def said(lengths: Sequence[int], how: str, padding: int = 0) -> Json:
    """The column that says where samples of these lengths end."""
    each = list(enumerate(lengths, 1))
    pad = [0] * padding
    return {
        "lengths": {"seq_lens": list(lengths)},
        "sequence_lengths": {"sequence_lengths": list(lengths)},
        "bounds": {"cu_seqlens": [0, *accumulate(lengths)]},
        "long bounds": {"cu_seqlens": [0, *accumulate(lengths), sum(lengths), sum(lengths)]},
        "positions": {"position_ids": [at for n in lengths for at in range(n)] + pad},
        "segments": {"segment_ids": [number for number, n in each for _ in range(n)] + pad},
        "documents": {"document_ids": [number + 5 for number, n in each for _ in range(n)] + [-1] * padding},
        "attention": {"attention_mask": [number for number, n in each for _ in range(n)] + pad},
        "both": {
            "position_ids": [at for n in lengths for at in range(n)] + pad,
            "sample_lengths": list(lengths),
            "attention_mask": [1] * sum(lengths) + pad,
        },
    }[how]


WAYS = (
    "lengths",
    "sequence_lengths",
    "bounds",
    "long bounds",
    "positions",
    "segments",
    "documents",
    "attention",
    "both",
)


def packed(samples: Sequence[Mapping[str, Any]], how: str, padding: int = 0, **more: Any) -> Json:
    row: Json = {}
    for name, fill in (("token_ids", 9), ("loss_mask", 0), ("logprobs", 0.0)):
        if all(name in sample for sample in samples):
            row[name] = [entry for sample in samples for entry in sample[name]] + [fill] * padding
    return {**row, **said([len(sample["token_ids"]) for sample in samples], how, padding), **more}


def read(row: Mapping[str, Any]) -> Sequence[Rollout]:
    return pick_format(row).read(row, PLACE)


def rows_of(row: Mapping[str, Any]) -> list[TrainingRow]:
    found = [rollout.training_row for rollout in read(row)]
    assert all(one is not None for one in found)
    return [one for one in found if one is not None]


def assert_same(one: TrainingRow, other: TrainingRow) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    for name in ("loss_mask", "logprobs"):
        left, right = getattr(one, name), getattr(other, name)
        assert (left is None) == (right is None)
        if left is not None:
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("as_read", [lambda row: row, as_table], ids=["json", "table"])
@pytest.mark.parametrize("padding", [0, 1, 3])
def test_each_sample_reads_as_it_would_by_itself(how: str, as_read: Any, padding: int) -> None:
    row = as_read(packed(SAMPLES, how, padding))
    rollouts = read(row)
    assert [rollout.place.item for rollout in rollouts] == [0, 1, 2]
    for sample, found in zip(SAMPLES, rows_of(row), strict=True):
        (alone,) = rows_of(as_read(sample))
        assert_same(found, alone)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("as_read", [lambda row: row, as_table], ids=["json", "table"])
def test_a_packed_row_in_which_nothing_changed_is_the_row_itself(how: str, as_read: Any) -> None:
    for padding in (0, 2):
        row = as_read(packed(SAMPLES, how, padding, rewards=[1.0, 0.0, 0.5], model="m", num_tokens=14))
        before = copy.deepcopy(plain(row))
        (new,) = pick_format(row).update(row, [unmended(rollout) for rollout in read(row)])
        assert new is row
        assert plain(row) == before


def changed(row: Json, item: int, made: TrainingRow) -> Json:
    mended = [unmended(rollout) for rollout in read(row)]
    mended[item] = RepairedRollout(replace(mended[item].rollout, training_row=made), ())
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
    for number, found in enumerate(rows_of(new)):
        assert_same(found, wanted if number == item else old[number])
    lengths = [len(one.token_ids) for one in rows_of(new)]
    assert lengths == [len(one.token_ids) for one in (*old[:item], wanted, *old[item + 1 :])]
    for name, value in said(lengths, how, padding).items():
        assert new[name] == value, name
    assert json.loads(json.dumps(new)) == new


def test_a_mask_and_logprobs_of_one_sample_change_alone() -> None:
    row = packed(SAMPLES, "positions", advantages=[0.5] * 14)
    old = rows_of(row)[1]
    mask = np.array([False] * 3 + [True] * 3)
    same = np.arange(len(old.token_ids))
    new = changed(row, 1, moved_row(old, old.token_ids, same, loss_mask=mask, logprobs=old.logprobs).row)
    assert new["loss_mask"] == [0, 0, 0, 1, 1, *[0, 0, 0, 1, 1, 1], 0, 0, 1]
    assert [name for name in row if new[name] is not row[name]] == ["loss_mask"]


def test_what_a_row_has_once_a_sample_goes_to_its_sample() -> None:
    talks = [[{"role": "user", "content": str(n)}, {"role": "assistant", "content": "!"}] for n in range(3)]
    row = packed(SAMPLES, "lengths", messages=talks, prompt_lengths=[3, 2, 2], group_id=7, model="org/model")
    for number, rollout in enumerate(read(row)):
        assert [message.text for message in rollout.messages] == [str(number), "!"]
        assert rollout.training_row is not None
        assert rollout.training_row.prompt_length == (3, 2, 2)[number]
        assert (rollout.stated.model, rollout.stated.group) == ("org/model", 7)
    assert all(not one.messages for one in read({**row, "messages": talks[0]}))
    assert [len(one.messages) for one in read({**row, "messages": json.dumps(talks)})] == [2, 2, 2]
    wanted = spliced(rows_of(row)[1], 1, 2, [31, 32])
    assert changed(row, 1, wanted)["prompt_lengths"] == [3, 3, 2]


def test_logprobs_of_trained_tokens_only_are_cut_by_what_each_sample_trains() -> None:
    row = packed(SAMPLES, "positions")
    row["logprobs"] = [value for value in row["logprobs"] if value]
    assert [one.logprobs[one.loss_mask].tolist() for one in rows_of(row)] == [[-0.5, -0.1], [-1, -2, -3], [-4]]  # type: ignore[index]
    (same,) = pick_format(row).update(row, [unmended(rollout) for rollout in read(row)])
    assert same is row


ONE = [
    {"position_ids": list(range(14))},
    {"position_ids": [0, 0, 0, *range(11)]},
    {"position_ids": [*range(11), 0, 0, 0]},
    {"position_ids": [*range(11), 1, 1, 1]},
    {"position_ids": [*range(13), 0]},
    {"position_ids": [1, 1, *range(12)], "attention_mask": [0, 0] + [1] * 12},
    {"position_ids": [*range(5, 19)]},
    {"position_ids": [0, 2, 1, 0, *range(10)]},
    {"position_ids": [[*range(14)]] * 3},
    {"position_ids": None},
    {"seq_lens": [14]},
    {"cu_seqlens": [0, 14]},
    {"segment_ids": [1] * 14},
    {"segment_ids": [0, 0, 0, 1, 1, 0, 0, 2, 2, 2, 0, 0, 0, 3]},
    {"segment_ids": [0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4, 5]},
    {"attention_mask": [1] * 14},
    {"length": 14},
    {"segment_ids": [1] * 5 + [2] * 9, "messages": [{"role": "user", "content": "?"}]},
]


@pytest.mark.parametrize("more", ONE, ids=str)
def test_one_sample_stays_one(more: Json) -> None:
    row = {**packed(SAMPLES, "positions"), "position_ids": None, **more}
    assert len(read(row)) == 1


BROKEN = [
    ({"seq_lens": [5, 6, 4]}, "seq_lens counts 15 tokens in 3 samples, but the row holds 14"),
    ({"cu_seqlens": [0, 5, 16]}, "cu_seqlens ends at token 16, but the row holds 14"),
    ({"seq_lens": [5, 5, 4], "cu_seqlens": [0, 5, 11, 14]}, "seq_lens and cu_seqlens cut the row into different"),
    ({"seq_lens": [5, 6]}, "3 tokens of the row are in none of the 2 samples that seq_lens counts"),
]


@pytest.mark.parametrize(("more", "says"), BROKEN)
def test_columns_that_cut_a_row_where_it_cannot_be_are_refused_in_words(more: Json, says: str) -> None:
    row = {**packed(SAMPLES, "positions"), "position_ids": None, **more}
    with pytest.raises(RecordError, match=says):
        read(row)


def test_a_sample_is_named_when_it_cannot_be_read() -> None:
    row = packed(SAMPLES, "lengths")
    row["token_ids"][7] = "22"
    with pytest.raises(RecordError, match=r"^sample 1: .*position 2"):
        read(row)


def test_logprobs_that_fit_no_sample_are_counted_against_the_row(tmp_path: Path) -> None:
    row = packed(SAMPLES, "positions")
    row["logprobs"] = row["logprobs"][:-2]
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(row))
    (result,) = scan_rollouts([str(log)], Settings())
    assert [finding.code for finding in result.findings if finding.severity.word == "error"] == ["LPR501"]
    (same,) = pick_format(row).update(row, [unmended(rollout) for rollout in read(row)])
    assert same is row


def test_each_sample_of_a_packed_row_is_audited_and_named(tmp_path: Path) -> None:
    row = packed(SAMPLES, "positions")
    row["logprobs"][13] = None
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(row))
    results = list(scan_rollouts([str(log)], Settings()))
    assert len(results) == 3
    (finding,) = [one for result in results for one in result.findings]
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
    assert [one.token_ids.tolist() for one in old] == [ids for ids, _ in drawn]
    item = data.draw(st.integers(0, len(old) - 1))
    wanted = spliced(old[item], 0, 1, data.draw(st.lists(st.integers(3, 99), min_size=1, max_size=4)))
    for number, found in enumerate(rows_of(changed(row, item, wanted))):
        assert_same(found, wanted if number == item else old[number])


def test_rows_of_trainers_that_pack_are_taken_apart_too() -> None:
    areal = {**packed(SAMPLES, "bounds"), "versions": [3] * 14}
    areal["input_ids"] = areal.pop("token_ids")
    stack = {**packed(SAMPLES, "positions"), "rollout_log_probs": [-0.5] * 14, "status": None, "response": "x"}
    stack["tokens"] = stack.pop("token_ids")
    stack["loss_mask"] = [float(one) for one in stack["loss_mask"]]
    for name, row in (("areal", areal), ("tito_sample", stack)):
        assert pick_format(row).name == name
        found = rows_of(row)
        assert [one.token_ids.tolist() for one in found] == [sample["token_ids"] for sample in SAMPLES]
        (same,) = pick_format(row).update(row, [unmended(rollout) for rollout in read(row)])
        assert same is row
        wanted = spliced(found[1], 1, 2, [31, 32])
        assert [len(one.token_ids) for one in rows_of(changed(row, 1, wanted))] == [5, 7, 3]


def test_packed_rows_are_converted_sample_by_sample_with_what_each_has(tmp_path: Path) -> None:
    for how in WAYS:
        log, out = tmp_path / "log.jsonl", tmp_path / "out.jsonl"
        log.write_text(json.dumps(packed(SAMPLES, how, 1, rewards=[1.0, 2.0, 3.0])))
        carried = convert_rollouts(log, "rows", out, overwrite=True).carried
        assert (carried.lost, carried.repeated, carried.refused) == ({}, {}, []), how
        made = [json.loads(line) for line in out.read_text().splitlines()]
        assert [(row["token_ids"], row["rewards"]) for row in made] == [
            (sample["token_ids"], reward) for sample, reward in zip(SAMPLES, (1.0, 2.0, 3.0), strict=True)
        ]
