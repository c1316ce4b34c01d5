"""Rows, calls and messages that were joined wrongly, through the command line, on real rollouts."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.command import run, written
from tests.tiers import crossed, examples, some

SHARED = Path(__file__).resolve().parents[2] / "shared"
NAMES = some(["qwen2.5-coder", "smollm2", "gemma-3"], 1)
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no shared/rollouts beside the checkout"),
]
Columns = tuple[list[int], list[int], list[float]]


@cache
def rollouts(name: str) -> list[dict[str, Any]]:
    with gzip.open(SHARED / "rollouts" / name / "tito.jsonl.gz") as lines:
        return [json.loads(line) for line in lines][: examples(11, 16)]


def columns_of(rollout: dict[str, Any]) -> Columns:
    """Ids, mask and logprobs of the row of a rollout's last call."""
    last = rollout["calls"][-1]
    ids = last["prompt_token_ids"] + last["generation_token_ids"]
    mask, logprobs = [0] * len(ids), [0.0] * len(ids)
    for call in rollout["calls"]:
        start, size = len(call["prompt_token_ids"]), len(call["generation_token_ids"])
        mask[start : start + size] = [1] * size
        logprobs[start : start + size] = call["generation_log_probs"]
    return ids, mask, logprobs


def row_of(rollout: dict[str, Any], columns: Columns | None = None) -> dict[str, Any]:
    """A row beside its calls."""
    ids, mask, logprobs = columns or columns_of(rollout)
    names = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "finish_reason")
    calls = [{name: call[name] for name in names} for call in rollout["calls"]]
    return {"token_ids": ids, "loss_mask": mask, "rollout_logprobs": logprobs, "calls": calls}


def scanned(name: str, log: Path, *options: object) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of a scan, and what it finds above a note."""
    code, out, _ = run(
        "scan", log, "-t", SHARED / "tokenizers" / name, "--no-config", "--report", "jsonl", *options
    )
    records = [json.loads(line) for line in out.splitlines()]
    return code, [record for record in records if record.get("severity") in ("error", "warning")]


def repaired(name: str, log: Path, rows: list[dict[str, Any]]) -> bool:
    """Whether the default repair leaves these rows as they are."""
    fixed = log.with_name("fixed.jsonl")
    run("repair", log, "-t", SHARED / "tokenizers" / name, "--no-config", "-o", fixed)
    after = rows if not fixed.exists() else list(map(json.loads, fixed.read_text().splitlines()))
    return all(row[key] == was[key] for row, was in zip(after, rows, strict=True) for key in was)


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_join_that_is_off_by_one_is_named(name: str, jobs: int, tmp_path: Path) -> None:
    rows = [row_of(rollout, columns_of(other)) for rollout, other in pairwise(rollouts(name))]
    log = written(tmp_path / "log.jsonl", rows)
    code, findings = scanned(name, log, "-j", jobs)
    assert code == 1
    assert {finding["row"] for finding in findings if finding["severity"] == "error"} == set(range(len(rows)))
    (of_log,) = [finding for finding in findings if finding["where"] == "log"]
    assert of_log["code"] == "REC012"
    assert "the join of rows and calls is off by +1" in of_log["message"]


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_were_swapped_name_each_other(name: str, tmp_path: Path) -> None:
    every = rollouts(name)
    rows = [row_of(rollout) for rollout in every]
    rows[3], rows[5] = row_of(every[3], columns_of(every[5])), row_of(every[5], columns_of(every[3]))
    log = written(tmp_path / "log.jsonl", rows)
    code, findings = scanned(name, log)
    assert code == 1
    assert {finding["row"] for finding in findings} == {3, 5}
    assert "row 3 what row 5 sampled, row 5 what row 3 sampled" in findings[-1]["message"]
    assert repaired(name, log, rows)


CHANCE = random.Random(7)
WRONG: dict[str, Callable[[list[int], list[int]], list[int]]] = {
    "random ids": lambda ids, mask: [CHANCE.randrange(40_000) for _ in ids],
    "random answers": lambda ids, mask: [
        CHANCE.randrange(40_000) if yes else token for token, yes in zip(ids, mask, strict=True)
    ],
    "ids plus 1": lambda ids, mask: [token + 1 for token in ids],
    "ids minus 2": lambda ids, mask: [max(token - 2, 0) for token in ids],
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_its_calls_did_not_sample_is_an_error(name: str, wrong: str, tmp_path: Path) -> None:
    rows = []
    for rollout in rollouts(name):
        ids, mask, logprobs = columns_of(rollout)
        rows.append(row_of(rollout, (WRONG[wrong](ids, mask), mask, logprobs)))
    log = written(tmp_path / "log.jsonl", rows)
    code, findings = scanned(name, log)
    assert code == 1
    assert {finding["row"] for finding in findings if finding["code"] == "REC012"} == set(range(len(rows)))
    assert not {finding["code"] for finding in findings} & {"REC007"}
    if wrong.startswith("ids"):
        assert all(
            wrong.removeprefix("ids ") in finding["message"] for finding in findings if finding["code"] == "REC012"
        )
    assert repaired(name, log, rows)


@pytest.mark.parametrize("name", NAMES)
def test_each_answer_that_its_call_did_not_sample_is_an_error(name: str, tmp_path: Path) -> None:
    several = [rollout for rollout in rollouts(name) if len(rollout["calls"]) > 2]
    rows = []
    for rollout in several:
        ids, mask, logprobs = columns_of(rollout)
        call = rollout["calls"][1]
        start, size = len(call["prompt_token_ids"]), len(call["generation_token_ids"])
        ids = [*ids[:start], *[CHANCE.randrange(40_000) for _ in range(size)], *ids[start + size :]]
        rows.append(row_of(rollout, (ids, mask, logprobs)))
    code, findings = scanned(name, written(tmp_path / "log.jsonl", rows))
    assert code == 1
    assert {finding["row"] for finding in findings if finding["severity"] == "error"} == set(range(len(rows)))


@pytest.mark.parametrize("part", some(["whole", "cut 1", "cut 8", "cut 40", "first call"], 3))
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_hold_a_part_of_what_was_sampled_are_right(name: str, part: str, tmp_path: Path) -> None:
    rows = []
    for rollout in rollouts(name):
        columns = columns_of(rollout)
        start = len(rollout["calls"][0]["prompt_token_ids"])
        size = len(columns[0])
        if part.startswith("cut"):
            size = start + int(part.split()[1])
        elif part == "first call":
            size = start + len(rollout["calls"][0]["generation_token_ids"])
        rows.append(row_of(rollout, tuple(column[:size] for column in columns)))  # type: ignore[arg-type]
    assert scanned(name, written(tmp_path / "log.jsonl", rows)) == (0, [])


# Messages


def talk_of(rollout: dict[str, Any], messages: list[dict[str, Any]], *, calls: bool) -> dict[str, Any]:
    row = {**row_of(rollout), "messages": messages, "tools": rollout["tools"] or []}
    return row if calls else {name: value for name, value in row.items() if name != "calls"}


@pytest.mark.parametrize("calls", [False, True], ids=["row", "calls"])
@pytest.mark.parametrize("name", NAMES)
def test_messages_of_another_conversation_are_named_and_used_for_nothing(
    name: str, calls: bool, tmp_path: Path
) -> None:
    every = rollouts(name)
    rows = [
        talk_of(rollout, other["messages"], calls=calls)
        for rollout, other in zip(every, [*every[1:], every[0]], strict=True)
        if not rollout["tools"] and not other["tools"]
    ]
    log = written(tmp_path / "log.jsonl", rows)
    code, findings = scanned(name, log)
    assert code == 0
    strange = {finding["row"] for finding in findings if finding["code"] == "REC012"}
    assert len(strange) >= len(rows) // 2
    assert not [finding for finding in findings if finding["row"] in strange and finding["code"] != "REC012"]
    assert repaired(name, log, rows)
    text = run("scan", log, "-t", SHARED / "tokenizers" / name, "--no-config")[1]
    assert "messages not used: they are of another conversation" in " ".join(text.split())


def other_system(messages: list[dict[str, Any]]) -> None:
    if messages[0]["role"] == "system":
        messages[0]["content"] = "You are someone else."


def other_tool_results(messages: list[dict[str, Any]]) -> None:
    for message in messages:
        if message["role"] == "tool":
            message["content"] = "quite another result"


def other_white_space(messages: list[dict[str, Any]]) -> None:
    for message in messages:
        if message.get("content"):
            message["content"] = f" {message['content']}\n"


@pytest.mark.parametrize(
    ("calls", "edit"), crossed([False, True], [other_system, other_tool_results, other_white_space])
)
@pytest.mark.parametrize("name", NAMES)
def test_messages_that_differ_elsewhere_are_of_the_row(
    name: str, edit: Callable[[list[dict[str, Any]]], None], calls: bool, tmp_path: Path
) -> None:
    rows = []
    for rollout in rollouts(name):
        messages = copy.deepcopy(rollout["messages"])
        edit(messages)
        rows.append(talk_of(rollout, messages, calls=calls))
    code, findings = scanned(name, written(tmp_path / "log.jsonl", rows))
    assert code == 0
    assert not {finding["code"] for finding in findings} & {"REC012", "MSK401", "MSK402"}


# Messages as they were sent, without the last answer


def doubled_header(row: dict[str, Any], start: int, header: list[int]) -> None:
    for name, values in (("token_ids", header), ("loss_mask", [0] * 3), ("rollout_logprobs", [0.0] * 3)):
        row[name] = [*row[name][:start], *values, *row[name][start:]]


def no_header(row: dict[str, Any], start: int, header: list[int]) -> None:
    for name in ("token_ids", "loss_mask", "rollout_logprobs"):
        row[name] = [*row[name][: start - 3], *row[name][start:]]


def other_order(row: dict[str, Any], start: int, header: list[int]) -> None:
    row["tools"] = row["tools"][::-1]


def one_exchange_more(row: dict[str, Any], start: int, header: list[int]) -> None:
    at = 1 if row["messages"][0]["role"] == "system" else 0
    question, answer = "What about the other plan?", "It is fine as it stands."
    row["messages"][at:at] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


FAULTS = {doubled_header: "TPL207", no_header: "TPL207", other_order: "TPL212", one_exchange_more: "SEQ303"}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_row_is_compared_with_messages_up_to_its_last_answer(
    fault: Callable[[dict[str, Any], int, list[int]], None] | None, tmp_path: Path
) -> None:
    name = "qwen2.5-coder"
    rows = []
    for rollout in rollouts(name):
        row = talk_of(rollout, copy.deepcopy(rollout["messages"][:-1]), calls=False)
        prompt = rollout["calls"][-1]["prompt_token_ids"]
        if fault is not None:
            fault(row, len(prompt), prompt[-3:])
        rows.append(row)
    log = written(tmp_path / "log.jsonl", rows)
    code, findings = scanned(name, log)
    assert code == 0
    assert repaired(name, log, rows)
    if fault is None:
        assert not findings
        return
    named = {finding["row"] for finding in findings if finding["code"] == FAULTS[fault]}
    at_fault = [number for number, row in enumerate(rows) if fault is not other_order or len(row["tools"]) > 1]
    assert len(named) >= len(at_fault) * 0.9
    assert named <= set(at_fault)


def test_a_row_that_was_cut_lacks_no_exchange_of_messages_as_sent(tmp_path: Path) -> None:
    name = "qwen2.5-coder"
    rows = []
    for rollout in rollouts(name):
        row = talk_of(rollout, rollout["messages"][:-1], calls=False)
        first = rollout["calls"][0]
        size = len(first["prompt_token_ids"]) + len(first["generation_token_ids"])
        rows.append({**row, **{key: row[key][:size] for key in ("token_ids", "loss_mask", "rollout_logprobs")}})
    assert scanned(name, written(tmp_path / "log.jsonl", rows)) == (0, [])
