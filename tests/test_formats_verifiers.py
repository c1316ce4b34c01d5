"""verifiers and prime-rl: what each shape of their logs says, and what the frameworks themselves write."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.forms import PLACE
from tests.frameworks.ask import asked, written
from tests.tiers import some
from tests.world import FORMATS, TOY
from tito_audit import repair_rollouts, scan_rollouts
from tito_audit.errors import RecordError
from tito_audit.format import Format
from tito_audit.formats import (
    format_named,
    pick_format,
    prime_rl_sample,
    prime_rl_tokens,
    verifiers_results,
    verifiers_v1,
)
from tito_audit.record.column import Alignment, MovePolicy
from tito_audit.record.rollout import Rollout, TrainingRow
from tito_audit.record.stated import Stated
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import open_log

pytestmark = pytest.mark.usefixtures("loaded_once")

MADE_HERE = ("prime_rl_sample", "prime_rl_tokens", "verifiers_results", "verifiers_v1")


def row_named(form: Format, name: str) -> dict[str, Any]:
    for line in (FORMATS / f"{form.name}.jsonl").read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        if name in (row.get("id"), row.get("example_id")):
            return row
    raise KeyError(name)


def read(form: Format, row: dict[str, Any]) -> tuple[Rollout, ...]:
    assert pick_format(row) is form
    return tuple(form.read(row, PLACE))


def read_one(form: Format, row: dict[str, Any]) -> Rollout:
    (rollout,) = read(form, row)
    return rollout


def node(ids: list[int], parent: int | None = None, sampled: int = 0, **more: Any) -> dict[str, Any]:
    """A node whose last `sampled` tokens were sampled."""
    role = "assistant" if sampled else "user"
    return {
        **({} if parent is None else {"parent": parent}),
        "message": {"role": role, "content": f"text {ids}"},
        "sampled": bool(sampled),
        "token_ids": ids,
        "mask": [False] * (len(ids) - sampled) + [True] * sampled,
        "logprobs": [-0.25 * (i + 1) for i in range(sampled)],
        **more,
    }


def trace(*nodes: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"version": 1, "id": "t", "nodes": list(nodes), "calls": [], **more}


def episode(*traces: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "e", "env": {"id": "sums"}, "task": {}, "traces": list(traces), **more}


def said(rollout: Rollout) -> list[tuple[Any, Any]]:
    """Prompt and completion of each turn."""
    return [
        (
            None if turn.prompt_ids is None else turn.prompt_ids.tolist(),
            None if turn.completion_ids is None else turn.completion_ids.tolist(),
        )
        for turn in rollout.turns
    ]


def trained(rollout: Rollout) -> TrainingRow:
    assert rollout.training_row is not None
    return rollout.training_row


@pytest.mark.parametrize("name", MADE_HERE)
def test_the_fixtures_are_what_their_script_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FORMATS))
    made = importlib.import_module("make_verifiers").lines()
    assert tuple(sorted(made)) == MADE_HERE
    assert (FORMATS / f"{name}.jsonl").read_text() == made[name]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("verifiers_v1", [set(), set(), {"SEQ301", "TOK101"}, {"SEQ303"}, set(), set(), set(), {"LPR501"}]),
        ("verifiers_results", [set(), set(), {"SEQ301", "TOK101"}, {"LPR501"}, {"LPR503", "MSK403"}, set()]),
        ("prime_rl_tokens", [set(), set(), {"MSK403"}, {"LPR501"}, set()]),
        ("prime_rl_sample", [set(), set(), {"MSK401", "MSK402"}, set(), set(), set()]),
    ],
)
def test_drift_is_found_where_it_was_put_and_nowhere_else(name: str, found: list[set[str]]) -> None:
    settings = Settings(tokenizer=str(TOY))
    got: dict[int, set[str]] = {}
    for result in scan_rollouts(FORMATS / f"{name}.jsonl", settings):
        worse = {finding.code for finding in result.findings if finding.severity > 0}
        got[result.place.row] = got.get(result.place.row, set()) | worse
    assert [got[row] for row in range(len(found))] == found


# verifiers v1: nodes and branches


def test_a_sampled_node_is_a_turn_whose_prompt_is_the_path_before_it() -> None:
    row = episode(trace(node([1, 2]), node([5, 6, 7], 0, 2), node([8], 1), node([5, 9], 2, 1)))
    rollout = read_one(verifiers_v1.FORMAT, row)
    assert said(rollout) == [([1, 2, 5], [6, 7]), ([1, 2, 5, 6, 7, 8, 5], [9])]
    assert [turn.message_index for turn in rollout.turns] == [1, 3]
    assert [turn.prompt_messages for turn in rollout.turns] == [None, None]
    assert rollout.training_row is None


def test_a_node_that_branches_share_is_one_turn_and_each_call_says_what_it_was_sent() -> None:
    shared = (node([1, 2]), node([5, 6], 0, 1))
    row = episode(trace(*shared, node([8], 1), node([5, 9], 2, 1), node([4], 1), node([5, 3], 4, 1)))
    rollout = read_one(verifiers_v1.FORMAT, row)
    assert said(rollout) == [([1, 2, 5], [6]), ([1, 2, 5, 6, 8, 5], [9]), ([1, 2, 5, 6, 4, 5], [3])]
    sent = [[message.text for message in turn.prompt_messages or ()] for turn in rollout.turns]
    first, second = "text [1, 2]", "text [5, 6]"
    assert sent == [[first], [first, second, "text [8]"], [first, second, "text [4]"]]
    assert [rollout.messages[turn.message_index or 0].text for turn in rollout.turns] == [
        "text [5, 6]",
        "text [5, 9]",
        "text [5, 3]",
    ]


def test_branches_of_other_tools_are_rollouts_of_their_own() -> None:
    tool = {"type": "function", "name": "weather", "description": "", "parameters": {}}
    roots = [node([1], tools=[tool]), node([2, 3], 0, 1), node([4]), node([5, 6], 2, 1)]
    first, second = read(verifiers_v1.FORMAT, episode(trace(*roots, tools=[tool])))
    assert [rollout.place.item for rollout in (first, second)] == [0, 1]
    assert (said(first), said(second)) == ([([1, 2], [3])], [([4, 5], [6])])
    function = {"name": "weather", "description": "", "parameters": {}}
    assert (first.tools, second.tools) == (({"type": "function", "function": function},), ())
    for one in roots:
        one.pop("tools", None)
    # Before 0.4.0 only the trace knows tools, and they are everybody's.
    (whole,) = read(verifiers_v1.FORMAT, episode(trace(*roots, tools=[tool])))
    assert said(whole) == [([1, 2], [3]), ([4, 5], [6])]
    assert len(whole.tools) == 1


def test_messages_and_tools_get_the_chat_form() -> None:
    call = {"id": "c", "type": "function", "name": "f", "arguments": '{"a":1}'}
    said_it = {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "7"}
    quiet = {"role": "assistant", "content": None, "tool_calls": None}
    nodes = [
        node([1]),
        node([2], 0, 1, message=said_it),
        node([3], 1, message=result),
        node([4], 2, 1, message=quiet),
    ]
    strict = {"name": "f", "description": "d", "parameters": {}, "strict": True}
    rollout = read_one(verifiers_v1.FORMAT, episode(trace(*nodes, tools=[strict])))
    assert rollout.messages[1].wire["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    ]
    assert rollout.messages[1].reasoning == "hm"
    assert rollout.messages[3].wire == {"role": "assistant", "content": ""}
    assert rollout.tools == ({"type": "function", "function": strict},)


def test_calls_and_the_run_say_model_end_and_version() -> None:
    calls = [
        {"node": None, "model": "other", "error": {"type": "Timeout"}},
        {"node": 1, "model": "org/model", "finish_reason": "length"},
    ]
    work = {"type": "train", "step": 3, "policy": {"start": 3, "end": 4}}
    row = episode(
        trace(node([1]), node([2, 3], 0, 1), calls=calls, agent={"trainable": False}),
        run={"work": work},
        group={"id": "g"},
    )
    rollout = read_one(verifiers_v1.FORMAT, row)
    assert rollout.stated == Stated(model="org/model", group="g", facts={"id": "t", "trainable": False})
    assert rollout.turns[0].finish_reason == "length"
    assert rollout.turns[0].weight_versions == ("3", "4")


def test_compact_columns_are_spread_over_the_completion() -> None:
    said_it = node(
        [5, 6, 7, 8],
        0,
        3,
        mask=[False, True, False, True],
        logprobs=[-0.5, -0.75],
        is_content=[False, True, True, True],
        advantages=[0.5, 0.25],
        reference_logprobs=[-1.0, -2.0],
        entropies=None,
        loss_weights={"echo": [0.0, 0.5, 0.5, 1.0]},
        notes=["a", "b"],
        odd=[1.0],
    )
    turn = read_one(verifiers_v1.FORMAT, episode(trace(node([1]), said_it))).turns[0]
    assert turn.completion_ids is not None
    assert turn.completion_ids.tolist() == [6, 7, 8]
    np.testing.assert_array_equal(turn.completion_logprobs, [-0.5, np.nan, -0.75])
    values = {column.name: column.values.tolist() for column in turn.columns if column.name != "logprobs"}
    assert str(values) == str(
        {
            "is_content": [True, True, True],
            "advantages": [0.5, float("nan"), 0.25],
            "reference_logprobs": [-1.0, float("nan"), -2.0],
            "loss_weights.echo": [0.5, 0.5, 1.0],
        }
    )
    policies = {column.name: column.policy for column in turn.columns}
    assert policies["advantages"] is MovePolicy.MOVE
    assert policies["reference_logprobs"] is MovePolicy.STALE
    assert {column.alignment for column in turn.columns} == {Alignment.CALL}


def test_logprobs_of_another_count_stay_as_they_are_and_none_are_none() -> None:
    rows = [episode(trace(node([1]), node([2, 3, 4], 0, 2, logprobs=entries))) for entries in ([-0.5], [], None)]
    few, empty, null = (read_one(verifiers_v1.FORMAT, row).turns[0] for row in rows)
    assert few.completion_logprobs is None
    assert [(column.name, column.alignment, len(column.values)) for column in few.columns] == [
        ("logprobs", None, 1)
    ]
    assert empty.columns == null.columns == ()


def test_a_mask_that_says_more_than_what_was_sampled_is_shown_as_a_row() -> None:
    asked = node([1, 2], mask=[False, True], logprobs=[-1.0])
    row = read_one(verifiers_v1.FORMAT, episode(trace(asked, node([5, 6], 0, 1)))).training_row
    assert row is not None
    assert row.loss_mask is not None
    assert row.loss_mask.tolist() == [False, True, False, True]
    np.testing.assert_array_equal(row.logprobs, [np.nan, -1.0, np.nan, -0.25])
    branching = episode(trace(asked, node([5, 6], 0, 1), node([5, 7], 0, 1)))
    with pytest.raises(
        RecordError, match=r"traces\[0\]\.nodes\[0\]\.mask is true for tokens that no call sampled"
    ):
        read(verifiers_v1.FORMAT, branching)


def test_a_node_without_a_mask_was_sampled_as_far_as_it_has_logprobs() -> None:
    rollout = read_one(verifiers_v1.FORMAT, episode(trace(node([1]), node([2, 3, 4], 0, 2, mask=[]))))
    assert said(rollout) == [([1, 2], [3, 4])]
    with pytest.raises(RecordError, match=r"nodes\[1\] has no mask"):
        read(verifiers_v1.FORMAT, episode(trace(node([1]), node([2, 3], 0, 2, mask=[], logprobs=[]))))
    unsampled = episode(trace(node([1]), node([2, 3], 0, 2, mask=[False, False], logprobs=[])))
    assert said(read_one(verifiers_v1.FORMAT, unsampled)) == [([1, 2, 3], [])]


def test_a_call_that_got_no_ids_is_a_turn_without_them() -> None:
    quiet = {**node([], 0), "message": {"role": "assistant", "content": "hm"}, "sampled": True}
    rollout = read_one(verifiers_v1.FORMAT, episode(trace(node([]), quiet, node([1, 2], 1), node([3, 4], 2, 1))))
    assert said(rollout) == [(None, None), ([1, 2, 3], [4])]


@pytest.mark.parametrize("empty", [[], None])
def test_a_run_without_ids_is_nothing_to_audit(empty: Any) -> None:
    nothing: dict[str, Any] = {"token_ids": empty, "mask": empty, "logprobs": empty}
    quiet = {**node([], 0), "sampled": True, "message": {"role": "assistant", "content": "4"}, **nothing}
    rollout = read_one(verifiers_v1.FORMAT, episode(trace({**node([]), **nothing}, quiet)))
    assert (rollout.turns, rollout.stated.ids_wanted) == ((), False)
    assert [message.role for message in rollout.messages] == ["user", "assistant"]
    for row in (episode(), episode(trace())):
        assert read_one(verifiers_v1.FORMAT, row).stated.ids_wanted is False


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"parent": 1}, r"nodes\[1\]\.parent is 1, not the number of a node before it"),
        ({"parent": -1}, r"nodes\[1\]\.parent is -1"),
        ({"parent": "0"}, r"nodes\[1\]\.parent is '0'"),
        ({"token_ids": [2, "3"]}, r"nodes\[1\]\.token_ids' holds a string at position 1"),
        ({"token_ids": [2, 2**40]}, r"nodes\[1\]\.token_ids' holds id 1099511627776"),
        ({"mask": [True]}, r"nodes\[1\]\.mask has 1 entries for 2 tokens"),
        ({"mask": [True, None]}, r"nodes\[1\]\.mask holds something other than true and false"),
        ({"mask": [2, 1]}, r"nodes\[1\]\.mask holds something other than true and false"),
        ({"mask": "x"}, r"nodes\[1\]\.mask is not a list"),
        ({"logprobs": ["a"]}, r"nodes\[1\]\.logprobs' holds a string"),
        ({"message": None}, r"nodes\[1\]\.message is not a message"),
        ({"message": {"content": "x"}}, r"nodes\[1\]\.message is not a message"),
        ({"loss_weights": {"echo": ["a", "b"]}}, r"nodes\[1\]\.loss_weights\.echo' holds a string"),
    ],
)
def test_a_broken_node_is_refused_with_its_place(change: dict[str, Any], says: str) -> None:
    row = episode(trace(node([1]), {**node([2, 3], 0, 1), **change}))
    with pytest.raises(RecordError, match=says):
        read(verifiers_v1.FORMAT, row)


@pytest.mark.parametrize(
    "row",
    [
        episode({"nodes": [{"full_text": "a", "masked_tokens": [1]}]}),
        {"nodes": [{"full_text": "a", "tokens": [1, 2], "masked_tokens": [-100, 2], "logprobs": [1.0, -1.0]}]},
        {"nodes": [{"message": {}}]},
        {"traces": [], "env": {}},
        {"traces": "x", "env": {}, "task": {}},
        {"info": '{"native_wrapper": {"traces": 7}}'},
    ],
)
def test_nodes_and_traces_of_others_are_not_taken_for_these(row: dict[str, Any]) -> None:
    assert not verifiers_v1.FORMAT.matches(row)


def test_bare_traces_and_uploaded_samples_say_what_the_episode_says() -> None:
    wanted = said(read_one(verifiers_v1.FORMAT, row_named(verifiers_v1.FORMAT, "loss-weights")))
    bare = row_named(verifiers_v1.FORMAT, "bare-trace")
    assert bare["nodes"][0]["parent"] is None
    assert said(read_one(verifiers_v1.FORMAT, bare)) == wanted
    lines = [json.loads(line) for line in (FORMATS / "verifiers_v1.jsonl").read_text().splitlines()]
    whole, without = lines[-2:]
    assert said(read_one(verifiers_v1.FORMAT, whole)) == wanted
    opened = {**whole, "info": json.loads(whole["info"])}
    assert said(read_one(verifiers_v1.FORMAT, opened)) == wanted
    left = read_one(verifiers_v1.FORMAT, without)
    assert (left.turns, left.stated.ids_wanted, len(left.messages)) == ((), False, 2)


# verifiers before v1


def test_a_step_is_a_turn_and_the_conversation_is_that_of_the_last_step() -> None:
    row = row_named(verifiers_results.FORMAT, "clean")
    rollout = read_one(verifiers_results.FORMAT, row)
    tokens = [step["tokens"] for step in row["trajectory"]]
    assert said(rollout) == [(one["prompt_ids"], one["completion_ids"]) for one in tokens]
    assert [turn.message_index for turn in rollout.turns] == [2, 4, 6]
    assert rollout.messages[2].wire["tool_calls"][0]["function"]["name"] == "weather"
    assert rollout.messages[2].content is None
    assert rollout.stated == Stated(model="org/model", group="clean")
    assert rollout.training_row is None
    assert {column.name for turn in rollout.turns for column in turn.columns} == {
        "completion_logprobs",
        "completion_mask",
    }


def test_saved_tool_calls_are_strings_and_are_read() -> None:
    row = row_named(verifiers_results.FORMAT, "clean")
    del row["trajectory"]
    rollout = read_one(verifiers_results.FORMAT, row)
    assert rollout.stated.ids_wanted is False
    assert rollout.messages[2].tool_calls[0].arguments == '{"city": "Oslo"}'


def test_a_prompt_that_was_cut_is_not_paired_with_its_messages() -> None:
    rollout = read_one(verifiers_results.FORMAT, row_named(verifiers_results.FORMAT, "prompt-cut"))
    (turn,) = rollout.turns
    assert (turn.message_index, turn.prompt_messages, turn.completion_text) == (None, None, None)
    assert turn.finish_reason == "length"


@pytest.mark.parametrize("tokens", [None, {}, {"prompt_ids": [], "completion_ids": []}])
def test_steps_without_ids_are_nothing_to_audit(tokens: Any) -> None:
    row = row_named(verifiers_results.FORMAT, "logprobs-one-too-few")
    row["trajectory"][0]["tokens"] = tokens
    rollout = read_one(verifiers_results.FORMAT, row)
    assert (rollout.turns, rollout.stated.ids_wanted) == ((), False)


def test_masks_that_train_something_else_are_shown_as_a_row() -> None:
    row = row_named(verifiers_results.FORMAT, "clean")
    tokens = [step["tokens"] for step in row["trajectory"]]
    tokens[0]["completion_mask"][0] = 0
    mask = trained(read_one(verifiers_results.FORMAT, row)).loss_mask
    assert mask is not None
    start = len(tokens[0]["prompt_ids"])
    assert not mask[start]
    assert mask[start + 1]
    assert mask[len(tokens[2]["prompt_ids"]) :].all()
    tokens[2]["prompt_ids"][3] += 1
    with pytest.raises(RecordError, match="no step holds the tokens of all"):
        read(verifiers_results.FORMAT, row)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trajectory": "x"}, "trajectory is not a list of steps"),
        ({"trajectory": [1]}, r"trajectory\[0\] is not a step"),
        ({"trajectory": [{"tokens": [1]}]}, r"trajectory\[0\]\.tokens is not an object"),
        ({"trajectory": [{"tokens": {"prompt_ids": ["a"]}}]}, r"trajectory\[0\]\.tokens: column 'prompt_ids'"),
        (
            {"trajectory": [{"tokens": {"completion_ids": [1], "completion_mask": [1, 1]}}]},
            r"completion_mask has 2 entries for 1 completion ids",
        ),
        (
            {"trajectory": [{"tokens": {"prompt_ids": [1], "completion_ids": [1], "prompt_mask": []}}]},
            None,
        ),
        ({"completion": [7]}, r"completion\[0\] is not a message"),
    ],
)
def test_broken_steps_are_refused_with_their_place(change: dict[str, Any], says: str | None) -> None:
    row = {**row_named(verifiers_results.FORMAT, "text-only"), **change}
    if says is None:
        assert len(read(verifiers_results.FORMAT, row)) == 1
        return
    with pytest.raises(RecordError, match=says):
        read(verifiers_results.FORMAT, row)


# prime-rl


def test_a_token_export_knows_what_the_trainer_computed() -> None:
    row = row_named(prime_rl_tokens.FORMAT, "clean")
    row["losses"] = [{} for _ in row["token_ids"]]
    line = trained(read_one(prime_rl_tokens.FORMAT, row))
    policies = {column.name: column.policy for column in line.columns}
    assert len(policies) == 17
    assert policies["position_ids"] is MovePolicy.COPY
    assert {name for name, policy in policies.items() if policy is MovePolicy.MOVE} == {
        *("loss_mask", "advantages", "inference_logprobs", "rl_weights", "ce_weights", "ref_kl_weights", "losses")
    }
    assert {column.alignment for column in line.columns} == {Alignment.FULL}
    found = {column.name: column.values for column in line.columns}
    assert np.isnan(found["trainer_logprobs"][0])
    assert np.isnan(found["rl_weights"]).all()
    assert line.sentinel == 0.0


def test_a_newer_token_export_is_refused_and_an_empty_one_holds_nothing() -> None:
    row = row_named(prime_rl_tokens.FORMAT, "clean")
    with pytest.raises(RecordError, match="schema_version is 2"):
        read(prime_rl_tokens.FORMAT, {**row, "schema_version": 2})
    for empty in ([], None):
        assert read_one(prime_rl_tokens.FORMAT, {**row, "token_ids": empty}).stated.ids_wanted is False
    with pytest.raises(RecordError, match="'loss_mask' is not a list"):
        read(prime_rl_tokens.FORMAT, {**row, "loss_mask": "x"})


def test_samples_are_read_under_their_new_names_and_their_old() -> None:
    new = trained(read_one(prime_rl_sample.FORMAT, row_named(prime_rl_sample.FORMAT, "clean")))
    split = row_named(prime_rl_sample.FORMAT, "split")
    old = trained(read_one(prime_rl_sample.FORMAT, split))
    np.testing.assert_array_equal(new.token_ids, old.token_ids)
    np.testing.assert_array_equal(new.loss_mask, old.loss_mask)
    assert old.prompt_length == len(split["prompt_ids"])
    assert new.logprobs is not None
    assert old.logprobs is not None
    np.testing.assert_array_equal(new.logprobs[old.prompt_length :], old.logprobs[old.prompt_length :])
    fits = {column.name: column.alignment for column in old.columns}
    assert fits["completion_temperatures"] is Alignment.RESPONSE
    assert fits["teacher_logprobs"] is Alignment.FULL
    policies = {column.name: column.policy for column in (*new.columns, *old.columns)}
    assert policies["ref_logprobs"] is policies["teacher_logprobs"] is MovePolicy.STALE
    assert policies["temperatures"] is MovePolicy.MOVE


@pytest.mark.parametrize(
    "row",
    [
        {"token_ids": [1, 2], "mask": [0, 1], "logprobs": [0.0, -1.0]},
        {"token_ids": [1, 2], "mask": [0, 1], "logprobs": [0.0, -1.0], "messages": [], "temperatures": [1, 1]},
        {"prompt_ids": [1], "completion_ids": [2], "completion_mask": [1], "completion_logprobs": [-1.0]},
    ],
)
def test_rows_of_these_names_alone_stay_generic(row: dict[str, Any]) -> None:
    assert pick_format(row) is format_named("generic")


@pytest.mark.parametrize("change", [{"mask": "x"}, {"logprobs": {"content": []}}, {"token_ids": [1, "a"]}])
def test_a_broken_sample_is_refused_by_its_column(change: dict[str, Any]) -> None:
    row = {**row_named(prime_rl_sample.FORMAT, "clean"), **change}
    with pytest.raises(RecordError, match=f"'{next(iter(change))}'"):
        read(prime_rl_sample.FORMAT, row)


# What the framework writes


def assert_as_trained(rollout: Rollout, branches: list[dict[str, Any]]) -> None:
    """The turns of a rollout are the sampled stretches of the framework's own training samples."""
    stretches = set()
    for branch in branches:
        ids, mask = branch["token_ids"], np.array([False, *branch["mask"], False])
        starts, ends = np.flatnonzero(mask[1:] > mask[:-1]), np.flatnonzero(mask[1:] < mask[:-1])
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            logprobs = [round(value, 4) for value in branch["logprobs"][start:end]]
            stretches.add((tuple(ids[:start]), tuple(ids[start:end]), tuple(logprobs)))
    turns = set()
    for turn in rollout.turns:
        assert turn.prompt_ids is not None
        assert turn.completion_ids is not None
        assert turn.completion_logprobs is not None
        logprobs = np.round(turn.completion_logprobs, 4).tolist()
        turns.add((tuple(turn.prompt_ids.tolist()), tuple(turn.completion_ids.tolist()), tuple(logprobs)))
    assert turns == stretches
    assert len(turns) == len(rollout.turns)


@pytest.mark.parametrize("python", some(["verifiers", "verifiers_0_3"], 1))
def test_what_verifiers_writes_is_read_as_it_trains_it(python: str, tmp_path: Path) -> None:
    folder = written(python, tmp_path / "logs")
    expected = json.loads((folder / "v1" / "expected.json").read_text())
    names = [
        name for name in ("traces.jsonl", "trace.jsonl", "uploaded.parquet") if (folder / "v1" / name).exists()
    ]
    assert names[:2] == ["traces.jsonl", "trace.jsonl"]
    for name in names:
        found = [dict(raw.value or {}) for raw in open_log(folder / "v1" / name)]
        for row, (identifier, branches) in zip(found, expected.items(), strict=True):
            rollout = read_one(verifiers_v1.FORMAT, copy.deepcopy(row))
            assert rollout.stated.facts["id"] == identifier
            assert rollout.stated.model == "org/model"
            if identifier == "text-only":
                assert rollout.stated.ids_wanted is False
                assert [message.role for message in rollout.messages] == branches[0]["roles"]
                continue
            assert_as_trained(rollout, branches)
            assert all(turn.finish_reason in ("stop", "tool_calls") for turn in rollout.turns)
            if name != "trace.jsonl":
                assert {turn.weight_versions for turn in rollout.turns} == {("3",)}
    settings = Settings(tokenizer=str(TOY))
    found_in = {
        result.place.row: {finding.code for finding in result.findings if finding.severity > 0}
        for result in scan_rollouts(folder / "v1" / "traces.jsonl", settings)
    }
    assert found_in == {0: set(), 1: set(), 2: set(), 3: {"SEQ301", "TOK101"}, 4: set(), 5: set()}


def test_what_is_written_again_verifiers_reads(tmp_path: Path) -> None:
    folder = written("verifiers", tmp_path / "logs")
    log, out = folder / "v1" / "traces.jsonl", tmp_path / "again.jsonl"
    settings = Settings(tokenizer=str(TOY))
    list(
        repair_rollouts(log, out, settings, RepairSettings(strategies=("splice",), unsafe=True, provenance=False))
    )
    before, after = map(json.loads, asked("verifiers", "--branches", log, out).splitlines())
    broken = "prefix-broken-by-retokenization"
    assert {name: branches for name, branches in after.items() if name != broken} == {
        name: branches for name, branches in before.items() if name != broken
    }
    kept, spliced = after[broken]
    assert kept == before[broken][0]
    assert spliced["token_ids"][: len(kept["token_ids"])] == kept["token_ids"]
    assert len(spliced["mask"]) == len(spliced["token_ids"])
    sampled = [token for token, own in zip(spliced["token_ids"], spliced["mask"], strict=True) if own]
    old = before[broken][1]
    assert sampled == [token for token, own in zip(old["token_ids"], old["mask"], strict=True) if own]
    changed = [
        (a, b) for a, b in zip(log.read_text().splitlines(), out.read_text().splitlines(), strict=True) if a != b
    ]
    ((was, now),) = [(json.loads(a), json.loads(b)) for a, b in changed]
    assert now["num_input_tokens"] == was["num_input_tokens"] + 1
    assert now["num_output_tokens"] == was["num_output_tokens"]


def test_results_that_verifiers_saved_are_read(tmp_path: Path) -> None:
    folder = written("verifiers_0_3", tmp_path / "logs")
    expected = json.loads((folder / "v1" / "expected.json").read_text())
    found = [dict(raw.value or {}) for raw in open_log(folder / "old" / "results.jsonl")]
    for row, branches in zip(found, list(expected.values())[:5], strict=True):
        rollout = read_one(verifiers_results.FORMAT, row)
        wanted = {tuple(branch["token_ids"]) for branch in branches}
        assert wanted <= {tuple(turn.seen_ids.tolist()) for turn in rollout.turns if turn.seen_ids is not None}
        assert len(rollout.turns) == len(row["trajectory"])
    settings = Settings(tokenizer=str(TOY))
    found_in = [
        {finding.code for finding in result.findings if finding.severity > 0}
        for result in scan_rollouts(folder / "old" / "results.jsonl", settings)
    ]
    assert found_in == [set(), set(), set(), {"SEQ301", "TOK101"}, set()]
