"""A table in which two columns, or two fields of an object, have the same name is refused by every command."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.command import run

IDS = pa.array([[1, 2, 3]])
COLUMNS = [
    "two of the columns are named 'prompt_ids'",
    [IDS, IDS, IDS],
    ["prompt_ids", "completion_ids", "prompt_ids"],
]
OBJECT = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
LIST = pa.ListArray.from_arrays([0, 1], OBJECT)
MAP = pa.MapArray.from_arrays([0, 1], pa.array(["k"]), OBJECT)
CASES = {
    "columns": COLUMNS,
    "fields": ["two fields of 'x' are named 'a'", [IDS, IDS, OBJECT], ["prompt_ids", "completion_ids", "x"]],
    "fields in a list": [
        "two fields of 'x' are named 'a'",
        [IDS, IDS, LIST],
        ["prompt_ids", "completion_ids", "x"],
    ],
    "fields in a map": ["two fields of 'x' are named 'a'", [IDS, IDS, MAP], ["prompt_ids", "completion_ids", "x"]],
}


def _table(path: Path, table: pa.Table) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
        return path
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("case", CASES)
def test_every_command_refuses_a_table_with_one_name_for_two_values(
    tmp_path: Path, case: str, suffix: str
) -> None:
    problem, arrays, names = CASES[case]
    log = _table(tmp_path / f"log.{suffix}", pa.table(arrays, names=names))
    before = log.read_bytes()
    out = tmp_path / "out.jsonl"
    for words in (
        ["scan", log],
        ["inspect", log],
        ["show", f"{log}:0"],
        ["convert", log, "--to", "calls", "-o", out],
        ["repair", log, "-o", tmp_path / f"repaired.{suffix}"],
    ):
        code, printed, errors = run(*words)
        assert (code, printed) == (2, ""), words
        assert f"{log}: {problem}, and a row can show only one.\nRename or drop one of them." in errors
    assert log.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [log.name]


def test_objects_of_different_columns_share_names(tmp_path: Path) -> None:
    column = pa.array([{"a": 1, "b": {"a": 1}}])
    table = pa.table([IDS, IDS, column, column], names=["prompt_ids", "completion_ids", "a", "b"])
    assert run("scan", _table(tmp_path / "log.parquet", table))[0] in (0, 1)
