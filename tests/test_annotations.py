"""What prime-rl's trainer wrote about traces, in `annotations/` beside `stream/`, is audited with their tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from tests.command import run, written

DRAW = random.Random(5)
PROMPT, FIRST, SECOND, OTHER = [1, 2, 3], list(range(10, 30)), list(range(40, 60)), list(range(70, 90))
Row = dict[str, Any]


def node(ids: list[int], parent: int | None, sampled: bool = True) -> Row:
    message = {"role": "assistant" if sampled else "user", "content": "a"}
    logprobs = [-round(DRAW.random() * 2, 4) for _ in ids] if sampled else []
    mask = [sampled] * len(ids)
    return {"message": message, "parent": parent, "token_ids": ids, "mask": mask, "logprobs": logprobs}


def episode(trace: str) -> Row:
    """One trace with two branches: both answers of the first, and another one to the same prompt."""
    nodes = [node(PROMPT, None, False), node(FIRST, 0), node([4, 5], 1, False), node(SECOND, 2), node(OTHER, 0)]
    return {"env": {"id": "e"}, "task": {}, "traces": [{"id": trace, "nodes": nodes, "calls": []}]}


def streams(row: Row, far: float = 0.0, **more: Any) -> list[Row]:
    """The trainer's logprobs of both branches; the first answer is `far` off."""
    _, first, _, second, other = (each["logprobs"] for each in row["traces"][0]["nodes"])
    whole = [*[None] * 3, *(value - far for value in first), None, None, *second]
    return [{"index": 0, "trainer_logprobs": whole}, {"index": 1, "trainer_logprobs": [None] * 3 + other, **more}]


def update(row: Row, branches: list[Row]) -> Row:
    return {"version": 1, "trace_id": row["traces"][0]["id"], "info": {}, "branches": branches}


def traces(folder: Path, rows: list[Row], updates: list[Row]) -> Path:
    for name in ("stream", "annotations/trainer"):
        (folder / name).mkdir(parents=True)
    written(folder / "annotations" / "trainer" / "00000.jsonl", updates)
    index = [{"trace_id": each["trace_id"], "chunk": 0, "offset": 0, "info": {}} for each in updates]
    written(folder / "annotations" / "trainer.index.jsonl", index)
    return written(folder / "stream" / "00000.jsonl", rows)


def findings(log: Path, *options: str) -> list[tuple[str, int, int | None]]:
    report = orjson.loads(run("scan", log, "--select", "LPR509,REC015", "--report", "json", *options)[1])
    return [(each["code"], each["row"], each["turn"]) for each in report["findings"]]


def test_a_trainers_streams_are_compared_with_the_tokens_of_their_branches(tmp_path: Path) -> None:
    rows = [episode(f"t{number}") for number in range(4)]
    nothing = {"advantages": [None] * 3 + [0.0] * 20}
    updates = [update(rows[0], streams(rows[0])), update(rows[3], streams(rows[3], **nothing))]
    log = traces(tmp_path, rows, [*updates, update(rows[2], streams(rows[2], far=2.0))])
    assert findings(log) == [("LPR509", 2, 0), ("REC015", 3, 2)]
    assert findings(log, "--jobs", "2") == findings(log)
    assert findings(log, "--no-join") == []
    assert "annotations: 3 annotations of 3 traces, joined on the trace's id" in " ".join(
        run("scan", log)[1].split()
    )


def test_the_newest_stream_wins_and_one_cut_short_leaves_the_rest(tmp_path: Path) -> None:
    row = episode("t")
    short = [{"index": 0, "trainer_logprobs": streams(row, far=2.0)[0]["trainer_logprobs"][:22]}]
    updates = [update(row, streams(row, far=2.0)), update(row, streams(row)), update(row, short)]
    assert findings(traces(tmp_path, [row], updates)) == []
    assert findings(traces(tmp_path / "far", [row], updates[:1])) == [("LPR509", 0, 0)]


def test_a_sealed_chunk_is_read_and_odd_updates_are_passed_over(tmp_path: Path) -> None:
    row = episode("t")
    odd = [{"index": 7, "advantages": [1.0]}, {"index": 0, "trainer_logprobs": 3}, "branch", {}]
    log = traces(tmp_path, [row], [update(row, streams(row, far=2.0)), {**update(row, []), "branches": odd}])
    chunk = tmp_path / "annotations" / "trainer" / "00000.jsonl"
    sealed = pa.compress(chunk.read_bytes() + b'{"trace_id": "t", "bran', codec="zstd", asbytes=True)
    chunk.with_suffix(".jsonl.zst").write_bytes(sealed)
    chunk.unlink()
    assert findings(log) == [("LPR509", 0, 0)]


@pytest.mark.parametrize("command", ["repair", "convert"])
def test_what_is_written_holds_nothing_of_other_files(command: str, tmp_path: Path) -> None:
    rows = [episode("t")]
    options = ("--unsafe",) if command == "repair" else ("--to", "rows", "--lossy")
    results = []
    for name, updates in (("with", [update(rows[0], streams(rows[0]))]), ("without", [])):
        out = tmp_path / f"{name}.jsonl"
        run(command, traces(tmp_path / name, rows, updates), "-o", out, *options)
        results.append(out.read_bytes().replace(name.encode(), b""))
    assert results[0] == results[1]
