"""What a vLLM server answered in whole conversations, logged a call a row: joined, it shows the same breaks."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.apart import SHARED, Wire, found_in, report_of
from tests.command import written
from tests.tiers import crossed

RECORDED = SHARED / "recorded" / "vllm-cpu"
SMOLLM2 = SHARED / "tokenizers" / "smollm2"

pytestmark = pytest.mark.skipif(
    not (RECORDED.is_dir() and SMOLLM2.is_dir()), reason="no recorded server answers are beside the checkout"
)

TOLD = ("-t", SMOLLM2)
"""How the conversations of SmolLM2 are scanned; the tokenizer of the tiny model was not kept."""
CASES = {
    "messages": ("sessions-messages", TOLD, {"SEQ301": 8}),
    "ids": ("sessions-ids", TOLD, {}),
    "reasoning-kept": ("sessions-tools-reasoning-kept", (), {"SEQ302": 3}),
    "reasoning-dropped": ("sessions-tools-reasoning-dropped", (), {"SEQ302": 3}),
}
"""Each log, how it is scanned, and how many later prompts are not what was seen and said before."""
NAMES = ("session_id", "conversation_id", "trajectory_id", "rollout_id", "trace_id")

Change = Callable[[Wire], Wire]


def sessions(name: str, change: Change = dict) -> list[Wire]:
    """The recorded conversations, each request and its answer changed in this way."""
    rows = [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{**row, "records": [change(record) for record in row["records"]]} for row in rows]


def without_ids(record: Wire) -> Wire:
    """As a server logs it that was not asked for ids."""
    response = {key: value for key, value in record["response"].items() if key != "prompt_token_ids"}
    choices = [
        {key: value for key, value in choice.items() if key not in ("token_ids", "prompt_token_ids")}
        for choice in response["choices"]
    ]
    return {**record, "response": {**response, "choices": choices}}


@cache
def smollm2() -> Tokenizer:
    return Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json"))


def as_text(record: Wire) -> Wire:
    """The prompt as text instead of ids, and an answer without ids."""
    prompt = smollm2().decode(record["request"]["prompt"], skip_special_tokens=False)
    return without_ids({**record, "request": {**record["request"], "prompt": prompt}})


def spaced(record: Wire, separators: tuple[str, str]) -> Wire:
    """The arguments of earlier tool calls, written with other spaces than the answer had."""

    def again(message: Wire) -> Wire:
        calls = [
            {**call, "function": {**call["function"], "arguments": respaced(call["function"]["arguments"])}}
            for call in message.get("tool_calls") or ()
        ]
        return {**message, "tool_calls": calls} if calls else message

    def respaced(arguments: str) -> str:
        return json.dumps(json.loads(arguments), separators=separators)

    return {**record, "request": {**record["request"], "messages": [*map(again, record["request"]["messages"])]}}


def logged(rows: list[Wire], folder: Path, key: str | None, files: int) -> tuple[list[Path], dict[Any, Any]]:
    """Each call as a row, in any order over files, and the conversation and turn of each place."""
    calls = [
        (number, turn, {**({key: row["session_id"]} if key else {}), **record})
        for number, row in enumerate(rows)
        for turn, record in enumerate(row["records"])
    ]
    random.Random(len(calls)).shuffle(calls)
    logs, placed = [], {}
    for file in range(files):
        part = calls[file::files]
        logs.append(written(folder / f"calls-{file}.jsonl", [row for _, _, row in part]))
        placed.update({(str(logs[-1]), at): (number, turn) for at, (number, turn, _) in enumerate(part)})
    return logs, placed


def whole(rows: list[Wire], folder: Path, *options: object) -> dict[int, Counter[tuple[object, ...]]]:
    """What is found in the conversations as the log of sessions that they were recorded in."""
    log = written(folder / "sessions.jsonl", rows)
    return found_in(report_of(log, *options), {(str(log), at): (at, 0) for at in range(len(rows))}, exactly=False)


def broken(findings: Mapping[int, Counter[tuple[object, ...]]]) -> dict[str, int]:
    """How many findings say that a prompt does not start with what was before, by code."""
    codes = Counter(str(finding[1]) for findings in findings.values() for finding in findings.elements())
    return {code: count for code, count in codes.items() if code.startswith("SEQ")}


def check_joined(
    case: str, folder: Path, *more: object, key: str | None, files: int, change: Change = dict
) -> tuple[Wire, dict[str, int]]:
    """The summary of a report on the calls, which says what one on their sessions says; and the breaks in it."""
    name, options, _ = CASES[case]
    rows = sessions(name, change)
    logs, placed = logged(rows, folder, key, files)
    report = report_of(*logs, *options, *more)
    findings = found_in(report, placed)
    assert findings == whole(rows, folder, *options)
    assert report["summary"]["rollouts"] == len(rows)
    assert report["summary"]["turns"] == sum(len(row["records"]) for row in rows)
    return report["summary"], broken(findings)


@pytest.mark.parametrize("case", CASES)
def test_calls_of_a_session_break_where_the_session_breaks(case: str, tmp_path: Path) -> None:
    _, breaks = check_joined(case, tmp_path, "--session", "session_id", key="session_id", files=2)
    assert breaks == CASES[case][2]


# Without being told


@pytest.mark.parametrize(("case", "key"), crossed(list(CASES), [*NAMES, None]))
def test_calls_of_a_server_are_joined_over_files(case: str, key: str | None, tmp_path: Path) -> None:
    assert check_joined(case, tmp_path, key=key, files=3)[1] == CASES[case][2]


@pytest.mark.parametrize("key", ["session_id", None])
@pytest.mark.parametrize("separators", [(",", ":"), (" , ", " : ")], ids=["compact", "wide"])
@pytest.mark.parametrize("ids", [True, False], ids=["ids", "no-ids"])
@pytest.mark.parametrize("case", ["reasoning-kept", "reasoning-dropped"])
def test_an_answer_is_known_whatever_the_spaces_in_its_tool_calls(
    case: str, ids: bool, separators: tuple[str, str], key: str | None, tmp_path: Path
) -> None:
    change = partial(spaced, separators=separators)
    changed = change if ids else lambda record: without_ids(change(record))
    summary, _ = check_joined(case, tmp_path, key=key, files=2, change=changed)
    assert (summary["rollouts"], summary["turns"]) == (1, 4)


@pytest.mark.parametrize("key", ["session_id", None])
@pytest.mark.parametrize(
    ("case", "change"), [("messages", without_ids), ("ids", as_text)], ids=["messages", "text"]
)
def test_calls_without_ids_are_joined_by_their_messages_or_their_text(
    case: str, change: Change, key: str | None, tmp_path: Path
) -> None:
    summary, _ = check_joined(case, tmp_path, key=key, files=3, change=change)
    assert (summary["rollouts"], summary["turns"]) == (6, 36)


@pytest.mark.parametrize("case", CASES)
def test_a_name_that_each_call_has_for_itself_joins_nothing_and_parts_nothing(case: str, tmp_path: Path) -> None:
    """Gateways number calls in `trace_id`; then only their history shows what belongs together."""
    name, options, _ = CASES[case]
    rows = sessions(name)
    for row in rows:
        row["records"] = [
            {"trace_id": f"{row['session_id']}-{at}", **record} for at, record in enumerate(row["records"])
        ]
    logs, placed = logged(rows, tmp_path, None, files=2)
    report = report_of(*logs, *options)
    assert found_in(report, placed) == whole(sessions(name), tmp_path, *options)
    assert report["summary"]["rollouts"] == len(rows)
