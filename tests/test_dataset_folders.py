"""Folders that `datasets` saves, and Arrow files by themselves: found, audited, shown and repaired as any log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.command import run
from tito_audit import Settings
from tito_audit.errors import StorageError
from tito_audit.inspect import inspect_log
from tito_audit.storage import find_logs, open_log
from tito_audit.storage.arrow import open_arrow

CLEAN = {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "logprobs": [0.0, 0.0, -0.5, -0.25], "note": "ä"}
BROKEN = {**CLEAN, "logprobs": [0.0, 0.0, 0.5, -0.25]}
"""A trained token has a logprob above zero; `mask` takes it out of the loss."""


def shard(path: Path, rows: list[dict[str, Any]], batch: int = 1000, new: Any = pa.ipc.new_stream) -> Path:
    features = {name: {"_type": "Value"} for name in rows[0]}
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.Table.from_pylist(rows).replace_schema_metadata(about)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def saved(folder: Path, shards: list[list[dict[str, Any]]], split: str = "train") -> Path:
    """A folder as `Dataset.save_to_disk` writes it."""
    names = [f"data-{number:05}-of-{len(shards):05}.arrow" for number in range(len(shards))]
    paths = [shard(folder / name, rows, 4) for name, rows in zip(names, shards, strict=True)]
    size = sum(path.stat().st_size for path in paths)
    lengths = [len(rows) for rows in shards]
    counts = {"name": split, "num_bytes": size, "num_examples": sum(lengths), "shard_lengths": lengths}
    info = {
        "features": {"token_ids": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "Sequence"}},
        "splits": {split: counts, "other": {"name": "other", "num_examples": 3}},
        "dataset_size": size,
    }
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0123456789abcdef",
        "_format_type": None,
        "_split": split,
    }
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2))
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    return folder


def of(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_bytes())


def test_a_data_set_is_the_shards_that_it_names_in_their_order(tmp_path):
    folder = saved(tmp_path / "ds", [[CLEAN], [CLEAN] * 2, [CLEAN]])
    shard(folder / "cache-0a1b2c.arrow", [BROKEN])
    shard(folder / "data-00007-of-00009.arrow", [BROKEN])
    state = of(folder, "state.json")
    state["_data_files"].reverse()
    (folder / "state.json").write_text(json.dumps(state))
    wanted = [folder / f"data-0000{number}-of-00003.arrow" for number in (2, 1, 0)]
    assert find_logs([str(folder)]) == wanted
    assert find_logs([str(tmp_path / "d*")]) == wanted
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "z.jsonl").write_bytes(b"")
    assert find_logs([str(tmp_path)]) == [tmp_path / "a.jsonl", *wanted, tmp_path / "z.jsonl"]


def test_a_data_set_of_splits_is_their_shards_in_the_order_of_the_splits(tmp_path):
    saved(tmp_path / "ds" / "train", [[CLEAN], [CLEAN]])
    saved(tmp_path / "ds" / "test", [[CLEAN]], "test")
    saved(tmp_path / "ds" / "stale", [[CLEAN]], "stale")
    (tmp_path / "ds" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    shards = [str(path.relative_to(tmp_path)) for path in find_logs([str(tmp_path / "ds")])]
    assert shards == [
        "ds/train/data-00000-of-00002.arrow",
        "ds/train/data-00001-of-00002.arrow",
        "ds/test/data-00000-of-00001.arrow",
    ]


def test_arrow_files_of_other_folders_are_logs_but_for_what_was_cached(tmp_path):
    for name in ("a.arrow", "b.feather", "cache-12.arrow", "indices.arrow"):
        shard(tmp_path / name, [CLEAN])
    assert [path.name for path in find_logs([str(tmp_path)])] == ["a.arrow", "b.feather"]
    assert find_logs([str(tmp_path / "cache-12.arrow")]) == [tmp_path / "cache-12.arrow"]


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"_data_files": [{"filename": "data-1.arrow"}]}, "it names data-1.arrow, which is missing"),
        ({"_data_files": [{"filename": "../other.arrow"}]}, "does not name files next to it"),
        ({"_data_files": [7]}, "does not name files next to it"),
        ({"_data_files": [], "_indices_data_files": [{"filename": "indices.arrow"}]}, "flatten_indices"),
    ],
)
def test_a_data_set_that_is_not_whole_is_refused_with_the_reason(tmp_path, state, says):
    (tmp_path / "ds").mkdir()
    shard(tmp_path / "other.arrow", [CLEAN])
    (tmp_path / "ds" / "state.json").write_text(json.dumps(state))
    with pytest.raises(StorageError, match=says):
        find_logs([str(tmp_path / "ds")])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["gone"]}')
    with pytest.raises(StorageError, match=r"gone/state\.json is missing"):
        find_logs([str(tmp_path)])


def test_a_data_set_is_audited_repaired_and_found_clean_again(tmp_path):
    folder = saved(tmp_path / "ds", [[CLEAN] * 6, [CLEAN, BROKEN, CLEAN]])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, page, _ = run("scan", folder)
    assert code == 1
    assert "data-00001-of-00002.arrow:1" in page
    out = tmp_path / "out"
    code, page, err = run("repair", folder, "-o", out)
    assert (code, err) == (0, ""), page
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(path.name for path in out.iterdir()) == sorted(before)
    assert run("scan", out)[0] == 0
    assert (out / "data-00000-of-00002.arrow").read_bytes() == before["data-00000-of-00002.arrow"]
    with open_arrow(out / "data-00001-of-00002.arrow") as file:
        assert file.schema.metadata == pa.ipc.open_stream(before[file.path.name]).schema.metadata
        assert not file.has_footer
        assert [batch.num_rows for batch, *_ in file.batches()] == [3]
    rows = [raw.value for raw in open_log(out / "data-00001-of-00002.arrow")]
    assert [row["note"] for row in rows] == ["ä"] * 3
    assert rows[1]["loss_mask"].tolist() == [0, 0, 0, 1]
    assert rows[0]["tito_audit"] is None
    assert rows[1]["tito_audit"]
    info, state = of(out, "dataset_info.json"), of(out, "state.json")
    assert info["features"]["tito_audit"] == {"dtype": "string", "_type": "Value"}
    assert info["splits"]["train"]["num_examples"] == 9
    size = sum(path.stat().st_size for path in out.glob("*.arrow"))
    assert info["splits"]["train"]["num_bytes"] == info["dataset_size"] == size
    assert state.pop("_fingerprint") != "0123456789abcdef"
    assert state == {k: v for k, v in of(folder, "state.json").items() if k != "_fingerprint"}


def test_a_data_set_in_which_nothing_changes_is_a_copy(tmp_path):
    folder = saved(tmp_path / "ds" / "train", [[CLEAN] * 3, [CLEAN]])
    (tmp_path / "ds" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert run("repair", tmp_path / "ds", "-o", tmp_path / "out")[0] == 0
    files = [path for path in sorted((tmp_path / "ds").rglob("*")) if path.is_file()]
    for path in files:
        assert (tmp_path / "out" / path.relative_to(tmp_path / "ds")).read_bytes() == path.read_bytes()
    assert len([path for path in (tmp_path / "out").rglob("*") if path.is_file()]) == len(files)
    # Of a split by itself, nothing is written beside the folder that was named.
    assert run("repair", folder, "-o", tmp_path / "alone" / "out")[0] == 0
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["out"]


def test_rows_that_are_left_out_of_a_data_set_are_not_counted_any_more(tmp_path):
    folder = saved(tmp_path / "ds", [[CLEAN] * 2, [CLEAN, BROKEN, CLEAN]])
    out, left = tmp_path / "out", tmp_path / "left.jsonl"
    assert run("repair", folder, "-o", out, "--with", "drop", "--unsafe", "--quarantine", left)[0] == 0
    split = of(out, "dataset_info.json")["splits"]["train"]
    assert (split["num_examples"], split["shard_lengths"]) == (4, [2, 2])
    assert of(out, "dataset_info.json")["splits"]["other"] == {"name": "other", "num_examples": 3}
    assert len(left.read_text().splitlines()) == 1
    again = run("repair", folder, "-o", out)
    assert again[0] == 2
    assert "the file exists, so nothing was written" in again[2]


def test_what_a_data_set_says_of_its_source_is_left_alone(tmp_path):
    folder = saved(tmp_path / "ds", [[CLEAN, BROKEN]])
    info = of(folder, "dataset_info.json")
    info["splits"]["train"]["num_examples"] = 500
    (folder / "dataset_info.json").write_text(json.dumps(info))
    assert run("repair", folder, "-o", tmp_path / "out", "--no-provenance")[0] == 0
    assert of(tmp_path / "out", "dataset_info.json") == info


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_an_arrow_file_is_scanned_shown_inspected_and_converted_as_a_table_is(tmp_path, new):
    log = shard(tmp_path / "log.arrow", [CLEAN, CLEAN, BROKEN, CLEAN], 2, new)
    for arguments in ((), ("--jobs", "2"), ("--limit", "3"), ("--sample", "0.99")):
        assert run("scan", log, *arguments)[0] == 1, arguments
    assert run("scan", log, "--limit", "2")[0] == 0
    code, page, _ = run("show", f"{log}:2")
    assert code == 0
    assert "LPR504" in page
    assert "it holds 4 rows" in run("show", log)[2]
    assert "there is no row 9; it holds 4 rows" in run("show", log, "--row", "9")[2]
    page = run("inspect", log)[1]
    assert "Arrow · 4 rows" in page
    assert " (int64)" in page
    inspection = inspect_log(log, settings=Settings())
    assert {column.path: column.storage_type for column in inspection.columns}["note"] == "string"
    assert run("convert", log, "--to", "rows", "-o", tmp_path / "out.jsonl")[0] == 0


def test_a_stream_that_was_cut_off_is_a_finding_behind_the_rows_before(tmp_path):
    log = shard(tmp_path / "log.arrow", [CLEAN] * 300, 100)
    whole = log.read_bytes()
    log.write_bytes(whole[: int(len(whole) * 0.9)])
    for jobs in ("1", "2"):
        code, page, _ = run("scan", log, "--jobs", jobs)
        assert code == 1
        assert "record batch 2 of the Arrow file cannot be read" in " ".join(page.split())
        assert "200" in page
    log.write_bytes(whole[:40])
    code, _, err = run("scan", log)
    assert code == 2
    assert "an Arrow file whose schema cannot be read" in err
    log.write_bytes(whole + whole)
    assert "with something that is not read" in " ".join(run("scan", log)[1].split())


def test_the_rows_of_a_file_whose_footer_is_gone_are_read_as_far_as_they_go(tmp_path):
    log = shard(tmp_path / "log.feather", [CLEAN] * 300, 100, pa.ipc.new_file)
    log.write_bytes(log.read_bytes()[:-30])
    rows = list(open_log(log))
    assert len(rows) == 301
    assert rows[-1].lost
    assert "the footer of the Arrow file cannot be read" in str(rows[-1].error)
