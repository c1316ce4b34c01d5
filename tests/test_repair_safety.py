"""`tito-audit repair` through the real command: whatever happens to a run, the log stays and no half file appears.

`TITO_AUDIT_KILLS=50` kills each kind of run that often instead of once (two minutes, `-s` shows when);
`TITO_AUDIT_SLOW=1` measures the memory of a run over a log of 300 MB (a minute).
"""

from __future__ import annotations

import base64
import functools
import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.command import run as run_command
from tests.tables import table
from tests.test_output import mounted, small_disk
from tests.test_parquet_output import form_of, same_values
from tests.tiers import DEEP, examples, some
from tests.world import ROOT, lines_of
from tito_audit.cli.repair import REPORTS, RepairRun, RowTally
from tito_audit.record.finding import Severity
from tito_audit.record.outcome import Outcome
from tito_audit.report import ReportOptions
from tito_audit.run.repair import repair_rollouts
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.storage import open_log, open_output
from tito_audit.summary import RuleCount, Summary

SHARED = ROOT.parent / "shared"
TOKENIZER = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
FIXTURES = sorted((ROOT / "fixtures" / "formats").glob("*.jsonl"))
FAULTY = [path for path in FIXTURES if path.stem in {"generic", "nemo_gym", "atropos_group", "nemo_rl"}]
KILLS = int(os.environ.get("TITO_AUDIT_KILLS", examples(1, 5)))
SLOW = bool(os.environ.get("TITO_AUDIT_SLOW"))
KINDS = (".jsonl", ".jsonl.gz", ".parquet")
REPEATED = examples(5, 7)
"""Copies of the example rows in a log, so that a run takes its time."""
PAD = 80_000
"""Bytes that no compression makes smaller in each row, so that a run writes while it goes on."""

Row = dict[str, Any]


# Logs


@functools.cache
def example_rows(name: str) -> tuple[Row, ...]:
    text = (ROOT / "fixtures" / "formats" / f"{name}.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines())


@functools.cache
def padded_rows(times: int = REPEATED) -> tuple[Row, ...]:
    """Ten rows several times, each with a text of its own: three can be cured, three are for the quarantine."""
    noise = random.Random(7)
    return tuple(
        {**row, "note": base64.b64encode(noise.randbytes(PAD * 3 // 4)).decode()}
        for _ in range(times)
        for row in example_rows("nemo_gym")[:10]
    )


def json_lines(rows: Sequence[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")


def table_of_rows(rows: Sequence[Row]) -> pa.Table:
    """One column for each name that any row has; ArrowInvalid where the rows disagree on a type."""
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
    return table.replace_schema_metadata({"huggingface": '{"info": {}}', "own": "x"})


def fits(rows: Sequence[Row]) -> bool:
    """Whether the rows can be one Parquet file: not with two types in one place, or an object without a field."""
    try:
        pq.write_table(table_of_rows(rows), io.BytesIO())
    except pa.ArrowException:
        return False
    return True


def fitting(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows in few groups, each of which can be one Parquet file; without those that never can."""
    groups: list[list[Row]] = []
    for row in filter(lambda row: fits([row]), rows):
        group = next((group for group in groups if fits([*group, row])), None)
        if group is None:
            groups.append([row])
        else:
            group.append(row)
    return groups


def store(path: Path, rows: Sequence[Row], per_group: int = 7) -> Path:
    """A log of the kind that its suffix names."""
    if path.suffix == ".parquet":
        pq.write_table(table_of_rows(rows), path, row_group_size=per_group, compression="zstd")
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(json_lines(rows), 1, mtime=0))
    elif path.suffix == ".zst":
        path.write_bytes(pa.compress(json_lines(rows), codec="zstd", asbytes=True))
    else:
        path.write_bytes(json_lines(rows))
    return path


def named(folder: Path) -> dict[str, bytes]:
    """Every file below a folder that has its name: after a SIGKILL, others may be left beside them."""
    return {name: data for name, data in contents(folder).items() if not name.endswith(".part")}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its name; a half file would be one of them."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Runs


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tito_audit", "repair", *map(str, arguments), "-t", str(TOKENIZER)]


def run(*arguments: object, seed: str = "0") -> subprocess.CompletedProcess[str]:
    """A run to its end."""
    env = {**os.environ, "PYTHONHASHSEED": seed, "COLUMNS": "100"}
    return subprocess.run(command(*arguments), cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def run_here(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The same run within this process, where the process is not what is tried."""
    code, out, err = run_command("repair", *arguments, "-t", TOKENIZER, env={"COLUMNS": "100"})
    return subprocess.CompletedProcess(arguments, code, out, err)


def outcomes(log: Path, out: Path, tokenizer: Path = TOKENIZER) -> list[Outcome]:
    """A run within this process, of all repairs that are safe."""
    return list(repair_rollouts(log, out, Settings(tokenizer=str(tokenizer))))


def assert_nothing_cured(log: Path, out: Path) -> None:
    """A run with nothing to do, as no repair is for rows that cannot be read."""
    for outcome in repair_rollouts(log, out, Settings(select=("REC001",))):
        assert not outcome.cured


def refused(done: subprocess.CompletedProcess[str], *says: object) -> None:
    """Assert that a run ended with 2 and one message that says all this."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("tito-audit: ")
    assert "Traceback" not in done.stderr
    for word in says:
        assert str(word) in done.stderr


@dataclass(frozen=True)
class Undisturbed:
    """What a run comes to that nothing happens to."""

    log: Path
    data: bytes
    out: bytes
    quarantine: bytes
    seconds: float


@functools.cache
def undisturbed(suffix: str, folder: Path) -> Undisturbed:
    """One run of each kind, kept for the session."""
    folder.mkdir(exist_ok=True)
    log = store(folder / f"log{suffix}", padded_rows(), per_group=10)
    data = log.read_bytes()
    started = time.monotonic()
    timed = run if DEEP or suffix == KINDS[0] else run_here  # kinds that are killed at some moment of that time
    done = timed(log, "-o", folder / f"out{suffix}", "--quarantine", folder / "bad.jsonl")
    seconds = time.monotonic() - started
    assert (done.returncode, done.stderr) == (0, "")
    files = contents(folder)
    assert len(files[f"out{suffix}"]) > REPEATED * 240_000
    assert files["bad.jsonl"].count(b"\n") == 3 * REPEATED
    return Undisturbed(log, data, files[f"out{suffix}"], files["bad.jsonl"], seconds)


@pytest.fixture(params=KINDS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(request.param, tmp_path_factory.getbasetemp() / f"undisturbed{request.param}")


# A run that is killed


def left_whole(folder: Path, whole: Undisturbed, number: int = signal.SIGKILL) -> str:
    """What a killed run left, in a word; nothing that has its name may be half, and no rows may be lost."""
    assert whole.log.read_bytes() == whole.data
    left = named(folder) if number == signal.SIGKILL else contents(folder)
    complete = {f"out{''.join(whole.log.suffixes)}": whole.out, "bad.jsonl": whole.quarantine}
    assert left.items() <= complete.items(), {name: len(data) for name, data in left.items()}
    # Between two names there is a moment; rows that were taken out are named first.
    assert "bad.jsonl" in left or not left
    return {0: "nothing", 1: "the quarantine", 2: "all"}[len(left)]


def bytes_in_writing(process: int, folder: Path) -> int:
    """Bytes of the files in the folder that a process holds open to write."""
    size = 0
    try:
        for handle in Path(f"/proc/{process}/fd").iterdir():
            if str(handle.readlink()).startswith(str(folder)) and handle.is_file():
                size += handle.stat().st_size
    except OSError:
        return size
    return size


@pytest.mark.parametrize("whole", some(KINDS, 1), indirect=True)
def test_a_run_that_is_killed_at_any_moment_leaves_the_log_and_no_half_file(
    whole: Undisturbed, tmp_path: Path
) -> None:
    suffix = "".join(whole.log.suffixes)
    moments = []
    for number in range(KILLS):
        # One moment in each part of the time that a run takes, and some after it.
        moment = whole.seconds * 1.05 * (number + random.random()) / KILLS
        folder = tmp_path / f"{number}"
        folder.mkdir()
        arguments = [whole.log, "-o", folder / f"out{suffix}", "--quarantine", folder / "bad.jsonl", "--quiet"]
        with subprocess.Popen(command(*arguments), cwd=ROOT) as process:
            try:
                process.wait(moment)
            except subprocess.TimeoutExpired:
                size = bytes_in_writing(process.pid, folder)
                process.kill()
            else:
                size = 0
        assert process.returncode in (0, -signal.SIGKILL)
        moments.append(f"{moment:.2f} s: {size:,} bytes in writing, {left_whole(folder, whole)} left")
    print(f"\n{suffix}, {whole.seconds:.2f} s undisturbed", *moments, sep="\n  ")


@contextmanager
def held_while_writing(whole: Undisturbed, folder: Path, rows: int) -> Iterator[subprocess.Popen[str]]:
    """A run that has written so many rows and now waits, because nobody reads the diff that it prints."""
    out = folder / f"out{''.join(whole.log.suffixes)}"
    arguments = [whole.log, "-o", out, "--quarantine", folder / "bad.jsonl", "--diff", "--worst", 10**6]
    with subprocess.Popen(
        command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pipesize=4096
    ) as process:
        assert process.stdout is not None
        while rows:
            line = process.stdout.readline()
            assert line, "the run is over"
            rows -= " repaired by " in line
        yield process


ENDS = {
    signal.SIGKILL: (-signal.SIGKILL, ""),
    signal.SIGTERM: (143, "tito-audit: terminated; no report was finished\n"),
    signal.SIGINT: (130, "tito-audit: interrupted; no report was finished\n"),
}


@pytest.mark.parametrize(
    ("whole", "number"),
    # In `make test` each kind of log, and each signal, once.
    [*product(KINDS, ENDS)] if DEEP else [*zip(KINDS, ENDS, strict=True)],
    indirect=["whole"],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_run_that_is_ended_while_it_writes_leaves_nothing(
    whole: Undisturbed, tmp_path: Path, number: signal.Signals
) -> None:
    with held_while_writing(whole, tmp_path, 10) as process:
        in_writing = bytes_in_writing(process.pid, tmp_path)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    if sys.platform == "linux":
        assert in_writing > 500_000
    assert left_whole(tmp_path, whole, number) == "nothing"
    assert (process.returncode, err) == ENDS[number]


@pytest.mark.parametrize(
    "old",
    some([{"out.jsonl": b"old", "bad.jsonl": b"old as well"}, {}], 1),
    ids=lambda old: "--force" if old else "new",
)
def test_a_run_that_is_killed_before_any_step_leaves_no_half_file(tmp_path: Path, old: dict[str, bytes]) -> None:
    log = store(tmp_path / "log.jsonl", some(example_rows("nemo_gym")[4:8], 2))
    assert run_here(log, "-o", tmp_path / "out.jsonl", "--quarantine", tmp_path / "bad.jsonl").returncode == 0
    complete = {name: (tmp_path / name).read_bytes() for name in ("out.jsonl", "bad.jsonl")}
    folders = [tmp_path / f"{step:02}" for step in range(1, 60)]
    for folder in folders:
        folder.mkdir()
        for name, data in old.items():
            (folder / name).write_bytes(data)
    places = ["-o", "{}/out.jsonl", "--quarantine", "{}/bad.jsonl", "--force"]
    start = [sys.executable, "-m", "tests.kill", *map(str, folders), "--"]
    done = subprocess.run(
        [*start, *command(log, *places, "--quiet")[3:]], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    codes = [int(code) for code in done.stdout.split()]
    assert codes[:-1] == [-signal.SIGKILL] * (len(codes) - 1)
    assert codes[-1] == 0, "every step was reached, and then the end"
    assert len(codes) > 8
    for code, folder in zip(codes, folders, strict=False):
        left = named(folder)
        assert left.keys() >= old.keys()
        assert all(data in (complete[name], old.get(name)) for name, data in left.items())
        if left.get("out.jsonl") == complete["out.jsonl"]:
            assert left["bad.jsonl"] == complete["bad.jsonl"]
        assert code != 0 or left == complete


# A disk that is full or cannot be written


@pytest.mark.parametrize(
    ("whole", "room"),
    some([*product(KINDS, [64, 1700])], 3),
    indirect=["whole"],
    ids=lambda value: value if isinstance(value, str) else f"{value} KiB",
)
def test_a_full_disk_is_one_line_and_leaves_nothing(whole: Undisturbed, tmp_path: Path, room: int) -> None:
    disk = tmp_path / "disk"
    target = disk / f"out{''.join(whole.log.suffixes)}"
    with mounted(disk, f"size={room}k"):
        done = run_here(whole.log, "-o", target)
        assert contents(tmp_path) == {}
    refused(done, target, "No space left on device", "free some space")
    assert done.stderr.count("\n") == 1
    assert whole.log.read_bytes() == whole.data


def test_a_file_that_grows_past_a_limit_is_one_line_and_leaves_nothing(whole: Undisturbed, tmp_path: Path) -> None:
    target = tmp_path / f"out{''.join(whole.log.suffixes)}"
    with small_disk(tmp_path):
        done = run_here(whole.log, "-o", target)
    refused(done, target, "File too large", "free some space")
    assert contents(tmp_path) == {}
    assert whole.log.read_bytes() == whole.data


@pytest.mark.parametrize("lines", [1, 4], ids=["at its end", "while it is written"])
def test_a_quarantine_on_a_full_disk_leaves_nothing_of_the_output_either(tmp_path: Path, lines: int) -> None:
    log = store(tmp_path / "log.jsonl", example_rows("nemo_gym"))
    log.write_bytes(log.read_bytes() + (b'{"torn": "' + b"x" * 600_000 + b"\n") * lines)
    place = tmp_path / "disk" / "bad.jsonl"
    with mounted(tmp_path / "disk", "size=64k"):
        done = run_here(log, "-o", tmp_path / "out.jsonl", "--quarantine", place)
        assert contents(tmp_path).keys() == {"log.jsonl"}
    refused(done, place, "No space left on device")


def test_an_output_on_a_full_disk_leaves_no_quarantine(tmp_path: Path) -> None:
    log = store(tmp_path / "log.jsonl", example_rows("generic"))
    with mounted(tmp_path / "disk", "size=16k"):
        target = tmp_path / "disk" / "out.jsonl"
        done = run_here(log, "-o", target, "--quarantine", tmp_path / "bad.jsonl")
        assert contents(tmp_path).keys() == {"log.jsonl"}
    refused(done, target, "No space left on device")


@pytest.mark.parametrize("names", [["disk/out.jsonl", "bad.jsonl"], ["out.jsonl", "disk/bad.jsonl"]])
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, names: list[str]) -> None:
    log = store(tmp_path / "log.jsonl", example_rows("generic"))
    out, bad = (tmp_path / name for name in names)
    with mounted(tmp_path / "disk", "ro"):
        done = run_here(log, "-o", out, "--quarantine", bad)
        several = run_here(log, log.parent, "-o", tmp_path / "disk" / "cured")
        assert contents(tmp_path).keys() == {"log.jsonl"}
    refused(done, tmp_path / "disk", "Read-only file system")
    refused(several, tmp_path / "disk" / "cured", "Read-only file system")


# Places that are refused


def placed(tmp_path: Path) -> Path:
    """A folder with a log and all sorts of places around it."""
    log = store(tmp_path / "log.jsonl", example_rows("generic"))
    (tmp_path / "old.jsonl").write_text("old", encoding="utf-8")
    (tmp_path / "folder" / "log.jsonl").mkdir(parents=True)
    (tmp_path / "soft.jsonl").symlink_to(log)
    (tmp_path / "hard.jsonl").hardlink_to(log)
    (tmp_path / "round.jsonl").symlink_to(tmp_path / "round.jsonl")
    return log


@pytest.mark.parametrize(*table(__file__, "a_place_that_cannot_be_is_refused_and_nothing_changes"))
def test_a_place_that_cannot_be_is_refused_and_nothing_changes(tmp_path: Path, arguments: str, says: str) -> None:
    log = placed(tmp_path)
    before = contents(tmp_path)
    words = arguments.replace("LONG", "x" * 300).split()
    places = [word if word[0] in "-/" else str(tmp_path / word) for word in words]
    code, page, err = run_command("repair", log, *places)
    assert code == 2
    assert page == ""
    assert says in " ".join(err.split())
    assert "Traceback" not in err
    assert contents(tmp_path) == before


def test_the_target_of_any_log_is_refused_before_the_first_is_written(tmp_path: Path) -> None:
    for name in ("a", "b"):
        store(tmp_path / f"{name}.jsonl", example_rows("generic"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "b.jsonl").write_text("old", encoding="utf-8")
    before = contents(tmp_path)
    refused(run_here(tmp_path / "a.jsonl", tmp_path / "b.jsonl", "-o", tmp_path / "out"), "out/b.jsonl", "--force")
    assert contents(tmp_path) == before


# The same bytes each time


def test_two_runs_write_the_same_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for suffix in (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"):
        store(logs / f"log{suffix}", example_rows("nemo_gym")[:10], per_group=3)
    folders = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        arguments = [logs, "-o", folder / "out", "--quarantine", folder / "bad.jsonl"]
        # This process has a seed of its own.
        done = run(*arguments, seed=seed) if DEEP or seed == "1" else run_here(*arguments)
        assert done.returncode == 0
        folders.append(contents(folder))
    assert folders[0] == folders[1]
    assert folders[0].keys() == {"bad.jsonl", *(f"out/{name}" for name in contents(logs))}
    assert all(folders[0][f"out/{name}"] != data for name, data in contents(logs).items())


# What is not repaired is not touched


@pytest.mark.parametrize("path", some(FIXTURES, 6), ids=lambda path: path.stem)
def test_a_log_with_nothing_to_cure_is_written_byte_for_byte(tmp_path: Path, path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    for number, data in enumerate((path.read_bytes(), *some(lines, 2), lines[0].rstrip(b"\n"))):
        log = tmp_path / f"{number}.jsonl"
        log.write_bytes(data)
        # Another compression than that of the log, so that the log is not simply copied.
        for out in (tmp_path / f"{number}.out.jsonl", tmp_path / f"{number}.out.jsonl.gz"):
            assert_nothing_cured(log, out)
            written = out.read_bytes()
            assert (gzip.decompress(written) if out.suffix == ".gz" else written) == data


@pytest.mark.parametrize("path", some(FIXTURES, 6), ids=lambda path: path.stem)
def test_rows_that_no_repair_cured_keep_every_byte_beside_those_that_one_did(tmp_path: Path, path: Path) -> None:
    # Each row by itself: the outcome of joined calls is that of several rows.
    settings = Settings(tokenizer=str(TOKENIZER), join=False)
    results = list(repair_rollouts(path, tmp_path / "out.jsonl", settings))
    lines = path.read_bytes().splitlines(keepends=True)
    written = iter((tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True))
    for line, outcome in zip(lines, results, strict=True):
        rows = [next(written) for _ in range(outcome.rows)]
        assert outcome.repaired or rows == [line]
    assert next(written, None) is None


def alone(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that can each be one Parquet file; in `make test` at most two of them."""
    return [[row] for row in some([row for row in rows if fits([row])], 2)]


def assert_same_table(old: pa.Table, new: pa.Table) -> None:
    """Type for type and value for value, null and NaN told apart."""
    assert new.schema.equals(old.schema, check_metadata=True)
    for name in old.column_names:
        assert same_values(old[name], new[name]), name


@pytest.mark.parametrize("path", some(FIXTURES, 6), ids=lambda path: path.stem)
def test_parquet_with_nothing_to_cure_is_written_byte_for_byte(tmp_path: Path, path: Path) -> None:
    rows = example_rows(path.stem)
    for number, group in enumerate((*fitting(rows), *alone(rows))):
        log = store(tmp_path / f"{number}.parquet", group, per_group=2)
        out = tmp_path / f"{number}.out.parquet"
        assert_nothing_cured(log, out)
        assert out.read_bytes() == log.read_bytes()


@pytest.mark.parametrize("path", some(FIXTURES, 6), ids=lambda path: path.stem)
def test_parquet_in_which_another_row_changed_is_the_same_type_for_type(tmp_path: Path, path: Path) -> None:
    rows = example_rows(path.stem)
    for number, group in enumerate((*fitting(rows), *alone(rows))):
        source = store(tmp_path / f"{number}.parquet", group, per_group=2)
        target = tmp_path / f"{number}.out.parquet"
        log = open_log(source)
        with open_output(log, target, overwrite=False) as out:
            for raw in log:
                # A new column in the first row of each group, so that each is written and not copied.
                assert raw.value is not None
                row = {**raw.value, "tito_audit": {"n": 1}} if raw.index % 2 == 0 else raw.value
                out.replace(raw, [row])
            out.finish(log)
        old, new = pq.ParquetFile(source), pq.ParquetFile(target)
        assert_same_table(old.read(), new.read().drop_columns("tito_audit"))
        (*form, chunks, groups), (*new_form, new_chunks, new_groups) = form_of(source), form_of(target)
        assert (new_form, new_groups) == (form, groups)
        assert [group[:-1] for group in new_chunks] == chunks
        assert {group[-1][2] for group in new_chunks} == {"ZSTD"}


# Parquet end to end


def plain(value: Any) -> Any:
    """A value without the fields that are null, which in Parquet are those that are absent."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items() if entry is not None}
    return [plain(entry) for entry in value] if isinstance(value, list) else value


def assert_repaired_alike(folder: Path, rows: Sequence[Row], tokenizer: Path) -> int:
    """How many rows were repaired: in Parquet as in JSONL, and nothing else in the file changed."""
    lines, log = store(folder / "log.jsonl", rows), store(folder / "log.parquet", rows, per_group=3)
    in_jsonl = outcomes(lines, folder / "out.jsonl", tokenizer)
    in_parquet = outcomes(log, folder / "out.parquet", tokenizer)
    assert [(result.cured, result.rows, result.notes) for result in in_parquet] == [
        (result.cured, result.rows, result.notes) for result in in_jsonl
    ]
    repaired = sum(result.repaired for result in in_jsonl)
    old, new = pq.ParquetFile(log), pq.ParquetFile(folder / "out.parquet")
    table, before = new.read(), old.read()
    assert new.num_row_groups == old.num_row_groups
    if repaired:
        added = pa.field("tito_audit", pa.string())
        assert table.schema.equals(before.schema.append(added), check_metadata=True)
    wanted = iter(lines_of(folder / "out.jsonl"))
    at = 0
    for outcome in in_jsonl:
        for _ in range(outcome.rows):
            row = table.slice(at, 1)
            if outcome.repaired:
                (value,) = row.to_pylist()
                assert plain({**value, "tito_audit": json.loads(value["tito_audit"])}) == plain(next(wanted))
            else:
                next(wanted)
                assert_same_table(before.slice(outcome.place.row, 1), row.select(before.column_names))
                assert not repaired or row["tito_audit"].null_count == 1
            at += 1
    assert at == len(table)
    again = outcomes(folder / "out.parquet", folder / "again.parquet", tokenizer)
    assert not any(result.repaired for result in again)
    assert (folder / "again.parquet").read_bytes() == (folder / "out.parquet").read_bytes()
    return repaired


def alike(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows by the columns that they have, and then by types: one Parquet file holds rows of one kind."""
    kinds: dict[frozenset[str], list[Row]] = {}
    for row in rows:
        kinds.setdefault(frozenset(row), []).append(row)
    return [group for kind in kinds.values() for group in fitting(kind)]


@pytest.mark.parametrize("path", some(FAULTY, 2), ids=lambda path: path.stem)
def test_parquet_is_repaired_as_jsonl_is(tmp_path: Path, path: Path) -> None:
    repaired = 0
    for number, rows in enumerate(alike(example_rows(path.stem))):
        (tmp_path / f"{number}").mkdir()
        repaired += assert_repaired_alike(tmp_path / f"{number}", rows, TOKENIZER)
    assert repaired > 0


@pytest.mark.shared
def test_a_log_of_a_real_model_is_repaired_in_parquet_as_in_jsonl(tmp_path: Path) -> None:
    source = SHARED / "rollouts" / "qwen2.5-coder" / "retok.jsonl.gz"
    if not source.is_file():
        pytest.skip("no shared/rollouts beside the checkout")
    rows = lines_of(source)[: examples(8, 20)]
    assert assert_repaired_alike(tmp_path, rows, SHARED / "tokenizers" / "qwen2.5-coder") > 0


# Memory


MEASURED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak_memory(log: Path, out: Path) -> int:
    """MB that a run took at most, measured by a process as small as can be: a child starts with its parent's."""
    start = [sys.executable, "-c", MEASURED, *command(log, "-o", out, "--quiet", "--jobs", 2)]
    done = subprocess.run(start, cwd=ROOT, capture_output=True, text=True, check=True)
    code, used = map(int, done.stdout.split())
    assert code in (0, 1), done.stderr
    return used // (1024 if sys.platform == "linux" else 1 << 20)


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    rows = [{**row, "note": "x" * 600_000} for row in example_rows("nemo_gym")]
    lines = json_lines(rows).splitlines(keepends=True)
    peaks = []
    # Rows that wait for several processes take a fixed share: it is full before 12 MB are read.
    for megabytes in (12, 300 if SLOW else examples(40, 60)):
        log = tmp_path / f"{megabytes}.jsonl"
        with log.open("wb") as out:
            for line in cycle(lines):
                out.write(line)
                if out.tell() > megabytes * 1_000_000:
                    break
        peaks.append(peak_memory(log, tmp_path / "out.jsonl"))
        assert (tmp_path / "out.jsonl").stat().st_size > megabytes * 1_000_000
        (tmp_path / "out.jsonl").unlink()
    print(f"\n{peaks} MB")
    assert max(peaks) < 200
    assert peaks[1] < peaks[0] + 30


# Several logs


def folder_of_logs(folder: Path) -> Path:
    """A folder with three logs of three kinds and files that are none."""
    rows = example_rows("nemo_gym")[:6]
    for name in ("a.jsonl", "deep/er/b.jsonl.gz", "deep/c.parquet"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        store(folder / name, rows)
    for name in ("README.md", "deep/config.json", ".hidden.jsonl", "deep/.git/d.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}", encoding="utf-8")
    return folder


LOGS = {"a.jsonl", "deep/er/b.jsonl.gz", "deep/c.parquet"}


def test_a_folder_is_written_into_a_folder_with_paths_kept(tmp_path: Path) -> None:
    logs = folder_of_logs(tmp_path / "logs")
    before = contents(logs)
    done = run_here(logs, "-o", tmp_path / "cured", "--quarantine", tmp_path / "bad.jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    assert contents(tmp_path / "cured").keys() == LOGS
    assert contents(logs) == before
    rows = {name: [plain(raw.value) for raw in open_log(tmp_path / "cured" / name)] for name in LOGS}
    assert len({len(some) for some in rows.values()}) == 1
    assert rows["a.jsonl"] == rows["deep/er/b.jsonl.gz"]


def test_a_folder_inside_the_logs_is_written_once_and_is_then_a_log_itself(tmp_path: Path) -> None:
    logs = folder_of_logs(tmp_path / "logs")
    before = contents(logs)
    assert run_here(logs, "-o", logs / "cured").returncode == 0
    after = contents(logs)
    assert after.keys() == before.keys() | {f"cured/{name}" for name in LOGS}
    refused(run_here(logs, "-o", logs / "cured", "--force"), "a log is never overwritten")
    refused(run_here(logs, "-o", logs, "--force"), "a log is never overwritten")
    assert contents(logs) == after


def test_logs_that_would_be_written_to_one_file_are_refused(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        store(tmp_path / name / "log.jsonl", example_rows("nemo_rl"))
    before = contents(tmp_path)
    out = tmp_path / "out"
    logs = [tmp_path / name / "log.jsonl" for name in ("x", "y")]
    refused(run_here(*logs, "-o", out), "would both be written")
    refused(run_here(tmp_path / "x", tmp_path / "y", "-o", out), "would both be written")
    refused(run_here(tmp_path, "-o", tmp_path / "x" / "log.jsonl"), "this is a file")
    assert contents(tmp_path) == before


def test_no_log_that_lacks_rows_appears_before_the_quarantine_that_holds_them(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in "abc":
        store(logs / f"{name}.jsonl", example_rows("nemo_gym" if name == "b" else "tito_sample"))
    arguments = RepairSettings(quarantine=str(tmp_path / "bad.jsonl"))
    seen = []
    for outcome in repair_rollouts(logs, tmp_path / "out", Settings(tokenizer=str(TOKENIZER)), arguments):
        seen.append(sorted(named(tmp_path / "out")))
        assert outcome.place.file.startswith(str(logs))
    assert seen[-1] == ["a.jsonl"]
    assert contents(tmp_path / "out").keys() == {"a.jsonl", "b.jsonl", "c.jsonl"}
    assert (tmp_path / "bad.jsonl").is_file()


# The page


def page_of(before: Summary, after: Summary) -> str:
    """The last line of the page of a repair with these counts."""
    page = RepairRun(RowTally(Severity.ERROR), before, after, [], Settings(), RepairSettings(), "out.jsonl")
    out = io.StringIO()
    REPORTS["text"](page, out, ReportOptions())
    return out.getvalue().splitlines()[-1]


def test_rows_that_could_not_be_judged_are_counted_in_the_last_line() -> None:
    errors = {"MSK401": RuleCount(error=1)}
    before = Summary(
        rollouts=40, findings=errors, open_rows=20, open_beside_faults=19, fault_beside="--assume logprobs=+1"
    )
    assert page_of(before, Summary(rollouts=40, open_rows=20)) == (
        "not all fixed: 1 error → 0; 20 rows could not be judged; 19 rows may have the same fault; "
        "nothing in them decides it: state it with --assume logprobs=+1 if it is so"
    )
    alone = Summary(rollouts=40, findings=errors, open_rows=1)
    assert page_of(alone, replace(alone, findings={})) == "fixed: 1 error → 0; 1 row could not be judged"


def test_the_report_counts_the_rows_that_were_forked() -> None:
    log = ROOT / "tests" / "transcripts" / "stored" / "repair" / "two_thoughts.jsonl"
    report = json.loads(run_here(log, "--dry-run", "-f", "json").stdout)
    assert (report["rows"]["forked"], report["rows"]["forked_into"]) == (2, 4)
    assert [report[when]["findings"]["TPL204"]["warning"] for when in ("before", "after")] == [0, 2]
