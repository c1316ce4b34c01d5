"""Recorded conversations, each call in a row of its own: joined, they show what is found in them whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

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
    recorded,
    report_of,
    spread,
    whole,
)
from tests.tiers import DEEP, some

pytestmark = pytest.mark.skipif(
    not all((SHARED / place / model).is_dir() for place in ("rollouts", "tokenizers") for model in MODELS),
    reason="no recorded rollouts with their tokenizers are beside the checkout",
)

TASKS = 10
"""How many tasks of a model `make test` tries; each was done twice, from the same first prompt."""
CASES = [
    pytest.param(form, model, id=f"{form.name}-{model}")
    for number, form in enumerate(FORMS)
    for model in (MODELS if DEEP else MODELS[number % len(MODELS) :][:1])
]


@cache
def tried(model: str) -> tuple[Wire, ...]:
    """The conversations that are tried."""
    tasks = some(sorted({task_of(one) for one in recorded(model)}), TASKS)
    return tuple(one for one in recorded(model) if task_of(one) in tasks)


def task_of(conversation: Wire) -> str:
    return str(conversation["id"]).rpartition("-")[0]


@cache
def expected(model: str, lacks: tuple[str, ...]) -> Found:
    """What is found in the conversations as one log, whose rows have all of their calls."""
    with TemporaryDirectory() as folder:
        log = whole(tried(model), lacks, Path(folder) / "whole.jsonl")
        report = report_of(log, *told(model))
    assert report["summary"]["rollouts"] == len(tried(model))
    return found_in(report, {(str(log), row): (row, 0) for row in range(len(tried(model)))}, exactly=False)


def told(model: str) -> tuple[object, ...]:
    return "-t", SHARED / "tokenizers" / model


def rows_of(form: Form, calls: Sequence[Call], *, key: str | None) -> list[tuple[Call, Wire]]:
    """The calls as rows, with the conversation of each in a column of this name."""
    return [(call, {**({key: call.name} if key else {}), **form.row(call)}) for call in calls]


def unread(form: Form, model: str) -> set[int]:
    """Conversations whose messages this form does not show: in a gateway's trace, calls of unknown tools."""
    if form.name != "gateway":
        return set()
    return {number for number, one in enumerate(tried(model)) if calls_other_tools(one)}


def calls_other_tools(conversation: Wire) -> bool:
    named = {
        call["function"]["name"]
        for message in conversation["messages"]
        for call in message.get("tool_calls") or ()
    }
    offered = {tool["function"]["name"] for tool in conversation["tools"] or ()}
    return not named <= offered


def but(found: Found, left_out: set[int]) -> Found:
    return {number: findings for number, findings in found.items() if number not in left_out}


# By a key


@pytest.mark.parametrize(("form", "model"), CASES)
def test_calls_joined_by_a_stated_key_say_what_whole_conversations_say(
    form: Form, model: str, tmp_path: Path
) -> None:
    calls = calls_of(tried(model))
    key = form.key or "session_id"
    logs, placed = spread(rows_of(form, calls, key=key), tmp_path, 1, files=1)
    report = report_of(*logs, *told(model), "--session", key)
    left_out = unread(form, model)
    assert but(found_in(report, placed, exactly=False), left_out) == but(expected(model, form.lacks), left_out)
    assert report["summary"]["rollouts"] == len(tried(model))
    assert report["summary"]["turns"] == len(calls)


def test_five_recorded_conversations_call_tools_that_nobody_offered() -> None:
    assert [sum(map(calls_other_tools, recorded(model))) for model in MODELS] == [0, 0, 5]
