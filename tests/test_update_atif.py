"""ATIF, Harbor, rLLM, tinker and batches written again: every copy of what changed, and nothing else."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.forms import as_table, plain, trained_row
from tests.frameworks.ask import asked, written
from tests.world import FORMATS, TOY
from tito_audit import read_rollouts, write_rollouts
from tito_audit.errors import RecordError
from tito_audit.format import Row
from tito_audit.formats import format_named, pick_format
from tito_audit.record.column import ColumnRole
from tito_audit.record.edits import edits_between
from tito_audit.record.moved import moved_row
from tito_audit.record.repaired import RepairedRollout, unmended
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn
from tito_audit.run.repair import repair_rollouts
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import open_log

pytestmark = pytest.mark.usefixtures("loaded_once")

PLACE = Place("log.json", 0)
CALLS = ("atif", "harbor", "rllm_episode", "rllm_gateway")
BATCHES = ("areal", "skyrl_generator", "trl_rollout", "verl_batch")


def file_of(name: str) -> Path:
    (path,) = FORMATS.glob(f"{name}.json*")
    return path


def rows_of(name: str) -> list[dict[str, Any]]:
    return [dict(raw.value or {}) for raw in open_log(file_of(name))]


def row_named(name: str, label: str) -> dict[str, Any]:
    keys = ("session_id", "trial_name", "name", "trace_id", "id")
    return next(row for row in rows_of(name) if label in {row.get(key) for key in keys})


def changed(row: Row, item: int = 0, number: int = 0, **changes: Any) -> Row:
    """The row with one call of one of its rollouts replaced in these fields."""
    form = pick_format(row)
    mended = [unmended(rollout) for rollout in form.read(row, PLACE)]
    rollout = mended[item].rollout
    turns = list(rollout.turns)
    turns[number] = replace(turns[number], **changes)
    mended[item] = RepairedRollout(replace(rollout, turns=tuple(turns)), mended[item].turns_from)
    (new,) = form.update(row, mended)
    return new


def rowed(row: Row, make: Callable[[TrainingRow], TrainingRow], item: int = 0) -> Row:
    """The row with the training row of one rollout replaced."""
    form = pick_format(row)
    mended = [unmended(rollout) for rollout in form.read(row, PLACE)]
    old = mended[item].rollout.training_row
    assert old is not None
    mended[item] = RepairedRollout(replace(mended[item].rollout, training_row=make(old)), mended[item].turns_from)
    (new,) = form.update(row, mended)
    return new


def turn_of(row: Row, item: int = 0, number: int = 0) -> Turn:
    return pick_format(row).read(row, PLACE)[item].turns[number]


def longer(turn: Turn) -> Any:
    assert turn.prompt_ids is not None
    return np.append(turn.prompt_ids, np.int32(7001))


def split(row: TrainingRow, at: int) -> TrainingRow:
    """The row with two other tokens in place of one, untrained and without logprobs."""
    source = np.concatenate([np.arange(at), [-1, -1], np.arange(at + 1, len(row.token_ids))]).astype(np.int64)
    ids = np.where(source >= 0, row.token_ids[source], np.int32(7001)).astype(np.int32)
    mask = None if row.loss_mask is None else np.where(source >= 0, row.loss_mask[source], False)
    logprobs = None if row.logprobs is None else np.where(source >= 0, row.logprobs[source], 0.0)
    return moved_row(row, ids, source, loss_mask=mask, logprobs=logprobs).row


# Files


@pytest.mark.parametrize("name", ["atif", "harbor", "rllm_episode"])
def test_a_document_in_which_nothing_changed_has_the_same_bytes(name: str, tmp_path: Path) -> None:
    log, out = file_of(name), tmp_path / "out.json"
    assert write_rollouts(log, read_rollouts(log), out) == 0
    assert out.read_bytes() == log.read_bytes()


def cured(log: Path, out: Path, *, provenance: bool = True) -> set[str]:
    """The codes that `splice` cured in a log."""
    how = RepairSettings(strategies=("splice",), unsafe=True, provenance=provenance)
    outcomes = list(repair_rollouts(log, out, Settings(tokenizer=str(TOY)), how))
    return {code for outcome in outcomes for codes in outcome.cured.values() for code in codes}


@pytest.mark.parametrize("name", ["atif", "harbor", "rllm_episode"])
def test_a_repaired_prompt_changes_its_own_lines_only(name: str, tmp_path: Path) -> None:
    log, out = file_of(name), tmp_path / "out.json"
    assert cured(log, out, provenance=False) == {"SEQ301", "TOK101"}
    before, after = log.read_text().splitlines(), out.read_text().splitlines()
    # rLLM writes each number on a line of its own, and one token became two.
    assert len(after) == len(before) + (name == "rllm_episode")
    gone = [line for line in difflib.unified_diff(before, after, n=0) if line.startswith("-")]
    # The header, the ids, and the counts of a call and of all calls.
    assert len(gone) == 1 + {"atif": 3, "harbor": 2, "rllm_episode": 1}[name]
    rows = [dict(raw.value or {}) for raw in open_log(out)]
    edits = [list(edits_between(a, b)) for a, b in zip(rows_of(name), rows, strict=True)]
    assert sum(map(bool, edits)) == 1


def test_what_a_repair_says_of_itself_is_where_the_models_of_atif_allow_it(tmp_path: Path) -> None:
    log, out = tmp_path / "log.json", tmp_path / "out.json"
    row = row_named("atif", "prefix-broken-by-retokenization")
    log.write_text(json.dumps({**row, "extra": {"mine": 1}}, indent=2))
    assert cured(log, out)
    (raw,) = open_log(out)
    assert raw.value is not None
    assert list(raw.value) == [*row, "extra"]
    assert raw.value["extra"]["mine"] == 1
    assert raw.value["extra"]["tito_audit"]["cured"] == {"splice": ["SEQ301", "TOK101"]}


# Calls


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("as_read", [lambda row: row, as_table], ids=["json", "table"])
def test_a_prompt_that_changed_is_read_again_as_it_was_meant(name: str, as_read: Callable[[Any], Any]) -> None:
    told = 0
    for row in map(as_read, rows_of(name)):
        for item, rollout in enumerate(pick_format(row).read(row, PLACE)):
            for number, turn in enumerate(rollout.turns):
                if turn.prompt_ids is None:
                    continue
                before = copy.deepcopy(plain(row))
                new = changed(row, item, number, prompt_ids=longer(turn))
                assert turn_of(new, item, number).prompt_ids is not None
                assert turn_of(new, item, number).prompt_ids.tolist()[-1] == 7001  # type: ignore[union-attr]
                assert list(new) == list(row)
                assert plain(row) == before
                told += 1
    assert told


@pytest.mark.parametrize("name", CALLS)
def test_logprobs_that_changed_are_read_again_as_they_were_meant(name: str) -> None:
    told = 0
    for row in rows_of(name):
        for item, rollout in enumerate(pick_format(row).read(row, PLACE)):
            for number, turn in enumerate(rollout.turns):
                if turn.completion_logprobs is None:
                    continue
                values = turn.completion_logprobs - 1
                columns = tuple(
                    replace(one, values=values) if one.role is ColumnRole.LOGPROBS else one for one in turn.columns
                )
                new = changed(row, item, number, completion_logprobs=values, columns=columns)
                np.testing.assert_array_equal(turn_of(new, item, number).completion_logprobs, values)
                told += 1
    assert told


@pytest.mark.parametrize("name", CALLS)
def test_a_call_can_neither_be_left_out_nor_change_what_was_sampled(name: str) -> None:
    row = rows_of(name)[0]
    form = pick_format(row)
    whole = [unmended(rollout) for rollout in form.read(row, PLACE)]
    rollout = whole[0].rollout
    less = RepairedRollout(replace(rollout, turns=rollout.turns[1:]), whole[0].turns_from[1:])
    with pytest.raises(RecordError, match="can neither be left out"):
        form.update(row, [less, *whole[1:]])
    completion = rollout.turns[0].completion_ids
    assert completion is not None
    with pytest.raises(RecordError, match="no repair may change what was sampled"):
        changed(row, completion_ids=completion + 1)


def test_a_changed_prompt_of_atif_changes_its_counts_and_loses_its_routing() -> None:
    row = row_named("atif", "columns-in-extra")
    new = changed(row, prompt_ids=longer(turn_of(row)))
    old_metrics, metrics = row["steps"][1]["metrics"], new["steps"][1]["metrics"]
    assert metrics["prompt_tokens"] == old_metrics["prompt_tokens"] + 1
    assert new["final_metrics"]["total_prompt_tokens"] == row["final_metrics"]["total_prompt_tokens"] + 1
    # A document leaves nulls out.
    assert list(metrics["extra"]) == [name for name in old_metrics["extra"] if name != "routed_experts"]
    assert metrics["completion_token_ids"] is old_metrics["completion_token_ids"]


def test_a_total_that_counts_something_else_stays() -> None:
    row = row_named("atif", "columns-in-extra")
    row["final_metrics"]["total_prompt_tokens"] += 5
    new = changed(row, prompt_ids=longer(turn_of(row)))
    assert new["final_metrics"] == row["final_metrics"]


def test_a_prompt_of_a_sub_agent_is_written_into_it() -> None:
    row = row_named("atif", "sub-agent")
    new = changed(row, item=1, prompt_ids=longer(turn_of(row, 1)))
    assert new["steps"] is row["steps"]
    edits = {edit.path for edit in edits_between(row, new)}
    inner = ("subagent_trajectories", 0)
    assert edits == {
        (*inner, "steps", 1, "metrics", "prompt_tokens"),
        (*inner, "steps", 1, "metrics", "prompt_token_ids"),
        (*inner, "final_metrics", "total_prompt_tokens"),
    }


def test_an_unknown_logprob_has_no_place_in_atif() -> None:
    row = rows_of("atif")[0]
    turn = turn_of(row)
    assert turn.completion_logprobs is not None
    values = np.full(len(turn.completion_logprobs), np.nan)
    columns = tuple(replace(column, values=values) for column in turn.columns)
    with pytest.raises(RecordError, match="can only be numbers"):
        changed(row, completion_logprobs=values, columns=columns)


def test_a_call_of_harbor_is_written_where_its_logprobs_stand() -> None:
    row = row_named("harbor", "logprobs-of-one-call-missing")
    turn = turn_of(row, number=1)
    assert turn.completion_logprobs is not None
    values = turn.completion_logprobs - 1
    columns = tuple(replace(column, values=values) for column in turn.columns)
    new = changed(row, number=1, completion_logprobs=values, columns=columns)
    (edit,) = edits_between(row, new)
    assert edit.path == ("agent_result", "rollout_details", 0, "logprobs", 0)


def test_a_changed_prompt_of_harbor_changes_the_count_of_its_agent() -> None:
    row = row_named("harbor", "columns-in-extra")
    new = changed(row, prompt_ids=longer(turn_of(row)))
    assert new["agent_result"]["n_input_tokens"] == row["agent_result"]["n_input_tokens"] + 1
    extra = new["agent_result"]["rollout_details"][0]["extra"]
    assert [one is None for one in extra["routed_experts"]] == [True, False, False]


def test_a_prompt_of_rllm_changes_in_the_models_output_too() -> None:
    row = row_named("rllm_episode", "model-output:0")
    new = changed(row, prompt_ids=longer(turn_of(row)))
    (step,) = new["trajectories"][0]["steps"]
    assert step["model_output"]["prompt_ids"] == step["prompt_ids"]
    assert step["prompt_ids"][-1] == 7001
    assert (
        step["model_output"]["completion_ids"]
        is row["trajectories"][0]["steps"][0]["model_output"]["completion_ids"]
    )


def test_every_copy_in_a_trace_changes_with_it() -> None:
    row = row_named("rllm_gateway", "clean-after-a-tool")
    turn = turn_of(row)
    assert turn.completion_logprobs is not None
    values = turn.completion_logprobs - 1
    columns = tuple(replace(column, values=values) for column in turn.columns)
    new = changed(row, prompt_ids=longer(turn), completion_logprobs=values, columns=columns)
    response = new["raw_response"]
    assert response["prompt_token_ids"] == new["prompt_token_ids"]
    assert [entry["logprob"] for entry in response["choices"][0]["logprobs"]["content"]] == new["logprobs"]
    grown = len(row["prompt_token_ids"]) + 1
    assert (response["usage"]["prompt_tokens"], new["token_counts"]["prompt"]) == (grown, grown)
    assert response["choices"][0]["message"] is row["raw_response"]["choices"][0]["message"]


# tinker


@pytest.mark.parametrize("as_read", [lambda row: row, as_table], ids=["json", "table"])
def test_a_token_that_changed_in_a_datum_changes_in_both_copies(as_read: Callable[[Any], Any]) -> None:
    told = 0
    for row in map(as_read, rows_of("tinker")):
        rollout = pick_format(row).read(row, PLACE)[0]
        old = rollout.training_row
        if old is None or row["name"] == "image" or any(column.alignment is None for column in old.columns):
            continue
        for at in (1, len(old.token_ids) // 2, len(old.token_ids) - 1):
            new = rowed(row, lambda before, at=at: split(before, at))  # type: ignore[misc]
            found, want = trained_row(new), split(old, at)
            assert found.token_ids.tolist() == want.token_ids.tolist()
            np.testing.assert_array_equal(found.loss_mask, want.loss_mask)
            for tensor in new["loss_fn_inputs"].values():
                if isinstance(tensor, dict):
                    assert list(tensor["shape"]) == [len(tensor["data"])]
            told += 1
    assert told


def test_chunks_without_a_change_stay_as_they_are() -> None:
    row = row_named("tinker", "three-chunks")
    last = len(trained_row(row).token_ids) - 3
    new = rowed(row, lambda before: split(before, last))
    chunks, old = new["model_input"]["chunks"], row["model_input"]["chunks"]
    assert [a is b for a, b in zip(chunks, old, strict=True)] == [True, True, False]
    assert chunks[2]["tokens"][-3:].count(7001) == 2


def test_a_change_over_two_chunks_keeps_both() -> None:
    row = row_named("tinker", "three-chunks")
    sizes = [len(chunk["tokens"]) for chunk in row["model_input"]["chunks"]]

    def around(before: TrainingRow) -> TrainingRow:
        ids = before.token_ids.copy()
        ids[sizes[0] - 1 : sizes[0] + 1] = 7001
        return replace(before, token_ids=ids)

    new = rowed(row, around)
    assert trained_row(new).token_ids.tolist()[sizes[0] - 1 : sizes[0] + 1] == [7001, 7001]
    assert len(new["model_input"]["chunks"]) == 3


def test_tokens_before_an_image_are_changed_and_the_image_stays() -> None:
    row = row_named("tinker", "image")
    new = rowed(row, lambda before: split(before, 2))
    assert new["model_input"]["chunks"][1] is row["model_input"]["chunks"][1]
    assert trained_row(new).token_ids.tolist()[2:4] == [7001, 7001]
    with pytest.raises(RecordError, match="around an image"):
        rowed(row, lambda before: split(before, 5))


def test_tokens_of_another_source_have_no_provenance() -> None:
    row = row_named("tinker", "provenance-spans")
    new = rowed(row, lambda before: split(before, 2))
    assert (new["model_input_spans"], new["loss_fn_input_spans"]) == (None, None)


def test_a_mask_of_a_datum_changes_by_itself() -> None:
    row = row_named("tinker", "clean")
    old = trained_row(row)
    mask = old.loss_mask.copy()  # type: ignore[union-attr]
    mask[-1] = False
    source = np.arange(len(mask), dtype=np.int64)
    new = rowed(
        row,
        lambda before: moved_row(before, before.token_ids, source, loss_mask=mask, logprobs=before.logprobs).row,
    )
    (edit,) = edits_between(row, new)
    assert edit.path == ("loss_fn_inputs", "mask", "data")
    assert trained_row(new).loss_mask.tolist() == mask.tolist()  # type: ignore[union-attr]


# Batches


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("as_read", [lambda row: row, as_table], ids=["json", "table"])
def test_tokens_that_changed_in_a_sample_are_read_again(name: str, as_read: Callable[[Any], Any]) -> None:
    told = 0
    for row in map(as_read, rows_of(name)):
        rollouts = pick_format(row).read(row, PLACE)
        for item, rollout in enumerate(rollouts):
            old = rollout.training_row
            if old is None or any(column.alignment is None for column in old.columns):
                continue
            if row["name"] == "k-best-logprobs":
                continue  # nobody scored the others of the k best that would stand beside a new token
            at = len(old.token_ids) - 2
            new = rowed(row, lambda before, at=at: split(before, at), item)  # type: ignore[misc]
            found, want = trained_row(new, item), split(old, at)
            assert found.token_ids.tolist() == want.token_ids.tolist()
            np.testing.assert_array_equal(found.loss_mask, want.loss_mask)
            assert list(new) == list(row)
            for other in range(len(rollouts)):
                if other != item and rollouts[other].training_row is not None:
                    assert trained_row(new, other).token_ids.tolist() == trained_row(row, other).token_ids.tolist()
            told += 1
    assert told


def test_the_whole_columns_of_a_verl_batch_follow_its_parts() -> None:
    row = row_named("verl_batch", "one-sample")
    new = rowed(row, lambda before: split(before, len(before.token_ids) - 2))
    assert new["input_ids"] == [*new["prompts"], *new["responses"]]
    assert sum(new["attention_mask"]) == sum(row["attention_mask"]) + 1
    assert len(new["attention_mask"]) == len(row["attention_mask"])
    assert max(new["position_ids"]) == max(row["position_ids"]) + 1
    assert new["prompts"] is row["prompts"]


def test_a_response_that_does_not_fit_into_its_batch_is_refused_in_words() -> None:
    row: dict[str, Any] = {
        "prompts": [1, 20],
        "responses": [30, 60, 2],
        "response_mask": [1, 0, 1],
        "attention_mask": [1] * 5,
    }
    with pytest.raises(RecordError, match="only 3 tokens wide"):
        rowed(row, lambda before: split(before, 3))


def test_a_token_that_was_put_in_has_no_version() -> None:
    row: dict[str, Any] = {
        "input_ids": [[1, 20, 30, 2, 0, 0]],
        "loss_mask": [[0, 0, 1, 1, 0, 0]],
        "versions": [[-1, -1, 2, 3, -1, -1]],
        "attention_mask": [[1, 1, 1, 1, 0, 0]],
    }
    new = rowed(row, lambda before: split(before, 2))
    assert new["versions"] == [[-1, -1, -1, -1, 3, -1]]
    assert new["attention_mask"] == [[1, 1, 1, 1, 1, 0]]


@pytest.mark.parametrize("name", ["skyrl_generator", "trl_rollout", "verl_batch"])
def test_the_one_call_of_a_sample_has_its_prompt_changed(name: str) -> None:
    row = row_named(name, "one-call")
    turn = turn_of(row, 1)
    new = changed(row, item=1, prompt_ids=longer(turn))
    found = turn_of(new, 1)
    assert found.prompt_ids is not None
    assert found.prompt_ids.tolist()[-1] == 7001
    assert found.completion_ids.tolist() == turn.completion_ids.tolist()  # type: ignore[union-attr]


# What the frameworks read


def completions(calls: Sequence[Any]) -> list[list[int]]:
    return [completion for _, completion in calls]


def test_the_models_of_atif_read_what_was_repaired(tmp_path: Path) -> None:
    written("atif", tmp_path)
    assert cured(tmp_path / "broken.json", tmp_path / "again.json") == {"SEQ301", "TOK101"}
    expected = json.loads((tmp_path / "expected.json").read_text())["broken"][0]
    (again,) = json.loads(asked("atif", "--read", tmp_path / "again.json"))
    assert completions(again) == completions(expected)
    assert again[2][0][: len(again[1][0]) + len(again[1][1])] == again[1][0] + again[1][1]


def test_the_sdk_of_tinker_reads_what_was_written_again(tmp_path: Path) -> None:
    written("tinker", tmp_path)
    log, out = tmp_path / "datums.jsonl", tmp_path / "again.jsonl"

    def touched(rollout: Rollout) -> Rollout:
        assert rollout.training_row is not None
        return replace(rollout, training_row=split(rollout.training_row, 40))

    assert write_rollouts(log, map(touched, read_rollouts(log)), out) == 3
    before = json.loads((tmp_path / "expected.json").read_text())
    for old, new in zip(before, json.loads(asked("tinker", "--read", out)), strict=True):
        assert new["ids"] == [*old["ids"][:40], 7001, 7001, *old["ids"][41:]]
        assert new["mask"][40:] == [0.0, *old["mask"][40:]]


@pytest.mark.parametrize("name", [*CALLS, *BATCHES, "tinker"])
def test_no_part_of_a_fork_is_lost_silently(name: str) -> None:
    form = format_named(name)
    row = rows_of(name)[0]
    whole = [unmended(rollout) for rollout in form.read(row, PLACE)]
    with pytest.raises(RecordError, match="cannot hold a fork"):
        form.update(row, [*whole, whole[-1]])
