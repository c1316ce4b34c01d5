"""Several processes: the same results as one gives, in the same order, and an end when something goes wrong."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as with_settings
from hypothesis import strategies as st

from tests.command import scanned, written
from tests.ready import program
from tests.test_however_run import mixed
from tests.tiers import some
from tests.world import BROKEN, CLEAN, ROOT, zstd
from tito_audit import Settings, SetupError, StorageError, repair_rollouts, scan_rollouts
from tito_audit.record.arrays import Ids
from tito_audit.run.tasks import chunk_bytes
from tito_audit.run.workers import ForkedProcesses, can_fork, is_small, usable_cores
from tito_audit.storage import RawRow, open_log
from tito_audit.storage.chunks import ChunkReader, chunks_of
from tito_audit.storage.log import damage_row
from tito_audit.terminal.terminal import RunProgress, compute_first, with_progress
from tito_audit.tokens.encoders import FastEncoder
from tito_audit.tokens.load import load_tokenizer

FORMATS = sorted((ROOT / "fixtures" / "formats").glob("*.jsonl"))
TOKENIZER = str(ROOT / "fixtures" / "tokenizers" / "toy_bpe")
LIMIT = 200
LONG = 120.0
"""Seconds; nothing that comes at all takes so long."""

pytestmark = [pytest.mark.skipif(not can_fork(), reason="processes are not forked on this system")]


# Chunks


def whole(path: Path, limit: int) -> list[RawRow] | str:
    try:
        return [plain(row) for row in open_log(path, max_row_bytes=limit)]
    except StorageError as error:
        return str(error)


def in_chunks(path: Path, size: int, limit: int) -> list[RawRow] | str:
    rows: list[RawRow] = []
    start = 0
    try:
        for chunk in chunks_of(open_log(path, max_row_bytes=limit), size):
            reading = ChunkReader(chunk)
            rows += [plain(replace(row, index=row.index + start)) for row in reading]
            start += reading.size
            if reading.damage is not None:
                rows.append(damage_row(path, rows[-1].index if rows else -1, reading.damage))
                break
    except StorageError as error:
        return str(error)
    return rows


def plain(row: RawRow) -> RawRow:
    """The row without arrays, which have no equality."""
    value = row.value
    if value is not None:
        value = {key: item.tolist() if isinstance(item, np.ndarray) else item for key, item in value.items()}
    return replace(row, value=value)


LINE = st.sampled_from(
    [
        b"",
        b" \t",
        b"{}",
        b'{"a": 1}',
        b'{"text": "\xc3\xa4"}',
        b'{"a": [1,',
        b"[1]",
        b'{"long": "%s"}' % (b"x" * LIMIT),
    ]
) | st.binary(max_size=9).map(lambda data: data.replace(b"\n", b""))
LINES = st.tuples(
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(st.tuples(LINE, st.sampled_from([b"\n", b"\r\n"])), max_size=12),
    st.booleans(),
)


def joined(lines: tuple[bytes, list[tuple[bytes, bytes]], bool]) -> bytes:
    """The bytes of a file; the last line end may be missing."""
    before, parts, ended = lines
    data = b"".join(line + end for line, end in parts)
    return before + b'{"first": 0}\n' + (data if ended else data[:-1])


ANY_FOLDER = with_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@ANY_FOLDER
@given(LINES, st.integers(1, 60))
def test_the_chunks_of_lines_hold_each_row_once(tmp_path: Path, lines: Any, size: int) -> None:
    path = tmp_path / "log"
    for packed in (bytes, gzip.compress, zstd):
        path.write_bytes(packed(joined(lines)))
        assert in_chunks(path, size, LIMIT) == whole(path, LIMIT)


@ANY_FOLDER
@given(LINES, st.integers(1, 60), st.integers(1, 99))
def test_a_file_that_breaks_gives_the_rows_before_and_one_error(
    tmp_path: Path, lines: Any, size: int, cut: int
) -> None:
    path = tmp_path / "log"
    for packed in (gzip.compress, zstd):
        data = packed(joined(lines))
        path.write_bytes(data[: -min(cut, len(data) - 5)])
        assert in_chunks(path, size, LIMIT) == whole(path, LIMIT)


@pytest.mark.parametrize("packed", [bytes, gzip.compress])
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n\n",
        b"[]",
        b'[{"a": 1}, {"a": "%s"}, 3,, {"a": [\n1, 2]} ]' % (b"x" * LIMIT),
        b'[{"a": 1}, {"a": 2}',
        b'{\n"a": 1\n}\n{"b": 2}\n {"c"',
        b'[{"a": 1}] and more',
    ],
)
def test_the_chunks_of_documents_hold_each_row_once(tmp_path: Path, text: bytes, packed: Any) -> None:
    path = tmp_path / "log.json"
    path.write_bytes(packed(text))
    for size in (1, 7, 1000):
        assert in_chunks(path, size, LIMIT) == whole(path, LIMIT)


KINDS = [*product(["parquet"], [1, 7, 100]), *product(["stream", "file"], some([7, 1, 100], 1))]
"""Parquet, and Arrow as stream and file, each with the rows of a group."""


@pytest.mark.parametrize("limit", [1 << 20, 600])
@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_the_chunks_of_a_table_hold_each_row_once(tmp_path: Path, kind: str, group: int, limit: int) -> None:
    rows = [{"ids": [i] * (i % 9 * 30), "text": None if i % 3 else "é" * i, "deep": {"a": i}} for i in range(40)]
    bad = pa.array([b"\xff" if i == 20 else b"ok" for i in range(40)]).cast(pa.string(), safe=False)
    words = pa.array(["one", "two"] * 20).dictionary_encode()
    for name, extra in (("plain", None), ("bad", bad), ("words", words)):
        table = pa.Table.from_pylist(rows)
        table = table if extra is None else table.append_column("more", extra)
        path = tmp_path / (f"{name}.parquet" if kind == "parquet" else name)
        if kind == "parquet":
            pq.write_table(table, path, row_group_size=group)
        else:
            with getattr(pa.ipc, f"new_{kind}")(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=group)
        expected = whole(path, limit)
        assert [row.index for row in expected] == list(range(40))
        for size in (1, 100, 3000, 1 << 20):
            assert in_chunks(path, size, limit) == expected


def test_a_line_is_read_by_one_process_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b'{"row": "%s"}\n' % (b"x" * 50_000) for _ in range(30)))
    read = [len(list(ChunkReader(chunk))) for chunk in chunks_of(open_log(path), 20_000)]
    assert sum(read) == 30
    assert 0 in read


def test_what_is_written_while_a_log_is_read_belongs_to_its_last_chunk(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"a": 1}\n' * 10)
    chunks = list(chunks_of(open_log(path), 30))
    path.write_bytes(b'{"a": 1}\n' * 25)
    assert sum(len(list(ChunkReader(chunk))) for chunk in chunks) == 25


# Processes


def numbered(tasks: Any) -> list[tuple[int, Any]]:
    return list(enumerate(tasks))


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_answers_come_in_the_order_of_the_tasks(jobs: int) -> None:
    def work(task: int) -> tuple[int, int]:
        time.sleep((task * 7 % 5) / 500)
        return task, os.getpid()

    tags = [(f"tag {i}", None if i % 4 == 0 else i) for i in range(60)]
    answers = list(ForkedProcesses(jobs).map(work, tags))
    assert [tag for tag, _ in answers] == [tag for tag, _ in tags]
    assert [answer and answer[0] for _, answer in answers] == [task for _, task in tags]
    assert len({answer[1] for _, answer in answers if answer} - {os.getpid()}) == jobs


def test_tasks_and_answers_larger_than_a_pipe_pass() -> None:
    tasks = [bytes([i]) * (1 << 20) for i in range(20)]
    assert [answer for _, answer in ForkedProcesses(3).map(lambda task: task * 2, numbered(tasks))] == [
        t * 2 for t in tasks
    ]


def test_few_tasks_are_taken_ahead() -> None:
    number = 0

    def tasks() -> Iterator[tuple[int, int]]:
        nonlocal number
        for number in range(1000):
            yield number, number

    ahead = [number - tag for tag, _ in ForkedProcesses(2).map(lambda task: b"x" * 100_000, tasks())]
    assert max(ahead) <= 3 * 2 + 1


def children() -> list[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    if not listed.exists():
        pytest.skip("this system does not list the children of a process")
    return [int(child) for child in listed.read_text().split()]


def test_a_process_ends_while_others_work_on_the_last_tasks(tmp_path: Path) -> None:
    go = tmp_path / "go"
    before = [pid for pid in children() if alive(pid)]

    def work(task: int) -> int:
        while task and not go.exists():
            time.sleep(0.01)
        return task

    def started() -> list[int]:
        return [pid for pid in children() if alive(pid) and pid not in before]

    answers = ForkedProcesses(2).map(work, numbered(range(2)))
    assert next(answers) == (0, 0)
    deadline = time.monotonic() + LONG
    while len(started()) != 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(started()) == 1, "the other process still works"
    go.touch()
    assert list(answers) == [(1, 1)]
    assert not started()


def test_processes_end_with_the_generator() -> None:
    before = children()
    answers = ForkedProcesses(3).map(lambda task: task, numbered(range(1000)))
    assert next(answers) == (0, 0)
    assert len(children()) == len(before) + 3
    answers.close()
    assert children() == before


def test_processes_end_with_the_outcomes_of_a_repair(tmp_path: Path) -> None:
    before, log = children(), written(tmp_path / "log.jsonl", mixed(400))
    run = repair_rollouts(log, tmp_path / "out.jsonl", Settings(jobs=2))
    run.batch_bytes = 100
    outcomes = iter(run)
    next(outcomes)
    assert len(children()) == len(before) + 2
    outcomes.close()  # type: ignore[attr-defined]
    assert children() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl"]


def unpicklable(task: int) -> int:
    class Local(Exception):
        pass

    raise Local(f"task {task}")


def out_of_memory(task: int) -> int:
    raise MemoryError


def killed(task: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return task


def gone(task: int) -> int:
    os._exit(3)


@pytest.mark.parametrize(
    ("failing", "error", "says"),
    [
        (lambda task: {}[task], KeyError, "7"),
        (unpicklable, RuntimeError, "Local: task 7"),
        (out_of_memory, SetupError, r"Settings\(jobs=1\)"),
        (killed, SetupError, "number 7: the process working on this was killed by SIGKILL"),
        (gone, SetupError, "number 7: the process working on this ended"),
    ],
)
def test_what_ends_a_process_ends_the_run(failing: Callable[[int], int], error: Any, says: str) -> None:
    before = children()
    got: list[int | None] = []
    tasks = ((f"number {i}", i) for i in range(50))

    def collect() -> None:
        for _, answer in ForkedProcesses(2).map(lambda task: failing(task) if task == 7 else task, tasks):
            got.append(answer)

    with pytest.raises(error, match=says):
        collect()
    assert got == list(range(len(got)))
    assert len(got) <= 7
    assert children() == before


def test_an_error_carries_the_lines_where_it_was_raised() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        list(ForkedProcesses(1).map(lambda task: 1 // task, [(0, 0)]))
    assert "in <lambda>" in "".join(caught.value.__notes__)


def test_each_process_has_its_own_cores_where_there_are_enough() -> None:
    cores = os.sched_getaffinity(0)

    def work(task: int) -> set[int]:
        time.sleep(0.05)
        return os.sched_getaffinity(0)

    for jobs in {1, len(cores)}:
        seen = [answer for _, answer in ForkedProcesses(jobs).map(work, numbered(range(4 * jobs)))]
        assert set().union(*filter(None, seen)) == cores
        assert len({frozenset(cores or ()) for cores in seen}) == jobs
    assert all(answer == cores for _, answer in ForkedProcesses(len(cores) + 1).map(work, numbered(range(4))))
    assert 1 <= usable_cores() <= len(cores)


# Scans


def test_a_fast_encoder_that_one_process_gave_up_is_not_named_in_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(FastEncoder):
        def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
            return super().encode_batch([text.replace("zebra", "horse") for text in texts])

    monkeypatch.setattr("tito_audit.tokens.tokenizer.FastEncoder", Wrong)
    tokenizer = load_tokenizer(TOKENIZER)
    rows = [
        {"token_ids": tokenizer.encode(f"<|im_start|>user\nA {word}<|im_end|>\n").tolist(), "loss_mask": None}
        for word in ["dog"] * 40 + ["zebra"] + ["dog"] * 40
    ]
    log = written(tmp_path / "log.jsonl", rows)
    for jobs in (1, 2):
        results, summary = scanned(log, jobs, 200, tokenizer=TOKENIZER, encoder="fastokens")
        assert len(results) == len(rows)
        assert not any(result.findings for result in results)
        assert summary.encoder == "tokenizers"
        assert any("fastokens disagreed with tokenizers at" in notice for notice in summary.notices)
    results, summary = scanned(log, 2, 200, tokenizer=TOKENIZER, encoder="fastokens", limit=20)
    assert summary.encoder == "fastokens, proved by tokenizers"


def test_a_pipe_is_read_by_one_and_audited_by_several(tmp_path: Path) -> None:
    log = written(tmp_path / "log", [CLEAN, BROKEN] * 50)
    expected = sum(len(result.findings) for result in scanned(log)[0])
    with subprocess.Popen(["cat", log], stdout=subprocess.PIPE) as cat:
        assert cat.stdout is not None
        results, summary = scanned(f"/dev/fd/{cat.stdout.fileno()}", 2, 500)
    assert (sum(len(result.findings) for result in results), summary.rollouts) == (expected, 100)


def test_with_jobs_a_rollout_is_its_place_and_format(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", [CLEAN] * 3)
    (first, *_) = scan_rollouts(log)
    assert first.rollout is not None
    assert first.rollout.training_row is not None
    for chunk in (None, 100):
        scan = scan_rollouts(log, Settings(jobs=2))
        scan.chunk_bytes = chunk
        rollouts = [result.rollout for result in scan]
        assert [rollout and rollout.place.row for rollout in rollouts] == [0, 1, 2]
        assert {rollout and (rollout.format, rollout.training_row) for rollout in rollouts} == {("generic", None)}


def test_chunks_are_many_for_each_process_and_never_large() -> None:
    assert chunk_bytes(10 << 20, 2) == (10 << 20) // 16
    assert chunk_bytes(10 << 30, 2) == 8 << 20
    assert chunk_bytes(100, 16) == 1 << 18


def test_progress_counts_rows_and_bytes_up_to_all_of_them(tmp_path: Path) -> None:
    logs = [written(tmp_path / f"{name}.jsonl", [CLEAN] * 40) for name in "ab"]
    total = sum(log.stat().st_size for log in logs)
    for jobs, chunk in ((None, None), (2, 300)):
        seen: list[tuple[int, int, int]] = []
        scan = scan_rollouts(logs, Settings(jobs=jobs), lambda *now, seen=seen: seen.append(now))
        scan.chunk_bytes = chunk
        assert len(list(scan)) == 80
        assert seen == sorted(seen)
        assert seen[-1] == (80, total, total)


# The command line


LONG_ROW = (
    json.dumps({"token_ids": [5] * 4000, "loss_mask": [1] * 4000, "logprobs": [0.5] * 4000}).encode() + b"\n"
)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log that takes two processes some seconds."""
    path = tmp_path_factory.mktemp("long") / "long.jsonl"
    path.write_bytes(LONG_ROW * 1500)
    return path


def workers_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        workers = [int(worker) for worker in listed.read_text().split()]
        if len(workers) == 2:
            return workers
        time.sleep(0.01)
    raise AssertionError("no processes were started")


def started(words: Sequence[str], folder: Path | None = None, jobs: int = 2) -> subprocess.Popen[str]:
    """The command in a process that leads its group; of `tests.held`, so many seconds come first."""
    module = "tito_audit" if words[0].isalpha() else "tests.held"
    return subprocess.Popen(
        [sys.executable, "-m", module, *words, "--jobs", str(jobs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        start_new_session=True,
    )


def ended(pids: list[int]) -> bool:
    """Whether none of these processes runs any more; they may take a while."""
    end = time.monotonic() + LONG
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody has asked for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


CLOCKS = re.compile(r'"seconds": ?[0-9.e-]+|[0-9.]+ s\b')


@pytest.mark.parametrize(
    "command", ["scan LOG -f json -r jsonl=lines", "repair LOG -o out -t TOY -r json=page --diff --worst 5"]
)
def test_a_command_with_jobs_prints_and_writes_what_it_does_without(tmp_path: Path, command: str) -> None:
    # Large enough for several processes, by what no rule reads.
    log = written(tmp_path / "log.jsonl", [{**row, "note": "x" * 90_000} for row in mixed(40)])
    assert not is_small([log])
    came = []
    for jobs in ("1", "2"):
        folder = tmp_path / jobs
        folder.mkdir()
        words = [*program(), *command.replace("LOG", str(log)).replace("TOY", TOKENIZER).split(), "--jobs", jobs]
        done = subprocess.run(words, capture_output=True, text=True, cwd=folder, check=False)
        assert (done.returncode, done.stderr) == (1, "")
        files = {path.name: CLOCKS.sub("", path.read_text("utf-8")) for path in folder.iterdir()}
        came.append((" ".join(CLOCKS.sub("", done.stdout).split()), files))
    assert came[0] == came[1]
    assert "repaired by" in came[0][0] or len(came[0][1]["lines"].splitlines()) > 20


def printed_by(run: subprocess.Popen[str]) -> tuple[str, str]:
    """What a process that leads its group prints; it is killed if it does not end, as leaving it would wait."""
    try:
        return run.communicate(timeout=LONG)
    finally:
        if run.returncode is None:
            os.killpg(run.pid, signal.SIGKILL)


@pytest.mark.parametrize("who", ["worker", "parent"])
@pytest.mark.parametrize("words", ["scan", "repair -o out.jsonl --quarantine aside"])
def test_a_signal_ends_all_processes_with_one_message_and_leaves_no_file(
    long: Path, tmp_path: Path, words: str, who: str
) -> None:
    children()
    with started([str(LONG), *words.split(), str(long)], tmp_path) as run:
        workers = workers_of(run.pid)
        if who == "worker":
            os.kill(workers[1], signal.SIGKILL)
        else:
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does, to all of them
        out, err = printed_by(run)
    assert out == ""
    assert "Traceback" not in err
    if who == "worker":
        assert run.returncode == 2
        assert "was killed by SIGKILL" in err
        assert str(long) in err
    else:
        assert run.returncode == 130
        assert err == "tito-audit: interrupted; no report was finished\n"
    assert list(tmp_path.iterdir()) == []
    assert not any(map(alive, workers))


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_command_ends_quietly_with_its_processes_when_the_reader_goes_away(long: Path, jobs: int) -> None:
    children()
    with started(["scan", str(long), "--report", "jsonl"], jobs=jobs) as run:
        workers = workers_of(run.pid) if jobs > 1 else []
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.readline().startswith("{")
        run.stdout.close()
        assert run.stderr.read() == ""
        assert run.wait(timeout=LONG) == 141
    assert not any(map(alive, workers))


def test_processes_end_when_their_parent_is_killed(long: Path) -> None:
    children()
    with started(["0.5", "scan", str(long)]) as run:
        workers = workers_of(run.pid)
        run.kill()
        run.communicate(timeout=LONG)  # ends when the last holder of its stdout is about to
    assert ended(workers)


def test_a_first_result_is_there_before_it_is_asked_for() -> None:
    events: list[str] = []

    def results() -> Iterator[int]:
        try:
            for number in range(3):
                events.append(f"result {number}")
                yield number
        finally:
            events.append("closed")

    started = compute_first(with_progress(results(), RunProgress()))
    assert events == ["result 0"]
    assert next(started) == 0
    started.close()
    assert events == ["result 0", "closed"]
    assert list(compute_first(with_progress(iter(()), RunProgress()))) == []
