"""Recorded conversations, each call in a row of its own: joined, they show what is found in them whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from tests.apart import (
    FORMS,
    MODELS,
    SHARED,
    Call,
    Form,
    Found,
    Wire,
    calls_of,
    found_in,
    generic,
    places_of,
    recorded,
    report_of,
    spread,
    whole,
)
from tests.command import written
from tests.tiers import DEEP, crossed, examples, some

pytestmark = pytest.mark.skipif(
    not all((SHARED / place / model).is_dir() for place in ("rollouts", "tokenizers") for model in MODELS),
    reason="no recorded rollouts with their tokenizers are beside the checkout",
)

TASKS = 6
"""How many tasks of a model `make test` tries; each was done twice, from the same first prompt."""
CASES = [
    (form, model)
    for number, form in enumerate(FORMS)
    for model in (MODELS if DEEP else MODELS[number % len(MODELS) :][:1])
]
UNNAMED = [case for case in CASES if not case[0].key]


def words(value: object) -> str:
    """A case as pytest names it."""
    return value.name if isinstance(value, Form) else str(value)


@cache
def tried(model: str) -> tuple[Wire, ...]:
    """The conversations that are tried."""
    tasks = some(sorted({task_of(conversation) for conversation in recorded(model)}), TASKS)
    return tuple(conversation for conversation in recorded(model) if task_of(conversation) in tasks)


def task_of(conversation: Wire) -> str:
    return str(conversation["id"]).rpartition("-")[0]


@cache
def expected(model: str, lacks: tuple[str, ...]) -> Found:
    """What is found in the conversations as one log, whose rows have all of their calls."""
    with TemporaryDirectory() as folder:
        log = whole(tried(model), lacks, Path(folder) / "whole.jsonl")
        report = report_of(log, *tokenizer_options(model))
    assert report["summary"]["rollouts"] == len(tried(model))
    return found_in(report, {(str(log), row): (row, 0) for row in range(len(tried(model)))}, exactly=False)


def tokenizer_options(model: str) -> tuple[object, ...]:
    return "-t", SHARED / "tokenizers" / model


def rows_of(form: Form, calls: Sequence[Call], *, key: str | None) -> list[tuple[Call, Wire]]:
    """The calls as rows, with the conversation of each in a column of this name."""
    return [(call, {**({key: call.name} if key else {}), **form.row(call)}) for call in calls]


def unread(form: Form, model: str) -> set[int]:
    """Conversations whose messages this form does not show: in a gateway's trace, calls of unknown tools."""
    if form.name != "gateway":
        return set()
    return {number for number, conversation in enumerate(tried(model)) if calls_other_tools(conversation)}


def calls_other_tools(conversation: Wire) -> bool:
    named = {
        call["function"]["name"]
        for message in conversation["messages"]
        for call in message.get("tool_calls") or ()
    }
    offered = {tool["function"]["name"] for tool in conversation["tools"] or ()}
    return not named <= offered


def but(findings: Found, left_out: set[int]) -> Found:
    return {number: findings for number, findings in findings.items() if number not in left_out}


def check_joined(
    form: Form, model: str, folder: Path, *more: object, key: str | None, files: int = 3, unsure: bool = False
) -> None:
    """Calls as rows over files say what whole conversations say, but for those that cannot be told apart."""
    calls = calls_of(tried(model))
    logs, placed = spread(rows_of(form, calls, key=key), folder, files, files=files)
    report = report_of(*logs, *tokenizer_options(model), *more)
    alike = alike_in_messages if form.has_messages else alike_in_ids
    ambiguous = alike(calls) if unsure else set()
    left_out = unread(form, model) | ambiguous
    assert found_in(report, placed, left_out) == but(expected(model, form.lacks), left_out)
    assert report["summary"]["turns"] == len(calls)
    assert abs(report["summary"]["rollouts"] - len(tried(model))) <= len(ambiguous)


@pytest.mark.parametrize(
    ("form", "model", "files"), [(*case, files) for case, files in crossed(CASES, [1, 3])], ids=words
)
def test_calls_joined_by_a_stated_key_say_what_whole_conversations_say(
    form: Form, model: str, files: int, tmp_path: Path
) -> None:
    key = form.key or "session_id"
    check_joined(form, model, tmp_path, "--session", key, key=key, files=files)


def test_five_recorded_conversations_call_tools_that_nobody_offered() -> None:
    assert [sum(map(calls_other_tools, recorded(model))) for model in MODELS] == [0, 0, 5]


# Without being told, over three files in any order


@pytest.mark.parametrize(("form", "model"), CASES, ids=words)
def test_calls_that_name_their_conversation_are_joined_over_files(form: Form, model: str, tmp_path: Path) -> None:
    check_joined(form, model, tmp_path, key=form.key or "session_id")


@pytest.mark.parametrize(("form", "model"), UNNAMED, ids=words)
def test_calls_that_name_nothing_are_joined_over_files_by_their_history(
    form: Form, model: str, tmp_path: Path
) -> None:
    check_joined(form, model, tmp_path, key=None, unsure=True)


NAMES: dict[str, Callable[[Call, Wire], str]] = {
    "task": lambda call, conversation: task_of(conversation),
    "run": lambda call, conversation: "run-0",
    "category": lambda call, conversation: str(conversation["category"]),
    "call": lambda call, conversation: f"{call.conversation}-{call.turn}",
}
"""What a column may name instead of a conversation."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", MODELS if DEEP else MODELS[:1])
def test_a_name_of_more_or_less_than_a_conversation_joins_and_parts_nothing(
    model: str, name: str, tmp_path: Path
) -> None:
    calls = calls_of(tried(model))
    rows = [
        (call, {"session_id": NAMES[name](call, tried(model)[call.conversation]), **generic(call)})
        for call in calls
    ]
    logs, placed = spread(rows, tmp_path, 6)
    report, ambiguous = report_of(*logs, *tokenizer_options(model)), alike_in_messages(calls)
    assert found_in(report, placed, ambiguous) == but(expected(model, ()), ambiguous)


@pytest.mark.parametrize("seed", range(examples(1, 8)))
def test_calls_that_are_only_ids_are_joined_in_any_order(seed: int, tmp_path: Path) -> None:
    """Nothing says which of them were cut off; few of this model's answers end by themselves."""
    model, form = MODELS[1], FORMS[-2]
    conversations = recorded(model) if DEEP else tried(model)
    calls = calls_of(conversations)
    logs, _ = spread(rows_of(form, calls, key=None), tmp_path, 3 + seed)
    summary = report_of(*logs, *tokenizer_options(model), "--select", "SEQ")["summary"]
    assert (summary["rollouts"], summary["turns"]) == (len(conversations), len(calls))


@pytest.mark.parametrize(
    ("form", "kind", "key"),
    crossed([FORMS[0], FORMS[-2]], ["jsonl", "jsonl.gz", "parquet"], [None, "session_id"]),
    ids=words,
)
def test_calls_are_joined_alike_from_any_files_by_any_number_of_processes(
    form: Form, kind: str, key: str | None, tmp_path: Path
) -> None:
    model = MODELS[0]
    calls = calls_of(tried(model))
    assert not alike_in_ids(calls)
    logs, placed = spread(rows_of(form, calls, key=key), tmp_path, 4, kind=kind)
    alone = report_of(*logs, *tokenizer_options(model), "--jobs", "1")
    assert found_in(alone, placed) == expected(model, form.lacks)
    two = report_of(*logs, *tokenizer_options(model), "--jobs", "2")
    assert two["findings"] == alone["findings"]
    assert two["summary"]["notices"] == alone["summary"]["notices"]


def test_calls_in_the_order_of_their_files_backwards_are_joined(tmp_path: Path) -> None:
    """A file for each turn of the conversations, the last one first."""
    model = MODELS[2]
    calls = calls_of(tried(model))
    turns = sorted({call.turn for call in calls}, reverse=True)
    parts = [[call for call in calls if call.turn == turn] for turn in turns]
    logs = [
        written(tmp_path / f"turn-{turn}.jsonl", (generic(call) for call in part))
        for turn, part in zip(turns, parts, strict=True)
    ]
    left_out = alike_in_messages(calls)
    findings = found_in(report_of(*logs, *tokenizer_options(model)), places_of(logs, parts), left_out)
    assert findings == but(expected(model, ()), left_out)


@pytest.mark.parametrize("key", ["session_id", None])
def test_without_joining_each_call_is_a_rollout(key: str | None, tmp_path: Path) -> None:
    model = MODELS[0]
    calls = calls_of(tried(model))
    logs, _ = spread(rows_of(FORMS[0], calls, key=key), tmp_path, 5)
    report = report_of(*logs, *tokenizer_options(model), "--no-join")
    assert report["summary"]["rollouts"] == report["summary"]["turns"] == len(calls)
    assert not [finding for finding in report["findings"] if finding["code"].startswith("SEQ")]
    assert report["summary"]["notices"] == []


# Which conversations cannot be told apart, and so are left out where rows name none


def alike_in_messages(calls: Sequence[Call]) -> set[int]:
    """Conversations that have a call with the messages, the tools and the answer of a call of another."""
    return shared(calls, lambda call: json.dumps([*call.sent, call.answer, call.tools]))


def alike_in_ids(calls: Sequence[Call]) -> set[int]:
    """Conversations with the ids of a call of another, or with a prompt no closer to the call before it.

    That is so where a template rewrites an answer from its first token, and the same prompt was answered twice.
    """
    numbers = shared(calls, lambda call: (tuple(call.prompt), tuple(call.sampled)))
    seen = [packed(call.seen) for call in calls]
    for at, call in enumerate(calls):
        if call.turn:
            own = packed(call.prompt[: common(call.prompt, calls[at - 1].seen)])
            others = (other for other, ids in zip(calls, seen, strict=True) if ids.startswith(own))
            if any(o.conversation != call.conversation and len(o.prompt) < len(call.prompt) for o in others):
                numbers.add(call.conversation)
    return numbers


def packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, np.int32).tobytes()


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many ids two sequences begin with together."""
    size = min(len(left), len(right))
    return next((at for at in range(size) if left[at] != right[at]), size)


def shared(calls: Sequence[Call], of: Callable[[Call], object]) -> set[int]:
    """Conversations with a call that has this in common with a call of another one."""
    sharing: dict[object, set[int]] = {}
    for call in calls:
        sharing.setdefault(of(call), set()).add(call.conversation)
    return {number for conversations in sharing.values() if len(conversations) > 1 for number in conversations}


def test_few_recorded_conversations_cannot_be_told_apart() -> None:
    """All the exceptions made above, of 72, 233 and 209 conversations."""
    calls = [calls_of(recorded(model)) for model in MODELS]
    assert [len(recorded(model)) for model in MODELS] == [72, 233, 209]
    assert [len(alike_in_messages(corpus)) for corpus in calls] == [0, 0, 12]
    assert [len(alike_in_ids(corpus)) for corpus in calls] == [0, 1, 28]
