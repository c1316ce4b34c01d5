"""ART and Agent Lightning rows written again: what changes, in which copies, and what never does."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.forms import PLACE, paths, with_logprobs, with_prompt, with_turns
from tests.world import FORMATS
from tito_audit.errors import RecordError
from tito_audit.format import Format, Row
from tito_audit.formats import agent_lightning_event, agent_lightning_span, art_group, art_parquet
from tito_audit.record.edits import edits_between
from tito_audit.record.repaired import RepairedRollout, unmended
from tito_audit.record.rollout import Turn
from tito_audit.storage import open_log
from tito_audit.storage.table_rows import plain_values

ART, PARQUET = art_group.FORMAT, art_parquet.FORMAT
EVENT, SPAN = agent_lightning_event.FORMAT, agent_lightning_span.FORMAT
EVERY_ROW = [
    pytest.param(form, dict(raw.value or {}), id=f"{form.name}-{raw.index}")
    for form in (ART, PARQUET, EVENT, SPAN)
    for raw in open_log(next(FORMATS.glob(f"{form.name}.*")))
]
TALK = [{"role": "user", "content": "Grüße"}]


def update(form: Format, row: Row, changed: dict[int, dict[int, Turn]]) -> Row:
    """The row with turns replaced, by item and number; the old row stays as it was, and the new one says so."""
    was = copy.deepcopy(row)
    rollouts = form.read(row, PLACE)
    mended = [with_turns(rollout, changed.get(item, {})) for item, rollout in enumerate(rollouts)]
    (new,) = form.update(row, mended)
    assert list(edits_between(was, row)) == []
    for one, again in zip(mended, form.read(new, PLACE), strict=True):
        for wanted, turn in zip(one.rollout.turns, again.turns, strict=True):
            np.testing.assert_array_equal(turn.prompt_ids, wanted.prompt_ids)
            np.testing.assert_array_equal(turn.completion_ids, wanted.completion_ids)
    assert form.update(new, [unmended(rollout) for rollout in form.read(new, PLACE)])[0] is new
    return new


def prompts(form: Format, row: Row, item: int = 0) -> dict[int, Turn]:
    """The turns of a rollout with one more token in front of each prompt."""
    turns = form.read(row, PLACE)[item].turns
    return {
        number: with_prompt(turn, [7, *turn.prompt_ids.tolist()])
        for number, turn in enumerate(turns)
        if turn.prompt_ids is not None
    }


def halved(form: Format, row: Row, item: int = 0) -> dict[int, Turn]:
    """The turns of a rollout with every logprob halved."""
    turns = form.read(row, PLACE)[item].turns
    return {
        number: with_logprobs(turn, turn.completion_logprobs / 2)
        for number, turn in enumerate(turns)
        if turn.completion_logprobs is not None
    }


@pytest.mark.parametrize(("form", "row"), EVERY_ROW)
def test_a_row_in_which_nothing_changed_is_the_same_object(form: Format, row: dict[str, Any]) -> None:
    rollouts = form.read(row, PLACE)
    (new,) = form.update(row, [unmended(rollout) for rollout in rollouts])
    assert new is row


@pytest.mark.parametrize(("form", "row"), EVERY_ROW)
def test_other_prompts_and_logprobs_of_every_call_are_read_back(form: Format, row: dict[str, Any]) -> None:
    for item in range(len(form.read(row, PLACE))):
        for change in (prompts, halved):
            changed = change(form, row, item)
            new = update(form, row, {item: changed})
            assert (new is row) == (not changed)
            again = form.read(new, PLACE)[item].turns
            for number, turn in changed.items():
                read, wanted = again[number].completion_logprobs, turn.completion_logprobs
                assert (None if read is None else read.tolist()) == (None if wanted is None else wanted.tolist())


def choice(**more: Any) -> dict[str, Any]:
    return {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "4"}, **more}


def entries(*logprobs: float) -> dict[str, Any]:
    return {"content": [{"token": "x", "logprob": value, "bytes": None} for value in logprobs], "refusal": None}


def trajectory() -> dict[str, Any]:
    first = choice(prompt_token_ids=[1], token_ids=[2])
    last = choice(prompt_token_ids=[1, 2, 3], token_ids=[4])
    beside = {"messages_and_choices": [*TALK, choice(prompt_token_ids=[1], token_ids=[2])], "tools": None}
    return {"reward": 1.0, "messages_and_choices": [*TALK, first, *TALK, last], "additional_histories": [beside]}


def test_a_prompt_changes_in_its_choice_and_in_no_other_history() -> None:
    row = {"trajectories": [trajectory(), trajectory()], "note": None}
    turn = ART.read(row, PLACE)[2].turns[1]
    new = update(ART, row, {2: {1: with_prompt(turn, [1, 5, 3])}})
    assert paths(row, new) == ["trajectories.1.messages_and_choices.3.prompt_token_ids"]
    assert new["trajectories"][0] is row["trajectories"][0]
    further = ART.read(row, PLACE)[1].turns[0]
    new = update(ART, row, {1: {0: with_prompt(further, [9])}})
    assert paths(row, new) == ["trajectories.0.additional_histories.0.messages_and_choices.1.prompt_token_ids"]


def test_a_row_of_a_table_keeps_its_arrays() -> None:
    table = pa.Table.from_pylist([{"trajectories": [trajectory()]}])
    row = {name: plain_values(table[name].combine_chunks())[0] for name in table.column_names}
    turn = ART.read(row, PLACE)[0].turns[1]
    new = update(ART, row, {0: {1: with_prompt(turn, [1, 5, 3])}})
    (edit,) = edits_between(row, new)
    assert isinstance(edit.value, np.ndarray)


@pytest.mark.parametrize(
    ("form", "row"),
    [
        (ART, {"trajectories": [trajectory()]}),
        (PARQUET, {"format_version": 2, "group_json": "{}", "trajectory_json": json.dumps(trajectory())}),
    ],
)
def test_forks_and_calls_left_out_are_refused_in_words(form: Format, row: Row) -> None:
    first, second = form.read(row, PLACE)
    parts = [with_turns(first, {}, [0]), with_turns(first, {}, [1]), unmended(second)]
    with pytest.raises(RecordError, match="fork"):
        form.update(row, parts)
    with pytest.raises(RecordError, match="leave out a call"):
        form.update(row, [with_turns(first, {}, [0]), unmended(second)])
    with pytest.raises(RecordError, match="no rollout"):
        form.update(row, [])


def stored(value: dict[str, Any], **style: Any) -> dict[str, Any]:
    text = json.dumps(value, **style)
    return {"format_version": 2, "group_index": 0, "group_json": "{}", "trajectory_json": text, "reward": 1.0}


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_text_of_a_trajectory_keeps_its_separators_and_its_characters(compact: bool, ascii_only: bool) -> None:
    style = {"ensure_ascii": ascii_only, "separators": (",", ":") if compact else None}
    value = trajectory()
    value["messages_and_choices"][1] |= {"logprobs": entries(-0.50), "note": "1e-3"}
    row = stored(value, **style)
    row["trajectory_json"] = row["trajectory_json"].replace("-0.5", "-0.50")
    turn = PARQUET.read(row, PLACE)[0].turns[1]
    new = update(PARQUET, row, {0: {1: with_prompt(turn, [1, 2, 8, 3])}})
    assert paths(row, new) == ["trajectory_json"]
    gap = "," if compact else ", "
    old = gap.join(["[1", "2", "3]"])
    assert new["trajectory_json"] == row["trajectory_json"].replace(old, gap.join(["[1", "2", "8", "3]"]))
    assert ("ü" in new["trajectory_json"]) is not ascii_only
    assert "-0.50" in new["trajectory_json"]


def exchange(*, usage: bool = False, **request: Any) -> dict[str, Any]:
    response: dict[str, Any] = {
        "id": "c",
        "model": "m",
        "choices": [choice(token_ids=[4, 5], logprobs=entries(-0.5, -0.25))],
        "prompt_token_ids": [1, 2],
    }
    if usage:
        response["usage"] = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    return {"request": {"messages": TALK, "model": "m", **request}, "response": response}


def inner_paths(row: Row, new: Row) -> list[str]:
    return paths(json.loads(row["trajectory_json"]), json.loads(new["trajectory_json"]))


def test_a_chat_exchange_changes_its_prompt_and_the_counts_of_it() -> None:
    row = stored({"exchanges": {"chat_completions": [exchange(usage=True)]}})
    new = update(PARQUET, row, {0: prompts(PARQUET, row)})
    start = "exchanges.chat_completions.0.response"
    assert sorted(inner_paths(row, new)) == [
        f"{start}.prompt_token_ids",
        f"{start}.usage.prompt_tokens",
        f"{start}.usage.total_tokens",
    ]


def test_a_completions_exchange_changes_the_prompt_of_its_request_too() -> None:
    one = {"index": 0, "text": "4", "token_ids": [4], "prompt_token_ids": [1, 2], "finish_reason": "stop"}
    row = stored({"exchanges": {"completions": [{"request": {"prompt": [1, 2]}, "response": {"choices": [one]}}]}})
    new = update(PARQUET, row, {0: prompts(PARQUET, row)})
    start = "exchanges.completions.0"
    assert inner_paths(row, new) == [f"{start}.request.prompt", f"{start}.response.choices.0.prompt_token_ids"]


def test_a_generation_changes_beside_its_output_and_loses_no_token() -> None:
    tokens = [{"token_id": 4, "logprob": -0.5, "text": "4"}, {"token_id": 5, "logprob": None, "text": ""}]
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}
    own = {"prompt_token_ids": [1, 2], "output_indices": [0], "output_tokens": tokens}
    usage = {"input_tokens": 2, "output_tokens": 2, "total_tokens": 4}
    response = {"object": "response", "output": [item], "token_generations": [own], "usage": usage}
    row = stored({"exchanges": {"responses": [{"request": {"input": "2+2?"}, "response": response}]}})
    new = update(PARQUET, row, {0: prompts(PARQUET, row)})
    start = "exchanges.responses.0.response"
    assert inner_paths(row, new) == [
        f"{start}.token_generations.0.prompt_token_ids",
        f"{start}.usage.input_tokens",
        f"{start}.usage.total_tokens",
    ]
    new = update(PARQUET, row, {0: halved(PARQUET, row)})
    assert inner_paths(row, new) == [f"{start}.token_generations.0.output_tokens.0.logprob"]
    (rollout,) = PARQUET.read(row, PLACE)
    bare = replace(rollout.turns[0], completion_logprobs=None, columns=())
    with pytest.raises(RecordError, match="ids and logprobs together"):
        PARQUET.update(row, [with_turns(rollout, {0: bare})])


def test_a_row_without_a_trajectory_stays_and_takes_no_tokens() -> None:
    row = stored({}) | {"trajectory_json": None, "trajectory_index": None}
    (rollout,) = PARQUET.read(row, PLACE)
    assert PARQUET.update(row, [unmended(rollout)]) == (row,)
    turn = Turn(np.array([1], np.int32), np.array([2], np.int32))
    with pytest.raises(RecordError, match="no place"):
        PARQUET.update(row, [RepairedRollout(replace(rollout, turns=(turn,)), (0,))])


def event(data: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"event_type": "model_request", "rollout_id": "r", "attempt_id": "a", "data": data, **more}


def test_an_event_changes_its_prompt_and_drops_the_routing_beside_it() -> None:
    answered = exchange(usage=True)
    usage = answered["response"]["usage"]
    row = event({**answered, "usage": dict(usage), "routed_experts": [[1]], "finish_reason": "stop"})
    new = update(EVENT, row, {0: prompts(EVENT, row)})
    assert sorted(paths(row, new)) == [
        "data.response.prompt_token_ids",
        "data.response.usage.prompt_tokens",
        "data.response.usage.total_tokens",
        "data.routed_experts",
        "data.usage.prompt_tokens",
        "data.usage.total_tokens",
    ]
    assert (new["data"]["routed_experts"], new["data"]["usage"]["total_tokens"]) == (None, 5)


def test_a_triplet_changes_its_lists_and_keeps_null_logprobs() -> None:
    data = {"prompt_token_ids": [1], "response_token_ids": [2], "response_log_probs": [-0.5], "server": {}}
    row = event(data)
    assert paths(row, update(EVENT, row, {0: prompts(EVENT, row)})) == ["data.prompt_token_ids"]
    assert paths(row, update(EVENT, row, {0: halved(EVENT, row)})) == ["data.response_log_probs"]
    row = event({**data, "response_log_probs": None})
    assert update(EVENT, row, {0: prompts(EVENT, row)})["data"]["response_log_probs"] is None


def stream() -> dict[str, Any]:
    def chunk(token: int, logprob: float) -> dict[str, Any]:
        piece = {"index": 0, "delta": {"content": "x"}, "token_ids": [token], "logprobs": entries(logprob)}
        return {"object": "chat.completion.chunk", "choices": [piece]}

    first = {**chunk(2, -0.5), "prompt_token_ids": [1]}
    return event({"request": {"messages": TALK}, "response": [first, chunk(3, -0.25)]})


def test_a_stream_changes_in_the_chunks_that_hold_it() -> None:
    row = stream()
    assert paths(row, update(EVENT, row, {0: prompts(EVENT, row)})) == ["data.response.0.prompt_token_ids"]
    (rollout,) = EVENT.read(row, PLACE)
    new = update(EVENT, row, {0: {0: with_logprobs(rollout.turns[0], [-0.5, -1.0])}})
    assert paths(row, new) == ["data.response.1.choices.0.logprobs.content.0.logprob"]
    bare = replace(rollout.turns[0], completion_logprobs=None, columns=())
    with pytest.raises(RecordError, match="none of them can be dropped"):
        EVENT.update(row, [with_turns(rollout, {0: bare})])


def test_an_archived_rollout_changes_with_the_retries_of_its_calls() -> None:
    events = [event(exchange()), event({"value": 1.0}) | {"event_type": "reward"}, event(exchange())]
    row = {"rollout": {"rollout_id": "r"}, "events": events, "resources": {}}
    new = update(EVENT, row, {0: prompts(EVENT, row)})
    assert paths(row, new) == [f"events.{number}.data.response.prompt_token_ids" for number in (0, 2)]
    new = update(EVENT, row, {0: halved(EVENT, row)})
    content = "events.2.data.response.choices.0.logprobs.content"
    assert paths(row, new) == [f"{content}.0.logprob", f"{content}.1.logprob"]


def span(**attributes: Any) -> dict[str, Any]:
    return {"rollout_id": "r", "trace_id": "t", "span_id": "s", "name": "x", "attributes": attributes}


def test_a_span_changes_under_every_name_and_in_its_texts_only_there() -> None:
    counts = {"gen_ai.usage.prompt_tokens": 2, "gen_ai.usage.total_tokens": 3}
    logprobs = '[{"token":"ü", "logprob":-0.5}]'
    text = {"llm.hosted_vllm.prompt_token_ids": "[1,2]", "logprobs.content": logprobs}
    row = span(prompt_token_ids=[1, 2], response_token_ids=[4], **text, **counts)
    new = update(SPAN, row, {0: prompts(SPAN, row)})
    assert new["attributes"] == {
        **row["attributes"],
        "prompt_token_ids": [7, 1, 2],
        "llm.hosted_vllm.prompt_token_ids": "[7,1,2]",
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.total_tokens": 4,
    }
    new = update(SPAN, row, {0: halved(SPAN, row)})
    assert new["attributes"]["logprobs.content"] == logprobs.replace("-0.5", "-0.25")
    (rollout,) = SPAN.read(row, PLACE)
    bare = replace(rollout.turns[0], completion_logprobs=None, columns=())
    with pytest.raises(RecordError, match="cannot be left out"):
        SPAN.update(row, [with_turns(rollout, {0: bare})])


def test_of_listed_triplets_only_the_changed_one_is_another_object() -> None:
    listed = [{"prompt": {"token_ids": [n]}, "response": {"token_ids": [n + 1]}} for n in (1, 2)]
    row = {"rollout_id": "r", "triplets": listed}
    turn = SPAN.read(row, PLACE)[0].turns[1]
    new = update(SPAN, row, {0: {1: with_prompt(turn, [9])}})
    assert paths(row, new) == ["triplets.1.prompt.token_ids"]
    assert new["triplets"][0] is listed[0]
