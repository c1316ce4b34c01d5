"""Logs of text are named, with what to log instead; a log that holds tokens never is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import run
from tests.format_cases import fixture_rows
from tests.forms import as_table
from tests.tables import table
from tests.world import ROOT
from tito_audit.errors import RecordError
from tito_audit.formats import all_formats, pick_format
from tito_audit.formats._text_logs import text_log
from tito_audit.record.rollout import Place

CASES = [json.loads(line) for line in (ROOT / "fixtures" / "text_logs.jsonl").read_text().splitlines()]
READ_AS_CALLS = ("litellm", "inspect-sample")
"""Rows that hold an answer as a server gives it, and are read as one."""


def kind_of(row: dict[str, Any]) -> str:
    """What a row is read as, or what refuses it."""
    try:
        return pick_format(row).name
    except RecordError as error:
        return str(error)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_a_log_of_text_is_named_with_what_to_log_instead(case: dict[str, Any]) -> None:
    for row in (case["row"], as_table(case["row"])):
        form = pick_format(row)
        assert form.name == ("openai_chat" if case["case"] in READ_AS_CALLS else "text_only")
        rollouts = form.read(row, Place("log.jsonl", 0))
        assert rollouts
        for rollout in rollouts:
            assert rollout.stated.notice.startswith(f"No token ids: this is {case['is']}")
            assert "tito-audit serve" in rollout.stated.notice or "save" in rollout.stated.notice
            assert not rollout.turns or all(turn.completion_ids is None for turn in rollout.turns)
            assert rollout.training_row is None


@pytest.mark.parametrize("column", ["token_ids", "completion_ids", "logprobs", "prompt_token_ids"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_a_log_that_holds_tokens_is_not_named(case: dict[str, Any], column: str) -> None:
    row = case["row"]
    values = [-0.5, -0.25] if column == "logprobs" else [5, 6]
    assert text_log({**row, column: values}) is None
    inside = next((name for name, value in row.items() if isinstance(value, dict)), None)
    if inside is not None:
        assert text_log({**row, inside: {**row[inside], column: values}}) is None


@pytest.mark.parametrize("form", all_formats(), ids=lambda form: form.name)
def test_no_row_of_a_format_with_tokens_is_named(form: Any) -> None:
    if form.name == "text_only":
        pytest.skip("its rows are texts")
    rows = [dict(row) for row in fixture_rows(form.name)]
    assert rows
    assert [text_log(row) for row in rows] == [None] * len(rows)


def test_ids_among_the_attributes_of_a_trace_are_seen() -> None:
    (case,) = (case for case in CASES if case["case"] == "otlp")
    row = json.loads(json.dumps(case["row"]))
    spans = row["resourceSpans"][0]["scopeSpans"][0]["spans"]
    spans[0]["attributes"].append(
        {"key": "llm.hosted_vllm.choices.0.token_ids", "value": {"stringValue": "[5, 6]"}}
    )
    assert text_log(row) is None


@pytest.mark.parametrize(*table(__file__, "a_log_that_only_resembles_them_is_not_named"))
def test_a_log_that_only_resembles_them_is_not_named(row: dict[str, Any], read_as: str) -> None:
    assert kind_of(row).startswith(read_as)
    assert text_log(row) is None


def test_scan_and_inspect_say_the_same(tmp_path: Path) -> None:
    log = tmp_path / "rollout.jsonl"
    log.write_text("".join(json.dumps(case["row"]) + "\n" for case in CASES if case["case"].startswith("codex")))
    scanned, inspected = run("scan", str(log)), run("inspect", str(log))
    assert scanned[0] == inspected[0] == 0
    for page in (scanned[1], inspected[1]):
        assert "this is a Codex transcript. The services behind it return no ids" in " ".join(page.split())
    assert "nothing audited" in scanned[1]
