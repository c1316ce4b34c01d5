"""Ray: a cluster finds and writes what one process does, loses workers and nodes, and leaves nothing behind."""

from __future__ import annotations

import gzip
import http.server
import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import ray_driver
from tests.command import run, written
from tests.ray_driver import Driver, driver, processes, wait_for
from tests.test_jobs import FORMATS, LONG_ROW, TOKENIZER
from tests.test_join import captured
from tests.test_joined_files import sharded
from tests.test_sessions import Wire, apart, chat, contents
from tests.test_sessions import whole as whole
from tests.tiers import DEEP, examples, some
from tests.world import ROOT
from tito_audit import RepairSettings, Settings, SetupError, findings_table, repair_rollouts, scan_rollouts
from tito_audit.ray import ROW_ID, AuditBatches, RepairBatches, row_id
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.ray_tasks import _raise_lost, _RayCall, connect_to_cluster

SHARED = ROOT.parent / "shared"
FORMATS_OF = {log.stem: log for log in FORMATS}
NODES = examples(1, 2)
WITH = {"tokenizer": TOKENIZER}
RAY = {**WITH, "engine": "ray"}
WHOLE = "whole.jsonl"
"""Conversations, beside the folders of the checks."""


def shards(folder: Path, count: int) -> list[str]:
    """Logs with rows of several formats, each log with others; some are compressed."""
    logs = [log.read_text(encoding="utf-8").splitlines() for log in FORMATS]
    chance = random.Random(7)
    folder.mkdir()
    for number in range(count):
        rows = chance.choice(logs)
        text = "\n".join(chance.choice(rows) for _ in range(chance.randrange(1, 4))) + "\n"
        if number % 10:
            (folder / f"{number:04}.jsonl").write_text(text, encoding="utf-8")
        else:
            (folder / f"{number:04}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return sorted(map(str, folder.iterdir()))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Driver]:
    """A process that stays connected to two nodes, each with one CPU; in `make test` to one with two."""
    with driver(NODES, 2 // NODES) as call:
        call(ray_driver.stay_connected)
        yield call


def same_scan(call: Driver, folder: Path) -> None:
    logs = shards(folder / "shards", examples(12, 2_000))
    alone = call(ray_driver.scanned, logs, None, WITH)
    assert len(alone[0]) > len(logs)
    assert call(ray_driver.scanned, logs, 2_000, RAY) == alone
    ways = [["--engine", "ray", *jobs] for jobs in some(([], ["--jobs", "1"], ["--jobs", "5"]), 1)]
    words = ["scan", str(folder / "shards"), "-t", TOKENIZER]
    first, *others = call(ray_driver.reports, words, ["--jobs", "1"], *ways)
    assert first[0] == 1
    assert first[2] == ""
    assert others == [first] * len(ways)


def same_joined_calls(call: Driver, folder: Path) -> None:
    _, lines, rollouts = captured()
    capture = str(written(folder / "mixed.tokens.jsonl", lines))
    messages = str(written(folder / "rollouts.jsonl", rollouts))
    alone = call(ray_driver.scanned, capture, None, {**WITH, "messages": messages})
    assert call(ray_driver.scanned, capture, 900, {**RAY, "messages": messages}) == alone
    calls = [
        {"number": number, **line} for number, line in enumerate(apart(contents(folder.parent / WHOLE), chat, 3))
    ]
    logs = list(map(str, sharded(calls, folder, ["zst", "plain", "gz"])))
    for settings in some(({"format": "openai_chat"}, {"session": "session_id"}, {}), 1):
        alone = call(ray_driver.scanned, logs, None, {**WITH, **settings})
        assert any("conversations" in notice for notice in alone[1].joined)
        assert call(ray_driver.scanned, logs, 900, {**RAY, **settings}) == alone
        assert call(ray_driver.scanned, logs, 900, {**RAY, **settings}, large=True) == alone


def same_repair(call: Driver, folder: Path) -> None:
    logs = some(FORMATS, 5)
    words = ["repair", *map(str, logs), "-t", TOKENIZER, "--unsafe", "--force"]
    runs = []
    for name, engine in (("local", ["--jobs", "1"]), ("ray", ["--engine", "ray"])):
        code, out, err = call(ray_driver.command, *words, "-o", str(folder / name), "-q", "-f", "json", *engine)
        report = json.loads(out.replace(str(folder / name), "OUT"))
        times = [part.pop("seconds") for part in report.values() if isinstance(part, dict) and "seconds" in part]
        files = {str(file.relative_to(folder / name)): file.read_bytes() for file in (folder / name).rglob("*.*")}
        assert len(files) == len(logs)
        runs.append((code, report, err, files, len(times)))
    assert runs[0] == runs[1]


def a_killed_worker(call: Driver, folder: Path) -> None:
    logs = list(map(str, some(FORMATS, 5)))
    alone = call(ray_driver.scanned, logs, None, WITH)
    noted = folder / "noted"
    after, printed = call(ray_driver.printed, ray_driver.scanned_by_a_lost_worker, logs, noted, RAY)
    assert noted.exists()
    assert after == alone
    assert printed == ""


def a_killed_node(call: Driver, folder: Path) -> None:
    logs = list(map(str, FORMATS))
    alone = call(ray_driver.scanned, logs, None, WITH)
    after, printed = call(ray_driver.printed, ray_driver.scanned_by_a_lost_node, logs, folder, RAY)
    assert (folder / "gone").exists()
    assert after == alone
    assert printed == ""


def another_version(call: Driver, folder: Path) -> None:
    message = call(ray_driver.with_version, "0.0.1", str(FORMATS[0]), RAY)
    assert message.startswith("Ray node ")
    assert "and this run is of 0.0.1.\nInstall the same version on all nodes." in message


def a_log_of_one_process(call: Driver, folder: Path) -> None:
    message = call(ray_driver.of_open_file, str(FORMATS[0]), RAY)
    assert message.startswith("/proc/self/fd/")
    assert "this log cannot be read on" in message


def a_tokenizer_of_one_process(call: Driver, folder: Path) -> None:
    message = call(ray_driver.of_lost_tokenizer, str(FORMATS[0]), folder / "tokenizer", TOKENIZER)
    assert message.startswith("Ray node ")
    assert str(folder / "tokenizer") in message


def same_findings_of_a_dataset(call: Driver, folder: Path) -> None:
    table = rollouts(40)
    log = folder / "log.parquet"
    pq.write_table(table, log)
    expected = sorted(
        (finding["row_id"], finding["code"], finding["message"]) for finding in audited([table], table)
    )
    assert len(expected) > 20
    for size in (3, 40):
        rows = call(ray_driver.dataset_audited, str(log), Settings(**WITH), "id", size)
        assert sorted((row["row_id"], row["code"], row["message"]) for row in rows) == expected
    fixed = call(ray_driver.dataset_repaired, str(log), Settings(**WITH), 7)
    again = RepairBatches(Settings(**WITH))(table).to_pylist()
    assert sorted(fixed, key=lambda row: row["id"]) == again


def the_example_of_the_guide(call: Driver, folder: Path) -> None:
    table = rollouts(20)
    pq.write_table(table, folder / "rollouts.parquet")
    shutil.copytree(TOKENIZER, folder / "models" / "policy")
    guide = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```py\n(.*?)```", guide, re.DOTALL)
    assert "'code': " in call(ray_driver.executed, example.replace("/data", str(folder)))
    repaired = pq.read_table(folder / "repaired")
    assert sorted(repaired["id"].to_pylist()) == table["id"].to_pylist()
    assert repaired.column_names == [*table.column_names, "tito_audit"]


CHECKS = (
    same_scan,
    same_joined_calls,
    same_repair,
    a_killed_worker,
    another_version,
    a_log_of_one_process,
    a_tokenizer_of_one_process,
    *((same_findings_of_a_dataset, the_example_of_the_guide, a_killed_node) if DEEP else ()),
)


def test_a_cluster_finds_and_writes_what_one_process_does(
    cluster: Driver, whole: list[Wire], tmp_path: Path
) -> None:
    written(tmp_path / WHOLE, whole)
    for check in CHECKS:  # one test: processes of pytest-xdist would start a cluster each
        folder = tmp_path / check.__name__
        folder.mkdir()
        check(cluster, folder)


deep = pytest.mark.skipif(not DEEP, reason="starts clusters of its own; in `make deep`")


@deep
@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "rollouts").is_dir(), reason="no rollouts beside the checkout")
@pytest.mark.parametrize("name", ["gemma-3", "qwen2.5-coder", "smollm2"])
def test_a_cluster_finds_in_real_rollouts_what_one_process_does(cluster: Driver, name: str) -> None:
    words = ["scan", str(SHARED / "rollouts" / name), "-t", str(SHARED / "tokenizers" / name)]
    alone, *others = cluster(
        ray_driver.reports, words, ["--jobs", "1"], ["--engine", "ray"], ["-j3", "--engine=ray"]
    )
    assert alone[1]["findings"]
    assert others == [alone, alone]


# Addresses


def refusal(address: str) -> str:
    with pytest.raises(SetupError) as caught, connect_to_cluster(address):
        pass
    return str(caught.value)


def test_an_address_where_no_cluster_answers_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    pytest.importorskip("ray")
    with socket.socket() as closed, ExitStack() as stack:
        closed.bind(("127.0.0.1", 0))
        server = stack.enter_context(
            http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
        )
        monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *arguments: None)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        started = time.monotonic()
        port = closed.getsockname()[1]
        address = f"127.0.0.1:{port}"
        assert f'Settings(address="{address}"): no Ray cluster answers there (Connection refused)' in refusal(
            address
        )
        assert "what listens there is not Ray" in refusal(f"127.0.0.1:{server.server_port}")
        assert "(not HOST:PORT)" in refusal("here")
        assert "no Ray cluster runs on this machine" in refusal("auto")
        assert "ray job submit" in refusal("ray://127.0.0.1:10001")
        noted = tmp_path / "ray" / "ray_current_cluster"
        noted.parent.mkdir()
        noted.write_text(f"127.0.0.1:{port}")
        assert "no Ray cluster runs on this machine" in refusal("auto")
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        code, out, err = run("scan", FORMATS[0], "--engine", "ray")
        assert time.monotonic() - started < 20
    assert (code, out) == (2, "")
    assert "no Ray cluster answers there" in err


def test_a_run_whose_own_ray_has_stopped_says_so_and_does_not_speak_of_memory() -> None:
    ray = pytest.importorskip("ray")
    call = _RayCall(tags=["logs/a.jsonl, rows before byte 9"])
    with pytest.raises(SetupError) as caught:
        _raise_lost(call, ray.exceptions.LocalRayletDiedError())
    assert str(caught.value).startswith(
        "logs/a.jsonl, rows before byte 9: Ray has stopped on the machine of this run"
    )
    assert "memory" not in str(caught.value)


def test_an_address_without_the_engine_is_refused() -> None:
    code, out, err = run("scan", FORMATS[0], "--address", "auto")
    assert (code, out) == (2, "")
    assert "--address auto: this is for --engine ray" in err


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, out, err = run("repair", FORMATS[0], "--dry-run", "--engine", "ray")
    assert (code, out) == (2, "")
    assert "pip install 'tito-audit[ray]'" in err


# Work in another process


def test_a_log_that_another_machine_sees_otherwise_is_refused(tmp_path: Path) -> None:
    rows = [{"token_ids": [1, 2], "loss_mask": [0, 1]}]
    log = written(tmp_path / "log.jsonl", rows * 3)
    packed = pickle.dumps(RowFlow([log], Settings()))
    pickle.loads(packed).check_same_size(log)
    written(log, rows * 4)
    pickle.loads(packed).check_same_size(log)  # it is being written
    written(log, rows)
    with pytest.raises(SetupError, match=r"this log has 43 bytes on .*, and 129 where this run was started"):
        pickle.loads(packed).check_same_size(log)
    log.unlink()
    with pytest.raises(SetupError, match=r"cannot be read on .* \(No such file or directory\)"):
        pickle.loads(packed).check_same_size(log)
    RowFlow([log], Settings()).check_same_size(log)


# Datasets


def rollouts(count: int) -> pa.Table:
    """Training rows with an id each, some of them wrong."""
    rows = [row for row in contents(FORMATS_OF["generic"]) if "token_ids" in row]
    columns = ("token_ids", "loss_mask", "logprobs")
    few = [{name: row[name] for name in columns if name in row} for row in rows]
    return pa.Table.from_pylist(
        [{"id": f"{number:03}", "kept": number, **few[number % len(few)]} for number in range(count)]
    )


def audited(batches: Sequence[pa.Table], head: pa.Table, id_column: str | None = "id") -> list[dict[str, Any]]:
    """The findings in some batches."""
    audits = AuditBatches(Settings(**WITH), head, id_column)
    return [row for batch in batches for row in audits(batch).to_pylist()]


def test_batches_hold_the_findings_of_a_scan_of_their_rows_however_they_are_cut() -> None:
    table = rollouts(30)
    scan = scan_rollouts(table, Settings(**WITH, join=False))
    expected = [
        (f"{result.place.row:03}", finding.code, finding.hit.message)
        for result in scan
        if not result.of_log
        for finding in result.findings
    ]
    assert expected
    for size in (1, 7, 30):
        cut = [table.slice(start, size) for start in range(0, 30, size)]
        rows = audited(cut, table)
        assert [(row["row_id"], row["code"], row["message"]) for row in rows] == expected
    schema = AuditBatches(Settings(**WITH), table)(table.slice(0, 0)).schema
    assert schema.names[0] == ROW_ID
    assert set(schema.names[1:]) == set(findings_table([]).schema.names) - {"file", "row"}


def test_a_row_without_an_id_is_named_by_what_it_holds() -> None:
    table = rollouts(12)
    rows = table.to_pylist()
    first = audited([table], table, None)
    moved = audited([table.slice(6), table.slice(0, 6)], table, None)
    assert sorted(row["row_id"] for row in first) == sorted(row["row_id"] for row in moved)
    assert {row["row_id"] for row in first} <= set(map(row_id, rows))
    assert len(set(map(row_id, rows))) == len(rows)
    assert {row["row_id"] for row in audited([table], table, "kept")} <= set(map(str, range(12)))


@deep
def test_tensors_of_ray_data_are_lists() -> None:
    data = pytest.importorskip("ray.data.extensions")
    table = rollouts(6)
    ids = data.ArrowTensorArray.from_numpy([np.array(row) for row in table["token_ids"].to_pylist()])
    number = table.column_names.index("token_ids")
    tensors = table.set_column(number, "token_ids", ids)
    assert isinstance(tensors.schema.field("token_ids").type, pa.BaseExtensionType)
    assert audited([tensors], tensors) == audited([table], table)


def test_a_batch_is_repaired_as_a_log_is_and_keeps_its_other_columns() -> None:
    table, settings = rollouts(30), Settings(**WITH)
    repairs = RepairBatches(settings)
    fixed = repairs(table)
    run = repair_rollouts(table, None, replace(settings, join=False), RepairSettings())
    assert fixed.equals(run.repaired)
    assert fixed["kept"].to_pylist() == list(range(30))
    assert 0 < fixed["tito_audit"].null_count < 30
    assert len(audited([fixed.drop_columns(["tito_audit"])], table)) < len(audited([table], table))
    clean = table.filter(fixed["tito_audit"].is_null()).slice(0, 1)
    for part in (clean, table.slice(0, 0)):
        assert repairs(part).schema.names == fixed.schema.names
    bare = RepairBatches(settings, RepairSettings(provenance=False))
    assert bare(table).schema == table.schema


def test_a_repair_of_batches_refuses_a_file_that_workers_would_share() -> None:
    with pytest.raises(SetupError, match="cannot share a quarantine file"):
        RepairBatches(Settings(), RepairSettings(quarantine="aside.jsonl"))


# Clusters that a run starts

SCAN = [sys.executable, "-m", "tito_audit", "scan"]


@pytest.fixture
def long(tmp_path: Path) -> Path:
    path = tmp_path / "long.jsonl"
    path.write_bytes(LONG_ROW * 3_000)
    return path


class OwnCluster:
    """A run that starts a cluster, whose processes and folder are told from those of other runs by a variable."""

    def __init__(self, log: Path, *words: str) -> None:
        self.variable = f"OWN_CLUSTER={uuid.uuid4()}"
        name, _, value = self.variable.partition("=")
        self.run = subprocess.Popen(
            [*SCAN, str(log), *words, "--engine", "ray", "--address", "local"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, name: value},
            text=True,
            start_new_session=True,
        )

    def processes(self, words: str) -> dict[int, str]:
        """Its processes whose command line has some words."""
        return processes(words, self.variable)

    @property
    def left(self) -> dict[int, str]:
        """Its processes that are still there, but for helpers of Ray, which take their time."""
        return {**self.processes("/tito-ray-"), **self.processes("ray::tito_audit_chunks")}

    @property
    def folder(self) -> Path:
        """The cluster's folder, once its processes are there."""
        lines = wait_for(lambda: self.processes("/tito-ray-"), 120)
        return Path(re.findall(r"/\S*?/tito-ray-\w+", next(iter(lines.values())))[0])


@deep
def test_a_run_starts_a_cluster_and_leaves_nothing_of_it() -> None:
    cluster = OwnCluster(FORMATS[0], "-f", "json", "-t", TOKENIZER)
    with cluster.run as run:
        folder = cluster.folder
        out, err = run.communicate(timeout=300)
    assert err == ""
    assert json.loads(out)["summary"]["rollouts"] == len(FORMATS[0].read_text().splitlines())
    assert wait_for(lambda: not cluster.left, 20), cluster.left
    assert not folder.exists()


@deep
@pytest.mark.parametrize(("ended_by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_run_that_is_ended_leaves_no_process(long: Path, ended_by: signal.Signals, code: int) -> None:
    cluster = OwnCluster(long)
    with cluster.run as run:
        folder = cluster.folder
        assert wait_for(lambda: cluster.processes("ray::tito_audit_chunks"), 120)
        run.send_signal(ended_by)
        out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (code, "")
    assert "Traceback" not in err
    assert wait_for(lambda: not cluster.left, 30), cluster.left
    assert folder.exists() == (code < 0)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_model_scores_without_a_cluster() -> None:
    from tito_audit.cli.repair import score_rollouts

    how = RepairSettings(strategies=("rescore",))
    with pytest.raises(SetupError, match=r"Settings\(engine=.ray.\): .*\n.*tito-audit rescore LOG"):
        score_rollouts(["log.jsonl"], Settings(engine="ray"), how, "hf=model", silent=True)
