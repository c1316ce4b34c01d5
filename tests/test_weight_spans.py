"""Versions of the weights that come as spans of tokens: from servers into logs, and from logs into other logs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.command import run, written
from tests.scripted import Scripted, ids_of
from tests.serving import client, logged, make_gateway, served
from tests.toy import TOKENIZERS
from tito_audit import managed_server
from tito_audit.formats.slime import FORMAT
from tito_audit.provider import GenerationChunk, GenerationResult, logged_spans
from tito_audit.record.move_row import move_row
from tito_audit.record.repaired import RepairedRollout
from tito_audit.record.rollout import Place

TOY = TOKENIZERS / "toy_bpe"
CHANGED = (("3", 0, 2), ("4", 2, 9))
AS_LOGGED = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
ASK: Any = {"role": "user", "content": "What is 2 + 2?"}


class Updated(Scripted):
    """Its weights change inside each answer, and it says where."""

    def _next(self, input_ids: Any) -> GenerationResult:
        answer = super()._next(input_ids)
        return GenerationResult(
            answer.input_ids, answer.output_ids, answer.logprobs, None, answer.finish_reason, None, "4", CHANGED
        )

    async def stream(self, input_ids: Any, sampling: Any) -> Any:
        for index, answer in enumerate(await self.generate_n(input_ids, sampling)):
            for at, (token, logprob) in enumerate(zip(answer.output_ids, answer.logprobs, strict=True)):
                last = at + 1 == len(answer.output_ids)
                reason = answer.finish_reason if last else None
                spans = CHANGED if last else CHANGED[:1]
                yield GenerationChunk(index, (token,), (logprob,), None, reason, None, "4", spans)


def findings(path: Path, *options: str) -> list[Any]:
    _, out, _ = run("scan", str(path), "--select", "REC008", "--report", "json", *options)
    return [finding for finding in orjson.loads(out)["findings"] if finding["code"] == "REC008"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_gateway_logs_where_the_weights_changed_and_a_scan_reads_it(tmp_path: Path, stream: bool) -> None:
    log = tmp_path / "calls.jsonl"
    gateway, _ = make_gateway(log, [])
    gateway.provider = Updated(["4!"])
    with served(gateway) as address:
        answer = client(address).chat.completions.create(model="org/toy", messages=[ASK], stream=stream)
        assert list(answer) if isinstance(answer, Iterator) or stream else answer
    (line,) = logged(log)
    assert (line["weight_version"], len(line["completion_token_ids"])) == ("4", 3)
    assert line["weight_versions"] == AS_LOGGED
    (finding,) = findings(log)
    assert (finding["cause"], finding["start"], finding["end"]) == ("within a call", 2, 3)


@pytest.mark.parametrize("spans", [(), (("7", 0, 3),), (("7", 0, 90),)])
def test_one_version_for_a_whole_answer_needs_no_spans(spans: Any) -> None:
    assert logged_spans(spans, 3 if spans else 0) == []


def test_spans_behind_the_answer_are_cut() -> None:
    assert logged_spans((("3", 0, 2), ("4", 2, 9), ("5", 9, 12)), 3) == AS_LOGGED
    assert logged_spans((("3", 1, 3),), 3) == [{"version": "3", "start": 1, "end": 3}]


def test_a_managed_server_states_the_versions_of_all_tokens_of_a_sequence(tmp_path: Path) -> None:
    pytest.importorskip("openai")

    async def work() -> list[dict[str, Any]]:
        async with managed_server(Updated(["4!", "5!"]), tokenizer=TOY) as managed:
            answer = await managed.chat_completion(messages=[ASK])
            history = [ASK, answer.choices[0].message.model_dump(exclude_none=True), ASK]
            await managed.chat_completion(messages=history)
            return [node.model_dump() for node in managed.get_state()["nodes"]]

    (node,) = asyncio.run(work())
    ids, spans = node["tokens"], node["metadata"]["weight_versions"]
    sampled = [[ids[at] for at in range(span["start"], span["end"])] for span in spans]
    first, second = ids_of("4!<|im_end|>"), ids_of("5!<|im_end|>")
    assert [span["version"] for span in spans] == ["3", "4", "3", "4"]
    assert sampled == [first[:2], first[2:], second[:2], second[2:]]
    (finding,) = findings(written(tmp_path / "nodes.jsonl", [{"nodes": [node]}]))
    assert finding["cause"] == "within a call"


def slime(**more: Any) -> dict[str, Any]:
    """A sample whose answer `a n s` was encoded as one token, next to its call."""
    return {
        "tokens": [1, 2, 3, 4, 5, 6],
        "response_length": 4,
        "loss_mask": [1, 1, 0, 1],
        "status": "completed",
    } | {"rollout_log_probs": [-0.1, -0.2, 0.0, -0.3], **more}


FORMS: list[Any] = [
    [[{"version": "3", "abs_start": 2, "abs_end": 3}, {"version": "4", "abs_start": 3, "abs_end": 4}],
     [{"version": "5", "abs_start": 5, "abs_end": 6}]],
    [{"spans": [{"version": "3", "abs_start": 2, "abs_end": 3}, {"version": "4", "abs_start": 3, "abs_end": 4}]},
     {"spans": [{"version": "5", "abs_start": 5, "abs_end": 6}]}],
    [["3", 0, 1], ["4", 1, 2], ["5", 3, 4]],
    [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2},
     {"version": "5", "start": 3, "end": 4}],
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_spans_of_a_row_become_the_versions_of_its_tokens(form: Any) -> None:
    (rollout,) = FORMAT.read(slime(weight_versions=form), Place("log", 0))
    assert rollout.training_row is not None
    (column,) = [column for column in rollout.training_row.columns if column.name == "weight_versions"]
    assert column.values.tolist() == [None, None, "3", "4", None, "5"]


@pytest.mark.parametrize("form", FORMS)
def test_spans_move_with_the_tokens_of_a_repaired_row(form: Any) -> None:

    from tito_audit.formats.slime import FORMAT
    from tito_audit.record.rollout import Place

    row = slime(weight_versions=form)
    (rollout,) = FORMAT.read(row, Place("log", 0))
    old = rollout.training_row
    assert old is not None
    # A token is put in front of the response, one between its turns; the last sampled token leaves.
    source = np.array([0, 1, -1, 2, 3, 4, -1])
    ids = np.array([1, 2, 9, 3, 4, 5, 9], np.int32)
    mask = np.array([0, 0, 0, 1, 1, 0, 0], bool)
    moved = move_row(old, ids, source, loss_mask=mask, logprobs=np.where(mask, -0.5, np.nan)).row
    (new,) = FORMAT.update(row, [RepairedRollout(replace(rollout, training_row=moved), ())])
    (again,) = FORMAT.read(new, Place("log", 0))
    assert again.training_row is not None
    (column,) = [column for column in again.training_row.columns if column.name == "weight_versions"]
    assert column.values.tolist() == [None, None, None, "3", "4", None, None]
    assert type(new["weight_versions"][0]) is type(form[0])


def test_versions_by_token_survive_the_way_from_calls_to_rows_and_back(tmp_path: Path) -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    first = {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "logprobs": [-0.1, -0.2, -0.3]}
    second = {"prompt_ids": [1, 2, 3, 4, 5, 6], "completion_ids": [7, 8], "logprobs": [-0.1, -0.2]}
    calls = [{**first, "weight_versions": spans}, {**second, "weight_versions": ["5"]}]
    log, rows, back = (
        written(tmp_path / "calls.jsonl", [{"calls": calls}]),
        tmp_path / "rows.jsonl",
        tmp_path / "b.jsonl",
    )
    code, out, err = run("convert", str(log), "--to", "slime", "-o", str(rows))
    assert code == 0, out + err
    row = orjson.loads(rows.read_bytes())
    assert row["weight_versions"] == [
        [{"version": "3", "abs_start": 2, "abs_end": 3}, {"version": "4", "abs_start": 3, "abs_end": 5}],
        [{"version": "5", "abs_start": 6, "abs_end": 8}],
    ]
    code, out, err = run("convert", str(rows), "--to", "calls", "-o", str(back))
    assert code == 0, out + err
    assert [call["weight_versions"] for call in orjson.loads(back.read_bytes())["calls"]] == [spans, ["5"]]
    message = "sampled with 3 weight versions: 3 (1 token), 4 (2 tokens) and 5 (2 tokens)"
    assert [findings(each)[0]["message"].split(", which")[0] for each in (log, rows, back)] == [message] * 3
