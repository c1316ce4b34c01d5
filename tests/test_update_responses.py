"""NeMo-Gym rows and answers of servers written again: what changes, in which copies, and what never does."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.forms import PLACE, ids_of_turns, paths, with_logprobs, with_prompt, with_turns
from tests.world import FORMATS
from tito_audit.errors import RecordError
from tito_audit.format import Format, Row
from tito_audit.formats import nemo_gym, openai_chat, sglang, vllm
from tito_audit.record.column import Column
from tito_audit.record.edits import ABSENT, edits_between
from tito_audit.record.repaired import RepairedRollout, unmended
from tito_audit.record.rollout import IdsFrom, Rollout, Turn
from tito_audit.storage.table_rows import plain_values

RECORDED = Path(__file__).resolve().parents[2] / "shared" / "recorded" / "nemo-gym-round-trip.json"
FORMS = (nemo_gym.FORMAT, sglang.FORMAT, vllm.FORMAT, openai_chat.FORMAT)
EVERY_ROW = [
    pytest.param(form, json.loads(line), id=f"{form.name}-{json.loads(line)['id']}")
    for form in FORMS
    for line in (FORMATS / f"{form.name}.jsonl").read_text().splitlines()
]


def fixture(form: Format, name: str) -> dict[str, Any]:
    lines = (FORMATS / f"{form.name}.jsonl").read_text().splitlines()
    row: dict[str, Any] = next(row for row in map(json.loads, lines) if row["id"] == name)
    return row


def as_parquet(row: Row) -> Row:
    """The row as it comes out of a Parquet file, whose items all have content of one kind."""
    table = pa.Table.from_pylist([of_one_kind(row)])
    return {name: plain_values(table[name].combine_chunks())[0] for name in table.column_names}


def of_one_kind(value: Row) -> Row:
    """The items of transitions with content parts, also where it was one text."""
    response = value.get("response")
    if isinstance(response, dict) and response.get("contains_transitions"):
        output = [[in_parts(item) for item in inner] for inner in response["output"]]
        return {**value, "response": {**response, "output": output}}
    return value


def in_parts(item: dict[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    return {**item, "content": [{"type": "input_text", "text": content}]} if isinstance(content, str) else item


def read_one(form: Format, row: Row) -> Rollout:
    (rollout,) = form.read(row, PLACE)
    return rollout


def update(form: Format, row: Row, *mended: RepairedRollout) -> Sequence[Row]:
    """The new rows; the old one is as it was."""
    was = copy.deepcopy(row)
    rows = form.update(row, mended)
    assert list(edits_between(was, row)) == []
    return rows


@pytest.mark.parametrize("shape", [dict, as_parquet], ids=["json", "parquet"])
@pytest.mark.parametrize(("form", "row"), EVERY_ROW)
def test_a_row_in_which_nothing_changed_is_the_same_object(form: Format, row: dict[str, Any], shape: Any) -> None:
    row = shape(row)
    (new,) = form.update(row, [unmended(rollout) for rollout in form.read(row, PLACE)])
    assert new is row


@pytest.mark.shared
def test_the_recorded_round_trip_is_the_same_object_and_can_be_forked() -> None:
    if not RECORDED.exists():
        pytest.skip("the recorded data are not beside the checkout")
    recorded = json.loads(RECORDED.read_text())
    chat = recorded["expected_output_return_token_id_information"]
    items = {"responses_create_params": {"input": chat["messages"][:2]}, "response": recorded["input"]}
    for row in (chat, items):
        rollout = read_one(nemo_gym.FORMAT, row)
        assert update(nemo_gym.FORMAT, row, unmended(rollout)) == (row,)
        parts = [with_turns(rollout, {}, [n]) for n in range(len(rollout.turns))]
        for number, part in enumerate(update(nemo_gym.FORMAT, row, *parts)):
            assert ids_of_turns(read_one(nemo_gym.FORMAT, part)) == [ids_of_turns(rollout)[number]]


def tokens(prompt: list[int], generated: list[int], **more: Any) -> dict[str, Any]:
    logprobs = [-0.5 - i for i in range(len(generated))]
    return {
        "prompt_token_ids": prompt,
        "generation_token_ids": generated,
        "generation_log_probs": logprobs,
        **more,
    }


def answer(text: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content, **more}


def called(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}", **more}


def returned(name: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": "ok"}


def gym(*output: Any, **response: Any) -> dict[str, Any]:
    params = {"input": [{"role": "user", "content": "Do."}]}
    return {"responses_create_params": params, "response": {"output": list(output), **response}, "reward": 1.0}


def three_calls() -> list[dict[str, Any]]:
    return [
        called("a", **tokens([1], [2])),
        returned("a"),
        called("b", **tokens([1, 2, 3], [4, 5])),
        returned("b"),
        answer("Done.", **tokens([1, 2, 3, 4, 6], [7])),
    ]


def transitions() -> dict[str, Any]:
    items = three_calls()
    ask = {"role": "user", "content": "Do."}
    output = [[ask, *copy.deepcopy(items[:end])] for end in (2, 4, 5)]
    return gym(*output, contains_transitions=True)


def chat() -> dict[str, Any]:
    def wire(name: str, **more: Any) -> dict[str, Any]:
        call = {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        return {"role": "assistant", "content": None, "tool_calls": [call], **more}

    first, second, last = (item for item in three_calls() if "prompt_token_ids" in item)
    fields = [{key: item[key] for key in tokens([], [])} for item in (first, second, last)]
    return {
        "id": "row",
        "messages": [
            {"role": "user", "content": "Do."},
            wire("a", **fields[0]),
            {"role": "tool", "tool_call_id": "a", "content": "ok"},
            wire("b", **fields[1]),
            {"role": "tool", "tool_call_id": "b", "content": "ok"},
            {"role": "assistant", "content": "Done.", **fields[2]},
        ],
    }


SHAPES = {"items": lambda: gym(*three_calls()), "transitions": transitions, "chat": chat}


@pytest.mark.parametrize("parquet", [False, True], ids=["json", "parquet"])
@pytest.mark.parametrize(
    ("shape", "changed"),
    [
        ("items", ["response.output.2"]),
        ("transitions", ["response.output.1.3", "response.output.2.3"]),
        ("chat", ["messages.3"]),
    ],
)
def test_a_prompt_changes_in_every_copy_of_its_call_and_nowhere_else(
    shape: str, changed: list[str], parquet: bool
) -> None:
    row = as_parquet(SHAPES[shape]()) if parquet else SHAPES[shape]()
    rollout = read_one(nemo_gym.FORMAT, row)
    one = with_turns(rollout, {1: with_prompt(rollout.turns[1], [1, 2, 8, 9])})
    (new,) = update(nemo_gym.FORMAT, row, one)
    assert paths(row, new) == [f"{path}.prompt_token_ids" for path in changed]
    assert ids_of_turns(read_one(nemo_gym.FORMAT, new)) == [
        ([1], [2]),
        ([1, 2, 8, 9], [4, 5]),
        ([1, 2, 3, 4, 6], [7]),
    ]
    (edit, *_) = edits_between(row, new)
    assert type(edit.value) is (np.ndarray if parquet else list)
    again = RepairedRollout(read_one(nemo_gym.FORMAT, new), one.turns_from)
    assert nemo_gym.FORMAT.update(new, [again]) == (new,)


def test_the_routing_of_a_call_with_another_prompt_goes_and_its_counts_are_renewed() -> None:
    first = answer("One.", **tokens([1], [2], routed_experts=[[[1]]], usage={"input_tokens": 1}))
    second = answer("Two.", **tokens([1, 2, 3], [4, 5], routed_experts="nrlre1:x", prompt_tokens=3))
    usage = {"input_tokens": 4, "output_tokens": 3, "total_tokens": 7, "cached": 4}
    row = gym(first, {"role": "user", "content": "And?"}, second, usage=usage)
    rollout = read_one(nemo_gym.FORMAT, row)
    (new,) = update(nemo_gym.FORMAT, row, with_turns(rollout, {1: with_prompt(rollout.turns[1], [1, 2])}))
    assert paths(row, new) == [
        "response.output.2.prompt_token_ids",
        "response.output.2.routed_experts",
        "response.output.2.prompt_tokens",
        "response.usage.input_tokens",
        "response.usage.total_tokens",
    ]
    item = new["response"]["output"][2]
    assert (item["routed_experts"], item["prompt_tokens"]) == (None, 2)
    assert new["response"]["usage"] == {"input_tokens": 3, "output_tokens": 3, "total_tokens": 6, "cached": 4}
    assert list(item) == list(second)


def test_counts_that_counted_something_else_stay() -> None:
    row = gym(answer("One.", **tokens([1, 2], [3])), usage={"input_tokens": 9, "total_tokens": 10})
    rollout = read_one(nemo_gym.FORMAT, row)
    (new,) = update(nemo_gym.FORMAT, row, with_turns(rollout, {0: with_prompt(rollout.turns[0], [1])}))
    assert new["response"]["usage"] is row["response"]["usage"]


def test_what_the_rollout_was_given_stays_although_it_holds_the_same_tokens() -> None:
    row = gym(*three_calls(), trajectory=[{"call": tokens([1], [2])}])
    row["responses_create_params"]["input"].append(answer("Before.", **tokens([1], [2])))
    rollout = read_one(nemo_gym.FORMAT, row)
    (new,) = update(nemo_gym.FORMAT, row, with_turns(rollout, {0: with_prompt(rollout.turns[0], [9])}))
    assert new["responses_create_params"] is row["responses_create_params"]
    assert new["response"]["trajectory"][0]["call"]["prompt_token_ids"] == [9]


def test_two_calls_with_the_same_tokens_leave_a_copy_undecided() -> None:
    twice = [answer("One.", **tokens([1], [2])), returned("x"), answer("One.", **tokens([1], [2]))]
    row = gym(*twice, trajectory=[tokens([1], [2])])
    rollout = read_one(nemo_gym.FORMAT, row)
    with pytest.raises(RecordError, match="which of them a copy repeats"):
        nemo_gym.FORMAT.update(row, [with_turns(rollout, {0: with_prompt(rollout.turns[0], [9])})])


@pytest.mark.parametrize("parquet", [False, True], ids=["json", "parquet"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("parts", [[[0, 1], [2]], [[0], [1, 2]], [[0], [1], [2]]], ids=str)
def test_a_fork_gives_one_row_for_each_part_that_reads_as_exactly_its_turns(
    parts: list[list[int]], shape: Any, parquet: bool
) -> None:
    row = as_parquet(shape()) if parquet else shape()
    rollout = read_one(nemo_gym.FORMAT, row)
    rows = update(nemo_gym.FORMAT, row, *(with_turns(rollout, {}, part) for part in parts))
    for part, new in zip(parts, rows, strict=True):
        assert nemo_gym.FORMAT.matches(new)
        again = read_one(nemo_gym.FORMAT, new)
        assert ids_of_turns(again) == [ids_of_turns(rollout)[number] for number in part]
        for number, turn in zip(part, again.turns, strict=True):
            np.testing.assert_array_equal(turn.completion_logprobs, rollout.turns[number].completion_logprobs)
            assert turn.message_index == rollout.turns[number].message_index
        assert {key: value for key, value in new.items() if key not in ("response", "messages")} == {
            key: value for key, value in row.items() if key not in ("response", "messages")
        }
        assert nemo_gym.FORMAT.update(new, [unmended(again)])[0] is new


def test_a_part_keeps_the_text_before_it_and_nothing_after_its_last_call() -> None:
    row = gym(*three_calls(), returned("c"), incomplete_details={"reason": "max_output_tokens"})
    rollout = read_one(nemo_gym.FORMAT, row)
    first, second = update(nemo_gym.FORMAT, row, with_turns(rollout, {}, [0, 1]), with_turns(rollout, {}, [2]))
    assert first["response"]["output"] == row["response"]["output"][:3]
    assert first["response"]["incomplete_details"] is None
    assert read_one(nemo_gym.FORMAT, first).turns[-1].finish_reason is None
    stripped = [called("a"), returned("a"), called("b"), *row["response"]["output"][3:]]
    assert second["response"]["output"] == stripped
    assert second["response"]["output"][4] is row["response"]["output"][4]
    assert all(edit.value is ABSENT for edit in edits_between(row, second))
    assert read_one(nemo_gym.FORMAT, second).turns[-1].finish_reason == "length"


def test_transitions_of_other_parts_are_left_out_and_the_histories_keep_their_text() -> None:
    row = transitions()
    rollout = read_one(nemo_gym.FORMAT, row)
    _, second = update(nemo_gym.FORMAT, row, with_turns(rollout, {}, [0]), with_turns(rollout, {}, [1, 2]))
    assert [len(inner) for inner in second["response"]["output"]] == [5, 6]
    bearing = [["prompt_token_ids" in item for item in inner] for inner in second["response"]["output"]]
    assert bearing == [[False, False, False, True, False], [False, False, False, True, False, True]]


@pytest.mark.parametrize(("shape", "fits"), [("items", False), ("transitions", True), ("chat", True)])
def test_a_call_between_those_of_a_part_fits_where_it_is_no_turn(shape: str, fits: bool) -> None:
    row = SHAPES[shape]()
    rollout = read_one(nemo_gym.FORMAT, row)
    parts = [with_turns(rollout, {}, [0, 2]), with_turns(rollout, {}, [1])]
    if not fits:
        with pytest.raises(RecordError, match="between the calls of one part"):
            nemo_gym.FORMAT.update(row, parts)
        return
    rows = update(nemo_gym.FORMAT, row, *parts)
    assert [ids_of_turns(read_one(nemo_gym.FORMAT, new)) for new in rows] == [
        [ids_of_turns(rollout)[0], ids_of_turns(rollout)[2]],
        [ids_of_turns(rollout)[1]],
    ]


def test_a_fork_that_would_join_two_answers_is_refused() -> None:
    row = gym(answer("One.", **tokens([1], [2])), answer("Two.", **tokens([1, 3], [4])))
    rollout = read_one(nemo_gym.FORMAT, row)
    with pytest.raises(RecordError, match="other messages around call 1"):
        nemo_gym.FORMAT.update(row, [with_turns(rollout, {}, [0]), with_turns(rollout, {}, [1])])


def test_a_part_may_have_other_prompts_too() -> None:
    row = gym(*three_calls())
    rollout = read_one(nemo_gym.FORMAT, row)
    last = with_turns(rollout, {2: with_prompt(rollout.turns[2], [8])}, [2])
    _, new = update(nemo_gym.FORMAT, row, with_turns(rollout, {}, [0, 1]), last)
    assert ids_of_turns(read_one(nemo_gym.FORMAT, new)) == [([8], [7])]


def test_the_columns_of_a_call_change_by_name_and_as_they_are_spelled() -> None:
    item = answer("One.", **tokens([1], [2, 3]), weights=[1, 2], flags=[0, 1])
    row = gym(item)
    (turn,) = read_one(nemo_gym.FORMAT, row).turns
    turn = with_logprobs(turn, [np.nan, -0.25])
    columns = [
        replace(column, values=np.array([2.0, 1.0])) if column.name == "weights" else column
        for column in turn.columns
        if column.name != "flags"
    ]
    one = with_turns(read_one(nemo_gym.FORMAT, row), {0: replace(turn, columns=tuple(columns))})
    (new,) = update(nemo_gym.FORMAT, row, one)
    assert new["response"]["output"][0] == {
        **item,
        "generation_log_probs": [None, -0.25],
        "weights": [2, 1],
        "flags": None,
    }
    assert type(new["response"]["output"][0]["weights"][0]) is int


def test_logprobs_of_another_length_can_be_put_right() -> None:
    row = fixture(nemo_gym.FORMAT, "logprobs-one-too-many")
    rollout = read_one(nemo_gym.FORMAT, row)
    turn = rollout.turns[0]
    right = with_logprobs(turn, turn.columns[0].values[:-1].tolist())
    (new,) = update(nemo_gym.FORMAT, row, with_turns(rollout, {0: right}))
    assert len(paths(row, new)) == 1
    np.testing.assert_array_equal(
        read_one(nemo_gym.FORMAT, new).turns[0].completion_logprobs, right.completion_logprobs
    )


def test_a_completion_never_changes() -> None:
    for form, name in ((nemo_gym.FORMAT, "clean"), (vllm.FORMAT, "clean"), (sglang.FORMAT, "clean")):
        row = fixture(form, name)
        rollout = read_one(form, row)
        turn = replace(rollout.turns[0], completion_ids=np.array([1], np.int32))
        with pytest.raises(RecordError, match="what was sampled"):
            form.update(row, [with_turns(rollout, {0: turn})])


def test_what_a_row_has_no_place_for_is_refused() -> None:
    row = gym(*three_calls())
    rollout = read_one(nemo_gym.FORMAT, row)
    turn = rollout.turns[0]
    column = Column("extra", turn.columns[0].role, turn.columns[0].values, turn.columns[0].alignment)
    for wrong, reason in (
        (replace(turn, prompt_ids=None), "gain or lose its prompt"),
        (replace(turn, columns=(*turn.columns, column)), "no column 'extra'"),
        (
            replace(turn, completion_logprobs=np.array([-9.0]), columns=with_logprobs(turn, [-8.0]).columns),
            "one set",
        ),
    ):
        with pytest.raises(RecordError, match=reason):
            nemo_gym.FORMAT.update(row, [with_turns(rollout, {0: wrong})])
    with pytest.raises(RecordError, match="no rollout"):
        nemo_gym.FORMAT.update(row, [])
    with pytest.raises(RecordError, match="another order"):
        nemo_gym.FORMAT.update(row, [RepairedRollout(replace(rollout, turns=rollout.turns[:2]), (1, 0))])


def test_answers_before_the_first_tokens_are_history() -> None:
    row = gym(called("a"), returned("a"), answer("Done.", **tokens([1, 2], [3])))
    rollout = read_one(nemo_gym.FORMAT, row)
    assert ids_of_turns(rollout) == [([1, 2], [3])]
    assert [message.role for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    later = gym(answer("One.", **tokens([1], [2])), returned("x"), answer("Two."))
    assert ids_of_turns(read_one(nemo_gym.FORMAT, later)) == [([1], [2]), (None, None)]


@pytest.mark.parametrize("parquet", [False, True], ids=["json", "parquet"])
@pytest.mark.parametrize(
    ("form", "name", "path"),
    [
        (vllm.FORMAT, "clean", "response.choices.0.logprobs.content.0.logprob"),
        (vllm.FORMAT, "ids-in-token-strings", "response.choices.0.logprobs.content.0.logprob"),
        (vllm.FORMAT, "completions", "choices.0.logprobs.token_logprobs"),
        (sglang.FORMAT, "clean", "response.meta_info.output_token_logprobs.0"),
        (sglang.FORMAT, "spread", "meta_info.output_token_logprobs.0"),
        (sglang.FORMAT, "chat", "response.choices.0.meta_info.output_token_logprobs.0"),
    ],
)
def test_one_logprob_changes_where_the_answer_has_it(form: Format, name: str, path: str, parquet: bool) -> None:
    row = as_parquet(fixture(form, name)) if parquet else fixture(form, name)
    rollout = read_one(form, row)
    turn = rollout.turns[0]
    assert turn.completion_logprobs is not None
    wanted = [-7.5, *turn.completion_logprobs[1:].tolist()]
    (new,) = update(form, row, with_turns(rollout, {0: with_logprobs(turn, wanted)}))
    (changed,) = paths(row, new)
    assert changed == path
    np.testing.assert_array_equal(read_one(form, new).turns[0].completion_logprobs, wanted)
    if form is sglang.FORMAT:
        (edit,) = edits_between(row, new)
        assert type(edit.value) is (np.ndarray if parquet else list)


def test_a_floor_becomes_null_where_the_logprob_is_unknown() -> None:
    row = fixture(vllm.FORMAT, "logprob-floor")
    rollout = read_one(vllm.FORMAT, row)
    turn = rollout.turns[0]
    assert turn.completion_logprobs is not None
    values = np.where(turn.completion_logprobs == -9999.0, np.nan, turn.completion_logprobs)
    (new,) = update(vllm.FORMAT, row, with_turns(rollout, {0: with_logprobs(turn, values.tolist())}))
    assert paths(row, new) == ["response.choices.0.logprobs.content.1.logprob"]
    assert new["response"]["choices"][0]["logprobs"]["content"][1]["logprob"] is None


@pytest.mark.parametrize("parquet", [False, True], ids=["json", "parquet"])
def test_an_entry_too_many_goes_as_a_whole(parquet: bool) -> None:
    row: Row = fixture(vllm.FORMAT, "logprobs-one-too-many")
    row = as_parquet(row) if parquet else row
    content = row["response"]["choices"][0]["logprobs"]["content"]
    rollout = read_one(vllm.FORMAT, row)
    turn = rollout.turns[0]
    one = with_turns(rollout, {0: with_logprobs(turn, turn.columns[0].values[:-1].tolist())})
    (new,) = update(vllm.FORMAT, row, one)
    assert paths(row, new) == ["response.choices.0.logprobs.content"]
    kept = new["response"]["choices"][0]["logprobs"]["content"]
    assert all(a is b for a, b in zip(kept, content[:-1], strict=True))


def test_a_triple_too_many_goes_where_its_id_does_not_fit() -> None:
    triples = [[-0.5, 9, None], [-0.5, 30, None], [-0.5, 2, "e"]]
    row = {"text": "4", "output_ids": [30, 2], "meta_info": {"output_token_logprobs": triples}}
    rollout = read_one(sglang.FORMAT, row)
    one = with_turns(rollout, {0: with_logprobs(rollout.turns[0], [-0.5, -0.5])})
    (new,) = update(sglang.FORMAT, row, one)
    assert new["meta_info"]["output_token_logprobs"] == triples[1:]


def test_parallel_lists_lose_the_same_entry_and_an_undecided_one_is_refused() -> None:
    logprobs = {"tokens": ["a", "b", "c"], "token_logprobs": [-1.0, -2.0, -3.0], "text_offset": [0, 1, 2]}
    row = {"choices": [{"index": 0, "text": "bc", "token_ids": [5, 6], "logprobs": logprobs}]}
    rollout = read_one(vllm.FORMAT, row)
    (new,) = update(vllm.FORMAT, row, with_turns(rollout, {0: with_logprobs(rollout.turns[0], [-2.0, -3.0])}))
    assert new["choices"][0]["logprobs"] == {
        "tokens": ["b", "c"],
        "token_logprobs": [-2.0, -3.0],
        "text_offset": [1, 2],
    }
    for wanted in ([-1.0, -3.0], [-1.0, -2.0, -3.0, -4.0]):
        with pytest.raises(RecordError, match="unclear which"):
            vllm.FORMAT.update(row, [with_turns(rollout, {0: with_logprobs(rollout.turns[0], wanted)})])


def test_both_copies_of_the_logprobs_change() -> None:
    entries = [{"token": "4", "logprob": -0.2, "bytes": [52]}, {"token": "<e>", "logprob": -0.5, "bytes": []}]
    meta = {"output_token_logprobs": [[-0.2, 30, None], [-0.5, 2, None]]}
    choice = {"index": 0, "finish_reason": "stop", "logprobs": {"content": entries}, "meta_info": meta}
    row = {"object": "chat.completion", "choices": [choice]}
    rollout = read_one(sglang.FORMAT, row)
    (new,) = update(sglang.FORMAT, row, with_turns(rollout, {0: with_logprobs(rollout.turns[0], [-0.2, -0.75])}))
    assert paths(row, new) == [
        "choices.0.logprobs.content.1.logprob",
        "choices.0.meta_info.output_token_logprobs.1",
    ]


def test_logprobs_that_hold_the_tokens_too_cannot_be_left_out() -> None:
    row = fixture(sglang.FORMAT, "clean")
    rollout = read_one(sglang.FORMAT, row)
    bare = replace(rollout.turns[0], completion_logprobs=None, columns=())
    with pytest.raises(RecordError, match="cannot be left out"):
        sglang.FORMAT.update(row, [with_turns(rollout, {0: bare})])


def test_a_prompt_changes_in_the_answer_and_in_the_request() -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    choice = {"index": 0, "text": "a", "token_ids": [3], "prompt_token_ids": [1, 2], "routed_experts": "x"}
    answered = {"choices": [choice], "usage": usage}
    row = {"request": {"prompt": [1, 2], "extra_body": {"prompt_token_ids": [1, 2]}}, "response": answered}
    rollout = read_one(vllm.FORMAT, row)
    (new,) = update(vllm.FORMAT, row, with_turns(rollout, {0: with_prompt(rollout.turns[0], [9])}))
    assert paths(row, new) == [
        "request.prompt",
        "request.extra_body.prompt_token_ids",
        "response.choices.0.prompt_token_ids",
        "response.choices.0.routed_experts",
        "response.usage.prompt_tokens",
        "response.usage.total_tokens",
    ]
    assert new["response"]["usage"] == {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


def test_a_prompt_of_several_choices_changes_for_all_of_them_or_not_at_all() -> None:
    row = fixture(vllm.FORMAT, "two-choices")
    rollouts = vllm.FORMAT.read(row, PLACE)
    both = [with_turns(one, {0: with_prompt(one.turns[0], [1, 2])}) for one in rollouts]
    (new,) = update(vllm.FORMAT, row, *both)
    assert paths(row, new) == ["response.prompt_token_ids"]
    with pytest.raises(RecordError, match="no separate place"):
        vllm.FORMAT.update(row, [both[0], unmended(rollouts[1])])
    other = with_turns(rollouts[1], {0: with_prompt(rollouts[1].turns[0], [5])})
    with pytest.raises(RecordError, match="belongs to several choices"):
        vllm.FORMAT.update(row, [both[0], other])


def test_one_prompt_of_a_batch_changes_with_the_choices_that_answer_it() -> None:
    choices = [{"index": i, "text": "a", "token_ids": [i], "finish_reason": "stop"} for i in range(4)]
    row = {"prompt": [[1, 2], [3, 4]], "choices": choices}
    rollouts = vllm.FORMAT.read(row, PLACE)
    last = [with_turns(one, {0: with_prompt(one.turns[0], [8])}) for one in rollouts[2:]]
    (new,) = update(vllm.FORMAT, row, *map(unmended, rollouts[:2]), *last)
    assert new["prompt"] == [[1, 2], [8]]


def test_a_prompt_that_the_server_scored_cannot_change() -> None:
    row = fixture(sglang.FORMAT, "prompt-from-scores")
    rollout = read_one(sglang.FORMAT, row)
    with pytest.raises(RecordError, match="no scores for the new one"):
        sglang.FORMAT.update(row, [with_turns(rollout, {0: with_prompt(rollout.turns[0], [1])})])


def test_sglang_counts_the_tokens_of_its_prompt() -> None:
    row = fixture(sglang.FORMAT, "clean")
    rollout = read_one(sglang.FORMAT, row)
    (new,) = update(sglang.FORMAT, row, with_turns(rollout, {0: with_prompt(rollout.turns[0], [1])}))
    assert paths(row, new) == ["request.input_ids", "response.meta_info.prompt_tokens"]


@pytest.mark.parametrize("form", [vllm.FORMAT, sglang.FORMAT, openai_chat.FORMAT], ids=lambda form: form.name)
def test_an_answer_cannot_be_forked_or_lose_its_call(form: Format) -> None:
    row = fixture(form, "clean")
    rollout = read_one(form, row)
    with pytest.raises(RecordError):
        form.update(row, [unmended(rollout), unmended(rollout)])
    with pytest.raises(RecordError):
        form.update(row, [with_turns(rollout, {}, [])])


def recovered(turn: Turn, logprobs: Sequence[float]) -> Turn:
    """The turn with ids looked up from its token strings."""
    assert turn.token_texts is not None
    return replace(
        turn,
        completion_ids=np.arange(len(turn.token_texts), dtype=np.int32),
        completion_logprobs=np.array(logprobs),
        ids_from=IdsFrom.RECOVERED,
    )


@pytest.mark.parametrize("parquet", [False, True], ids=["json", "parquet"])
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("clean", "response.choices.0.logprobs.content.0.logprob"),
        ("responses-object", "response.output.0.content.0.logprobs.0.logprob"),
    ],
)
def test_recovered_ids_are_never_written_and_their_logprobs_are(name: str, path: str, parquet: bool) -> None:
    row: Row = fixture(openai_chat.FORMAT, name)
    row = as_parquet(row) if parquet else row
    rollout = read_one(openai_chat.FORMAT, row)
    turn = rollout.turns[0]
    assert turn.token_texts is not None
    logprobs = [token.logprob for token in turn.token_texts]
    same = with_turns(rollout, {0: recovered(turn, logprobs)})
    assert openai_chat.FORMAT.update(row, [same])[0] is row
    (new,) = update(openai_chat.FORMAT, row, with_turns(rollout, {0: recovered(turn, [-7.5, *logprobs[1:]])}))
    assert paths(row, new) == [path]
