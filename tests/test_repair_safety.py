"""`tito-audit repair` through the real command: whatever happens to a run, the log stays and no half file appears.

`TITO_AUDIT_KILLS=50` kills each kind of run that often instead of 5 times (a few minutes, `-s` shows when);
`TITO_AUDIT_SLOW=1` measures the memory of a run over a log of 300 MB as well (ten minutes).
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.test_parquet_output import form_of, same_values
from tito_audit.config import RepairSettings, Settings
from tito_audit.record.outcome import Outcome
from tito_audit.rewrite import repair_rollouts
from tito_audit.storage import open_log, open_output

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
TOKENIZER = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
FIXTURES = sorted((ROOT / "fixtures" / "formats").glob("*.jsonl"))
FAULTY = [path for path in FIXTURES if path.stem in {"generic", "nemo_gym", "atropos_group", "nemo_rl"}]
KILLS = int(os.environ.get("TITO_AUDIT_KILLS", "5"))
SLOW = bool(os.environ.get("TITO_AUDIT_SLOW"))
KINDS = (".jsonl", ".jsonl.gz", ".parquet")
REPEATED = 8
"""Copies of the example rows in a log, so that a run takes a second or two."""
PAD = 12_000
"""Bytes that no compression makes smaller in each row, so that a run writes while it goes on."""

Row = dict[str, Any]


# Logs


@functools.cache
def example_rows(name: str) -> tuple[Row, ...]:
    text = (ROOT / "fixtures" / "formats" / f"{name}.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines())


@functools.cache
def padded_rows(times: int = REPEATED) -> tuple[Row, ...]:
    """Rows of `generic.jsonl`, several times, some of them faulty, each with a text of its own."""
    noise = random.Random(7)
    return tuple(
        {**row, "note": base64.b64encode(noise.randbytes(PAD * 3 // 4)).decode()}
        for _ in range(times)
        for row in example_rows("generic")
    )


def json_lines(rows: Sequence[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")


def table_of_rows(rows: Sequence[Row]) -> pa.Table:
    """One column for each name that any row has; ArrowInvalid where the rows disagree on a type."""
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
    return table.replace_schema_metadata({"huggingface": '{"info": {}}', "own": "x"})


def fitting(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows in few groups, each of which can be one Parquet file."""
    groups: list[list[Row]] = []
    for row in rows:
        for group in groups:
            try:
                table_of_rows([*group, row])
            except pa.ArrowInvalid:
                continue
            group.append(row)
            break
        else:
            groups.append([row])
    return groups


def store(path: Path, rows: Sequence[Row], per_group: int = 7) -> Path:
    """A log of the kind that its suffix names."""
    if path.suffix == ".parquet":
        pq.write_table(table_of_rows(rows), path, row_group_size=per_group, compression="zstd")
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(json_lines(rows), 1, mtime=0))
    else:
        path.write_bytes(json_lines(rows))
    return path


def lines_of(path: Path) -> list[Row]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in data.splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its name; a half file would be one of them."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Runs


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tito_audit", "repair", *map(str, arguments), "-t", str(TOKENIZER)]


def run(*arguments: object, seed: str = "0", limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """A run to its end; `limit` is how many bytes a file may have."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    env = {**os.environ, "PYTHONHASHSEED": seed, "COLUMNS": "100"}
    return subprocess.run(
        command(*arguments), cwd=ROOT, env=env, capture_output=True, text=True, preexec_fn=limited, check=False
    )


def outcomes(log: Path, out: Path | None, tokenizer: Path = TOKENIZER, **more: Any) -> list[Outcome]:
    """A run within this process, of all repairs that are safe."""
    how = {name: more.pop(name) for name in ("strategies", "quarantine", "force") if name in more}
    return list(repair_rollouts(log, out, Settings(tokenizer=str(tokenizer), **more), RepairSettings(**how)))


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
    log = store(folder / f"log{suffix}", padded_rows(), per_group=30)
    data = log.read_bytes()
    started = time.monotonic()
    done = run(log, "-o", folder / f"out{suffix}", "--quarantine", folder / "bad.jsonl")
    seconds = time.monotonic() - started
    assert (done.returncode, done.stderr) == (0, "")
    made = contents(folder)
    assert len(made[f"out{suffix}"]) > 1_200_000
    assert made["bad.jsonl"].count(b"\n") == 2 * REPEATED
    return Undisturbed(log, data, made[f"out{suffix}"], made["bad.jsonl"], seconds)


@pytest.fixture(params=KINDS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(request.param, tmp_path_factory.getbasetemp() / f"undisturbed{request.param}")


# A run that is killed


def left_whole(folder: Path, whole: Undisturbed) -> str:
    """What a killed run left, in a word; nothing that is there may be half, and no rows may be lost."""
    assert whole.log.read_bytes() == whole.data
    left = contents(folder)
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
            if str(handle.readlink()).startswith(str(folder)):
                size += handle.stat().st_size
    except OSError:
        return size
    return size


def test_a_run_that_is_killed_at_any_moment_leaves_the_log_and_no_half_file(
    whole: Undisturbed, tmp_path: Path
) -> None:
    suffix = "".join(whole.log.suffixes)
    said = []
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
        said.append(f"{moment:.2f} s: {size:,} bytes in writing, {left_whole(folder, whole)} left")
    print(f"\n{suffix}, {whole.seconds:.2f} s undisturbed", *said, sep="\n  ")


@contextmanager
def held_while_writing(whole: Undisturbed, folder: Path, rows: int) -> Iterator[subprocess.Popen[str]]:
    """A run that has written so many rows and now waits, because nobody reads the diff that it prints."""
    out = folder / f"out{''.join(whole.log.suffixes)}"
    arguments = [whole.log, "-o", out, "--quarantine", folder / "bad.jsonl", "--diff", "--worst", 10**6]
    with subprocess.Popen(
        command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while rows:
            line = process.stdout.readline()
            assert line, "the run is over"
            rows -= " repaired by " in line
        yield process


ENDS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: -signal.SIGTERM, signal.SIGINT: 130}


@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
@pytest.mark.parametrize("rows", [1, 20])
def test_a_run_that_is_ended_while_it_writes_leaves_nothing(
    whole: Undisturbed, tmp_path: Path, rows: int, number: signal.Signals
) -> None:
    with held_while_writing(whole, tmp_path, rows) as process:
        in_writing = bytes_in_writing(process.pid, tmp_path)
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
    if sys.platform == "linux" and rows == 20:
        assert in_writing > 200_000
    assert left_whole(tmp_path, whole) == "nothing"
    assert process.returncode == ENDS[number]
    assert err == ("tito-audit: interrupted; no report was finished\n" if number == signal.SIGINT else "")


def killed_at(step: int, folder: Path, *arguments: object) -> int:
    """How a run ended that was killed before the step of that number that touches the folder."""
    start = [sys.executable, str(ROOT / "tests" / "kill.py"), str(folder), str(step)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*start, *command(*arguments)[3:]], cwd=folder.parent, env=env, capture_output=True)
    return done.returncode


@pytest.mark.parametrize("old", [{}, {"out.jsonl": b"old", "bad.jsonl": b"old as well"}], ids=["new", "--force"])
def test_a_run_that_is_killed_before_any_step_leaves_no_half_file(tmp_path: Path, old: dict[str, bytes]) -> None:
    log = store(tmp_path / "log.jsonl", example_rows("generic"))
    assert run(log, "-o", tmp_path / "out.jsonl", "--quarantine", tmp_path / "bad.jsonl").returncode == 0
    complete = {name: (tmp_path / name).read_bytes() for name in ("out.jsonl", "bad.jsonl")}
    for step in range(1, 60):
        folder = tmp_path / f"{step}"
        folder.mkdir()
        for name, data in old.items():
            (folder / name).write_bytes(data)
        places = ["-o", folder / "out.jsonl", "--quarantine", folder / "bad.jsonl", "--force"]
        code = killed_at(step, folder, log, *places)
        left = contents(folder)
        # Only a file that replaces another has two names for a moment, and it is whole then.
        parts = [left.pop(name) for name in list(left) if name.endswith(".part")]
        assert len(parts) <= (1 if old else 0), f"step {step}"
        assert all(part in complete.values() for part in parts)
        assert all(data in (complete[name], old.get(name)) for name, data in left.items())
        assert left.get("out.jsonl") != complete["out.jsonl"] or left["bad.jsonl"] == complete["bad.jsonl"]
        assert left.keys() >= old.keys()
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert left == complete
    assert step > 8


# A disk that is full or cannot be written


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A file system of its own in the folder; skipped where mounting is not permitted."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting is not permitted")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("room", [64, 1200], ids=lambda room: f"{room} KiB")
def test_a_full_disk_is_one_line_and_leaves_nothing(whole: Undisturbed, tmp_path: Path, room: int) -> None:
    disk = tmp_path / "disk"
    target = disk / f"out{''.join(whole.log.suffixes)}"
    with mounted(disk, f"size={room}k"):
        done = run(whole.log, "-o", target)
        assert contents(tmp_path) == {}
    refused(done, target, "No space left on device", "free some space")
    assert done.stderr.count("\n") == 1
    assert whole.log.read_bytes() == whole.data


def test_a_file_that_grows_past_a_limit_is_one_line_and_leaves_nothing(whole: Undisturbed, tmp_path: Path) -> None:
    target = tmp_path / f"out{''.join(whole.log.suffixes)}"
    refused(run(whole.log, "-o", target, limit=1 << 16), target, "File too large", "free some space")
    assert contents(tmp_path) == {}
    assert whole.log.read_bytes() == whole.data


@pytest.mark.parametrize(
    "rows", [padded_rows(), example_rows("generic")], ids=["while it is written", "at its end"]
)
def test_a_quarantine_on_a_full_disk_leaves_nothing_of_the_output_either(
    tmp_path: Path, rows: Sequence[Row]
) -> None:
    log = store(tmp_path / "log.jsonl", rows)
    place = tmp_path / "disk" / "bad.jsonl"
    with mounted(tmp_path / "disk", "size=4k"):
        done = run(log, "-o", tmp_path / "out.jsonl", "--quarantine", place)
        assert contents(tmp_path).keys() == {"log.jsonl"}
    refused(done, place, "No space left on device")


def test_an_output_on_a_full_disk_leaves_no_quarantine(tmp_path: Path) -> None:
    log = store(tmp_path / "log.jsonl", example_rows("generic"))
    with mounted(tmp_path / "disk", "size=8k"):
        target = tmp_path / "disk" / "out.jsonl"
        done = run(log, "-o", target, "--quarantine", tmp_path / "bad.jsonl")
        assert contents(tmp_path).keys() == {"log.jsonl"}
    refused(done, target, "No space left on device")


@pytest.mark.parametrize("names", [["disk/out.jsonl", "bad.jsonl"], ["out.jsonl", "disk/bad.jsonl"]])
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, names: list[str]) -> None:
    log = store(tmp_path / "log.jsonl", example_rows("generic"))
    out, bad = (tmp_path / name for name in names)
    with mounted(tmp_path / "disk", "ro"):
        done = run(log, "-o", out, "--quarantine", bad)
        several = run(log, log.parent, "-o", tmp_path / "disk" / "cured")
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-o", "old.jsonl"], "the file exists and is not replaced unasked"),
        (["-o", "out.jsonl", "--quarantine", "old.jsonl"], "the file exists and is not replaced unasked"),
        (["-o", "log.jsonl", "--force"], "a log is never written"),
        (["-o", "soft.jsonl", "--force"], "a log is never written"),
        (["-o", "hard.jsonl", "--force"], "the input is never written"),
        (["-o", "out.jsonl", "--quarantine", "out.jsonl"], "name another file"),
        (["-o", "out.jsonl", "--quarantine", "folder/../out.jsonl"], "name another file"),
        (["-o", "out.jsonl", "--quarantine", "soft.jsonl", "--force"], "name another file"),
        (["-o", "out.jsonl", "--quarantine", "folder"], "this is a folder"),
        (["-o", "folder"], "this is a folder"),
        (["-o", "absent/out.jsonl"], "there is no folder"),
        (["-o", "out.jsonl", "--quarantine", "absent/bad.jsonl"], "there is no folder"),
        (["-o", "old.jsonl/out.jsonl"], "old.jsonl"),
        (["-o", "out.parquet"], "out.parquet"),
        (["-o", f"{'x' * 300}.jsonl"], "too long"),
        (["-o", "out.jsonl", "--quarantine", f"{'x' * 300}.jsonl"], "too long"),
        (["-o", "round.jsonl"], "round.jsonl"),
        (["-o", "/dev/full"], "no regular file"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_place_that_cannot_be_is_refused_and_nothing_changes(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    log = placed(tmp_path)
    before = contents(tmp_path)
    done = run(log, *(one if one[0] in "-/" else tmp_path / one for one in arguments))
    refused(done, says)
    assert contents(tmp_path) == before


def test_the_target_of_any_log_is_refused_before_the_first_is_written(tmp_path: Path) -> None:
    for name in ("a", "b"):
        store(tmp_path / f"{name}.jsonl", example_rows("generic"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "b.jsonl").write_text("old", encoding="utf-8")
    before = contents(tmp_path)
    refused(run(tmp_path / "a.jsonl", tmp_path / "b.jsonl", "-o", tmp_path / "out"), "out/b.jsonl", "--force")
    assert contents(tmp_path) == before
