"""Torch files: read without running code, one row a sample, and written again type for type."""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import world
from tests.forms import plain
from tito_audit import Settings, read_rollouts, repair_rollouts, scan_rollouts
from tito_audit.errors import SetupError, StorageError
from tito_audit.settings.model import RepairSettings
from tito_audit.storage import open_log, open_output

TOY = str(world.TOY)
SAMPLES = world.lines_of(world.FORMATS / "slime.jsonl")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


class Unknown:
    """What a framework's own class is to somebody who has not got the framework."""


def samples() -> list[dict[str, Any]]:
    return [dict(row) for row in SAMPLES]


def saved(torch: Any, path: Path, rows: list[Any], **how: Any) -> Path:
    torch.save({"rollout_id": 7, "metadata": {"kept": torch.ones(2)}, "samples": rows}, path, **how)
    return path


def rewrite(path: Path, out: Path, change: Callable[[int, Any], list[dict[str, Any]]]) -> None:
    """Write a file anew, with these rows in the place of each sample."""
    log = open_log(path, keep_text=True)
    with open_output(log, out, overwrite=False) as output:
        for raw in log:
            output.replace(raw, change(raw.index, raw.value))
        output.finish(log)


def with_tensors(torch: Any, row: dict[str, Any]) -> dict[str, Any]:
    """A sample with a tensor of another type in each of its columns."""
    types = {"tokens": torch.long, "loss_mask": torch.int8, "rollout_log_probs": torch.float32}
    return {**row, **{name: torch.tensor(row[name], dtype=kind) for name, kind in types.items()}}


def test_each_sample_is_a_row_and_tensors_are_arrays(torch: Any, tmp_path: Path):
    row = {
        "ids": torch.tensor([3, 4]),
        "half": torch.tensor([0.5, 1.5], dtype=torch.bfloat16),
        "one": torch.tensor(2.5),
        "table": torch.tensor([[1, 2], [3, 4]]),
        "routing": np.zeros((2, 1, 2), np.int32),
        "list": [5, 6],
        "deep": {"in": [torch.tensor([7])], "text": "as it is"},
    }
    first, second, third = open_log(saved(torch, tmp_path / "1.pt", [row, {"list": [1]}, 5]))
    value: Any = first.value
    assert value["ids"].dtype == np.int64
    assert isinstance(value["table"], list)
    assert [entry.shape for entry in value["routing"]] == [(1, 2), (1, 2)]
    numbers = {"ids": [3, 4], "half": [0.5, 1.5], "one": 2.5, "table": [[1, 2], [3, 4]], "list": [5, 6]}
    assert plain(value) == {**numbers, "routing": [[[0, 0]]] * 2, "deep": {"in": [[7]], "text": "as it is"}}
    assert (first.index, second.index, second.value) == (0, 1, {"list": [1]})
    assert "not a dict" in (third.error or "")


def test_a_torch_file_is_told_by_its_content(torch: Any, tmp_path: Path):
    for name, new in (("a.jsonl", True), ("b", False)):
        path = saved(torch, tmp_path / name, samples(), _use_new_zipfile_serialization=new)
        log = open_log(path)
        assert log.kind == "torch"
        assert [raw.value for raw in log] == SAMPLES
        assert log.position == log.size


def test_a_class_of_the_writer_is_refused_and_never_built(torch: Any, tmp_path: Path):
    path = saved(torch, tmp_path / "1.pt", [{"tokens": [1], "odd": Unknown()}])
    with pytest.raises(StorageError, match=r"Unknown[\s\S]*run code[\s\S]*weights_only=False") as raised:
        list(open_log(path))
    assert str(path) in str(raised.value)


def test_arrays_of_anything_but_numbers_are_refused(torch: Any, tmp_path: Path):
    path = saved(torch, tmp_path / "1.pt", [{"tokens": np.array([{}], object)}])
    with pytest.raises(StorageError, match="only tensors and plain values"):
        list(open_log(path))


@pytest.mark.parametrize("payload", [[1, 2], {"rollout_data": {}, "rank": 0}, {"samples": 3}, {}])
def test_a_torch_file_that_is_no_dump_of_a_rollout_says_what_is_wanted(torch: Any, tmp_path: Path, payload: Any):
    torch.save(payload, tmp_path / "1.pt")
    with pytest.raises(StorageError, match=r"no list 'samples'[\s\S]*not train_data"):
        list(open_log(tmp_path / "1.pt"))


@pytest.mark.parametrize("size", [600, 2000, -30])
def test_a_torch_file_that_was_cut_is_refused_as_damaged(torch: Any, tmp_path: Path, size: int):
    path = saved(torch, tmp_path / "1.pt", samples())
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(StorageError, match="cannot be read"):
        list(open_log(path))


def test_without_torch_the_way_to_install_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    path = tmp_path / "1.pt"
    path.write_bytes(b"PK\x03\x04" + bytes(26) + b"1/data.pkl")
    with pytest.raises(StorageError, match=r"pip install 'tito-audit\[torch\]'"):
        list(open_log(path))


def test_a_scan_reads_a_torch_file_like_the_same_rows_of_json(torch: Any, tmp_path: Path):
    rows = samples()
    path = saved(torch, tmp_path / "1.pt", [with_tensors(torch, rows[0]), *rows[1:]])
    lines, alone, two = (
        [
            [(finding.code, finding.hit.start, finding.hit.end) for finding in result.findings]
            for result in scan_rollouts(str(log), Settings(tokenizer=TOY, jobs=jobs))
        ]
        for jobs, log in ((None, world.FORMATS / "slime.jsonl"), (None, path), (2, path))
    )
    assert any(lines)
    assert lines == alone == two


def test_a_repair_keeps_the_type_of_every_value(torch: Any, tmp_path: Path):
    rows = [with_tensors(torch, row) if row["id"] in ("clean", "mask-slid-by-one") else row for row in samples()]
    rows[0]["odd"] = collections.OrderedDict(a=torch.ones(1, dtype=torch.float16))
    rows[0]["seen"] = {1, 2}
    path, out = saved(torch, tmp_path / "1.pt", rows), tmp_path / "new" / "1.pt"
    out.parent.mkdir()
    before = path.read_bytes()
    outcomes = list(repair_rollouts(path, out, Settings(tokenizer=TOY), RepairSettings()))
    assert path.read_bytes() == before
    cured = [outcome.place.row for outcome in outcomes if outcome.cured]
    names = [row["id"] for row in SAMPLES]
    assert {names[at] for at in cured} == {"mask-slid-by-one", "logprobs-slid-by-one"}
    new = torch.load(out, weights_only=True)
    assert list(new) == ["rollout_id", "metadata", "samples"]
    assert new["rollout_id"] == 7
    assert torch.equal(new["metadata"]["kept"], torch.ones(2))
    for at, (row, now) in enumerate(zip(rows, new["samples"], strict=True)):
        assert list(now) == [*row, *(["tito_audit"] if at in cured else [])]
        changed = {key for key in row if not same(torch, row[key], now[key])}
        assert bool(changed) == (at in cured)
        for key in changed:
            assert type(now[key]) is type(row[key])
            assert getattr(now[key], "dtype", None) == getattr(row[key], "dtype", None)
    clean, slid = names.index("clean"), names.index("mask-slid-by-one")
    assert torch.equal(new["samples"][slid]["loss_mask"], rows[clean]["loss_mask"])


def same(torch: Any, left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return type(left) is type(right) and all(same(torch, left[key], right[key]) for key in left)
    return type(left) is type(right) and bool(left == right)


def test_a_file_in_which_nothing_changes_is_a_copy_of_its_bytes(torch: Any, tmp_path: Path):
    path, out = saved(torch, tmp_path / "1.pt", samples()[:1]), tmp_path / "2.pt"
    list(repair_rollouts(path, out, Settings(tokenizer=TOY), RepairSettings()))
    assert out.read_bytes() == path.read_bytes()


def test_rows_left_out_and_rows_that_fork_change_the_list_of_samples(torch: Any, tmp_path: Path):
    path, out = saved(torch, tmp_path / "1.pt", [{"n": torch.tensor([i])} for i in range(3)]), tmp_path / "2.pt"
    parts = [{"part": 0}, {"part": np.array([1])}]
    rewrite(path, out, lambda index, row: [{**row, **part} for part in ([], [{}], parts)[index]])
    new = torch.load(out, weights_only=True)["samples"]
    assert [(row["n"].tolist(), row.get("part")) for row in new] == [([1], None), ([2], 0), ([2], [1])]


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("int8", np.array([1, 300]), "a number that"),
        ("int32", [1, None], "null"),
        ("int64", np.array([1.0, np.nan]), "a number that"),
        ("float16", np.array([1e9]), "a number that"),
        ("float32", "text", "null|convert"),
    ],
)
def test_what_a_tensor_cannot_hold_is_refused_and_nothing_is_written(
    torch: Any, tmp_path: Path, kind: str, value: Any, says: str
):
    path = saved(torch, tmp_path / "1.pt", [{"n": torch.ones(2, dtype=getattr(torch, kind))}])
    with pytest.raises(StorageError, match=says):
        rewrite(path, tmp_path / "2.pt", lambda *_: [{"n": value}])
    assert [file.name for file in tmp_path.iterdir()] == ["1.pt"]


def test_the_nested_values_of_a_sample_come_back_as_they_were(torch: Any, tmp_path: Path):
    row = {
        "k": torch.tensor([[1, 2], [3, 4]]),
        "calls": [{"ids": torch.tensor([1, 2], dtype=torch.int32), "t": (1, 2)}],
        "number": torch.tensor(3, dtype=torch.int16),
        "array": np.array([1, 2], np.uint8),
        "null": None,
    }
    path, out = saved(torch, tmp_path / "1.pt", [row]), tmp_path / "2.pt"
    new = {"number": 4, "array": [5], "null": np.array([1])}

    def changed(_: int, value: Any) -> list[dict[str, Any]]:
        call = {**value["calls"][0], "ids": np.array([8, 9])}
        return [{**value, **new, "k": value["k"][::-1], "calls": [call]}]

    rewrite(path, out, changed)
    with torch.serialization.safe_globals(
        [np.ndarray, np.dtype, type(np.dtype("u1")), np._core.multiarray._reconstruct]
    ):
        (now,) = torch.load(out, weights_only=True)["samples"]
    array, (call,) = now.pop("array"), now.pop("calls")
    assert (array.dtype, array.tolist()) == (np.uint8, [5])
    assert same(torch, call, {"ids": torch.tensor([8, 9], dtype=torch.int32), "t": (1, 2)})
    expected = {"k": torch.tensor([[3, 4], [1, 2]]), "number": torch.tensor(4, dtype=torch.int16), "null": [1]}
    assert same(torch, now, expected)


def test_a_repaired_torch_file_stays_one(torch: Any, tmp_path: Path):
    path = saved(torch, tmp_path / "1.pt", samples())
    with (
        pytest.raises(SetupError, match=r"stays a Torch file.*\.pt"),
        open_output(open_log(path, keep_text=True), tmp_path / "2.jsonl", overwrite=False),
    ):
        pass
    assert len(list(read_rollouts(path))) == len(SAMPLES)


def test_a_sample_that_is_left_out_is_a_line_of_json_in_quarantine(torch: Any, tmp_path: Path):
    rows = [with_tensors(torch, SAMPLES[0]), *samples()[1:]]
    for row in rows:
        row["metadata"] = {**row["metadata"], 3: torch.ones((1, 2), dtype=torch.float16), "set": {1}}
    path, out, aside = saved(torch, tmp_path / "1.pt", rows), tmp_path / "2.pt", tmp_path / "aside.jsonl"
    terms = RepairSettings(quarantine=str(aside))
    outcomes = list(repair_rollouts(path, out, Settings(tokenizer=TOY), terms))
    gone = [outcome.place.row for outcome in outcomes if outcome.quarantined]
    lines = [json.loads(line) for line in aside.read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [SAMPLES[at]["tokens"] for at in gone]
    assert lines[0]["metadata"]["3"] == [[1.0, 1.0]]
    left = [row["id"] for row in torch.load(out, weights_only=True)["samples"]]
    assert left == [row["id"] for at, row in enumerate(SAMPLES) if at not in gone]
    assert gone
