"""ATIF, Harbor, rLLM, tinker and batches of verl, TRL, SkyRL and AReaL: what each shape says."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.frameworks.ask import written
from tests.tiers import one_in
from tito_audit import scan_rollouts
from tito_audit.errors import RecordError
from tito_audit.formats import format_named, pick_format
from tito_audit.record.column import Alignment, MaskEncoding, MovePolicy
from tito_audit.record.edits import ABSENT, Edit, with_edits
from tito_audit.record.edits import Path as Keys
from tito_audit.record.repaired import unmended
from tito_audit.record.rollout import Padding, Place, Rollout, TrainingRow, Turn
from tito_audit.record.stated import Stated
from tito_audit.storage import open_log

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "fixtures" / "formats"
PLACE = Place("log.json", 0)
FORMATS = (
    "areal",
    "atif",
    "harbor",
    "rllm_episode",
    "rllm_gateway",
    "skyrl_generator",
    "tinker",
    "trl_rollout",
    "verl_batch",
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

NO_TOOLS = "messages not read: they call tools that the log does not list"
IMAGES = "prompts not read: they hold parts that are not tokens, such as images"


def rows_of(name: str) -> list[dict[str, Any]]:
    (path,) = FIXTURES.glob(f"{name}.json*")
    return [dict(raw.value or {}) for raw in open_log(path)]


def read(name: str, row: dict[str, Any]) -> list[Rollout]:
    form = pick_format(row)
    assert form.name == name
    return list(form.read(row, PLACE))


def read_one(name: str, row: dict[str, Any]) -> Rollout:
    (rollout,) = read(name, row)
    return rollout


def trained(name: str, row: dict[str, Any]) -> TrainingRow:
    found = read_one(name, row).training_row
    assert found is not None
    return found


def ids(values: Any) -> list[int] | None:
    return None if values is None else values.tolist()


def said(turns: tuple[Turn, ...]) -> list[tuple[list[int] | None, list[int] | None]]:
    return [(ids(turn.prompt_ids), ids(turn.completion_ids)) for turn in turns]


# Every format of these


@pytest.mark.parametrize("name", FORMATS)
def test_the_fixture_is_what_its_script_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES))
    script = importlib.import_module("make_atif")
    (path,) = FIXTURES.glob(f"{name}.json*")
    assert script.lines()[path.name] == path.read_text(encoding="utf-8")


HOSTILE: tuple[Any, ...] = (
    *(None, [], {}, "text", 7, -1, True, float("nan"), [0], [None], [[1], [2]], [{}], ["a"], [2**70]),
    *(np.array([1, 2]), np.array([1.5]), {"a": 1}, ABSENT),
)


def paths_in(value: Any, path: Keys = ()) -> list[Keys]:
    found: list[Keys] = []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += [(*path, key), *paths_in(inner, (*path, key))]
    elif isinstance(value, list) and value and isinstance(value[0], dict | list):
        for number, inner in enumerate(value[:2]):
            found += [(*path, number), *paths_in(inner, (*path, number))]
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_a_value_of_another_kind_anywhere_is_read_or_refused_in_words(name: str) -> None:
    form = format_named(name)
    refused = 0
    for row in rows_of(name)[::3]:
        for path, value in one_in(5, product(paths_in(row), HOSTILE)):
            if value is ABSENT and isinstance(path[-1], int):
                continue
            broken = with_edits(row, [Edit(path, value)])
            if not form.matches(broken):
                continue
            refused += 1
            with contextlib.suppress(RecordError):
                again = form.update(broken, [unmended(one) for one in form.read(broken, PLACE)])
                refused -= 1
                assert again[0] is broken
    assert refused


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_without_ids_is_never_called_clean(name: str) -> None:
    rows = [row for row in rows_of(name) if "no-ids" in json.dumps(list(row.values())[:3])]
    assert rows
    for row in rows:
        last = read(name, row)[-1]
        nothing = all(turn.completion_ids is None for turn in last.turns) and last.training_row is None
        assert nothing
        assert last.stated.ids_wanted is False or last.turns or name == "tinker"


# ATIF


def agent(prompt: list[int] | None, completion: list[int] | None, **more: Any) -> dict[str, Any]:
    metrics = {"prompt_token_ids": prompt, "completion_token_ids": completion}
    return {"source": "agent", "message": "Rain.", "metrics": metrics, **more}


def user(text: str = "Weather?") -> dict[str, Any]:
    return {"source": "user", "message": text}


def atif(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    numbered = [{"step_id": i, **step} for i, step in enumerate(steps, 1)]
    who = {"name": "a", "version": "1", "model_name": "m", "tool_definitions": [WEATHER]}
    return {"schema_version": "ATIF-v1.7", "agent": who, "steps": numbered, **more}


def calling(name: str) -> dict[str, Any]:
    call = {"tool_call_id": "c1", "function_name": name, "arguments": {"city": "Oslo"}}
    result = {"source_call_id": "c1", "content": "rain"}
    return {"message": "", "tool_calls": [call], "observation": {"results": [result]}}


def test_a_step_of_an_agent_becomes_its_answer_and_what_its_tools_said() -> None:
    row = atif(user(), agent([1], [2], **calling("weather")), agent([1, 2, 3], [4]))
    rollout = read_one("atif", row)
    assert [message.role for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    call = rollout.messages[1].tool_calls[0]
    assert (rollout.messages[1].content, call.arguments, call.id) == (None, {"city": "Oslo"}, "c1")
    assert rollout.messages[2].wire == {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    assert [turn.message_index for turn in rollout.turns] == [1, 3]
    assert [turn.completion_text for turn in rollout.turns] == [None, "Rain."]
    assert rollout.stated == Stated(model="m")


def test_what_came_back_from_no_tool_is_the_users() -> None:
    row = atif(user(), agent([1], [2], observation={"results": [{"content": "$ ls"}]}))
    assert [(m.role, m.text) for m in read_one("atif", row).messages][-1] == ("user", "$ ls")


def test_calls_of_tools_that_were_not_offered_hide_what_the_model_wrote() -> None:
    rollout = read_one("atif", atif(user(), agent([1], [2], **calling("bash_command")), agent([1, 2, 3], [4])))
    assert list(map(str, rollout.stated.reasons)) == [
        "messages not read: they call tools that the log does not list"
    ]
    assert rollout.messages == ()
    assert [(turn.message_index, turn.completion_text) for turn in rollout.turns] == [(None, None)] * 2
    assert said(rollout.turns) == [([1], [2]), ([1, 2, 3], [4])]


def test_copied_steps_are_history_and_no_calls() -> None:
    row = atif(user(), agent([1], [2], is_copied_context=True), user(), agent([1, 2, 3], [4]))
    rollout = read_one("atif", row)
    assert [message.role for message in rollout.messages] == ["user", "assistant"] * 2
    assert said(rollout.turns) == [([1, 2, 3], [4])]
    assert rollout.turns[0].message_index == 3


def test_sums_over_several_calls_are_nobodys_ids() -> None:
    rollout = read_one("atif", atif(user(), agent([1], [2], llm_call_count=2), agent([1, 2, 3], [4])))
    assert said(rollout.turns) == [(None, None), ([1, 2, 3], [4])]
    assert rollout.turns[0].message_index == 1


def test_a_step_without_a_model_call_is_a_message_and_no_call() -> None:
    row = atif(user(), {"source": "agent", "message": "Started.", "llm_call_count": 0}, agent([1], [2]))
    rollout = read_one("atif", row)
    assert len(rollout.messages) == 3
    assert said(rollout.turns) == [([1], [2])]


def test_each_sub_agent_is_a_rollout_of_its_own_in_the_order_of_the_document() -> None:
    inner = atif(user(), agent([7], [8]), trajectory_id="in", subagent_trajectories=[atif(agent([9], [10]))])
    outer = atif(user(), agent([1], [2]), subagent_trajectories=[inner, atif(user(), agent([5], [6]))])
    rollouts = read("atif", outer)
    assert [rollout.place.item for rollout in rollouts] == [0, 1, 2, 3]
    assert [said(rollout.turns)[0][0] for rollout in rollouts] == [[1], [7], [9], [5]]


def test_a_column_in_extra_goes_with_its_tokens_and_routing_does_not() -> None:
    step = agent([1], [2, 3, 4])
    step["metrics"]["extra"] = {
        "rewards": [0.1, 0.2, 0.3],
        "routed_experts": [[1], [2], [3]],
        "finish_reason": "length",
        "weight_version": 4,
    }
    (turn,) = read_one("atif", atif(user(), step)).turns
    assert {column.name: column.policy for column in turn.columns} == {
        "extra.rewards": MovePolicy.MOVE,
        "extra.routed_experts": MovePolicy.DROP,
    }
    assert (turn.finish_reason, turn.weight_versions) == ("length", ("4",))


def test_steps_name_the_model_before_the_agent_does() -> None:
    two = atif(user(), agent([1], [2], model_name="big"), agent([1, 2], [3]))
    assert read_one("atif", two).stated == Stated()
    assert read_one("atif", atif(user(), agent([1], [2], model_name="big"))).stated == Stated(model="big")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (atif({"source": "robot", "message": "x"}), r"steps\[0\] is not a step"),
        (atif(user(), agent(["1"], [2])), r"steps\[1\].metrics: column 'prompt_token_ids' holds a string"),  # type: ignore[list-item]
        (atif(user(), subagent_trajectories=[7]), r"subagent_trajectories\[0\] is not a trajectory"),
        (atif(user(), subagent_trajectories=[atif(agent([1.5], [2]))]), r"subagent_trajectories\[0\]\.steps\[0\]"),  # type: ignore[list-item]
    ],
)
def test_a_wrong_trajectory_is_refused_with_its_place(row: dict[str, Any], says: str) -> None:
    with pytest.raises(RecordError, match=says):
        read("atif", row)


# Harbor


def harbor(**lists: Any) -> dict[str, Any]:
    return {"agent_result": {"n_input_tokens": None, "rollout_details": [lists]}}


def test_calls_are_paired_with_logprobs_by_length_where_some_have_none() -> None:
    row = harbor(
        prompt_token_ids=[[1], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]],
        completion_token_ids=[[2, 3], [5], [7, 8]],
        logprobs=[[-0.1, -0.2], [-0.3]],
    )
    found = [turn.completion_logprobs for turn in read_one("harbor", row).turns]
    assert [None if values is None else values.tolist() for values in found] == [[-0.1, -0.2], [-0.3], None]


def test_logprobs_that_may_be_of_either_call_are_refused_in_words() -> None:
    row = harbor(prompt_token_ids=[[1], [1, 2, 3]], completion_token_ids=[[2], [4]], logprobs=[[-0.1]])
    with pytest.raises(RecordError, match=r"logprobs holds 1 lists for 2 calls.*do not show which call has none"):
        read("harbor", row)


def test_prompts_and_completions_of_other_counts_are_refused_in_words() -> None:
    with pytest.raises(RecordError, match="prompt_token_ids holds 1 lists and completion_token_ids 2"):
        read("harbor", harbor(prompt_token_ids=[[1]], completion_token_ids=[[2], [3]]))


def test_calls_without_any_prompt_or_logprob_keep_their_completions() -> None:
    assert said(read_one("harbor", harbor(completion_token_ids=[[2], [3]])).turns) == [(None, [2]), (None, [3])]


def test_details_of_every_step_of_a_trial_are_read_in_order() -> None:
    one = {"prompt_token_ids": [[1]], "completion_token_ids": [[2]]}
    two = {"prompt_token_ids": [[3]], "completion_token_ids": [[4]]}
    steps = [{"agent_result": {"rollout_details": [one]}}, {"agent_result": {"rollout_details": [two, one]}}]
    rollouts = read("harbor", {"agent_result": None, "step_results": steps})
    assert [said(rollout.turns) for rollout in rollouts] == [[([1], [2])], [([3], [4])], [([1], [2])]]
    assert [rollout.place.item for rollout in rollouts] == [0, 1, 2]


# rLLM


def episode(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "t:1", "is_correct": True, "trajectories": [{"uid": "u", "steps": list(steps), **more}]}


def step(prompt: Any, response: Any, *talk: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(talk)
    messages = [{"role": role, "content": text} for role, text in zip(roles, talk, strict=False)]
    return {"prompt_ids": prompt, "response_ids": response, "chat_completions": messages, **more}


def test_the_answer_of_a_step_is_the_last_of_its_conversation() -> None:
    row = episode(step([1], [2], "a", "b", logprobs=[-0.5], weight_version=3), step([1, 2, 3], [4], *"abcd"))
    rollout = read_one("rllm_episode", row)
    assert [message.text for message in rollout.messages] == [*"abcd"]
    assert [turn.message_index for turn in rollout.turns] == [1, 3]
    assert rollout.turns[0].weight_versions == ("3",)
    assert rollout.turns[0].completion_logprobs is not None
    assert rollout.stated == Stated(group="t", facts={"id": "t:1"})


def test_a_conversation_that_was_rewritten_is_what_its_call_was_sent() -> None:
    rollout = read_one("rllm_episode", episode(step([1], [2], "a", "b"), step([5], [6], "summary", "d")))
    first, second = rollout.turns
    assert (first.message_index, second.message_index) == (None, 1)
    assert first.prompt_messages is not None
    assert [message.text for message in first.prompt_messages] == ["a"]
    assert first.completion_text == "b"


def test_of_a_call_that_was_repeated_only_the_last_wrote_the_message() -> None:
    rollout = read_one("rllm_episode", episode(step([1], [2], "a", "b"), step([1], [3], "a", "b")))
    assert [turn.message_index for turn in rollout.turns] == [None, 1]


def test_reasoning_is_read_under_its_own_name() -> None:
    row = episode(step([1], [2], "a", "b"))
    row["trajectories"][0]["steps"][0]["chat_completions"][1]["reasoning"] = "hm"
    rollout = read_one("rllm_episode", row)
    assert rollout.messages[1].reasoning == "hm"
    assert rollout.turns[0].completion_text is None


def test_messages_kept_once_are_put_together_again() -> None:
    clean, compact = (row for row in rows_of("rllm_episode") if row["id"] in ("clean:0", "compact:0"))
    left, right = read("rllm_episode", clean)[0], read("rllm_episode", compact)[0]
    assert said(left.turns) == said(right.turns)
    assert left.messages == right.messages


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ({}, "which is not in message_nodes"),
        ({"a": {"p": "a", "m": {"role": "user", "content": "x"}}}, "counts 1 messages, but there are 2"),
        ({"a": {"p": None, "m": 7}}, "is not a message"),
    ],
)
def test_messages_that_lead_nowhere_are_refused_in_words(nodes: dict[str, Any], says: str) -> None:
    row = episode({**step([1], [2]), "chat_completions": {"messages_ref": ["a", 1]}}, message_nodes=nodes)
    with pytest.raises(RecordError, match=says):
        read("rllm_episode", row)


def test_advantages_of_each_token_move_with_them() -> None:
    row = episode(step([1], [2, 3], "a", "b", advantage=[0.5, 0.5], routing_matrices=["x", "y"]))
    (turn,) = read_one("rllm_episode", row).turns
    assert {column.name: column.policy for column in turn.columns} == {
        "advantage": MovePolicy.MOVE,
        "routing_matrices": MovePolicy.DROP,
    }
    assert read_one("rllm_episode", episode(step([1], [2, 3], "a", "b", advantage=0.5))).turns[0].columns == ()


def test_a_prompt_with_an_image_in_it_is_not_read_and_its_completion_is() -> None:
    rollout = read_one("rllm_episode", episode(step([1, {"type": "image"}, 2], [3], "a", "b")))
    assert said(rollout.turns) == [(None, [3])]
    assert list(map(str, rollout.stated.reasons)) == [
        "prompts not read: they hold parts that are not tokens, such as images"
    ]


@pytest.mark.parametrize("none", [{"prompt_ids": [], "response_ids": []}, {}, {"prompt_ids": None}])
def test_episodes_of_evaluations_and_loggers_want_no_ids(none: dict[str, Any]) -> None:
    rollout = read_one("rllm_episode", episode({"chat_completions": [], **none}))
    assert (rollout.turns, rollout.stated.ids_wanted) == ((), False)


def test_prompts_with_tools_that_were_not_logged_are_not_rendered() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    row = episode(step([1], [2], "a", "b"))
    row["trajectories"][0]["steps"][0]["chat_completions"][1]["tool_calls"] = [call]
    rollout = read_one("rllm_episode", row)
    assert (rollout.messages, list(map(str, rollout.stated.reasons))) == ((), [NO_TOOLS])
    assert said(rollout.turns) == [([1], [2])]


def test_a_trace_holds_its_messages_tools_and_call() -> None:
    row = next(row for row in rows_of("rllm_gateway") if row["trace_id"] == "clean-after-a-tool")
    rollout = read_one("rllm_gateway", row)
    (turn,) = rollout.turns
    assert [message.role for message in rollout.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [tool["function"]["name"] for tool in rollout.tools] == ["weather"]
    assert (turn.message_index, turn.finish_reason, turn.weight_versions) == (4, "stop", ("3",))
    assert ids(turn.prompt_ids) == row["prompt_token_ids"]
    assert rollout.stated == Stated(model="org/toy")


def test_a_trace_whose_answer_has_other_ids_in_it_says_so() -> None:
    row = next(row for row in rows_of("rllm_gateway") if row["trace_id"] == "copies-disagree")
    assert "completion_token_ids" in read_one("rllm_gateway", row).stated.copies_disagree


def test_a_trace_that_holds_what_it_adds_has_no_whole_prompt() -> None:
    row = next(row for row in rows_of("rllm_gateway") if row["trace_id"] == "delta")
    assert read_one("rllm_gateway", row).turns[0].prompt_ids is None


# tinker


def datum(inputs: list[int], targets: list[int], **columns: Any) -> dict[str, Any]:
    return {
        "model_input": {"chunks": [{"tokens": inputs}]},
        "loss_fn_inputs": {"target_tokens": targets, **columns},
    }


def test_a_datum_is_its_first_input_and_all_its_targets() -> None:
    row = trained(
        "tinker", datum([1, 20, 21, 30], [20, 21, 30, 2], mask=[0.0, 0.0, 1.0, 1.0], logprobs=[0, 0, -1, -2])
    )
    assert row.token_ids.tolist() == [1, 20, 21, 30, 2]
    assert row.loss_mask is not None
    assert row.loss_mask.tolist() == [False, False, False, True, True]
    assert row.logprobs is not None
    np.testing.assert_array_equal(row.logprobs, [np.nan, 0, 0, -1, -2])
    assert {column.alignment for column in row.columns} == {Alignment.SHIFTED}
    assert {column.encoding for column in row.columns} == {MaskEncoding.FLOAT, None}


def test_a_datum_that_trains_every_target_is_still_shifted() -> None:
    row = trained("tinker", datum([1, 2, 3], [2, 3, 4], mask=[1.0, 1.0, 1.0], logprobs=[-1.0, -2.0, -3.0]))
    assert {column.alignment for column in row.columns} == {Alignment.SHIFTED}


def test_a_column_with_an_entry_for_the_first_token_fits_nothing() -> None:
    row = trained("tinker", datum([1, 2, 3], [2, 3, 4], mask=[0.0, 0.0, 1.0, 1.0], advantages=[0.5] * 4))
    assert row.loss_mask is None
    assert [(column.name, column.alignment) for column in row.columns] == [("mask", None), ("advantages", None)]


def test_tensors_and_lists_say_the_same() -> None:
    typed, plain = (row for row in rows_of("tinker") if row["name"] in ("clean", "plain-lists"))
    left, right = trained("tinker", typed), trained("tinker", plain)
    np.testing.assert_array_equal(left.token_ids, right.token_ids)
    np.testing.assert_array_equal(left.logprobs, right.logprobs)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (datum([1, 2, 9], [2, 3, 4]), r"model_input holds token 9 where target_tokens holds 3 \(target 1\)"),
        (datum([1, 2], [2, 3, 4]), "model_input holds 2 tokens, but target_tokens 3"),
        (datum([1, 2], {"data": [2, 3, 2, 3], "dtype": "int64", "shape": [2, 2]}), "several values per token"),  # type: ignore[arg-type]
        (datum([1, 2], ["2", 3]), "target_tokens' holds a string"),  # type: ignore[list-item]
        ({**datum([1], [2]), "model_input": {"chunks": [{"type": "encoded_text"}]}}, "holds no `tokens`"),
    ],
)
def test_a_wrong_datum_is_refused_in_words(row: dict[str, Any], says: str) -> None:
    with pytest.raises(RecordError, match=says):
        read("tinker", row)


def test_an_image_stands_for_as_many_tokens_as_its_targets() -> None:
    row = datum([], [2, 0, 0, 3, 4], mask=[0.0, 0.0, 0.0, 1.0, 1.0])
    row["model_input"]["chunks"] = [{"tokens": [1, 2]}, {"type": "image", "data": ""}, {"tokens": [3]}]
    assert trained("tinker", row).token_ids.tolist() == [1, 2, 0, 0, 3, 4]


# What users of verl, TRL, SkyRL and AReaL save


def test_what_an_agent_loop_of_verl_returns_is_read_as_generic() -> None:
    row = {
        "prompt_ids": [1, 20],
        "response_ids": [30, 2, 60, 31, 2],
        "response_mask": [1, 1, 0, 1, 1],
        "response_logprobs": [-0.1, -0.2, 0.0, -0.3, -0.4],
        "routed_experts": None,
        "reward_score": 1.0,
        "num_turns": 4,
        "metrics": {},
        "extra_fields": {},
    }
    found = trained("generic", row)
    assert found.token_ids.tolist() == [1, 20, 30, 2, 60, 31, 2]
    assert found.loss_mask is not None
    assert found.loss_mask.tolist() == [False, False, True, True, False, True, True]
    assert (found.prompt_length, found.sentinel) == (2, 0.0)
    (turn,) = read_one("generic", {**row, "response_mask": [1] * 5}).turns
    assert said((turn,)) == [([1, 20], [30, 2, 60, 31, 2])]


def test_one_completion_of_trl_is_read_as_generic() -> None:
    row = {
        "prompt_ids": [1, 20],
        "completion_ids": [30, 60, 31],
        "logprobs": [-0.1, 0.0, -0.2],
        "env_mask": [1, 0, 1],
    }
    found = trained("generic", row)
    assert found.loss_mask is not None
    assert found.loss_mask.tolist() == [False, False, True, False, True]
    assert said(read_one("generic", {**row, "env_mask": None}).turns) == [([1, 20], [30, 60, 31])]


def test_a_rollout_sample_of_trl_is_read_as_generic() -> None:
    row = {
        "prompt": [{"role": "user", "content": "2+2?"}],
        "completion": [{"role": "assistant", "content": "4"}],
        "input_ids": [1, 20, 30, 2],
        "completion_mask": [0, 0, 1, 1],
        "old_log_probs": [0.0, 0.0, -0.1, -0.2],
        "advantage": 0.5,
        "model_version": 3,
        "group_id": 7,
    }
    rollout = read_one("generic", row)
    assert rollout.training_row is not None
    assert rollout.training_row.logprobs is not None
    assert rollout.training_row.logprobs.tolist() == [0.0, 0.0, -0.1, -0.2]
    assert [message.role for message in rollout.messages] == ["user", "assistant"]
    assert rollout.stated == Stated(group=7)


def test_a_batch_is_a_rollout_for_each_sample() -> None:
    row = {
        "prompt_token_ids": [[1], [2]],
        "response_ids": [[3, 4, 5], [6, 7]],
        "loss_masks": [[1, 0, 1], [1, 1]],
        "rollout_logprobs": [[-0.1, 0.0, -0.2], [-0.3, -0.4]],
        "rewards": [[0.0, 0.0, 1.0], [0.0, 1.0]],
        "stop_reasons": ["stop", "length"],
        "trajectory_ids": [{"instance_id": "i", "repetition_id": 0}, {"instance_id": "i", "repetition_id": 1}],
        "rollout_metrics": {},
    }
    first, second = read("skyrl_generator", row)
    assert first.training_row is not None
    assert first.training_row.token_ids.tolist() == [1, 3, 4, 5]
    assert {column.name for column in first.training_row.columns} == {"loss_masks", "rollout_logprobs", "rewards"}
    assert said(second.turns) == [([2], [6, 7])]
    assert (second.turns[0].finish_reason, second.place.item, second.stated.group) == ("length", 1, "i")


def test_a_batch_with_a_list_too_few_is_refused_in_words() -> None:
    row = {"prompt_ids": [[1], [2]], "completion_ids": [[3], [4]], "logprobs": [[-0.1]]}
    with pytest.raises(RecordError, match="'logprobs' holds 1 lists for 2 samples"):
        read("trl_rollout", row)


def test_a_wrong_sample_of_a_batch_is_named() -> None:
    with pytest.raises(RecordError, match=r"sample 1: .*'completion_ids' holds a string"):
        read("trl_rollout", {"prompt_ids": [[1], [2]], "completion_ids": [[3], ["4"]]})


def test_the_first_of_the_k_best_logprobs_is_the_sampled_ones() -> None:
    row = {"prompt_ids": [[1]], "completion_ids": [[3, 4]], "logprobs": [[[-0.1, -5.0], [-0.2, -6.0]]]}
    (turn,) = read_one("trl_rollout", row).turns
    assert turn.completion_logprobs is not None
    assert turn.completion_logprobs.tolist() == [-0.1, -0.2]


def test_tensors_of_areal_lose_their_padding_and_keep_their_versions() -> None:
    row = {
        "input_ids": [[1, 20, 30, 2, 0]],
        "loss_mask": [[0, 0, 1, 1, 0]],
        "logprobs": [[0.0, 0.0, -0.1, -0.2, 0.0]],
        "versions": [[-1, -1, 2, 3, -1]],
        "attention_mask": [[1, 1, 1, 1, 0]],
        "rewards": [1.0],
    }
    found = trained("areal", row)
    assert (found.token_ids.tolist(), found.padding) == ([1, 20, 30, 2], Padding(0, 1))
    (versions,) = (column for column in found.columns if column.name == "versions")
    assert (versions.values.tolist(), versions.alignment) == ([-1, -1, 2, 3], Alignment.FULL)


def test_a_response_of_areal_names_the_weights_of_its_tokens() -> None:
    row = {
        "input_tokens": [1, 20],
        "output_tokens": [30, 31, 2],
        "output_logprobs": [-0.1, -0.2, -0.3],
        "output_versions": [2, 2, 3],
        "stop_reason": "stop",
    }
    (turn,) = read_one("areal", row).turns
    assert said((turn,)) == [([1, 20], [30, 31, 2])]
    assert (turn.weight_versions, turn.finish_reason) == (("2", "3"), "stop")


def test_a_batch_of_verl_loses_its_padding_on_both_sides() -> None:
    row = {
        "prompts": [0, 1, 20],
        "responses": [30, 60, 2, 0],
        "response_mask": [1, 0, 1, 0],
        "attention_mask": [0, 1, 1, 1, 1, 1, 0],
        "input_ids": [0, 1, 20, 30, 60, 2, 0],
        "position_ids": [0, 0, 1, 2, 3, 4, 4],
        "rollout_log_probs": [-0.1, 0.0, -0.2, 0.0],
        "old_log_probs": [-0.1, 0.0, -0.3, 0.0],
    }
    found = trained("verl_batch", row)
    assert found.token_ids.tolist() == [1, 20, 30, 60, 2]
    assert found.loss_mask is not None
    assert found.loss_mask.tolist() == [False, False, True, False, True]
    assert {column.name: column.policy for column in found.columns}["old_log_probs"] is MovePolicy.STALE


def test_an_attention_mask_of_another_width_is_refused_in_words() -> None:
    row = {"prompts": [1, 0], "responses": [2], "attention_mask": [1, 0], "response_mask": [1]}
    with pytest.raises(RecordError, match="has 2 entries for 3"):
        read("verl_batch", row)


def test_a_rollout_summary_of_tinker_is_told_that_it_holds_no_ids() -> None:
    row = {"schema_version": 1, "split": "train", "traj_idx": 0, "steps": [{"ob_len": 3, "ac_len": 2}]}
    (rollout,) = pick_format(row).read(row, Place("log.jsonl", 0))
    assert re.search(r"No token ids.*tinker-cookbook.*loss_fn_inputs", rollout.stated.notice)


# What the frameworks write


def test_what_the_models_of_atif_write_is_read(tmp_path: Path) -> None:
    folder = written("atif", tmp_path)
    expected = json.loads((folder / "expected.json").read_text())
    for name, of in expected.items():
        (raw,) = open_log(folder / f"{name}.json")
        rollouts = read("atif", dict(raw.value or {}))
        assert [[list(call) for call in said(rollout.turns)] for rollout in rollouts] == of
        assert all(rollout.messages and rollout.stated.model == "org/toy" for rollout in rollouts)


def test_what_tinker_cookbook_makes_is_read(tmp_path: Path) -> None:
    folder = written("tinker", tmp_path)
    expected = json.loads((folder / "expected.json").read_text())
    # The broken conversation is several datums.
    assert len(expected) == 3
    for raw, facts in zip(open_log(folder / "datums.jsonl"), expected, strict=True):
        row = trained("tinker", dict(raw.value or {}))
        assert row.token_ids.tolist() == facts["ids"]
        assert row.loss_mask is not None
        assert row.loss_mask[1:].tolist() == [value == 1.0 for value in facts["mask"]]
        assert row.logprobs is not None
        assert row.logprobs[1:].tolist() == facts["logprobs"]


@pytest.mark.parametrize(("name", "code"), [("logprobs", "LPR501"), ("mask", "REC002")])
def test_a_shifted_column_is_counted_against_the_tokens_that_it_describes(
    name: str, code: str, tmp_path: Path
) -> None:
    inputs = {"target_tokens": [20, 30, 2], "mask": [0.0, 1.0, 1.0], "logprobs": [0.0, -0.2, -0.5]}
    row = {"model_input": {"chunks": [{"tokens": [1, 20, 30]}]}, "loss_fn_inputs": inputs}
    inputs[name] = [*inputs[name], 0.0]
    (tmp_path / "log.jsonl").write_text(json.dumps(row))
    (result,) = scan_rollouts(tmp_path / "log.jsonl")
    (finding,) = [finding for finding in result.findings if finding.code == code]
    assert f"`{name}` has 4 entries for 3 target tokens" in finding.hit.message
