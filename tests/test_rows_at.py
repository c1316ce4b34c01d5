"""Rows inside a wrapper: read as if they were the rows of the file, and written back with the rest as it was."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.command import run, written
from tests.test_sample import in_chunks
from tests.tiers import examples, some
from tests.world import BROKEN, CLEAN
from tito_audit import Settings, read_rollouts, scan_rollouts, write_rollouts
from tito_audit.errors import SetupError
from tito_audit.format import Row
from tito_audit.formats import pick_format
from tito_audit.inspect import inspect_log
from tito_audit.run.tasks import strip_rollout
from tito_audit.storage import RawRow, open_log, open_output
from tito_audit.storage.nested_rows import parse_row_path

Json = dict[str, Any]


def rows_of(count: int = 60) -> list[Json]:
    """Rows that differ, every seventh broken."""
    return [
        {**(BROKEN if n % 7 == 3 else CLEAN), "token_ids": [5 + n % 40, 6, 7, 8], "note": f"row {n}"}
        for n in range(count)
    ]


def grouped(rows: list[Json], size: int = 7) -> list[list[Json]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def table(path: Path, rows: list[Json], batch: int = 3) -> Path:
    columns = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(columns, path, row_group_size=batch)  # type: ignore[no-untyped-call]
        return path
    with (pa.ipc.new_file if path.suffix == ".feather" else pa.ipc.new_stream)(path, columns.schema) as writer:
        writer.write_table(columns, max_chunksize=batch)
    return path


def lines(path: Path, rows: list[Json]) -> Path:
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def torch_file(path: Path, rows: list[Json]) -> Path:
    pytest.importorskip("torch").save({"rollout_id": 0, "samples": rows}, path)
    return path


def document(path: Path, rows: list[Json]) -> Path:
    path.write_text(json.dumps(rows[0] if len(rows) == 1 else rows, indent=1), encoding="utf-8")
    return path


KINDS: dict[str, tuple[Callable[[Path, list[Json]], Path], str, Callable[[list[Json]], list[Json]]]] = {
    "a.jsonl": (lines, "sample", lambda rows: [{"sample": row, "meta": {"n": 1.50}} for row in rows]),
    "b.jsonl": (lines, "data.rollouts", lambda rows: [{"data": {"rollouts": g}} for g in grouped(rows)]),
    "c.jsonl.gz": (
        lines,
        "groups.*.row",
        lambda rows: [{"groups": [{"row": r} for r in g]} for g in grouped(rows)],
    ),
    "d.json": (document, "data.rollouts[]", lambda rows: [{"run": "x", "data": {"rollouts": rows, "k": 1.50}}]),
    "e.json": (document, "steps.rows", lambda rows: [{"steps": [{"rows": g} for g in grouped(rows)]}]),
    "f.json": (document, "sample", lambda rows: [{"sample": row} for row in rows]),
    "g.parquet": (table, "sample", lambda rows: [{"sample": row, "n": n} for n, row in enumerate(rows)]),
    "h.parquet": (table, "data.rollouts", lambda rows: [{"data": {"rollouts": g}, "n": 1} for g in grouped(rows)]),
    "i.arrow": (table, "rollouts", lambda rows: [{"rollouts": g, "n": 1} for g in grouped(rows)]),
    "j.feather": (table, "sample", lambda rows: [{"sample": row} for row in rows]),
    "k.pt": (torch_file, "sample", lambda rows: [{"sample": row, "index": n} for n, row in enumerate(rows)]),
}


def wrapped(folder: Path, kind: str, rows: list[Json]) -> tuple[Path, str]:
    store, path, wrap = KINDS[kind]
    return store(folder / kind, wrap(rows)), path


def found_in(log: Path, **options: Any) -> list[tuple[int, list[str], list[str]]]:
    scan = scan_rollouts(log, Settings(**options))
    scan.chunk_bytes = 400
    return [
        (result.place.row, [finding.code for finding in result.findings], [skip.code for skip in result.skips])
        for result in map(strip_rollout, scan)
    ]


@pytest.mark.parametrize("kind", some(list(KINDS), 5))
def test_rows_in_a_wrapper_are_audited_as_they_are_without_one(tmp_path: Path, kind: str) -> None:
    rows = rows_of(examples(25, 60))
    log, path = wrapped(tmp_path, kind, rows)
    expected = found_in(written(tmp_path / "plain.jsonl", rows))
    assert found_in(log, rows_at=path) == expected
    assert found_in(log, rows_at=path, jobs=2) == expected
    assert found_in(log, rows_at=path, limit=9) == expected[:9]
    assert found_in(log, rows_at=path, row=17) == expected[17:18]
    assert open_log(log, rows_at=path).count() == len(rows)
    assert [row for row, codes, _ in expected if codes] == list(range(3, len(rows), 7))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_takes_the_same_rows_however_the_log_is_read(tmp_path: Path, kind: str) -> None:
    log, path = wrapped(tmp_path, kind, rows_of(200))
    whole = open_log(log, rows_at=path, share=0.3)
    indices = [raw.index for raw in whole]
    assert 30 < len(indices) < 90
    assert whole.left_out == 200 - len(indices)
    for size in (300, 5000, 1 << 20):
        read, _, left_out = in_chunks(log, size, 0.3, rows_at=path)
        assert ([raw.index for raw in read], left_out) == (indices, 200 - len(indices))
    assert {*indices} <= {raw.index for raw in open_log(log, rows_at=path, share=0.6)}


def values_at(log: Path, path: str | None) -> list[Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(entry) for name, entry in value.items() if entry is not None}
        if isinstance(value, list | tuple):
            return [plain(entry) for entry in value]
        return value.tolist() if hasattr(value, "tolist") else value

    return [plain(raw.value) for raw in open_log(log, rows_at=path)]


@pytest.mark.parametrize("kind", some(list(KINDS), 5))
def test_a_repair_writes_the_wrapper_again_with_the_rest_as_it_was(tmp_path: Path, kind: str) -> None:
    rows = rows_of(30)
    log, path = wrapped(tmp_path, kind, rows)
    before = log.read_bytes()
    out = tmp_path / "out" / kind
    out.parent.mkdir()
    code, page, err = run("repair", log, "--rows-at", path, "-o", out)
    assert (code, err) == (0, ""), page
    assert "30 rows · 4 repaired · 26 as they were" in page
    assert log.read_bytes() == before
    again = values_at(out, path)
    for old, new in zip(rows, again, strict=True):
        note = new.pop("tito_audit", None)
        if old["logprobs"] == BROKEN["logprobs"]:
            assert new == {**old, "loss_mask": [0, 0, 0, 1]}
            assert note is not None or kind[2:] in ("parquet", "arrow", "feather")
        else:
            assert (new, note) == (old, None)
    for old, new in zip(values_at(log, None), values_at(out, None), strict=True):
        assert {
            name: old[name] for name in old if name not in ("sample", "data", "groups", "steps", "rollouts")
        } == {
            name: new[name]
            for name in new
            if name not in ("sample", "data", "groups", "steps", "rollouts", "tito_audit")
        }
    assert run("scan", out, "--rows-at", path)[0] == 0
    same = tmp_path / "same" / kind
    same.parent.mkdir()
    assert run("repair", out, "--rows-at", path, "-o", same)[0] == 0
    assert same.read_bytes() == out.read_bytes()


def test_a_table_says_beside_the_wrapper_what_was_cured(tmp_path: Path) -> None:
    log, path = wrapped(tmp_path, "g.parquet", rows_of(5))
    assert run("repair", log, "--rows-at", path, "-o", tmp_path / "out.parquet")[0] == 0
    notes = [
        json.loads(raw.value["tito_audit"])
        for raw in open_log(tmp_path / "out.parquet")
        if raw.value["tito_audit"]
    ]  # type: ignore[index]
    assert [note["cured"] for note in notes] == [{"mask": ["LPR504"]}]
    log, path = wrapped(tmp_path, "i.arrow", rows_of(14))
    assert run("repair", log, "--rows-at", path, "-o", tmp_path / "out.arrow")[0] == 0
    notes_of_batches = [json.loads(raw.value["tito_audit"])["rows"] for raw in open_log(tmp_path / "out.arrow")]  # type: ignore[index]
    assert [[entry["entry"] for entry in entries] for entries in notes_of_batches] == [[3], [3]]
    assert notes_of_batches[1][0]["cured"] == {"mask": ["LPR504"]}


def test_bytes_outside_of_a_row_that_changes_stay(tmp_path: Path) -> None:
    text = (
        '{ "run":"x",\n "data": {"rollouts" : [ \n  {"token_ids":[5,6,7],"loss_mask":[0,1,1],'
        '"logprobs":[0.0, 5e-1,-1e0], "n":1.50e0},\n  {"token_ids":[5, 6],  "loss_mask":[0,1],'
        '"logprobs":[0.0,-5E-1], "n":1.50}  ] },"z" :\t[1.0] }'
        "\n\n"
    )
    log, out = tmp_path / "log.json", tmp_path / "out.json"
    log.write_text(text, encoding="utf-8")
    assert run("repair", log, "--rows-at", "data.rollouts", "-o", out, "--no-provenance")[0] == 0
    assert out.read_text(encoding="utf-8") == text.replace("[0,1,1]", "[0,0,1]")


def rewritten(log: Path, path: str, change: Callable[[RawRow], list[Row] | None]) -> Path:
    out = log.with_name("new" + log.name)
    source = open_log(log, keep_text=True, rows_at=path)
    with open_output(source, out, overwrite=True) as output:
        for raw in source:
            rows = change(raw)
            if rows is None:
                output.keep(raw)
            else:
                output.replace(raw, rows)
        output.finish(source)
    return out


def test_rows_that_fork_or_leave_are_entries_of_their_list_or_rows_of_the_file(tmp_path: Path) -> None:
    def change(raw: RawRow) -> list[Row] | None:
        n = raw.value["n"]  # type: ignore[index]
        return [{"n": n}, {"n": n * 10}] if n == 2 else [] if n == 3 else None

    listed = [{"a": {"rows": [{"n": 1}, {"n": 2}]}, "k": 1.0}, {"a": {"rows": []}}, {"a": {"rows": [{"n": 3}]}}]
    out = rewritten(written(tmp_path / "a.jsonl", listed), "a.rows", change)
    assert values_at(out, None) == [
        {"a": {"rows": [{"n": 1}, {"n": 2}, {"n": 20}]}, "k": 1.0},
        {"a": {"rows": []}},
        {"a": {"rows": []}},
    ]
    alone = [{"row": {"n": n}, "k": n} for n in (1, 2, 3, 4)]
    for log in (written(tmp_path / "b.jsonl", alone), table(tmp_path / "b.parquet", alone)):
        out = rewritten(log, "row", change)
        assert [(row["row"]["n"], row["k"]) for row in values_at(out, None)] == [(1, 1), (2, 2), (20, 2), (4, 4)]
    inside = [{"groups": [{"row": {"n": n}, "k": n} for n in (1, 2, 3)]}]
    out = rewritten(written(tmp_path / "c.jsonl", inside), "groups.row", change)
    groups = values_at(out, None)[0]["groups"]
    assert [(group["row"]["n"], group["k"]) for group in groups] == [(1, 1), (2, 2), (20, 2)]


def test_rows_of_the_file_that_hold_none_are_kept_wherever_they_stand(tmp_path: Path) -> None:
    rows = [{"r": []}, {"r": [{"n": 1}]}, {"r": []}, {"r": []}, {"r": [{"n": 2}]}, {"r": []}]
    log = written(tmp_path / "a.jsonl", rows)
    assert rewritten(log, "r", lambda _: None).read_bytes() == log.read_bytes()
    out = rewritten(log, "r", lambda raw: [{"n": 7}])
    assert values_at(out, None) == [{"r": [{"n": 7}] if row["r"] else []} for row in rows]
    assert [raw.index for raw in open_log(log, rows_at="r")] == [0, 1]


def test_what_is_no_row_where_one_should_be_is_a_finding_that_says_what_is_there(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"data": {"rollouts": [CLEAN, 7, BROKEN]}},
        {"data": {"rollout": [CLEAN]}},
        {"data": None},
        {"other": 1},
        {"data": {"rollouts": "[]"}},
        {"data": {"rollouts": [CLEAN]}},
    ]
    log = written(tmp_path / "log.jsonl", rows)
    log.write_bytes(log.read_bytes() + b'{"data": \n')
    errors = {raw.index: raw.error for raw in open_log(log, rows_at="data.rollouts") if raw.value is None}
    assert errors.pop(8).startswith("not JSON") if isinstance(errors[8], str) else False
    assert errors == {
        1: "--rows-at data.rollouts: 'data.rollouts[1]' is a single value, not an object with named columns",
        3: "--rows-at data.rollouts: there is no 'rollouts' (did you mean 'rollout'?); 'data' has rollout",
        4: "--rows-at data.rollouts: 'data' is null, and has no 'rollouts'",
        5: "--rows-at data.rollouts: there is no 'data'; the row has other",
        6: "--rows-at data.rollouts: 'data.rollouts' is a text, not an object with named columns",
    }
    for jobs in ("1", "2"):
        code, page, _ = run("scan", log, "--rows-at", "data.rollouts", "--jobs", jobs)
        assert code == 1
        assert "6 unreadable rows" in page
    out, left = tmp_path / "out.jsonl", tmp_path / "left.jsonl"
    assert run("repair", log, "--rows-at", "data.rollouts", "-o", out)[0] == 1
    assert out.read_bytes().splitlines()[1:] == log.read_bytes().splitlines()[1:]
    out.unlink()
    options = ("--with", "drop", "--unsafe", "--quarantine", left)
    assert run("repair", log, "--rows-at", "data.rollouts", "-o", out, *options)[0] == 1
    # What is no row of its own cannot be moved to another file.
    assert values_at(out, None)[0] == {"data": {"rollouts": [CLEAN, 7]}}
    assert out.read_bytes().splitlines()[1:] == log.read_bytes().splitlines()[1:]
    assert [json.loads(line)["token_ids"] for line in left.read_bytes().splitlines()] == [BROKEN["token_ids"]]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_read_and_a_path_that_is_nowhere_in_it_is_said_at_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, expected in (("row", 1), ("rows", 2)):
        data = b"".join(json.dumps({"row": row}).encode() + b"\n" for row in (CLEAN, BROKEN))
        writer = threading.Thread(target=lambda data=data: pipe.write_bytes(data))
        writer.start()
        assert run("scan", pipe, "--rows-at", path, "--jobs", "1")[0] == expected
        writer.join()


def test_keys_with_dots_in_them_are_found_and_asked_for_first(tmp_path: Path) -> None:
    rows = [{"a.b": {"c": {"n": 1}}, "a": {"b": {"c": {"n": 2}}}}, {"a": {"b.c": [{"n": 3}]}}, {"a.b.c": {"n": 4}}]
    log = written(tmp_path / "log.jsonl", rows)
    assert values_at(log, "a.b.c") == [{"n": 1}, {"n": 3}, {"n": 4}]
    out = rewritten(log, "a.b.c", lambda raw: [{"n": raw.value["n"] + 10}])  # type: ignore[index]
    assert values_at(out, "a.b.c") == [{"n": 11}, {"n": 13}, {"n": 14}]
    assert values_at(out, None)[0]["a"] == rows[0]["a"]


WRAPPERS = st.recursive(
    st.sampled_from([{"n": 1}, {"n": 2}]),
    lambda inner: st.lists(inner, max_size=3) | st.builds(lambda value: {"k": value, "z": 1}, inner),
    max_leaves=8,
)


@settings(max_examples=examples(40, 150), deadline=None)
@given(
    st.lists(st.builds(lambda value: {"top": value}, WRAPPERS), min_size=1, max_size=5),
    st.sampled_from(["top", "top.k", "top.*", "top.k.k"]),
)
def test_whatever_the_wrapper_is_its_rows_can_be_written_back(
    tmp_path_factory: Any, rows: list[Json], path: str
) -> None:
    log = written(tmp_path_factory.getbasetemp() / "any.jsonl", rows)
    try:
        read = list(open_log(log, rows_at=path, keep_text=True))
    except SetupError:
        return
    assert [raw.index for raw in read] == list(range(len(read)))
    assert rewritten(log, path, lambda _: None).read_bytes() == log.read_bytes()
    out = rewritten(log, path, lambda raw: [{**raw.value, "new": 1}] if raw.value is not None else None)
    assert json.dumps(values_at(out, None)).count('"new": 1') == sum(raw.value is not None for raw in read)
    stripped = [json.loads(line.replace(', "new": 1', "")) for line in out.read_text().splitlines()]
    assert stripped == rows


def test_rollouts_that_were_changed_in_python_are_written_into_the_wrapper(tmp_path: Path) -> None:
    log, path = wrapped(tmp_path, "d.json", rows_of(6))
    out, at_path = tmp_path / "out.json", Settings(rows_at=path)
    assert write_rollouts(log, read_rollouts(log, at_path), out, at_path) == 0
    assert out.read_bytes() == log.read_bytes()


def test_an_object_that_looks_like_no_row_is_not_proposed_as_one() -> None:
    for row in ({"x": [{"role": "assistant", "token_ids": [1]}]}, {"x": {"y": 1}}, {"x": []}):
        with pytest.raises(Exception, match="Name the columns of ids with --map"):
            pick_format(row)


def test_a_table_shows_the_types_of_the_rows_inside(tmp_path: Path) -> None:
    for kind in ("g.parquet", "h.parquet", "i.arrow"):
        log, path = wrapped(tmp_path, kind, rows_of(8))
        columns = {column.path: column for column in inspect_log(log, settings=Settings(rows_at=path)).columns}
        assert columns["note"].storage_type == "string"
        assert str(columns["token_ids"].storage_type).startswith("list<")


def test_lists_of_numbers_inside_a_wrapper_are_arrays_as_they_are_without_one(tmp_path: Path) -> None:
    columns = {"token_ids": "i"}
    ids = {"token_ids": list(range(100, 1400))}
    for path, row in (("a", {"a": ids}), ("a.b", {"a": {"b": [ids, ids]}}), ("a.*.b", {"a": [{"b": ids}]})):
        log = written(tmp_path / "log.jsonl", [row])
        for raw in open_log(log, rows_at=path, arrays=columns):
            assert raw.value is not None
            assert type(raw.value["token_ids"]).__name__ == "ndarray"


def test_a_path_is_keys_with_stars_or_brackets_for_lists() -> None:
    for text, steps in (
        ("data.rollouts", ("data", "rollouts")),
        ("data.rollouts[]", ("data", "rollouts", "*")),
        ("data[*].rows", ("data", "*", "rows")),
        ("data.*.rows", ("data", "*", "rows")),
        ("[].rows", ("*", "rows")),
    ):
        assert parse_row_path(text).steps == steps
