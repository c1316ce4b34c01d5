"""The gateway's log: whole calls or nothing, one writer, and torn lines that spoil no other."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.command import run
from tests.serving import logged
from tito_audit.errors import SetupError, StorageError
from tito_audit.serve.call_log import CallLog

LINES: list[dict[str, Any]] = [{"choice": 0, "text": "a\nb"}, {"choice": 1, "text": "ü\u2028"}]


def test_a_call_is_one_write_of_all_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, sizes, write = CallLog(tmp_path / "log.jsonl"), [], os.write
    monkeypatch.setattr(os, "write", lambda file, data: (sizes.append(len(data)), write(file, data))[1])
    asyncio.run(log.append(LINES))
    asyncio.run(log.append([{"ids": np.array([1, 2], np.int32), "logprobs": (-0.5, float("nan"))}]))
    log.close()
    assert len(sizes) == 2
    assert sum(sizes) == (tmp_path / "log.jsonl").stat().st_size
    assert logged(log.path) == [*LINES, {"ids": [1, 2], "logprobs": [-0.5, None]}]


def test_what_is_there_stays_and_a_torn_line_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"whole": 1}\n{"torn": [1, 2')
    log = CallLog(path)
    assert log.was_torn
    asyncio.run(log.append(LINES))
    log.close()
    first, torn, *rest = path.read_bytes().splitlines()
    assert (first, torn) == (b'{"whole": 1}', b'{"torn": [1, 2')
    assert [orjson.loads(line) for line in rest] == LINES
    again = CallLog(path)
    assert not again.was_torn
    again.close()


def test_a_scan_names_the_line_that_a_crash_tore(tmp_path: Path) -> None:
    fixture = Path(__file__).resolve().parents[1] / "fixtures" / "formats" / "gateway.jsonl"
    whole = fixture.read_bytes().splitlines(keepends=True)[:3]
    for text, row in ((b"".join([*whole, whole[0][:500]]), 3), (whole[0] + whole[0][:500] + b"\n" + whole[2], 1)):
        path = tmp_path / "log.jsonl"
        path.write_bytes(text)
        code, out, _ = run("scan", path, "--report", "json")
        (finding,) = [entry for entry in orjson.loads(out)["findings"] if entry["code"] == "REC001"]
        assert code == 1
        assert finding["row"] == row


def refuse(*_: Any) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("takes", "stays"), [(0, False), (7, False), (7, True)], ids=["nothing", "a part", "a part that stays"]
)
def test_a_full_disk_leaves_no_half_of_a_line_or_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: int, stays: bool
) -> None:
    log, write = CallLog(tmp_path / "log.jsonl"), os.write
    asyncio.run(log.append(LINES))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, data: write(file, data[:takes]) if takes else refuse())
        if stays:
            patched.setattr(os, "ftruncate", refuse)
        with pytest.raises(StorageError, match=r"log\.jsonl: it cannot be written"):
            asyncio.run(log.append(LINES))
    size = len(log.path.read_bytes().splitlines())
    assert size == len(LINES) + stays
    asyncio.run(log.append(LINES))
    log.close()
    lines = log.path.read_bytes().splitlines()
    assert [len(line) for line in lines[2:size]] == [7] * stays
    assert [orjson.loads(line) for line in lines[:2] + lines[size:]] == LINES * 2


def test_with_sync_each_line_reaches_the_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, synced = CallLog(tmp_path / "log.jsonl", sync=True), []
    monkeypatch.setattr(os, "fdatasync", lambda file: synced.append(os.fstat(file).st_size))
    asyncio.run(log.append(LINES))
    assert synced == [log.path.stat().st_size]

    def fails(file: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fails)
    with pytest.raises(StorageError, match="Input/output error"):
        asyncio.run(log.append(LINES))
    log.close()


def test_a_log_has_one_writer_and_is_lines(tmp_path: Path) -> None:
    log = CallLog(tmp_path / "log.jsonl")
    with pytest.raises(SetupError, match="another gateway writes to it"):
        CallLog(tmp_path / "log.jsonl")
    log.close()
    CallLog(tmp_path / "log.jsonl").close()
    with pytest.raises(SetupError, match="JSON lines"):
        CallLog(tmp_path / "log.jsonl.gz")
    with pytest.raises(SetupError, match="cannot be written"):
        CallLog(tmp_path / "nowhere" / "log.jsonl")
