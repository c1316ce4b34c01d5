"""verifiers and prime-rl written again: every copy of what changed, in the form of the log, and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.forms import PLACE, paths, read_one, with_turns
from tests.world import FORMATS
from tito_audit.errors import RecordError
from tito_audit.format import Format, Row
from tito_audit.formats import pick_format, prime_rl_sample, prime_rl_tokens, verifiers_results, verifiers_v1
from tito_audit.record.column import ColumnRole
from tito_audit.record.moved import moved_row
from tito_audit.record.repaired import RepairedRollout, unmended
from tito_audit.record.rollout import Rollout, TrainingRow


def fixture(form: Format, name: str) -> dict[str, Any]:
    for line in (FORMATS / f"{form.name}.jsonl").read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        if name in (row.get("id"), row.get("example_id")):
            return row
    raise KeyError(name)


def node(ids: list[int], parent: int | None = None, sampled: int = 0, **more: Any) -> dict[str, Any]:
    """A node whose last `sampled` tokens were sampled."""
    return {
        **({} if parent is None else {"parent": parent}),
        "message": {"role": "assistant" if sampled else "user", "content": f"text {ids}"},
        "sampled": bool(sampled),
        "token_ids": ids,
        "mask": [False] * (len(ids) - sampled) + [True] * sampled,
        "logprobs": [-0.25 * (i + 1) for i in range(sampled)],
        **more,
    }


def episode(*nodes: dict[str, Any], **more: Any) -> dict[str, Any]:
    trace = {"version": 1, "id": "t", "nodes": list(nodes), "calls": [], **more}
    return {"id": "e", "env": {"id": "sums"}, "task": {}, "traces": [trace]}


def broken() -> dict[str, Any]:
    """A second call whose prompt holds 4 where 6, 7 was sampled, as a branch of its own."""
    return episode(
        node([1, 2]),
        node([5, 6, 7, 3], 0, 3),
        node([5, 4, 3], 0, is_content=[False, True, False]),
        node([8], 2),
        node([5, 9], 3, 1),
    )


def with_prompt(rollout: Rollout, turn: int, ids: Sequence[int]) -> RepairedRollout:
    return with_turns(rollout, {turn: replace(rollout.turns[turn], prompt_ids=np.array(ids, np.int32))})


def with_column(rollout: Rollout, turn: int, name: str, values: Sequence[float] | None) -> RepairedRollout:
    """The rollout with one column of a turn changed, or without it."""
    one = rollout.turns[turn]
    new = None if values is None else np.array(values, np.float64)
    columns = tuple(
        column if column.name != name else replace(column, values=new)
        for column in one.columns
        if column.name != name or new is not None
    )
    scored = any(column.name == name and column.role is ColumnRole.LOGPROBS for column in one.columns)
    logprobs = new if scored else one.completion_logprobs
    return with_turns(rollout, {turn: replace(one, columns=columns, completion_logprobs=logprobs)})


def written(row: Row, *mended: RepairedRollout) -> Row:
    """The one row that is written; what it was made of stays as it was."""
    before = copy.deepcopy(row)
    (new,) = pick_format(row).update(row, mended)
    assert repr(before) == repr(row)
    return new


# verifiers v1


def test_logprobs_change_at_their_node_and_are_compacted_by_the_mask() -> None:
    row = episode(node([1]), node([5, 6, 7, 8], 0, 3, mask=[False, True, False, True], logprobs=[-0.5, -0.75]))
    new = written(row, with_column(read_one(row), 0, "logprobs", [-0.5, np.nan, -1.25]))
    assert paths(row, new) == ["traces.0.nodes.1.logprobs"]
    assert new["traces"][0]["nodes"][1]["logprobs"] == [-0.5, -1.25]
    assert new["traces"][0]["nodes"][0] is row["traces"][0]["nodes"][0]


def test_a_logprob_that_is_not_known_has_no_place() -> None:
    row = episode(node([1]), node([2, 3], 0, 2))
    with pytest.raises(RecordError, match="cannot hold null"):
        written(row, with_column(read_one(row), 0, "logprobs", [-0.5, np.nan]))
    row["traces"][0]["nodes"][1]["logprobs"][0] = None
    new = written(row, with_column(read_one(row), 0, "logprobs", [-0.5, np.nan]))
    assert new["traces"][0]["nodes"][1]["logprobs"] == [-0.5, None]


def test_a_rounded_log_gets_no_more_digits_and_a_full_one_keeps_them() -> None:
    row = episode(node([1]), node([2, 3], 0, 2, logprobs=[-0.1234, -0.0]))
    values = [-0.1234, -0.5]
    assert (
        written(row, with_column(read_one(row), 0, "logprobs", values))["traces"][0]["nodes"][1]["logprobs"]
        == values
    )
    new = written(row, with_column(read_one(row), 0, "logprobs", [-0.12345678, -0.5]))
    assert new["traces"][0]["nodes"][1]["logprobs"] == [-0.1235, -0.5]
    full = episode(node([1]), node([2, 3], 0, 2, logprobs=[-0.12345678, -0.25]))
    new = written(full, with_column(read_one(full), 0, "logprobs", [-0.25, -0.12345678]))
    assert new["traces"][0]["nodes"][1]["logprobs"] == [-0.25, -0.12345678]


@pytest.mark.parametrize(("bare", "left"), [(False, "absent"), (True, "null")])
def test_a_column_that_is_gone_is_absent_or_null_as_the_log_has_it(bare: bool, left: str) -> None:
    said = node([2, 3], 0, 2, advantages=[0.5, 0.5], loss_weights={"echo": [1.0, 1.0], "other": [0.0, 1.0]})
    row = episode({**node([1]), **({"parent": None} if bare else {})}, said)
    rollout = read_one(row)
    gone = written(row, with_column(rollout, 0, "advantages", None))["traces"][0]["nodes"][1]
    assert gone.get("advantages", "absent") == ("absent" if left == "absent" else None)
    changed = written(row, with_column(rollout, 0, "loss_weights.echo", [0.5, 1.0]))
    assert paths(row, changed) == ["traces.0.nodes.1.loss_weights.echo"]
    assert changed["traces"][0]["nodes"][1]["loss_weights"] == {"echo": [0.5, 1.0], "other": [0.0, 1.0]}


def test_a_prompt_changes_in_the_node_that_holds_the_tokens() -> None:
    row = broken()
    calls = [
        {"node": 1, "usage": {"prompt_tokens": 3, "completion_tokens": 3}},
        {"node": 4, "usage": {"prompt_tokens": 4, "completion_tokens": 1, "cached_input_tokens": 3}},
    ]
    row["traces"][0].update(calls=calls, num_input_tokens=10, num_output_tokens=4, num_total_tokens=14)
    row.update(num_input_tokens=10, num_total_tokens=99)
    new = written(row, with_prompt(read_one(row), 1, [1, 2, 5, 6, 7, 3, 8, 5]))
    assert sorted(paths(row, new)) == sorted(
        [
            *(f"traces.0.nodes.2.{name}" for name in ("token_ids", "mask", "is_content")),
            "traces.0.calls.1.usage.prompt_tokens",
            *(f"{place}num_{what}_tokens" for place in ("", "traces.0.") for what in ("input", "total")),
        ]
    )
    changed = new["traces"][0]["nodes"][2]
    assert changed["token_ids"] == [5, 6, 7, 3]
    assert changed["mask"] == [False] * 4
    assert changed["is_content"] == [False, True, True, False]
    assert new["traces"][0]["calls"][1]["usage"]["prompt_tokens"] == 5
    assert new["traces"][0]["num_input_tokens"] == 11
    assert new["traces"][0]["num_total_tokens"] == 15
    assert new["num_input_tokens"] == 11


def test_counts_that_were_not_true_stay() -> None:
    row = broken()
    row["traces"][0]["calls"] = [
        {"node": 4, "usage": {"prompt_tokens": 70, "completion_tokens": 1}},
        "x",
        {"node": 1},
    ]
    row["traces"][0]["num_input_tokens"] = 7
    new = written(row, with_prompt(read_one(row), 1, [1, 2, 5, 6, 7, 3, 8, 5]))
    assert new["traces"][0]["calls"] is row["traces"][0]["calls"]
    assert new["traces"][0]["num_input_tokens"] == 7


def test_what_is_not_known_of_new_tokens_is_unknown_or_refused() -> None:
    row = broken()
    held = row["traces"][0]["nodes"][2]
    held.update(
        is_content=[False, True, True], routed_experts={"__nd__": True}, loss_weights={"echo": [0.0, 0.0, 0.0]}
    )
    wanted = [1, 2, 5, 6, 7, 2, 8, 5]
    new = written(row, with_prompt(read_one(row), 1, wanted))["traces"][0]["nodes"][2]
    assert new["is_content"] == [False, True, True, True]
    assert new["loss_weights"] == {"echo": [0.0] * 4}
    assert "routed_experts" not in new
    held["is_content"] = [False, True, False]
    assert written(row, with_prompt(read_one(row), 1, wanted))["traces"][0]["nodes"][2]["is_content"] == []
    held["loss_weights"] = {"echo": [0.0, 0.5, 1.0]}
    with pytest.raises(RecordError, match=r"nodes\[2\]\.loss_weights\.echo weighs the tokens"):
        written(row, with_prompt(read_one(row), 1, wanted))


def test_the_generation_prompt_of_the_call_itself_may_change() -> None:
    row = broken()
    new = written(row, with_prompt(read_one(row), 1, [1, 2, 5, 4, 3, 8, 5, 5]))
    assert paths(row, new) == ["traces.0.nodes.4.token_ids", "traces.0.nodes.4.mask"]
    assert new["traces"][0]["nodes"][4]["token_ids"] == [5, 5, 9]


def test_what_several_branches_share_changes_for_all_of_them_or_not_at_all() -> None:
    row = episode(node([1, 2]), node([5, 6], 0, 1), node([5, 7], 0, 1))
    rollout = read_one(row)
    both = {n: replace(rollout.turns[n], prompt_ids=np.array([1, 4, 5], np.int32)) for n in (0, 1)}
    assert paths(row, written(row, with_turns(rollout, both))) == ["traces.0.nodes.0.token_ids"]
    with pytest.raises(RecordError, match="no separate place for the new prompt of call 1"):
        written(row, with_prompt(rollout, 0, [1, 4, 5]))
    both[1] = replace(rollout.turns[1], prompt_ids=np.array([1, 3, 5], np.int32))
    with pytest.raises(RecordError, match=r"nodes\[0\] belongs to several branches"):
        written(row, with_turns(rollout, both))


def test_what_a_trace_cannot_hold_is_refused() -> None:
    row = episode(node([1, 2]), node([5, 6], 0, 1), node([8], 1), node([5, 9], 2, 1))
    rollout = read_one(row)
    with pytest.raises(RecordError, match=r"nodes\[1\] was sampled"):
        written(row, with_prompt(rollout, 1, [1, 2, 5, 7, 8, 5]))
    with pytest.raises(RecordError, match="cannot hold a fork and does not need one"):
        written(row, unmended(rollout), unmended(rollout))
    with pytest.raises(RecordError, match="cannot be left out"):
        written(row, RepairedRollout(replace(rollout, turns=rollout.turns[1:]), (1,)))
    with pytest.raises(RecordError, match="which of the two they belong"):
        written(broken(), with_prompt(read_one(broken()), 1, [1, 2, 5, 4, 6, 6, 5]))
    odd = fixture(verifiers_v1.FORMAT, "question-under-the-mask")
    held = read_one(odd)
    assert held.training_row is not None
    assert held.training_row.loss_mask is not None
    cleared = replace(held.training_row, loss_mask=np.zeros_like(held.training_row.loss_mask))
    with pytest.raises(RecordError, match="cannot be changed by itself"):
        written(odd, replace(unmended(held), rollout=replace(held, training_row=cleared)))


def test_a_trace_among_others_changes_alone() -> None:
    row = fixture(verifiers_v1.FORMAT, "two-traces")
    first, judge = verifiers_v1.FORMAT.read(row, PLACE)
    assert first.turns[0].completion_logprobs is not None
    values = (first.turns[0].completion_logprobs - 1).tolist()
    new = written(row, with_column(first, 0, "logprobs", values), unmended(judge))
    assert paths(row, new) == ["traces.0.nodes.1.logprobs"]
    assert new["traces"][1] is row["traces"][1]


@pytest.mark.parametrize("as_text", [True, False])
def test_an_uploaded_sample_changes_inside_its_string(as_text: bool) -> None:
    lines = [json.loads(line) for line in (FORMATS / "verifiers_v1.jsonl").read_text().splitlines()]
    row = lines[-2]
    if not as_text:
        row["info"] = json.loads(row["info"])
    rollout = read_one(row)
    assert rollout.turns[0].completion_logprobs is not None
    values = [-7.5, *rollout.turns[0].completion_logprobs[1:].tolist()]
    new = written(row, with_column(rollout, 0, "logprobs", values))
    if not as_text:
        assert paths(row, new) == ["info.native_wrapper.traces.0.nodes.1.logprobs"]
        return
    assert paths(row, new) == ["info"]
    old = json.loads(row["info"])["native_wrapper"]["traces"][0]["nodes"][1]["logprobs"]
    assert new["info"] == row["info"].replace(json.dumps(old), json.dumps(values))


# verifiers before v1


def test_both_copies_of_the_ids_change_and_so_do_the_counts() -> None:
    row = fixture(verifiers_results.FORMAT, "prefix-broken-by-retokenization")
    step = row["trajectory"][2]
    step["tokens"].update(routed_experts={"data": "x"}, prompt_attribution={"is_content": []})
    row["token_usage"]["final_input_tokens"] = 191
    rollout = read_one(row)
    prompt = [*step["tokens"]["prompt_ids"][:-1], 9, 9]
    new = written(row, with_prompt(rollout, 2, prompt))
    assert sorted(paths(row, new)) == sorted(
        [
            *(f"trajectory.2.{place}.{name}" for place in ("tokens", "response.message.tokens")
              for name in ("prompt_ids", "prompt_mask")),
            "trajectory.2.tokens.routed_experts",
            "trajectory.2.tokens.prompt_attribution",
            "trajectory.2.response.usage.prompt_tokens",
            "trajectory.2.response.usage.total_tokens",
            "token_usage.input_tokens",
            "token_usage.final_input_tokens",
        ]
    )  # fmt: skip
    for tokens in (new["trajectory"][2]["tokens"], new["trajectory"][2]["response"]["message"]["tokens"]):
        assert tokens["prompt_ids"] == prompt
        assert tokens["prompt_mask"] == [0] * len(prompt)
    assert new["trajectory"][2]["tokens"]["routed_experts"] is None
    assert new["token_usage"]["input_tokens"] == row["token_usage"]["input_tokens"] + 1
    assert new["token_usage"]["final_input_tokens"] == 192
    assert new["trajectory"][0] is row["trajectory"][0]


def test_a_copy_that_says_something_else_stays() -> None:
    row = fixture(verifiers_results.FORMAT, "logprobs-one-too-few")
    rollout = read_one(row)
    values = row["trajectory"][0]["response"]["message"]["tokens"]["completion_logprobs"]
    new = written(row, with_column(rollout, 0, "completion_logprobs", values))
    assert paths(row, new) == ["trajectory.0.tokens.completion_logprobs"]
    assert new["trajectory"][0]["tokens"]["completion_logprobs"] == values


def test_what_a_trajectory_cannot_hold_is_refused() -> None:
    row = fixture(verifiers_results.FORMAT, "clean")
    rollout = read_one(row)
    with pytest.raises(RecordError, match="cannot hold a fork and does not need one"):
        written(row, unmended(rollout), unmended(rollout))
    with pytest.raises(RecordError, match="cannot be left out"):
        written(row, RepairedRollout(replace(rollout, turns=rollout.turns[1:]), (1, 2)))
    odd = fixture(verifiers_results.FORMAT, "prompt-under-the-mask")
    held = read_one(odd)
    with pytest.raises(RecordError, match="prompt_mask trains tokens"):
        written(odd, with_prompt(held, 0, [1, 2]))
    with pytest.raises(RecordError, match="cannot be changed by itself"):
        written(odd, unmended(replace(held, training_row=None)))


# prime-rl


def spliced(row: TrainingRow, start: int, end: int, ids: Sequence[int]) -> TrainingRow:
    """The training row with other ids in place of `[start, end)`, untrained and without logprobs."""
    source = np.concatenate([np.arange(start), np.full(len(ids), -1), np.arange(end, len(row.token_ids))])
    source = source.astype(np.int64)
    token_ids = np.concatenate([row.token_ids[:start], np.array(ids, np.int32), row.token_ids[end:]])
    assert row.loss_mask is not None
    assert row.logprobs is not None
    mask = (source >= 0) & row.loss_mask[source]
    logprobs = np.where(source >= 0, row.logprobs[source], 0.0)
    return moved_row(row, token_ids.astype(np.int32), source, loss_mask=mask, logprobs=logprobs).row


def with_row(rollout: Rollout, row: TrainingRow) -> RepairedRollout:
    return unmended(replace(rollout, training_row=row))


def test_what_a_trainer_computed_is_unknown_from_the_change_on() -> None:
    row = fixture(prime_rl_tokens.FORMAT, "clean")
    row["losses"] = [{"rl": number} for number, _ in enumerate(row["token_ids"])]
    rollout = read_one(row)
    assert rollout.training_row is not None
    at, size = 21, len(row["token_ids"])
    new = written(row, with_row(rollout, spliced(rollout.training_row, at, at + 1, [7, 8])))
    assert list(new) == list(row)
    assert new["token_ids"] == [*row["token_ids"][:at], 7, 8, *row["token_ids"][at + 1 :]]
    assert new["position_ids"] == list(range(size + 1))
    assert new["loss_mask"] == [*row["loss_mask"][:at], False, False, *row["loss_mask"][at + 1 :]]
    assert new["inference_logprobs"][at : at + 2] == [0.0, 0.0]
    assert new["advantages"] == [*[0.7] * at, None, None, *[0.7] * (size - at - 1)]
    assert new["losses"] == [*row["losses"][:at], None, None, *row["losses"][at + 1 :]]
    for name in ("trainer_logprobs", "entropy", "mismatch_kl", "importance_ratio", "prob_delta", "is_masked"):
        assert new[name] == [*row[name][:at], *[None] * (size + 1 - at)], name
    assert new["is_masked_low"] == new["rl_weights"] == [None] * (size + 1)


def test_a_sample_changes_in_all_its_columns() -> None:
    row = fixture(prime_rl_sample.FORMAT, "clean")
    rollout = read_one(row)
    assert rollout.training_row is not None
    wanted = spliced(rollout.training_row, 3, 5, [7])
    new = written(row, with_row(rollout, wanted))
    assert {len(value) for value in new.values() if isinstance(value, list)} == {len(row["token_ids"]) - 1}
    assert new["temperatures"][2:5] == [1.0, None, 1.0]
    assert new["ref_logprobs"][2:] == [-0.4, *[None] * (len(row["token_ids"]) - 4)]
    assert new["rl_weights"] is None


@pytest.mark.parametrize(("start", "end", "prompt"), [(3, 5, -1), (140, 142, 0), (0, 1, 0)])
def test_a_split_sample_is_split_where_its_prompt_ends_now(start: int, end: int, prompt: int) -> None:
    row = fixture(prime_rl_sample.FORMAT, "split")
    rollout = read_one(row)
    assert rollout.training_row is not None
    wanted = spliced(rollout.training_row, start, end, [7])
    new = written(row, with_row(rollout, wanted))
    assert list(new) == list(row)
    assert len(new["prompt_ids"]) == len(new["prompt_mask"]) == len(row["prompt_ids"]) + prompt
    assert [*new["prompt_ids"], *new["completion_ids"]] == wanted.token_ids.tolist()
    assert [*new["prompt_mask"], *new["completion_mask"]] == (
        wanted.loss_mask.tolist() if wanted.loss_mask is not None else None
    )
    sizes = {len(new[name]) for name in ("completion_ids", "completion_mask", "completion_logprobs")}
    assert sizes == {len(new["completion_temperatures"])}
    again = read_one(new).training_row
    assert again is not None
    np.testing.assert_array_equal(again.loss_mask, wanted.loss_mask)
    assert new["advantage"] == 0.7


@pytest.mark.parametrize("form", [prime_rl_sample.FORMAT, prime_rl_tokens.FORMAT], ids=lambda form: form.name)
def test_a_row_of_one_sequence_cannot_be_forked_or_emptied(form: Format) -> None:
    row = fixture(form, "clean")
    rollout = read_one(row)
    with pytest.raises(RecordError, match="cannot hold a fork"):
        form.update(row, [unmended(rollout), unmended(rollout)])
    with pytest.raises(RecordError, match="neither be added"):
        form.update(row, [unmended(replace(rollout, training_row=None))])
