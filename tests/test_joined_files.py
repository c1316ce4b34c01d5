"""Calls of one conversation in several files: read together, told together, written back where each was."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from tests.command import written
from tests.test_sessions import TOY, Wire, apart, call, chat, contents, generic, stored
from tests.test_sessions import whole as whole
from tests.tiers import DEEP, crossed, one_in, some
from tito_audit import RepairSettings, Settings, StorageError, read_rollouts, repair_rollouts, scan_rollouts
from tito_audit.cli import app
from tito_audit.storage.chunks import RandomAccess
from tito_audit.storage.row import parse_row

HOWS = (["plain"] * 3, ["gz"] * 3, ["zst", "plain", "gz"], ["parquet", "parquet", "plain"])


def named(value: Any) -> str:
    """What a case is called."""
    return "-".join(value) if isinstance(value, list) else getattr(value, "__name__", str(value))


def sharded(lines: Sequence[Wire], folder: Path, hows: Sequence[str], seed: int = 0) -> list[Path]:
    """The lines over several files, in any order."""
    parts: list[list[Wire]] = [[] for _ in hows]
    chosen = random.Random(seed)
    for line in lines:
        chosen.choice(parts).append(line)
    files = []
    for number, (part, how) in enumerate(zip(parts, hows, strict=True)):
        path = folder / f"part-{number}.jsonl"
        if how == "zst":
            data = written(path, part).read_bytes()
            path = path.with_suffix(".jsonl.zst")
            path.write_bytes(pa.compress(data, codec="zstd", asbytes=True))
            (folder / f"part-{number}.jsonl").unlink()
        else:
            path = stored(part, path, how)
            if how != "plain":
                (folder / f"part-{number}.jsonl").unlink(missing_ok=True)
        files.append(path)
    return files


def found_in(logs: Sequence[Path], **settings: Any) -> tuple[dict[str, list[tuple[object, ...]]], list[str]]:
    """By session: what is found in its conversation, each with the number of the row that it is in; notices."""
    chunk = settings.pop("chunk", None)
    scan = scan_rollouts([str(log) for log in logs], Settings(**{"tokenizer": TOY, **settings}))
    scan.chunk_bytes = chunk
    rows = {str(log): contents_of(log) for log in logs}
    results: dict[str, list[tuple[object, ...]]] = {}
    for result in scan:
        if result.of_log:
            continue
        name = rows[result.place.file][result.place.row]["session_id"]
        assert name not in results, "each conversation is one rollout"
        numbers = (rows[f.place.file][f.place.row]["number"] for f in result.findings)
        each = zip(result.findings, numbers, strict=True)
        results[name] = sorted((f.code, f.hit.cause, f.hit.turn or 0, f.hit.start, f.hit.end, n) for f, n in each)
    return results, scan.summary.notices


def contents_of(log: Path) -> list[Wire]:
    if log.suffix == ".zst":
        with pa.input_stream(str(log), compression="zstd") as stream:
            return [json.loads(line) for line in stream.read().splitlines()]
    return contents(log)


@pytest.mark.parametrize(("form", "hows"), crossed([generic, chat], some(HOWS, 2)), ids=named)
def test_a_conversation_in_several_files_is_found_as_in_one(
    form: Any, hows: Sequence[str], whole: list[Wire], tmp_path: Path
) -> None:
    lines = [{"number": number, **line} for number, line in enumerate(apart(whole, form, 3))]
    expected, _ = found_in([written(tmp_path / "one.jsonl", lines)], session="session_id")
    assert any(code == "SEQ301" for findings in expected.values() for code, *_ in findings)
    logs = sharded(lines, tmp_path, hows)
    findings, notices = found_in(logs, session="session_id")
    assert findings == expected
    assert f"3 logs: {len(lines)} rows were read as the calls of {len(whole)} conversations, by `session_id`." in (
        notices
    )
    assert found_in(logs, session="session_id", jobs=2, chunk=3_000)[0] == expected


def test_a_finding_names_the_row_of_its_call(whole: list[Wire], tmp_path: Path) -> None:
    lines = apart(whole, generic, 7)
    logs = sharded(lines, tmp_path, ["plain", "gz"])
    command = ["scan", *map(str, logs), "-t", TOY, "--session", "session_id", "-f", "jsonl"]
    report = CliRunner().invoke(app, command)
    rows = {str(log): contents(log) for log in logs}
    findings = [json.loads(line) for line in report.stdout.splitlines()]
    findings = [
        finding for finding in findings if finding.get("code") == "SEQ302" and finding.get("turn") is not None
    ]
    assert findings
    by_id = {row["session_id"]: row for row in whole}
    for finding in findings:
        row = rows[finding["file"]][finding["row"]]
        whose = by_id[row["session_id"]]["calls"][finding["turn"]]
        assert row["completion_ids"] == whose["completion_ids"]


@pytest.mark.parametrize(
    ("jobs", "hows"), crossed([None, 2], [["plain", "plain"], ["gz", "plain", "parquet"]]), ids=named
)
def test_a_repair_writes_each_call_back_to_its_file(
    hows: Sequence[str], jobs: int | None, whole: list[Wire], tmp_path: Path
) -> None:
    lines = [{"number": number, **line} for number, line in enumerate(apart(whole, generic, 5))]
    single, out = written(tmp_path / "one.jsonl", lines), tmp_path / "one-out.jsonl"
    settings = Settings(tokenizer=TOY, session="session_id", jobs=jobs)
    how = RepairSettings(strategies=("splice",), unsafe=True)
    list(repair_rollouts(single, out, settings, how))
    expected = {row["number"]: row for row in contents(out)}
    folder = tmp_path / "shards"
    folder.mkdir()
    logs = sharded(lines, folder, hows)
    run = repair_rollouts([str(log) for log in logs], tmp_path / "out", settings, how)
    run.batch_bytes = 4_000 if jobs else None
    outcomes = list(run)
    assert any(outcome.repaired for outcome in outcomes)
    parts = [contents(tmp_path / "out" / log.name) for log in logs]
    for rows, log in zip(parts, logs, strict=True):
        assert [row["number"] for row in rows] == [row["number"] for row in contents(log)]
    ids = {row["number"]: (row["prompt_ids"], row["completion_ids"]) for rows in parts for row in rows}
    assert ids == {number: (row["prompt_ids"], row["completion_ids"]) for number, row in expected.items()}
    changed = [line["number"] for line in lines if ids[line["number"]][0] != line["prompt_ids"]]
    assert (
        len({next(k for k, rows in enumerate(parts) if any(r["number"] == n for r in rows)) for n in changed}) > 1
    )


def test_rows_of_later_files_that_nothing_changes_are_the_same_bytes(whole: list[Wire], tmp_path: Path) -> None:
    logs = sharded(apart(whole, chat, 1), tmp_path, ["plain", "plain", "gz"])
    settings = Settings(tokenizer=TOY, session="session_id", select=("REC001",))
    list(repair_rollouts([str(log) for log in logs], tmp_path / "out", settings))
    for log in logs:
        before, other = log.read_bytes(), (tmp_path / "out" / log.name).read_bytes()
        assert (gzip.decompress(before) if log.suffix == ".gz" else before) == (
            gzip.decompress(other) if log.suffix == ".gz" else other
        )


def test_one_row_of_a_file_is_joined_with_that_file_alone(tmp_path: Path) -> None:
    log = written(tmp_path / "a.jsonl", [call("s", [1], [2])])
    other = written(tmp_path / "b.jsonl", [call("s", [1, 2, 3], [4]), call("s", [1, 2, 3, 4, 5], [6])])
    both = list(read_rollouts([log, other], Settings(session="session_id")))
    assert [len(rollout.turns) for rollout in both] == [3]
    assert both[0].stated.calls_at == ((str(log), 0), (str(other), 0), (str(other), 1))
    results = [r for r in scan_rollouts([log, other], Settings(session="session_id", row=0)) if not r.of_log]
    assert [len(result.rollout.turns) for result in results if result.rollout] == [1, 2]


def test_with_a_limit_only_the_first_rows_are_looked_at(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", [call(k, [1, k], [2]) for k in range(4_500)])
    scan = scan_rollouts(log, Settings(limit=2))
    assert len([result for result in scan if not result.of_log]) == 2
    assert "Only the first 4,224 rows were read, because of --limit." in scan.summary.notices


@pytest.mark.parametrize(
    ("hows", "size", "jobs"),
    crossed(some(HOWS, 2), [1 if DEEP else 300, 5_000], [2, 2, 3, 3] if DEEP else [2, 3]),
    ids=named,
)
def test_the_first_pass_finds_the_same_in_any_number_of_processes(
    hows: Sequence[str], size: int, jobs: int, whole: list[Wire], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some_rows = list(one_in(2, whole))
    lines = [{"number": number, **line} for number, line in enumerate(apart(some_rows, chat, 9))]
    logs = sharded([{**line, "session_id": line["session_id"]} for line in lines], tmp_path, hows)
    expected = found_in(logs)
    by_key = found_in(logs, session="session_id")
    assert any(code == "SEQ301" for findings in by_key[0].values() for code, *_ in findings)
    monkeypatch.setattr("tito_audit.run.log_groups.is_small", lambda files: False)
    monkeypatch.setattr("tito_audit.join._call_rows.BATCH_BYTES", size)
    assert found_in(logs) == expected
    assert found_in(logs, jobs=jobs) == expected
    assert found_in(logs, jobs=jobs, session="session_id") == by_key


@pytest.mark.parametrize("size", [1, 60, 1 << 20])
def test_rows_keep_their_numbers_beside_blank_broken_and_cut_off_lines(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tito_audit.join._call_rows.BATCH_BYTES", size)
    first, second = (json.dumps(call("s", *ids)) for ids in (([1], [2]), ([1, 2, 3], [4])))
    text = "\n".join([first, "", "{broken", "  ", second, '{"session_id": "s"'])
    plain, packed = tmp_path / "log.jsonl", tmp_path / "packed.jsonl.gz"
    plain.write_bytes(b"\xef\xbb\xbf" + text.encode())
    packed.write_bytes(gzip.compress(text.encode()))
    pages = []
    for log in (plain, packed):
        results = [result for result in scan_rollouts(log, Settings(session="session_id")) if not result.of_log]
        shown = ([(finding.code, finding.hit.message) for finding in result.findings] for result in results)
        pages.append([(result.place.row, each) for result, each in zip(results, shown, strict=True)])
        assert [row for row, _ in pages[-1]] == [0, 2, 5]
        assert results[0].rollout is not None
        assert results[0].rollout.stated.calls_at == ((str(log), 0), (str(log), 4))
    assert pages[0] == pages[1]
    assert "the file ends in the middle of a row" in pages[0][2][1][0][1]


def test_a_log_that_goes_away_while_it_is_read_is_refused_in_a_line(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", [call("s", [1], [2])])
    (batch,) = RandomAccess(log, max_row_bytes=1 << 20).batches(1 << 20)
    log.unlink()
    with pytest.raises(StorageError, match="cannot be read"):
        list(batch.rows(parse_row))
