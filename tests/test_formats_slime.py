"""Samples, columns, conversations and sessions of slime and miles, and the token capture of NeMo-Gym, read."""

from __future__ import annotations

import contextlib
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.forms import PLACE, read_one, row_of
from tests.world import FORMATS, fixture_row
from tito_audit import Settings, scan_rollouts
from tito_audit.errors import RecordError
from tito_audit.formats import format_named, pick_format
from tito_audit.record.column import Alignment, MovePolicy
from tito_audit.record.rollout import Turn
from tito_audit.storage import open_log

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
TOY = str(FIXTURES / "tokenizers" / "toy_bpe")
MADE_HERE = ("miles_session", "miles_trajectory", "nemo_gym_tokens", "slime")


def turn_of(row: dict[str, Any]) -> Turn:
    (turn,) = read_one(row).turns
    return turn


def sample(**columns: Any) -> dict[str, Any]:
    row = {
        "index": 0,
        "group_index": 4,
        "prompt": "<user>2+2?<assistant>",
        "tokens": [1, 20, 21, 30, 31, 60, 70, 2],
        "response": "It is<tool>4",
        "response_length": 5,
        "loss_mask": [1, 1, 0, 1, 1],
        "rollout_log_probs": [-0.2, -0.1, 0.0, -0.3, -0.01],
        "weight_versions": ["3", "4"],
        "status": "completed",
    }
    return {**row, **columns}


# Fixtures


@pytest.mark.parametrize("name", MADE_HERE)
def test_the_fixtures_are_what_their_script_writes(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FORMATS))
    made = importlib.import_module("make_slime").lines()
    assert tuple(sorted(made)) == MADE_HERE
    assert (FORMATS / f"{name}.jsonl").read_text() == made[name]


def test_the_parquet_fixture_holds_what_its_script_writes_in_the_types_of_miles(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FORMATS))
    make = importlib.import_module("make_slime")
    assert pq.read_table(FORMATS / "miles_columns.parquet").equals(make.table(make.column_rows(make.Toy())))


@pytest.mark.parametrize(
    ("name", "suffix", "expected"),
    [
        (
            "slime",
            "jsonl",
            {
                "merge-in-completion": {"TOK101"},
                "merge-one-call-no-mask": {"TOK101"},
                "mask-slid-by-one": {"MSK401", "MSK402"},
                "logprobs-slid-by-one": {"LPR502"},
                "logprobs-one-too-many": {"LPR501"},
                "mask-shorter-than-response": {"REC002"},
                "columns-beside": {"TOK101"},
            },
        ),
        (
            "miles_session",
            "jsonl",
            {
                "clean": {"REC008"},
                "merge-in-completion": {"REC008", "TOK101"},
                "prefix-broken-by-retokenization": {"REC008", "SEQ301", "TOK101"},
                "running-ids-out-of-step": {"REC006", "REC008"},
                "clean-trimmed-at-the-end": {"REC008"},
                "clean-with-an-error-behind": {"REC008"},
            },
        ),
        (
            "nemo_gym_tokens",
            "jsonl",
            {
                "merge-in-completion": {"TOK101"},
                "logprobs-one-too-many": {"LPR501"},
                "nothing-captured": {"REC005"},
                "placeholder-ids": {"REC004", "REC006"},
            },
        ),
        ("miles_columns", "parquet", {1: {"TOK101"}, 3: {"MSK401", "MSK402"}, 4: {"LPR501"}}),
    ],
)
def test_a_scan_finds_what_is_wrong_in_a_fixture_and_nothing_else(
    name: str, suffix: str, expected: dict[Any, Any]
):
    path = FORMATS / f"{name}.{suffix}"
    found: dict[Any, set[str]] = {}
    for result in scan_rollouts(path, Settings(tokenizer=TOY)):
        at = result.place.row
        key = json.loads(path.read_text().splitlines()[at])["id"] if suffix == "jsonl" else at
        found.setdefault(key, set()).update(finding.code for finding in result.findings)
    assert {key: codes for key, codes in found.items() if codes} == expected


# Samples


def test_the_response_is_the_end_of_a_sample_and_its_columns_lie_over_it():
    rollout, row = read_one(sample()), row_of(sample())
    assert rollout.format == "slime"
    assert row.prompt_length == 3
    assert row.loss_mask is not None
    assert row.loss_mask.tolist() == [False] * 3 + [True, True, False, True, True]
    assert row.logprobs is not None
    assert row.logprobs[3:].tolist() == [-0.2, -0.1, 0.0, -0.3, -0.01]
    assert np.isnan(row.logprobs[:3]).all()
    assert row.sentinel == 0.0
    assert [column.alignment for column in row.columns] == [Alignment.RESPONSE] * 2
    assert rollout.stated.facts["weight_versions"] == ("3", "4")
    assert rollout.stated.group == 4


def test_null_for_a_mask_trains_the_whole_response():
    row = row_of(sample(loss_mask=None))
    assert row.loss_mask is not None
    assert row.loss_mask.tolist() == [False] * 3 + [True] * 5


@pytest.mark.parametrize(
    ("status", "reason"),
    [("completed", "stop"), ("truncated", "length"), ("aborted", "abort"), ("failed", None), ("pending", None)],
)
def test_the_status_says_why_the_last_call_ended(status: str, reason: str | None):
    stated = read_one(sample(status=status)).stated.facts
    assert stated["status"] == status
    assert stated.get("finish_reason") == reason


def test_what_belongs_to_exactly_these_tokens_goes_when_they_change():
    row = row_of(fixture_row("slime", "columns-beside"))
    said = {column.name: (column.alignment, column.policy) for column in row.columns}
    assert said["rollout_routed_experts"] == (Alignment.ROWS_MINUS_1, MovePolicy.DROP)
    assert said["rollout_top_p_token_ids"] == (Alignment.RAGGED, MovePolicy.DROP)
    assert said["rollout_top_p_token_offsets"] == (Alignment.RAGGED, MovePolicy.DROP)
    assert said["mopd_teacher_log_probs"] == (Alignment.RESPONSE, MovePolicy.DROP)
    assert said["teacher_log_probs"] == (Alignment.RESPONSE, MovePolicy.STALE)
    assert said["rollout_topk_token_ids"] == (Alignment.RESPONSE, MovePolicy.MOVE)


def test_messages_count_when_an_answer_is_among_them():
    asked = [{"role": "user", "content": "2+2?"}]
    told = [*asked, {"role": "assistant", "content": "4"}]
    assert len(read_one(sample(metadata={"messages": told})).messages) == 2
    assert len(read_one(sample(messages=told)).messages) == 2
    assert read_one(sample(prompt=asked)).messages == ()
    assert read_one(sample(metadata={"messages": asked})).messages == ()
    assert read_one(sample(metadata={"tools": json.dumps([{"type": "function"}])})).tools == (
        {"type": "function"},
    )
    assert read_one(sample(apply_chat_template_kwargs={"thinking": False})).template_kwargs == {"thinking": False}


@pytest.mark.parametrize("tokens", [None, []])
def test_a_sample_without_ids_has_no_training_row(tokens: Any):
    rollout = read_one(sample(tokens=tokens, loss_mask=tokens, rollout_log_probs=tokens))
    assert rollout.format == "slime"
    assert rollout.training_row is None
    assert rollout.turns == ()


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"response_length": 9}, "response_length is 9, but the column 'tokens' holds only 8 ids"),
        ({"response_length": -1}, "response_length is -1, so it is unclear where the response begins"),
        ({"response_length": "5"}, "response_length is a string"),
        ({"response_length": None}, "response_length is missing or null"),
        ({"loss_mask": "11011"}, "'loss_mask' is a string"),
        ({"rollout_log_probs": 1.5}, "'rollout_log_probs' is a number, not a list"),
        ({"rollout_log_probs": ["a"] * 5}, "'rollout_log_probs' holds a string at position 0"),
        ({"tokens": [1, 2, 3, 4, 5, "6"]}, "'tokens' holds a string at position 5"),
        ({"tokens": [1] * 7 + [2**40]}, "'tokens' holds id 1099511627776"),
        ({"tokens": [1] * 7 + [2**70]}, "more than 64 bits"),
        ({"tokens": [1.0] * 8}, "'tokens' holds a number"),
    ],
)
def test_a_sample_that_makes_no_sense_is_refused_in_words(columns: dict[str, Any], says: str):
    row = sample(**columns)
    form = pick_format(row)
    assert form.name == "slime"
    with pytest.raises(RecordError, match=says):
        form.read(row, PLACE)


def test_a_mask_over_all_tokens_is_no_samples_of_slime():
    assert pick_format(sample(loss_mask=[0, 0, 0, 1, 1, 0, 1, 1])).name == "generic"
    assert pick_format(sample(loss_mask=[1] * 8, response_length=8)).name == "slime"
    assert pick_format({**sample(), "tokens": [[1, 2]]}).name != "slime"


def test_a_mask_that_fits_nothing_is_kept_for_a_rule_to_see():
    row = row_of(sample(loss_mask=[1, 1, 0]))
    assert row.loss_mask is None
    assert [column.alignment for column in row.columns if column.name == "loss_mask"] == [None]


# miles


def test_the_six_columns_of_miles_are_told_and_no_others():
    rows = [dict(raw.value or {}) for raw in open_log(FORMATS / "miles_columns.parquet")]
    for row in rows:
        assert pick_format(row).name == "miles_columns"
        assert read_one(row).stated.facts["sample_index"] == row["sample_index"]
        assert pick_format({**row, "reward": 1.0}).name == "slime"
        assert pick_format({**row, "tito_audit": None}).name == "miles_columns"
    assert rows[2]["loss_mask"] is None
    trained = row_of(rows[2]).loss_mask
    assert trained is not None
    assert int(trained.sum()) == rows[2]["response_length"]


@pytest.mark.parametrize("total", [3, None, "8", np.array([1, 2])])
def test_a_total_length_that_is_another_is_refused(total: Any):
    keys = ("tokens", "response_length", "loss_mask", "rollout_log_probs")
    row = {"sample_index": 0, "total_length": total, **{key: sample()[key] for key in keys}}
    with pytest.raises(RecordError, match=r"total_length is .* holds 8 ids"):
        read_one(row)


def test_a_line_of_a_trajectory_says_where_its_tokens_are():
    lines = (FORMATS / "miles_trajectory.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        rollout = read_one(line)
        assert rollout.format == "miles_trajectory"
        assert rollout.stated.ids_wanted is False
        assert "ids not read: they are in dashboard_columns/" in str(*rollout.stated.reasons)
        assert rollout.messages
        assert pick_format({**line, "tokens": [1]}).name != "miles_trajectory"
    summary = (scan := scan_rollouts(FORMATS / "miles_trajectory.jsonl")).summary
    assert list(scan)
    assert summary.without_ids == len(lines)


def test_a_session_is_one_rollout_with_every_call_in_place():
    row = fixture_row("miles_session", "clean")
    rollout = read_one(row)
    assert [turn.message_index for turn in rollout.turns] == [2, 4, 6]
    assert [turn.weight_versions for turn in rollout.turns] == [("3",), ("3",), ("4",)]
    assert [turn.finish_reason for turn in rollout.turns] == ["stop"] * 3
    assert len(rollout.messages) == 7
    assert len(rollout.tools) == 1
    for turn, record in zip(rollout.turns, row["records"], strict=True):
        assert turn.prompt_ids is not None
        assert turn.completion_ids is not None
        triples = record["response"]["choices"][0]["meta_info"]["output_token_logprobs"]
        assert turn.prompt_ids.tolist() == record["request"]["input_ids"]
        assert turn.completion_ids.tolist() == [token for _, token, _ in triples]
    assert rollout.stated.facts["max_trim_tokens"] == 1
    assert rollout.stated.facts["tito_session_mismatch"] == []
    assert rollout.stated.facts["session_id"] == "session-clean"
    assert not rollout.stated.copies_disagree


def test_the_running_sequence_may_lack_what_the_server_may_trim_and_no_more():
    row = fixture_row("miles_session", "clean")
    running = row["metadata"]["accumulated_token_ids"]
    for trim, cut, odd in ((1, 1, False), (1, 2, True), (None, 1, True), (2, 2, False)):
        row["metadata"] = {"accumulated_token_ids": running[:-cut], "max_trim_tokens": trim}
        assert bool(read_one(row).stated.copies_disagree) is odd


def test_a_retry_of_a_session_keeps_what_it_was_sent():
    row = fixture_row("miles_session", "clean")
    row["records"][0]["request"]["messages"][1] = {"role": "user", "content": "Another question?"}
    turn = read_one(row).turns[0]
    assert turn.message_index is None
    assert turn.prompt_messages is not None
    assert turn.prompt_messages[1].text == "Another question?"


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([{"response": {"choices": [], "model": "m"}}], r"records\[0\]: choices is empty"),
        ([{"response": {}}, 3], r"records\[0\]: not the answer of a server"),
        ([{"request": None, "response": {"choices": [{"message": 3, "meta_info": {}}]}}, 3], r"records\[1\]"),
    ],
)
def test_a_session_that_cannot_be_read_names_the_record(records: Any, says: str):
    with pytest.raises(RecordError, match=says):
        read_one({"session_id": "a", "records": records, "metadata": {}})


def test_a_session_without_calls_wants_no_ids():
    for records in (None, []):
        rollout = read_one({"session_id": "a", "records": records})
        assert rollout.format == "miles_session"
        assert rollout.stated.ids_wanted is False


# Token capture


def test_a_captured_line_is_one_call():
    row = fixture_row("nemo_gym_tokens", "merge-in-completion")
    rollout, turn = read_one(row), turn_of(row)
    assert rollout.format == "nemo_gym_tokens"
    assert turn.prompt_ids is not None
    assert turn.completion_ids is not None
    assert turn.prompt_ids.tolist() == row["prompt_token_ids"]
    assert turn.completion_ids.tolist() == row["generation_token_ids"]
    assert turn.completion_text == "The answer is 4."
    assert (rollout.stated.group, rollout.stated.facts["id"]) == ("r-0", "call-3")
    assert rollout.stated.model is None
    assert rollout.messages == ()


def test_the_text_of_a_captured_call_counts_where_it_is_the_whole_answer():
    tool, chat = fixture_row("nemo_gym_tokens", "clean"), fixture_row("nemo_gym_tokens", "clean-chat-item")
    assert turn_of(chat).completion_text is None
    tool["output_items"] = [{"type": "function_call", "name": "a", "arguments": "{}", "call_id": "c"}]
    assert turn_of(tool).completion_text is None
    tool["output_items"] = [{"type": "message", "role": "assistant", "content": "cut", "status": "incomplete"}]
    assert turn_of(tool).completion_text == "cut"
    assert turn_of(tool).finish_reason == "length"


@pytest.mark.parametrize("version", [4, 99, 0, -1, "1", None, True, 1.5])
def test_a_version_of_the_capture_that_is_not_known_is_refused(version: Any):
    row = {**fixture_row("nemo_gym_tokens", "clean"), "schema_version": version}
    with pytest.raises(RecordError, match="schema_version"):
        read_one(row)


@pytest.mark.parametrize("name", ["nothing-captured", "placeholder-ids"])
def test_a_line_without_ids_keeps_its_text(name: str):
    turn = turn_of(fixture_row("nemo_gym_tokens", name))
    assert turn.completion_text
    assert (turn.completion_ids is None) is (name == "nothing-captured")


# Detection apart


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"session_id": "a", "records": [{"x": 1}], "tokens": [1]}, "generic"),
        ({"model_call_id": "a", "generation_token_ids": "text", "output_items": []}, None),
        (
            {"sample_index": 0, "group_index": 0, "status": "completed", "messages": "text", "token_ids": [1]},
            "generic",
        ),
        ({"tokens": [1, 2], "response_length": "2"}, "generic"),
    ],
)
def test_keys_alone_make_none_of_these_formats(row: dict[str, Any], name: str | None):
    if name is None:
        with pytest.raises(RecordError):
            pick_format(row)
    else:
        assert pick_format(row).name == name


@pytest.mark.parametrize("name", [*MADE_HERE, "miles_columns"])
def test_values_that_are_not_numbers_are_refused_in_words_or_read(name: str):
    path = next(FORMATS.glob(f"{name}.*"))
    form = format_named(name)
    odd: tuple[Any, ...] = (float("nan"), 2**80, -1, [float("nan")], [2**80], [None, 1], [[]], [True], {"a": [1]})
    for raw in open_log(path):
        for key in raw.value or {}:
            for value in odd:
                row = {**(raw.value or {}), key: value}
                if form.matches(row):
                    with contextlib.suppress(RecordError):
                        form.read(row, PLACE)


def test_a_sample_reads_the_same_out_of_a_table(tmp_path: Path):
    row = sample(rollout_routed_experts=[[[0, 1]]] * 7)
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    (raw,) = open_log(tmp_path / "a.parquet")
    left, right = row_of(row), row_of(dict(raw.value or {}))
    assert left.token_ids.tolist() == right.token_ids.tolist()
    assert [column.name for column in left.columns] == [column.name for column in right.columns]
