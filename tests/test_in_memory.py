"""Rows in memory: every kind gives what the same rows give in a file, and none is changed."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests import world
from tests.tiers import DEEP, crossed, some
from tests.world import BROKEN, CLEAN, FORMATS, ROOT
from tito_audit import (
    GateSettings,
    RepairSettings,
    Scan,
    Settings,
    SetupError,
    StorageError,
    gate_rollouts,
    read_rollouts,
    repair_rollouts,
    scan_rollouts,
)
from tito_audit.settings.model import Override
from tito_audit.storage import RawRow, open_log, passed_logs
from tito_audit.storage.chunks import ChunkReader, chunks_of

LOGS = sorted(path.name for path in FORMATS.glob("*.json*"))
TOY = Settings(tokenizer=str(world.TOY))
NAME = "<rows>"
SHARED = ROOT.parent / "shared"


def rows_of(name: str) -> list[dict[str, Any]]:
    return [dict(raw.value) for raw in open_log(FORMATS / name) if raw.value is not None]


def table_of(rows: list[dict[str, Any]]) -> pa.Table | None:
    """The rows as a table; None where no Parquet file can hold them."""
    try:
        table = pa.Table.from_pylist(rows)
        parquet.write_table(table, pa.BufferOutputStream())
    except (pa.ArrowException, TypeError):
        return None
    return table


def raw_rows(logs: Any) -> list[RawRow]:
    """The rows that are read of what is passed in place of paths."""
    return list(open_log(passed_logs(logs).names[0]))  # type: ignore[arg-type]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def seen(scan: Scan, file: object) -> tuple[list[Any], dict[str, Any]]:
    """Everything that a scan says, with one name for whatever was scanned."""
    results = [
        (
            result.place.row,
            result.place.item,
            result.rollout.format if result.rollout is not None else None,
            [
                (f.code, f.severity, f.place.row, f.place.item, f.fingerprint, f.hit, f.headline)
                for f in result.findings
            ],
            result.skips,
            result.counts,
            result.unread,
        )
        for result in scan
    ]
    summary = scan.summary
    notices = [line.replace(str(file), NAME) for line in summary.notices if "not read" not in line]
    return results, {
        "notices": notices,
        "taken": list(summary.taken.values()),
        "unread": list(summary.unread.values()),
        **{name: getattr(summary, name) for name in ("rollouts", "turns", "tokens", "generated_tokens")},
        **{name: getattr(summary, name) for name in ("rows_unreadable", "findings", "skipped")},
        "joined": [line.replace(str(file), NAME) for line in summary.joined],
    }


def scanned(logs: Any, settings: Settings = TOY, file: object = NAME, chunk: int | None = None) -> Any:
    scan = scan_rollouts(logs, settings)
    scan.chunk_bytes = chunk
    return seen(scan, file)


def as_pandas(table: pa.Table) -> Any:
    return table.to_pandas()


def as_polars(table: pa.Table) -> Any:
    return pytest.importorskip("polars").from_arrow(table)


def as_dataset(table: pa.Table) -> Any:
    return pytest.importorskip("datasets").Dataset(table)


TABLES: dict[str, Callable[[pa.Table], Any]] = {
    "Table": lambda table: table,
    "RecordBatch": lambda table: table.combine_chunks().to_batches()[0],
    "RecordBatchReader": lambda table: table.to_reader(),
    "batches": lambda table: iter(table.to_batches(max_chunksize=3)),
    "pandas": as_pandas,
    "polars": as_polars,
    "Dataset": as_dataset,
    "IterableDataset": lambda table: as_dataset(table).to_iterable_dataset(),
}
OBJECTS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "list": lambda rows: rows,
    "tuple": tuple,
    "iterator": iter,
    "pandas": lambda rows: pytest.importorskip("pandas").DataFrame(rows),
    "IterableDataset": lambda rows: pytest.importorskip("datasets").IterableDataset.from_generator(
        lambda: iter(rows)
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`datasets` keeps its files out of the home folder."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


# The same findings


@pytest.mark.parametrize("name", some(LOGS, 3))
def test_objects_give_what_the_same_lines_give(name: str, tmp_path: Path) -> None:
    rows = rows_of(name)
    log = lines(tmp_path / "log.jsonl", rows)
    wanted = scanned(log, file=log)
    for kind, make in OBJECTS.items():
        if kind != "IterableDataset" or DEEP:
            assert scanned(make(rows)) == wanted, kind


@pytest.mark.parametrize("name", some([name for name in LOGS if table_of(rows_of(name)) is not None], 2))
def test_tables_give_what_the_same_parquet_file_gives(name: str, tmp_path: Path) -> None:
    table = table_of(rows_of(name))
    log = tmp_path / "log.parquet"
    parquet.write_table(table, log)
    wanted = scanned(log, file=log)
    for kind, make in TABLES.items():
        assert scanned(make(table)) == wanted, kind


@pytest.mark.parametrize("log", sorted(FORMATS.glob("*.parquet")), ids=lambda log: log.stem)
def test_a_parquet_file_read_by_any_package_gives_what_it_gives_itself(log: Path) -> None:
    wanted = scanned(log, file=log)
    table = parquet.read_table(log)
    for kind, make in TABLES.items():
        if "Dataset" in kind and any(pa.types.is_map(field.type) for field in table.schema):
            continue  # it has no maps
        assert scanned(make(table)) == wanted, kind


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="the real rollouts are not beside the checkout")
@pytest.mark.parametrize("model", some(["smollm2", "qwen2.5-coder", "gemma-3"], 1))
def test_real_rollouts_give_the_same_in_memory(model: str, tmp_path: Path) -> None:
    settings = Settings(tokenizer=str(SHARED / "tokenizers" / model), limit=None if DEEP else 12)
    for log in sorted((SHARED / "rollouts" / model).glob("*.jsonl.gz")):
        rows = [dict(raw.value) for raw in open_log(log) if raw.value is not None]
        assert scanned(rows, settings) == scanned(log, settings, log)
        table = table_of(rows)
        if table is not None:
            file = tmp_path / "log.parquet"
            parquet.write_table(table, file)
            wanted = scanned(file, settings, file)
            assert scanned(table, settings) == scanned(as_pandas(table), settings) == wanted


@pytest.mark.parametrize("kind", ["list", "Table"])
def test_two_processes_find_the_same(kind: str) -> None:
    rows = rows_of("nemo_gym_tokens.jsonl") * 3 + [[1]]  # type: ignore[list-item]
    logs: Any = rows if kind == "list" else table_of(rows[:-1])
    for settings in some((TOY, replace(TOY, sample=0.5), replace(TOY, limit=7)), 2):
        alone = scanned(logs, settings)
        assert scanned(logs, replace(settings, jobs=2), chunk=4000) == alone


def test_two_processes_repair_the_same() -> None:
    runs = []
    for jobs in (1, 2):
        run = repair_rollouts(rows_of("generic.jsonl"), None, replace(TOY, jobs=jobs))
        run.batch_bytes = None if jobs == 1 else 2000
        list(run)
        runs.append((run.repaired, run.before.findings, run.after.findings))
    assert runs[0] == runs[1]


def printed(code: str) -> tuple[str, str]:
    """What a process of its own prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    return done.stdout, done.stderr


def test_processes_never_wait_for_the_threads_of_polars() -> None:
    pytest.importorskip("polars")
    code = (
        "import polars, tito_audit as t\n"
        f"frame = polars.DataFrame([{CLEAN!r}] * 20)\n"
        "frame.to_arrow()  # starts the threads, which forked processes lack\n"
        f"settings = t.Settings(tokenizer={TOY.tokenizer!r}, jobs=2)\n"
        "scan = t.scan_rollouts(frame, settings)\n"
        "scan.chunk_bytes = 100\n"
        "run = t.repair_rollouts(frame, None, settings)\n"
        "run.batch_bytes = 100\n"
        "print(sum(not one.of_log for one in scan), len(run.repaired))\n"
    )
    assert printed(code) == ("20 20\n", "")


def test_chunks_hold_each_row_once_however_large_they_are() -> None:
    rows = rows_of("generic.jsonl")
    frame = OBJECTS["pandas"](rows)
    for logs in (rows, frame, as_polars(table_of(rows_of("tito_call.jsonl")))):  # type: ignore[arg-type]
        path = passed_logs(logs).names[0]
        whole = [(raw.index, repr(raw.value)) for raw in open_log(path)]  # type: ignore[arg-type]
        assert len(whole) == open_log(path).count() == len(logs)  # type: ignore[arg-type]
        for size in (1, 3000, 1 << 30):
            numbered, first = [], 0
            for chunk in chunks_of(open_log(path), size):  # type: ignore[arg-type]
                reading = ChunkReader(chunk)
                numbered += [(first + raw.index, repr(raw.value)) for raw in reading]
                first += reading.size
            assert numbered == whole


# What rows may hold


def test_a_row_shares_its_plain_values_with_what_is_read() -> None:
    rows = [{"token_ids": list(range(9)), "text": "a"}, {"n": {"ids": (1, 2)}}]
    first, second = raw_rows(rows)
    assert first.value["token_ids"] is rows[0]["token_ids"]
    assert second.value == {"n": {"ids": [1, 2]}}


@pytest.mark.parametrize("of", ["numpy", "torch", "bfloat16", "tuple"])
def test_arrays_and_tensors_are_read_as_lists_of_numbers(of: str) -> None:
    def container(values: list[float]) -> Any:
        if of == "tuple":
            return tuple(values)
        if of == "numpy":
            return np.array(values)
        torch = pytest.importorskip("torch")
        return torch.tensor(values, dtype=torch.bfloat16 if of == "bfloat16" and 0.5 in values else None)

    plain = [CLEAN, BROKEN]
    rows = [{name: container(values) for name, values in row.items()} for row in plain]  # type: ignore[arg-type]
    assert scanned(rows, Settings()) == scanned(plain, Settings())
    run = repair_rollouts(rows, None, Settings())
    assert run.repaired[0] is rows[0]
    new = run.repaired[1]["loss_mask"]
    assert type(new) is type(rows[1]["loss_mask"])
    assert (
        list(map(float, new)) == repair_rollouts(plain, None, Settings()).repaired[1]["loss_mask"] == [0, 0, 0, 1]
    )
    assert list(map(float, rows[1]["loss_mask"])) == [0, 0, 1, 1]


def test_values_of_other_types_are_read_as_a_log_would_hold_them() -> None:
    import datetime
    import decimal
    import enum
    import uuid

    class Role(enum.StrEnum):
        USER = "user"

    values: dict[Any, tuple[Any, Any]] = {
        "when": (datetime.datetime(2025, 1, 2), "2025-01-02 00:00:00"),
        "cost": (decimal.Decimal("0.5"), 0.5),
        "id": (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        "role": (Role.USER, "user"),
        "file": (Path("a/b"), "a/b"),
        "image": (b"\x89", b"\x89"),
        "tags": ({"a"}, ["a"]),
        "count": (np.int64(3), 3),
        "deep": (np.array([{"x": np.float32(0.5)}], object), [{"x": 0.5}]),
        "grid": (np.zeros((2, 2), int), [[0, 0], [0, 0]]),
        "wide": (np.longdouble(1.5), 1.5),
        "buffer": (memoryview(np.arange(3)), [0, 1, 2]),
        "raw": (memoryview(b"\x01"), b"\x01"),
        7: (None, None),
    }
    (raw,) = raw_rows([{**CLEAN, **{name: given for name, (given, _) in values.items()}}])
    assert plain(raw.value) == {**CLEAN, **{str(name): shown for name, (_, shown) in values.items()}}
    for value in (np.array([1j]), np.clongdouble(1)):
        assert "holds numbers of complex" in str(raw_rows([{"x": value}])[0].error)


def test_a_value_that_no_log_can_hold_makes_its_row_unreadable_and_no_other() -> None:
    rows = [CLEAN, {**CLEAN, "env": object()}, None, CLEAN]
    scan = scan_rollouts(rows, Settings())
    messages = {f.place.row: f.hit.message for result in scan for f in result.findings if f.code == "REC001"}
    assert messages.keys() == {1, 2}
    assert "column 'env' holds a value of type builtins.object" in messages[1]
    assert messages[2].startswith("the row is null")
    assert scan.summary.rollouts == 2


def test_a_tensor_that_is_no_array_makes_its_row_unreadable_and_no_other() -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.eye(2).to_sparse(), torch.ones(2, device="meta")]
    rows = [{**CLEAN, "state": tensor} for tensor in tensors]
    scan = scan_rollouts([*rows, CLEAN], Settings())
    messages = {f.place.row: f.hit.message for result in scan for f in result.findings if f.code == "REC001"}
    assert messages.keys() == {0, 1}
    assert all("column 'state' holds a tensor that is not an array (" in line for line in messages.values())
    assert repair_rollouts([*rows, BROKEN], None, Settings()).repaired[0] is rows[0]


@pytest.mark.parametrize("of", ["deque", "a sequence without slices"])
def test_any_sequence_of_objects_is_rows(of: str) -> None:
    rows: Any = deque([CLEAN, BROKEN]) if of == "deque" else Unsliced([CLEAN, BROKEN])
    assert scanned(rows, Settings()) == scanned([CLEAN, BROKEN], Settings())
    assert [row["loss_mask"] for row in repair_rollouts(rows, None, Settings()).repaired] == [
        [0, 0, 1, 1],
        [0, 0, 0, 1],
    ]


class Unsliced(Sequence[Any]):
    """A sequence of which only single entries can be had."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            raise TypeError("no slices")
        return self.values[index]


def test_a_frame_of_python_objects_holds_columns_of_several_types() -> None:
    pandas = pytest.importorskip("pandas")
    rows = [{**CLEAN, "mixed": "a"}, {**BROKEN, "mixed": [1]}, {**CLEAN, "mixed": {"b": None}, "step": 3}, CLEAN]
    frame = pandas.DataFrame(rows, index=[7, 7, 9, 1])
    read = [raw.value for raw in raw_rows(frame)]
    assert read == rows
    assert scanned(frame, Settings()) == scanned(rows, Settings())
    repaired = repair_rollouts(frame, None, Settings()).repaired
    assert repaired.index.tolist() == [7, 7, 9, 1]
    assert repaired["mixed"].tolist()[:3] == ["a", [1], {"b": None}]


def test_a_polars_column_of_a_type_that_arrow_does_not_have_is_refused_by_name() -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame([CLEAN, BROKEN])
    columns = {
        "Object": polars.Series([{1}, "x"], dtype=polars.Object),
        "Int128": polars.Series([1, 2**100], dtype=polars.Int128),
        "List(Array(Int128, shape=(1,)))": polars.Series(
            [[[1]], [[2**100]]], dtype=polars.List(polars.Array(polars.Int128, 1))
        ),
    }
    for kind, column in columns.items():
        message = f"the column 'extra' has the type {kind}, which Arrow does not have"
        with pytest.raises(SetupError, match=re.escape(message)):
            scan_rollouts(frame.with_columns(extra=column), Settings())


def test_whole_numbers_stay_whole_where_a_frame_lacks_some() -> None:
    pandas = pytest.importorskip("pandas")
    for more in ({}, {"turn": {"id": 2}}):
        frame = pandas.DataFrame([{"text": "a", "step": 3, **more}, {"text": "b", "part": 0.5}])
        rows = [raw.value or {} for raw in raw_rows(frame)]
        assert (type(rows[0]["step"]), rows[1].get("step"), rows[1]["part"]) == (int, None, 0.5)


def test_a_value_that_does_not_fit_the_type_of_a_column_is_one_clear_line() -> None:
    pandas = pytest.importorskip("pandas")
    from tito_audit.storage import MemoryOutput

    frame = pandas.DataFrame([{"messages": [], "step": 3}])
    path = passed_logs(frame).names[0]
    log = open_log(path)  # type: ignore[arg-type]
    output = MemoryOutput(path, (), None, stack=ExitStack(), overwrite=False)  # type: ignore[arg-type]
    output.replace(next(iter(log)), [{"messages": [], "step": "three"}])
    with pytest.raises(StorageError, match="column 'step': a repaired value does not fit its type int64"):
        output.finish(log)


def test_a_frame_with_columns_of_several_types_is_read_and_repaired() -> None:
    pandas = pytest.importorskip("pandas")
    arrays = [{name: np.array(values) for name, values in row.items()} for row in (CLEAN, BROKEN)]
    frame = pandas.DataFrame([{**arrays[0], "mixed": "a"}, {**arrays[1], "mixed": 2**70}])
    repaired = repair_rollouts(frame, None, Settings()).repaired
    assert [mask.tolist() for mask in repaired["loss_mask"]] == [[0, 0, 1, 1], [0, 0, 0, 1]]
    assert repaired["mixed"].tolist() == ["a", 2**70]


# Settings


def test_settings_apply_as_to_a_file(tmp_path: Path) -> None:
    rows = [{"ids": row["token_ids"], "mask": row["loss_mask"], "lp": row["logprobs"]} for row in (CLEAN, BROKEN)]
    own = Settings(columns={"token_ids": "ids", "loss_mask": "mask", "logprobs": "lp"})
    assert [f.code for r in scan_rollouts(rows, own) for f in r.findings] == ["LPR504"]
    nested = [{"run": 1, "data": {"rollouts": [CLEAN, BROKEN]}}, {"run": 2, "data": {"rollouts": [BROKEN]}}]
    inside = Settings(rows_at="data.rollouts")
    assert [r.place.row for r in scan_rollouts(nested, inside) if r.findings] == [1, 2]
    for jobs in (1, 2):
        run = repair_rollouts(nested, None, replace(inside, jobs=jobs))
        run.batch_bytes = 1 if jobs == 2 else None
        assert run.repaired[1]["data"]["rollouts"][0]["loss_mask"] == [0, 0, 0, 1]
        assert run.repaired[1]["run"] == 2
    assert [r.place.row for r in scan_rollouts([CLEAN, BROKEN, BROKEN], Settings(row=2))] == [2]
    other = Settings(overrides=(Override(("/**/eval",), {"fail_on": "never"}),))
    gated = gate_rollouts({"train": [CLEAN], "eval": [BROKEN]}, other)
    assert [f.place.file for r in gated for f in r.findings] == ["eval"]
    assert not gated.summary.gate.failed


def test_messages_of_a_file_are_joined_to_rows_in_memory(tmp_path: Path) -> None:
    rows = [row for row in rows_of("nemo_gym_tokens.jsonl") if "_ng_rollout_id" in json.dumps(row)]
    log = lines(tmp_path / "log.jsonl", rows)
    settings = replace(TOY, messages=str(FORMATS / "nemo_gym.jsonl"))
    assert scanned(rows, settings) == scanned(log, settings, log)


def test_several_logs_have_names() -> None:
    def places(logs: Any) -> list[str]:
        return [str(result.place) for result in scan_rollouts(logs, Settings()) if not result.of_log]

    table = pa.Table.from_pylist([CLEAN])
    assert places({"a.jsonl": [CLEAN, BROKEN], "b": table}) == ["a.jsonl:0", "a.jsonl:1", "b:0"]
    assert places([table, table]) == ["<rows 0>:0", "<rows 1>:0"]
    assert places([CLEAN]) == ["<rows>:0"]
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict(train=as_dataset(table), test=as_dataset(table))
    assert places(splits) == ["train:0", "test:0"]
    repaired = repair_rollouts(splits, None, Settings()).repaired
    assert type(repaired) is datasets.DatasetDict
    assert list(repaired) == ["train", "test"]
    frames = repair_rollouts([table, table], None, Settings()).repaired
    assert [type(frame) for frame in frames] == [pa.Table, pa.Table]


def test_a_baseline_accepts_findings_of_rows_in_memory(tmp_path: Path) -> None:
    gate = GateSettings(baseline=str(tmp_path / "known.json"), update_baseline=True)
    list(gate_rollouts([BROKEN], Settings(), gate))
    again = gate_rollouts([CLEAN, BROKEN], Settings(), replace(gate, update_baseline=False))
    assert [f.known for r in again for f in r.findings] == [True]


def test_rollouts_are_read_from_memory() -> None:
    (rollout,) = read_rollouts([CLEAN])
    assert str(rollout.place) == "<rows>:0"
    assert rollout.training_row.token_ids.tolist() == CLEAN["token_ids"]


def test_rows_that_come_once_are_read_once_and_scanned_as_often_as_asked() -> None:
    reads = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal reads
        for row in (CLEAN, BROKEN):
            reads += 1
            yield row

    scan = scan_rollouts(rows(), Settings())
    assert reads <= 1  # creating a scan reads no more than shows what it is
    assert seen(scan, NAME) == seen(scan, NAME)
    assert reads == 2


# What is refused


class NotRows:
    """Something else that can be iterated."""

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": (None, "None is neither paths nor rows"),
    "a number": (3, "a value of type int"),
    "columns": ({"token_ids": [[1, 2]]}, "'token_ids' is a list that holds a list that holds a value of type int"),
    "one row": (CLEAN, "Pass [row] for a single row"),
    "numbers": ([1, 2], "a list that holds a value of type int"),
    "text of rows": ([json.dumps(CLEAN)], "the text of a row, not a path"),
    "an array": (np.arange(3), "a value of type numpy.ndarray"),
    "lists": ([[CLEAN]], "a list that holds a list that holds a value of type dict"),
    "rollouts": (list(read_rollouts([CLEAN])), "a list that holds a value of type tito_audit.Rollout"),
    "an iterable": (NotRows(), "is neither paths nor rows"),
    "the same name twice": ({"a": [CLEAN], "./a": [CLEAN]}, "two of the names are 'a'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_anything_else_is_refused_in_one_line_that_says_what_is_accepted(what: str) -> None:
    value, message = REFUSED[what]
    for call in (scan_rollouts, repair_rollouts, gate_rollouts, lambda rows: list(read_rollouts(rows))):
        with pytest.raises(SetupError) as error:
            call(value)  # type: ignore[operator]
        assert message in str(error.value)
        assert "Pass" in str(error.value) or "give each" in str(error.value)


@pytest.mark.parametrize("settings", ["org/model", {"tokenizer": "org/model"}])
def test_settings_of_another_type_are_refused_in_one_line(settings: Any) -> None:
    for call in (scan_rollouts, gate_rollouts, lambda rows, settings: list(read_rollouts(rows, settings))):
        with pytest.raises(SetupError, match="not Settings"):
            call([CLEAN], settings)  # type: ignore[operator]
    with pytest.raises(SetupError, match="not Settings"):
        repair_rollouts([CLEAN], settings=settings)


def test_two_columns_with_the_same_name_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    table = pa.Table.from_pylist([CLEAN])
    twice = table.append_column("logprobs", table["logprobs"])
    frame = pandas.concat([table.to_pandas(), table.to_pandas()[["logprobs"]]], axis=1)
    for value in (twice, twice.to_batches()[0], twice.to_reader(), iter(twice.to_batches()), frame):
        with pytest.raises(SetupError, match="two of the columns are named 'logprobs'"):
            list(scan_rollouts(value, Settings()))


def test_a_row_that_comes_once_and_cannot_be_kept_is_one_clear_line() -> None:
    with pytest.raises(
        StorageError, match=r"row 1 comes only once and cannot be kept(.|\n)*Pass the rows as a list"
    ):
        list(scan_rollouts(iter([CLEAN, {**CLEAN, "env": lambda: 1}, CLEAN]), Settings()))


def test_rows_that_failed_to_come_are_never_taken_for_the_rest_of_them() -> None:
    rows = fails()
    scan = scan_rollouts(rows, Settings())
    for _ in range(2):
        with pytest.raises(ValueError, match="the server is gone"):
            list(scan)


def fails() -> Iterator[dict[str, Any]]:
    yield CLEAN
    raise ValueError("the server is gone")


def test_what_is_not_yet_rows_is_refused() -> None:
    with pytest.raises(SetupError, match=r"frame\.collect\(\)"):
        scan_rollouts(pytest.importorskip("polars").LazyFrame([CLEAN]))
    data = pytest.importorskip("torch.utils.data")
    with pytest.raises(SetupError, match="is neither paths nor rows"):
        scan_rollouts(data.StackDataset([1]))
    with pytest.raises(SetupError, match="is neither paths nor rows"):
        scan_rollouts(data.DataLoader([1]))


def test_a_journal_and_a_conversion_are_for_files(tmp_path: Path) -> None:
    from tito_audit import convert_rollouts

    with pytest.raises(SetupError, match="only files can be resumed"):
        list(scan_rollouts([CLEAN], resume=tmp_path / "run.journal"))
    with pytest.raises(SetupError, match="write them to a file"):
        convert_rollouts([CLEAN], "rows")  # type: ignore[list-item]


# Repairs


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(entry) for entry in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and value != value else value


@pytest.mark.parametrize("name", some([name for name in LOGS if name.endswith("l")], 2))
def test_repaired_objects_are_those_that_the_repaired_file_holds(name: str, tmp_path: Path) -> None:
    rows = rows_of(name)
    before, log, out = copy.deepcopy(rows), lines(tmp_path / "log.jsonl", rows), tmp_path / "out.jsonl"
    wanted = repair_rollouts(log, out, TOY)
    outcomes = [(outcome.cured, outcome.repaired, outcome.rows) for outcome in wanted]
    run = repair_rollouts(rows, None, TOY)
    in_memory = list(run)
    assert [(outcome.cured, outcome.repaired, outcome.rows) for outcome in in_memory] == outcomes
    untouched = [(outcome.place.row, outcome.repaired) for outcome in in_memory]
    assert plain(run.repaired) == [orjson.loads(line) for line in out.read_bytes().splitlines()]
    assert (run.before.findings, run.after.findings) == (wanted.before.findings, wanted.after.findings)
    assert run.failing == wanted.failing
    assert rows == before
    whole = [rows[row] for row, repaired in untouched if not repaired]
    assert all(any(row is repaired for repaired in run.repaired) for row in whole)


@pytest.mark.parametrize(
    ("kind", "name"),
    crossed(
        ["Table", "RecordBatch", "RecordBatchReader", "polars", "Dataset"],
        ["miles_session.jsonl", "nemo_gym_tokens.jsonl"],
    ),
)
def test_a_repaired_table_is_the_one_that_the_repaired_file_holds(kind: str, name: str, tmp_path: Path) -> None:
    table = table_of(rows_of(name))
    assert table is not None
    log, out = tmp_path / "log.parquet", tmp_path / "out.parquet"
    parquet.write_table(table, log)
    wanted = repair_rollouts(log, out, TOY)
    list(wanted)
    value = TABLES[kind](table)
    run = repair_rollouts(value, None, TOY)
    repaired = run.repaired
    assert (run.after.findings, run.failing) == (wanted.after.findings, wanted.failing)
    assert kind == "RecordBatchReader" or type(repaired) is type(value)
    if kind == "RecordBatchReader":
        repaired = repaired.read_all()
    if kind in ("Table", "RecordBatch", "RecordBatchReader"):
        assert repaired.schema == parquet.read_schema(out)
        assert repaired.to_pylist() == parquet.read_table(out).to_pylist()
    elif kind == "polars":
        assert repaired.to_arrow().to_pylist() == parquet.read_table(out).to_pylist()
        assert {name: repaired.schema[name] for name in value.columns} == dict(value.schema)
    else:
        assert repaired.with_format("arrow")[:].to_pylist() == parquet.read_table(out).to_pylist()
        assert {name: repaired.features[name] for name in value.column_names} == dict(value.features)


@pytest.mark.parametrize("typed", [False, True])
def test_a_repaired_frame_keeps_its_types_and_the_given_frame_stays_as_it_was(typed: bool) -> None:
    pandas = pytest.importorskip("pandas")
    table = table_of(rows_of("miles_session.jsonl"))
    frame = table.to_pandas(types_mapper=pandas.ArrowDtype if typed else None)
    before = copy.deepcopy(frame)
    run = repair_rollouts(frame, None, TOY)
    repaired = run.repaired
    assert run.before.findings != run.after.findings
    pandas.testing.assert_frame_equal(frame, before)
    assert repaired.dtypes[list(frame.columns)].equals(frame.dtypes)
    wanted = repair_rollouts(table, None, TOY).repaired.to_pandas()
    assert plain(repaired.to_dict("records")) == plain(wanted.to_dict("records"))


def test_what_needs_no_repair_comes_back_as_it_is() -> None:
    table = pa.Table.from_pylist([CLEAN])
    polars, dataset = as_polars(table), as_dataset(table)
    for value in (table, polars, dataset):
        assert repair_rollouts(value, None, Settings()).repaired is value
    frame = as_pandas(table)
    assert repair_rollouts(frame, None, Settings()).repaired.equals(frame)
    stream = repair_rollouts(dataset.to_iterable_dataset(), None, Settings()).repaired
    assert list(stream) == [CLEAN]
    untyped = repair_rollouts(OBJECTS["IterableDataset"]([CLEAN, BROKEN]), None, Settings()).repaired
    assert [row["loss_mask"] for row in untyped] == [[0, 0, 1, 1], [0, 0, 0, 1]]


def test_a_repair_may_write_what_it_repaired(tmp_path: Path) -> None:
    rows = [CLEAN, BROKEN]
    for value in (rows, pa.Table.from_pylist(rows), OBJECTS["pandas"](rows)):
        for name in ("out.jsonl", "out.json.gz", "out.parquet", "out.feather"):
            out = tmp_path / name
            run = repair_rollouts(value, out, Settings(), RepairSettings(force=True))
            list(run)
            assert [plain(raw.value["loss_mask"]) for raw in open_log(out)] == [[0, 0, 1, 1], [0, 0, 0, 1]]  # type: ignore
            assert run.failing == 0
            assert run.written[0][1] == out
            assert scanned(out, Settings(), out)[1]["findings"] == {}
    with pytest.raises(StorageError, match="the file exists"):
        list(repair_rollouts(rows, tmp_path / "out.jsonl", Settings()))
    with pytest.raises(SetupError, match="not a suffix that can be written"):
        list(repair_rollouts(rows, tmp_path / "out.txt", Settings()))
    list(repair_rollouts({"a": rows, "b": pa.Table.from_pylist(rows)}, tmp_path / "both", Settings()))
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["a.jsonl", "b.parquet"]


def test_rows_that_nothing_repairs_leave_for_the_quarantine(tmp_path: Path) -> None:
    bad = {"unknown": [1, 2]}
    run = repair_rollouts(
        [CLEAN, bad], tmp_path / "o.jsonl", Settings(), RepairSettings(quarantine=str(tmp_path / "q.jsonl"))
    )
    list(run)
    assert run.repaired == [CLEAN]
    assert orjson.loads((tmp_path / "q.jsonl").read_bytes())["unknown"] == [1, 2]


def test_repaired_rows_of_files_are_in_files(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    log.write_bytes(orjson.dumps(CLEAN))
    run = repair_rollouts(log, None, Settings())
    with pytest.raises(SetupError, match="only rows given in memory come back"):
        run.repaired  # noqa: B018
    run = repair_rollouts([CLEAN, CLEAN], None, Settings())
    next(iter(run))
    with pytest.raises(SetupError, match="iterate over all outcomes first"):
        run.repaired  # noqa: B018


def test_no_package_is_imported_that_no_value_comes_from() -> None:
    code = (
        "import sys, tito_audit as t\n"
        f"row = {CLEAN!r}\n"
        "list(t.scan_rollouts([row], t.Settings())); t.repair_rollouts([row], None, t.Settings()).repaired\n"
        "list(t.scan_rollouts(iter([row]), t.Settings()))\n"
        "print([name for name in ('pandas', 'polars', 'datasets', 'torch', 'fsspec') if name in sys.modules])\n"
    )
    assert printed(code) == ("[]\n", "")
