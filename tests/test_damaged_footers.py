"""Parquet files whose footers say what no writer says: one message, and never the end of the process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.command import run
from tests.torture.thrift import Typed, read_typed, written
from tests.world import ROOT, TOY

LOG = ROOT / "fixtures" / "formats" / "prime_rl_sample.jsonl"
"""A log with findings that are repaired."""
# Fields of a footer, a node of the schema, a row group, a column chunk and what is said about it.
SCHEMA, NAME, GROUPS, COLUMNS, ABOUT, TYPE, ENCODINGS, PATH, CODEC = 2, 4, 4, 1, 3, 1, 2, 3, 4
# Types of values.
I32, BINARY, LIST = 5, 8, 9


def put(number: int, kind: int, value: Any, column: int = 0) -> Callable[[Typed], None]:
    """A change of what a footer says about a column chunk of its first row group."""

    def change(footer: Typed) -> None:
        chunks = footer[GROUPS][1][1][0][COLUMNS][1][1]
        chunks[column][ABOUT][1][number] = kind, value

    return change


def damaged(path: Path, change: Callable[[Typed], Any]) -> Path:
    """A Parquet file with a changed footer."""
    out = io.BytesIO()
    rows = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), out, compression="zstd")
    data = out.getvalue()
    size = int.from_bytes(data[-8:-4], "little")
    footer, _ = read_typed(data[-8 - size : -8], 0)
    change(footer)
    new = written(footer)
    path.write_bytes(data[: -8 - size] + new + len(new).to_bytes(4, "little") + data[-4:])
    return path


DAMAGE: dict[str, Callable[[Typed], Any]] = {
    "an unknown codec": put(CODEC, I32, 99),
    "an unknown codec in the last column": put(CODEC, I32, 99, column=-1),
    "a codec below zero": put(CODEC, I32, -1),
    "a codec that pyarrow does not have": put(CODEC, I32, 3),
    "another name in the path": put(PATH, LIST, (BINARY, [b"other"])),
    "a path that is no text": put(PATH, LIST, (BINARY, [b"\xff\xfe"])),
    "no path": put(PATH, LIST, (BINARY, [])),
    "an unknown type": put(TYPE, I32, 77),
    "an unknown encoding": put(ENCODINGS, LIST, (I32, [77, -3])),
    "a name that is no text": lambda footer: footer[SCHEMA][1][1][1].update({NAME: (BINARY, b"\xff\xfe")}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_footer_ends_no_process(tmp_path: Path, name: str) -> None:
    log = damaged(tmp_path / "log.parquet", DAMAGE[name])
    before = log.read_bytes()
    for words in (
        ("scan", log, "-t", TOY),
        ("show", log, "-t", TOY),
        ("inspect", log),
        ("repair", log, "-t", TOY, "-o", tmp_path / "out.parquet"),
    ):
        code, out, err = run(*words, "--no-config")
        assert "Traceback" not in err, words
        assert "bug" not in err, words
        assert out or err
        if code == 2:
            assert str(log) in err
    assert log.read_bytes() == before


@pytest.mark.parametrize(
    "name", ["an unknown codec", "an unknown codec in the last column", "another name in the path"]
)
def test_a_file_that_another_one_cannot_be_like_is_not_written(tmp_path: Path, name: str) -> None:
    log, out = damaged(tmp_path / "log.parquet", DAMAGE[name]), tmp_path / "out.parquet"
    code, _, err = run("repair", log, "-t", TOY, "-o", out, "--no-config")
    assert code in (1, 2)
    assert not out.exists(), err
    assert str(log) in err


def test_the_same_file_without_damage_is_written(tmp_path: Path) -> None:
    log, out = damaged(tmp_path / "log.parquet", lambda footer: None), tmp_path / "out.parquet"
    code, _, err = run("repair", log, "-t", TOY, "-o", out, "--no-config")
    assert code in (0, 1)
    assert not err
    assert not pq.read_table(out).equals(pq.read_table(log))
