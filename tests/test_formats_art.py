"""ART and Agent Lightning: what each shape of their logs says, and what the frameworks themselves write."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.forms import ids, ids_of_turns
from tests.frameworks.ask import asked, written
from tests.tiers import one_in
from tests.world import FORMATS, TOY
from tito_audit import repair_rollouts
from tito_audit.errors import RecordError
from tito_audit.format import Format
from tito_audit.formats import agent_lightning_event, agent_lightning_span, art_group, art_parquet, pick_format
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.stated import Stated
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import open_log

PLACE = Place("log.jsonl", 4)
ASKED = {"role": "user", "content": "2+2?"}
SAID = {"role": "assistant", "content": "It is 4"}
FORMS = (art_group.FORMAT, art_parquet.FORMAT, agent_lightning_event.FORMAT, agent_lightning_span.FORMAT)
FILES = {form.name: FORMATS / f"{form.name}.jsonl" for form in FORMS}
FILES["art_parquet"] = FORMATS / "art_parquet.parquet"


def read(form: Format, row: dict[str, Any]) -> tuple[Rollout, ...]:
    assert pick_format(row) is form
    return tuple(form.read(row, PLACE))


def rows_of(form: Format) -> list[dict[str, Any]]:
    return [dict(raw.value or {}) for raw in open_log(FILES[form.name])]


def choice(text: str = "It is 4", **more: Any) -> dict[str, Any]:
    return {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": text}, **more}


def group(*trajectories: dict[str, Any]) -> dict[str, Any]:
    return {"trajectories": list(trajectories)}


def stored(trajectory: dict[str, Any], **columns: Any) -> dict[str, Any]:
    text = json.dumps(trajectory, ensure_ascii=False, separators=(",", ":"))
    row = {
        "format_version": 2,
        "group_index": 1,
        "trajectory_index": 0,
        "group_json": "{}",
        "trajectory_json": text,
    }
    return {**row, **columns}


def entry(logprob: float | None) -> dict[str, Any]:
    return {"token": "x", "logprob": logprob, "bytes": None, "top_logprobs": []}


def chat(messages: list[Any], *choices: dict[str, Any], at: int = 0, **request: Any) -> dict[str, Any]:
    """A chat completion as ART captures it."""
    response = {"id": "c", "object": "chat.completion", "model": "org/m", "choices": list(choices)}
    time = f"2026-05-01T10:00:0{at}"
    return {
        "request": {"messages": messages, "model": "org/m", **request},
        "response": response,
        "start_time": f"{time}Z",
        "end_time": f"{time}.5Z",
        "model": "org/m",
    }


# ART


def test_each_history_of_each_trajectory_is_a_rollout_and_each_choice_a_call() -> None:
    first = {"messages_and_choices": [ASKED, choice(prompt_token_ids=[1, 20], token_ids=[30, 2])], "tools": None}
    later = {"messages_and_choices": [ASKED, choice("5", prompt_token_ids=[1], token_ids=[33])]}
    row = group({**first, "additional_histories": [later]}, first)
    rollouts = read(art_group.FORMAT, row)
    assert [rollout.place for rollout in rollouts] == [Place("log.jsonl", 4, item) for item in range(3)]
    assert [ids_of_turns(rollout) for rollout in rollouts] == [
        [([1, 20], [30, 2])],
        [([1], [33])],
        [([1, 20], [30, 2])],
    ]
    assert [message.text for message in rollouts[1].messages] == ["2+2?", "5"]
    (turn,) = rollouts[0].turns
    assert (turn.message_index, turn.finish_reason, turn.completion_text) == (1, "stop", "It is 4")
    assert {rollout.stated.group for rollout in rollouts} == {4}


def test_a_trajectory_by_itself_is_read_too() -> None:
    (rollout,) = read(art_group.FORMAT, {"messages_and_choices": [ASKED, choice(token_ids=[3])], "reward": 1.0})
    assert ids_of_turns(rollout) == [(None, [3])]


def test_histories_without_ids_say_that_they_never_hold_them() -> None:
    for entries in ([ASKED, choice()], [ASKED, SAID], []):
        (rollout,) = read(art_group.FORMAT, group({"messages_and_choices": entries}))
        assert rollout.turns == ()
        assert rollout.stated.ids_wanted is False
        assert len(rollout.messages) == len(entries)


def test_one_choice_without_ids_among_others_is_a_call_whose_ids_are_missing() -> None:
    entries = [ASKED, choice(prompt_token_ids=[1], token_ids=[2]), ASKED, choice()]
    (rollout,) = read(art_group.FORMAT, group({"messages_and_choices": entries}))
    assert ids_of_turns(rollout) == [([1], [2]), (None, None)]
    assert rollout.stated.ids_wanted


def test_ids_may_be_spelled_in_the_token_strings_that_version_2_keeps() -> None:
    content = [{**entry(-0.5), "token": f"token_id:{token}"} for token in (30, 2)]
    trajectory = {"messages_and_choices": [ASKED, choice(logprobs={"content": content})]}
    (rollout,) = read(art_parquet.FORMAT, stored(trajectory))
    assert ids_of_turns(rollout) == [(None, [30, 2])]
    assert rollout.turns[0].completion_logprobs is not None
    assert rollout.turns[0].completion_logprobs.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize(("versions", "expected"), [((3, 3), ("3",)), ((3, 4), ()), ((None, 4), ())])
def test_weights_that_did_not_change_on_the_way_are_those_of_every_call(
    versions: tuple[Any, Any], expected: tuple[str, ...]
) -> None:
    trajectory = {"messages_and_choices": [ASKED, choice(token_ids=[3])]}
    trajectory |= {"initial_policy_version": versions[0], "final_policy_version": versions[1]}
    (rollout,) = read(art_parquet.FORMAT, stored(trajectory))
    assert rollout.turns[0].weight_versions == expected


def test_a_group_without_trajectories_is_a_row_in_which_nothing_is_missed() -> None:
    row = stored({}, trajectory_json=None, trajectory_index=None)
    (rollout,) = read(art_parquet.FORMAT, row)
    assert rollout.stated == Stated(group=1, ids_wanted=False)


def test_version_1_is_text_with_its_tool_calls_read_out_of_their_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": json.dumps([call]), "trainable": True}
    row = {"group_index": 0, "reward": 1.0, "metrics": None, "metadata": None, "tools": "[]", "logs": None}
    (rollout,) = read(art_parquet.FORMAT, {**row, "messages": [{**ASKED, "trainable": False}, message]})
    assert rollout.stated == Stated(group=0, ids_wanted=False)
    assert [call.name for call in rollout.messages[1].tool_calls] == ["f"]
    assert all("trainable" not in message.wire for message in rollout.messages)


@pytest.mark.parametrize("version", [1, 3])
def test_another_version_of_the_rows_is_refused_by_its_number(version: int) -> None:
    with pytest.raises(RecordError, match=f"format_version is {version}"):
        read(art_parquet.FORMAT, stored({}, format_version=version))


def test_nan_in_the_text_of_a_trajectory_is_an_unknown_logprob() -> None:
    trajectory = {"messages_and_choices": [choice(token_ids=[3], logprobs={"content": [entry(float("nan"))]})]}
    (rollout,) = read(art_parquet.FORMAT, stored(trajectory))
    assert rollout.turns[0].completion_logprobs is not None
    assert np.isnan(rollout.turns[0].completion_logprobs).all()


def exchanges(**kinds: Any) -> tuple[Rollout, ...]:
    return read(art_parquet.FORMAT, stored({"exchanges": kinds}))


def test_exchanges_are_calls_of_one_conversation_in_the_order_of_their_times() -> None:
    first = chat([ASKED], choice(token_ids=[2], prompt_token_ids=[1]))
    second = chat([ASKED, SAID, ASKED], choice("5", token_ids=[4], prompt_token_ids=[1, 2, 3]), at=1)
    (rollout,) = exchanges(chat_completions=[second, first])
    assert ids_of_turns(rollout) == [([1], [2]), ([1, 2, 3], [4])]
    assert [turn.message_index for turn in rollout.turns] == [1, 3]
    assert rollout.stated == Stated(model="org/m", group=1)


def test_half_a_second_later_is_later() -> None:
    first = chat([ASKED], choice(token_ids=[2]))
    second = chat([ASKED], choice(token_ids=[4])) | {"start_time": "2026-05-01T10:00:00.250000Z"}
    (rollout,) = exchanges(chat_completions=[second, first])
    assert [ids(turn.completion_ids) for turn in rollout.turns] == [[2], [4]]


def test_exchanges_with_other_tools_are_another_agents() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    calls = [chat([ASKED], choice(token_ids=[n]), at=n, tools=[tool] if n % 2 else []) for n in range(4)]
    rollouts = exchanges(chat_completions=calls)
    assert [[ids(turn.completion_ids) for turn in rollout.turns] for rollout in rollouts] == [
        [[0], [2]],
        [[1], [3]],
    ]
    assert [len(rollout.tools) for rollout in rollouts] == [0, 1]


def test_of_two_choices_the_one_that_was_sent_back_stays_in_line() -> None:
    first = chat([ASKED], choice("5", token_ids=[5]), choice(token_ids=[2]) | {"index": 1})
    second = chat([ASKED, SAID, ASKED], choice(token_ids=[4]), at=1)
    line, beside = exchanges(chat_completions=[first, second])
    assert [ids(turn.completion_ids) for turn in line.turns] == [[2], [4]]
    assert [ids(turn.completion_ids) for turn in beside.turns] == [[5]]


def test_a_call_with_another_history_keeps_what_it_was_sent() -> None:
    first = chat([{"role": "user", "content": "old"}], choice(token_ids=[2]))
    (rollout,) = exchanges(chat_completions=[first, chat([ASKED], choice(token_ids=[4]), at=1)])
    assert rollout.turns[0].message_index is None
    assert [message.text for message in rollout.turns[0].prompt_messages or ()] == ["old"]
    assert rollout.turns[1].message_index == 1


def test_an_exchange_without_an_answer_is_left_out() -> None:
    (rollout,) = exchanges(chat_completions=[chat([ASKED]), chat([ASKED], choice(token_ids=[4]), at=1)])
    assert [ids(turn.completion_ids) for turn in rollout.turns] == [[4]]


def test_the_generations_of_a_responses_exchange_are_its_calls() -> None:
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    returned = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}
    tokens = [
        {"prompt_token_ids": [1], "output_indices": [0], "output_tokens": [{"token_id": 2, "logprob": -0.5}]},
        {
            "prompt_token_ids": [1, 2, 3],
            "output_indices": [2],
            "output_tokens": [{"token_id": 4, "logprob": None}],
        },
    ]
    answer = {"object": "response", "model": "m", "output": [called, returned, text], "token_generations": tokens}
    (rollout,) = exchanges(responses=[{"request": {"input": "2+2?"}, "response": answer}])
    assert ids_of_turns(rollout) == [([1], [2]), ([1, 2, 3], [4])]
    assert [turn.message_index for turn in rollout.turns] == [1, 3]
    assert rollout.turns[0].completion_logprobs is not None
    assert rollout.turns[0].completion_logprobs.tolist() == [-0.5]
    del answer["token_generations"]
    (rollout,) = exchanges(responses=[{"request": {"input": "2+2?"}, "response": answer}])
    assert rollout.stated.ids_wanted is False


def test_a_messages_exchange_takes_the_chat_form() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "é"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "ok"}]}
    request = {
        "model": "m",
        "system": "Be kind.",
        "messages": [ASKED, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    }
    content = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "4"}]
    response = {"content": content, "prompt_token_ids": [1], "token_ids": [2, 3], "logprobs": [-0.5, -0.6]}
    (rollout,) = exchanges(messages=[{"request": request, "response": {**response, "stop_reason": "end_turn"}}])
    assert [m.role for m in rollout.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert rollout.messages[-1].reasoning == "hm"
    assert rollout.tools[0]["function"] == {"name": "f", "description": "d", "parameters": {"type": "object"}}
    (turn,) = rollout.turns
    assert (ids_of_turns(rollout), turn.message_index, turn.finish_reason) == ([([1], [2, 3])], 4, "end_turn")
    assert turn.completion_logprobs is not None
    assert turn.completion_logprobs.tolist() == [-0.5, -0.6]
    request["messages"].append({"role": "user", "content": [{"type": "document", "source": {}}]})
    (rollout,) = exchanges(messages=[{"request": request, "response": response}])
    assert (rollout.messages, ids_of_turns(rollout)) == ((), [([1], [2, 3])])


def test_a_completions_exchange_has_its_prompt_in_the_request() -> None:
    one = {"index": 0, "text": "4", "token_ids": [3], "finish_reason": "length"}
    exchange = {"request": {"prompt": [1, 2]}, "response": {"choices": [one]}}
    (rollout,) = exchanges(completions=[exchange])
    assert (ids_of_turns(rollout), rollout.turns[0].finish_reason) == ([([1, 2], [3])], "length")


# Agent Lightning


def event(data: dict[str, Any], kind: str = "model_request", **more: Any) -> dict[str, Any]:
    return {"event_type": kind, "rollout_id": "r", "attempt_id": "a", "timestamp": 1.0, "data": data, **more}


def request(*messages: Any, prompt: list[int], **answer: Any) -> dict[str, Any]:
    response = {"model": "m", "choices": [choice(**answer)], "prompt_token_ids": prompt}
    return {"request": {"messages": list(messages)}, "response": response, "server": {"model": "s", "version": 7}}


def test_a_model_request_is_a_call_of_the_servers_model_and_weights() -> None:
    row = event(request(ASKED, prompt=[1], token_ids=[2], logprobs={"content": [entry(-0.5)]}))
    (rollout,) = read(agent_lightning_event.FORMAT, row)
    assert ids_of_turns(rollout) == [([1], [2])]
    (turn,) = rollout.turns
    assert (turn.message_index, turn.weight_versions, turn.finish_reason) == (1, ("7",), "stop")
    assert rollout.stated == Stated(model="s", attempt="a", facts={"id": "r"})


@pytest.mark.parametrize(
    "row",
    [
        event({"value": 1.0}, "reward"),
        event({"http_status": 503, "response": {"choices": [choice(token_ids=[1])]}}),
        event({"status": "error", "response": {}}),
        event({"response": {"error": {"message": "no"}}, "request": {}}),
        event({"prompt_token_ids": [1], "response_token_ids": [2], "error": "late"}),
        {"rollout": {"id": "r"}, "events": [], "resources": {}},
    ],
)
def test_events_that_are_no_answered_call_miss_no_ids(row: dict[str, Any]) -> None:
    (rollout,) = read(agent_lightning_event.FORMAT, row)
    assert rollout.turns == ()
    assert rollout.stated.ids_wanted is False


def test_a_triplet_may_have_null_in_place_of_logprobs() -> None:
    for logprobs in (None, [-0.5, -0.25]):
        data = {"prompt_token_ids": [1], "response_token_ids": [2, 3], "response_log_probs": logprobs}
        (rollout,) = read(agent_lightning_event.FORMAT, event(data))
        assert ids_of_turns(rollout) == [([1], [2, 3])]
        values = rollout.turns[0].completion_logprobs
        assert (None if values is None else values.tolist()) == logprobs


def chunk(delta: dict[str, Any], **piece: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, **piece}]}


def test_the_chunks_of_a_stream_are_one_answer() -> None:
    part = {"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ":1}"}}
    chunks = [
        {**chunk({"role": "assistant", "content": ""}, token_ids=[]), "prompt_token_ids": [1]},
        chunk({"content": "It"}, token_ids=[2], logprobs={"content": [entry(-0.5)]}),
        chunk({"content": " is", "tool_calls": [part]}, token_ids=[3], logprobs={"content": [entry(-0.25)]}),
        chunk({"tool_calls": [rest]}, token_ids=[4], logprobs={"content": [entry(-1.0)]}, finish_reason="stop"),
        {"object": "chat.completion.chunk", "choices": [], "usage": {"prompt_tokens": 1}},
    ]
    row = event({"request": {"messages": [ASKED]}, "response": chunks})
    (rollout,) = read(agent_lightning_event.FORMAT, row)
    assert ids_of_turns(rollout) == [([1], [2, 3, 4])]
    assert rollout.turns[0].completion_logprobs is not None
    assert rollout.turns[0].completion_logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert (rollout.messages[1].text, rollout.turns[0].finish_reason) == ("It is", "stop")
    assert [(call.name, call.arguments) for call in rollout.messages[1].tool_calls] == [("f", '{"a":1}')]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([chunk({"content": "a"}), chunk({"content": "b"}) | {"choices": [{"index": 1}]}], "several choices"),
        ([{"choices": [{}, {}]}], "several choices"),
        ([chunk({"audio": {"id": "x"}})], "'audio'"),
        ([chunk({"tool_calls": [{"index": 0}]})], "without a function"),
        ([chunk("a")], "not an object"),  # type: ignore[arg-type]
    ],
)
def test_a_stream_that_is_not_joined_is_refused_in_words(chunks: list[Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read(agent_lightning_event.FORMAT, event({"response": chunks}))


def archive(*events: dict[str, Any]) -> dict[str, Any]:
    return {"rollout": {"rollout_id": "r"}, "events": list(events), "resources": {}}


def test_of_calls_with_one_prompt_in_an_attempt_the_last_one_counts() -> None:
    asked = [request(ASKED, prompt=[1], token_ids=[n]) for n in range(3)]
    row = archive(event(asked[0]), event({"value": 1}, "reward"), event(asked[1]), event(asked[2], attempt_id="b"))
    first, second = read(agent_lightning_event.FORMAT, row)
    assert (ids_of_turns(first), ids_of_turns(second)) == ([([1], [1])], [([1], [2])])
    assert (first.stated.attempt, second.stated.attempt) == ("a", "b")


def span(**attributes: Any) -> dict[str, Any]:
    return {"rollout_id": "r", "trace_id": "t", "span_id": "s", "name": "x", "attributes": attributes}


@pytest.mark.parametrize(
    "attributes",
    [
        {"prompt_token_ids": [1], "response_token_ids": [2, 3]},
        {"prompt_token_ids": "[1]", "response_token_ids": "[2, 3]"},
        {"llm.hosted_vllm.prompt_token_ids": "[1]", "llm.hosted_vllm.response_token_ids": "[[2, 3]]"},
        {
            "llm.hosted_vllm.prompt_token_ids": "[1]",
            "llm.hosted_vllm.choices": "[{'token_ids': [2, 3], 'x': None}]",
        },
        {
            "agentlightning.operation.output.prompt_token_ids": [1],
            "agentlightning.operation.output.choices.0.provider_specific_fields.token_ids": [2, 3],
        },
    ],
)
def test_a_span_has_its_ids_under_the_names_of_its_tracer(attributes: dict[str, Any]) -> None:
    (rollout,) = read(agent_lightning_span.FORMAT, span(**attributes))
    assert ids_of_turns(rollout) == [([1], [2, 3])]


def test_a_span_of_no_call_misses_no_ids_and_one_of_a_call_without_them_does() -> None:
    (rollout,) = read(agent_lightning_span.FORMAT, span(**{"agentlightning.reward.0.value": 1.0}))
    assert rollout.stated.ids_wanted is False
    (rollout,) = read(agent_lightning_span.FORMAT, span(prompt_token_ids=[], response_token_ids=[]))
    assert ids_of_turns(rollout) == [(None, None)]
    assert rollout.stated.ids_wanted


def prompted(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = {f"gen_ai.prompt.{i}.{key}": value for i, one in enumerate(messages) for key, value in one.items()}
    return span(prompt_token_ids=[1], response_token_ids=[2], **found, **more)


def test_dotted_attributes_are_messages_and_tools() -> None:
    called = {
        "role": "assistant",
        "tool_calls.0.id": "c",
        "tool_calls.0.name": "f",
        "tool_calls.0.arguments": "{}",
    }
    returned = {"role": "tool", "tool_call_id": "c", "content": "ok"}
    parts = {"role": "user", "content": json.dumps([{"type": "text", "text": "look"}])}
    functions = {"name": "f", "description": "d", "parameters": '{"type": "object"}'}
    said_ = {"role": "assistant", "content": "4", "finish_reason": "stop"}
    row = prompted(
        *(parts, called, returned),
        **{f"gen_ai.request.functions.0.{key}": value for key, value in functions.items()},
        **{f"gen_ai.completion.0.{key}": value for key, value in said_.items()},
    )
    (rollout,) = read(agent_lightning_span.FORMAT, row)
    assert [(m.role, m.text) for m in rollout.messages] == [
        ("user", "look"),
        ("assistant", ""),
        ("tool", "ok"),
        ("assistant", "4"),
    ]
    assert [call.name for call in rollout.messages[1].tool_calls] == ["f"]
    assert rollout.tools[0]["function"]["parameters"] == {"type": "object"}
    assert (rollout.turns[0].message_index, rollout.turns[0].finish_reason) == (3, "stop")


def test_messages_that_lack_the_tool_calls_of_an_answer_are_no_conversation() -> None:
    lost = {"role": "assistant", "content": ""}, {"role": "tool", "content": "ok"}
    (rollout,) = read(agent_lightning_span.FORMAT, prompted(ASKED, *lost))
    assert (rollout.messages, rollout.turns[0].prompt_messages) == ((), None)
    called = {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.finish_reason": "tool_calls"}
    (rollout,) = read(agent_lightning_span.FORMAT, prompted(ASKED, **called))
    assert [message.text for message in rollout.turns[0].prompt_messages or ()] == ["2+2?"]
    assert rollout.turns[0].message_index is None


def test_triplets_in_a_list_are_the_calls_of_one_rollout() -> None:
    listed = [{"prompt": {"token_ids": [n]}, "response": {"token_ids": [n + 1]}, "reward": None} for n in (1, 2)]
    (rollout,) = read(agent_lightning_span.FORMAT, {"rollout_id": "r", "triplets": listed})
    assert ids_of_turns(rollout) == [([1], [2]), ([2], [3])]


# All of them


@pytest.mark.parametrize(
    "row",
    [
        {"trajectories": [{"steps": []}]},
        {"trajectories": []},
        {"trajectory": "[]"},
        {"events": [{"name": "x"}], "rollout": {}},
        {"event_type": "model_request", "message": "x"},
        {"prompt": {"text": "a"}, "response": {"text": "b"}},
        {"attributes": {"a": 1}, "name": "x"},
        {"group_index": 0, "messages": [ASKED], "reward": 1.0},
        {"trajectory_json": "{}"},
    ],
)
def test_other_rows_are_of_none_of_these_formats(row: dict[str, Any]) -> None:
    assert not any(form.matches(row) for form in FORMS)


def spoiled(value: Any) -> Iterator[Any]:
    """The value with each of its parts, however deep, replaced by what does not belong there."""
    wrong = (None, [], {}, "text", 2**70, float("nan"), [None], [[1]], ["a"], [True], [-1.5])
    if isinstance(value, dict):
        for key, inner in value.items():
            yield {name: kept for name, kept in value.items() if name != key}
            yield from ({**value, key: bad} for bad in (wrong if not isinstance(inner, str) else wrong[:3]))
            yield from ({**value, key: bad} for bad in spoiled(inner))
    elif isinstance(value, list) and value and not isinstance(value[0], int | float):
        for place in {0, len(value) - 1}:
            yield from ([*value[:place], bad, *value[place + 1 :]] for bad in wrong)
            yield from ([*value[:place], bad, *value[place + 1 :]] for bad in spoiled(value[place]))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_row_spoiled_anywhere_is_read_or_refused_in_words(form: Format) -> None:
    for row in rows_of(form):
        text = row.get("trajectory_json")
        for bad in one_in(5, spoiled(row if text is None else json.loads(text))):
            whole = bad if text is None else {**row, "trajectory_json": json.dumps(bad)}
            with contextlib.suppress(RecordError):
                pick_format(whole).read(whole, PLACE)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 100_000, "\ud800"])
def test_a_trajectory_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(RecordError, match="trajectory_json"):
        art_parquet.FORMAT.read(stored({}, trajectory_json=text), PLACE)


@pytest.mark.parametrize("name", ["art_group", "agent_lightning_event", "agent_lightning_span"])
def test_the_fixtures_are_what_their_script_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FORMATS))
    script = "make_art" if name == "art_group" else "make_lightning"
    assert FILES[name].read_text() == importlib.import_module(script).lines()[name]


def test_the_parquet_fixture_is_what_its_script_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FORMATS))
    script = importlib.import_module("make_art")
    found, made = pq.read_table(FILES["art_parquet"]), script.table(script.Toy())
    assert found.equals(made)
    assert found.schema.metadata == made.schema.metadata
    path = tmp_path / "v1.parquet"
    pq.write_table(script.first_version(script.Toy()), path)
    for raw in open_log(path):
        (rollout,) = read(art_parquet.FORMAT, dict(raw.value or {}))
        assert rollout.stated.ids_wanted is False
        assert rollout.messages


# What the frameworks write


def spliced(log: Path, out: Path) -> list[str]:
    """The log with broken prefixes spliced; the codes that were cured."""
    settings = Settings(tokenizer=str(TOY))
    how = RepairSettings(strategies=("splice",), provenance=False, unsafe=True)
    outcomes = list(repair_rollouts(log, out, settings, how))
    return sorted({code for outcome in outcomes for codes in outcome.cured.values() for code in codes})


def test_what_art_writes_is_read_and_what_is_written_again_art_reads(tmp_path: Path) -> None:
    folder = written("art", tmp_path / "art")
    log = folder / "group.jsonl"
    expected = json.loads((folder / "expected.json").read_text())
    for raw, histories in zip(open_log(log), expected, strict=True):
        rollouts = read(art_group.FORMAT, dict(raw.value or {}))
        assert [[list(call) for call in ids_of_turns(r)] for r in rollouts] == [
            [] if calls[0][0] is None else calls for calls in histories
        ]
    assert spliced(log, tmp_path / "again.jsonl") == ["SEQ301", "TOK101"]
    again = json.loads(asked("art", "--read", tmp_path / "again.jsonl"))
    # ART reads no further histories back; the broken one is the last of its group.
    assert again[1][0] == expected[1][0]
    calls = again[1][-1]
    assert calls[2][0][: len(calls[1][0]) + len(calls[1][1])] == calls[1][0] + calls[1][1]
    assert [completion for _, completion in calls] == [completion for _, completion in expected[1][-1]]
    for raw in open_log(folder / "v1.parquet"):
        (rollout,) = read(art_parquet.FORMAT, dict(raw.value or {}))
        assert (rollout.turns, rollout.stated.ids_wanted) == ((), False)


def test_what_agent_lightning_writes_is_read_and_its_spans_stay_spans(tmp_path: Path) -> None:
    folder = written("agent_lightning", tmp_path / "spans")
    expected = json.loads((folder / "expected.json").read_text())
    for name, scored in (("spans", True), ("proxy", False), ("triplets", True), ("proxied", False)):
        for raw, (prompt, completion, logprobs) in zip(open_log(folder / f"{name}.jsonl"), expected, strict=True):
            (rollout,) = read(agent_lightning_span.FORMAT, dict(raw.value or {}))
            assert ids_of_turns(rollout) == [(prompt, completion)]
            values = rollout.turns[0].completion_logprobs
            assert (None if values is None else values.tolist()) == (logprobs if scored else None)
    form = agent_lightning_span.FORMAT
    last = dict(list(open_log(folder / "spans.jsonl"))[-1].value or {})
    (rollout,) = form.read(last, PLACE)
    assert [message.role for message in rollout.messages] == [
        *("system", "user", "assistant", "tool", "assistant", "user", "assistant")
    ]
    again = tmp_path / "again.jsonl"
    again.write_text("".join(json.dumps(raw.value) + "\n" for raw in open_log(folder / "spans.jsonl")))
    assert json.loads(asked("agent_lightning", "--triplets", again)) == [call[:2] for call in expected]


def test_a_table_of_version_2_is_written_again_with_its_schema_and_its_other_columns(tmp_path: Path) -> None:
    source, out = FILES["art_parquet"], tmp_path / "out.parquet"
    assert spliced(source, out) == ["SEQ301", "TOK101"]
    old, new = pq.read_table(source), pq.read_table(out)
    assert new.schema.metadata == old.schema.metadata == {b"art.trajectory_parquet.version": b"2"}
    assert [new.schema.field(name) for name in old.column_names] == list(old.schema)
    others = [name for name in old.column_names if name != "trajectory_json"]
    assert new.select(others).equals(old.select(others))
    texts = [
        (a, b) for a, b in zip(*(t["trajectory_json"].to_pylist() for t in (old, new)), strict=True) if a != b
    ]
    ((was, now),) = texts
    assert json.dumps(json.loads(now), ensure_ascii=False, separators=(",", ":")) == now
    assert len(now) > len(was)
