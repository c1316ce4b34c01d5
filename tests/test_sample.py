"""A sample: which rows it takes, however a log is stored, cut up and shared out, and how they are counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as with_settings
from hypothesis import strategies as st

from tests.command import scanned
from tests.tiers import examples, some
from tests.world import FORMATS, json_lines
from tito_audit import Result, Settings, SetupError, StorageError, read_rollouts, scan_rollouts
from tito_audit.run.workers import can_fork
from tito_audit.storage import RawRow, open_log
from tito_audit.storage.chunks import ChunkReader, chunks_of
from tito_audit.storage.log import damage_row

SHARES = (0.05, 0.3, 0.5, 0.9)
ROWS = examples(80, 120)
ANY_FOLDER = with_settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(15, 40)
)
forks = pytest.mark.skipif(not can_fork(), reason="processes are not forked on this system")


def rollout(number: int) -> dict[str, Any]:
    """A row that is broken every third time, of a length of its own."""
    size = 4 + number * 7 % 40
    logprobs = [-0.25] * size
    logprobs[-1] = 0.5 if number % 3 == 0 else -0.5
    return {"token_ids": [5 + number % 9] * size, "loss_mask": [1] * size, "logprobs": logprobs, "n": number}


def stored(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    """The rows as a file of one kind."""
    path = folder / f"log.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=70)
    elif kind == "one.parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind in ("arrow", "one.arrow", "feather"):
        table = pa.Table.from_pylist(rows)
        new = pa.ipc.new_file if kind == "feather" else pa.ipc.new_stream
        with new(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=len(rows) if kind == "one.arrow" else 70)
    elif kind == "pt":
        torch = pytest.importorskip("torch")
        torch.save({"rollout_id": 0, "samples": rows}, path)
    else:
        data = json.dumps(rows).encode() if kind.startswith("json.") or kind == "json" else json_lines(rows)
        packed = {"gz": gzip.compress, "zst": lambda text: pa.compress(text, codec="zstd", asbytes=True)}
        path.write_bytes(packed.get(kind.rpartition(".")[2], bytes)(data))
    return path


KINDS = (
    *("jsonl", "jsonl.gz", "jsonl.zst", "json", "json.gz"),
    *("parquet", "one.parquet", "arrow", "one.arrow", "feather", "pt"),
)


def rows_in_sample(path: Path, share: float | None, limit: int = 1 << 20) -> tuple[list[int], int]:
    """The rows that are given, and how many were left out."""
    log = open_log(path, share=share, max_row_bytes=limit)
    rows = [row.index for row in log]
    return rows, log.left_out


def in_chunks(
    path: Path, size: int, share: float, limit: int = 1 << 20, **how: Any
) -> tuple[list[RawRow], list[int], int]:
    """The same out of chunks: the rows, how many were left out before each, and in all."""
    rows: list[RawRow] = []
    before: list[int] = []
    start = left_out = 0
    last = -1
    for chunk in chunks_of(open_log(path, share=share, max_row_bytes=limit, **how), size):
        reading = ChunkReader(chunk)
        for row in reading:
            assert reading.sample is not None
            rows.append(RawRow(row.index + start, None, row.error))
            before.append(left_out + reading.sample.left_out)
        if reading.sample is not None:
            left_out += reading.sample.left_out
            last = start + reading.sample.last if reading.sample.last >= 0 else last
        start += reading.size
        if reading.damage is not None:
            rows.append(damage_row(path, last, reading.damage))
            before.append(left_out)
            break
    return rows, before, left_out


def one_by_one(path: Path, share: float, limit: int = 1 << 20) -> tuple[list[RawRow], list[int], int]:
    """The same as one process reads it."""
    log = open_log(path, share=share, max_row_bytes=limit)
    rows, before = [], []
    for row in log:
        rows.append(RawRow(row.index, None, row.error))
        before.append(log.left_out)
    return rows, before, log.left_out


# Which rows


@pytest.mark.parametrize("kind", some(KINDS, 4))
def test_about_the_share_of_the_rows_is_taken_and_a_larger_share_takes_those_too(
    tmp_path: Path, kind: str
) -> None:
    count = examples(300, 2000)
    path = stored(tmp_path, kind, [rollout(n) for n in range(count)])
    before: set[int] = set()
    for share in some(SHARES, 3):
        rows, left_out = rows_in_sample(path, share)
        assert len(rows) + left_out == count
        assert abs(len(rows) / count - share) < 4 * (share * (1 - share) / count) ** 0.5
        assert before < set(rows)
        before = set(rows)
    assert rows_in_sample(path, None) == (list(range(count)), 0)
    assert rows_in_sample(path, 1.0) == (list(range(count)), 0)


@pytest.mark.parametrize("kind", some(KINDS, 5))
def test_chunks_of_any_size_hold_the_same_rows(tmp_path: Path, kind: str) -> None:
    path = stored(tmp_path, kind, [rollout(n) for n in range(ROWS)])
    for share in some(SHARES, 2):
        expected = one_by_one(path, share)
        assert 0 < len(expected[0]) < ROWS
        for size in some((1, 700, 5_000, 1 << 20), 3):
            assert in_chunks(path, size, share) == expected


@pytest.mark.parametrize("kind", ["parquet", "one.parquet", "arrow", "one.arrow", "jsonl", "jsonl.gz", "json"])
def test_rows_that_are_too_long_are_taken_or_left_like_others(tmp_path: Path, kind: str) -> None:
    path = stored(tmp_path, kind, [rollout(n) for n in range(examples(100, 300))])
    expected = one_by_one(path, 0.5, limit=350)
    assert examples(8, 20) < sum(row.error is not None for row in expected[0]) < len(expected[0])
    for size in some((1, 700, 1 << 20), 2):
        assert in_chunks(path, size, 0.5, limit=350) == expected


LINE = st.sampled_from([b"", b" ", b"{}", b'{"a": 1}', b'{"a": [1,', b"[1]", b'{"long": "%s"}' % (b"x" * 300)])


@ANY_FOLDER
@given(
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(LINE, max_size=30),
    st.booleans(),
    st.integers(1, 90),
    st.sampled_from([bytes, gzip.compress]),
    st.sampled_from(SHARES),
)
def test_the_rows_of_any_lines_are_the_same_in_chunks(
    tmp_path: Path, mark: bytes, lines: list[bytes], ended: bool, size: int, packed: Any, share: float
) -> None:
    data = b'{"first": 0}\n' + b"".join(line + b"\n" for line in lines)
    path = tmp_path / "log"
    path.write_bytes(packed(mark + (data if ended else data[:-1])))
    expected = one_by_one(path, share, 200)
    assert in_chunks(path, size, share, 200) == expected
    rows = sum(bool(line.strip()) for line in data.splitlines())
    assert len(expected[0]) + expected[2] == rows


def test_packed_lines_are_the_same_rows_as_plain_ones(tmp_path: Path) -> None:
    rows = [rollout(n) for n in range(200)]
    kinds = ("jsonl", "jsonl.gz", "jsonl.zst")
    assert len({tuple(rows_in_sample(stored(tmp_path, kind, rows), 0.4)[0]) for kind in kinds}) == 1


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "parquet"])
def test_a_log_that_grows_keeps_the_rows_that_were_taken(tmp_path: Path, kind: str) -> None:
    rows = [rollout(n) for n in range(490)]
    before = rows_in_sample(stored(tmp_path, kind, rows[:210]), 0.3)[0]
    assert [index for index in rows_in_sample(stored(tmp_path, kind, rows), 0.3)[0] if index < 210] == before


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_files_of_one_row_are_not_all_taken_or_all_left(tmp_path: Path, kind: str) -> None:
    counts = []
    for number in range(60):
        folder = tmp_path / str(number)
        folder.mkdir()
        # As long as each other, so that only what they hold differs.
        path = stored(folder, kind, [{"token_ids": list(range(number, number + 40))}])
        counts.append(len(rows_in_sample(path, 0.5)[0]))
    assert kind == "parquet" or 15 < sum(counts) < 45


def test_rows_that_are_alike_are_told_by_where_they_stand(tmp_path: Path) -> None:
    for kind in ("jsonl", "json", "parquet"):
        rows, _ = rows_in_sample(stored(tmp_path, kind, [rollout(1)] * 2000), 0.3)
        assert 500 < len(rows) < 700


def test_a_row_that_is_left_out_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b'{"a": 1\n' * 400)
    rows = list(open_log(path, share=0.2))
    assert 40 < len(rows) < 120
    assert all(row.error for row in rows[1:])
    results, summary = scanned(path, sample=0.2)
    assert summary.rows_unreadable == len(results) == len(rows)


@pytest.mark.parametrize("packed", [gzip.compress, lambda text: pa.compress(text, codec="zstd", asbytes=True)])
@pytest.mark.parametrize("share", [0.001, 0.4])
def test_a_file_that_breaks_says_so_whatever_the_sample(tmp_path: Path, packed: Any, share: float) -> None:
    path = tmp_path / "log"
    data = packed(
        b"".join(json.dumps({"n": n, "x": n * n}).encode() + b"\n" for n in range(examples(20_000, 40_000)))
    )
    path.write_bytes(data[: len(data) // 2])
    whole = list(open_log(path))
    expected = one_by_one(path, share)
    assert expected[0][-1] == RawRow(whole[-1].index, None, whole[-1].error)
    broken = in_chunks(path, 5_000, share)
    assert [(row.index, row.error) for row in broken[0]] == [(row.index, row.error) for row in expected[0]]
    assert broken[1:] == expected[1:]


# Scans


def places(results: list[Result]) -> set[tuple[str, int]]:
    return {(result.place.file, result.place.row) for result in results}


@forks
@pytest.mark.parametrize("kind", some(KINDS, 3))
def test_a_sample_is_the_same_whatever_the_number_of_processes(tmp_path: Path, kind: str) -> None:
    path = stored(tmp_path, kind, [rollout(n) for n in range(300)])
    for share in some((0.4, 0.02), 1):
        results, summary = expected = scanned(path, sample=share)
        assert summary.sampled is not None
        assert (summary.sampled.share, summary.sampled.rows, summary.sampled.of) == (share, len(results), 300)
        assert {result.place.row for result in results} == set(rows_in_sample(path, share)[0])
        for jobs, chunk in some(((2, 3_000), (3, 40_000)), 1):
            assert scanned(path, jobs, chunk, sample=share) == expected


def test_a_sample_finds_what_the_whole_audit_finds_in_its_rows(tmp_path: Path) -> None:
    path = stored(tmp_path, "jsonl", [rollout(n) for n in range(300)])
    whole = {result.place: result for result in scanned(path)[0]}
    before: set[tuple[str, int]] = set()
    for share in SHARES:
        results, _ = scanned(path, sample=share)
        for result in results:
            assert result.findings == whole[result.place].findings
        assert before < places(results)
        before = places(results)


@pytest.mark.parametrize("jobs", [None, pytest.param(2, marks=forks)])
def test_a_share_of_one_is_no_sample(tmp_path: Path, jobs: int | None) -> None:
    path = stored(tmp_path, "jsonl", [rollout(n) for n in range(40)])
    assert scanned(path, jobs, 700, sample=1.0) == scanned(path, jobs, 700)
    assert scanned(path, jobs, 700, sample=1.0)[1].sampled is None


@forks
@pytest.mark.parametrize("limit", some([1, 10, 57, 120, 1000], 3))
def test_a_limit_counts_the_rows_that_are_audited(tmp_path: Path, limit: int) -> None:
    rows = [rollout(n) for n in range(150)]
    logs = []
    for number, kind in enumerate(("jsonl", "jsonl.gz", "parquet")):
        (tmp_path / str(number)).mkdir()
        logs.append(stored(tmp_path / str(number), kind, rows))
    every, _ = scanned(logs, sample=0.3)
    results, summary = expected = scanned(logs, sample=0.3, limit=limit)
    assert results == every[:limit]
    assert summary.sampled is not None
    assert summary.sampled.rows == len(results)
    if limit < len(every):
        last = results[-1].place
        read = 150 * [str(log) for log in logs].index(last.file) + last.row + 1
        assert read <= summary.sampled.of < read + 20, (
            "the rows up to the last that was audited, or its file's end"
        )
        assert summary.notices[-1] == f"Stopped after {limit} rows, as asked by --limit."
    else:
        assert summary.sampled.of == 450
    for jobs, chunk in some(((2, 2_000), (3, 1 << 20)), 1):
        assert scanned(logs, jobs, chunk, sample=0.3, limit=limit) == expected


def test_a_sample_without_a_row_is_not_taken_for_an_empty_log(tmp_path: Path) -> None:
    path = stored(tmp_path, "jsonl", [rollout(n) for n in range(5)])
    results, summary = scanned(path, sample=1e-9)
    assert results == []
    assert any("The sample took none of the 5 rows" in notice for notice in summary.notices)
    assert not any("holds no rows" in notice for notice in summary.notices)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan"), float("inf")])
def test_a_share_that_cannot_be_is_refused(tmp_path: Path, share: float) -> None:
    path = stored(tmp_path, "jsonl", [rollout(0)])
    with pytest.raises(SetupError, match="above 0 and at most 1"):
        scanned(path, sample=share)


def test_one_row_that_is_asked_for_is_audited_whatever_the_sample(tmp_path: Path) -> None:
    path = stored(tmp_path, "jsonl", [rollout(n) for n in range(30)])
    for row in some(range(30), 6):
        results, summary = scanned(path, sample=0.01, row=row)
        assert [result.place.row for result in results] == [row]
        assert summary.sampled is None


def test_rollouts_are_read_by_sample(tmp_path: Path) -> None:
    path = stored(tmp_path, "jsonl", [rollout(n) for n in range(100)])
    rows = [read.place.row for read in read_rollouts(path, Settings(sample=0.3))]
    assert rows == rows_in_sample(path, 0.3)[0]


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    path = stored(tmp_path, "jsonl", [rollout(n) for n in range(200)])
    for jobs, chunk in ((None, None), (2, 4_000)) if can_fork() else ((None, None),):
        seen: list[tuple[int, int, int]] = []
        scan = scan_rollouts(path, Settings(sample=0.1, jobs=jobs), lambda *now, seen=seen: seen.append(now))
        scan.chunk_bytes = chunk
        count = len(list(scan))
        size = path.stat().st_size
        assert seen == sorted(seen)
        assert seen[-1] == (count, size, size)


# Captures, whose lines are gathered


@pytest.fixture
def capture(tmp_path: Path) -> tuple[Path, Path]:
    """A token capture of 40 rollouts of three calls, and the messages of each."""
    line = json.loads((FORMATS / "nemo_gym_tokens.jsonl").read_text(encoding="utf-8").splitlines()[0])
    calls = [{**line, "rollout_id": f"r{number}", "created_at": call} for call in range(3) for number in range(40)]
    chats = [{"rollout_id": f"r{n}", "messages": [{"role": "user", "content": "hello"}]} for n in range(40)]
    (tmp_path / "capture.jsonl").write_bytes(json_lines(calls))
    (tmp_path / "said.jsonl").write_bytes(json_lines(chats))
    return tmp_path / "capture.jsonl", tmp_path / "said.jsonl"


@forks
@pytest.mark.parametrize("share", [0.0001, 0.4])
def test_rollouts_of_a_capture_are_taken_with_all_their_lines(capture: tuple[Path, Path], share: float) -> None:
    log, messages = capture
    every, _ = scanned(log, messages=str(messages))
    assert len(every) == 40
    results, summary = expected = scanned(log, messages=str(messages), sample=share)
    assert summary.sampled is not None
    assert (summary.sampled.rows, summary.sampled.of) == (len(results), 40)
    assert all(result in every for result in results)
    assert len(results) < 40
    assert bool(results) == (share > 0.1)
    for jobs, chunk in ((2, 2_000), (3, 1 << 20)):
        assert scanned(log, jobs, chunk, messages=str(messages), sample=share) == expected


def test_a_broken_start_is_an_error_whatever_the_sample(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 9)[:12])
    with pytest.raises(StorageError, match="No row could be read"):
        list(open_log(path, share=0.5))
