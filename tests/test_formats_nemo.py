"""NeMo-Gym rollouts, NeMo-RL dumps and message logs: what each shape says, and what it does not."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import toy
from tests.command import run, written
from tito_audit.errors import RecordError
from tito_audit.format import Format
from tito_audit.formats import nemo_gym, nemo_rl, nemo_rl_message_log
from tito_audit.record.column import Alignment, MovePolicy
from tito_audit.record.message import as_messages
from tito_audit.record.rollout import Place, Rollout

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "formats"
RECORDED = Path(__file__).resolve().parents[2] / "shared" / "recorded" / "nemo-gym-round-trip.json"
PLACE = Place("log.jsonl", 0)
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}


def read_one(form: Format, row: dict[str, Any]) -> Rollout:
    assert form.matches(row)
    (rollout,) = form.read(row, PLACE)
    return rollout


def tokens(prompt: list[int], generated: list[int]) -> dict[str, Any]:
    return {
        "prompt_token_ids": prompt,
        "generation_token_ids": generated,
        "generation_log_probs": [-0.5] * len(generated),
    }


def said(text: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content, **more}


def called(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"call_{name}", "name": name, "arguments": '{"a":1}', **more}


def answered(name: str, output: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"call_{name}", "output": output}


def thought(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}], **more}


def gym(*output: Any, **more: Any) -> dict[str, Any]:
    params = {"input": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER]}
    return {"responses_create_params": params, "response": {"output": list(output)}, "reward": 1.0, **more}


def test_the_items_of_one_call_become_one_message_with_the_tokens_of_its_last_item() -> None:
    row = gym(
        thought("hm"),
        said("Let me see."),
        called("one"),
        called("two", **tokens([1, 2], [3, 4])),
        answered("one", "rain"),
        answered("two", "sun"),
        said("Rain.", **tokens([1, 2, 3, 4, 5], [6])),
    )
    rollout = read_one(nemo_gym.FORMAT, row)
    assert [message.role for message in rollout.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    first = rollout.messages[1]
    assert (first.text, first.reasoning) == ("Let me see.", "hm")
    assert [call.arguments for call in first.tool_calls] == ['{"a":1}', '{"a":1}']
    assert [turn.message_index for turn in rollout.turns] == [1, 4]
    assert rollout.turns[0].completion_ids is not None
    assert rollout.turns[0].completion_ids.tolist() == [3, 4]
    assert rollout.turns[0].completion_text is None
    assert rollout.turns[1].completion_text == "Rain."


def test_tokens_on_the_text_before_the_tool_calls_belong_to_the_same_call() -> None:
    row = gym(
        said("Wait.", **tokens([1], [2])),
        called("one"),
        answered("one", "x"),
        said("Done.", **tokens([1], [3])),
    )
    rollout = read_one(nemo_gym.FORMAT, row)
    assert len(rollout.turns) == 2
    assert len(rollout.messages[1].tool_calls) == 1


def test_two_calls_with_nothing_between_them_stay_two() -> None:
    row = gym(said("One.", **tokens([1], [2])), thought("hm"), said("Two.", **tokens([1, 2], [3])))
    rollout = read_one(nemo_gym.FORMAT, row)
    assert [message.text for message in rollout.messages] == ["Weather?", "One.", "Two."]
    assert [turn.message_index for turn in rollout.turns] == [1, 2]


def test_a_streak_of_calls_that_ends_in_tokens_is_a_call_of_its_own() -> None:
    row = gym(said("One.", **tokens([1], [2])), called("a"), called("b", **tokens([1, 2], [3])))
    rollout = read_one(nemo_gym.FORMAT, row)
    assert [len(message.tool_calls) for message in rollout.messages] == [0, 0, 2]


def test_tools_take_the_chat_form_without_strict() -> None:
    rollout = read_one(nemo_gym.FORMAT, gym(said("Hi.")))
    function = {"name": "weather", "parameters": {"type": "object"}}
    assert rollout.tools == ({"type": "function", "function": function},)


def test_instructions_lead_and_input_may_be_one_string() -> None:
    row = gym(said("Hi."))
    row["responses_create_params"] = {"input": "Hello?", "instructions": "Be kind."}
    rollout = read_one(nemo_gym.FORMAT, row)
    assert [(m.role, m.text) for m in rollout.messages[:2]] == [("system", "Be kind."), ("user", "Hello?")]


def test_input_parts_of_text_become_one_string() -> None:
    row = gym(said("Hi."))
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    row["responses_create_params"] = {"input": [{"role": "developer", "content": parts}]}
    assert read_one(nemo_gym.FORMAT, row).messages[0].wire == {"role": "developer", "content": "a\nb"}


def test_nothing_captured_is_not_an_empty_completion() -> None:
    rollout = read_one(nemo_gym.FORMAT, gym(said("Hi.", **tokens([], []))))
    assert rollout.turns[0].prompt_ids is None
    assert rollout.turns[0].completion_ids is None


def test_placeholder_ids_are_kept_for_the_rule_that_names_them() -> None:
    rollout = read_one(nemo_gym.FORMAT, gym(said("Hi.", **tokens([0], [0]))))
    assert rollout.turns[0].completion_ids is not None
    assert rollout.turns[0].completion_ids.tolist() == [0]


def test_a_rollout_without_token_fields_says_that_it_never_holds_ids() -> None:
    rollout = read_one(nemo_gym.FORMAT, gym(said("Hi.")))
    assert rollout.turns == ()
    assert rollout.stated.ids_wanted is False


def test_decoded_tokens_are_kept_as_text() -> None:
    rollout = read_one(nemo_gym.FORMAT, gym(said("Hi.", prompt_str="<u>", generation_str="Hi.<e>")))
    assert rollout.stated.ids_wanted is False
    assert (rollout.turns[0].prompt_text, rollout.turns[0].completion_text) == ("<u>", "Hi.<e>")


def test_logprobs_of_another_length_stay_as_a_column_that_fits_nowhere() -> None:
    item = said("Hi.", **{**tokens([1], [2, 3]), "generation_log_probs": [-1.0]})
    (turn,) = read_one(nemo_gym.FORMAT, gym(item)).turns
    assert turn.completion_logprobs is None
    assert [(column.name, column.alignment) for column in turn.columns] == [("generation_log_probs", None)]


def test_expert_routing_is_dropped_when_tokens_move() -> None:
    item = said("Hi.", **tokens([1], [2, 3]), routed_experts=[[[1]], [[2]]])
    (turn,) = read_one(nemo_gym.FORMAT, gym(item)).turns
    assert [(c.name, c.policy) for c in turn.columns][1] == ("routed_experts", MovePolicy.DROP)


def test_transitions_give_one_turn_each_with_what_it_was_sent() -> None:
    user = {"role": "user", "content": "Weather?"}
    first = [user, called("one", **tokens([1], [2])), answered("one", "rain")]
    second = [*first, said("Rain.", **tokens([1, 2, 3], [4]))]
    row = gym(first, second, contains_transitions=True)
    rollout = read_one(nemo_gym.FORMAT, row)
    assert [m.role for m in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert [turn.message_index for turn in rollout.turns] == [1, 3]
    assert [t.completion_ids.tolist() for t in rollout.turns if t.completion_ids is not None] == [[2], [4]]


def test_a_transition_with_another_history_keeps_its_own() -> None:
    user = {"role": "user", "content": "Weather?"}
    first = [user, said("Hm.", **tokens([1], [2])), {"role": "user", "content": "state 1"}]
    second = [user, {"role": "user", "content": "state 2"}, said("Rain.", **tokens([1, 3], [4]))]
    rollout = read_one(nemo_gym.FORMAT, gym(first, second))
    assert [turn.message_index for turn in rollout.turns] == [None, 2]
    assert rollout.turns[0].prompt_messages is not None
    assert [message.text for message in rollout.turns[0].prompt_messages] == ["Weather?"]


def test_transitions_without_the_request_get_it_in_front() -> None:
    rollout = read_one(nemo_gym.FORMAT, gym([said("Hi.", **tokens([1], [2]))]))
    assert [message.role for message in rollout.messages] == ["user", "assistant"]


def test_items_that_no_message_can_show_leave_the_tokens_and_take_the_messages() -> None:
    row = gym({"type": "web_search_call", "id": "w"}, said("Hi.", **tokens([1], [2])))
    rollout = read_one(nemo_gym.FORMAT, row)
    assert rollout.messages == ()
    assert rollout.stated.facts["items_not_read"] == ("web_search_call",)
    assert rollout.turns[0].message_index is None


def test_a_row_states_its_group_and_whether_it_is_masked() -> None:
    rollout = read_one(nemo_gym.FORMAT, gym(said("Hi."), _ng_task_index=4, mask_sample=True))
    assert (rollout.stated.group, rollout.stated.facts["mask_sample"]) == (4, True)


def test_an_answer_cut_by_the_token_limit_says_so() -> None:
    row = gym(said("Hi.", **tokens([1], [2])))
    row["response"]["incomplete_details"] = {"reason": "max_output_tokens"}
    assert read_one(nemo_gym.FORMAT, row).turns[0].finish_reason == "length"


@pytest.mark.parametrize("output", [[1], ["text"], [called("x") | {"name": None}]])
def test_output_that_is_no_item_is_a_record_error(output: list[Any]) -> None:
    with pytest.raises(RecordError):
        nemo_gym.FORMAT.read(gym(*output), PLACE)


@pytest.mark.shared
def test_the_recorded_round_trip_says_the_same_in_both_forms() -> None:
    if not RECORDED.exists():
        pytest.skip("the recorded data are not beside the checkout")
    recorded = json.loads(RECORDED.read_text())
    chat = recorded["expected_output_return_token_id_information"]
    items = read_one(
        nemo_gym.FORMAT,
        {"responses_create_params": {"input": chat["messages"][:2]}, "response": recorded["input"]},
    )
    spoken = read_one(nemo_gym.FORMAT, chat)
    assert not nemo_gym.FORMAT.matches(recorded["expected_output"])
    assert [m.role for m in items.messages] == [m.role for m in spoken.messages]
    assert [m.tool_calls for m in items.messages] == [m.tool_calls for m in spoken.messages]
    for left, right in zip(items.turns, spoken.turns, strict=True):
        assert left.message_index == right.message_index
        np.testing.assert_array_equal(left.seen_ids, right.seen_ids)
        np.testing.assert_array_equal(left.completion_logprobs, right.completion_logprobs)
    assert [len(turn.completion_ids) for turn in spoken.turns if turn.completion_ids is not None] == [
        495,
        207,
    ]


def dump(**more: Any) -> dict[str, Any]:
    return {
        "content": [["2+2?", "4"]],
        "rewards": [1.0],
        "input_lengths": [5],
        "token_ids": [[1, 20, 30, 31, 2, 0, 0]],
        "token_loss_mask": [[0, 0, 1, 1, 1, 0, 0]],
        "sample_loss_mask": [0.0],
        "advantages": [[0.7] * 7],
        "generation_logprobs": [[0.0, 0.0, -0.2, -0.1, -0.5, 0.0, 0.0]],
        "prev_logprobs": [[0.0, -2.0, -0.2, -0.1, -0.5, 0.0, 0.0]],
        "idx": 0,
        **more,
    }


def test_a_dump_loses_its_wrapping_and_its_padding() -> None:
    rollout = read_one(nemo_rl.FORMAT, dump())
    row = rollout.training_row
    assert row is not None
    assert row.loss_mask is not None
    assert row.logprobs is not None
    assert row.token_ids.tolist() == [1, 20, 30, 31, 2]
    assert row.loss_mask.tolist() == [False, False, True, True, True]
    assert row.logprobs.tolist() == [0.0, 0.0, -0.2, -0.1, -0.5]
    assert row.sentinel == 0.0
    policies = {column.name: column.policy for column in row.columns}
    assert policies["prev_logprobs"] is MovePolicy.STALE
    assert policies["advantages"] is MovePolicy.MOVE
    assert rollout.stated.facts == {"content": ("2+2?", "4"), "sample_loss_mask": 0.0}
    assert list(map(str, rollout.stated.reasons)) == ["messages not read: the texts of the log name no roles"]


def test_the_names_of_the_data_plane_are_read_without_wrapping() -> None:
    row = {
        "input_ids": [1, 2, 3],
        "token_mask": [0, 1, 1],
        "sample_mask": 1.0,
        "generation_logprobs": [0.0, -1.0, -1.0],
    }
    rollout = read_one(nemo_rl.FORMAT, row)
    assert rollout.training_row is not None
    assert rollout.training_row.loss_mask is not None
    assert rollout.training_row.loss_mask.tolist() == [False, True, True]


def test_a_dump_column_of_another_width_fits_nowhere() -> None:
    row = read_one(nemo_rl.FORMAT, dump(generation_logprobs=[[-1.0] * 8])).training_row
    assert row is not None
    assert row.logprobs is None
    (column,) = [column for column in row.columns if column.name == "generation_logprobs"]
    assert (column.alignment, len(column.values)) == (None, 8)


def test_numpy_columns_of_a_parquet_dump_are_read_alike() -> None:
    row = {key: [np.array(v[0])] if key != "idx" and isinstance(v[0], list) else v for key, v in dump().items()}
    row["content"] = [["2+2?", "4"]]
    row["input_lengths"] = np.array([5])
    trained = read_one(nemo_rl.FORMAT, row).training_row
    assert trained is not None
    assert trained.token_ids.tolist() == [1, 20, 30, 31, 2]


@pytest.mark.parametrize("length", [9, -1, 2.5, "five"])
def test_a_length_that_the_row_cannot_have_is_a_record_error(length: object) -> None:
    with pytest.raises(RecordError, match="input_lengths"):
        nemo_rl.FORMAT.read(dump(input_lengths=[length]), PLACE)


@pytest.mark.parametrize(
    ("row", "roles"),
    [
        ({"content": [["2+2?", "4"]], "input_lengths": [6], "idx": 0}, []),
        ({"content": [[{"role": "user", "content": "2+2?"}]], "rewards": [1.0], "idx": 3}, ["user"]),
    ],
)
def test_dumps_of_text_say_that_they_never_hold_ids(row: dict[str, Any], roles: list[str]) -> None:
    rollout = read_one(nemo_rl.FORMAT, row)
    assert rollout.training_row is None
    assert rollout.stated.ids_wanted is False
    assert [message.role for message in rollout.messages] == roles


def log(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"message_log": list(entries)}


def test_a_message_log_is_put_together_end_to_end() -> None:
    row = log(
        {"role": "user", "content": "2+2?", "token_ids": [1, 2], "token_loss_mask": [0, 0]},
        {
            "role": "assistant",
            "content": "4",
            "token_ids": [3, 4],
            "token_loss_mask": [1, 1],
            "generation_logprobs": [-0.1, -0.2],
        },
    )
    rollout = read_one(nemo_rl_message_log.FORMAT, row)
    trained = rollout.training_row
    assert trained is not None
    assert trained.loss_mask is not None
    assert trained.logprobs is not None
    assert trained.token_ids.tolist() == [1, 2, 3, 4]
    assert trained.loss_mask.tolist() == [False, False, True, True]
    assert trained.logprobs.tolist() == [0.0, 0.0, -0.1, -0.2]
    assert [dict(message.wire) for message in rollout.messages] == [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
    ]


def test_a_message_log_without_masks_trains_what_was_generated() -> None:
    row = log(
        {"role": "user", "content": "a", "token_ids": [1, 2]},
        {"role": "assistant", "content": "b", "token_ids": [3]},
    )
    trained = read_one(nemo_rl_message_log.FORMAT, row).training_row
    assert trained is not None
    assert trained.loss_mask is not None
    assert trained.loss_mask.tolist() == [False, False, True]
    assert trained.columns == ()


@pytest.mark.parametrize("content", ["", "<|im_start|>user\n2+2?<|im_end|>\n"])
def test_contents_that_are_no_bodies_are_not_offered_as_messages(content: str) -> None:
    row = log(
        {"role": "user", "content": content, "token_ids": [1, 2]},
        {"role": "assistant", "content": "4", "token_ids": [3]},
    )
    rollout = read_one(nemo_rl_message_log.FORMAT, row)
    assert rollout.messages == ()
    assert rollout.stated.facts["content"] == (content, "4")


def test_a_misfit_inside_one_message_is_never_taken_for_a_shift() -> None:
    row = log(
        {"role": "user", "content": "a", "token_ids": [1, 2]},
        {"role": "assistant", "content": "b", "token_ids": [3, 4], "generation_logprobs": [-1.0]},
    )
    trained = read_one(nemo_rl_message_log.FORMAT, row).training_row
    assert trained is not None
    assert trained.logprobs is None
    assert [(column.name, column.alignment) for column in trained.columns] == [("generation_logprobs", None)]


def test_further_columns_of_messages_move_with_their_tokens() -> None:
    row = log({"role": "assistant", "content": "b", "token_ids": [3, 4], "advantages": [1.0, 2.0]})
    trained = read_one(nemo_rl_message_log.FORMAT, row).training_row
    assert trained is not None
    assert [(c.name, c.alignment) for c in trained.columns] == [("advantages", Alignment.FULL)]


def test_a_message_log_without_tokens_says_that_it_never_holds_ids() -> None:
    rollout = read_one(nemo_rl_message_log.FORMAT, log({"role": "user", "content": "a"}))
    assert rollout.stated.ids_wanted is False


@pytest.mark.parametrize("name", ["nemo_gym", "nemo_rl", "nemo_rl_message_log"])
def test_the_fixtures_are_what_their_script_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES))
    made = importlib.import_module("make_nemo").lines()[name]
    assert (FIXTURES / f"{name}.jsonl").read_text() == made


@pytest.mark.parametrize("form", [nemo_gym.FORMAT, nemo_rl.FORMAT, nemo_rl_message_log.FORMAT])
def test_every_fixture_row_is_read(form: Format) -> None:
    for line in (FIXTURES / f"{form.name}.jsonl").read_text().splitlines():
        assert form.matches(json.loads(line))
        assert form.read(json.loads(line), PLACE)


@pytest.mark.parametrize("sent", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["responses", "chat"])
@pytest.mark.parametrize("strict", [False, True, None])
def test_a_prompt_holds_the_tools_with_their_strict_or_without(
    strict: bool | None, wrapped: bool, sent: bool, tmp_path: Path
) -> None:
    """The converter of Responses tools has kept `strict` inside `function`, and dropped it."""
    function = {"name": "weather", "description": "Look it up", "parameters": {"type": "object"}}
    told = {"type": "function", "function": {**function, "strict": strict}}
    logged = told if wrapped else {"type": "function", **function, "strict": strict}
    messages = as_messages([{"role": "user", "content": "Go"}], "messages")
    tools = [told if sent else {"type": "function", "function": function}]
    text = toy.toy_renderer().render(messages, tools, add_generation_prompt=True)
    encode = toy.toy_tokenizer().encode
    answer = said("Done", **tokens(encode(text).tolist(), encode("Done<|im_end|>").tolist()))
    row = gym(answer, responses_create_params={"input": [{"role": "user", "content": "Go"}], "tools": [logged]})
    log = written(tmp_path / "log.jsonl", [row])
    code, out, _ = run("scan", log, "-t", toy.TOKENIZERS / "toy_bpe", "--no-config", "--report", "jsonl")
    found = [one for one in map(json.loads, out.splitlines()) if "severity" in one]
    assert (code, [(one["code"], one["message"]) for one in found if one["code"].startswith("TPL")]) == (0, [])
